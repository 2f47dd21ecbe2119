"""A whole cluster on a network in memory, whose tasks a test starts, stops, cuts off and kills.

Its programs are a ``ClusterCoordinator`` (``coordinating``, ``replicated``; one after another:
``chief_lives``), or several that train without one (``session_cluster``). Tests that speak to ps
tasks by hand have ``ps_cluster``.

Steps are sent by value, modules by name: ``memory_cluster.shared`` is the same dictionary in a
step and in its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, cast

import psync
from psync.net.platform import Platform
from psync.testing import MemoryNetwork, VirtualClockLoop
from psync.testing.sabotage import Failpoints, MessageLosses, SabotagedParts, failpoints_of
from psync.testing.seams import new_platform, new_task
from psync.wire.limits import DEFAULT_LIMITS, Limits
from wiretap import TappedHost

shared: dict[str, Any] = {}
SECRET = b"0123456789abcdef0123456789abcdef"
TWO_SHARDS = psync.FixedShardsPartitioner(2)

Main = Callable[[psync.ParameterServerStrategy], Coroutine[Any, Any, Any]]


class MemoryCluster:
    """Tasks by name: "ps-0", "worker-1"; each is a host of its name and listens at port 1.

    Args:
        num_ps: Number of ps tasks.
        num_workers: Number of workers.
        limits: Of every task.
        network: Another one than usual.
        chief: Whether the cluster has a chief.
        tapped: Whether tests listen to what arrives at its tasks, see ``wiretap``.
        without: Safeguards that tasks do without.
        losses: Messages that are lost.
    """

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 2,
        limits: Limits = DEFAULT_LIMITS,
        network: MemoryNetwork | None = None,
        *,
        chief: bool = True,
        tapped: bool = False,
        without: frozenset[str] = frozenset(),
        losses: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = limits
        self.network = network or MemoryNetwork(chunk=(1 << 16, 1 << 20))
        self.secret = SECRET  # of platforms that are made from now on
        self.counts = {"chief": int(chief), "ps": num_ps, "worker": num_workers}
        self.tasks: dict[str, Any] = {}
        self.platforms: dict[str, Platform] = {}  # of the tasks
        self._tapped = tapped
        self._without = without
        self.losses = None if losses is None else MessageLosses(losses)
        self.clocks: dict[str, float] = {}  # by how many seconds those of hosts are ahead
        self._incarnations = itertools.count(100, 100)
        self._programs: set[asyncio.Task[Any]] = set()
        self.chief: psync.ClusterCoordinator | None = None  # the present one, see chief_lives
        self.fail_overs = 0  # of which that has told

    def ps(self, name: str) -> Any:
        return self.tasks[name]

    def points(self, name: str) -> Failpoints:
        """The failpoints of a task."""
        return failpoints_of(self.platforms[name])

    def tap(self, name: str) -> TappedHost:
        """What arrives at a task."""
        return cast(TappedHost, self.platforms[name].network)

    def platform(self, secret: Any = None, host: str = "") -> Platform:
        loop = asyncio.get_running_loop()
        virtual = isinstance(loop, VirtualClockLoop)
        clock = loop.time if virtual else time.monotonic
        ahead = self.clocks.get(host, 0.0)
        own = self.network.host(host)
        return new_platform(
            cast(Any, TappedHost(own) if self._tapped else own),
            secret or self.secret,
            limits=self.limits,
            parts=SabotagedParts(without=self._without, losses=self.losses),
            uniform=lambda: 0.5,
            new_incarnation=lambda: next(self._incarnations),
            now=lambda: clock() + ahead,
            threads=not virtual,
        )

    async def start(self, name: str, secret: Any = None) -> None:
        job, _, index = name.partition("-")
        platform = self.platforms[name] = self.platform(secret, name)
        task = self.tasks[name] = new_task(platform, job, int(index), f"{name}:1")
        await task.start()

    async def start_all(self) -> None:
        for job in ("ps", "worker"):
            await self.start_job(job)

    async def start_job(self, job: str) -> None:
        for index in range(self.counts[job]):
            await self.start(f"{job}-{index}")

    async def stop(self, name: str) -> None:
        await self.tasks.pop(name).close()

    async def stop_all(self) -> None:
        for program in self._programs:
            program.cancel()
        await asyncio.gather(*self._programs, return_exceptions=True)
        for name in list(self.tasks):
            await self.stop(name)
        self.network.check()

    def strategy(
        self,
        partitioner: Callable[..., Any] | None = None,
        *,
        job: str = "chief",
        index: int = 0,
        **options: Any,
    ) -> psync.ParameterServerStrategy:
        """The strategy of a new process of a task."""
        addresses = {
            each: [f"{each}-{number}:1" for number in range(count)]
            for each, count in self.counts.items()
            if count
        }
        resolver = psync.SimpleClusterResolver(
            psync.ClusterSpec(addresses), task_type=job, task_id=index
        )
        resolver.platform = self.platform(host=f"{job}-{index}")
        return psync.ParameterServerStrategy(resolver, partitioner, **options)

    def replica_strategy(self, partitioner: Any = TWO_SHARDS) -> psync.ParameterServerStrategy:
        return self.strategy(partitioner, ps_recovery="backup")

    # Programs that train without a coordinator.

    def run(self, main: Main, job: str, index: int = 0) -> asyncio.Task[Any]:
        """Run a program as a task."""
        strategy = self.strategy(job=job, index=index)
        program = asyncio.get_running_loop().create_task(main(strategy))
        self._programs.add(program)
        return program

    async def run_all(self, main: Main) -> list[Any]:
        """Run a program as the chief, if there is one, and as every worker; return the results."""
        programs = [
            self.run(main, job, index)
            for job in ("chief", "worker")
            for index in range(self.counts[job])
        ]
        return await asyncio.gather(*programs)

    async def kill_program(self, program: asyncio.Task[Any], host: str) -> None:
        """End a program so that nobody hears its last words."""
        self.network.partition(host)
        self.network.cut(host)
        program.cancel()
        await asyncio.gather(program, return_exceptions=True)
        self.network.heal(host)

    # Tasks that die.

    def kill_at(self, name: str, place: str, count: int = 1) -> asyncio.Event:
        """Let a ps die when a place is reached; return what is set then."""
        died = asyncio.Event()

        def die() -> None:
            self.cut_off(name)
            died.set()  # what it does from here on reaches nobody

        self.points(name).arm(place, die, count)
        return died

    def cut_off(self, name: str) -> None:
        """Break its connections, for good."""

        async def refused(*_: object) -> Any:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{name} is dead")

        self.platforms[name].network.connect = refused  # type: ignore[method-assign]
        self.network.refuse(name)
        self.network.cut(name)

    async def kill(self, name: str) -> None:
        """As kill -9: its connections break, and it says nothing more."""
        self.cut_off(name)
        await self.stop(name)

    async def kill_worker(self, name: str) -> None:
        """Likewise, a worker."""
        self.network.refuse(name)
        self.network.cut(name)
        await self.stop(name)

    async def revive(self, name: str) -> None:
        """As a launcher that starts it again: empty."""
        self.network.admit(name)
        await self.start(name)


@contextlib.asynccontextmanager
async def running(cluster: MemoryCluster) -> AsyncIterator[MemoryCluster]:
    """All its ps tasks and workers."""
    shared.clear()
    await cluster.start_all()
    try:
        yield cluster
    finally:
        await cluster.stop_all()
        shared.clear()


@contextlib.asynccontextmanager
async def cluster_of(
    num_ps: int = 1,
    num_workers: int = 2,
    limits: Limits = DEFAULT_LIMITS,
    network: MemoryNetwork | None = None,
) -> AsyncIterator[MemoryCluster]:
    """A running cluster without a coordinator."""
    async with running(MemoryCluster(num_ps, num_workers, limits, network)) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def coordinating(
    num_ps: int = 1,
    num_workers: int = 2,
    limits: Limits = DEFAULT_LIMITS,
    tapped: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator]]:
    """A running cluster and its coordinator."""
    async with running(MemoryCluster(num_ps, num_workers, limits, tapped=tapped)) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(), **options) as coordinator:
            yield cluster, coordinator


@contextlib.asynccontextmanager
async def replicated(
    num_ps: int = 2, num_workers: int = 2, **options: Any
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator]]:
    """A running cluster whose ps tasks back one another up, and its coordinator."""
    cluster = MemoryCluster(num_ps, num_workers, **options)
    async with running(cluster):
        async with psync.ClusterCoordinator(cluster.replica_strategy()) as coordinator:
            yield cluster, coordinator


@contextlib.asynccontextmanager
async def session_cluster(
    num_ps: int = 1, num_workers: int = 2, *, chief: bool = False, **network: Any
) -> AsyncIterator[MemoryCluster]:
    """Running ps tasks, for programs that train without a coordinator."""
    below = MemoryNetwork(chunk=(1 << 16, 1 << 20), **network)
    cluster = MemoryCluster(num_ps, num_workers, network=below, chief=chief)
    await cluster.start_job("ps")
    try:
        yield cluster
    finally:
        await cluster.stop_all()


async def note(event: str) -> None:
    """In a step: say that something has happened."""
    event_of(event).set()


def event_of(name: str) -> asyncio.Event:
    """An event that a step and its test share."""
    return shared.setdefault(name, asyncio.Event())


async def until(holds: Callable[[], object]) -> None:
    """Let everything run until something holds; the test's time limit ends it otherwise."""
    while not holds():  # noqa: ASYNC110  what is waited for tells nobody
        await asyncio.sleep(0)
