"""All tasks of a coordinator are asked: those that answer late, those that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from memory_cluster import cluster_of, coordinating, event_of, note
from psync.net.tracing import collecting
from psync.net.tracing.collecting import SpanCollector
from psync.net.tracing.readings import Reading
from psync.net.tracing.recorder import LEASE_S
from traced_by_hand import entries_of

pytestmark = pytest.mark.virtual_time


def collector_of(coordinator: Any) -> SpanCollector:
    collector: SpanCollector = coordinator._seen.source.spans
    return collector


def tasks(readings: list[Reading]) -> list[str]:
    return sorted(reading.task for reading in readings)


CHIEF, PS = "/job:chief/task:0", "/job:ps/task:0"
WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]


async def test_all_tasks_answer() -> None:
    async with coordinating() as (_, coordinator):
        collector = collector_of(coordinator)
        for _ in range(2):
            assert tasks(await collector.read("r")) == [CHIEF, PS, *WORKERS]
        assert tasks(await collector.read("r", last=True)) == [CHIEF, PS, *WORKERS]


async def test_who_is_gone_is_not_waited_for_and_others_go_on() -> None:
    async with coordinating() as (cluster, coordinator):
        collector = collector_of(coordinator)
        await collector.read("r")
        await cluster.kill_worker("worker-1")
        await asyncio.sleep(1)
        assert tasks(await collector.read("r")) == [CHIEF, PS, WORKERS[0]]
        await cluster.revive("worker-1")
        await asyncio.sleep(5)
        assert tasks(await collector.read("r", last=True)) == [CHIEF, PS, *WORKERS]


async def test_a_task_that_dies_while_it_is_asked_is_left_out() -> None:
    async with coordinating() as (cluster, coordinator):
        cluster.network.partition("worker-1")
        reading = asyncio.create_task(collector_of(coordinator).read("r"))
        await asyncio.sleep(0.01)
        await cluster.kill_worker("worker-1")
        assert tasks(await reading) == [CHIEF, PS, WORKERS[0]]
        cluster.network.heal("worker-1")


async def test_what_comes_late_is_in_a_later_reading() -> None:
    async with coordinating() as (cluster, coordinator):
        collector = collector_of(coordinator)
        cluster.network.partition("worker-1")
        assert tasks(await collector.read("r")) == [CHIEF, PS, WORKERS[0]]
        cluster.network.heal("worker-1")
        await asyncio.sleep(1)
        assert tasks(await collector.read("r")).count(WORKERS[1]) == 2  # the late one, and this


async def test_many_tasks_are_asked_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "ASKED_AT_ONCE", 1)
    async with coordinating() as (_, coordinator):
        collector = collector_of(coordinator)
        assert tasks(await collector.read("r")) == [CHIEF, PS, *WORKERS]  # all begin
        turns = [tasks(await collector.read("r"))[1] for _ in range(6)]
        assert sorted(turns[:3]) == sorted(turns[3:]) == [PS, *WORKERS]
        assert tasks(await collector.read("r", last=True)) == [CHIEF, PS, *WORKERS]


async def test_a_reader_that_does_not_come_back_is_forgotten() -> None:
    async with coordinating() as (_, coordinator):
        collector = collector_of(coordinator)
        await collector.read("r")
        await asyncio.sleep(LEASE_S + 2)
        first = next(each.body for each in await collector.read("r") if each.task == PS)
        assert msgpack.unpackb(first)["facts"] != {}  # as for a new one
        await collector.read("r", last=True)


async def test_when_the_coordinator_closes_nobody_is_left_asking() -> None:
    async with cluster_of() as cluster:
        import psync

        async with psync.ClusterCoordinator(cluster.strategy()) as coordinator:
            cluster.network.partition("worker-1")
            await collector_of(coordinator).read("r")
            cluster.network.heal("worker-1")


async def test_a_closure_that_runs_when_it_begins_is_known() -> None:
    async with coordinating(num_workers=1) as (_, coordinator):

        async def step() -> None:
            await note("running")
            await event_of("go").wait()

        value = coordinator.schedule(step)
        await event_of("running").wait()
        collector = collector_of(coordinator)
        readings = [*await collector.read("r"), *await collector.read("r", last=True)]
        event_of("go").set()
        await value
        began = [
            entry[1:]
            for task, body, *_ in readings
            for entry in entries_of(body)
            if task in WORKERS and entry[1] in ("began", "work")
        ]
        assert sorted(began, key=str) == [["began", 0], ["work", 0]]
