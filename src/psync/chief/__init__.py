"""The coordinator's services: links, creation, consistent cuts, recovery, watchdog.

Knows ``client``, ``closures`` and ``checkpoints``. ``cluster_links`` brings the cluster up;
``ps_links`` and ``worker_links`` keep the connections, ``attached_workers`` is the way to workers
that take part. ``recovery_rule`` decides what follows the loss of a ps (failover to its backup, or
rollback to a checkpoint), ``recovery`` performs it, with ``backups`` and ``rollback``.
``consistent_cut`` takes one position on all ps tasks. Begin with ``recovery_rule``.
"""
