"""Who may attach a worker, and how its sessions end."""

from __future__ import annotations

import asyncio
import logging

import pytest

import psync
from memory_cluster import MemoryCluster, cluster_of, coordinating, event_of, until
from psync.errors import (
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    UsageError,
)
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.wire.messages import AttachWorker, Done, Shutdown


def attachment(coordinator: int, incarnation: int = 5) -> AttachWorker:
    return AttachWorker(0, 1, incarnation, coordinator, "origin", "program", ["ps-0:1"], 15.0)


class Chief:
    """A coordinator by hand."""

    def __init__(self, cluster: MemoryCluster, incarnation: int, task: str = "/job:chief/task:0"):
        self.endpoint = Endpoint(cluster.platform(), task, incarnation, {})
        self.incarnation = incarnation

    async def connect(self, lane: str = "control") -> Connection:
        return await self.endpoint.connect("worker-0:1", "/job:worker/task:0", lane)

    async def attach(self) -> tuple[Connection, Connection]:
        control, bulk = await self.connect(), await self.connect("bulk")
        await control.call(attachment(self.incarnation))
        return control, bulk


async def test_only_a_chief_with_both_connections_attaches_a_worker():
    async with cluster_of(1, 1) as cluster:
        stranger = Chief(cluster, 1, "/job:worker/task:7")
        peer = await stranger.connect()
        with pytest.raises(UsageError, match="got /job:worker/task:7, lane control"):
            await peer.call(attachment(1))
        with pytest.raises(UsageError, match="expected a coordinator, got /job:worker/task:7"):
            await peer.call(Shutdown("because"))
        chief = Chief(cluster, 2)
        control = await chief.connect()
        with pytest.raises(ConnectionLost, match=r"has no bulk connection to /job:chief/task:0"):
            await control.call(attachment(2))
        await chief.connect("bulk")
        assert (await control.call(attachment(2))).message == Done()
        await stranger.endpoint.close()
        await chief.endpoint.close()


async def test_an_older_coordinator_than_the_one_that_is_served_cannot_stop_a_worker():
    async with cluster_of(1, 1) as cluster:
        task = cluster.tasks["worker-0"]
        old, new = Chief(cluster, 1), Chief(cluster, 2)
        control = await old.connect()
        await new.attach()
        with pytest.raises(FencedError, match="works for a newer coordinator than /job:chief"):
            await control.call(Shutdown("the chief has ended"))
        assert not task.stopped.is_set()
        await (await Chief(cluster, 2).connect()).call(Shutdown("the chief has ended"))
        assert task.stopped.is_set()
        for chief in (old, new):
            await chief.endpoint.close()


async def test_without_a_coordinator_any_chief_stops_a_worker():
    async with cluster_of(1, 1) as cluster:
        task = cluster.tasks["worker-0"]
        new, old = Chief(cluster, 2), Chief(cluster, 1)
        control, _ = await new.attach()
        peer = await old.connect()
        await new.endpoint.close()
        await control.wait_closed()
        await until(lambda: task.statistics()["network"]["connections"] == 1)
        await peer.call(Shutdown("the chief has ended"))
        assert task.stopped.is_set()
        await old.endpoint.close()


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
