"""Scheduling rules of the coordinator: the closure queue, dispatch to workers, membership.

Pure: events in, actions out, time as an argument. ``queue`` is the whole: ``dispatcher`` chooses
the closure that a worker gets next, ``membership`` decides which tasks are alive, and
what ps 0 has to know of all that, ``scaling`` how many workers there shall be; ``gang`` runs one
step on all workers. Begin with ``queue``; which closure a worker gets next, and which worker,
is ``dispatcher.Dispatcher.decide``.
"""
