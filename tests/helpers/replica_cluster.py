"""A cluster whose ps tasks back one another up: a test lets them die, and lose messages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

import psync
from memory_cluster import MemoryCluster, shared
from psync.net.platform import Platform
from psync.ps_task import PsTask
from psync.testing.sabotage import MessageLosses, SabotagedParts, failpoints_of

TWO_SHARDS = psync.FixedShardsPartitioner(2)


class ReplicaCluster(MemoryCluster):
    """A cluster whose ps tasks have failpoints that a test arms, and lose messages."""

    without: frozenset[str] = frozenset()
    losses: MessageLosses | None = None

    def platform(self, *args: Any, **options: Any) -> Platform:
        made = super().platform(*args, **options)
        parts = SabotagedParts(without=self.without, losses=self.losses)
        return dataclasses.replace(made, parts=parts)

    def ps(self, name: str) -> PsTask:
        task = self.tasks[name]
        assert isinstance(task, PsTask)
        return task

    def kill_at(self, name: str, place: str, count: int = 1) -> asyncio.Event:
        """Let a ps die when a place is reached; return what is set then."""
        died = asyncio.Event()

        def die() -> None:
            self.cut_off(name)
            died.set()  # what it does from here on reaches nobody

        failpoints_of(self.ps(name)._platform).arm(place, die, count)
        return died

    def cut_off(self, name: str) -> None:
        """Break its connections, for good."""

        async def refused(*_: object) -> Any:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{name} is dead")

        self.ps(name)._platform.network.connect = refused  # type: ignore[method-assign]
        self.network.refuse(name)
        self.network.cut(name)

    async def kill(self, name: str) -> None:
        """As kill -9: its connections break, and it says nothing more."""
        self.cut_off(name)
        await self.bury(name)

    async def bury(self, name: str) -> None:
        """End a task that nobody hears any more."""
        await self.stop(name)

    async def revive(self, name: str) -> None:
        """As a launcher that starts it again: empty."""
        self.network.admit(name)
        await self.start(name)

    def replica_strategy(self, partitioner: Any = TWO_SHARDS) -> psync.ParameterServerStrategy:
        plain = self.strategy()
        return psync.ParameterServerStrategy(
            plain.cluster_resolver, partitioner, ps_recovery="replica"
        )


@contextlib.asynccontextmanager
async def replicated(
    num_ps: int = 2,
    num_workers: int = 2,
    without: frozenset[str] = frozenset(),
    losses: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[ReplicaCluster, psync.ClusterCoordinator]]:
    cluster = ReplicaCluster(num_ps, num_workers)
    cluster.without = without
    if losses is not None:
        cluster.losses = MessageLosses(losses)
    shared.clear()
    await cluster.start_all()
    try:
        async with psync.ClusterCoordinator(cluster.replica_strategy()) as coordinator:
            yield cluster, coordinator
    finally:
        await cluster.stop_all()
        shared.clear()


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
