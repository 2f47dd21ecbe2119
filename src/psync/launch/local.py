"""LocalCluster: all tasks of a cluster on this machine, for first contact, notebooks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from psync.closures.scaling_rule import AdaptiveRule, changes
from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError, PsyncError, UsageError
from psync.launch.gpus import GpuShares
from psync.launch.local_tasks import Host, TasksHere, TasksInProcesses
from psync.launch.plugins import load_plugins, plugins_environ
from psync.launch.task_process import Process
from psync.net.notebook_cells import of_no_cell
from psync.net.platform import Platform
from psync.net.resolvers import SimpleClusterResolver, opened
from psync.net.workforce import Workforce
from psync.status.html_tables import table
from psync.testing import MemoryNetwork

logger = logging.getLogger(__name__)


class LocalClusterResolver(SimpleClusterResolver):
    """The chief's resolver in a local cluster; it also says how to reach the tasks."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(ClusterSpec({}), task_type="chief", task_id=0)
        self.platform = platform

    def name_tasks(self, addresses: Mapping[str, Mapping[int, str]]) -> None:
        """These are the tasks from now on: address by job and index."""
        self._cluster_spec = ClusterSpec(addresses)


class LocalCluster:
    """ps and worker tasks on this machine; this process is the chief.

    An async context manager; inside, ``ParameterServerStrategy()`` is a strategy of this cluster.
    With processes, each task is a real process with a secret of
    its own making; one that died is started again, three times a minute. A ps comes back
    empty. They import what lies beside this program's script, as it does. Without, all tasks run
    in this process and on this loop, joined by memory instead of sockets.

    Args:
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        processes: Whether tasks are processes of their own.
        max_restarts: How often a minute each worker and each ps may be started again. One that dies
            once more is given up, and a ``ClusterCoordinator`` does not wait for it: when the last
            worker is given up, ``join`` raises WorkerLost; for a ps, ParameterServerLost.
        network: Joins the tasks of a cluster without processes, in place of one that delivers
            at once: ``psync.testing.MemoryNetwork(seed=7, latency=(0.001, 0.01))`` delays, cuts
            and checks. With ``psync.testing.run_virtual`` such a test takes no real time.
        security: Whether connections between the processes have TLS, with certificates that are
            made for this cluster and removed with it (``pip install 'psync[tls]'``). Without, they
            have it if the environment names certificates.
        gpus_per_worker: GPUs that each worker process sees, out of those that this one does, and
            none of which another worker sees; ps tasks see none. 0: nor do workers. None: all
            tasks see what this process does.
        plugins: Modules with rules of your own, which this process and all tasks load; see
            ``psync.rules``.

    Raises:
        ConfigurationError: If a number is too small, processes are given a network, tasks
            without processes security or GPUs, or plugins are no modules. From ``start``: if
            certificates cannot be made or used, there are fewer GPUs, or a plugin cannot be
            imported.

    Example:
        async with psync.LocalCluster(2, 2) as cluster:
            strategy = psync.ParameterServerStrategy()
            async with psync.ClusterCoordinator(strategy) as coordinator:
                ...
    """

    __psync_capture_error__ = "the cluster's processes belong to the chief"

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
        for name, count in (("num_ps", num_ps), ("num_workers", num_workers)):
            if not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {count!r}")
        self._counts = {"ps": num_ps, "worker": num_workers}
        if processes and network is not None:
            raise ConfigurationError(
                "network: only tasks in one process can use it",
                hint="LocalCluster(…, processes=False)",
            )
        if security and not processes:
            raise ConfigurationError("security: tasks in one process have nothing to hide")
        if gpus_per_worker is not None and not processes:
            raise ConfigurationError(
                "gpus_per_worker: tasks in one process see the same GPUs",
                hint="LocalCluster(…, processes=True)",
            )
        self._security = security
        self._gpus = GpuShares(gpus_per_worker, os.environ)
        self._plugins = plugins_environ(plugins, os.environ)
        self._processes = processes
        self._network = network
        self._max_restarts = max_restarts
        self._resources: contextlib.AsyncExitStack | None = None  # None before start
        self._resolver: LocalClusterResolver | None = None
        self._host: Host  # once it is started
        self._addresses: dict[str, dict[int, str]] = {job: {} for job in self._counts}
        self._changing = asyncio.Lock()  # which workers there are
        self._leaving: dict[int, asyncio.Task[None]] = {}  # workers that are about to
        self._adapting: asyncio.Task[None] | None = None
        self.tasks: dict[str, Process] = {}  # the newest process of each, as "worker-0"

    def __repr__(self) -> str:
        state, workers = "not running", self._counts["worker"]
        if self._resolver is not None:
            state, workers = "running", len(self._addresses["worker"])
        return f"<LocalCluster, {self._counts['ps']} ps, {workers} workers, {state}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for job in self._counts if self._resolver is not None else ():
            spec = self.resolver.cluster_spec()
            for index in spec.task_indices(job):
                name = f"{job}-{index}"
                process = self.tasks.get(name)
                state = "in this process" if process is None else process.describe()
                rows.append((name, spec.task_address(job, index), state))
        return table(repr(self).strip("<>"), ("task", "address", "process"), rows)

    @property
    def resolver(self) -> LocalClusterResolver:
        """The chief's resolver, for ``ParameterServerStrategy``.

        Raises:
            UsageError: Before the cluster is started.
        """
        if self._resolver is None:
            raise UsageError(
                "the local cluster is not running",
                hint="use it inside `async with psync.LocalCluster(…) as cluster:`",
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
            raise UsageError("the local cluster was started before")
        load_plugins(task_name("chief", 0), {**os.environ, **self._plugins})
        async with contextlib.AsyncExitStack() as resources:
            await of_no_cell(self._start(resources))
            resources.enter_context(opened(self.resolver))
            self._resources = resources.pop_all()

    async def stop(self) -> None:
        """Stop all tasks. Cancellation: processes are killed."""
        resources, self._resources = self._resources, contextlib.AsyncExitStack()
        self._resolver = None
        if resources is not None:
            await resources.aclose()

    async def scale(self, workers: int) -> None:
        """Change the number of workers, while a ``ClusterCoordinator`` of this cluster runs or not.

        Further workers are started, with the lowest indices that are free, in place of any that was
        given up, too. A coordinator that runs takes them in: they get closures, and take part in
        the next ``strategy.run``; see ``ClusterCoordinator.add_worker``. Those with the highest
        indices leave in order, as by ``remove_worker``: they end the closure that they run. The
        next strategy is made of the workers that there are then. ``adapt`` ends.

        Args:
            workers: How many there shall be, at least 1.

        Returns:
            When those that come take part in the coordinator that runs, or could not be taken in,
            which its log says; and those that leave have left.

        Raises:
            ConfigurationError: It is no such number, or there are too few GPUs.
            UsageError: The cluster is not running.
            OSError: A process cannot be started.

        Cancellation: Workers come and leave all the same.

        Example:
            async with psync.LocalCluster(1, 2) as cluster:
                ...
                await cluster.scale(workers=8)
        """
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
        """Let the number of workers follow the queue, from now on until ``scale`` or ``stop``.

        There are as many workers as do within ``target_duration`` what is queued and running, by
        the mean duration of closures, but no more than there are closures. More come at once; fewer
        stay only when several looks in a row asked for fewer, and those leave in order.

        Args:
            minimum: Of workers, at least 1.
            maximum: Of workers.
            target_duration: In seconds.
            interval: Seconds between two looks.
            wait_count: So many looks in a row have to ask for fewer before any leaves.

        Raises:
            ConfigurationError: One of them is out of range, or there are too few GPUs.
            UsageError: The cluster is not running.

        Example:
            cluster.adapt(minimum=1, maximum=8)

        Source: Dask's ``Cluster.adapt``.
        """
        rule = AdaptiveRule(minimum, maximum, target_duration, wait_count)
        if not interval > 0:
            raise ConfigurationError(f"interval: expected seconds above 0, got {interval!r}")
        workforce = self.resolver.platform.workforce
        self._gpus.check(maximum)
        self._end_adapting()
        adapting = self._adapt(workforce, rule, interval)
        self._adapting = asyncio.get_running_loop().create_task(adapting)

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
            added: dict[int, str] = {}
            try:
                for index in come:
                    added[index] = await self._host.start("worker", index)
            finally:
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
        if self._processes:
            in_processes = TasksInProcesses(
                self._counts, {**os.environ, **self._plugins}, self._gpus, self._max_restarts,
                security=self._security, resources=resources,
            )  # fmt: skip
            self.tasks = in_processes.processes
            self._host = in_processes
        else:
            self._host = TasksHere(self._network, resources)
        resources.push_async_callback(self._end_changes)
        await self._host.check(self._counts["worker"])
        for job, count in self._counts.items():
            for index in range(count):
                self._addresses[job][index] = await self._host.start(job, index)
        self._resolver = LocalClusterResolver(self._host.platform)
        self._name_tasks()
        await self._host.open()

    def _name_tasks(self) -> None:
        self.resolver.name_tasks({"chief": {0: self._host.chief}, **self._addresses})
