"""Workers and connections are lost at random while closures push: every update counts once."""

from __future__ import annotations

import asyncio
import random

import memory_cluster
import numpy as np
import pytest

import psync
from psync.testing import run_virtual

NUM_CLOSURES = 120


async def disturb(cluster: memory_cluster.MemoryCluster, rng: random.Random) -> None:
    """Cut a worker off, cut one of its connections, start it anew, or cut a ps off."""
    name = f"worker-{rng.randrange(3)}"
    links = cluster.network.links(f"{name}:1")
    match rng.randrange(4):
        case 0:
            cluster.network.cut(f"{name}:1")
        case 1 if links:
            rng.choice(links).cut()
        case 2:
            await cluster.stop(name)
            await cluster.start(name)
        case _:
            cluster.network.cut(f"ps-{rng.randrange(2)}:1")


async def train(seed: int) -> None:
    rng = random.Random(seed)
    async with memory_cluster.cluster_of(2, 3) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                first = psync.Variable(np.zeros(4, np.float32), name="first")
                second = psync.Variable(np.zeros(4, np.float32), name="second")
            large, one = np.zeros(30_000, np.uint8), np.ones(4, np.float32)

            async def step(i, argument):
                await asyncio.sleep(0.01 * (i % 7))
                await first.assign_add(one)
                await asyncio.sleep(0.01 * (i % 3))
                await second.assign_add(one)
                return i

            values: list[psync.RemoteValue] = []
            for i in range(NUM_CLOSURES):
                earlier = rng.choice(values) if values and i % 4 == 0 else None
                values.append(coordinator.schedule(step, args=(i, earlier if i % 5 else large)))
            join = asyncio.create_task(coordinator.join(timeout=600))
            while not join.done():
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                await disturb(cluster, rng)
            await join
            assert await coordinator.fetch(values) == list(range(NUM_CLOSURES))
            for variable in (first, second):
                assert (await variable.read() == NUM_CLOSURES).all()
            counts = coordinator.statistics()["closures"]
            assert counts.finished == NUM_CLOSURES
            assert counts.put_back > 0


@pytest.mark.parametrize("seed", range(8))
def test_every_update_counts_once_whatever_is_lost(seed: int) -> None:
    run_virtual(train, seed, seed=seed)
