"""TensorFlow's sharded variables, rule by rule, with numbers.

Who cuts variables, and into what, stands in ``test_partitioners`` and ``test_declarations``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step, training
from memory_cluster import TWO_SHARDS, cluster_of
from psync.errors import (
    ConfigurationError,
    GradientError,
    IndexTypeError,
    IndexValueError,
    ParameterServerLost,
    PartitionError,
    UsageError,
    VariableIndexError,
)

TEN = np.arange(20, dtype=np.float32).reshape(10, 2)  # on three ps tasks: 4, 3 and 3 rows
THIRTY = np.arange(30, dtype=np.float32)  # 10, 10 and 10


@contextlib.asynccontextmanager
async def sharded(value: Any, num_shards: int = 3, num_ps: int = 3) -> AsyncIterator[Any]:
    """A sharded variable named "v" on a running cluster."""
    partitioner = psync.FixedShardsPartitioner(num_shards)
    async with training(num_ps, partitioner=partitioner) as (strategy, _):
        with strategy.scope():
            variable = psync.Variable(value, name="v")
        yield variable


# --- construction ------------------------------------------------------------------------------


async def test_a_sharded_variable_is_described_as_a_whole() -> None:
    async with sharded(TEN) as v:
        assert isinstance(v, psync.ShardedVariable)
        assert (v.name, v.shape, v.dtype, len(v)) == ("v", (10, 2), np.float32, 10)
        assert [part.shape for part in v.variables] == [(4, 2), (3, 2), (3, 2)]
        assert [part.name for part in v.variables] == ["v/part_0", "v/part_1", "v/part_2"]
        for part, rows in zip(v.variables, (TEN[:4], TEN[4:7], TEN[7:]), strict=True):
            np.testing.assert_array_equal(await part.read(), rows)


async def test_shards_are_cut_div_wise() -> None:
    for rows, shards, sizes in ((13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (5, 2, [3, 2])):
        async with sharded(np.arange(rows, dtype=np.float32), shards, 2) as v:
            assert [len(part) for part in v.variables] == sizes
            assert (await v.read()).tolist() == list(range(rows))


# --- the whole value ---------------------------------------------------------------------------


async def test_whole_values_are_cut_along_axis_0_and_return_the_variable() -> None:
    async with sharded(np.zeros((5, 2), np.float32), 2, 2) as v:
        assert await v.assign(np.full((5, 2), 2)) is v
        assert await v.assign_add(TEN[:5]) is v
        assert await v.assign_sub(np.ones((5, 2))) is v
        np.testing.assert_array_equal(await v.read(), TEN[:5] + 1)
        np.testing.assert_array_equal(await v.variables[0].read(), TEN[:3] + 1)
        np.testing.assert_array_equal(await v.variables[1].read(), TEN[3:5] + 1)


async def test_a_value_of_another_shape_or_kind_is_an_error() -> None:
    async with sharded(TEN) as v:
        with pytest.raises(GradientError, match=r"expected shape \(10, 2\), got \(9, 2\)"):
            await v.assign(TEN[:9])
        with pytest.raises(GradientError, match="expected dtype float32, got complex128"):
            await v.assign(TEN.astype(complex))
        np.testing.assert_array_equal(await v.read(), TEN)


async def test_operators_are_those_of_the_value_once_it_is_awaited() -> None:
    async with sharded(TEN) as v:
        np.testing.assert_array_equal((await v.read()) * 2 + 1, TEN * 2 + 1)
        for use in (
            lambda: v + 1, lambda: 1 + v, lambda: v * v, lambda: v @ TEN.T, lambda: TEN * v,
            lambda: -v, lambda: v < 5, lambda: np.asarray(v), lambda: float(v), lambda: list(v),
        ):  # fmt: skip
            with pytest.raises(UsageError, match="await its value first"):
                use()
        assert {v: 1}[v] == 1  # == and hash are those of an object
        assert v != TEN.tolist()


async def test_without_a_lock_shards_change_one_after_the_other() -> None:
    async with sharded(THIRTY) as v:
        values = await asyncio.gather(
            *(v.assign(np.full(30, number)) for number in range(5)), v.read()
        )
        assert values[-1].shape == (30,)  # whatever mixture it is
        await v.assign(np.full(30, 9), atomic=True)
        assert len(np.unique(await v.read(consistent=True))) == 1


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
        assert (await coordinator.strategy.runtime.ps.read_rows(
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
async def test_an_index_is_numpys(index: Any) -> None:
    async with sharded(TEN) as v:
        got, expected = await v[index], TEN[index]
        assert (type(got), got.shape, got.dtype) == (type(expected), expected.shape, expected.dtype)
        np.testing.assert_array_equal(got, expected)


async def test_where_tensorflow_is_off_the_rows_are_numpys() -> None:
    async with sharded(np.arange(10)) as v:
        assert (await v[-12::3]).tolist() == [0, 3, 6, 9]  # there 1, 4, 7
        assert (await v[11::-3]).tolist() == [9, 6, 3, 0]  # there 8, 5, 2
        assert await v[..., 0] == 0  # there an error
        assert (await v[[True, False] * 5]).tolist() == [0, 2, 4, 6, 8]  # there a tuple


async def test_an_empty_result_keeps_the_trailing_axes() -> None:
    async with sharded(TEN) as v:
        assert (await v[5:5]).shape == (0, 2)
        assert (await v[np.zeros(10, bool)]).shape == (0, 2)


async def test_indices_that_are_none_are_errors() -> None:
    async with sharded(TEN) as v:
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
                await v[index]
        with pytest.raises(UsageError, match="scatter_update"):
            v[2:4] = 0


# --- rows that are gathered and scattered ------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("scatter_add", [0 + 1, 1, 2, 3, 4, 5 + 2, 6, 7, 8, 9 + 3]),
        ("scatter_sub", [0 - 1, 1, 2, 3, 4, 5 - 2, 6, 7, 8, 9 - 3]),
        ("scatter_mul", [0 * 1, 1, 2, 3, 4, 5 * 2, 6, 7, 8, 9 * 3]),
        ("scatter_div", [0 / 1, 1, 2, 3, 4, 5 / 2, 6, 7, 8, 9 / 3]),
        ("scatter_min", [0, 1, 2, 3, 4, 2, 6, 7, 8, 3]),
        ("scatter_max", [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("scatter_update", [1, 1, 2, 3, 4, 2, 6, 7, 8, 3]),
        ("batch_scatter_update", [1, 1, 2, 3, 4, 2, 6, 7, 8, 3]),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 3])
async def test_scattering(method: str, expected: list[float], num_shards: int) -> None:
    async with sharded(np.arange(10, dtype=np.float32), num_shards) as v:
        delta = psync.IndexedSlices(np.array([2, 1, 3], np.float32), [5, 0, 9], (10,))
        assert await getattr(v, method)(delta) is v
        assert (await v.read()).tolist() == expected


async def test_duplicates_accumulate_and_the_last_assignment_wins() -> None:
    async with sharded(np.ones(10, np.float32)) as v:
        twice = ([4, 4, 4], [2, 3, 5])
        await v.scatter_add(twice)
        assert await v[4] == 11
        await v.scatter_mul(twice)
        assert await v[4] == 330
        await v.scatter_update(twice)
        assert await v[4] == 5
        await v.scatter_max(twice)
        await v.scatter_min(twice)
        assert await v[4] == 2
        assert (await v.read()).sum() == 9 + 2


async def test_rows_are_read_in_the_order_of_the_request() -> None:
    async with sharded(THIRTY) as v:
        rows = await v.sparse_read([22, 0, 12, 10, 21])
        assert rows.tolist() == [22, 0, 12, 10, 21]  # TensorFlow: 0, 12, 10, 22, 21


async def test_indices_must_have_one_axis_and_be_in_range() -> None:
    async with sharded(THIRTY) as v:
        for wrong in ([[1]], 1):
            with pytest.raises(IndexValueError, match=r"expected indices of shape \(n,\)"):
                await v.sparse_read(wrong)
            with pytest.raises(ValueError, match=r"expected indices of shape \(n,\)"):
                await v.scatter_add((wrong, wrong))
        for outside in (-1, 30):
            with pytest.raises(VariableIndexError, match="out of bounds, expected 0 to 29"):
                await v.scatter_add(([outside], [1.0]))
        assert (await v.read()).tolist() == THIRTY.tolist()


async def test_rows_of_a_component_are_its_own() -> None:
    async with sharded(THIRTY) as v:
        part = v.variables[1]
        await part.scatter_add(([0, 9], [100, 100]))
        assert (await part[[0, 9]]).tolist() == [110, 119]
        assert (await v[[10, 19]]).tolist() == [110, 119]


# --- embedding_lookup --------------------------------------------------------------------------


async def test_a_lookup_finds_rows_by_the_sizes_that_shards_have() -> None:
    async with sharded(np.arange(26, dtype=np.float32).reshape(13, 2), 5) as v:
        ids = np.array([[12, 0, 3], [9, 9, 5]])
        rows = await psync.embedding_lookup(v, ids)
        assert rows.shape == (2, 3, 2)
        np.testing.assert_array_equal(rows[..., 0], ids * 2)


async def test_a_list_is_looked_up_div_wise_or_mod_wise_if_it_fits() -> None:
    async with training(3) as (strategy, _):
        with strategy.scope():
            div = [psync.Variable([0.0, 1, 2]), psync.Variable([3.0, 4])]
            mod = [psync.Variable([0.0, 2, 4]), psync.Variable([1.0, 3])]
            odd = [psync.Variable([0.0]), psync.Variable([1.0, 2, 3, 4])]
        ids = [4, 0, 3, 3, 1]
        assert (await psync.embedding_lookup(div, ids)).tolist() == ids
        assert (await psync.embedding_lookup(mod, ids, "mod")).tolist() == ids
        with pytest.raises(PartitionError, match="numbers of rows may differ by one"):
            await psync.embedding_lookup(odd, ids)  # TensorFlow: wrong rows
        with pytest.raises(ConfigurationError, match="partition_strategy"):
            await psync.embedding_lookup(div, ids, "round")
        with pytest.raises(ValueError, match="partition_strategy"):
            await psync.embedding_lookup(div, ids, "round")


SP_IDS = ([[0, 0], [0, 1], [1, 0], [2, 3]], [1, 3, 0, 1], (3, 4))
SP_WEIGHTS = ([[0, 0], [0, 1], [1, 0], [2, 3]], [2.0, 0.5, 1.0, 3.0], (3, 4))


@pytest.mark.parametrize(
    ("combiner", "weights", "expected"),
    [
        (None, SP_WEIGHTS, [(10 * 2 + 30 * 0.5) / 2.5, 0, 10]),
        ("mean", None, [20, 0, 10]),
        ("sum", SP_WEIGHTS, [10 * 2 + 30 * 0.5, 0, 30]),
        ("sum", None, [40, 0, 10]),
        ("sqrtn", SP_WEIGHTS, [35 / np.sqrt(4.25), 0, 10]),
        ("sqrtn", None, [40 / np.sqrt(2), 0, 10]),
    ],
)
async def test_sparse_lookups_combine_rows(
    combiner: str | None, weights: Any, expected: list[float]
) -> None:
    async with sharded(np.arange(0, 100, 10, dtype=np.float32)) as v:
        rows = await psync.embedding_lookup_sparse(v, SP_IDS, weights, combiner)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


async def test_safe_lookups_drop_what_is_invalid_and_fill_empty_rows() -> None:
    async with sharded(np.arange(0, 100, 10, dtype=np.float32)) as v:
        ids = ([[0, 0], [0, 1], [1, 0], [3, 0]], [5, -1, 2, 7], (4, 2))
        weights = ([[0, 0], [0, 1], [1, 0], [3, 0]], [1.0, 1.0, 0.0, 2.0], (4, 2))
        assert (await psync.safe_embedding_lookup_sparse(v, ids)).tolist() == [50, 20, 0, 70]
        rows = await psync.safe_embedding_lookup_sparse(v, ids, weights)
        assert rows.tolist() == [50, 0, 0, 70]
        rows = await psync.safe_embedding_lookup_sparse(v, ids, weights, default_id=9)
        assert rows.tolist() == [50, 90, 90, 70]


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
