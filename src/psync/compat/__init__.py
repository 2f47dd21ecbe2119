"""TensorFlow 1's surface: training sessions, hooks, ``strategy.extended``, ``merge_call``.

A wing: it may import everything up to ``api``, and nothing there imports it. Its entries are where
TensorFlow has them, on a strategy, an optimizer or a replica context, and load the file that they
need; a ps loads the service of sessions with the first message of one. A program that uses none
of this never imports the package (``tests/compat/test_wing.py``).

Begin with ``training_sessions`` (a program that trains without a coordinator), then
``session_members`` (who takes part, as ps 0 decides it). Apart from these is ``extended``.
"""
