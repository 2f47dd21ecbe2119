"""Training on real processes from within a test, which is the chief."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop

import psync

ONE_LOOP = pytest.mark.asyncio(loop_factories=["uvloop"])
"""The other one is no different to processes that die."""


DEADLY: dict[str, Any] = {"max_restarts": 1000, "max_losses": 100, "max_flaps": None}
"""For tasks that die all the time."""


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextlib.asynccontextmanager
async def coordinated(
    cluster: psync.LocalCluster, num_ps: int = 2, ps_recovery: str = "checkpoint", **options: Any
) -> AsyncIterator[tuple[psync.ParameterServerStrategy, psync.ClusterCoordinator]]:
    """A strategy that puts a part of each variable on each ps, and its coordinator."""
    partitioner = psync.FixedShardsPartitioner(num_ps)
    strategy = psync.ParameterServerStrategy(cluster.resolver, partitioner, ps_recovery=ps_recovery)
    async with psync.ClusterCoordinator(strategy, **options) as coordinator:
        yield strategy, coordinator


@contextlib.asynccontextmanager
async def training(
    num_ps: int,
    num_workers: int,
    *,
    max_restarts: int = 3,
    plugins: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[
    tuple[psync.LocalCluster, psync.ParameterServerStrategy, psync.ClusterCoordinator]
]:
    """A cluster of processes, and its strategy and coordinator; see ``coordinated``."""
    async with (
        psync.LocalCluster(
            num_ps, num_workers, max_restarts=max_restarts, plugins=plugins
        ) as cluster,
        coordinated(cluster, num_ps, **options) as (strategy, coordinator),
    ):
        yield cluster, strategy, coordinator


async def group_of(coordinator: psync.ClusterCoordinator) -> dict[str, Any]:
    """What ps 0 counts of the only synchronous optimizer; {} before its first push."""
    groups = (await coordinator.ps_statistics())[0]["sync"]
    return dict(*groups.values())


async def assert_nothing_is_staged(coordinator: psync.ClusterCoordinator) -> None:
    for ps in await coordinator.ps_statistics():
        assert (ps["staging"]["parts"], ps["staging"]["bytes"]) == (0, 0)
