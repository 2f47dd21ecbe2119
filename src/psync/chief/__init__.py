"""The coordinator's services: links, creation, gangs, consistent cuts, recovery, watchdog.

Knows ``client``, ``closures`` and ``checkpoints``. ``links`` brings the cluster up and keeps the
connections. ``declarations`` has variables before they are created, and creates them. ``gangs`` has
closures as they are sent, and ``strategy.run`` on all workers.
``recovery_rule`` decides what follows the loss of a ps (failover to its backup, or rollback to a
checkpoint), ``recovery`` performs it. ``consistent_cut`` takes one position on all ps tasks.
``watch`` has events and reports. Begin with ``recovery_rule``.
"""
