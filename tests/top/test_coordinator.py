"""Workers that are lost, what is counted, what goes over the wire."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import coordinating, event_of
from psync.errors import (
    ClosureCancelled,
    ClosureError,
    ContextError,
    PartitionError,
    UsageError,
    WorkerLost,
)

# --- what travels ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.parametrize("ends", ["with values", "cancelled"])
async def test_nothing_is_kept_of_closures_that_have_ended(ends: str):
    """Nor tables of dicts that are empty again, which keep the size they once needed."""
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step():
            pass

        async def run(count: int) -> None:
            values = [coordinator.schedule(step) for _ in range(count)]
            if ends == "cancelled":
                for value in values:
                    value.cancel()
            await asyncio.wait([asyncio.ensure_future(coordinator.join())])

        await run(10)
        gc.collect()
        tracemalloc.start()
        try:
            await run(10_000)
            gc.collect()
            ours = tracemalloc.Filter(True, "*/psync/*")
            snapshot = tracemalloc.take_snapshot().filter_traces([ours])
        finally:
            tracemalloc.stop()
        assert sum(trace.size for trace in snapshot.traces) < 100 << 10


@pytest.mark.virtual_time
async def test_a_worker_whose_step_computes_has_little_unread():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        pieces: list[int] = []

        def note(link: Any, direction: str, num_bytes: int) -> None:
            if "worker-0:1" in str(link.ends) and memory_cluster.shared.get("computing"):
                pieces.append(num_bytes)

        cluster.network.trace_deliveries(note)

        async def first():
            event_of("started").set()
            await event_of("go on").wait()

        async def use(array):
            return array.nbytes

        coordinator.schedule(first)
        await event_of("started").wait()
        memory_cluster.shared["computing"] = True
        arrays = [np.zeros(15 << 10, np.uint8) for _ in range(50)]
        values = [coordinator.schedule(use, args=(array,)) for array in arrays]
        await asyncio.sleep(0.02)
        memory_cluster.shared["computing"] = False
        assert sum(pieces) < (64 << 10) + 4096
        event_of("go on").set()
        assert await coordinator.fetch(values) == [15 << 10] * 50


async def test_a_model_does_not_pass_through_the_coordinator():
    async with coordinating(2) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(16 << 20, np.float32), name="w")  # 64 MiB
        optimizer = psync.optimizers.SGD(0.1)

        async def step():
            await optimizer.apply_gradients([(await w.read(), w)])

        def nbytes() -> int:
            network = coordinator.statistics()["network"]
            return network["bytes_sent"] + network["bytes_received"]

        await coordinator.schedule(step)
        before = nbytes()
        for _ in range(6):
            coordinator.schedule(step)
        await coordinator.join()
        assert nbytes() - before < 6 * 4096


# --- variables come first --------------------------------------------------------------------


async def test_a_variable_that_cannot_be_created_fails_what_is_scheduled():
    async with coordinating() as (_, coordinator):
        with coordinator.strategy.scope():
            psync.Variable(lambda: np.ones(3), name="w", shape=(4,), dtype="float32")
        value = coordinator.schedule(lambda: 1)
        with pytest.raises(PartitionError):
            await coordinator.join()
        with pytest.raises(psync.errors.ClosureCancelled):
            await value
        with pytest.raises(PartitionError):  # for ever
            await coordinator.join()


# --- workers that are lost -------------------------------------------------------------------


@pytest.mark.promise("closures.at-least-once")
@pytest.mark.virtual_time
async def test_closures_of_a_lost_worker_run_elsewhere_and_first():
    async with coordinating(num_workers=2) as (cluster, coordinator):
        order: list[int] = []
        memory_cluster.shared["order"] = order

        async def step(i):
            memory_cluster.shared["order"].append((i, psync.get_worker_index()))
            await asyncio.sleep(1)
            return i

        values = [coordinator.schedule(step, args=(i,)) for i in range(12)]
        await asyncio.sleep(0.5)
        lost = [i for i, worker in order if worker == 1]
        await cluster.stop("worker-1")
        await coordinator.join()
        assert await coordinator.fetch(values) == list(range(12))
        counts = coordinator.statistics()["closures"]
        assert counts.finished == 12
        assert counts.put_back == 2  # one was running, one was held ahead
        after = [i for i, worker in order[2:] if worker == 0]
        assert after.index(lost[0]) < after.index(11)
        assert [i for i, _ in order].count(lost[0]) == 2


@pytest.mark.virtual_time
async def test_late_results_of_a_lost_incarnation_are_ignored():
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def step():
            runs = memory_cluster.shared["runs"] = memory_cluster.shared.get("runs", 0) + 1
            event_of("started").set()
            await asyncio.sleep(5)
            return runs

        value = coordinator.schedule(step)
        await event_of("started").wait()
        cluster.network.cut("worker-0:1")
        assert await value == 2
        await coordinator.join()
        counts = coordinator.statistics()["closures"]
        assert (counts.finished, counts.put_back) == (1, 1)


@pytest.mark.virtual_time
async def test_losing_either_lane_ends_the_session_on_both_sides():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        for _ in range(2):
            links = [link for link in cluster.network.links("worker-0:1")]  # control and bulk
            assert len(links) == 2
            links[1].cut()
            await asyncio.sleep(3)
            assert await coordinator.schedule(psync.get_worker_index) == 0


@pytest.mark.promise("closures.killer-fails")
@pytest.mark.virtual_time
async def test_a_closure_that_loses_three_workers_is_an_error_that_names_them():
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def deadly():
            event_of("started").set()
            await asyncio.sleep(3600)

        value = coordinator.schedule(deadly)
        for _ in range(3):
            await event_of("started").wait()
            event_of("started").clear()
            cluster.network.cut("worker-0:1")
        with pytest.raises(ClosureError, match=r"was lost with its worker 3 times") as info:
            await coordinator.join()
        assert "/job:worker/task:0, /job:worker/task:0" in str(info.value)
        assert isinstance(info.value.__cause__, WorkerLost)
        with pytest.raises(ClosureError):
            await value
        await asyncio.sleep(5)
        assert await coordinator.schedule(lambda: 1) == 1


@pytest.mark.promise("closures.not-blamed")
@pytest.mark.virtual_time
async def test_a_closure_is_not_blamed_for_workers_that_die_while_others_do():
    async with coordinating(num_workers=4) as (cluster, coordinator):

        async def slow():
            await asyncio.sleep(5)

        value = coordinator.schedule(slow)
        for _ in range(4):
            await asyncio.sleep(4)
            for index in range(4):
                cluster.network.cut(f"worker-{index}:1")
        await coordinator.join(timeout=60)
        await value.fetch()
        assert coordinator.statistics()["closures"].put_back == 4


@pytest.mark.promise("schedule.join-reports-waiting")
@pytest.mark.virtual_time
async def test_without_any_worker_join_says_for_whom_it_waits(caplog):
    async with coordinating(num_workers=2) as (cluster, coordinator):
        await cluster.stop("worker-0")
        await cluster.stop("worker-1")
        value = coordinator.schedule(lambda: 1)
        join = asyncio.create_task(coordinator.join())
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(25)
        assert "no worker is connected (waiting for /job:worker/task:0 at worker-0:1" in caplog.text
        assert not join.done()
        await cluster.start("worker-1")
        await join
        assert await value == 1


@pytest.mark.virtual_time
async def test_a_closure_held_behind_one_that_waits_for_it_is_given_back():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def waits():
            await event_of("set").wait()

        async def sets():
            event_of("set").set()

        async def quick():
            await asyncio.sleep(0.01)

        coordinator.schedule(waits)
        coordinator.schedule(quick)  # for the other worker
        coordinator.schedule(sets)  # sent ahead, behind the one that waits for it
        for _ in range(6):
            coordinator.schedule(quick)
        await coordinator.join(timeout=60)
        assert coordinator.statistics()["closures"].given_back > 0


@pytest.mark.virtual_time
async def test_a_result_leaves_although_the_next_step_waits_for_something_else():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def quick():
            return 1

        async def waits():
            await event_of("go on").wait()

        first = coordinator.schedule(quick)
        coordinator.schedule(waits)
        assert await asyncio.wait_for(first.fetch(), 5) == 1
        event_of("go on").set()
        await coordinator.join()


# --- a ps that is away -----------------------------------------------------------------------


@pytest.mark.promise("failures.connection")
@pytest.mark.virtual_time
async def test_a_ps_that_is_away_for_a_moment_is_waited_for(caplog):
    caplog.set_level("INFO")
    async with coordinating() as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.ones(4, np.float32), name="w")

        async def step():
            await w.assign_add(np.ones(4, np.float32))

        await coordinator.schedule(step)
        cluster.network.cut("ps-0:1")
        await coordinator.schedule(step)
        assert (await w.read() == 3).all()
        await asyncio.sleep(3)
        assert "/job:ps/task:0 is reachable again" in caplog.text


# --- a step asks for the end -------------------------------------------------------------------


async def test_a_step_ends_training_for_all() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(number: int) -> int:
            if number == 1:
                await event_of("second").wait()
                psync.request_stop("the loss is NaN")
                psync.request_stop("another reason")
            else:
                event_of("second").set()
                await event_of("first goes on").wait()
            return number

        values = [coordinator.schedule(step, (number,)) for number in range(40)]
        assert coordinator.stop_reason is None
        assert await values[1] == 1
        late = coordinator.schedule(step, (40,))
        for value in (*values[2:], late):  # while the first one runs
            with pytest.raises(ClosureCancelled, match=r"asked to stop: the loss is NaN"):
                await value
        event_of("first goes on").set()
        await coordinator.join()
        assert coordinator.stop_reason == "the loss is NaN"
        assert [await values[number] for number in (0, 1)] == [0, 1]
        # What is scheduled after join runs, and joins end without a reason.
        assert await coordinator.schedule(step, (50,)) == 50
        await coordinator.join()
        assert coordinator.stop_reason is None


async def test_an_error_while_training_stops_is_raised() -> None:
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(number: int) -> None:
            if number == 0:
                psync.request_stop("enough")
            else:
                await event_of("go").wait()
                raise ZeroDivisionError

        first, _ = (coordinator.schedule(step, (number,)) for number in range(2))
        await first
        assert coordinator.stop_reason == "enough"
        event_of("go").set()
        with pytest.raises(ZeroDivisionError):
            await coordinator.join()
        await coordinator.join()


async def test_it_can_be_asked_for_by_a_plain_step_and_by_the_last_closure() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):
        coordinator.schedule(lambda: psync.request_stop("x" * 2000))
        await coordinator.join()
        assert coordinator.stop_reason == "x" * 1000
        await coordinator.join()
        assert coordinator.stop_reason is None


async def test_where_it_cannot_be_asked_for_it_is_said() -> None:
    with pytest.raises(ContextError, match=r"expected a step.*\n.*session.request_stop\(\)"):
        psync.request_stop("in the program")
    async with coordinating(num_workers=1) as (_, coordinator):
        for reason in ("", None, 3):
            coordinator.schedule(psync.request_stop, (reason,))
            with pytest.raises(UsageError, match="expected a reason as text"):
                await coordinator.join()
