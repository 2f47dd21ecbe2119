"""Backups of ps tasks: made, fed with the log of their primary, compared with it, promoted.

``primary`` is a primary's side: it knows what a ps serves. ``host`` is that of the process in which
the backup is: a ps task like any other, whose executor has a log for its input. ``pairing`` says
which two processes may be a pair, by the fingerprints of their arithmetic, and ``locate_ps`` where
each ps is served, from what the next coordinator is told of all processes.

Begin with ``host``, whose table has the states of a backup.
"""
