"""Task processes: running as a task, starting tasks on this machine, ending them.

Knows how each task is run, not what it does. ``tasks`` has ``psync.run`` and ``psync.run_task``,
``joining`` workers that come later, ``process`` the loop and signals of a process, ``output`` what
it writes, ``processes`` the children of a launcher, ``gpus`` what they see of these, and
``cluster`` the clusters that a program starts. Begin with ``tasks``.
"""
