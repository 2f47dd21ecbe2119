"""LocalCluster: all tasks of a cluster on this machine, for first contact, notebooks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import sysconfig
from collections.abc import Sequence
from typing import Self

from psync.cluster import ClusterSpec, task_name
from psync.errors import ConfigurationError, UsageError
from psync.launch.plugins import load_plugins, plugins_environ
from psync.launch.processes import ProcessGroup, RestartPolicy
from psync.launch.task_process import TaskProcess, describe_exit
from psync.launch.tasks import make_task
from psync.net import certificates
from psync.net.platform import GivenUp, Platform
from psync.net.resolvers import SimpleClusterResolver
from psync.net.secret import Secret, mint_secret
from psync.net.tls import TlsNetwork
from psync.net.tls_config import TLS_VARIABLES, load_tls
from psync.net.transport import SocketNetwork
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork, VirtualClockLoop
from psync.worker_task import WorkerTask

logger = logging.getLogger(__name__)

CERTIFICATE_DAYS = 365
"""Of those that are made for one cluster, and go with it."""


class LocalClusterResolver(SimpleClusterResolver):
    """The chief's resolver in a local cluster; it also says how to reach the tasks."""

    def __init__(self, addresses: dict[str, list[str]], platform: Platform) -> None:
        super().__init__(ClusterSpec(addresses), task_type="chief", task_id=0)
        self.platform = platform


class LocalCluster:
    """ps and worker tasks on this machine; this process is the chief.

    An async context manager. With processes, each task is a real process with a secret of
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
        plugins: Modules with rules of your own, which this process and all tasks load; see
            ``psync.rules``.

    Raises:
        ConfigurationError: If a number is too small, processes are given a network, tasks
            without processes security, or plugins are no modules. From ``start``: if certificates
            cannot be made or used, or a plugin cannot be imported.

    Example:
        async with psync.LocalCluster(2, 2) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)
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
        self._security = security
        self._plugins = plugins_environ(plugins, os.environ)
        self._processes = processes
        self._network = network
        self._max_restarts = max_restarts
        self._resources: contextlib.AsyncExitStack | None = None  # None before start
        self._resolver: LocalClusterResolver | None = None
        self._given_up = GivenUp()  # those that died too often, or have left
        self._watchers: list[asyncio.Task[None]] = []
        self.tasks: dict[str, TaskProcess] = {}  # the newest process of each, as "worker-0"

    def __repr__(self) -> str:
        state = "not running" if self._resolver is None else "running"
        return f"<LocalCluster, {self._counts['ps']} ps, {self._counts['worker']} workers, {state}>"

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
            if self._processes:
                await self._start_processes(resources)
            else:
                await self._start_here(resources)
            self._resources = resources.pop_all()

    async def stop(self) -> None:
        """Stop all tasks. Cancellation: processes are killed."""
        resources, self._resources = self._resources, contextlib.AsyncExitStack()
        self._resolver = None
        if resources is not None:
            await resources.aclose()

    async def _start_here(self, resources: contextlib.AsyncExitStack) -> None:
        network = self._network
        if network is None:
            network = MemoryNetwork(chunk=(1 << 20, 1 << 20), check_buffers=False)
        virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
        platform = Platform(network, Secret(mint_secret().encode()), threads=not virtual)
        addresses = {
            job: [f"{job}-{index}:1" for index in range(count)]
            for job, count in self._counts.items()
        }
        for job, places in addresses.items():
            for index, address in enumerate(places):
                task: PsTask | WorkerTask = make_task(platform, job, index, address)
                await task.start()
                resources.push_async_callback(task.close)
        self._resolver = LocalClusterResolver({"chief": ["chief-0:1"], **addresses}, platform)

    async def _start_processes(self, resources: contextlib.AsyncExitStack) -> None:
        secret = mint_secret()
        environ = {**os.environ, **self._plugins, "PYTHONPATH": os.pathsep.join(_own_import_path())}
        if self._security:
            for name in TLS_VARIABLES:
                environ.pop(name, None)
            environ |= resources.enter_context(certificates.temporary(CERTIFICATE_DAYS))
        tls = load_tls(environ)
        group = ProcessGroup({"chief": 1, **self._counts}, secret=secret, environ=environ)
        await resources.enter_async_context(group)
        resources.push_async_callback(self._stop_watching)
        for job, count in self._counts.items():
            for index in range(count):
                self._watch(group, job, index)
        network = SocketNetwork() if tls is None else TlsNetwork(SocketNetwork(), tls)
        platform = Platform(network, Secret(secret.encode()), given_up=self._given_up)
        self._resolver = LocalClusterResolver(group.cluster, platform)

    def _watch(self, group: ProcessGroup, job: str, index: int) -> None:
        name = f"{job}-{index}"
        self.tasks[name] = group.start_task(job, index)

        async def watch() -> None:
            policy = RestartPolicy(self._max_restarts)
            level = logging.ERROR
            while True:
                code = await self.tasks[name].wait()
                death = describe_exit(code)
                if job == "worker" and code == 0:  # it was asked to leave, and did
                    level, why = logging.INFO, "has ended by itself and is not started again"
                    break
                if not policy.allow(asyncio.get_running_loop().time()):
                    why = f"{death} and is not started again ({policy.exceeded})"
                    break
                logger.warning("%s %s and is started again", name, death)
                try:
                    self.tasks[name] = group.start_task(job, index)
                except OSError as exc:
                    why = f"{death} and could not be started again: {exc}"
                    break
            logger.log(level, "%s %s", name, why)
            group.abandon(job, index)
            self._given_up.note(group.cluster[job][index], why)

        self._watchers.append(asyncio.get_running_loop().create_task(watch()))

    async def _stop_watching(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _own_import_path() -> list[str]:
    """Return where this program finds its own modules: its script's directory, PYTHONPATH.

    That is what stands before Python's own directories, which tasks have, too.
    """
    stdlib = sysconfig.get_path("stdlib")
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    pythons = {stdlib, os.path.join(os.path.dirname(stdlib), zipped)}
    own = itertools.takewhile(lambda path: path not in pythons, sys.path)
    return [os.path.abspath(path) for path in own]  # an empty one is the working directory
