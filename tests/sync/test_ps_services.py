"""What serves one coordinator on one timeline is built at once, and replaced as a whole."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from memory_cluster import until
from ps_cluster import CHIEF, SECRET, PsCluster
from psync.client.ps_client import PsClient
from psync.errors import FencedError, NotServedError
from psync.net.platform import Platform
from psync.ps.life import Life
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork
from psync.wire.messages import (
    DefineAccumulator,
    Gate,
    LockShards,
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
