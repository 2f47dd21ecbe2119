"""The simulator: a whole cluster in one process, faults from a seed, and an oracle.

Chief, ps and worker tasks are the real ones, with their coordinator, links, checkpoints and
recovery. Network, clock, randomness, disk and the deaths of processes are simulated, so a seed has
the same history each time, and a fault that is found once is found again.

Begin with docs/explanation/testing.md, and run one seed:
``python -m psync.testing.simulation --replay 17``.
Then read ``plan`` (what a seed does, as data), ``drawing`` (how it is drawn),
``run`` and ``world`` (how it happens), ``program`` and ``tables`` (what is trained, and which mark
each call leaves), ``journal`` (what the program was told) and ``oracle`` (what must hold of it).
"""
