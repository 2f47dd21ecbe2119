"""When a gang begins, how it ends, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import coordinating, event_of, note
from psync.errors import (
    ClosedError,
    ClosureCancelled,
    ClosureInputError,
    EndOfData,
    ParameterServerLost,
    PartitionError,
    RemoteError,
    ReplicaValueError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from psync.wire.limits import Limits


async def reduced(value: object = 1, op: str = "sum") -> object:
    return await psync.get_replica_context().all_reduce(op, value)


async def replica_id() -> int:
    return psync.get_replica_context().replica_id_in_sync_group


def trail() -> list[str]:
    return memory_cluster.shared.setdefault("trail", [])


# --- its place -------------------------------------------------------------------------------


async def test_a_gang_comes_after_what_was_scheduled_before_it_and_before_the_rest():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(name):
            await asyncio.sleep(0)
            trail().append(name)

        async def fn():
            trail().append("gang")
            await reduced()
            return await reduced()

        for _ in range(20):
            coordinator.schedule(step, args=("before",))
        run = asyncio.create_task(coordinator.strategy.run(fn))
        await asyncio.sleep(0)
        for _ in range(20):
            coordinator.schedule(step, args=("after",))
        await coordinator.join()
        assert list(await run) == [2, 2]
        assert trail() == ["before"] * 20 + ["gang"] * 2 + ["after"] * 20
        assert coordinator.done()


@pytest.mark.virtual_time
@pytest.mark.parametrize(("away", "others"), [(0, [1, 2]), (2, [0, 1])])
async def test_replicas_are_counted_over_the_workers_that_are_there_when_the_gang_begins(
    away, others
):
    async with coordinating(num_workers=3, min_workers=2) as (cluster, coordinator):
        await cluster.stop(f"worker-{away}")
        await asyncio.sleep(1)

        async def fn():
            await note("begun")
            await event_of("go on").wait()
            return await replica_id(), await reduced(), psync.get_worker_index()

        run = asyncio.create_task(coordinator.strategy.run(fn))
        await event_of("begun").wait()
        await cluster.start(f"worker-{away}")
        await asyncio.sleep(10)
        event_of("go on").set()
        ids, counts, workers = await run
        assert [list(ids), list(counts), list(workers)] == [[0, 1], [2, 2], others]
        ids, counts, workers = await coordinator.strategy.run(fn)
        assert [list(ids), list(counts), list(workers)] == [[0, 1, 2], [3, 3, 3], [0, 1, 2]]


@pytest.mark.virtual_time
async def test_without_any_worker_it_says_for_whom_it_waits(caplog):
    async with coordinating(num_workers=1) as (cluster, coordinator):
        await cluster.stop("worker-0")
        await asyncio.sleep(1)
        run = asyncio.create_task(coordinator.strategy.run(replica_id))
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(25)
        assert 'run of "replica_id" waits: no worker is connected' in caplog.text
        await cluster.start("worker-0")
        assert await run == 0


@pytest.mark.virtual_time
async def test_who_is_not_there_yet_is_named(caplog):
    async with coordinating(num_workers=2) as (_, coordinator):

        async def fn():
            if await replica_id():
                await event_of("go on").wait()
            return await reduced()

        run = asyncio.create_task(coordinator.strategy.run(fn))
        later = asyncio.create_task(coordinator.strategy.run(reduced))
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(11)
        assert (
            'in run of "fn" replica 0 on /job:worker/task:0 in all_reduce SUM, and not yet '
            "replica 1 on /job:worker/task:1"
        ) in caplog.text
        event_of("go on").set()
        assert list(await run) == list(await later) == [2, 2]


# --- arguments -------------------------------------------------------------------------------


async def test_arguments_are_captured_when_run_begins():
    async with coordinating(num_workers=2) as (_, coordinator):
        array = np.ones(10_000)
        run = asyncio.create_task(coordinator.strategy.run(reduced, (array,)))
        await asyncio.sleep(0)
        array[:] = 5
        assert [float(value[0]) for value in await run] == [2, 2]


async def test_remote_values_and_per_worker_iterators_are_arguments():
    async with coordinating(num_workers=2) as (_, coordinator):

        def dataset_fn(context):
            yield from range(context.input_pipeline_id * 10, 100)

        batches = iter(coordinator.create_per_worker_dataset(dataset_fn))

        async def step():
            return np.full(5_000, 7)

        value = coordinator.schedule(step)

        async def fn(batches, value):
            return next(batches), int(value[0])

        found, values = await coordinator.strategy.run(fn, (batches, value))
        assert (list(found), list(values)) == ([0, 10], [7, 7])


async def test_an_input_without_a_value_is_an_error():
    async with coordinating(num_workers=2) as (_, coordinator):
        value = coordinator.schedule(replica_id)
        value.cancel()
        with pytest.raises(ClosureInputError, match="has no value") as caught:
            await coordinator.strategy.run(reduced, (value,))
        assert isinstance(caught.value.__cause__, ClosureCancelled)


async def test_what_cannot_be_sent_is_named_before_anything_runs():
    async with coordinating(num_workers=2) as (_, coordinator):
        with pytest.raises(SerializationError, match="expected a function"):
            await coordinator.strategy.run(5)
        with pytest.raises(SerializationError, match="the strategy lives on the coordinator"):
            await coordinator.strategy.run(reduced, (coordinator.strategy,))
        with pytest.raises(SerializationError, match="args: expected a tuple"):
            await coordinator.strategy.run(reduced, psync.PerReplica((1, 2)))
        with pytest.raises(ReplicaValueError, match="arguments for 3 replicas, but 2 workers"):
            await coordinator.strategy.run(reduced, (psync.PerReplica((1, 2, 3)),))
        limits = Limits(segment_bytes=1 << 20, body_bytes=1 << 20)
    async with coordinating(num_workers=2, limits=limits) as (_, coordinator):
        with pytest.raises(SerializationError, match="too large"):
            await coordinator.strategy.run(reduced, (np.zeros(1 << 20),))

        async def brings_much():
            return await reduced(np.zeros(1 << 20))

        with pytest.raises(SerializationError, match="brings to all_reduce SUM: too large"):
            await coordinator.strategy.run(brings_much)

        async def brings_a_lock():
            return await reduced(asyncio.Lock())

        with pytest.raises(SerializationError, match="to the coordinator"):
            await coordinator.strategy.run(brings_a_lock)

        async def gets_much():
            context = psync.get_replica_context()
            await context.merge_call(lambda strategy: np.zeros(1 << 20))

        with pytest.raises(SerializationError, match="what the merge function returned: too large"):
            await coordinator.strategy.run(gets_much)

        async def gets_too_many():
            context = psync.get_replica_context()
            await context.merge_call(lambda strategy: psync.PerReplica((1, 2, 3)))

        with pytest.raises(ReplicaValueError, match="values of 3 replicas, expected 2"):
            await coordinator.strategy.run(gets_too_many)


async def test_a_variable_that_cannot_be_created_ends_the_run():
    async with coordinating(num_workers=2) as (_, coordinator):

        def broken():
            raise ValueError("no value")

        with coordinator.strategy.scope():
            psync.Variable(broken, name="v", shape=(2,), dtype="float32")
        with pytest.raises((PartitionError, ValueError), match="no value"):
            await coordinator.strategy.run(replica_id)
        with pytest.raises((PartitionError, ValueError), match="no value"):
            await coordinator.join()


# --- errors ----------------------------------------------------------------------------------


class Custom(Exception):
    pass


async def test_what_a_replica_raises_is_raised_and_the_others_learn_who_it_was():
    async with coordinating(num_workers=3) as (_, coordinator):

        async def fn():
            if await replica_id() == 1:
                raise Custom("boom")
            try:
                await reduced()
            except ClosureCancelled as exc:
                memory_cluster.shared.setdefault("told", []).append(str(exc))
                raise

        with pytest.raises(Custom, match="boom") as caught:
            await coordinator.strategy.run(fn)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert caught.value.__cause__.task == "/job:worker/task:1"
        assert "in fn" in caught.value.__cause__.traceback_text
        told = memory_cluster.shared.get("told", [])
        assert set(told) <= {"replica 1 on /job:worker/task:1 failed: Custom: boom"}
        assert coordinator.done()
        await coordinator.join()
        assert list(await coordinator.strategy.run(reduced)) == [3, 3, 3]


async def test_the_end_of_a_workers_data_is_raised_by_run_and_not_by_join():
    async with coordinating(num_workers=2) as (_, coordinator):
        batches = iter(coordinator.create_per_worker_dataset(lambda: iter([1])))

        async def fn(batches):
            return await reduced(next(batches))

        assert list(await coordinator.strategy.run(fn, (batches,))) == [2, 2]
        with pytest.raises(EndOfData):
            await coordinator.strategy.run(fn, (batches,))
        await coordinator.join()


@pytest.mark.promise("gangs.all-or-none")
@pytest.mark.virtual_time
async def test_a_worker_that_dies_in_a_collective_is_named_to_the_others_and_by_run():
    async with coordinating(num_workers=3) as (cluster, coordinator):

        async def fn():
            if await replica_id() == 1:
                await note("one is here")
                await event_of("never").wait()
            try:
                await reduced()
            except WorkerLost as exc:
                memory_cluster.shared.setdefault("told", []).append(str(exc))
                raise

        run = asyncio.create_task(coordinator.strategy.run(fn))
        await event_of("one is here").wait()
        await asyncio.sleep(1)
        await cluster.stop("worker-1")
        with pytest.raises(WorkerLost, match="/job:worker/task:1 was lost") as caught:
            await run
        assert caught.value.task == "/job:worker/task:1"
        text = "/job:worker/task:1 was lost with replica 1, which all wait for"
        assert memory_cluster.shared["told"] == [text, text]
        assert list(await coordinator.strategy.run(reduced)) == [2, 2]
        await cluster.start("worker-1")
        await asyncio.sleep(10)
        assert list(await coordinator.strategy.run(reduced)) == [3, 3, 3]
        assert coordinator.schedule(replica_id) is not None
        await coordinator.join()


@pytest.mark.virtual_time
async def test_a_worker_that_dies_while_the_others_merge_ends_the_merge():
    async with coordinating(num_workers=2) as (cluster, coordinator):

        async def slow(strategy):
            await note("merging")
            try:
                await event_of("never").wait()
            finally:
                await note("stopped")

        async def fn():
            await psync.get_replica_context().merge_call(slow)

        run = asyncio.create_task(coordinator.strategy.run(fn))
        await event_of("merging").wait()
        await cluster.stop("worker-0")
        with pytest.raises(WorkerLost, match="task:0"):
            await run
        assert event_of("stopped").is_set()


async def test_merge_functions_that_overlap_do_not_see_each_other():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def merge_fn(strategy, numbers):
            await asyncio.sleep(0.01 / (1 + numbers[0]))  # the last to begin is the first to end
            assert psync.get_replica_context() is None
            assert psync.get_strategy() is strategy
            return sum(numbers)

        async def fn():
            context = psync.get_replica_context()
            calls = (context.merge_call(merge_fn, (number,)) for number in range(5))
            return await asyncio.gather(*calls)

        found = await coordinator.strategy.run(fn)
        assert [list(value) for value in found] == [[2 * n, 2 * n] for n in range(5)]


async def test_a_merge_function_that_cancels_itself_ends_the_gang():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def merge_fn(strategy):
            raise asyncio.CancelledError

        async def fn():
            await psync.get_replica_context().merge_call(merge_fn)

        with pytest.raises(ClosureCancelled, match="a merge function was stopped"):
            await coordinator.strategy.run(fn)
        assert list(await coordinator.strategy.run(reduced)) == [2, 2]


async def test_run_schedule_and_join_in_a_merge_function_are_errors_and_not_a_deadlock():
    async with coordinating(num_workers=2) as (_, coordinator):
        memory_cluster.shared["coordinator"] = coordinator

        async def merge_fn(strategy, operation):
            there = memory_cluster.shared["coordinator"]
            if operation == "run":
                await strategy.run(reduced)
            elif operation == "join":
                await there.join()
            else:
                there.schedule(reduced)

        async def fn(operation):
            context = psync.get_replica_context()
            await context.merge_call(
                lambda strategy, operations: merge_fn(strategy, operations[0]), (operation,)
            )

        for operation in ("run", "join", "schedule"):
            with pytest.raises(UsageError, match=f"{operation} in a merge function"):
                await coordinator.strategy.run(fn, (operation,))


async def test_a_pending_error_cancels_runs_until_join_has_raised_it():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def fails():
            await event_of("go on").wait()
            raise Custom("boom")

        coordinator.schedule(fails)
        run = asyncio.create_task(coordinator.strategy.run(reduced))
        await asyncio.sleep(0)
        event_of("go on").set()
        with pytest.raises(ClosureCancelled, match="run was cancelled: closure 0"):
            await run
        with pytest.raises(ClosureCancelled, match="run it again after the next join"):
            await coordinator.strategy.run(reduced)
        with pytest.raises(Custom):
            await coordinator.join()
        assert list(await coordinator.strategy.run(reduced)) == [2, 2]


# --- cancellation and the end ----------------------------------------------------------------


async def test_cancelling_run_stops_all_replicas():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def fn():
            try:
                if await replica_id():
                    await note("runs")
                    await event_of("never").wait()
                await reduced()
            finally:
                trail().append("stopped")

        run = asyncio.create_task(coordinator.strategy.run(fn))
        await event_of("runs").wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert list(await coordinator.strategy.run(reduced)) == [2, 2]
        assert trail() == ["stopped", "stopped"]


async def test_cancelling_run_before_its_turn_leaves_no_trace():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step():
            await event_of("go on").wait()

        coordinator.schedule(step)
        run = asyncio.create_task(coordinator.strategy.run(reduced))
        await asyncio.sleep(0)
        value = coordinator.schedule(replica_id)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert await value == 0
        event_of("go on").set()
        await coordinator.join()


@pytest.mark.parametrize("where", ["in a collective", "in a merge function"])
async def test_closing_ends_runs(where):
    async with coordinating(num_workers=2) as (_, coordinator):

        async def merge_fn(strategy):
            await note("runs")
            await event_of("never").wait()

        async def in_a_merge_function():
            await psync.get_replica_context().merge_call(merge_fn)

        async def in_a_collective():
            if await replica_id():
                await note("runs")
                await event_of("never").wait()
            await reduced()

        fn = in_a_collective if where == "in a collective" else in_a_merge_function
        runs = [asyncio.create_task(coordinator.strategy.run(fn)) for _ in range(2)]
        await event_of("runs").wait()
        strategy = coordinator.strategy
        await coordinator.close()
        for run in runs:
            with pytest.raises(ClosedError, match="the coordinator was closed"):
                await run
        with pytest.raises(ClosedError, match="was closed"):
            await strategy.run(fn)


@pytest.mark.parametrize("closes", [True, False], ids=["closing", "an error"])
async def test_all_runs_that_wait_for_their_turn_end_with_what_ends_the_program(closes):
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step():
            await note("runs")
            await event_of("go on").wait()
            raise ValueError("no good")

        coordinator.schedule(step)
        await event_of("runs").wait()
        runs = [asyncio.create_task(coordinator.strategy.run(reduced)) for _ in range(300)]
        await asyncio.sleep(0)
        if closes:
            await coordinator.close()
        event_of("go on").set()
        end, text = (ClosedError, "was closed") if closes else (ClosureCancelled, "was cancelled")
        for run in runs:
            with pytest.raises(end, match=text):
                await run
        if not closes:
            with pytest.raises(ValueError, match="no good"):
                await coordinator.join()
            assert list(await coordinator.strategy.run(reduced)) == [2, 2]


@pytest.mark.virtual_time
async def test_the_loss_of_a_ps_ends_runs_with_that_error():
    async with coordinating(num_workers=2, ps_timeout=3) as (cluster, coordinator):

        async def fn():
            if await replica_id():
                await note("runs")
                await event_of("never").wait()
            await reduced()

        runs = [asyncio.create_task(coordinator.strategy.run(fn)) for _ in range(4)]
        await event_of("runs").wait()
        await cluster.stop("ps-0")
        for run in runs:
            with pytest.raises(ParameterServerLost):
                await run
        with pytest.raises(ParameterServerLost):
            await coordinator.join()


# --- with synchronous steps ------------------------------------------------------------------


def synchronous(coordinator: psync.ClusterCoordinator) -> tuple[psync.Variable, Any]:
    """A variable, and what pulls it and pushes 1 to it in a synchronous step of two."""
    with coordinator.strategy.scope():
        w = psync.Variable(np.zeros(1, np.float32), name="w")
        step = psync.get_or_create_global_step()
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

    async def push() -> tuple[str, bool]:
        await w.read()
        result = await optimizer.apply_gradients([(np.ones(1, np.float32), w)], step)
        return result.outcome.value, result.partial

    return w, push


@pytest.mark.virtual_time
async def test_synchronous_steps_before_a_gang_do_not_wait_for_what_comes_after_it():
    async with coordinating(num_workers=2) as (_, coordinator):
        w, push = synchronous(coordinator)
        coordinator.schedule(push)  # nobody else will push before the gang
        run = asyncio.create_task(coordinator.strategy.run(reduced))
        await asyncio.sleep(0)
        coordinator.schedule(push)
        assert list(await run) == [2, 2]
        await coordinator.join()
        assert float((await w.read())[0]) == -2


@pytest.mark.virtual_time
async def test_a_replica_that_waits_for_a_token_is_not_kept_by_one_that_waits_for_it():
    async with coordinating(num_workers=2) as (_, coordinator):
        w, push = synchronous(coordinator)

        async def fn():
            if await replica_id() == 0:
                await push()
            return await reduced()

        assert list(await coordinator.strategy.run(fn)) == [2, 2]
        assert float((await w.read())[0]) == -1

        outcomes, partial = await coordinator.strategy.run(push)
        assert (list(outcomes), list(partial)) == (["accepted"] * 2, [False, False])
        assert float((await w.read())[0]) == -2


@pytest.mark.virtual_time
@pytest.mark.parametrize("first", [0, 1])
async def test_ps_0_learns_who_waits_in_a_collective_whenever_that_begins(first):
    async with coordinating(num_workers=2) as (_, coordinator):
        w, push = synchronous(coordinator)

        async def fn():
            if await replica_id() == first:
                await asyncio.sleep(3)
            if await replica_id():
                await push()
            return await reduced()

        async with asyncio.timeout(20):
            assert list(await coordinator.strategy.run(fn)) == [2, 2]
        assert float((await w.read())[0]) == -1


@pytest.mark.virtual_time
async def test_a_slow_replica_is_given_up_and_not_those_who_wait_for_it():
    async with coordinating(num_workers=3, closure_timeout=5) as (_, coordinator):

        async def fn():
            if await replica_id() == 2:
                await event_of("never").wait()
            await reduced()

        with pytest.raises(WorkerLost, match="task:2"):
            await coordinator.strategy.run(fn)
        others = {worker.worker for worker in coordinator.statistics()["closures"].workers}
        assert others >= {"/job:worker/task:0", "/job:worker/task:1"}
