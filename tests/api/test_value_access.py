"""Whole values: read and assigned, as one if asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, declared, strategy_of, training, training_of
from psync.errors import ValueMismatchError

two_shards = psync.FixedShardsPartitioner(2)


async def test_an_atomic_assign_sets_all_shards_and_returns_the_variable() -> None:
    async with training_of(2, 1, two_shards, v=np.zeros(4, np.float32), scalar=0.0) as (
        _,
        v,
        scalar,
    ):
        assert await v.assign([1, 2, 3, 4], atomic=True) is v
        assert (await v.read(consistent=True)).tolist() == [1, 2, 3, 4]
        await scalar.assign(5, atomic=True)
        assert await scalar.read(consistent=True) == 5
        # A read has the names of TensorFlow, too.
        assert (await v.value()).tolist() == (await v.read_value()).tolist() == [1, 2, 3, 4]


async def test_steps_assign_and_read_as_one() -> None:
    async with training_of(2, 2, two_shards, v=np.zeros(4, np.float32)) as (coordinator, v):

        async def step(number: int) -> list[float]:
            await v.assign(np.full(4, number, np.float32), atomic=True)
            (value,) = await psync.pull([v], consistent=True)
            return value.tolist()

        values = [coordinator.schedule(step, args=(number,)) for number in range(20)]
        await coordinator.join()
        for value in await coordinator.fetch(values):
            assert len(set(value)) == 1


async def test_a_consistent_pull_fills_what_it_is_given() -> None:
    async with training_of(2, 1, two_shards, v=[1.0, 2.0], w=[3.0, 4.0]) as (_, v, w):
        out = {"v": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
        assert await psync.pull({"v": v, "w": w}, out=out, consistent=True) is not None
        assert out["v"].tolist() == [1, 2]
        assert out["w"].tolist() == [3, 4]
        mine = await v.read(copy=True, consistent=True)
        mine[:] = 0
        assert (await v.read()).tolist() == [1, 2]


def test_a_value_that_does_not_fit_locks_nothing() -> None:
    v = declared(2, two_shards, v=[1.0, 2.0])
    with pytest.raises(ValueMismatchError, match=r'assign to "v": expected shape \(2,\)'):
        at_once(v.assign([1, 2, 3], atomic=True))


def test_what_the_dtype_cannot_hold_is_refused() -> None:
    with strategy_of().scope():
        small = psync.Variable([100], dtype="int8", name="small")
        half = psync.Variable([60000.0], dtype="float16", name="half")
    for variable, operand in ((small, np.array([300])), (half, np.array([1e300]))):
        rows = [0], operand
        for refused in (
            variable.assign(operand), variable.assign(operand, atomic=True),
            variable.assign_add(operand), variable.assign_sub(operand),
            variable.scatter_update(rows), variable.scatter_add(rows),
            variable.scatter_sub(rows), variable.scatter_mul(rows),
            variable.scatter_min(rows), variable.scatter_max(rows),
        ):  # fmt: skip
            with pytest.raises(ValueMismatchError, match=r"got (300|1e\+300)"):
                at_once(refused)


async def test_overflow_of_a_result_is_numpys() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            small = psync.Variable([100], dtype="int8", name="small")
            half = psync.Variable([60000.0], dtype="float16", name="half")
        await small.assign_add([100])
        await half.assign_add([60000])
        assert (await psync.pull([small, half])) == [[-56], [np.inf]]


async def test_many_at_once_all_end() -> None:
    async with training_of(2, 1, two_shards, v=np.zeros(4, np.float32)) as (_, v):
        calls: list[Any] = [v.assign(np.full(4, 100.0 * n), atomic=True) for n in range(10)]
        calls += [v.assign_add(np.ones(4)) for _ in range(10)]
        calls += [v.read(consistent=True) for _ in range(10)]
        await asyncio.gather(*calls)
        value = await v.read(consistent=True)
        # What is only added may come before an atomic assign on one ps and after it on another;
        # and whose assign is the last nobody has promised.
        assert len(set((value // 100).tolist())) == 1
        assert (value % 100).max() <= 10
        await v.assign(np.zeros(4), atomic=True)
        assert (await v.read()).tolist() == [0] * 4
