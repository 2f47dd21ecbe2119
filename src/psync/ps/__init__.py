"""Services of a ps task: updates, pulls, locks, accumulators, snapshots, backups.

Knows ``store``, ``net`` and ``client``. Each service answers the requests of one kind; ``update``
judges and applies one update, ``committer`` puts it into the log and answers once the backup has
it, ``backup_host`` keeps copies of other ps tasks. Begin with ``update``.
"""
