"""One closure after the other, each of them reported, and traced if asked; how sessions end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

import pytest

import memory_cluster
import psync
from memory_cluster import coordinating, event_of, until
from psync.errors import ParameterServerLost, RemoteError
from psync.testing import MemoryNetwork
from traced_by_hand import entries_of


async def test_closures_of_one_worker_run_one_at_a_time():
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["running"] = 0

        async def step():
            memory_cluster.shared["running"] += 1
            await asyncio.sleep(0)
            found = memory_cluster.shared["running"]
            memory_cluster.shared["running"] -= 1
            return found

        assert set(await coordinator.fetch([coordinator.schedule(step) for _ in range(50)])) == {1}


async def test_short_steps_that_never_await_give_others_a_turn():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def short():
            total = 0
            for i in range(300):
                total += i
            return total

        for _ in range(3000):
            coordinator.schedule(short)
        join = asyncio.create_task(coordinator.join())
        loop = asyncio.get_running_loop()
        longest, last = 0.0, loop.time()
        while not join.done():
            await asyncio.sleep(0)
            now = loop.time()
            longest, last = max(longest, now - last), now
        assert longest < 0.5


@pytest.mark.virtual_time
async def test_the_way_of_a_function_to_a_worker_is_no_part_of_the_pace_that_it_reports():
    network = MemoryNetwork(seed=1, latency=(0.01, 0.01))
    async with psync.LocalCluster(1, 1, processes=False, network=network) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:

            async def step():
                await asyncio.sleep(0.001)

            await coordinator.schedule(step)
            assert (await coordinator.status()).workers[0].mean_s == pytest.approx(0.001)


async def test_a_step_sees_its_worker_and_the_program_does_not():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step():
            return psync.get_worker_index()

        found = await coordinator.fetch([coordinator.schedule(step) for _ in range(8)])
        assert set(found) <= {0, 1}
        with pytest.raises(psync.errors.UsageError, match="outside a step"):
            psync.get_worker_index()


async def test_timeouts_and_task_groups_work_inside_a_step():
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step(i):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.sleep(1)
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(fails())
            return i

        async def fails():
            raise ValueError("inside")

        values = [coordinator.schedule(step, args=(i,)) for i in range(20)]
        await coordinator.join()
        assert await coordinator.fetch(values) == list(range(20))


async def test_what_a_step_raises_is_its_outcome_whatever_it_is():
    async with coordinating(num_workers=1) as (_, coordinator):

        def exits():
            raise SystemExit(3)

        def stops():
            raise StopIteration

        def closes():
            raise GeneratorExit

        def interrupts():
            raise KeyboardInterrupt("no key was pressed")

        async def interrupts_on_the_loop():
            interrupts()

        class Odd(BaseException):
            pass

        async def odd():
            raise Odd("odd")

        for step, text in (
            (exits, "SystemExit on /job:worker/task:0: 3"),
            (interrupts, "KeyboardInterrupt on /job:worker/task:0: no key was pressed"),
            (interrupts_on_the_loop, "KeyboardInterrupt on /job:worker/task:0: no key was"),
            (closes, "GeneratorExit on /job:worker/task:0"),
            (odd, "Odd on /job:worker/task:0: odd"),
        ):
            coordinator.schedule(step)
            with pytest.raises(RemoteError, match=text):
                await coordinator.join()
        coordinator.schedule(stops)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await coordinator.join()
        assert await coordinator.schedule(lambda: 1) == 1


async def test_results_of_many_sizes_arrive_whole_and_in_place():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(n):
            return b"x" * n

        sizes = [0, 1, 100, 70_000, 5, 200_000, 60_000, 10_000, 3, 65_536] * 5
        values = [coordinator.schedule(step, args=(n,)) for n in sizes]
        await coordinator.join()
        assert [len(each) for each in await coordinator.fetch(values)] == sizes


@pytest.mark.virtual_time
async def test_losing_the_bulk_connection_while_arguments_are_fetched_is_no_error_of_the_step():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        argument = b"x" * 100_000
        cut = {"done": False}

        def cut_once(link, direction, num_bytes):
            if num_bytes > 50_000 and not cut["done"]:
                cut["done"] = True
                asyncio.get_running_loop().call_soon(link.cut)

        cluster.network.trace_deliveries(cut_once)

        async def step(argument):
            return len(argument)

        values = [coordinator.schedule(step, args=(argument,)) for _ in range(5)]
        await coordinator.join()
        assert cut["done"]
        assert await coordinator.fetch(values) == [100_000] * 5


async def test_a_cancelled_closure_in_the_middle_of_its_queue_ends_at_once():
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def quick():
            return 0

        async def waits():
            event_of("started").set()
            await event_of("go on").wait()

        for _ in range(300):
            coordinator.schedule(quick)
        await coordinator.join()  # the worker is known to be fast: much is sent ahead
        coordinator.schedule(waits)
        values = [coordinator.schedule(quick) for _ in range(30)]
        await event_of("started").wait()
        await until(lambda: "queue: 0 closures" not in str(cluster.tasks["worker-0"].describe()))
        values[3].cancel()
        with pytest.raises(psync.errors.ClosureCancelled):
            await values[3]
        event_of("go on").set()
        await coordinator.join()
        assert await coordinator.fetch([*values[:3], *values[4:]]) == [0] * 29


async def test_context_variables_of_the_program_are_not_seen_by_steps():
    marker: contextvars.ContextVar[int] = contextvars.ContextVar("marker", default=0)
    memory_cluster.shared["marker"] = marker
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["marker"] = marker
        marker.set(7)
        assert await coordinator.schedule(lambda: memory_cluster.shared["marker"].get()) == 0


async def test_whoever_writes_to_a_value_hears_that_it_is_read_only_and_what_to_do():
    async with coordinating(num_workers=1) as (_, coordinator):
        kept = ValueError("assignment destination is read-only")

        def step():
            memory_cluster.shared.setdefault("kept", kept)
            raise memory_cluster.shared["kept"]

        for _ in range(2):  # the same exception of two closures
            coordinator.schedule(step)
            with pytest.raises(ValueError, match="read-only") as caught:
                await coordinator.join()
            assert str(caught.value.__cause__).count("copy=True, out=, or value.copy()") == 1


@pytest.mark.virtual_time
async def test_a_step_that_does_not_stop_keeps_no_worker_from_closing(caplog):
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def stubborn():
            event_of("started").set()
            while not event_of("go on").is_set():
                try:
                    await event_of("go on").wait()
                except asyncio.CancelledError:
                    continue

        coordinator.schedule(stubborn)
        await event_of("started").wait()
        with caplog.at_level(logging.WARNING):
            await cluster.stop("worker-0")
        assert "closure 0 does not stop although it was cancelled" in caplog.text
        event_of("go on").set()
        await asyncio.sleep(1)


@pytest.mark.virtual_time
async def test_a_worker_that_cannot_reach_a_ps_begins_anew_and_the_step_never_knows(caplog):
    async with coordinating(2, 2, ps_timeout=15, max_losses=1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            counters = [psync.Variable(0, name=f"v{i}") for i in range(2)]  # one on each ps

        async def step():
            try:
                for counter in counters:
                    await counter.assign_add(1)
            except ParameterServerLost:
                event_of("a step has seen it").set()
                raise
            return psync.get_worker_index()

        assert {await coordinator.schedule(step).fetch() for _ in range(2)} <= {0, 1}
        before = coordinator.statistics()["closures"].finished
        cluster.network.partition("worker-0", "ps-1")
        cluster.network.cut("ps-1:1")
        with caplog.at_level(logging.WARNING):
            values = [coordinator.schedule(step) for _ in range(6)]
            await coordinator.join(timeout=200)
        assert set(await coordinator.fetch(values)) == {1}
        assert not event_of("a step has seen it").is_set()
        assert "/job:worker/task:0 cannot go on (/job:ps/task:1 at ps-1:1 " in caplog.text
        cluster.network.heal("worker-0", "ps-1")
        await asyncio.sleep(400)  # it may have been set aside

        async def slow():
            await asyncio.sleep(1)
            return await step()

        values = [coordinator.schedule(slow) for _ in range(6)]
        await coordinator.join(timeout=200)
        assert set(await coordinator.fetch(values)) == {0, 1}
        assert [int(await counter.read()) for counter in counters] == [before + 12] * 2


@pytest.mark.virtual_time
async def test_closures_are_told_with_their_names_and_ends() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        async def good() -> None: ...

        async def bad() -> None:
            raise ValueError("mine")

        await coordinator.schedule(good)  # before anybody reads
        collector: Any = coordinator._seen.source.spans
        await collector.read_all("r")
        await coordinator.schedule(good)
        coordinator.schedule(bad)
        with pytest.raises(ValueError, match="mine"):
            await coordinator.join()
        told = [
            entry[1:]
            for task, body, *_ in await collector.read_all("r", last=True)
            for entry in entries_of(body)
            if task == "/job:worker/task:0" and not isinstance(entry[1], int)
        ]
        ended = [each for each in told if each[0] == "ended"]
        assert [(each[1], each[2].rpartition(".")[2], each[3]) for each in ended] == [
            (1, "good", "ok"), (2, "bad", "error"),
        ]  # fmt: skip
        assert [each for each in told if each[0] == "work"] == [["work", 0], ["work", -1]] * 2
        await coordinator.schedule(good)  # nobody reads any more
