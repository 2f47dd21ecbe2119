"""Checkpoint files on disk: manifest, layout, writing, reading; complete or absent.

Knows ``store``; which objects of a program are saved is decided in ``training``. ``manifest`` says
what is in a checkpoint, ``layout`` where, ``writer`` and ``files`` put it there so that COMMIT
comes last. Begin with ``manifest``.
"""
