"""One chief after another, in one process, for tests: to the other tasks an end is an end."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import psync
from memory_cluster import MemoryCluster
from psync import FailoverEvent
from psync.testing.seams import another_process


@contextlib.asynccontextmanager
async def life_of(
    strategy: psync.ParameterServerStrategy, *, attach: bool = True, **options: object
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, from its start to its end."""
    another_process()
    async with psync.ClusterCoordinator(strategy, attach=attach, **options) as coordinator:  # type: ignore[arg-type]
        yield coordinator


@contextlib.asynccontextmanager
async def backing_one_another_up(num_ps: int = 2) -> AsyncIterator[MemoryCluster]:
    """A cluster without a chief."""
    cluster = MemoryCluster(num_ps, 2, tapped=True)
    await cluster.start_all()
    try:
        yield cluster
    finally:
        await cluster.stop_all()


@contextlib.asynccontextmanager
async def life(
    cluster: MemoryCluster, *, attach: bool = True, **options: Any
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, until it dies: its connections break, and it says nothing more."""
    strategy = cluster.replica_strategy()
    async with life_of(strategy, attach=attach, **options) as coordinator:
        cluster.chief, cluster.fail_overs = coordinator, 0
        try:
            yield coordinator
        finally:
            silence(cluster, coordinator)


def silence(cluster: MemoryCluster, coordinator: psync.ClusterCoordinator) -> None:
    """Let a chief reach nobody any more."""

    async def refused(*_: object) -> Any:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the chief is dead")

    network: Any = coordinator.strategy.cluster_resolver.platform.network
    network.connect = refused
    cluster.network.cut("chief-0")


async def fail_over(cluster: MemoryCluster, *names: str, start_again: bool = True) -> None:
    """Let ps tasks die, one after the other, and the backups serve of what was served there.

    Each process is started again, and has backups only from then on.
    """
    for name in names:
        coordinator = cluster.chief
        await coordinator.backed_up()
        events = coordinator.events()
        for _ in range(cluster.fail_overs):
            await anext(events)
        await cluster.kill(name)
        assert isinstance(await anext(events), FailoverEvent)
        cluster.fail_overs += 1
        if start_again:
            await cluster.revive(name)
