"""The services of a ps task: updates, pulls, locks, accumulators, snapshots, backups.

Knows ``store``, ``net`` and ``client``. Each service answers the requests of one kind; ``update``
is one decoded update, ``updates`` judges and applies it, ``committer`` puts it into the log and
releases the answer once the backup has it, ``backup_host`` keeps backups of other ps tasks.

A service with state serves one coordinator and timeline; the next one gets new services, and what
was begun for an earlier one ends where it began. Begin with ``updates``.
"""
