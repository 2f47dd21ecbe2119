"""Embedding lookups over ps tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, declared, in_step, strategy_of, training, training_of
from psync.errors import (
    ConfigurationError,
    IndexTypeError,
    PartitionError,
    UsageError,
    ValueMismatchError,
    VariableIndexError,
)

TABLE = np.arange(26, dtype=np.float32).reshape(13, 2)
INDICES = [[0, 0], [0, 1], [1, 0], [2, 3]]


shards = psync.FixedShardsPartitioner


@pytest.mark.parametrize("num_shards", [1, 5])
async def test_ids_of_any_shape_give_their_rows(num_shards: int) -> None:
    async with training_of(3, 1, shards(num_shards), table=TABLE) as (_, table):
        for ids in (7, [3, 3, 12, 0], np.array([[[5], [1]]], np.int32), np.zeros((0, 4), int)):
            rows = await psync.embedding_lookup(table, ids)
            np.testing.assert_array_equal(rows, TABLE[np.asarray(ids)])
        # Rows are clipped to the largest norm.
        rows = await psync.embedding_lookup(table, [[12, 1]], max_norm=10.0)
        clipped = TABLE[12] * 10 / np.linalg.norm(TABLE[12])
        np.testing.assert_allclose(rows, [[clipped, TABLE[1]]], rtol=1e-6)


@pytest.mark.parametrize("strategy_name", ["div", "mod"])
async def test_a_list_of_variables_stands_for_one(strategy_name: str) -> None:
    sizes = [3, 3, 3, 2, 2]
    offsets = [0, 3, 6, 9, 11]
    async with training(3) as (strategy, _):
        with strategy.scope():
            tables = [
                psync.Variable(
                    TABLE[offset : offset + size] if strategy_name == "div" else TABLE[number::5]
                )
                for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
            ]
        ids = [[0, 12], [5, 5], [9, 3]]
        rows = await psync.embedding_lookup(tables, ids, strategy_name)
        np.testing.assert_array_equal(rows, TABLE[ids])
        with pytest.raises(VariableIndexError, match="index 13 is out of bounds, expected 0 to 12"):
            await psync.embedding_lookup(tables, [13], strategy_name)


async def test_sparse_ids_are_combined() -> None:
    async with training_of(3, 1, shards(5), table=TABLE) as (_, table):
        ids = (INDICES, [1, 3, 0, 1], (3, 4))
        weights = (INDICES, [2.0, 0.5, 1.0, 3.0], (3, 4))
        rows = await psync.embedding_lookup_sparse(table, ids, weights)
        np.testing.assert_allclose(
            rows, [(TABLE[1] * 2 + TABLE[3] * 0.5) / 2.5, TABLE[0], TABLE[1]]
        )
        rows = await psync.embedding_lookup_sparse(table, ids, combiner="sum")
        np.testing.assert_allclose(rows, [TABLE[1] + TABLE[3], TABLE[0], TABLE[1]])
        rows = await psync.embedding_lookup_sparse(table, ids, combiner="sum", max_norm=1.0)
        unit = {number: TABLE[number] / np.linalg.norm(TABLE[number]) for number in (1, 3)}
        np.testing.assert_allclose(rows, [unit[1] + unit[3], TABLE[0], unit[1]], rtol=1e-6)


async def test_the_safe_lookup_leaves_out_what_is_invalid_and_fills_rows_without_ids() -> None:
    async with training_of(3, 1, shards(5), table=TABLE) as (_, table):
        ids = (INDICES, [1, -1, 0, 7], (3, 4))
        weights = (INDICES, [2.0, 0.5, 0.0, 3.0], (3, 4))
        rows = await psync.safe_embedding_lookup_sparse(table, ids, weights)
        np.testing.assert_allclose(rows, [TABLE[1], [0, 0], TABLE[7]])
        rows = await psync.safe_embedding_lookup_sparse(table, ids, weights, default_id=12)
        np.testing.assert_allclose(rows, [TABLE[1], TABLE[12], TABLE[7]])
        with pytest.raises(VariableIndexError, match="index 13 is out of bounds"):
            await psync.safe_embedding_lookup_sparse(table, ids, weights, default_id=13)
        for default_id in (1.5, "1", [1]):
            with pytest.raises(IndexTypeError, match=r"expected (an integer|integers) as"):
                await psync.safe_embedding_lookup_sparse(
                    table,
                    ids,
                    weights,
                    default_id=default_id,  # type: ignore[arg-type]
                )
        # A row without ids is an error unless the lookup is safe.
        without = ([[0, 0], [2, 1]], [4, 5], (3, 4))
        with pytest.raises(ValueMismatchError, match="row 1 of sp_ids has no id") as caught:
            await psync.embedding_lookup_sparse(table, without)
        assert "safe_embedding_lookup_sparse returns zeros" in str(caught.value)
        rows = await psync.safe_embedding_lookup_sparse(table, without)
        np.testing.assert_array_equal(rows, [TABLE[4], [0, 0], TABLE[5]])


async def test_a_step_looks_up_and_pushes_the_gradient_of_the_rows() -> None:
    async with training_of(3, 1, shards(5), table=TABLE) as (coordinator, table):
        optimizer = psync.optimizers.SGD(1.0)

        async def step() -> Any:
            ids = np.array([[3, 12], [3, 0]])
            rows = await psync.embedding_lookup(table, ids)
            gradient = psync.IndexedSlices(
                np.ones_like(rows).reshape(-1, 2), ids.reshape(-1), table.shape
            )
            await optimizer.apply_gradients([(gradient, table)])
            return rows

        rows = await in_step(coordinator, step)
        np.testing.assert_array_equal(rows, TABLE[[[3, 12], [3, 0]]])
        expected = TABLE.copy()
        expected[[0, 12]] -= 1
        expected[3] -= 2
        np.testing.assert_array_equal(await table.read(), expected)


@pytest.mark.parametrize("num_shards", [1, 5])
@pytest.mark.parametrize(
    ("ids", "kind", "text"),
    [
        ([3, 13], VariableIndexError, "index 13 is out of bounds, expected 0 to 12"),
        ([-1], VariableIndexError, "index -1 is out of bounds, expected 0 to 12"),
        ([0.5], IndexTypeError, "expected integers as indices, got float64"),
    ],
)
def test_ids_that_are_none_are_errors_that_name_the_variable(
    ids: Any, kind: type[Exception], text: str, num_shards: int
) -> None:
    table = declared(3, shards(num_shards), table=TABLE)
    with pytest.raises(kind, match=f'embedding_lookup of "table": {text}'):
        at_once(psync.embedding_lookup(table, ids))


def test_params_that_are_none_are_errors() -> None:
    with strategy_of(3).scope():
        a = psync.Variable(TABLE, name="a")
        b = psync.Variable(TABLE[:4], name="b")
        wide = psync.Variable(np.zeros((13, 3), np.float32), name="wide")
        scalar = psync.Variable(0.0, name="s")
        copies = psync.Variable(
            TABLE,
            name="copies",
            synchronization=psync.VariableSynchronization.ON_READ,
            aggregation=psync.VariableAggregation.SUM,
        )
    for params, kind, text in (
        (7, UsageError, "expected a variable or a list of variables as params, got int"),
        ([], PartitionError, "params is an empty list"),
        ([a, wide], PartitionError, r'expected rows of shape \(2,\) float32, as "a" has'),
        ([b, a], PartitionError, 'expected "b" to have 9 rows, got 4'),
        (copies, UsageError, 'variable "copies" is synchronized on read'),
        (scalar, PartitionError, '"s" is a scalar and has no rows'),
    ):
        with pytest.raises(kind, match=text):
            at_once(psync.embedding_lookup(params, [0]))
    with pytest.raises(ConfigurationError, match="partition_strategy: expected"):
        at_once(psync.embedding_lookup(a, [0], "hash"))
    with pytest.raises(ConfigurationError, match="combiner: expected"):
        at_once(psync.embedding_lookup_sparse(a, ([[0, 0]], [0], (1, 1)), combiner="max"))
