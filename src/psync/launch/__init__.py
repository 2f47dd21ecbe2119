"""Task processes: running as a task, starting tasks on this machine, ending them.

Knows how each task is run, not what it does. ``tasks`` has ``psync.run``, ``psync.run_task`` and
workers that join later, ``process`` the loop, signals and output of a process, ``processes`` the
children of a launcher and what GPUs they see, ``plugins`` what all of them load, and ``cluster``
the clusters that a program starts. Begin with ``tasks``.
"""
