"""Synchronous training while ps tasks die: programs that know what must be left, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import psync

SMALL, LARGE = 64, 10_000  # columns: pushes come whole to ps 0, or in parts to every ps


async def push_column(v: Any, optimizer: Any, global_step: Any, column: int) -> str:
    """Push one to a column, on both shards; return what became of it."""
    await psync.pull(v)
    gradient = np.zeros(v.shape, np.float32)
    gradient[:, column] = 1
    result = await optimizer.apply_gradients([(gradient, v)], global_step)
    return str(result.outcome.value)


class ColumnsTraining:
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
            self.results.append(self.coordinator.schedule(push_column, args=args))

    async def check(self) -> None:
        """All that was answered "accepted" is there once, on both shards; nothing else is."""
        outcomes = await self.coordinator.fetch(self.results)
        expected = np.zeros((2, self.size), np.float32)
        for column, outcome in enumerate(outcomes):
            assert outcome in ("accepted", "duplicate", "stale")
            expected[:, column] = 0 if outcome == "stale" else -1
        np.testing.assert_array_equal(await self.v.read(), expected)


async def push_ones(v: Any, optimizer: Any, global_step: Any) -> str:
    await psync.pull(v)
    result = await optimizer.apply_gradients([(np.ones(v.shape, np.float32), v)], global_step)
    return str(result.outcome.value)


class StepsTraining:
    """A variable from which each step takes two, on both ps tasks."""

    def __init__(self, coordinator: psync.ClusterCoordinator, size: int, step_ps: int) -> None:
        self.coordinator = coordinator
        with coordinator.strategy.scope():
            self.v = psync.Variable(np.zeros((2, size), np.float32), name="v")
            self.global_step = psync.get_or_create_global_step()  # on ps 0
            if step_ps:
                for name in ("on ps 0", "on ps 1"):  # in turn
                    self.global_step = psync.Variable(np.zeros((), np.int64), name=name)
        self.optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), 2, 2, reduction="sum"
        )

    def schedule(self, count: int) -> None:
        for _ in range(count):
            self.coordinator.schedule(push_ones, args=(self.v, self.optimizer, self.global_step))

    async def check(self) -> int:
        """Each step is there once, everywhere, and counted; return how many there were."""
        value, steps = await self.v.read(), int(await self.global_step.read())
        np.testing.assert_array_equal(value, np.full(value.shape, -2.0 * steps))
        return steps


def declared(coordinator: psync.ClusterCoordinator) -> tuple[Any, Any]:
    """A counter with a shard on each ps, and a small one on ps 0."""
    with coordinator.strategy.scope():
        wide = psync.Variable(np.zeros((2, 3), np.float32), name="wide")
        small = psync.Variable(np.zeros((1,), np.int64), name="small")
    return wide, small


async def add(wide: Any, small: Any) -> None:
    await wide.assign_add(np.ones((2, 3), np.float32))
    await small.assign_add(np.ones(1, np.int64))


async def run(coordinator: psync.ClusterCoordinator, count: int, *variables: Any) -> None:
    for _ in range(count):
        coordinator.schedule(add, args=variables)
    await coordinator.join()


async def check(variables: tuple[Any, Any], count: int) -> None:
    assert int((await variables[1].read())[0]) == count
    assert np.array_equal(await variables[0].read(), np.full((2, 3), count))
