"""What the classes of ``psync.optimizers`` share: pushes, slots, bounds of staleness.

Begin with ``handles``.
"""
