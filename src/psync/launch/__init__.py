"""Task processes: running as a task, starting tasks on this machine, ending them.

Knows how each task is run, not what it does. ``tasks`` has ``psync.run`` and ``psync.serve``,
``processes`` starts tasks as processes and restarts them, ``local`` is a cluster on this machine.
Begin with ``tasks``.
"""
