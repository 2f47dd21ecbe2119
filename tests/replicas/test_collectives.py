"""What is made of the values of all replicas."""

from __future__ import annotations

import numpy as np

from local_training import at_once
from psync.numerics.replicas import ReduceOp
from psync.replicas import collectives


def test_values_are_reduced_at_any_depth():
    calls = [(ReduceOp.SUM, {"a": 1, "b": np.ones(2)}), (ReduceOp.SUM, {"a": 2, "b": np.ones(2)})]
    total = at_once(collectives.reduce(None, calls))
    assert total["a"] == 3
    assert total["b"].tolist() == [2, 2]
    means = [(ReduceOp.MEAN, 1.0), (ReduceOp.MEAN, 2.0)]
    assert at_once(collectives.reduce(None, means)) == 1.5


def test_values_are_gathered_in_the_order_of_the_replicas():
    calls = [(np.array([[1, 2]]), 0), (np.array([[3, 4], [5, 6]]), 0)]
    assert collectives.gather(None, calls).tolist() == [[1, 2], [3, 4], [5, 6]]
