"""Other libraries and other ways to start tasks: models, engines, ssh hosts, schedulers.

Nothing imports a module of this package unless a program or a command asks for it: ``from
psync.integrations.torch import PSModule``. Modules of a library import it; it is an extra of psync.
Models of all libraries share ``served``, which knows none of them: read it first. Ray and Dask
share ``engines``.
"""
