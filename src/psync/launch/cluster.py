"""TaskCluster: a cluster whose chief is this process and whose tasks a ``Host`` starts.

What all such clusters have: the resolver, scaling, adapting. ``local`` is one on this machine,
``psync.integrations.ray`` and ``.dask`` have others.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol, Self

from psync.closures.scaling_rule import AdaptiveRule, changes
from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError, PsyncError, UsageError, other_loop
from psync.launch.plugins import load_plugins, plugins_environ
from psync.net.environment import platform_of_tf_config
from psync.net.notebook_cells import of_no_cell
from psync.net.platform import Platform
from psync.net.resolvers import SimpleClusterResolver, opened
from psync.net.workforce import Workforce
from psync.status.html_tables import table

logger = logging.getLogger(__name__)


class Host(Protocol):
    """Starts the tasks of a cluster.

    Attributes:
        platform: Of the chief.
        chief: Its address.
    """

    platform: Platform
    chief: str

    async def open(self) -> None:
        """Let workers join that know the chief's address and the secret."""

    async def check(self, num_workers: int) -> None:
        """Is there room for so many workers? Raises ConfigurationError."""

    async def start(self, job: str, index: int) -> str:
        """Start a task that is not there; return its address. Several may be started at a time.

        Raises:
            PsyncError, OSError: It cannot be started.

        Cancellation: It may stay, and ends with the host.
        """

    async def leave(self, index: int) -> None:
        """Let a worker finish what it runs, and end; wait for that. Cancellation: it goes on."""

    def has_left(self, index: int) -> bool:
        """Return whether a worker has ended, and is not started again."""

    def describe(self, job: str, index: int) -> str:
        """Say where a task runs, and how it is."""


class LaunchedClusterResolver(SimpleClusterResolver):
    """The chief's resolver in a cluster of its own; it also says how to reach the tasks."""

    __psync_capture_error__ = "it describes the chief"
    __psync_capture_hint__ = "psync.get_worker_index() says in a step on which worker it runs"

    def __init__(self, platform: Platform) -> None:
        super().__init__(ClusterSpec({}), task_type="chief", task_id=0)
        self.platform = platform

    def name_tasks(self, addresses: Mapping[str, Mapping[int, str]]) -> None:
        """These are the tasks from now on: address by job and index."""
        self._cluster_spec = ClusterSpec(addresses)


class TaskCluster(ABC):
    """ps and worker tasks that a host starts; this process is the chief.

    An async context manager. A subclass makes the host.

    Args:
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        plugins: Modules that this process and all tasks load.

    Raises:
        ConfigurationError: A number is too small, or plugins are not modules.
    """

    __psync_capture_error__ = "the cluster's processes belong to the chief"
    __psync_capture_hint__ = "call it in the program, outside of steps"

    def __init__(self, num_ps: int, num_workers: int, plugins: Sequence[str]) -> None:
        for name, count in (("num_ps", num_ps), ("num_workers", num_workers)):
            if not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {count!r}")
        self._counts = {"ps": num_ps, "worker": num_workers}
        self._plugins = plugins_environ(plugins, os.environ)
        self._resources: contextlib.AsyncExitStack | None = None  # None before start
        self._resolver: LaunchedClusterResolver | None = None
        self._host: Host  # once it is started
        self._addresses: dict[str, dict[int, str]] = {job: {} for job in self._counts}
        self._changing = asyncio.Lock()  # which workers there are
        self._leaving: dict[int, asyncio.Task[None]] = {}  # workers that are about to
        self._adapting: asyncio.Task[None] | None = None

    @abstractmethod
    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        """Return what starts the tasks; ``resources`` ends them."""

    def _check_now(self, num_workers: int) -> None:  # noqa: B027  # most know only later
        """Is there room for so many workers? Raises ConfigurationError if not."""

    def __repr__(self) -> str:
        state, workers = "not running", self._counts["worker"]
        if self._resolver is not None:
            state, workers = "running", len(self._addresses["worker"])
        return f"<{type(self).__name__}, {self._counts['ps']} ps, {workers} workers, {state}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for job in self._counts if self._resolver is not None else ():
            spec = self.resolver.cluster_spec()
            for index in spec.task_indices(job):
                state = self._host.describe(job, index)
                rows.append((f"{job}-{index}", spec.task_address(job, index), state))
        return table(repr(self).strip("<>"), ("task", "address", "process"), rows)

    @property
    def resolver(self) -> LaunchedClusterResolver:
        """The chief's resolver, for ``ParameterServerStrategy``.

        Raises:
            UsageError: Before the cluster is started.
        """
        if self._resolver is None:
            name = type(self).__name__
            raise UsageError(
                "the cluster is not running",
                hint=f"use it inside `async with {name}(…) as cluster:`",
            )
        return self._resolver

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all tasks. Cancellation: they are stopped again."""
        if self._resources is not None:
            raise UsageError("the cluster was started before")
        self._loop = asyncio.get_running_loop()
        load_plugins(task_name("chief", 0), {**os.environ, **self._plugins})
        async with contextlib.AsyncExitStack() as resources:
            await of_no_cell(self._start(resources))
            resources.enter_context(opened(self.resolver))
            self._resources = resources.pop_all()

    async def stop(self) -> None:
        """Stop all tasks. Cancellation: processes are killed."""
        self._check_loop("stop")
        resources, self._resources = self._resources, contextlib.AsyncExitStack()
        self._resolver = None
        if resources is not None:
            await resources.aclose()

    async def scale(self, workers: int) -> None:
        """Change the number of workers; a ``ClusterCoordinator`` of this cluster may be running.

        New workers take the lowest free indices, including those of workers that were given up. A
        running coordinator adds them: they get closures, and take part in the next
        ``strategy.run``; see ``ClusterCoordinator.add_worker``. Workers with the highest indices
        leave as by ``remove_worker``, after the closure that they run. The next strategy uses the
        workers of that time. ``adapt`` ends.

        Returns when the new workers take part in the running coordinator, or could not be added
        (the log says so), and the leaving workers have left.

        Args:
            workers: New number of workers, at least 1.

        Raises:
            ConfigurationError: The number is invalid, or there are too few GPUs.
            UsageError: The cluster is not running.
            OSError: A process cannot be started.

        Cancellation: Workers come and leave all the same.

        Example:
            async with psync.LocalCluster(1, 2) as cluster:
                ...
                await cluster.scale(workers=8)
        """
        self._check_loop("scale")
        self._end_adapting()
        moving = await self._change(workers)
        if moving:
            await asyncio.wait(moving)

    def adapt(
        self,
        minimum: int = 1,
        maximum: int = 1,
        *,
        target_duration: float = 5.0,
        interval: float = 1.0,
        wait_count: int = 3,
    ) -> None:
        """Let the number of workers follow the queue, until ``scale`` or ``stop``.

        The number is chosen so that the queued and running closures would take ``target_duration``,
        given the mean duration of closures; it does not exceed the number of closures. New workers
        start immediately. Workers leave in order, and only when several checks in a row ask for
        fewer.

        Args:
            minimum: Minimum number of workers, at least 1.
            maximum: Maximum number of workers.
            target_duration: Target duration in seconds.
            interval: Seconds between two checks.
            wait_count: Number of checks in a row that must ask for fewer workers before any leaves.

        Raises:
            ConfigurationError: An argument is out of range, or there are too few GPUs.
            UsageError: The cluster is not running.

        Example:
            cluster.adapt(minimum=1, maximum=8)

        Source: Dask's ``Cluster.adapt``.
        """
        rule = AdaptiveRule(minimum, maximum, target_duration, wait_count)
        if not interval > 0:
            raise ConfigurationError(f"interval: expected seconds above 0, got {interval!r}")
        workforce = self.resolver.platform.workforce
        self._check_loop("adapt")
        self._check_now(maximum)
        self._end_adapting()
        adapting = self._adapt(workforce, rule, interval)
        self._adapting = asyncio.get_running_loop().create_task(adapting)

    def _check_loop(self, operation: str) -> None:
        if self._resolver is not None and asyncio.get_running_loop() is not self._loop:
            raise other_loop(f"{operation} of a {type(self).__name__}")

    def _end_adapting(self) -> None:
        adapting, self._adapting = self._adapting, None
        if adapting is not None:
            adapting.cancel()

    async def _adapt(self, workforce: Workforce, rule: AdaptiveRule, interval: float) -> None:
        while True:
            present = len(self._present())
            target = rule.decide(workforce.load(), present)
            if target != present:
                logger.info("%d workers instead of %d", target, present)
                try:
                    await self._change(target)
                except (PsyncError, OSError) as exc:
                    logger.error("there are still %d workers: %s", len(self._present()), exc)
            await asyncio.sleep(interval)

    def _present(self) -> list[int]:
        """Return the workers that are there, and are not about to leave, by index."""
        known = self._addresses["worker"]
        return [i for i in known if i not in self._leaving and not self._host.has_left(i)]

    async def _change(self, number: int) -> Collection[asyncio.Task[None]]:
        """Start workers or let them leave; return what ends when they have come or left.

        Cancellation: Those that were started stay.
        """
        changes((), (), number)  # is it a number?
        return await of_no_cell(self._change_to(self.resolver.platform.workforce, number))

    async def _change_to(self, workforce: Workforce, number: int) -> Collection[asyncio.Task[None]]:
        async with self._changing:
            known, present = self._addresses["worker"], self._present()
            come, leave = changes(present, self._leaving, number)
            if come:
                await self._host.check(max(come) + 1)
            started: dict[tuple[str, int], str] = {}
            try:
                await self._start_tasks([("worker", index) for index in come], started)
            finally:
                added = {index: address for (_, index), address in started.items()}
                there = {**{index: known[index] for index in present}, **added}
                for index in leave:
                    del there[index]
                self._addresses["worker"] = dict(sorted(there.items()))
                self._name_tasks()
                moving = workforce.change(added, leave)
                for index in leave:
                    leaving = asyncio.get_running_loop().create_task(self._leave(index))
                    self._leaving[index] = leaving
                    moving.append(leaving)
        return moving

    async def _leave(self, index: int) -> None:
        try:
            await self._host.leave(index)
        finally:
            del self._leaving[index]

    async def _end_changes(self) -> None:
        self._end_adapting()
        for leaving in (tasks := list(self._leaving.values())):
            leaving.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, resources: contextlib.AsyncExitStack) -> None:
        self._host = await self._make_host(resources)
        resources.push_async_callback(self._end_changes)
        await self._host.check(self._counts["worker"])
        tasks = [(job, index) for job, count in self._counts.items() for index in range(count)]
        started: dict[tuple[str, int], str] = {}
        await self._start_tasks(tasks, started)
        for job, index in tasks:
            self._addresses[job][index] = started[job, index]
        self._resolver = LaunchedClusterResolver(self._host.platform)
        self._name_tasks()
        await self._host.open()

    async def _start_tasks(
        self, tasks: Sequence[tuple[str, int]], started: dict[tuple[str, int], str]
    ) -> None:
        """Start tasks side by side; note the address of each that was, also if others fail."""

        async def start(job: str, index: int) -> None:
            started[job, index] = await self._host.start(job, index)

        starting = [start(job, index) for job, index in tasks]
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _name_tasks(self) -> None:
        self.resolver.name_tasks({"chief": {0: self._host.chief}, **self._addresses})


@contextlib.asynccontextmanager
async def cluster_on_engine(settings: str) -> AsyncIterator[TaskCluster]:
    """Return the cluster that ``psync run --on`` has asked for, as a context manager.

    Args:
        settings: ``PSYNC_ON``, JSON: the engine, and the arguments of ``cluster_of_command``.

    Raises:
        ConfigurationError: The engine is not there, or has no room.
    """
    options = json.loads(settings)
    # By its name: psync's own launchers do not load it.
    engine = importlib.import_module(f"psync.integrations.{options.pop('engine')}")
    async with engine.cluster_of_command(**options) as cluster:
        # For scripts that ask for it by name.
        task = {"type": "chief", "index": 0}
        config = {"cluster": cluster.resolver.cluster_spec().as_dict(), "task": task}
        os.environ["TF_CONFIG"] = json.dumps(config)
        platform_of_tf_config.set(cluster.resolver.platform)
        yield cluster
