"""Pickling of user code and values: functions, captures, arguments, exceptions, RemoteValue.

Knows ``wire`` and the states of closures. ``functions`` packs a step function once for all workers,
``captures`` checks what it refers to, ``payloads`` has the pickles, also of exceptions with their
tracebacks. Begin with ``functions``.
"""
