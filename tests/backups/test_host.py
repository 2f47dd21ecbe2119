"""Backups in the process of another ps: who may feed them, and who makes them serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from asked import Reply, peer_of, served
from backups import W, alone, back_up, create, promote, say, take_over
from inside import (
    accumulators_of,
    backup_of,
    backups_of,
    executor_of,
    host_of,
    settled,
    store_of,
)
from ps_cluster import CHIEF, CONFIG, PsCluster, heard, pull, push
from psync.backups.fingerprint import fingerprint
from psync.errors import FencedError, PsyncError, UsageError
from psync.net.connection import Handler
from psync.ps_task import PsTask
from psync.wire.codec import Message, decode, encode
from psync.wire.handshake import RELEASE
from psync.wire.messages import (
    ApplyGradient,
    BackupBegun,
    BeginBackup,
    CreateShards,
    DefineAccumulator,
    DefineOptimizer,
    Fence,
    FillBackup,
    LogEntries,
    Promote,
    Push,
)


async def test_a_newer_order_replaces_even_one_that_serves_and_the_same_or_an_older_none() -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        first = await promote(cluster, 5)
        assert await promote(cluster, 5) == first
        await back_up(cluster, 6)  # the coordinator has not heard that it serves
        with pytest.raises(FencedError, match="there is a newer backup"):
            await promote(cluster, 5)
        assert await promote(cluster, 7) != first


async def test_it_is_the_coordinator_s_and_the_ps_s_own() -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        with pytest.raises(UsageError, match="has no backup of /job:ps/task:0"):
            await promote(cluster)
        await back_up(cluster)
        link = cluster.chief.links[1]
        for message in (
            FillBackup(0, 1, 0, 0),
            LogEntries(0, 1, 1, []),
            BeginBackup(0, 5, 100, [], 1.0, 0, 1, 100, RELEASE),
        ):
            with pytest.raises(UsageError, match="is not /job:ps/task:0"):
                await link.call(lambda _, message=message: message, [b"x"])
        other = cluster.client("/job:worker/task:0")
        with pytest.raises(FencedError):
            await other.links[1].call(lambda _: Promote(0, 5, 100, []))


async def test_a_newer_coordinator_ends_the_backups_of_the_one_before() -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        newer = cluster.client(CHIEF, 1 << 40)
        await cluster.attach(newer, 1 << 40)
        with pytest.raises(UsageError, match="has no backup"):
            await newer.links[1].call(lambda _: Promote(0, 5, 100, []))
        await asyncio.sleep(0)


async def test_a_backup_that_could_not_do_what_the_other_one_did_never_serves() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        task = backup_of(cluster.ps[1], 0)
        assert isinstance(task, PsTask)

        def no_memory(*_: object) -> Reply:
            raise MemoryError

        task.services.replayed[Push] = Handler(no_memory)
        worker = cluster.client()
        await push(worker, (w,), (1.0,))
        await settled(cluster.ps[1])
        pushing = asyncio.create_task(push(worker, (w,), (1.0,)))
        await back_up(cluster, lost=True)  # the one that is backed up says so as well
        assert not pushing.done()
        await alone(cluster)
        await pushing
        with pytest.raises(PsyncError, match="is damaged"):
            await promote(cluster)


async def test_an_order_that_is_heard_again_later_empties_no_backup() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        begun = heard(cluster.ps[1], BeginBackup)
        await back_up(cluster)
        await push(cluster.client(), (w,), (1.0,))
        handler = host_of(cluster.ps[1]).handlers()[BeginBackup]
        asked = served(handler, peer_of(("/job:ps/task:0", 101)), begun[0], [b"?"])
        assert asked.outcome == Reply(BackupBegun(fingerprint()))
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W - np.float32(0.5))


async def test_entries_that_come_together_are_executed_one_after_the_other() -> None:
    """Those after one that is awaited are judged after it, whatever they are about."""
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        backup = backup_of(cluster.ps[1], 0)
        chief, worker = ("/job:chief/task:0", 100), ("/job:worker/task:0", 1000)
        accumulator = DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0)
        entries: list[tuple[tuple[str, int], Message]] = [
            (chief, DefineOptimizer(7, CONFIG)),
            (chief, accumulator),
            (chief, CreateShards([("x", 9, 0, 0, [6], "float32")], [None])),
            (worker, Push(1, 0, -1, 0, 500, [(9, 0)], 7, None, 0)),
            (chief, Fence(worker[0], 2000)),
            (worker, ApplyGradient(2, 1, -1, 0, "g", [6], None, 0, 1.0)),
        ]
        with_body = CreateShards | Push | ApplyGradient
        message = LogEntries(
            0, 1, backups_of(cluster.ps[1])[0].taken + 1,
            [(*client, encode(each), isinstance(each, with_body)) for client, each in entries],
        )  # fmt: skip
        body = [memoryview(W.tobytes()) for _, each in entries if isinstance(each, with_body)]
        handler = host_of(cluster.ps[1]).handlers()[LogEntries]
        served(handler, peer_of(("/job:ps/task:0", 100)), message, body)
        await settled(cluster.ps[1])
        value = np.frombuffer(b"".join(store_of(backup).read((9, 0))), np.float32)
        assert np.array_equal(value, W - np.float32(0.5) * W)
        # Its sender had been replaced.
        assert accumulators_of(backup).hosted["g"].rule.num_accumulated() == 0


Sent = tuple[str, int, bytes, int]


@pytest.mark.parametrize(
    "alter",
    [
        pytest.param(None, id="skipped"),
        pytest.param(lambda task, born, header, num: (task, born + 1, header, num), id="sender"),
        pytest.param(
            lambda task, born, _, num: (task, born, encode(Fence("/job:worker/task:5", 6)), num),
            id="message",
        ),
    ],
)
async def test_a_backup_that_got_other_entries_is_discarded_though_no_digest_differs(
    alter: Callable[..., Sent] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psync.ps.comparison.CHECK_EVERY", 2)
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        backup = backups_of(cluster.ps[1])[0]
        for ps in (cluster.ps[0], backup_of(cluster.ps[1], 0)):
            executor_of(ps).digest = bytes
        add = backup.add

        def altered(number: int, sent: Sent, body: list[memoryview]) -> None:
            if decode(sent[2]) != Fence("/job:worker/task:5", 5):
                add(number, sent, body)
            elif alter is None:
                backup.taken = number
            else:
                add(number, alter(*sent), body)

        backup.add = altered
        fences = [Fence(f"/job:worker/task:{worker}", 5) for worker in range(3, 12)]

        async def fence_all() -> None:  # one after the other: each check needs the one before
            for fence in fences:
                await say(cluster, 0, fence)

        fencing = asyncio.create_task(fence_all())
        await back_up(cluster, lost=True)
        assert cluster.ps[1].statistics()["hosted"] == {"diverged": 1}
        await alone(cluster)
        await fencing
        await back_up(cluster, 3)
        for fence in fences:
            await say(cluster, 0, fence)
        await settled(cluster.ps[1])
        assert cluster.ps[0].statistics()["backup"]["state"] == "paired"
        assert cluster.ps[1].statistics()["hosted"] == {"diverged": 1}
