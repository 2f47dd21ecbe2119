"""Workers that have different numbers of batches, and some that are lost with data left."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from memory_cluster import coordinating
from psync.errors import DeadlineExceeded, EndOfData

pytestmark = pytest.mark.virtual_time

UNEVEN = (2, 30, 5)  # batches of each worker


async def slow_take(batches):
    await asyncio.sleep(0.02)
    return next(batches)


def uneven(context):
    worker = context.input_pipeline_id
    return [sum(UNEVEN[:worker]) + number for number in range(UNEVEN[worker])]


def applying(strategy, size, synchronous):
    """A variable that counts what each batch was trained, and what pushes a gradient to it."""
    with strategy.scope():
        trained = psync.Variable(np.zeros(size, np.float32), name="trained")
        global_step = psync.get_or_create_global_step() if synchronous else None
    optimizer = psync.optimizers.SGD(1.0)
    if synchronous:
        optimizer = psync.SyncReplicasOptimizer(optimizer, 3, reduction="sum")

    async def apply(batch):
        gradient = np.zeros(size, np.float32)
        gradient[batch] = -1
        return (await optimizer.apply_gradients([(gradient, trained)], global_step)).outcome

    return trained, apply


@pytest.mark.promise("data.all-batches")
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("captured", [False, True])
async def test_all_batches_are_trained_however_many_each_worker_has(synchronous, captured):
    async with coordinating(num_workers=3) as (_, coordinator):
        trained, apply = applying(coordinator.strategy, sum(UNEVEN), synchronous)
        data = iter(coordinator.create_per_worker_dataset(uneven))

        async def step(batches=data if captured else None):
            await trained.read()
            batch = next(batches)
            await asyncio.sleep(0.02)
            await apply(batch)

        args = () if captured else (data,)
        values = [coordinator.schedule(step, args=args) for _ in range(sum(UNEVEN))]
        await coordinator.join(timeout=60)
        await coordinator.fetch(values)
        assert (await trained.read()).tolist() == [1] * sum(UNEVEN)
        counts = coordinator.statistics()["closures"]
        assert (counts.put_back, counts.exhausted) == (0, 0)
        coordinator.schedule(step, args=args)
        had = ", ".join(f"/job:worker/task:{i} had {n}" for i, n in enumerate(UNEVEN))
        with pytest.raises(EndOfData, match="has no further batch on any worker") as caught:
            await coordinator.join()
        assert f"({had})" in str(caught.value)


@pytest.mark.promise("data.lost-worker-restarts")
@pytest.mark.parametrize("synchronous", [False, True])
async def test_a_worker_that_is_lost_with_data_left_is_waited_for(synchronous):
    """Worker 1 is lost, and comes back when all others have nothing left: with all of its data."""
    async with coordinating(num_workers=3) as (cluster, coordinator):
        trained, apply = applying(coordinator.strategy, sum(UNEVEN), synchronous)

        async def step(batches):
            batch = next(batches)
            await asyncio.sleep(0.02)
            return await apply(batch)

        data = iter(coordinator.create_per_worker_dataset(uneven))
        values = [coordinator.schedule(step, args=(data,)) for _ in range(sum(UNEVEN))]
        await values[4]
        await cluster.stop("worker-1")
        with pytest.raises(DeadlineExceeded, match="task:1, which is lost, has data left"):
            await coordinator.join(timeout=30)
        await cluster.start("worker-1")
        await coordinator.join()
        assert asyncio.get_running_loop().time() < 60
        outcomes = await coordinator.fetch(values)
        counts = (await trained.read()).tolist()
        stale = outcomes.count(psync.Outcome.STALE)  # of a step that was closed when it was lost
        assert sum(counts) == sum(UNEVEN) - stale
        assert stale <= synchronous
        others = [*counts[: UNEVEN[0]], *counts[UNEVEN[0] + UNEVEN[1] :]]
        assert sum(others) >= len(others) - stale
        assert max(others) == 1
        assert max(counts) == 2  # what it had trained before it trains again


async def test_a_lost_worker_is_not_waited_for_longer_than_tasks_are_at_the_start():
    async with coordinating(num_workers=2) as (cluster, coordinator):
        data = iter(coordinator.create_per_worker_dataset(uneven))
        values = [coordinator.schedule(slow_take, args=(data,)) for _ in range(sum(UNEVEN[:2]))]
        await values[4]
        began = asyncio.get_running_loop().time()
        await cluster.stop("worker-1")
        with pytest.raises(EndOfData, match=r"on any worker \(/job:worker/task:0 had 2\)"):
            await coordinator.join()
        assert 60 <= asyncio.get_running_loop().time() - began < 61


async def test_a_step_that_has_made_updates_ends_with_the_data_of_its_worker():
    async with coordinating(num_workers=2) as (_, coordinator):
        trained, apply = applying(coordinator.strategy, sum(UNEVEN), synchronous=False)

        async def two(batches):
            for _ in range(2):
                batch = next(batches)
                await asyncio.sleep(0.02)
                await apply(batch)

        data = iter(coordinator.create_per_worker_dataset(lambda context: uneven(context)[1:]))
        values = [coordinator.schedule(two, args=(data,)) for _ in range(15)]
        with pytest.raises(EndOfData, match="had made updates before it met the end"):
            await coordinator.join()
        ended = await asyncio.gather(*values, return_exceptions=True)
        assert sum(isinstance(each, EndOfData) for each in ended) == 1
        assert (await trained.read()).sum() == 1 + 2 * 14  # of 1 and 29 batches


async def test_data_may_end_where_one_worker_has_none_left():
    async with coordinating(num_workers=2) as (_, coordinator):
        data = iter(coordinator.create_per_worker_dataset(uneven, end="first"))
        values = [coordinator.schedule(slow_take, args=(data,)) for _ in range(20)]
        with pytest.raises(EndOfData, match=r"^dataset uneven has no further batch$"):
            await coordinator.join()
        ended = await asyncio.gather(*values, return_exceptions=True)
        assert sum(not isinstance(each, EndOfData) for each in ended) < 15
