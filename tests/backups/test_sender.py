"""What a ps sends to its backup arrives once, in order, whatever breaks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from backups import W, back_up, create, say, take_over
from ps_cluster import PsCluster, assign, heard, pull, until
from psync.backups.sender import BackupSender, Served
from psync.client.ps_client import PsClient
from psync.errors import DeadlineExceeded, FencedError
from psync.ps.executor import Entry
from psync.ps_task import PsTask
from psync.store.commit_log import CommitLog
from psync.wire.messages import AttachPs, BackUp, BeginBackup, Fence, FillBackup


async def test_over_connections_that_break_each_entry_is_done_once() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        worker = cluster.client()
        for _ in range(10):
            adding = [
                asyncio.create_task(assign(worker, w, np.ones(6, np.float32), "add"))
                for _ in range(10)
            ]
            await until(lambda: cluster.ps[0].statistics()["backup"]["waiting"])
            cluster.network.cut("ps1:1")
            await asyncio.gather(*adding)
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W + 100)


async def test_a_copy_of_many_blocks_is_made_while_updates_go_on() -> None:
    async with PsCluster(2, chunk=(1 << 18, 1 << 20)) as cluster:
        cluster.places = iter([0])
        size = 5 << 20
        w = await cluster.create("w", np.arange(size, dtype=np.float32))
        worker = cluster.client()
        copying = asyncio.create_task(back_up(cluster))
        count = 0
        while not copying.done():
            await assign(worker, w, np.ones(size, np.float32), "add")
            count += 1
        await copying
        await assign(worker, w, np.ones(size, np.float32), "add")
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        (before,) = (np.arange(size, dtype=np.float32),)
        for _ in range(count + 1):
            before += 1
        assert value.tobytes() == before.tobytes()


async def test_a_copy_goes_on_over_connections_that_break() -> None:
    async with PsCluster(2, chunk=(1 << 18, 1 << 20)) as cluster:
        cluster.places = iter([0])
        values = np.arange(5 << 20, dtype=np.float32)
        w = await cluster.create("w", values)
        parts = heard(cluster.ps[1], FillBackup)
        copying = asyncio.create_task(back_up(cluster))
        for count in (1, 2, 4):
            await until(lambda count=count: len(parts) >= count)
            cluster.network.cut("ps1:1")
        await copying
        assert len({part.start for part in parts}) < len(parts)  # some came twice
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        assert value.tobytes() == values.tobytes()


@pytest.mark.virtual_time
async def test_a_copy_to_a_process_that_says_nothing_is_given_up() -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        parts = heard(cluster.ps[1], BeginBackup)
        copying = asyncio.create_task(back_up(cluster, 2))
        await until(lambda: parts)
        cluster.network.partition("ps1:1")
        with pytest.raises(DeadlineExceeded):
            await copying
        cluster.network.heal("ps1:1")


@pytest.mark.parametrize("sends", [False, True])
async def test_a_process_that_was_started_again_does_not_follow_which_is_noticed(
    sends: bool,
) -> None:
    async with PsCluster(2) as cluster:
        await create(cluster)
        await back_up(cluster)
        lost = asyncio.create_task(back_up(cluster, lost=True))
        await cluster.ps[1].close()
        again = PsTask(cluster.platform(incarnation=8), 1, "ps1:1")
        await again.start()
        fence = Fence("/job:worker/task:9", 5)
        adding = [asyncio.create_task(say(cluster, 0, fence)) for _ in range(sends)]
        await lost
        for each in adding:
            each.cancel()
        await asyncio.gather(*adding, return_exceptions=True)
        await again.close()


async def test_a_connection_that_is_lost_while_nothing_is_to_be_sent_is_made_again() -> None:
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        for _ in range(3):
            cluster.network.cut("ps1:1")
            await until(lambda: cluster.network.links("ps1:1"))
            await assign(cluster.client(), w, np.ones(6, np.float32), "add")
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W + 3)


async def test_one_that_is_ended_is_ended_in_the_same_turn_and_deposes_nobody() -> None:
    """What its ps serves next, from that turn on, is not what was backed up."""
    cluster, deposed = PsCluster(1), []
    served = Served(0, AttachPs(100, ["ps0:1"], 15.0), 0, 100)
    log: CommitLog[Entry] = CommitLog("/job:ps/task:0", 1 << 20)
    sender = BackupSender(
        cluster.platform(), served, BackUp(1, "/job:ps/task:1", "ps1:1", False), log,
        lambda *_: None, lambda: None, lambda: deposed.append(True),
    )  # fmt: skip
    closing = sender.close()
    assert sender.ended.is_set()
    sender._fail(FencedError("there is a newer backup"))
    assert not deposed
    await closing


async def test_small_entries_do_not_overtake_large_ones_on_their_way() -> None:
    async with PsCluster(2, chunk=(1 << 16, 1 << 18)) as cluster:
        w = await create(cluster)
        cluster.places = iter([0])
        size = 2 << 20
        x = await cluster.create("x", np.zeros(size, np.float32))
        await back_up(cluster)
        clients = [cluster.client(f"/job:worker/task:{number}") for number in range(12)]
        large, small = np.ones(size, np.float32), np.ones(6, np.float32)
        count = 0

        async def add_to_x(client: PsClient) -> None:
            for _ in range(4):
                await assign(client, x, large, "add")

        adding = [asyncio.create_task(add_to_x(client)) for client in clients[:6]]

        async def add_to_w(client: PsClient) -> None:
            nonlocal count
            while not all(task.done() for task in adding):
                await assign(client, w, small, "add")
                count += 1

        await asyncio.gather(*adding, *map(add_to_w, clients[6:]))
        assert cluster.ps[0].statistics()["backup"]["state"] == "paired"
        await take_over(cluster)
        (value,) = await pull(cluster.chief, w)
        assert np.array_equal(value, W + count)
