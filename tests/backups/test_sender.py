"""What a ps sends to its backup arrives once, in order, whatever breaks."""

from __future__ import annotations

import asyncio

import numpy as np

from backups import back_up, take_over
from memory_cluster import until
from ps_cluster import PsCluster, assign, heard, pull
from psync.backups.sender import BackupSender, Served
from psync.errors import FencedError
from psync.ps.executor import Entry
from psync.store.commit_log import CommitLog
from psync.wire.messages import AttachPs, BackUp, FillBackup


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
