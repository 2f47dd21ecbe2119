"""What the program asks workers about the iterators of per-worker datasets, and tells them."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from memory_cluster import coordinating
from psync.errors import ClosedError


async def take(batches):
    return next(batches)


@pytest.mark.virtual_time
async def test_a_worker_that_is_lost_while_it_is_asked_is_where_it_began():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10)))
        await coordinator.schedule(take, args=(iterator,))
        cluster.network.partition("chief-0", "worker-0")
        asked = asyncio.create_task(iterator.positions())
        await asyncio.sleep(1)
        assert not asked.done()
        cluster.network.cut("worker-0")
        assert await asked == {0: 0}


async def test_without_a_coordinator_nobody_knows_a_position_and_nothing_is_released():
    async with coordinating(num_workers=1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    with pytest.raises(ClosedError, match="positions: the coordinator is not running"):
        await iterator.positions()
    del iterator
    gc.collect()


async def test_an_iterator_that_the_coordinator_holds_does_not_keep_it():
    """What releases iterators is known to the interpreter; it would hold the coordinator, too."""
    async with coordinating(num_workers=1) as (_, coordinator):
        coordinator.held = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
        kept = weakref.ref(coordinator)
    del _, coordinator
    gc.collect()
    assert kept() is None
