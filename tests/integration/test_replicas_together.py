"""Replicas: contexts, merge_call, collectives and merged updates, with numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_update_context
from memory_cluster import coordinating
from psync import VariableAggregation, VariableSynchronization
from psync.errors import ReplicaValueError


async def replica_id() -> int:
    return psync.get_replica_context().replica_id_in_sync_group


# --- merge_call and regroup ------------------------------------------------------------------


async def test_contexts_in_a_gang():
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy

        def in_merge(distribution, context_is_none):
            return (
                list(context_is_none.values),
                psync.get_replica_context() is None,
                psync.in_cross_replica_context(),
                psync.get_strategy() is distribution,
                type(distribution).__name__,
                distribution.num_replicas_in_sync,
            )

        async def fn():
            context = psync.get_replica_context()
            assert psync.has_strategy()
            assert not psync.in_cross_replica_context()
            assert psync.get_strategy().num_replicas_in_sync == 2
            merged = await context.merge_call(in_merge, (context is None,))
            return context.num_replicas_in_sync, merged

        expected = (2, ([False, False], True, True, True, "ParameterServerStrategy", 2))
        with strategy.scope():
            assert psync.get_replica_context() is None
            for run in (
                strategy.run,
                strategy.experimental_run_v2,
                strategy.extended.call_for_each_replica,
            ):
                assert strategy.experimental_local_results(await run(fn)) == (expected, expected)
        assert strategy.num_replicas_in_sync == 1


async def test_a_merge_function_may_be_a_coroutine_and_use_variables():
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")

        async def merge_fn(distribution, value):
            total = await distribution.reduce("SUM", value)
            await v.assign_add(total)
            return psync.PerReplica([f"to {i}" for i in range(distribution.num_replicas_in_sync)])

        async def fn():
            value = np.full(2, 1.0 + await replica_id(), np.float32)
            told = await psync.get_replica_context().merge_call(merge_fn, (value,))
            return told, await v.read()

        found = await strategy.run(fn)
        assert list(found[0]) == ["to 0", "to 1"]
        assert [value.tolist() for value in found[1]] == [[3, 3], [3, 3]]


async def test_what_a_merge_function_raises_is_raised_in_every_replica():
    async with coordinating(num_workers=2) as (_, coordinator):

        def merge_fn(distribution):
            raise KeyError("nothing there")

        async def caught():
            try:
                await psync.get_replica_context().merge_call(merge_fn)
            except KeyError as exc:
                return str(exc), await psync.get_replica_context().all_reduce("sum", 1)

        found = await coordinator.strategy.run(caught)
        assert list(found[0]) == ["'nothing there'"] * 2
        assert list(found[1]) == [2, 2]

        async def not_caught():
            await psync.get_replica_context().merge_call(merge_fn)

        with pytest.raises(KeyError, match="nothing there"):
            await coordinator.strategy.run(not_caught)


async def test_different_numbers_of_merge_calls_are_an_error_and_not_a_hang():
    async with coordinating(num_workers=3) as (_, coordinator):

        async def fn():
            for _ in range(1 + await replica_id() % 2):
                await psync.get_replica_context().merge_call(lambda distribution: None)

        with pytest.raises(RuntimeError, match="different numbers of collectives"):
            await coordinator.strategy.run(fn)


# --- all_reduce, all_gather ------------------------------------------------------------------


async def test_all_reduce_sums_or_averages_nested_values():
    async with coordinating(num_workers=3) as (_, coordinator):

        async def fn():
            context = psync.get_replica_context()
            mine = {"a": context.replica_id_in_sync_group, "b": [np.arange(3.0)]}
            return await context.all_reduce("sum", mine), await context.all_reduce("MEAN", mine)

        summed, mean = await coordinator.strategy.run(fn)
        assert list(summed["a"]) == [3, 3, 3]
        assert [value.tolist() for value in summed["b"][0]] == [[0, 3, 6]] * 3
        assert list(mean["a"]) == [1, 1, 1]
        assert [value.tolist() for value in mean["b"][0]] == [[0, 1, 2]] * 3


async def test_all_gather_concatenates_in_the_order_of_the_replicas():
    async with coordinating(num_workers=3) as (_, coordinator):

        async def fn():
            context = psync.get_replica_context()
            index = context.replica_id_in_sync_group
            return await context.all_gather(np.full((index + 1, 2), index), axis=0)

        gathered = await coordinator.strategy.run(fn)
        assert all(value[:, 0].tolist() == [0, 1, 1, 2, 2, 2] for value in gathered)

        async def ranks():
            await psync.get_replica_context().all_gather(1.0, axis=0)

        with pytest.raises(ReplicaValueError, match="rank 1"):
            await coordinator.strategy.run(ranks)


# --- updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", 6.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)]
)
async def test_assign_writes_once_what_the_aggregation_makes_of_all_values(aggregation, expected):
    async with coordinating(num_ps=2, num_workers=3) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            v = psync.Variable(10.0, name="v", aggregation=VariableAggregation[aggregation])

        async def fn(method):
            assert await getattr(v, method)(1.0 + await replica_id()) is v
            return float(await v.read())

        assert list(await strategy.run(fn, ("assign_add",))) == [10 + expected] * 3
        assert list(await strategy.run(fn, ("assign_sub",))) == [10.0] * 3
        assert list(await strategy.run(fn, ("assign",))) == [expected] * 3
        assert float(await v.read()) == expected


async def test_assign_without_an_aggregation_is_an_error():
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            v = psync.Variable(10.0, name="v", synchronization=VariableSynchronization.ON_WRITE)

        async def fn():
            await v.assign(1.0)

        with pytest.raises(ValueError, match='assign to "v" in one of 2 replicas') as caught:
            await strategy.run(fn)
        assert isinstance(caught.value, ReplicaValueError)
        assert "aggregation=psync.VariableAggregation.SUM" in caught.value.hint
        assert await v.read() == 10

        # A merge function is in cross-replica context, where it may write.
        async def write(distribution, value):
            await v.assign(value.values[1])

        async def merged():
            await psync.get_replica_context().merge_call(write, (1.0 + await replica_id(),))

        await strategy.run(merged)
        assert await v.read() == 2


async def test_scatters_are_merged():
    async with coordinating(num_ps=2, num_workers=3) as (_, coordinator):
        with coordinator.strategy.scope():
            table = psync.Variable(
                np.zeros((4, 2), np.int64), name="table", aggregation=VariableAggregation.SUM
            )

        async def fn():
            rows = np.array([await replica_id(), 3])
            assert await table.scatter_add((rows, np.ones((2, 2), np.int64))) is table
            return (await table.read())[:, 0].tolist()

        found = await coordinator.strategy.run(fn)
        assert [list(row) for row in found] == [[1] * 3, [1] * 3, [1] * 3, [3] * 3]

        async def updates():
            await table.scatter_update((np.array([0]), np.ones((1, 2), np.int64)))

        with pytest.raises(NotImplementedError, match="aggregation SUM: expected ONLY_FIRST"):
            await coordinator.strategy.run(updates)


@pytest.mark.parametrize(
    ("method", "aggregation", "expected"),
    [
        # Replica i has i + 2 for row i, and 2 for row 2.
        ("scatter_mul", VariableAggregation.SUM, [12 * 2, 12 * 3, 12 * 2 * 2]),
        ("scatter_div", VariableAggregation.SUM, [12 / 2, 12 / 3, 12 / 2 / 2]),
        ("scatter_mul", VariableAggregation.MEAN, [12 * 2 / 2, 12 * 3 / 2, 12]),
        ("scatter_div", VariableAggregation.MEAN, [12 / (2 / 2), 12 / (3 / 2), 12]),
        ("scatter_mul", VariableAggregation.ONLY_FIRST_REPLICA, [12 * 2, 12, 12 * 2]),
    ],
)
async def test_factors_of_all_replicas_are_multiplied_a_mean_divides_each(
    method: str, aggregation: Any, expected: list[float]
) -> None:
    """``testScatterMul`` and ``testScatterDiv`` of TensorFlow's ``values_test.py``."""
    async with coordinating(num_ps=2, num_workers=2) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.full(3, 12.0, np.float32), name="v", aggregation=aggregation)

        async def fn() -> None:
            replica = await replica_id()
            await getattr(v, method)((np.array([replica, 2]), np.array([replica + 2.0, 2.0])))

        await coordinator.strategy.run(fn)
        assert (await v.read()).tolist() == expected


async def test_gradients_are_summed_and_applied_once():
    async with coordinating(num_ps=2, num_workers=3) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            w = psync.Variable(np.zeros(4, np.float32), name="w")
            b = psync.Variable(np.zeros(1, np.float32), name="b")
            table = psync.Variable(np.zeros((5, 2), np.float32), name="table")
            step = psync.Variable(np.int64(0), name="step")
        optimizer = psync.optimizers.SGD(0.5)

        async def fn():
            index = await replica_id()
            rows = psync.IndexedSlices(np.ones((2, 2), np.float32), np.array([index, 4]), (5, 2))
            pairs = zip([np.full(4, index + 1, np.float32), None, rows], (w, b, table), strict=True)
            result = await optimizer.apply_gradients(pairs, step)
            return result.outcome.value, result.step, float((await w.read())[0])

        outcome, steps, seen = await strategy.run(fn)
        assert list(outcome) == ["accepted"] * 3
        assert list(steps) == [1, 1, 1]
        assert list(seen) == [-3.0] * 3
        assert (await w.read()).tolist() == [-3.0] * 4
        assert (await b.read()).tolist() == [0]
        assert (await table.read())[:, 0].tolist() == [-0.5, -0.5, -0.5, 0, -1.5]
        assert await step.read() == 1


async def test_training_with_replicas_equals_one_process():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.normal(size=12).astype(np.float32)

    def gradient(weights: Any, rows: slice) -> Any:
        return (x[rows].T @ (x[rows] @ weights - y[rows]) / len(x)).astype(np.float32)

    expected = np.zeros(3, np.float32)
    for _ in range(5):
        expected -= np.float32(0.5) * gradient(expected, slice(None))

    async with coordinating(num_workers=3) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")
        optimizer = psync.optimizers.SGD(0.5)

        async def fn(rows):
            await optimizer.apply_gradients([(gradient(await w.read(), rows), w)])

        shares = psync.PerReplica([slice(0, 4), slice(4, 8), slice(8, 12)])
        for _ in range(5):
            await coordinator.strategy.run(fn, (shares,))
        np.testing.assert_allclose(await w.read(), expected, rtol=1e-5)


# --- what a gang returns, and single replicas ------------------------------------------------


async def test_what_replicas_returned_is_reduced_and_gathered() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy

        async def replica(rows: Any) -> dict[str, Any]:
            return {"loss": float(rows.sum()), "rows": rows}

        result = await strategy.run(
            replica, args=(psync.PerReplica([np.full((4, 1), 2.5), np.full((2, 1), 15.0)]),)
        )
        assert await strategy.reduce("mean", result["loss"]) == 20.0
        assert (await strategy.reduce("mean", result["rows"], axis=0)).tolist() == pytest.approx(
            [40 / 6]
        )
        assert (await strategy.gather(result["rows"], axis=0)).shape == (6, 1)
        assert [each["loss"] for each in strategy.experimental_local_results(result)] == [10, 30]


async def test_steps_2_to_4_of_the_standard_pattern_update_a_variable_once() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            v = psync.Variable(np.zeros(2), name="v")

        async def add(variable: Any, total: Any) -> bool:
            await variable.assign_add(total)
            return in_update_context()

        async def merge(merged: Any, gradient: Any, variable: Any) -> bool:
            total = await merged.extended.reduce_to("SUM", gradient, variable)
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


@pytest.mark.parametrize("aggregation", VariableAggregation)
async def test_one_replica_and_the_program_write_as_they_are_told(aggregation: Any) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(0.0, aggregation=aggregation)

        async def step() -> None:
            await v.assign_add(2.0)

        coordinator.schedule(step)
        await coordinator.join()
        await v.assign_add(3.0)
        with coordinator.strategy.scope():
            await v.assign_sub(1.0)
            assert await v.read() == 4.0
