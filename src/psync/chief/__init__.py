"""The coordinator's services: links, creation, consistent cuts, recovery, watchdog.

Knows ``client``, ``closures`` and ``checkpoints``. ``cluster_links`` holds the connections to all
tasks, ``recovery`` decides what follows the loss of a ps (``failover`` to its backup, or
``rollback`` to a checkpoint), ``consistent_cut`` takes one position on all ps tasks. Begin with
``recovery``.
"""
