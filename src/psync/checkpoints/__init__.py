"""Checkpoint files on disk: manifest, layout, writing, reading; complete or absent.

Knows ``store``; which objects of a program are saved is decided in ``training``. ``files`` draws
the directory and writes it, COMMIT last; ``manifest`` says where each array lies and what it is
called. What of a ps is in its snapshot, and what is not, is the table on top of
``store.snapshot_state``. Begin with ``files``.
"""
