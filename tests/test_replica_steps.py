"""Synchronous steps with backups: whichever ps dies, a push counts once, everywhere or nowhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from replica_cluster import ReplicaCluster, replicated

import psync
from psync.events import FailoverEvent

SMALL, LARGE = 64, 10_000  # columns: pushes come whole to ps 0, or in parts to every ps


async def step(v: Any, optimizer: Any, global_step: Any, column: int) -> str:
    """Push one to a column, on both shards; return what became of it."""
    await psync.pull(v)
    gradient = np.zeros(v.shape, np.float32)
    gradient[:, column] = 1
    result = await optimizer.apply_gradients([(gradient, v)], global_step)
    return str(result.outcome.value)


class Training:
    """A variable of which each closure changes a column of its own, by one."""

    def __init__(
        self, coordinator: psync.ClusterCoordinator, size: int, step_ps: int = 0, **options: Any
    ) -> None:
        self.coordinator = coordinator
        self.size = size
        with coordinator.strategy.scope():
            self.v = psync.Variable(np.zeros((2, size), np.float32), name="v")
            self.global_step = psync.get_or_create_global_step()  # on ps 0
            if step_ps:
                for name in ("on ps 0", "on ps 1"):  # in turn
                    self.global_step = psync.Variable(np.zeros((), np.int64), name=name)
        options = {"replicas_to_aggregate": 2, "reduction": "sum", **options}
        self.optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), **options)
        self.results: list[Any] = []

    def schedule(self, count: int) -> None:
        for _ in range(count):
            column = len(self.results)
            args = (self.v, self.optimizer, self.global_step, column)
            self.results.append(self.coordinator.schedule(step, args=args))

    async def check(self) -> None:
        """All that was answered "accepted" is there once, on both shards; nothing else is."""
        outcomes = await self.coordinator.fetch(self.results)
        expected = np.zeros((2, self.size), np.float32)
        for column, outcome in enumerate(outcomes):
            assert outcome in ("accepted", "duplicate", "stale")
            expected[:, column] = 0 if outcome == "stale" else -1
        np.testing.assert_array_equal(await self.v.read(), expected)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_synchronous_steps_without_a_death_are_those_without_backups(size: int) -> None:
    async with replicated() as (cluster, coordinator):
        training = Training(coordinator, size)
        training.schedule(20)
        await coordinator.join()
        await training.check()
        assert int(await training.global_step.read()) >= 10
        for ps in ("ps-0", "ps-1"):
            host = cluster.ps(ps)._host
            await asyncio.gather(*(each.settle() for each in host._backups.values()))
            (backup,) = host._backups.values()
            assert backup.task._sync.steps() == cluster.ps(ps)._sync.steps()


PLACES = [
    ("ps-0", "ps.backup.sending"), ("ps-0", "ps.backup.taken"), ("ps-0", "ps0.step.decided"),
    ("ps-0", "ps.step.applied"), ("ps-0", "ps0.step.applied"), ("ps-1", "ps.backup.sending"),
    ("ps-1", "ps.backup.taken"), ("ps-1", "ps.step.applied"), ("ps-1", "ps.assign.applied"),
]  # fmt: skip


@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("lost", "place"), PLACES)
async def test_wherever_a_ps_dies_each_push_counts_once_and_everywhere(
    lost: str, place: str, count: int, size: int, step_ps: int
) -> None:
    if place == "ps.assign.applied" and not step_ps:
        return  # only a global step is assigned
    async with replicated() as (cluster, coordinator):
        training = Training(coordinator, size, step_ps)
        training.schedule(4)
        await coordinator.join()
        died = cluster.kill_at(lost, place, count)
        burying = asyncio.create_task(buried(cluster, lost, died))
        while not died.is_set():
            training.schedule(4)
            await coordinator.join()
        training.schedule(4)
        await coordinator.join()
        await burying
        await training.check()
        steps = int(await training.global_step.read())
        outcomes = await coordinator.fetch(training.results)
        counted = sum(outcome != "stale" for outcome in outcomes)
        assert counted / 2 <= steps <= counted
        assert isinstance(await anext(coordinator.events()), FailoverEvent)


async def buried(cluster: ReplicaCluster, lost: str, died: asyncio.Event) -> None:
    await died.wait()
    await cluster.bury(lost)
