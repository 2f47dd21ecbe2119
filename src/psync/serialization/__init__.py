"""Pickling of user code and values: functions, captures, arguments, exceptions, RemoteValue.

Knows ``wire`` and the states of closures. ``functions`` packs a step function once for all workers,
``captures`` checks what it refers to, ``failures`` carries an exception and its traceback back.
Begin with ``functions``.
"""
