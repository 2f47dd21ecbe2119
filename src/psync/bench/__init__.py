"""Benchmarks of ``psync bench``: clusters of real processes, and virtual time.

``sync_async`` compares synchronous with asynchronous training; the other modules are its parts.
"""
