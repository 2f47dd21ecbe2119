"""A step that takes too long costs its worker, if the program says so."""

from __future__ import annotations

import asyncio

import pytest

import memory_cluster
import psync
from memory_cluster import coordinating
from psync.chief.closure_timeout import watch
from psync.closures.closure import Closure
from psync.closures.queue import ClosureQueue

pytestmark = pytest.mark.virtual_time


async def test_only_a_closure_that_stays_the_oldest_is_given_up():
    queue = ClosureQueue()
    queue.worker_joined("w0")
    queue.worker_joined("w1")
    closures = [Closure(i) for i in range(6)]
    for closure in closures:
        queue.schedule(closure)
    queue.dispatch()
    loop = asyncio.get_running_loop()
    seen: list[tuple[str, float]] = []
    watching = asyncio.create_task(
        watch(queue, 8.0, lambda worker, closure: seen.append((worker, loop.time())))
    )
    for _ in range(2):
        await asyncio.sleep(5)
        running = {worker: closure for worker, closure in reversed(queue.in_flight())}
        queue.finished("w1", [running["w1"].id], 5.0)  # w1 makes progress
    await asyncio.sleep(2)
    watching.cancel()
    await asyncio.wait((watching,))
    assert seen == [("w0", 9.0)]  # seen first after 1 s


async def test_a_closure_that_hangs_runs_again_elsewhere_and_the_log_says_why(caplog):
    async with coordinating(num_workers=2, closure_timeout=30) as (_, coordinator):

        async def hangs_once():
            if memory_cluster.shared.setdefault("worker", psync.get_worker_index()) == (
                psync.get_worker_index()
            ):
                await asyncio.sleep(3600)
            return psync.get_worker_index()

        value = coordinator.schedule(hangs_once)
        await coordinator.join(timeout=200)
        assert await value == 1 - memory_cluster.shared["worker"]
        assert "is lost (closure 0 (" in caplog.text
        assert "took longer than 30 s" in caplog.text
