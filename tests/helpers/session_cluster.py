"""Training without a coordinator in one process: ps tasks, and sessions that stand for processes.

Each session has a strategy, a platform and, once it runs, connections of its own. A task is killed
by cutting its host off and cancelling what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import psync
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork, VirtualClockLoop

SECRET = Secret(b"0123456789abcdef0123456789abcdef")

Main = Callable[[psync.ParameterServerStrategy], Coroutine[Any, Any, Any]]


class SessionCluster:
    """Tasks by name: "ps-0", "chief-0", "worker-1"; each has its name as its host."""

    def __init__(self, num_ps: int, num_workers: int, *, chief: bool, **network: Any) -> None:
        self.network = MemoryNetwork(chunk=(1 << 16, 1 << 20), **network)
        self.secret = SECRET  # of platforms that are made from now on
        self.addresses = {
            job: [f"{job}-{index}:1" for index in range(count)]
            for job, count in (("chief", int(chief)), ("ps", num_ps), ("worker", num_workers))
            if count
        }
        self.ps: list[PsTask] = []
        self._incarnations = itertools.count(100, 100)
        self._running: set[asyncio.Task[Any]] = set()

    def platform(self, host: str) -> Platform:
        virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
        return Platform(
            self.network.host(host),
            self.secret,
            uniform=lambda: 0.5,
            new_incarnation=lambda: next(self._incarnations),
            threads=not virtual,
        )

    def strategy(self, job: str, index: int = 0, **options: Any) -> psync.ParameterServerStrategy:
        """The strategy of a new process of this task."""
        resolver = psync.SimpleClusterResolver(
            psync.ClusterSpec(self.addresses), task_type=job, task_id=index
        )
        resolver.platform = self.platform(f"{job}-{index}")  # type: ignore[attr-defined]
        return psync.ParameterServerStrategy(resolver, **options)

    def start(self, main: Main, job: str, index: int = 0) -> asyncio.Task[Any]:
        """Run a program as a task."""
        task = asyncio.get_running_loop().create_task(main(self.strategy(job, index)))
        self._running.add(task)
        return task

    async def run_all(self, main: Main) -> list[Any]:
        """Run a program as the chief, if there is one, and as every worker; return the results."""
        tasks = [
            self.start(main, job, index)
            for job in ("chief", "worker")
            for index in range(len(self.addresses.get(job, ())))
        ]
        return await asyncio.gather(*tasks)

    async def kill(self, task: asyncio.Task[Any], host: str) -> None:
        """End a program so that nobody hears its last words."""
        self.network.partition(host)
        self.network.cut(host)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.network.heal(host)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for ps in self.ps:
            await ps.close()
        self.network.check()


@contextlib.asynccontextmanager
async def session_cluster(
    num_ps: int = 1, num_workers: int = 2, *, chief: bool = False, **network: Any
) -> AsyncIterator[SessionCluster]:
    """Running ps tasks, and nobody else."""
    cluster = SessionCluster(num_ps, num_workers, chief=chief, **network)
    for index, address in enumerate(cluster.addresses["ps"]):
        ps = PsTask(cluster.platform(f"ps-{index}"), index, address)
        await ps.start()
        cluster.ps.append(ps)
    try:
        yield cluster
    finally:
        await cluster.close()
