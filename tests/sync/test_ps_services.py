"""What serves one coordinator on one timeline is built at once, and replaced as a whole."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from asked import Reply
from backups import back_up, create
from inside import handlers_of
from ps_by_hand import PsByHand
from ps_cluster import CHIEF, SECRET, PsCluster, assign, until
from psync.client.ps_client import PsClient
from psync.errors import FencedError, NotServedError
from psync.net.connection import Handler
from psync.net.platform import Platform
from psync.ps.life import Life
from psync.ps_task import PsTask
from psync.store.commit_log import LogState
from psync.testing import MemoryNetwork
from psync.wire.messages import (
    AttachPs,
    DefineAccumulator,
    Done,
    Fence,
    Gate,
    LockShards,
    LogEntries,
    TakeGradient,
)
from sync_cluster import ask

ACCUMULATOR = DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0)


async def attach(cluster: PsCluster) -> PsClient:
    """A newer coordinator takes over."""
    client = cluster.client(CHIEF, 2000, host="chief-2")
    await cluster.attach(client, 2000)
    return client


def test_before_the_first_coordinator_there_are_some_that_serve_nobody() -> None:
    task = PsTask(Platform(MemoryNetwork(), SECRET), 0, "ps0:1")
    assert task.life is Life.EMPTY
    services = task.services
    assert (services.coordinator, services.closer, services.store.keys()) == (0, None, [])
    with pytest.raises(NotServedError):
        services.sync.check_served()


def test_beside_ps_0_nobody_decides_steps() -> None:
    """Ps 0 does in all tests of ``StepCloser``."""
    services = PsByHand().services
    assert services.coordinator == 100
    assert services.closer is None


async def test_a_newer_coordinator_gets_others_and_nothing_of_the_earlier_ones_is_kept() -> None:
    async with PsCluster() as cluster:
        spec = await cluster.create("v", np.ones(3, np.float32))
        # Connections outlive services; over these came a cut, a take that waited, and a lock.
        await ask(cluster.chief, LockShards(1, [spec.shards[0].key], 60.0))
        await ask(cluster.chief, ACCUMULATOR)
        await ask(cluster.chief, Gate(1))
        before = [weakref.ref(cluster.ps[0].services), weakref.ref(cluster.ps[0].services.store)]
        worker = cluster.client()
        take = asyncio.create_task(ask(worker, TakeGradient("g", 1, 1, 1)))
        await until(lambda: cluster.ps[0].statistics()["accumulators"]["waiting"])
        await attach(cluster)
        assert cluster.ps[0].services.coordinator == 2000
        assert cluster.ps[0].services.store.keys() == []
        with pytest.raises(FencedError, match="has been replaced"):
            await take
        counters = cluster.ps[0].statistics()["accumulators"]
        assert counters == dict.fromkeys(counters, 0)
        await until(lambda: gc.collect() >= 0 and not any(each() for each in before))


async def test_a_former_backup_deposes_nobody_who_serves_a_newer_coordinator() -> None:
    """What the earlier coordinator began is brought to its end without the backup."""
    async with PsCluster(2) as cluster:
        w = await create(cluster)
        await back_up(cluster)
        asked, said, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def refuse(*_: object) -> None:
            asked.set()
            await said.wait()
            raise FencedError("there is a newer backup")

        async def fence(*_: object) -> Reply:
            await ended.wait()
            return Reply(Done())

        handlers_of(cluster.ps[1])[LogEntries] = Handler(refuse)
        adding = asyncio.create_task(assign(cluster.client(), w, np.ones(6, np.float32), "add"))
        await asked.wait()
        former = cluster.ps[0].services
        assert former.closer is not None
        handlers_of(cluster.ps[1])[Fence] = Handler(fence)
        former.closer.outgoing.fence("/job:worker/task:7", 5)
        link = cluster.client(CHIEF, 200, host="chief-2").links[0]
        order = AttachPs(200, ["ps0:1", "ps1:1"], 15.0, keep=True)
        attaching = asyncio.create_task(link.call(lambda _: order))
        await until(lambda: cluster.ps[0].services is not former)
        said.set()
        ended.set()
        await attaching
        assert cluster.ps[0].life is Life.SERVING
        assert former.executor.log.state is LogState.ALONE
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
