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
from memory_cluster import TWO_SHARDS, cluster_of
from psync.errors import (
    IndexTypeError,
    IndexValueError,
    ParameterServerLost,
    UsageError,
    ValueMismatchError,
    VariableIndexError,
)
from psync.numerics.casting import fitting
from psync.numerics.embedding import SparseIds
from psync.numerics.indexing import row_numbers, select

TEN = np.arange(20, dtype=np.float32).reshape(10, 2)  # on three ps tasks: 4, 3 and 3 rows
THIRTY = np.arange(30, dtype=np.float32)  # 10, 10 and 10


def declared(value: Any) -> Any:
    """A sharded variable named "v" of a program without a cluster."""
    with strategy_of(3, psync.FixedShardsPartitioner(3)).scope():
        return psync.Variable(value, name="v")


def indexed(value: np.ndarray, index: Any) -> Any:
    """What an index gives of a variable with this value: of the rows that it asks for."""
    selection = select(index, value.shape, "v")
    rows = slice(None) if selection.rows is None else np.asarray(selection.rows, np.int64)
    return selection.of(value[rows])


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


@pytest.mark.virtual_time
async def test_a_lost_ps_is_an_error_and_what_was_written_stays() -> None:
    async with (
        cluster_of(2, 1) as cluster,
        psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator,
    ):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
        await v.read()
        first, _ = v.variables
        await cluster.stop("ps-1")
        with pytest.raises(ParameterServerLost):
            await v.assign(np.ones(4))
        assert (await coordinator.strategy._runtime.ps.read_rows(
            first.spec, np.arange(2)
        )).tolist() == [1, 1]  # fmt: skip
        with pytest.raises(ParameterServerLost):
            await v.assign(np.ones(4), atomic=True)


# --- indexing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        0, 3, 4, 9, -1, -10,
        slice(None), slice(2, 8), slice(3, 5), slice(4, 4), slice(None, None, 3),
        slice(None, None, -1), slice(8, 1, -2), slice(-12, None, 3), slice(11, None, -3),
        slice(20, 30), slice(5, 2),
        ..., None, (None, 2), (..., 0), (slice(2, 8), 1), (slice(None, None, 2), slice(0, 1)),
        (slice(1, 9), None, slice(None)), (3, 1), (-1, ...),
        np.arange(10) % 3 == 0, [True] * 5 + [False] * 5, TEN > 7, np.zeros(10, bool),
        [9, 0, 4, 4], [[1, 2], [8, 9]], ([9, 0], [0, 1]), np.array([], int),
    ],
    ids=repr,
)  # fmt: skip
def test_an_index_is_numpys(index: Any) -> None:
    got, expected = indexed(TEN, index), TEN[index]
    assert (type(got), got.shape, got.dtype) == (type(expected), expected.shape, expected.dtype)
    np.testing.assert_array_equal(got, expected)


def test_where_tensorflow_is_off_the_rows_are_numpys() -> None:
    v = np.arange(10)
    assert indexed(v, np.s_[-12::3]).tolist() == [0, 3, 6, 9]  # there 1, 4, 7
    assert indexed(v, np.s_[11::-3]).tolist() == [9, 6, 3, 0]  # there 8, 5, 2
    assert indexed(v, np.s_[..., 0]) == 0  # there an error
    assert indexed(v, [True, False] * 5).tolist() == [0, 2, 4, 6, 8]  # there a tuple


def test_an_empty_result_keeps_the_trailing_axes() -> None:
    assert indexed(TEN, np.s_[5:5]).shape == (0, 2)
    assert indexed(TEN, np.zeros(10, bool)).shape == (0, 2)


def test_indices_that_are_none_are_errors() -> None:
    v = declared(TEN)
    for index, kind, text in (
        (10, IndexError, "out of bounds"),
        (-11, IndexError, "out of bounds"),
        ((0, 2), IndexError, "out of bounds"),
        ((0, 0, 0), IndexError, "too many indices"),
        (np.ones(3, bool), IndexError, "expected a mask of shape"),
        (slice(None, None, 0), ValueError, "step of a slice cannot be 0"),
        (v, TypeError, "not allowed"),
        (slice(v, None), TypeError, "not allowed"),
        (1.0, IndexTypeError, "expected integers"),
    ):
        with pytest.raises(kind, match=text):
            v[index]
    with pytest.raises(UsageError, match="scatter_update"):
        v[2:4] = 0


# --- rows that are gathered and scattered ------------------------------------------------------


def test_indices_must_have_one_axis_and_be_in_range() -> None:
    for wrong in ([[1]], 1):
        with pytest.raises(IndexValueError, match=r"expected indices of shape \(n,\)"):
            row_numbers(wrong, 30, "sparse_read", ndim=1)
    for outside in (-1, 30):
        with pytest.raises(VariableIndexError, match="out of bounds, expected 0 to 29"):
            row_numbers([outside], 30, "scatter_add", ndim=1)


async def test_rows_of_a_component_are_its_own() -> None:
    async with sharded(THIRTY) as v:
        part = v.variables[1]
        await part.scatter_add(([0, 9], [100, 100]))
        assert (await part[[0, 9]]).tolist() == [110, 119]
        assert (await v[[10, 19]]).tolist() == [110, 119]


# --- embedding_lookup --------------------------------------------------------------------------


SP_IDS = ([[0, 0], [0, 1], [1, 0], [2, 3]], [1, 3, 0, 1], (3, 4))
SP_WEIGHTS = ([[0, 0], [0, 1], [1, 0], [2, 3]], [2.0, 0.5, 1.0, 3.0], (3, 4))


@pytest.mark.parametrize(
    ("combiner", "weights", "expected"),
    [
        ("mean", SP_WEIGHTS, [(10 * 2 + 30 * 0.5) / 2.5, 0, 10]),
        ("mean", None, [20, 0, 10]),
        ("sum", SP_WEIGHTS, [10 * 2 + 30 * 0.5, 0, 30]),
        ("sum", None, [40, 0, 10]),
        ("sqrtn", SP_WEIGHTS, [35 / np.sqrt(4.25), 0, 10]),
        ("sqrtn", None, [40 / np.sqrt(2), 0, 10]),
    ],
)
def test_sparse_lookups_combine_rows(combiner: str, weights: Any, expected: list[float]) -> None:
    given = SparseIds.of(SP_IDS, weights, "lookup")
    table = np.arange(0, 100, 10, dtype=np.float32)
    rows = given.combined(table, given.ids, combiner, "lookup")
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


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
