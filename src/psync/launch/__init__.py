"""Task processes: running as a task, starting tasks on this machine or an engine's, ending them.

Knows how each task is run, not what it does. ``tasks`` has ``psync.run`` and ``psync.run_task``,
``processes`` starts tasks as processes and restarts them, ``cluster`` is what all clusters that a
program starts have in common, and ``local`` the one on this machine. ``engine_tasks`` has tasks in
processes of an engine such as Ray, and ``hosted_task`` runs each of them there. Begin with
``tasks``.
"""
