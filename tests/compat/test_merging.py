"""What a merge function makes of the arguments of all replicas."""

from __future__ import annotations

import pytest

from psync.compat.merging import merge
from psync.errors import ReplicaValueError


def test_the_first_replicas_function_gets_the_arguments_of_all():
    shared = object()

    def first(strategy, mine, everyones, *, also):
        assert strategy == "the strategy"
        return list(mine.values), everyones, list(also.values)

    def second(*args, **kwargs):
        raise AssertionError("it is called once")

    calls = [(first, (1, shared), {"also": "a"}), (second, (2, shared), {"also": "b"})]
    assert merge("the strategy", calls) == ([1, 2], shared, ["a", "b"])


def test_one_replicas_arguments_are_its_own():
    assert merge(None, [(lambda _, value: value, (3,), {})]) == 3


def test_a_merge_function_may_be_a_coroutine_function():
    async def later(strategy):
        return 1

    made = merge(None, [(later, (), {})])
    made.close()


def test_replicas_with_other_arguments_are_refused():
    def merge_fn(*args):
        raise AssertionError

    with pytest.raises(ReplicaValueError, match="do not agree"):
        merge(None, [(merge_fn, (1,), {}), (merge_fn, (1, 2), {})])
