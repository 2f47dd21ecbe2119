"""Checkpoints of a program's objects, the ``fit`` loop, and evaluation.

Knows ``api``, and what that is made of. ``checkpoint`` saves and restores objects by
name and keeps the newest checkpoints, ``trainer`` is ``fit``. Begin with ``checkpoint``.
"""
