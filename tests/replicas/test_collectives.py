"""What is made of the values of all replicas."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from local_training import at_once
from psync.errors import ReplicaValueError
from psync.numerics.replicas import ReduceOp
from psync.numerics.sums import Pieces
from psync.replicas import context


def test_values_are_reduced_at_any_depth():
    calls = [(ReduceOp.SUM, {"a": 1, "b": np.ones(2)}), (ReduceOp.SUM, {"a": 2, "b": np.ones(2)})]
    total = at_once(context.reduce_all(None, calls))
    assert total["a"] == 3
    assert total["b"].tolist() == [2, 2]
    means = [(ReduceOp.MEAN, 1.0), (ReduceOp.MEAN, 2.0)]
    assert at_once(context.reduce_all(None, means)) == 1.5


def test_values_are_gathered_in_the_order_of_the_replicas():
    calls = [(np.array([[1, 2]]), 0), (np.array([[3, 4], [5, 6]]), 0)]
    assert context.gather_all(None, calls).tolist() == [[1, 2], [3, 4], [5, 6]]


# What a merge function makes of the arguments of all replicas.


def test_the_first_replicas_function_gets_the_arguments_of_all():
    shared = object()

    def first(strategy, mine, everyones, *, also):
        assert strategy == "the strategy"
        return list(mine.values), everyones, list(also.values)

    def second(*args, **kwargs):
        raise AssertionError("it is called once")

    calls = [(first, (1, shared), {"also": "a"}), (second, (2, shared), {"also": "b"})]
    assert context.merge_all("the strategy", calls) == ([1, 2], shared, ["a", "b"])


def test_replicas_with_other_arguments_are_refused():
    def merge_fn(*args):
        raise AssertionError

    with pytest.raises(ReplicaValueError, match="do not agree"):
        context.merge_all(None, [(merge_fn, (1,), {}), (merge_fn, (1, 2), {})])


async def test_work_in_pieces_that_is_cancelled_ends_where_it_is() -> None:
    def endless() -> Pieces[None]:
        while True:
            yield

    task = asyncio.create_task(context.in_turns(endless()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
