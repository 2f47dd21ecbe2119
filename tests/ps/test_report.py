"""What a ps says of itself in a report."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from inside import chief_of, locks_of, store_of
from memory_cluster import coordinating, event_of, note
from ps_by_hand import PsByHand
from ps_cluster import SECRET
from psync.net.platform import Platform
from psync.ps.report import describe_ps
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork
from psync.wire.messages import Gate, OpenGate


@pytest.mark.virtual_time
async def test_locks_are_told_with_their_holders_and_how_many_wait():
    async with coordinating(num_ps=2, num_workers=2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(8, np.float32), name="v")
            w = psync.Variable(np.zeros(8, np.float32), name="w")
        await psync.pull((v, w))
        locks = locks_of(cluster.tasks["ps-0"])
        key = store_of(cluster.tasks["ps-0"]).keys()[0]
        held = locks.table.claim([key], exclusive=True)  # as if a task held it

        async def assigns():
            await note("assigning")
            await v.assign(np.ones(8, np.float32))

        value = coordinator.schedule(assigns)
        await event_of("assigning").wait()
        await asyncio.sleep(1)
        text = "\n".join(cluster.tasks["ps-0"].describe())
        assert "1 locks and updates wait for a lock to end" in text
        locks.end(held)
        await value
        assert "wait for a lock" not in "\n".join(cluster.tasks["ps-0"].describe())


def test_a_ps_without_connections_says_so():
    lines = PsTask(Platform(MemoryNetwork(), SECRET), 0, "ps0:1").describe()
    assert lines[0] == "/job:ps/task:0: waits for a coordinator"
    assert "  connections: none" in lines
    assert lines[-1].startswith("  counters: {")


def test_what_is_many_is_named_in_part(monkeypatch):
    monkeypatch.setattr("psync.ps.report.MAX_LISTED", 2)
    ps = PsByHand()
    statistics = {**ps.services.statistics(), "sync": {}}
    peers = [ps.peer((f"/job:worker/task:{index}", 7)) for index in range(5)]
    waiting = [(peer.task, peer.incarnation) for peer in peers]
    lines = describe_ps("/job:ps/task:1", 100, statistics, ["x", "y", "z"], waiting, peers)
    assert lines[0] == "/job:ps/task:1: serves coordinator 100"
    assert lines[2:7] == [
        "  x",
        "  y",
        "  and 1 more",
        "  waiting for others: /job:worker/task:0 (7), /job:worker/task:1 (7), and 3 more",
        "  connections: /job:worker/task:0 (7) control, /job:worker/task:1 (7) control, and 3 more",
    ]


@pytest.mark.virtual_time
async def test_a_gate_that_is_shut_is_told_with_who_waits_at_it():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(8, np.float32), name="v")
        await v.read()
        link = chief_of(coordinator).links.ps.links[0]
        await link.call(lambda _: Gate(1))

        async def assigns():
            await note("assigning")
            await v.assign(np.ones(8, np.float32))

        value = coordinator.schedule(assigns)
        await event_of("assigning").wait()
        await asyncio.sleep(1)
        text = "\n".join(cluster.tasks["ps-0"].describe())
        assert "the gate is shut for cut 1: 0 updates are under way, 1 wait" in text
        await link.call(lambda _: OpenGate(1))
        await value
        assert "the gate" not in "\n".join(cluster.tasks["ps-0"].describe())
