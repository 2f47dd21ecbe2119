"""The handles of users: variables, strategy, coordinator, datasets, accumulators, optimizers.

Knows everything below. A handle keeps a declaration and finds the way to the ps tasks in the
running step, or in the program; it holds no values. Begin with ``variables``, then
``cluster_coordinator``.
"""
