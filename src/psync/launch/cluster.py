"""TaskCluster: a cluster whose chief is this process and whose tasks a ``Host`` starts.

What all such clusters have: the resolver, scaling, adapting. ``LocalCluster`` is one on this
machine, with tasks as processes, which are watched, or in this process. ``psync.integrations.ray``
and ``.dask`` have others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import socket
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from psync.closures.scaling import AdaptiveRule, changes
from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError, PsyncError, UsageError, check_fits, other_loop
from psync.launch.plugins import load_plugins, plugins_environ
from psync.launch.process import check_settings
from psync.launch.processes import (
    GpuShares,
    Process,
    ProcessGroup,
    RestartPolicy,
    describe_exit,
    hint_of_crash,
)
from psync.launch.tasks import Door, make_task, tell_to_end
from psync.net import certificates
from psync.net.certificates import TLS_VARIABLES
from psync.net.environment import network_of
from psync.net.platform import Platform, Workforce
from psync.net.resolvers import SimpleClusterResolver, opened
from psync.net.secret import Secret, load_secret, mint_secret
from psync.net.shared.regions import SharedMemory
from psync.net.shielding import end_all, of_no_cell
from psync.ps_task import PsTask
from psync.status.html_tables import table
from psync.testing import MemoryNetwork, VirtualClockLoop
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.worker_task import WorkerTask

logger = logging.getLogger(__name__)


class Host(ABC):
    """Starts the tasks of a cluster.

    Attributes:
        platform: Of the chief.
        chief: Its address.
    """

    platform: Platform
    chief: str

    async def open(self) -> None:  # noqa: B027  # by default nobody can
        """Let workers join that know the chief's address and the secret."""

    async def check(self, num_workers: int) -> None:  # noqa: B027  # by default there is
        """Is there room for so many workers? Raises ConfigurationError."""

    @abstractmethod
    async def start(self, job: str, index: int) -> str:
        """Start a task that is not there; return its address. Several may be started at a time.

        Raises:
            PsyncError, OSError: It cannot be started.

        Cancellation: It may stay, and ends with the host.
        """

    @abstractmethod
    async def leave(self, index: int) -> None:
        """Let a worker finish what it runs, and end; wait for that. Cancellation: it goes on."""

    @abstractmethod
    def has_left(self, index: int) -> bool:
        """Return whether a worker has ended, and is not started again."""

    @abstractmethod
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

    def __init__(self, num_ps: int, num_workers: int, plugins: Sequence[str]) -> None:
        for name, count in (("num_ps", num_ps), ("num_workers", num_workers)):
            fits = isinstance(count, int) and count >= 1
            check_fits(fits, f"{name}: expected at least 1", count)
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
            raise UsageError("the cluster was already started")
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
        check_fits(interval > 0, "interval: expected seconds above 0", interval)
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
        return await of_no_cell(self._change_to(self.resolver.platform.workforce, number))

    async def _change_to(self, workforce: Workforce, number: int) -> Collection[asyncio.Task[None]]:
        async with self._changing:
            while True:
                present = self._present()
                come, leave = changes(present, self._leaving, number)
                try:
                    if come:
                        await self._host.check(max(come) + 1)
                    break
                except ConfigurationError:
                    if not self._leaving:
                        raise
                    await asyncio.wait(self._leaving.values())  # their places become free
            known = self._addresses["worker"]
            workers = self._addresses["worker"] = {index: known[index] for index in present}
            try:
                await self._start_tasks([("worker", index) for index in come])
            finally:
                added = {index: workers[index] for index in come if index in workers}
                for index in leave:
                    del workers[index]
                self.resolver.name_tasks({"chief": {0: self._host.chief}, **self._addresses})
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
        await end_all(self._leaving.values())

    async def _start(self, resources: contextlib.AsyncExitStack) -> None:
        self._host = await self._make_host(resources)
        resources.push_async_callback(self._end_changes)
        await self._host.check(self._counts["worker"])
        tasks = [(job, index) for job, count in self._counts.items() for index in range(count)]
        await self._start_tasks(tasks)
        self._resolver = LaunchedClusterResolver(self._host.platform)
        self.resolver.name_tasks({"chief": {0: self._host.chief}, **self._addresses})
        await self._host.open()

    async def _start_tasks(self, tasks: Sequence[tuple[str, int]]) -> None:
        """Start tasks side by side; note the address of each that was, also if others fail."""

        async def start(job: str, index: int) -> None:
            self._addresses[job][index] = await self._host.start(job, index)

        starting = [start(job, index) for job, index in tasks]
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


NO_STRANGERS = Limits(handshakes=DEFAULT_LIMITS.connections)
"""All who connect in memory are tasks of the cluster. Hundreds that begin at once would take each
other's places, again and again, until chance has spread them."""

CERTIFICATE_DAYS = 365
"""Of those that are made for one cluster, and go with it."""


class TasksHere(Host):
    """Tasks in this process, on a network in memory.

    Args:
        network: That; None: one that delivers at once.
        resources: Closes the tasks.
    """

    chief = "chief-0:1"

    def __init__(self, network: MemoryNetwork | None, resources: contextlib.AsyncExitStack) -> None:
        if network is None:
            network = MemoryNetwork(chunk=(1 << 20, 1 << 20), check_buffers=False)
        loop = asyncio.get_running_loop()
        virtual = isinstance(loop, VirtualClockLoop)
        self.platform = Platform(
            network, Secret(mint_secret().encode()), NO_STRANGERS,
            now=loop.time if virtual else time.monotonic, threads=not virtual,
        )  # fmt: skip
        self._resources = resources
        self._tasks: dict[tuple[str, int], PsTask | WorkerTask] = {}
        self._starts = Counter[tuple[str, int]]()

    async def start(self, job: str, index: int) -> str:
        self._starts[job, index] += 1  # a second worker of one index is not where the first one was
        address = f"{job}-{index}:{self._starts[job, index]}"
        platform = dataclasses.replace(self.platform, memory=SharedMemory())  # a task has its own
        task = self._tasks[job, index] = make_task(platform, job, index, address)
        await task.start()
        self._resources.push_async_callback(task.close)
        return address

    async def leave(self, index: int) -> None:
        task = self._tasks.pop(("worker", index))
        assert isinstance(task, WorkerTask)
        await task.leave("the cluster is made smaller")
        await task.close()

    def has_left(self, index: int) -> bool:
        task = self._tasks.get(("worker", index))
        return task is None or task.stopped.is_set()

    def describe(self, job: str, index: int) -> str:
        return "in this process"


@dataclass(eq=False, repr=False)
class TasksInProcesses(Host):
    """Each task a process, which is started again when it dies.

    Args:
        counts: Number of tasks of each job at the start.
        environ: What they inherit.
        gpus: Of workers.
        max_restarts: How often a minute each task may be started again.
        security: Whether certificates are made.
        resources: Ends the processes.

    Attributes:
        processes: The newest process of each task, by name.
    """

    counts: Mapping[str, int]
    environ: Mapping[str, str]
    gpus: GpuShares
    max_restarts: int
    security: bool
    resources: contextlib.AsyncExitStack

    def __post_init__(self) -> None:
        check_settings(self.environ)
        known = load_secret(self.environ)
        minted = mint_secret() if known is None else None
        environ = {**self.environ, "PYTHONPATH": os.pathsep.join(_own_import_path())}
        if self.security:
            for name in TLS_VARIABLES:
                environ.pop(name, None)
            environ |= self.resources.enter_context(certificates.temporary(CERTIFICATE_DAYS))
        self._environ = environ
        self._group = ProcessGroup({"chief": 1, **self.counts}, secret=minted, environ=environ)
        self.resources.push_async_callback(self._group.stop)
        self._watchers: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.resources.push_async_callback(lambda: end_all(self._watchers.values()))
        self.chief = self._group.cluster["chief"][0]
        self._joinable = known is not None  # nobody else knows one that was made here
        inherited: dict[str, socket.socket] = {}
        if self._joinable:
            inherited[self.chief] = self._group.listener_of("chief", 0)
            self.resources.callback(inherited[self.chief].close)
        secret = known or Secret((minted or "").encode())
        self.platform = Platform(network_of(environ, inherited), secret)
        self.processes = self._group.processes
        self._leaving: set[tuple[str, int]] = set()

    async def open(self) -> None:
        if not self._joinable:
            return
        joined: dict[str, str] = {}
        began = self.platform.new_incarnation()
        self.resources.push_async_callback(tell_to_end, self.platform, began, joined)
        door = Door(self.platform, self.chief, self.platform.workforce, joined)
        await self.resources.enter_async_context(door)

    async def check(self, num_workers: int) -> None:
        await asyncio.to_thread(self.gpus.check, num_workers)

    async def start(self, job: str, index: int) -> str:
        if (job, index) not in self._watchers and index < self.counts[job]:
            address = self._group.cluster[job][index]
        else:
            address = await self._group.add_task(job, index)
        self.platform.given_up.forget(address)
        self._start(job, index)
        watching = self._watch(job, index, address)
        self._watchers[job, index] = asyncio.get_running_loop().create_task(watching)
        return address

    def _start(self, job: str, index: int) -> None:
        self._group.start_task(job, index, env=self.gpus.environ_of(job, index))

    async def leave(self, index: int) -> None:
        task = ("worker", index)
        self._leaving.add(task)
        self.processes[f"worker-{index}"].send_signal(signal.SIGTERM)
        await asyncio.wait((self._watchers[task],))

    def has_left(self, index: int) -> bool:
        return self._watchers["worker", index].done()

    def describe(self, job: str, index: int) -> str:
        return self.processes[f"{job}-{index}"].describe()

    async def _watch(self, job: str, index: int, address: str) -> None:
        policy = RestartPolicy(self.max_restarts)
        name, level, hinted = f"{job}-{index}", logging.ERROR, job == "ps"
        while True:
            code = await self.processes[name].wait()
            death = describe_exit(code)
            if not hinted and (hint := hint_of_crash(code, self._environ)):
                hinted = True
                logger.warning("%s %s\n%s", name, death, hint)
            if (job, index) in self._leaving:
                level, why = logging.INFO, f"{death}: it was asked to leave"
                break
            if job == "worker" and code == 0:  # somebody else has asked it, and it did
                level, why = logging.INFO, "has ended by itself and is not started again"
                break
            if not policy.allow():
                why = f"{death} and is not started again ({policy.exceeded})"
                break
            logger.warning("%s %s and is started again", name, death)
            try:
                self._start(job, index)
            except OSError as exc:
                why = f"{death} and could not be started again: {exc}"
                break
        logger.log(level, "%s %s", name, why)
        if (job, index) in self._leaving:
            self._group.remove_task(job, index)
        else:
            self._group.abandon(job, index)
        self._leaving.discard((job, index))
        self.platform.given_up.note(address, why)


def _own_import_path() -> list[str]:
    """Return where this program finds its own modules: its script's directory, PYTHONPATH.

    That is what stands before Python's own directories, which tasks have, too.
    """
    stdlib = sysconfig.get_path("stdlib")
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    pythons = {stdlib, os.path.join(os.path.dirname(stdlib), zipped)}
    own = itertools.takewhile(lambda path: path not in pythons, sys.path)
    return [os.path.abspath(path) for path in own]  # an empty one is the working directory


class LocalCluster(TaskCluster):
    """ps and worker tasks on this machine; this process is the chief.

    An async context manager; inside, ``ParameterServerStrategy()`` uses this cluster.

    - With processes, each task is a real process. The cluster makes its own secret. A task that
      dies restarts, up to three times a minute; a ps comes back empty. Tasks can import modules
      next to this program's script, as the script can.
    - Without processes, all tasks run in this process and on this loop, connected by memory instead
      of sockets.

    Args:
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        processes: Whether tasks are separate processes.
        max_restarts: Number of restarts per minute of each worker and each ps. A task that dies
            once more is given up, and a ``ClusterCoordinator`` does not wait for it. When the last
            worker is given up, ``join`` raises WorkerLost; for a ps, ParameterServerLost.
        network: Network of the tasks of a cluster without processes, instead of one that delivers
            immediately: ``psync.testing.MemoryNetwork(seed=7, latency=(0.001, 0.01))`` delays, cuts
            and checks. With ``psync.testing.run_virtual`` such a test takes no real time.
        security: Whether connections between the processes use TLS, with certificates that are made
            for this cluster and removed with it (``pip install 'psync[tls]'``). If False, they use
            TLS if the environment names certificates.
        gpus_per_worker: Number of GPUs that each worker process sees, out of those that this
            process sees. Workers share no GPU, and ps tasks see none. 0: workers see none either.
            None: all tasks see the same GPUs as this process.
        plugins: Modules with custom rules, which this process and all tasks load; see
            ``psync.rules``.

    Raises:
        ConfigurationError: A number is too small; processes are given a network; tasks without
            processes are given security or GPUs; or plugins are not modules. From ``start``:
            certificates cannot be made or used, there are too few GPUs, or a plugin cannot be
            imported.

    Example:
        async with psync.LocalCluster(2, 2) as cluster:
            strategy = psync.ParameterServerStrategy()
            async with psync.ClusterCoordinator(strategy) as coordinator:
                ...
    """

    def __init__(
        self,
        num_ps: int,
        num_workers: int,
        processes: bool = True,
        *,
        max_restarts: int = 3,
        network: MemoryNetwork | None = None,
        security: bool = False,
        gpus_per_worker: int | None = None,
        plugins: Sequence[str] = (),
    ) -> None:
        super().__init__(num_ps, num_workers, plugins)
        for is_given, wants, text in (
            (network is not None, False, "network: only tasks in one process can use it"),
            (security, True, "security: tasks in one process do not use it"),
            (gpus_per_worker is not None, True,
             "gpus_per_worker: tasks in one process see the same GPUs"),
        ):  # fmt: skip
            if is_given and processes != wants:
                raise ConfigurationError(text, hint=f"LocalCluster(…, processes={wants})")
        self._security = security
        self._gpus = GpuShares(gpus_per_worker, os.environ)
        self._processes = processes
        self._network = network
        self._max_restarts = max_restarts
        self.tasks: dict[str, Process] = {}  # the newest process of each, as "worker-0"

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        if not self._processes:
            return TasksHere(self._network, resources)
        host = TasksInProcesses(
            self._counts, {**os.environ, **self._plugins}, self._gpus, self._max_restarts,
            security=self._security, resources=resources,
        )  # fmt: skip
        self.tasks = host.processes
        return host

    def _check_now(self, num_workers: int) -> None:
        self._gpus.check(num_workers)
