"""TensorFlow's reductions and updates of values of replicas, rule by rule, with numbers.

What is tested here in numbers stands in full where it belongs: ``test_distributed_values``,
``test_replicas``, ``test_extended``, ``test_strategy_extended``, and for what replicas do
themselves ``test_semantics_11_replicas``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_update_context
from memory_cluster import coordinating
from psync import IndexedSlices, Mirrored, PerReplica, ReduceOp
from psync.errors import ReplicaValueError
from psync.numerics.replicas import gather_distributed, reducing_distributed
from psync.numerics.sums import at_once


def reduced(*arguments: Any, **options: Any) -> Any:
    return at_once(reducing_distributed(*arguments, **options))


CLUSTER = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1"]}
ROWS_4 = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
ROWS_2 = np.array([[10.0], [20.0]], np.float32)


def make() -> tuple[psync.ParameterServerStrategy, Any]:
    resolver = psync.SimpleClusterResolver(psync.ClusterSpec(CLUSTER), task_type="chief", task_id=0)
    strategy = psync.ParameterServerStrategy(resolver)
    with strategy.scope():
        return strategy, psync.Variable(np.zeros(2), name="v")


# --- reduce --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "value", "replicas", "expected"),
    [
        ("sum", 0, 2, 0),
        ("mean", 0, 2, 0),
        ("mean", 5.0, 2, 5.0),
        ("sum", 5.0, 1, 5.0),
        ("mean", Mirrored([5.0, 5.0]), 2, 5.0),
    ],
)
def test_a_value_that_is_not_per_replica_is_what_all_have(
    op: str, value: Any, replicas: int, expected: float
) -> None:
    assert reduced(op, value, replicas) == expected


def test_rows_that_one_of_two_replicas_has_are_halved_by_the_mean() -> None:
    first = IndexedSlices(np.array([[2.0], [4.0]]), [0, 3])
    second = IndexedSlices(np.array([[6.0]]), [3])
    total = reduced("sum", PerReplica([first, second]), 2)
    assert (total.indices.tolist(), total.values.tolist()) == ([0, 3], [[2.0], [10.0]])
    mean = reduced("mean", PerReplica([first, second]), 2)
    assert (mean.indices.tolist(), mean.values.tolist()) == ([0, 3], [[1.0], [5.0]])


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("sum", 0, [40.0]),  # 10 of the one, 30 of the other
        ("mean", 0, [40.0 / 6]),  # of 6 rows: not the mean of 2.5 and 15
        ("mean", [0, 1], 40.0 / 6),
        ("sum", [0, 1], 40.0),
    ],
)
def test_an_axis_is_reduced_within_each_replica_and_then_across(
    op: str, axis: Any, expected: Any
) -> None:
    result = reduced(op, PerReplica([ROWS_4, ROWS_2]), 2, axis)
    assert np.asarray(result).tolist() == pytest.approx(expected)


def test_gather_puts_values_one_behind_the_other() -> None:
    gathered = gather_distributed(PerReplica([ROWS_4, ROWS_2]), 0)
    assert gathered.tolist() == [[1], [2], [3], [4], [10], [20]]
    for value, axis in (([ROWS_4, ROWS_2], 1), ([1.0, 2.0], 0), ([ROWS_4, ROWS_4], 2)):
        with pytest.raises(ReplicaValueError, match=r"gather|axis"):
            gather_distributed(PerReplica(value), axis)
    rows = IndexedSlices(np.ones((1, 1)), [0])
    with pytest.raises(ReplicaValueError, match="gather of IndexedSlices is not possible"):
        gather_distributed(PerReplica([rows, rows]), 0)


async def test_what_replicas_returned_is_reduced_and_gathered() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy

        async def replica(rows: Any) -> dict[str, Any]:
            return {"loss": float(rows.sum()), "rows": rows}

        result = await strategy.run(replica, args=(PerReplica([ROWS_4, ROWS_2]),))
        assert await strategy.reduce("mean", result["loss"]) == 20.0
        assert (await strategy.reduce("mean", result["rows"], axis=0)).tolist() == pytest.approx(
            [40 / 6]
        )
        assert (await strategy.gather(result["rows"], axis=0)).shape == (6, 1)
        assert [each["loss"] for each in strategy.experimental_local_results(result)] == [10, 30]


# --- update and non-slot -------------------------------------------------------------------------


async def test_steps_2_to_4_of_the_standard_pattern_update_a_variable_once() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            v = psync.Variable(np.zeros(2), name="v")

        async def add(variable: Any, total: Any) -> bool:
            await variable.assign_add(total)
            return in_update_context()

        async def merge(merged: Any, gradient: Any, variable: Any) -> bool:
            total = await merged.extended.reduce_to(ReduceOp.SUM, gradient, variable)
            return await merged.extended.update(variable, add, args=(total,))

        async def replica() -> bool:
            context = psync.get_replica_context()
            gradient = np.full(2, context.replica_id_in_sync_group + 1.0)
            return await context.merge_call(merge, args=(gradient, v))

        assert list(await strategy.run(replica)) == [True, True]
        assert (await v.read()).tolist() == [3.0, 3.0]
        coordinator.schedule(replica)  # one replica merges with itself
        await coordinator.join()
        assert (await v.read()).tolist() == [4.0, 4.0]


# --- regroup -------------------------------------------------------------------------------------
