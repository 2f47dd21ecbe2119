"""Workers come, leave and are lost at random while closures push: every update counts once."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

import memory_cluster
import psync
from psync.testing import run_virtual

NUM_CLOSURES = 300


async def disturb(cluster: memory_cluster.MemoryCluster, rng: random.Random) -> None:
    """Cut a worker off, cut one of its connections, start it anew, or cut a ps off."""
    name = f"worker-{rng.randrange(3)}"
    links = cluster.network.links(f"{name}:1")
    match rng.randrange(6):
        case 0:
            cluster.network.cut(f"{name}:1")
        case 1 if links:
            rng.choice(links).cut()
        case 2:
            await cluster.stop(name)
            await cluster.start(name)
        case 3:
            await leave(cluster, name, rng.choice((0.01, 60.0)))
            await cluster.start(name)
        case 4:
            cluster.network.partition(name, "ps-1")
            cluster.network.cut("ps-1:1")
            await asyncio.sleep(rng.choice((0.1, 20.0)))
            cluster.network.heal(name, "ps-1")
        case _:
            cluster.network.cut(f"ps-{rng.randrange(2)}:1")


async def leave(cluster: memory_cluster.MemoryCluster, name: str, patience_s: float) -> None:
    """Ask a worker to leave, and stop it when it has, or when that takes too long."""
    worker = cluster.tasks[name]
    leaving = asyncio.ensure_future(worker.leave("the test says so"))
    await asyncio.wait((leaving,), timeout=patience_s)
    if patience_s > 1:
        assert leaving.done(), "it runs but short closures"
    await cluster.stop(name)
    await asyncio.gather(leaving, return_exceptions=True)


async def come_and_go(
    cluster: memory_cluster.MemoryCluster, coordinator: psync.ClusterCoordinator, rng: random.Random
) -> None:
    """A fourth worker comes and goes."""
    while True:
        await cluster.start("worker-3")
        task = await coordinator.add_worker("worker-3:1")
        assert task == "/job:worker/task:3"
        await asyncio.sleep(rng.uniform(0, 2))
        if rng.random() < 0.5:
            await coordinator.remove_worker(task)
            await cluster.stop("worker-3")
        else:
            await cluster.stop("worker-3")
            await coordinator.remove_worker(task)


async def train(seed: int) -> None:
    rng = random.Random(seed)
    async with memory_cluster.cluster_of(2, 3) as cluster:
        strategy = cluster.strategy()
        limit = 3 if seed % 2 else None
        async with psync.ClusterCoordinator(
            strategy, max_flaps=limit, max_losses=99
        ) as coordinator:
            with strategy.scope():
                first = psync.Variable(np.zeros(4, np.float32), name="first")
                second = psync.Variable(np.zeros(4, np.float32), name="second")
            large, one = np.zeros(30_000, np.uint8), np.ones(4, np.float32)

            async def step(i, argument):
                await asyncio.sleep(0.1 * (i % 7))
                await first.assign_add(one)
                await asyncio.sleep(0.01 * (i % 3))
                await second.assign_add(one)
                return i

            values: list[psync.RemoteValue] = []
            for i in range(NUM_CLOSURES):
                earlier = rng.choice(values) if values and i % 4 == 0 else None
                values.append(coordinator.schedule(step, args=(i, earlier if i % 5 else large)))
            join = asyncio.create_task(coordinator.join(timeout=3600))
            fourth = asyncio.create_task(come_and_go(cluster, coordinator, rng))
            while not join.done():
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                await disturb(cluster, rng)
            await join
            fourth.cancel()
            await asyncio.wait((fourth,))
            assert fourth.cancelled()
            assert await coordinator.fetch(values) == list(range(NUM_CLOSURES))
            for variable in (first, second):
                assert (await variable.read() == NUM_CLOSURES).all()
            counts = coordinator.statistics()["closures"]
            assert counts.finished == NUM_CLOSURES
            assert counts.put_back > 0


@pytest.mark.promise("updates.at-most-once")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_every_update_counts_once_whatever_is_lost(seed: int) -> None:
    run_virtual(train, seed, seed=seed)
