"""The simulator: a whole cluster in one process, faults from a seed, and an oracle.

Layer: L5. Imports: none.

Chief, ps and worker tasks are the real ones, with their coordinator, links, checkpoints and
recovery; network, clock, randomness, deaths of processes and the disk are simulated, so a seed has
the same history each time. ``python -m psync.testing.simulation --help``; docs/testing.md.
"""
