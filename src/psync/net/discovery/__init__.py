"""Finding the cluster from a process's surroundings: variables of launchers and schedulers.

``default`` is the table that ``psync.run(main)`` and ``ParameterServerStrategy()`` ask when no
resolver is given; the others are resolvers of one scheduler each. Begin with ``default``.
"""
