"""What waits for a backup, and for what a backup waits: given up meanwhile, it holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import psync
from chief_lives import backing_one_another_up, life, silence
from inside import (
    addresses_told,
    backup_of,
    backups_of,
    chief_of,
    endpoint_of,
    handlers_of,
    rule_of,
    settled,
    store_of,
)
from memory_cluster import MemoryCluster, replicated
from ps_cluster import CHIEF, hold, pull, until
from psync.net.connection import Handler, Request
from psync.net.process_state import fresh_process
from psync.ps_task import PsTask
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.messages import AttachPs, BackUp, CloseStep, LockShards, PsAttached, UnlockShards
from replica_training import LARGE, SMALL, ColumnsTraining, StepsTraining
from sync_cluster import SyncCluster


class Held:
    """Messages of one kind to one ps, which are late."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.go_on = asyncio.Event()


@contextlib.contextmanager
def held_up(task: PsTask, kind: type[Message]) -> Iterator[Held]:
    held = Held()
    handlers = handlers_of(task)
    handler = handlers[kind]

    async def later(request: Request[Any]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        held.came.set()
        await held.go_on.wait()
        answer: Any = handler.run(peer, message, body)
        return await answer if asyncio.iscoroutine(answer) or asyncio.isfuture(answer) else answer

    handlers[kind] = Handler(later, handler.prepare)
    try:
        yield held
    finally:
        held.go_on.set()
        handlers[kind] = handler


def order_anew(coordinator: psync.ClusterCoordinator) -> None:
    """Let all backups be made anew, as after a fail-over: what was being made is given up."""
    recovery = chief_of(coordinator).recovery
    recovery.backups.pause()
    for ps in range(len(recovery.rule.hosts)):
        recovery.rule.backed_up(ps, None)
    recovery.backups.keep()


async def test_a_copy_that_is_given_up_while_a_step_is_closed_lets_steps_go_on() -> None:
    async with replicated() as (cluster, coordinator):
        training = ColumnsTraining(coordinator, SMALL)
        training.schedule(4)
        await coordinator.join()
        ordered: list[int] = []
        handlers = handlers_of(cluster.ps("ps-0"))
        handler = handlers[BackUp]

        def note(request: Request[BackUp]) -> None:
            peer, message, body = request.peer, request.message, request.segments
            ordered.append(message.epoch)
            return handler.run(peer, message, body)

        handlers[BackUp] = Handler(note, handler.prepare)
        with held_up(cluster.ps("ps-1"), CloseStep) as held:
            training.schedule(4)
            await held.came.wait()
            for count in (1, 2):
                order_anew(coordinator)
                await until(lambda count=count: len(ordered) >= count)
                await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await coordinator.join()
            await coordinator.backed_up()
        await training.check()


async def test_a_first_copy_waits_for_no_step_that_waits_for_a_lock() -> None:
    """Whoever holds the lock changes the shard before it gives it back."""
    async with SyncCluster(2) as cluster:
        cluster.places = iter([1])
        v = await cluster.create("v", np.zeros(1, np.float32))
        cluster.configure(needed=1)
        holder, pusher = cluster.client("/job:worker/task:1"), cluster.replica(0)
        members = [shard.key for shard in v.shards]
        link = holder.links[1]
        await link.call(lambda _: LockShards(1, members, 10.0), locked=True)
        pushing = asyncio.create_task(pusher.push((v,), (1.0,)))
        await until(lambda: "wait for a lock" in str(cluster.ps[1].describe()))
        order = BackUp(1, "/job:ps/task:0", "ps0:1", False)
        copying = asyncio.create_task(cluster.chief.links[1].call(lambda _: order))
        await until(lambda: cluster.ps[1].statistics()["backup"])
        await settle()
        async with asyncio.timeout(5):
            await holder.assign(
                holder.plan((v,)),
                [np.ones(1, np.float32)],
                op="add",
                closure=1,
                ordinal=0,
                lock=1,
            )
            await link.call(lambda _: UnlockShards(1), locked=True)
            await pushing
            await copying
        (value,) = await pull(cluster.chief, v)
        assert value[0] == 0.5


async def test_a_copy_that_is_given_up_in_the_queue_names_nothing_for_the_next() -> None:
    """Of a set that it has named a later backup would never hear which shards it is."""
    async with SyncCluster(2) as cluster:
        cluster.places = iter([1])
        v = await cluster.create("v", np.zeros(2 * LARGE, np.float32))
        task = cluster.ps[1]

        async def back_up(epoch: int) -> None:
            order = BackUp(epoch, "/job:ps/task:0", "ps0:1", False)
            await cluster.chief.links[1].call(lambda _: order)

        replicas = [cluster.replica(0), cluster.replica(1)]
        with held_up(task, CloseStep) as held:
            pushes = [asyncio.create_task(each.push((v,), (1.0,))) for each in replicas]
            await held.came.wait()
            release = hold(task, v)
            given_up = asyncio.create_task(back_up(1))
            await until(lambda: task.statistics()["backup"].get("waiting") == 1)
        await until(lambda: task.statistics()["backup"].get("waiting") == 2)
        backed_up = asyncio.create_task(back_up(2))
        await until(lambda: task.statistics()["backup"].get("waiting") == 3)
        release()
        await asyncio.gather(given_up, return_exceptions=True)
        await backed_up
        tokens = [each.token for each in await asyncio.gather(*pushes)]
        await asyncio.gather(
            *(each.push((v,), (1.0,), token) for each, token in zip(replicas, tokens, strict=True))
        )
        (backup,) = backups_of(cluster.ps[0]).values()
        await backup.settle()
        key = v.shards[0].key
        assert store_of(backup.task).version(key) == store_of(task).version(key)


@pytest.mark.parametrize("addresses", [["ps0:1"], ["ps0:1", "ps1:1", "ps2:1"]])
async def test_a_chief_of_another_number_of_ps_tasks_may_attach(addresses: list[str]) -> None:
    async with SyncCluster(2) as cluster:
        cluster.places = iter([1])
        v = await cluster.create("v", np.zeros(1, np.float32))
        cluster.configure(needed=1)
        await cluster.replica(0).push((v,), (1.0,))  # ps 0 is connected to the other one
        chief = cluster.client(CHIEF, 200)
        attach = AttachPs(200, addresses, 15.0, keep=True)
        assert isinstance((await chief.links[0].call(lambda _: attach)).message, PsAttached)


@pytest.mark.virtual_time
@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_step_that_is_under_way_when_ps_0_is_attached_is_counted(
    size: int, step_ps: int
) -> None:
    with fresh_process():
        async with backing_one_another_up() as cluster:
            async with life(cluster) as first:
                training = StepsTraining(first, size, step_ps)
                training.schedule(6)
                await first.join()
                with held_up(cluster.ps("ps-1"), CloseStep) as held:
                    training.schedule(40)
                    await held.came.wait()
                    silence(cluster, first)
                    attaching = asyncio.create_task(attached(cluster, held))
                    async with life(cluster) as second:
                        await attaching
                        training = StepsTraining(second, size, step_ps)
                        assert await training.check() == 4


async def attached(cluster: MemoryCluster, held: Held) -> None:
    """Let what was held up go on once ps 0 serves the next chief."""
    ps_0 = cluster.ps("ps-0")
    (before, *_) = ps_0.describe()
    await until(lambda: ps_0.describe()[0] != before)
    await settle()
    held.go_on.set()


async def test_a_push_that_comes_while_a_snapshot_is_taken_counts_once() -> None:
    """It is the first entry of the log, and not in what the snapshot is completed with."""
    async with SyncCluster(2) as cluster:
        cluster.places = iter([0, 0])
        v = await cluster.create("v", np.zeros(2, np.float32))
        large = await cluster.create("large", np.zeros(2 * LARGE, np.float32))
        cluster.configure(needed=2)
        await asyncio.gather(*(cluster.replica(index).push((v,), (1.0,)) for index in range(2)))
        release = hold(cluster.ps[0], large)
        order = BackUp(1, "/job:ps/task:1", "ps1:1", False)
        copying = asyncio.create_task(cluster.chief.links[0].call(lambda _: order))
        await until(lambda: cluster.ps[0].statistics()["backup"].get("waiting") == 1)
        pushing = asyncio.create_task(cluster.replica(2).push((v,), (1.0,), 1))
        await until(lambda: cluster.ps[0].statistics()["backup"]["waiting"] == 2)
        assert not cluster.group()["counted"]
        release()
        await copying
        await until(lambda: cluster.group()["counted"])
        await settled(cluster.ps[1])
        backup = backup_of(cluster.ps[1], 0)
        assert len(rule_of(backup).pending()) == 1
        assert rule_of(backup).snapshot() == rule_of(cluster.ps[0]).snapshot()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def test_news_of_where_ps_tasks_are_may_come_late() -> None:
    """Sent before a fail-over, over a connection that was lost, and served after it."""
    async with replicated() as (cluster, coordinator):
        training = ColumnsTraining(coordinator, SMALL)
        training.schedule(4)
        await coordinator.join()
        links = chief_of(coordinator).links
        before = links.served.attachment(links.ps.links[0])
        await cluster.kill("ps-1")
        training.schedule(4)
        await coordinator.join()
        ps_0 = cluster.ps("ps-0")
        now = addresses_told(ps_0)
        assert now != before.ps_addresses
        chief = next(peer for peer in endpoint_of(ps_0).peers if peer.task == CHIEF)
        await ps_0._attach(chief, before, [])
        assert addresses_told(ps_0) == now
        training.schedule(4)
        await coordinator.join()
        await training.check()
