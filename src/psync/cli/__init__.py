"""The command line: ``psync run``, ``task``, ``certs``, ``checkpoint``, ``bench``.

Knows everything. ``main`` has the parsers; each command is imported when it is asked for.
"""
