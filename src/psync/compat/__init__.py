"""TensorFlow 1's surface: training sessions, hooks, ``strategy.extended``, ``merge_call``.

A wing: it may know everything up to ``api``, and nothing there knows it. What a program says first
of it is still found where TensorFlow has it, on a strategy, an optimizer or a replica context,
and loads the file that it needs; ps tasks load theirs with the first message of a session. A
program that uses none of it never imports this package.

Begin with ``training_sessions`` (a program that trains without a coordinator), then
``session_members`` (who takes part, as ps 0 decides it). Apart from these is ``extended``.
"""
