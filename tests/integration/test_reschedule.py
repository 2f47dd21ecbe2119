"""Closures that a rollback has undone are scheduled again in one call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, coordinating
from psync.errors import ClosedError, UsageError

pytestmark = pytest.mark.virtual_time


async def lose(cluster: MemoryCluster, name: str = "ps-0") -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.stop(name)
    await cluster.start(name)


class Loop:
    """A program that counts its closures, and that has a checkpoint."""

    def __init__(self, coordinator: psync.ClusterCoordinator, directory: Path) -> None:
        self.coordinator = coordinator
        with coordinator.strategy.scope():
            self.counts = psync.Variable(np.zeros(20), name="counts")
        self.optimizer = psync.optimizers.SGD(1.0)
        checkpoint = psync.Checkpoint(counts=self.counts, optimizer=self.optimizer)
        self.manager = psync.CheckpointManager(checkpoint, directory)
        optimizer = self.optimizer

        async def step(counts: Any, number: int, *rest: Any) -> int:
            gradient = np.zeros(20)
            gradient[number] = -1
            await optimizer.apply_gradients([(gradient, counts)])
            return number

        self.step = step

    async def run(self, *numbers: int) -> None:
        for number in numbers:
            self.coordinator.schedule(self.step, (self.counts, number))
        await self.coordinator.join()

    async def undone(self, cluster: MemoryCluster, before: int = 0) -> psync.RollbackEvent:
        await lose(cluster)
        events = self.coordinator.events()
        for _ in range(before):
            await anext(events)
        event = await anext(events)
        assert isinstance(event, psync.RollbackEvent)
        return event


async def test_each_closure_is_there_once_and_values_come_in_order(tmp_path: Path) -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        loop = Loop(coordinator, tmp_path)
        await loop.run(*range(5))
        await loop.manager.save()
        await loop.run(*range(5, 20))
        event = await loop.undone(cluster)
        assert (event.to_step, event.updates, len(event.closures)) == (5, 15, 15)
        values = coordinator.reschedule(event)
        await coordinator.join()
        assert await coordinator.fetch(values) == list(range(5, 20))
        assert (await loop.counts.read()).tolist() == [1.0] * 20
        assert await loop.optimizer.iterations.read() == 20


@pytest.mark.promise("closures.reschedule")
async def test_a_program_that_listens_loses_nothing_whenever_a_ps_dies(tmp_path: Path) -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        loop = Loop(coordinator, tmp_path)

        async def make_up() -> None:
            async for event in coordinator.events():
                if isinstance(event, psync.RollbackEvent):
                    coordinator.reschedule(event)

        making_up = asyncio.create_task(make_up())
        await loop.manager.save()
        await loop.run(*range(10))
        await lose(cluster)
        await loop.run(*range(10, 15))
        await lose(cluster)
        await loop.run(*range(15, 20))
        await lose(cluster)  # when all had ended
        await loop.manager.save()
        while not coordinator.done():
            await coordinator.join()
            await loop.manager.save()
        assert (await loop.counts.read()).tolist() == [1.0] * 20
        making_up.cancel()


async def test_arguments_go_with_them_values_of_other_closures_too(tmp_path: Path) -> None:
    async def add(counts: Any, value: Any, *, factor: Any) -> float:
        await counts.assign_add(value * factor)
        return float(value.sum())

    async with coordinating(1, 2) as (cluster, coordinator):
        loop = Loop(coordinator, tmp_path)
        await loop.manager.save()
        made = coordinator.schedule(np.full, (20, 2.0))
        value = coordinator.schedule(add, (loop.counts, made), {"factor": np.full(20, 3.0)})
        await coordinator.join()
        identity = value.closure_id
        del made, value
        event = await loop.undone(cluster)
        assert event.closures == (identity,)
        (again,) = coordinator.reschedule(event)
        assert await again == 40.0
        assert (await loop.counts.read()).tolist() == [6.0] * 20


async def test_what_is_wrong_is_said_and_nothing_is_scheduled(tmp_path: Path) -> None:
    async with coordinating(1, 1) as (cluster, coordinator):
        loop = Loop(coordinator, tmp_path)
        await loop.manager.save()
        await loop.run(0, 1)
        event = await loop.undone(cluster)
        other = psync.RollbackEvent(
            event.lost, event.timeline, event.from_step, event.to_step, event.closures,
            event.seconds, event.updates,
        )  # fmt: skip
        for wrong, said in (
            (17, "expected a RollbackEvent, got int"),
            (psync.FailoverEvent((), (), 0.0), "expected a RollbackEvent, got FailoverEvent"),
            (other, "expected an event of this coordinator"),
        ):
            with pytest.raises(UsageError, match=said):
                coordinator.reschedule(wrong)  # type: ignore[arg-type]
        assert coordinator.done()
        assert len(coordinator.reschedule(event)) == 2
        with pytest.raises(UsageError, match="of rollback 1 were already rescheduled"):
            coordinator.reschedule(event)
        await coordinator.join()
        assert (await loop.counts.read()).tolist() == [1.0] * 2 + [0.0] * 18
    with pytest.raises(ClosedError):
        coordinator.reschedule(event)


async def test_calls_that_nobody_schedules_again_are_not_kept_for_ever(tmp_path: Path) -> None:
    async with coordinating(1, 1) as (cluster, coordinator):
        loop = Loop(coordinator, tmp_path)
        await loop.manager.save()
        await loop.run(0, 1)
        first = await loop.undone(cluster)
        await loop.run(2)
        second = await loop.undone(cluster, 1)
        await loop.manager.save()
        with pytest.raises(UsageError, match=r"of 2 of 2 closures are no longer kept"):
            coordinator.reschedule(first)
        assert len(coordinator.reschedule(second)) == 1
        await loop.run(3)
        third = await loop.undone(cluster, 2)
        for _ in range(2):
            await loop.manager.save()
        with pytest.raises(UsageError, match=r"until the second checkpoint after it"):
            coordinator.reschedule(third)


async def test_closures_of_a_fit_are_its_own(tmp_path: Path) -> None:
    class Lose(psync.callbacks.Callback):
        async def on_epoch_end(self, epoch: int, logs: Any) -> None:
            if epoch == 1:
                await lose(cluster)

    def data() -> Any:
        while True:
            yield np.zeros(1), np.zeros(1)

    async with coordinating(1, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            count = psync.Variable(np.zeros(1), name="count")
        trainer = psync.Trainer(
            coordinator.strategy, count, lambda values, batch: (1.0, -np.ones(1)),
            psync.optimizers.SGD(1.0), checkpoint_directory=tmp_path,
        )  # fmt: skip
        await trainer.fit(data, epochs=3, steps_per_epoch=4, callbacks=[Lose()], verbose=False)
        event = await anext(coordinator.events())
        assert isinstance(event, psync.RollbackEvent)
        assert len(event.closures) == 4
        assert coordinator.reschedule(event) == []
        assert await count.read() == 12
