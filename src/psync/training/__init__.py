"""Checkpoints of a program's objects, the ``fit`` loop, and evaluation.

Knows ``api`` alone of what the cluster is made of. ``checkpoint`` saves and restores objects by
name and keeps the newest checkpoints, ``trainer`` is ``fit``. Begin with ``checkpoint``.
"""
