"""Chaos tests: a training of real processes under kills, and its oracle.

``python -m psync.testing.chaos --seed 7 --minutes 1 --mode async`` runs ``psync run`` on a program
that knows what it has done (``program``), kills, stops and cuts what it consists of (``killer``,
``psync.testing.chaos_proxy``, ``psync.testing.sabotage``), and compares what is left with what must
be there (``oracle``, ``replay``). See docs/explanation/testing.md.
"""
