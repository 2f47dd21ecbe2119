"""A cluster whose tasks a test can start, stop and cut off, on a network in memory.

Steps are sent by value, modules by name: ``memory_cluster.shared`` is the same dictionary in a
step and in its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import psync
from psync.launch.tasks import make_task
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork, VirtualClockLoop
from psync.testing.sabotage import SabotagedParts
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.worker_task import WorkerTask

shared: dict[str, Any] = {}
SECRET = Secret(b"0123456789abcdef0123456789abcdef")


class MemoryCluster:
    """Tasks by name: "ps-0", "worker-1"; each is a host of its name and listens at port 1."""

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 2,
        limits: Limits = DEFAULT_LIMITS,
        network: MemoryNetwork | None = None,
    ) -> None:
        self.limits = limits
        self.network = network or MemoryNetwork(chunk=(1 << 16, 1 << 20))
        self.counts = {"ps": num_ps, "worker": num_workers}
        self.tasks: dict[str, PsTask | WorkerTask] = {}
        self._incarnations = itertools.count(100, 100)

    def platform(self, secret: Secret = SECRET, host: str = "") -> Platform:
        virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
        return Platform(
            self.network.host(host),
            secret,
            limits=self.limits,
            parts=SabotagedParts(),
            uniform=lambda: 0.5,
            new_incarnation=lambda: next(self._incarnations),
            threads=not virtual,
        )

    async def start(self, name: str, secret: Secret = SECRET) -> None:
        job, _, index = name.partition("-")
        task = make_task(self.platform(secret, name), job, int(index), f"{name}:1")
        self.tasks[name] = task
        await task.start()

    async def start_all(self) -> None:
        for job, count in self.counts.items():
            for index in range(count):
                await self.start(f"{job}-{index}")

    async def stop(self, name: str) -> None:
        await self.tasks.pop(name).close()

    async def stop_all(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)
        self.network.check()

    def strategy(
        self, partitioner: Callable[..., Any] | None = None
    ) -> psync.ParameterServerStrategy:
        addresses = {"chief": ["chief-0:1"]} | {
            job: [f"{job}-{index}:1" for index in range(count)]
            for job, count in self.counts.items()
        }
        resolver = psync.SimpleClusterResolver(
            psync.ClusterSpec(addresses), task_type="chief", task_id=0
        )
        resolver.platform = self.platform(host="chief-0")
        return psync.ParameterServerStrategy(resolver, partitioner)


@contextlib.asynccontextmanager
async def cluster_of(
    num_ps: int = 1,
    num_workers: int = 2,
    limits: Limits = DEFAULT_LIMITS,
    network: MemoryNetwork | None = None,
) -> AsyncIterator[MemoryCluster]:
    """A running cluster without a coordinator."""
    cluster = MemoryCluster(num_ps, num_workers, limits, network)
    shared.clear()
    await cluster.start_all()
    try:
        yield cluster
    finally:
        await cluster.stop_all()
        shared.clear()


@contextlib.asynccontextmanager
async def coordinating(
    num_ps: int = 1, num_workers: int = 2, limits: Limits = DEFAULT_LIMITS, **options: Any
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator]]:
    """A running cluster and its coordinator."""
    async with cluster_of(num_ps, num_workers, limits) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(), **options) as coordinator:
            yield cluster, coordinator


async def note(event: str) -> None:
    """In a step: say that something has happened."""
    event_of(event).set()


def event_of(name: str) -> asyncio.Event:
    """An event that a step and its test share."""
    return shared.setdefault(name, asyncio.Event())
