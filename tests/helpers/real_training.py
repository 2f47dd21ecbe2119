"""Training on real processes from within a test, which is the chief."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvloop

import psync


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on one loop: the other one is no different to processes that die."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextlib.asynccontextmanager
async def coordinated(
    cluster: psync.LocalCluster, num_ps: int = 2, **options: Any
) -> AsyncIterator[tuple[psync.ParameterServerStrategy, psync.ClusterCoordinator]]:
    """A strategy that puts a part of each variable on each ps, and its coordinator."""
    partitioner = psync.FixedShardsPartitioner(num_ps)
    strategy = psync.ParameterServerStrategy(cluster.resolver, partitioner)
    async with psync.ClusterCoordinator(strategy, **options) as coordinator:
        yield strategy, coordinator


async def group_of(coordinator: psync.ClusterCoordinator) -> dict[str, Any]:
    """What ps 0 counts of the only synchronous optimizer; {} before its first push."""
    groups = (await coordinator.ps_statistics())[0]["sync"]
    return dict(*groups.values())


async def assert_nothing_is_staged(coordinator: psync.ClusterCoordinator) -> None:
    for ps in await coordinator.ps_statistics():
        assert (ps["staging"]["parts"], ps["staging"]["bytes"]) == (0, 0)
