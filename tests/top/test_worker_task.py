"""Who may attach a worker, and how its sessions end."""

from __future__ import annotations

import asyncio
import logging

import pytest

import psync
from memory_cluster import coordinating, event_of
from psync.errors import (
    ParameterServerLost,
)


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
