"""TensorFlow's sharded variables, rule by rule, with numbers.

Who cuts variables, and into what, stands in ``test_partitioners`` and ``test_declarations``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, strategy_of, training
from psync.errors import (
    UsageError,
    ValueMismatchError,
)
from psync.numerics.casting import fitting

TEN = np.arange(20, dtype=np.float32).reshape(10, 2)  # on three ps tasks: 4, 3 and 3 rows
THIRTY = np.arange(30, dtype=np.float32)  # 10, 10 and 10


def declared(value: Any) -> Any:
    """A sharded variable named "v" of a program without a cluster."""
    with strategy_of(3, psync.FixedShardsPartitioner(3)).scope():
        return psync.Variable(value, name="v")


@contextlib.asynccontextmanager
async def sharded(value: Any, num_shards: int = 3, num_ps: int = 3) -> AsyncIterator[Any]:
    """A sharded variable named "v" on a running cluster."""
    partitioner = psync.FixedShardsPartitioner(num_shards)
    async with training(num_ps, partitioner=partitioner) as (strategy, _):
        with strategy.scope():
            variable = psync.Variable(value, name="v")
        yield variable


# --- construction ------------------------------------------------------------------------------


def test_a_sharded_variable_is_described_as_a_whole() -> None:
    v = declared(TEN)
    assert isinstance(v, psync.ShardedVariable)
    assert (v.name, v.shape, v.dtype, len(v)) == ("v", (10, 2), np.float32, 10)
    assert [part.shape for part in v.variables] == [(4, 2), (3, 2), (3, 2)]
    assert [part.name for part in v.variables] == ["v/part_0", "v/part_1", "v/part_2"]


# --- the whole value ---------------------------------------------------------------------------


async def test_whole_values_are_cut_along_axis_0_and_return_the_variable() -> None:
    async with sharded(np.zeros((5, 2), np.float32), 2, 2) as v:
        assert await v.assign(np.full((5, 2), 2)) is v
        assert await v.assign_add(TEN[:5]) is v
        assert await v.assign_sub(np.ones((5, 2))) is v
        np.testing.assert_array_equal(await v.read(), TEN[:5] + 1)
        np.testing.assert_array_equal(await v.variables[0].read(), TEN[:3] + 1)
        np.testing.assert_array_equal(await v.variables[1].read(), TEN[3:5] + 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TEN[:9], r"expected shape \(10, 2\), got \(9, 2\)"),
        (TEN.astype(complex), "expected dtype float32, got complex128"),
    ],
)
def test_a_value_of_another_shape_or_kind_is_an_error(value: Any, text: str) -> None:
    with pytest.raises(ValueMismatchError, match=text):
        fitting(value, declared(TEN).spec, 'assign to "v"', casting="same_kind")


def test_operators_are_those_of_the_value_once_it_is_awaited() -> None:
    v = declared(TEN)
    for use in (
        lambda: v + 1, lambda: 1 + v, lambda: v * v, lambda: v @ TEN.T, lambda: TEN * v,
        lambda: -v, lambda: v < 5, lambda: np.asarray(v), lambda: float(v), lambda: list(v),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="await its value first"):
            use()
    assert {v: 1}[v] == 1  # == and hash are those of an object
    assert v != TEN.tolist()


# --- indexing ----------------------------------------------------------------------------------


# --- rows that are gathered and scattered ------------------------------------------------------


async def test_rows_of_a_component_are_its_own() -> None:
    async with sharded(THIRTY) as v:
        part = v.variables[1]
        await part.scatter_add(([0, 9], [100, 100]))
        assert (await part[[0, 9]]).tolist() == [110, 119]
        assert (await v[[10, 19]]).tolist() == [110, 119]


# --- embedding_lookup --------------------------------------------------------------------------


# --- cached reads ------------------------------------------------------------------------------


async def test_reads_are_cached_in_a_scope_and_rows_are_not() -> None:
    partitioner = psync.FixedShardsPartitioner(3)
    async with training(3, partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros(6, np.float32))

        async def step() -> Any:
            with psync.cache_variable_reads():
                first = await v.read()
                await v.assign_add(np.ones(6))
                second, rows = await psync.pull(v), await v[:1]
                with pytest.raises(ValueError, match="cannot be nested"):
                    with psync.cache_variable_reads():
                        pass
            with psync.cache_variable_reads():
                fresh = await v.read()
            return [float(array[0]) for array in (first, second, rows, fresh)]

        assert await in_step(coordinator, step) == [0, 0, 1, 1]
