"""Arithmetic of psync, pure: memory of shards, update rules, sums, rows, replicas, metrics."""
