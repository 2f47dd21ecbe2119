from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, strategy_of, training
from psync.errors import PartitionError, UsageError


def test_beside_a_variable_is_one_shard_on_its_ps_and_takes_nobodys_turn() -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        a = psync.Variable(0.0)
        b = psync.Variable(0.0)
        with strategy.colocate_vars_with(b):
            beside = psync.Variable(np.zeros((4, 2), np.int8))
        c = psync.Variable(0.0)
    assert isinstance(beside, psync.Variable)
    assert [v.spec.shards[0].ps for v in (a, b, beside, c)] == [0, 1, 1, 2]
    assert beside.trainable


def test_beside_several_shards_each_shard_lies_beside_one_with_a_value_of_its_own() -> None:
    strategy = strategy_of(3, psync.FixedShardsPartitioner(3))
    with strategy.scope():
        first = psync.Variable(0.0)
        table = psync.Variable(np.zeros((7, 2), np.float32))
        with strategy.colocate_vars_with(table):
            counts = psync.Variable(np.ones((7, 2)), dtype="int32", trainable=False)
        following = psync.Variable(0.0)
    assert counts.dtype == np.int32
    assert not counts.trainable
    assert [part.shape for part in counts.variables] == [(3, 2), (2, 2), (2, 2)]
    assert counts.device == table.device
    assert first.device != table.device[0]
    assert following.spec.shards[0].ps == 1


def test_beside_one_shard_of_several_any_shape_may_lie() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        table = psync.Variable(np.zeros((4, 2)))
        with strategy.colocate_vars_with(table.variables[1]):
            v = psync.Variable(np.zeros(9))
    assert v.device == table.device[1]


def test_beside_several_shards_another_shape_is_an_error_that_leaves_nothing_behind() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        table = psync.Variable(np.zeros((4, 2)), name="table")
        with strategy.colocate_vars_with(table), pytest.raises(PartitionError) as caught:
            psync.Variable(np.zeros(4), name="v")
        v = psync.Variable(0.0, name="v")
    assert 'expected shape (4, 2), as "table" has, with whose 2 shards' in str(caught.value)
    assert "colocate_vars_with(table.variables[0])" in str(caught.value)
    assert (v.name, v.spec.shards[0].ps) == ("v", 0)


def test_the_innermost_of_several_places_counts() -> None:
    strategy = strategy_of(3)
    with strategy.scope(), strategy.pinned(2):
        pinned = psync.Variable(0.0)
        with strategy.pinned(1):
            anchor = psync.Variable(0.0)
        with strategy.colocate_vars_with(anchor):
            beside = psync.Variable(0.0)
            with strategy.pinned(0):
                inner = psync.Variable(0.0)
        again = psync.Variable(0.0)
    places = [v.spec.shards[0].ps for v in (pinned, anchor, beside, inner, again)]
    assert places == [2, 1, 1, 0, 2]


def test_a_place_of_one_strategy_is_none_of_another() -> None:
    one, other = strategy_of(3), strategy_of(3)
    with one.pinned(2), other.scope():
        assert psync.Variable(0.0).spec.shards[0].ps == 0


def test_outside_of_the_scope_or_beside_what_is_not_of_it_is_an_error() -> None:
    strategy, other = strategy_of(), strategy_of()
    with strategy.scope():
        v = psync.Variable(0.0)
    with pytest.raises(UsageError, match="the strategy's scope is not open here"):
        strategy.colocate_vars_with(v)
    with other.scope():
        with pytest.raises(UsageError, match=r'variable "Variable" belongs to another strategy'):
            other.colocate_vars_with(v)
        with pytest.raises(UsageError, match="expected a variable, got str"):
            other.colocate_vars_with("v")  # type: ignore[arg-type]


async def test_values_are_where_they_are_said_to_be() -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        with strategy.scope():
            table = psync.Variable(np.arange(6).reshape(3, 2))
            with strategy.colocate_vars_with(table):
                counts = psync.Variable(np.full((3, 2), 7, np.int32))
            with strategy.pinned("/job:ps/task:1"):
                v = psync.Variable(np.ones(3, np.float32))

        async def step() -> object:
            return [value.tolist() for value in await psync.pull((table, counts, v))]

        assert await in_step(coordinator, step) == [
            [[0, 1], [2, 3], [4, 5]], [[7, 7]] * 3, [1, 1, 1],
        ]  # fmt: skip
        held = [row.ps for row in strategy.placement().rows]
        assert held == [0, 1, 0, 1, 1]
