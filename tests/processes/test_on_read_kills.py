"""Workers that are killed leave what they have added to a variable with a copy for each of them."""

from __future__ import annotations

import os
import signal

import pytest

import psync
from real_training import DEADLY, ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

KIND = {
    "synchronization": psync.VariableSynchronization.ON_READ,
    "aggregation": psync.VariableAggregation.SUM,
}


async def test_the_sum_holds_what_a_worker_added_before_it_was_killed() -> None:
    async with training(1, 2) as (_, strategy, coordinator):
        with strategy.scope():
            seen = psync.Variable(0, **KIND)

        async def step() -> tuple[int, int, int]:
            await seen.assign_add(1)
            return psync.get_worker_index(), os.getpid(), int(await seen.read())

        async def workers(count: int) -> dict[int, tuple[int, int]]:
            results = [coordinator.schedule(step) for _ in range(count)]
            return {index: (pid, own) for index, pid, own in await coordinator.fetch(results)}

        scheduled = 0
        pids: dict[int, tuple[int, int]] = {}
        while len(pids) < 2:
            pids |= await workers(8)
            scheduled += 8
        assert int(await seen.read()) == scheduled
        os.kill(pids[1][0], signal.SIGKILL)
        await workers(8)
        assert int(await seen.read()) == scheduled + 8


@pytest.mark.promise("updates.on-read-at-most-once")
@pytest.mark.parametrize("point", ["worker.push.begun", "worker.push.answered"])
async def test_each_step_counts_once_although_workers_die_all_the_time(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 12
    monkeypatch.setenv("PSYNC_FAILPOINTS", f"{point}=kill@4")  # of each life of a worker
    async with training(1, 2, **DEADLY) as (_, strategy, coordinator):
        with strategy.scope():
            seen = psync.Variable([0.0, 0.0], **KIND)

        async def step() -> None:
            await seen.assign_add([1.0, 2.0])

        for _ in range(count):
            coordinator.schedule(step)
        await coordinator.join()
        assert (await seen.read()).tolist() == [count, 2 * count]
