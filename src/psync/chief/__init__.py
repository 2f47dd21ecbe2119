"""The coordinator's hands: links, creation, consistent cuts, recovery, the watchdog.

Knows ``client``, ``closures`` and ``checkpoints``. ``cluster_links`` holds the connections to all
tasks, ``recovery`` decides what follows the loss of a ps (``failover`` to its backup, or
``rollback`` to a checkpoint), ``consistent_cut`` stops updates at one position everywhere. Begin
with ``recovery``.
"""
