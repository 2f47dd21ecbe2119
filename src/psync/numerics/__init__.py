"""Pure array code: blocks of memory, sums, update rules of optimizers, formulas of metrics.

Knows numpy, errors and specs, nothing else of psync; no clock, no I/O. Every rule writes into
memory that it was given. Begin with ``update_rule``, then ``blocks``.
"""
