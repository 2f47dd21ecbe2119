"""Tasks of a local cluster: as processes, which are watched, or in this process.

Both start a task and say where it listens, and let a worker leave in order: they are hosts, see
``cluster.Host``.
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
from collections.abc import Mapping

from psync.launch.door import Door
from psync.launch.gpus import GpuShares
from psync.launch.identity import tell_to_end
from psync.launch.processes import ProcessGroup, RestartPolicy
from psync.launch.task_process import Process, describe_exit, hint_of_crash
from psync.launch.tasks import make_task
from psync.net import certificates
from psync.net.environment import newest_incarnation, shares_memory
from psync.net.platform import Platform
from psync.net.secret import Secret, load_secret, mint_secret
from psync.net.shared.regions import SharedMemory
from psync.net.tls import TlsNetwork
from psync.net.tls_config import TLS_VARIABLES, load_tls
from psync.net.transport import SocketNetwork
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork, VirtualClockLoop
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.worker_task import WorkerTask

logger = logging.getLogger(__name__)

NO_STRANGERS = Limits(handshakes=DEFAULT_LIMITS.connections)
"""All who connect in memory are tasks of the cluster. Hundreds that begin at once would take each
other's places, again and again, until chance has spread them."""

CERTIFICATE_DAYS = 365
"""Of those that are made for one cluster, and go with it."""


class TasksHere:
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
        self._addresses: set[str] = set()  # of all there ever were

    async def open(self) -> None:
        """Nobody can join tasks in memory."""

    async def check(self, num_workers: int) -> None:
        """There always is room."""

    async def start(self, job: str, index: int) -> str:
        """Start a task; see ``Host``."""
        # A second worker of one index is not where the first one was.
        places = (f"{job}-{index}:{port}" for port in itertools.count(1))
        address = next(place for place in places if place not in self._addresses)
        self._addresses.add(address)
        platform = dataclasses.replace(self.platform, memory=SharedMemory())  # a task has its own
        task = self._tasks[job, index] = make_task(platform, job, index, address)
        await task.start()
        self._resources.push_async_callback(task.close)
        return address

    async def leave(self, index: int) -> None:
        """Let a worker leave; see ``Host``."""
        task = self._tasks.pop(("worker", index))
        assert isinstance(task, WorkerTask)
        await task.leave("the cluster is made smaller")
        await task.close()

    def has_left(self, index: int) -> bool:
        """Return whether a worker has ended; see ``Host``."""
        task = self._tasks.get(("worker", index))
        return task is None or task.stopped.is_set()

    def describe(self, job: str, index: int) -> str:
        """Say where a task runs; see ``Host``."""
        return "in this process"


class TasksInProcesses:
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

    def __init__(
        self,
        counts: Mapping[str, int],
        environ: Mapping[str, str],
        gpus: GpuShares,
        max_restarts: int,
        *,
        security: bool,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        known = load_secret(environ)
        minted = mint_secret() if known is None else None
        environ = {**environ, "PYTHONPATH": os.pathsep.join(_own_import_path())}
        if security:
            for name in TLS_VARIABLES:
                environ.pop(name, None)
            environ |= resources.enter_context(certificates.temporary(CERTIFICATE_DAYS))
        tls = load_tls(environ)
        self._environ = environ
        self._group = ProcessGroup({"chief": 1, **counts}, secret=minted, environ=environ)
        resources.push_async_callback(self._group.stop)
        resources.push_async_callback(self._stop_watching)
        self.chief = self._group.cluster["chief"][0]
        self._joinable = known is not None  # nobody else knows one that was made here
        inherited: dict[str, socket.socket] = {}
        if self._joinable:
            inherited[self.chief] = self._group.listener_of("chief", 0)
            resources.callback(inherited[self.chief].close)
        sockets = SocketNetwork(inherited, shares_memory=tls is None and shares_memory(environ))
        network = sockets if tls is None else TlsNetwork(sockets, tls)
        self.platform = Platform(network, known or Secret((minted or "").encode()))
        self._resources = resources
        self.processes: dict[str, Process] = {}
        self._unused = {(job, index) for job, count in counts.items() for index in range(count)}
        self._gpus = gpus
        self._max_restarts = max_restarts
        self._watchers: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._leaving: set[tuple[str, int]] = set()

    async def open(self) -> None:
        """Let workers join. Cancellation: safe."""
        if not self._joinable:
            return
        joined: dict[str, str] = {}
        began = self.platform.new_incarnation()

        async def end() -> None:
            await tell_to_end(self.platform, newest_incarnation() or began, joined)

        self._resources.push_async_callback(end)
        door = Door(self.platform, self.chief, self.platform.workforce, joined)
        await self._resources.enter_async_context(door)

    async def check(self, num_workers: int) -> None:
        """See ``Host``. Raises ConfigurationError: there are fewer GPUs."""
        if self._gpus.are_shared:
            await asyncio.to_thread(self._gpus.check, num_workers)

    async def start(self, job: str, index: int) -> str:
        """Start a process; see ``Host``. Raises OSError if it cannot be."""
        if (job, index) in self._unused:
            self._unused.discard((job, index))
            address = self._group.cluster[job][index]
        else:
            address = await self._group.add_task(job, index)
        self.platform.given_up.forget(address)
        name = f"{job}-{index}"
        self.processes[name] = self._start(job, index)
        watching = self._watch(job, index, address)
        self._watchers[job, index] = asyncio.get_running_loop().create_task(watching)
        return address

    def _start(self, job: str, index: int) -> Process:
        return self._group.start_task(job, index, env=self._gpus.environ_of(job, index))

    async def leave(self, index: int) -> None:
        """Let a worker leave, by SIGTERM; see ``Host``."""
        task = ("worker", index)
        self._leaving.add(task)
        self.processes[f"worker-{index}"].send_signal(signal.SIGTERM)
        await asyncio.wait((self._watchers[task],))

    def has_left(self, index: int) -> bool:
        """Return whether a worker has ended, and is not started again; see ``Host``."""
        return self._watchers["worker", index].done()

    def describe(self, job: str, index: int) -> str:
        """Say how a task's process is; see ``Host``."""
        return self.processes[f"{job}-{index}"].describe()

    async def _watch(self, job: str, index: int, address: str) -> None:
        policy = RestartPolicy(self._max_restarts)
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
            if not policy.allow(asyncio.get_running_loop().time()):
                why = f"{death} and is not started again ({policy.exceeded})"
                break
            logger.warning("%s %s and is started again", name, death)
            try:
                self.processes[name] = self._start(job, index)
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

    async def _stop_watching(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)


def _own_import_path() -> list[str]:
    """Return where this program finds its own modules: its script's directory, PYTHONPATH.

    That is what stands before Python's own directories, which tasks have, too.
    """
    stdlib = sysconfig.get_path("stdlib")
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    pythons = {stdlib, os.path.join(os.path.dirname(stdlib), zipped)}
    own = itertools.takewhile(lambda path: path not in pythons, sys.path)
    return [os.path.abspath(path) for path in own]  # an empty one is the working directory
