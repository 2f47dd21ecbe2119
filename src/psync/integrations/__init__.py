"""Models of other libraries on ps tasks, as they are.

Each module imports its library, an extra of psync, and nothing imports a module of this package
unless a program asks for it: ``from psync.integrations.torch import PSModule``. What they
share stands in ``served``, which knows none of these libraries: read it first.
"""
