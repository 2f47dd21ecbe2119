"""The base of ``psync.optimizers``: the handle, pushes, slots, staleness bounds.

Begin with ``handles``.
"""
