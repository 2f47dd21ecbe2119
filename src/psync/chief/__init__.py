"""The coordinator's services: links, creation, consistent cuts, recovery, watchdog.

Knows ``client``, ``closures`` and ``checkpoints``. ``cluster_links`` holds the connections to all
tasks, ``attached_workers`` those to workers that take part. ``recovery`` decides what follows the
loss of a ps (``failover`` to its backup, or ``rollback`` to a checkpoint; ``recovery_state`` pauses
all else), ``consistent_cut`` takes one position on all ps tasks. Begin with ``recovery``.
"""
