"""Public coroutines, cancelled after each number of turns of the loop: the owner still works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of, until

pytestmark = pytest.mark.virtual_time

MOST_TURNS = 400


async def cancelled_after(
    turns: int, make: Callable[[], Coroutine[Any, Any, Any]]
) -> tuple[bool, Any]:
    """Run ``make()`` for some turns, then cancel it; return whether it ended by itself, and how."""
    task = asyncio.create_task(make())
    for _ in range(turns):
        if task.done():
            return True, task.result()
        await asyncio.sleep(0)
    task.cancel()
    try:
        return True, await task
    except asyncio.CancelledError:
        return False, None


async def at_each_turn(
    make: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Awaitable[None]]
) -> None:
    """Cancel after 0, 1, 2, … turns until it ends first, and ``check`` each time."""
    for turns in range(MOST_TURNS):
        ended, _ = await cancelled_after(turns, make)
        await check()
        if ended and turns > 0:
            return
    raise AssertionError(f"it did not end within {MOST_TURNS} turns")


def as_coroutine(make: Callable[[], Awaitable[Any]]) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def run() -> Any:
        return await make()

    return run


async def test_coordinator_and_variables_survive_a_cancelled_call():
    async with cluster_of(2, 2) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros((4, 3), np.float32), name="w")
                b = psync.Variable(np.zeros(40_000, np.float32), name="b")
            optimizer = psync.optimizers.SGD(1.0)
            one = np.ones((4, 3), np.float32)

            async def double(x):
                return 2 * x

            async def use():
                await w.assign_add(one)
                return 1

            async def check() -> None:
                before = await w.read()
                await coordinator.schedule(use)
                await coordinator.join()
                assert (await w.read() == before + 1).all()

            def value() -> psync.RemoteValue:
                return coordinator.schedule(double, args=(np.ones(8000),))

            async def join() -> None:
                value()
                await coordinator.join()

            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "join": join,
                "value": lambda: value().fetch(),
                "fetch": lambda: coordinator.fetch([value(), value()]),
                "ps_statistics": coordinator.ps_statistics,
                "read": b.read,
                "pull": lambda: psync.pull((w, b)),
                "apply": lambda: optimizer.apply_gradients([(one, w)]),
            }
            for make in calls.values():
                await at_each_turn(as_coroutine(make), check)


@pytest.mark.promise("updates.started-is-finished")
async def test_an_assign_that_was_cancelled_is_wholly_done_or_not_at_all():
    async with cluster_of(2, 1) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(6, np.float32), name="w")
            await coordinator.schedule(lambda: 0)
            for turns in range(40):
                before = await w.read()
                await cancelled_after(turns, as_coroutine(lambda: w.assign_add(np.ones(6, "f4"))))
                await asyncio.sleep(1)  # it may have been begun: then it ends
                after = await w.read()
                assert (after - before).tolist() in ([0.0] * 6, [1.0] * 6)


@pytest.mark.promise("answers.cancelled-calls")
async def test_a_step_cancelled_at_any_turn_leaves_its_worker_in_order():
    async with cluster_of(1, 1) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(3, np.float32), name="w")
            batches = iter(coordinator.create_per_worker_dataset(lambda: range(10_000)))
            argument = np.zeros(20_000)

            async def step(batches, argument):
                async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                    group.create_task(w.assign_add(np.ones(3, np.float32)))
                return next(batches)

            def plain():
                return asyncio.current_task.__name__

            for turns in range(60):
                value = coordinator.schedule(step, args=(batches, argument))
                for _ in range(turns):
                    await asyncio.sleep(0)
                value.cancel()
                await coordinator.join()
                assert await coordinator.schedule(plain) == "current_task"
                assert (await coordinator.schedule(step, args=(batches, argument))) >= 0
            counts = coordinator.statistics()["closures"]
            assert counts.failed == 0
            assert counts.put_back == 0


async def test_a_start_that_was_cancelled_leaves_nothing_and_can_be_repeated():
    async with cluster_of(2, 2) as cluster:
        for turns in range(MOST_TURNS):
            coordinator = psync.ClusterCoordinator(cluster.strategy())
            ended, _ = await cancelled_after(turns, coordinator.start)
            if ended:
                break
            await coordinator.start()
            assert await coordinator.schedule(lambda: 1) == 1
            await coordinator.close()
        await coordinator.close()
        assert turns > 3
        await until(lambda: not cluster.network.links())  # the workers' ends follow ours


async def test_a_close_that_was_cancelled_frees_the_cluster_all_the_same():
    async with cluster_of(1, 2) as cluster:

        async def forever():
            await asyncio.sleep(3600)

        for turns in range(1, MOST_TURNS):  # before the first one it has not begun
            coordinator = psync.ClusterCoordinator(cluster.strategy())
            await coordinator.start()
            for _ in range(4):
                coordinator.schedule(forever)
            await asyncio.sleep(0.01)
            ended, _ = await cancelled_after(turns, coordinator.close)
            await asyncio.sleep(5)
            async with psync.ClusterCoordinator(cluster.strategy()) as second:
                assert await second.schedule(lambda: 1) == 1
            if ended:
                break
        assert turns > 1
        await asyncio.sleep(5)
        assert cluster.network.links() == []
