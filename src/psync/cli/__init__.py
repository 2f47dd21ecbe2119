"""The command line: ``psync run``, ``task``, ``certs``, ``checkpoint``, ``bench``.

Knows everything. ``main`` has the commands, ``reports`` those that only print; what they need is
imported when they run.
"""
