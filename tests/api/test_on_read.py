"""Variables with a copy for each worker: steps, the program, replicas; over a cluster in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once
from memory_cluster import MemoryCluster, coordinating, event_of, note, session_cluster
from psync.errors import (
    PartitionError,
    ReplicaValueError,
    UsageError,
    ValueMismatchError,
    VariableIndexError,
)

ON_READ = psync.VariableSynchronization.ON_READ
NONE, SUM, MEAN, FIRST = (
    psync.VariableAggregation.NONE,
    psync.VariableAggregation.SUM,
    psync.VariableAggregation.MEAN,
    psync.VariableAggregation.ONLY_FIRST_REPLICA,
)


def declare(strategy: Any, value: Any, aggregation: Any = SUM, **options: Any) -> Any:
    with strategy.scope():
        return psync.Variable(value, synchronization=ON_READ, aggregation=aggregation, **options)


def offline(num_ps: int = 1, partitioner: Any = None) -> psync.ParameterServerStrategy:
    addresses = {"chief": ["c:1"], "ps": [f"p{n}:1" for n in range(num_ps)], "worker": ["w:1"]}
    resolver = psync.SimpleClusterResolver(
        psync.ClusterSpec(addresses), task_type="chief", task_id=0
    )
    return psync.ParameterServerStrategy(resolver, partitioner)


@contextlib.asynccontextmanager
async def training(
    num_workers: int = 2,
) -> AsyncIterator[tuple[MemoryCluster, Any, psync.ClusterCoordinator]]:
    async with coordinating(num_ps=2, num_workers=num_workers) as (cluster, coordinator):
        yield cluster, coordinator.strategy, coordinator


async def on_each(
    coordinator: psync.ClusterCoordinator, step: Callable[..., Awaitable[Any]], workers: int = 2
) -> list[Any]:
    """Run a step once on each worker, results by worker: none ends before all have begun."""

    async def here() -> tuple[int, Any]:
        index = psync.get_worker_index()
        await note(f"worker {index} is here")
        for other in range(workers):
            await event_of(f"worker {other} is here").wait()
        return index, await step()

    results = [coordinator.schedule(here) for _ in range(workers)]
    await coordinator.join()
    return [value for _, value in sorted(await coordinator.fetch(results))]


# --- declaring -----------------------------------------------------------------------------------


def test_it_takes_a_turn_of_the_strategy_and_is_not_cut() -> None:
    strategy = offline(2, psync.FixedShardsPartitioner(2))
    devices = [declare(strategy, np.zeros(4)).device for _ in range(3)]
    assert devices[0] == devices[2] != devices[1]


def test_it_is_not_trainable() -> None:
    strategy = offline()
    v = declare(strategy, 0.0)
    assert not v.trainable
    assert strategy.trainable_variables == ()
    assert not declare(strategy, 0.0, trainable=False).trainable
    with pytest.raises(UsageError, match="cannot be trainable when synchronized on read"):
        declare(strategy, 0.0, trainable=True)
    with pytest.raises(ValueMismatchError, match="and optimizers do not train it"):
        at_once(psync.optimizers.SGD(0.1).apply_gradients([(np.float32(0), v)]))
    with pytest.raises(UsageError, match='moving average of "Variable": it is synchronized on'):
        psync.ExponentialMovingAverage(0.9).apply([v])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"synchronization": "on_read"}, "expected a psync.VariableSynchronization, got 'on_read'"),
        ({"aggregation": psync.ReduceOp.SUM}, "expected a psync.VariableAggregation, got <Red"),
        ({"synchronization": psync.VariableSynchronization.NONE}, "NONE is not supported"),
    ],
)
def test_what_is_no_kind_of_copies_is_refused(options: dict[str, Any], said: str) -> None:
    with offline().scope(), pytest.raises(UsageError, match=f'variable "Variable": .*{said}'):
        psync.Variable(0.0, **options)


def test_where_one_value_is_meant_it_is_refused() -> None:
    strategy = offline()
    count = declare(strategy, 0)
    with strategy.scope():
        other = psync.Variable(np.float32(1), name="other")
    sync = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)
    with pytest.raises(UsageError, match='"Variable" is synchronized on read'):
        at_once(sync.apply_gradients([(np.float32(1), other)], global_step=count))
    with pytest.raises(UsageError, match="bools cannot be summed"):
        declare(strategy, False)
    declare(strategy, False, MEAN)


def test_beside_a_variable_of_several_shards_it_is_beside_the_first() -> None:
    strategy = offline(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        psync.Variable(0.0)
        table = psync.Variable(np.zeros((4, 2)))
        with strategy.colocate_vars_with(table):
            seen = declare(strategy, np.zeros(3))
    assert seen.device == table.device[0] == "/job:ps/replica:0/task:1/device:CPU:0"


# --- replica context: the worker's own copy ------------------------------------------------------


async def test_each_worker_reads_and_writes_its_own_copy() -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, np.array([1.0, 2.0], np.float32))
        count = declare(strategy, 0)  # a scalar has copies, too

        async def step() -> list[Any]:
            seen = [(await v.read()).tolist()]
            await v.assign_add(np.full(2, psync.get_worker_index() + 1.0))
            seen.append((await v.read()).tolist())
            await v.assign_sub([1.0, 0.0])
            seen.append((await psync.pull({"v": v}))["v"].tolist())
            await v.assign(0.9 * await v.read())
            await count.assign_add(1)
            return [*seen, int(await count.read())]

        assert await on_each(coordinator, step) == [
            [[1, 2], [2, 3], [1, 3], 1],
            [[1, 2], [3, 4], [2, 4], 1],
        ]
        assert (await v.read()).tolist() == pytest.approx([0.9 * 3, 0.9 * 7])
        total = await count.read()
        assert (int(total), total.shape, total.dtype) == (2, (), np.int64)


async def test_a_copy_is_read_by_index_and_by_row() -> None:
    async with training(1) as (_, strategy, coordinator):
        v = declare(strategy, np.arange(6.0).reshape(3, 2))

        async def step() -> list[Any]:
            return [
                (await v[1]).tolist(), (await v[..., 0]).tolist(), float(await v[-1, 1]),
                (await v[::-2]).tolist(),
                (await v.sparse_read([2, 0, 2])).tolist(), (await v.gather_nd([[0, 1]])).tolist(),
            ]  # fmt: skip

        expected = [[2, 3], [0, 2, 4], 5, [[4, 5], [0, 1]], [[4, 5], [0, 1], [4, 5]], [1]]
        assert await coordinator.schedule(step) == expected
        assert (await v[1]).tolist() == [2, 3]
        assert repr(v[1]) == '<part of "Variable", to be awaited>'
        with pytest.raises(UsageError, match='part of variable "Variable" is not an array'):
            np.asarray(v[1])
        with pytest.raises(VariableIndexError):
            v[3]


async def test_values_are_read_only_or_the_callers_own() -> None:
    async with training(1) as (_, strategy, coordinator):
        v = declare(strategy, np.zeros(2, np.float32))

        async def step() -> list[bool]:
            out = np.ones(2, np.float32)
            read = [await v.read(), await v.read(copy=True), await v.read(out=out)]
            return [array.flags.writeable for array in read] + [read[2] is out, bool(out.any())]

        assert await coordinator.schedule(step) == [False, True, True, True, False]
        assert await step() == [False, True, True, True, False]
        assert (await v.value()).tolist() == (await v.read_value()).tolist() == [0, 0]
        out = [np.ones(2, np.float32)]
        assert (await psync.pull([v], out=out))[0] is out[0]
        with pytest.raises(
            ValueMismatchError, match=r'out for "Variable": expected a writable.*\(2,\)'
        ):
            await v.read(out=np.zeros(3, np.float32))


async def test_it_is_pulled_beside_other_variables() -> None:
    async with training() as (_, strategy, coordinator):
        metric, single = declare(strategy, 1.0), declare(strategy, 3.0, NONE)
        with strategy.scope():
            w = psync.Variable(np.ones(2), name="w")

        async def step() -> Any:
            return await psync.pull((w, metric, w, single))

        first, second, third, fourth = await coordinator.schedule(step)
        assert (first.tolist(), float(second), third.tolist()) == ([1, 1], 1.0, [1, 1])
        assert float(fourth) == 3.0
        assert float((await psync.pull([metric, w]))[0]) == 2.0
        # Without an aggregation only steps can read it.
        with pytest.raises(ReplicaValueError, match=r'read of "Variable\w*": each worker has'):
            await single.read()
        with pytest.raises(
            ReplicaValueError, match=r'checkpoint of "Variable\w*": each worker has'
        ):
            await single.checkpoint_value()


# --- cross-replica context: all copies -----------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "aggregation", "copies", "expected"),
    [
        (0.0, SUM, [2.0, 5.0], np.float32(7.0)),
        (0.0, MEAN, [2.0, 5.0], np.float32(3.5)),
        (0.0, FIRST, [2.0, 5.0], np.float32(2.0)),
        (0, MEAN, [1, 2], np.float64(1.5)),  # the mean of integers is no integer
    ],
)
async def test_the_program_reads_what_the_aggregation_makes_of_all(
    start: float, aggregation: Any, copies: list[float], expected: Any
) -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, start, aggregation)

        async def step() -> None:
            await v.assign(copies[psync.get_worker_index()])

        await on_each(coordinator, step)
        read = await v.read()
        assert (read, read.dtype) == (expected, expected.dtype)
        with strategy.scope():
            assert await v.read() == expected
        if v.dtype != expected.dtype:
            with pytest.raises(ValueMismatchError, match="the mean of int64 is float64"):
                await v.read(out=np.zeros((), np.int64))


@pytest.mark.parametrize(
    ("start", "aggregation", "assigned", "copies"),
    [
        (0.0, SUM, 6.0, [3.0, 3.0]),
        (0, SUM, 7, [4, 3]),  # integers are shared out so that the sum is what was assigned
        (0.0, MEAN, 6.0, [6.0, 6.0]),
        (0.0, FIRST, 6.0, [6.0, 6.0]),
        (0.0, NONE, 6.0, [6.0, 6.0]),
    ],
)
async def test_the_program_assigns_to_all(
    start: float, aggregation: Any, assigned: float, copies: list[float]
) -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, start, aggregation)
        assert await v.assign(assigned) is v
        assert [copy.item() for copy in await on_each(coordinator, v.read)] == copies
        if aggregation is not NONE:
            assert await v.read() == assigned


@pytest.mark.parametrize("aggregation", [MEAN, FIRST, NONE])
async def test_the_program_adds_to_all_copies_of_what_is_not_summed(aggregation: Any) -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, 1.0, aggregation)
        await v.assign_add(4.0)
        with strategy.scope():
            await v.assign_sub(2.0)
        assert [float(copy) for copy in await on_each(coordinator, v.read)] == [3.0, 3.0]


async def test_what_the_program_adds_by_itself_is_part_of_the_sum() -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, 0.0)
        for method in (v.assign_add, v.assign_sub):  # in cross-replica context nothing is added
            with (
                strategy.scope(),
                pytest.raises(ReplicaValueError, match="in cross-replica context"),
            ):
                await method(1.0)
        assert float(await v.read()) == 0.0
        await v.assign_add(5.0)
        await strategy.extended.update(v, lambda var: var.assign_sub(1.0))
        assert [float(copy) for copy in await on_each(coordinator, v.read)] == [0.0, 0.0]
        assert float(await v.read()) == 4.0
        await v.assign(6.0)
        assert float(await v.read()) == 6.0


async def test_in_a_merge_function_of_a_step_all_copies_are_meant() -> None:
    async with training() as (_, strategy, coordinator):
        v = declare(strategy, 1.0)

        async def total(_: Any) -> float:
            with pytest.raises(ReplicaValueError, match="in cross-replica context"):
                await v.assign_add(1.0)
            return float(await v.read())

        async def step() -> tuple[float, float]:
            context = psync.get_replica_context()
            return float(await v.read()), await context.merge_call(total)

        assert await coordinator.schedule(step) == (1.0, 2.0)


@pytest.mark.parametrize(
    "method",
    ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max",
     "scatter_update", "batch_scatter_update"],
)  # fmt: skip
def test_rows_cannot_be_scattered_to(method: str) -> None:
    v = declare(offline(), np.zeros((2, 2)))
    with pytest.raises(
        NotImplementedError, match=f'{method} to "Variable": .*does not support sca'
    ):
        at_once(getattr(v, method)(([0], [[1.0, 1.0]])))


def test_a_value_that_does_not_fit_one_copy_is_refused() -> None:
    v = declare(offline(), np.zeros(2))
    for call in (v.assign([1.0] * 3), v.assign_add(np.zeros((3, 2))), v.restore_value([1.0] * 3)):
        with pytest.raises(ValueMismatchError, match=r"expected shape \(2,\)"):
            at_once(call)


# --- first values --------------------------------------------------------------------------------


async def test_each_copy_begins_with_the_initial_value() -> None:
    async with training() as (_, strategy, coordinator):
        by_shape = declare(
            strategy, lambda shape, offset: np.full(shape, 2.0), shape=(2,), dtype="float32"
        )
        called = declare(strategy, lambda: [1, 2], MEAN, shape=(2,), dtype="int32")
        known = declare(strategy, lambda: 3.0, FIRST)
        values = await on_each(coordinator, lambda: psync.pull((by_shape, called, known)))
        for first, second, third in values:
            assert (first.tolist(), second.tolist(), float(third)) == ([2, 2], [1, 2], 3.0)
        assert (await by_shape.read()).tolist() == [4.0, 4.0]
        assert (await called.read()).tolist() == [1.0, 2.0]


async def test_an_initial_value_of_another_shape_is_refused() -> None:
    async with coordinating() as (_, coordinator):
        v = declare(coordinator.strategy, lambda: np.zeros(3), shape=(2,), dtype="float32")
        with pytest.raises(PartitionError, match=r"expected shape \(2,\), its initial_value"):
            await v.read()


# --- checkpoints ---------------------------------------------------------------------------------


async def test_a_checkpoint_keeps_the_aggregate_for_any_number_of_workers() -> None:
    async with training(2) as (_, strategy, coordinator):
        count, loss = declare(strategy, 0), declare(strategy, 0.0, MEAN)

        async def step() -> None:
            await count.assign_add(5)
            await loss.assign(psync.get_worker_index() * 2.0)

        await on_each(coordinator, step)
        await count.assign_add(1)
        saved = [await variable.checkpoint_value() for variable in (count, loss)]
        assert [float(value) for value in saved] == [11.0, 1.0]
    async with training(3) as (_, strategy, coordinator):
        count, loss = declare(strategy, 0), declare(strategy, 0.0, MEAN)
        for variable, value in zip((count, loss), saved, strict=True):
            await variable.restore_value(value)
        assert [float(await v.read()) for v in (count, loss)] == [11.0, 1.0]
        copies = await on_each(coordinator, count.read, workers=3)
        assert [int(copy) for copy in copies] == [4, 4, 3]


# --- failures ------------------------------------------------------------------------------------


async def test_a_worker_that_is_gone_leaves_its_copy() -> None:
    async with training() as (cluster, strategy, coordinator):
        v = declare(strategy, 0.0)

        async def step() -> None:
            await v.assign_add(psync.get_worker_index() + 1.0)

        await on_each(coordinator, step)
        await cluster.stop("worker-1")
        assert float(await v.read()) == 3.0


@pytest.mark.promise("updates.on-read-at-most-once")
async def test_a_step_that_runs_again_elsewhere_counts_once() -> None:
    async with training() as (cluster, strategy, coordinator):
        v = declare(strategy, 0.0)

        async def step() -> int:
            await v.assign_add(1.0)
            index = psync.get_worker_index()
            await note(f"counted by {index}")
            if not event_of("lost").is_set():
                await event_of("never").wait()
            return index

        result = coordinator.schedule(step)
        await event_of("counted by 0").wait()
        event_of("lost").set()
        await cluster.stop("worker-0")
        assert await result == 1
        assert float(await v.read()) == 1.0


# --- sessions ------------------------------------------------------------------------------------


async def test_in_a_session_each_program_has_a_copy_of_its_own() -> None:
    added: dict[str, asyncio.Event] = {}

    async def main(strategy: psync.ParameterServerStrategy) -> list[float]:
        job, index = strategy.task
        v = declare(strategy, 0.0)
        async with psync.MonitoredTrainingSession(strategy):
            await v.assign_add({"chief": 10.0}.get(str(job), 1.0 + (index or 0)))
            here = float(await v.read())
            added.setdefault(f"{job}-{index}", asyncio.Event()).set()
            for other in ("chief-0", "worker-0", "worker-1"):
                await added.setdefault(other, asyncio.Event()).wait()
            with strategy.scope():
                return [here, float(await v.read())]

    async with session_cluster(1, 2, chief=True) as cluster:
        assert await cluster.run_all(main) == [[10.0, 13.0], [1.0, 13.0], [2.0, 13.0]]
