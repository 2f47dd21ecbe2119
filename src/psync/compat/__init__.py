"""TensorFlow 1's training sessions: programs that train without a coordinator.

A wing: it may import everything up to ``api``, and nothing there imports it, except that a ps loads
``board`` with the first message of a session. A program that uses no session never imports the
package (``tests/compat/test_wing.py``).

Begin with ``training_sessions``.
"""
