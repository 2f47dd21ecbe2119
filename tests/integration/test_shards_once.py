"""Each update of a data shard counts once, although steps raise and ps tasks go back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import coordinating, event_of, note, shared
from psync.errors import UsageError

pytestmark = pytest.mark.virtual_time

NUM_SHARDS = 12


@contextlib.asynccontextmanager
async def counting(num_ps: int = 1, **options: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A cluster, its coordinator, and a counter for each shard."""
    async with coordinating(num_ps, 4, **options) as (cluster, coordinator):
        with coordinator.strategy.scope():
            seen = psync.Variable(np.zeros((2, NUM_SHARDS), np.int64), name="seen")
        yield cluster, coordinator, seen


def one(shard: int) -> np.ndarray:
    """What the counter of a shard gets."""
    value = np.zeros((2, NUM_SHARDS), np.int64)
    value[:, shard] = 1
    return value


async def visit(shard: int, seen: Any, bad: int | None) -> None:
    """Count the shard twice; one is bad after its first count, while others are there, too."""
    await seen.assign_add(one(shard))
    if shard == bad:
        await asyncio.sleep(0.005)
        raise ValueError("a bad record")
    await asyncio.sleep(0.01)
    await seen.assign_add(one(shard))
    await asyncio.sleep(0.01)


async def counts(seen: Any) -> set[int]:
    """How often shards were counted."""
    return set((await seen.read()).ravel().tolist())


@pytest.mark.promise("data.shard-once", "data.shard-updates-once")
@pytest.mark.parametrize("num_ps", [1, 2])
async def test_what_shards_had_done_when_one_raised_or_a_worker_died_is_not_done_again(
    num_ps: int,
) -> None:
    async with counting(num_ps) as (cluster, coordinator, seen):
        visits = coordinator.distribute_once(list(range(NUM_SHARDS)), num_epochs=2)
        for bad in (5, 5, 0):
            with pytest.raises(ValueError, match="a bad record"):
                await visits.run(visit, (seen, bad))
            assert {1, 3} & await counts(seen), "some were in the midst of it"
        visiting = asyncio.create_task(visits.run(visit, (seen, None)))
        await asyncio.sleep(0.015)
        await cluster.kill_worker("worker-1")
        await visiting
        assert await counts(seen) == {4}
        first, second = visits.account()
        assert first.restarted[5] >= 3
        assert second.is_complete


@pytest.mark.promise("data.shard-updates-once")
@pytest.mark.parametrize("strict", [False, True])
async def test_a_push_counts_once_in_a_synchronous_step(strict: bool) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(NUM_SHARDS, np.float32), name="w")
            sgd = psync.optimizers.SGD(1.0)
            optimizer = psync.SyncReplicasOptimizer(sgd, 2, reduction="sum", strict=strict)
            step = psync.get_or_create_global_step()

        async def train(shard: int, bad: int | None) -> None:
            await w.read()
            gradient = np.zeros(NUM_SHARDS, np.float32)
            gradient[shard] = 1
            await optimizer.apply_gradients([(gradient, w)], step)
            if shard == bad:
                raise ValueError("a bad record")
            await asyncio.sleep(0.01)

        visits = coordinator.distribute_once(list(range(NUM_SHARDS)))
        for bad in (4, 9):
            with pytest.raises(ValueError, match="a bad record"):
                await visits.run(train, (bad,))
        await visits.run(train, (None,))
        assert len(visits.account()[0].restarted) > 2, "others had pushed, too"
        assert set((await w.read()).tolist()) == {-1.0}


async def test_a_step_that_updates_something_else_is_told_what_to_do() -> None:
    async with counting() as (_, coordinator, seen):
        with coordinator.strategy.scope():
            other = psync.Variable(np.zeros((2, NUM_SHARDS), np.int64), name="other")
        visits = coordinator.distribute_once([0, 1])
        with pytest.raises(ValueError, match="a bad record"):
            await visits.run(visit, (seen, 0))
        with pytest.raises(UsageError, match=r"\(other\) than in its first run \(seen\)") as told:
            await visits.run(visit, (other, None))
        assert "distribute_once(shards, state=visits.state())" in str(told.value)
        anew = coordinator.distribute_once([0, 1], state=visits.state())
        await anew.run(visit, (other, None))
        assert np.array_equal((await other.read())[:, :2], np.full((2, 2), 2))


async def test_a_checkpoint_that_holds_visits_is_of_their_updates_too(tmp_path: Path) -> None:
    async with counting() as (_, coordinator, seen):
        visits = coordinator.distribute_once(list(range(NUM_SHARDS)))
        checkpoint = psync.Checkpoint(visits=visits, seen=seen)
        path = await checkpoint.save(tmp_path)
        with pytest.raises(ValueError, match="a bad record"):
            await visits.run(visit, (seen, 8))
        await checkpoint.restore(path)
        assert await counts(seen) == {0}
        await visits.run(visit, (seen, None))
        assert await counts(seen) == {2}


async def lose(cluster: Any, coordinator: Any) -> psync.RollbackEvent:
    """A ps dies, and is started again: all go back to the newest checkpoint."""
    await cluster.stop("ps-1")
    await cluster.start("ps-1")
    event = await anext(coordinator.events())
    assert isinstance(event, psync.RollbackEvent)
    return event


@pytest.mark.promise("data.shard-rollback")
async def test_what_a_rollback_undoes_is_done_again_whichever_epoch_it_is_of(
    tmp_path: Path,
) -> None:
    async with counting(2) as (cluster, coordinator, seen):
        manager = psync.CheckpointManager(psync.Checkpoint(seen=seen), tmp_path)
        visits = coordinator.distribute_once(list(range(NUM_SHARDS)), num_epochs=3)
        with pytest.raises(ValueError, match="a bad record"):
            await visits.run(visit, (seen, 5))
        await manager.save()
        before = visits.account()[0]
        for _ in visits:
            visits.schedule(visit, (seen, None))
            await coordinator.join()
            if visits.epoch == 2:
                break
        assert await counts(seen) == {4}
        event = await lose(cluster, coordinator)
        first, second, third = visits.account()
        assert len(event.closures) == len(before.undone) + NUM_SHARDS
        assert first.undone == before.undone
        assert len(second.undone) == NUM_SHARDS
        assert visits.epoch == 0
        await visits.run(visit, (seen, None))
        assert await counts(seen) == {6}
        first, second, third = visits.account()
        assert first.is_complete
        assert set(first.restarted) >= set(before.undone)
        assert second.restarted == dict.fromkeys(range(NUM_SHARDS), 2)
        assert third.restarted == {}


@pytest.mark.promise("data.shard-rollback")
async def test_what_a_checkpoint_has_of_a_shard_that_was_cancelled_is_not_done_again(
    tmp_path: Path,
) -> None:
    async def begun(shard: int, seen: Any) -> None:
        await seen.assign_add(one(shard))
        await note("counted")
        if not shared.get("go on"):
            await asyncio.sleep(100)
        await seen.assign_add(one(shard))

    async with counting(2) as (cluster, coordinator, seen):
        manager = psync.CheckpointManager(psync.Checkpoint(seen=seen), tmp_path)
        visits = coordinator.distribute_once([0])
        (value,) = visits.schedule(begun, (seen,))
        await event_of("counted").wait()
        value.cancel()
        await coordinator.join()
        await manager.save()
        shared["go on"] = True
        await visits.run(begun, (seen,))
        await lose(cluster, coordinator)
        assert visits.account()[0].undone == (0,)
        await visits.run(begun, (seen,))
        assert (await seen.read())[:, 0].tolist() == [2, 2]
        assert visits.account()[0].restarted == {0: 3}
