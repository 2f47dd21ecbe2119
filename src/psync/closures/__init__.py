"""What becomes of each scheduled closure, and which workers are alive: the coordinator's rules.

Pure: events in, actions out, time as an argument. ``queue`` is the whole: it asks ``dispatcher``
which closure a worker gets next, ``membership`` who is alive, ``gang`` what happens to steps that
run on all workers. Begin with ``queue``.
"""
