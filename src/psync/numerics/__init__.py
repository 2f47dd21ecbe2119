"""Arithmetic of psync, pure: memory of shards, update rules, sums, rows, replicas, metrics.

To add an update rule, see ``rules``. Begin with ``optimizers``.
"""
