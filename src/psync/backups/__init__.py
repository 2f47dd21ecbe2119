"""Backups of ps tasks: made, fed with the log of their primary, compared with it, promoted.

Knows ``ps`` and what that knows. ``service`` and ``sender`` are a primary's side; ``host`` is that
of the process in which the backup is: a ps task like any other, whose executor has a log for its
input. ``pairing`` says which two processes may be a pair, by the ``fingerprint`` of their
arithmetic; ``accumulators`` what no snapshot has, ``served`` what the next coordinator is told of
a process, and ``locate_ps`` what follows from all that it is told.

Begin with ``host``, whose table has the states of a backup.
"""
