"""A task in a process that is not its own: an engine's, such as an actor of Ray or a Dask worker.

The task has a thread and an event loop to itself: neither does a step that computes on its loop
hold up what the engine has to say to its process, nor the other way round. Its methods may be
awaited on any loop.

Tasks of an engine move: what Ray starts again is elsewhere. But everybody in a cluster knows a task
by one address for as long as the cluster lives. So the address at which a task first listened is
its *name*, and ``MovedTasks`` is a network that connects to where the task of that name is now.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from psync.cluster import task_name
from psync.errors import ConfigurationError, PsyncError
from psync.launch.plugins import load_plugins
from psync.launch.process_loop import loop_factory
from psync.launch.tasks import make_task
from psync.net.chief_presence import chief_timeouts, until_told
from psync.net.environment import limits_of, shares_memory
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.tls import TlsNetwork
from psync.net.tls_config import load_tls
from psync.net.transport import BACKLOG, Factory, Listener, Network, SocketNetwork
from psync.ps_task import PsTask
from psync.worker_task import WorkerTask

logger = logging.getLogger(__name__)

BINDS = 100
"""Ports that are tried: one may be the name of a task that has moved away from it."""


class MovedTasks:
    """A network on which tasks are found where they have moved.

    Args:
        network: What the connections are made of.
        host: IP address of the interface on which this process listens.
        places: Where each task is that is not where its name says, by name.
    """

    def __init__(self, network: Network, host: str, places: Mapping[str, str]) -> None:
        self._network = network
        self._host = host
        self.places = dict(places)

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection; see ``transport.Network``."""
        return await self._network.connect(self.places.get(address, address), factory)

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen; see ``transport.Network``."""
        if address.endswith(":0"):  # a promoted backup, on the host that the task's name has
            address = join_address(self._host, 0)
        return await self._network.listen(address, factory)


def join_address(host: str, port: int) -> str:
    """Return the address of a port at an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to run. It travels as an argument of a call; its text has no secret.

    Attributes:
        job: ``ps`` or ``worker``.
        index: Of the task in its job.
        secret: Of the cluster.
        name: The address by which others know it; None: the one at which it will listen.
        names: Those of the other tasks: no address to listen at.
        places: See ``MovedTasks``.
        environ: Variables of the chief that all tasks follow.
    """

    job: str
    index: int
    secret: bytes = field(repr=False)
    name: str | None
    names: Collection[str]
    places: Mapping[str, str]
    environ: Mapping[str, str] = field(repr=False)


class HostedTask:
    """One task, in a thread of its own.

    Args:
        order: What to run.
        host: IP address of the interface on which it listens.

    Attributes:
        done: When it has ended: what it failed of; "" if it was told to end.
    """

    def __init__(self, order: Order, host: str) -> None:
        self._order = order
        self._host = host
        self._network: MovedTasks | None = None  # once it has begun
        self._loop: asyncio.AbstractEventLoop | None = None  # likewise
        self._task: PsTask | WorkerTask | None = None  # likewise
        self._is_stopping = False
        self._begun: concurrent.futures.Future[str] = concurrent.futures.Future()
        self.done: concurrent.futures.Future[str] = concurrent.futures.Future()

    async def begin(self) -> str:
        """Start the task; return the address at which it listens. Once.

        Raises:
            ConfigurationError: It cannot listen there, a plugin cannot be imported, certificates
                cannot be used.

        Cancellation: It begins all the same.
        """
        # Whatever the engine knows of this call by context variables, steps know, too.
        context = contextvars.copy_context()
        name = f"psync {self._order.job}-{self._order.index}"
        threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True).start()
        return await asyncio.shield(asyncio.wrap_future(self._begun))

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or has failed to begin."""
        return self.done.done()

    async def ended(self) -> str:
        """Wait for what ``done`` becomes. Cancellation: Safe."""
        return await asyncio.shield(asyncio.wrap_future(self.done))

    def know(self, places: Mapping[str, str]) -> None:
        """Other tasks have moved; see ``MovedTasks``."""
        if self._network is not None:
            self._network.places = dict(places)

    async def leave(self) -> None:
        """Let a worker finish what it runs, and end; wait for that. Cancellation: it goes on."""
        if self._loop is not None and isinstance(self._task, WorkerTask):
            leaving = self._task.leave("the cluster is made smaller")
            try:
                running = asyncio.run_coroutine_threadsafe(leaving, self._loop)
            except RuntimeError:  # its loop is closed: it has ended
                leaving.close()
            else:
                await asyncio.shield(asyncio.wrap_future(running))
        await self.ended()

    async def stop(self) -> None:
        """End the task, begun as it is; wait until all is closed. Cancellation: it goes on."""
        self.stop_soon()
        await self.ended()

    def stop_soon(self) -> None:
        """Tell the task to end."""
        self._is_stopping = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._task.stopped.set)

    # In the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as exc:
            if not isinstance(exc, PsyncError):
                logger.exception("%s-%d failed", self._order.job, self._order.index)
            self.done.set_result(f"failed: {exc}")
            if not self._begun.done():
                self._begun.set_exception(exc)
        else:
            self.done.set_result("")

    async def _serve(self) -> None:
        order = self._order
        name = task_name(order.job, order.index)
        load_plugins(name, order.environ)
        listening, address = self._bind()
        known = order.name or address
        try:
            tls = load_tls(os.environ)
            shares = tls is None and shares_memory(order.environ)
            sockets = SocketNetwork({known: listening}, shares_memory=shares)
        except BaseException:
            listening.close()
            raise
        network = sockets if tls is None else TlsNetwork(sockets, tls)
        self._network = MovedTasks(network, self._host, order.places)
        limits = limits_of(order.environ)
        platform = Platform(self._network, Secret(order.secret), limits=limits)
        task = self._task = make_task(platform, order.job, order.index, known)
        await task.start()
        self._loop = asyncio.get_running_loop()
        if self._is_stopping:
            task.stopped.set()
        logger.debug("%s serves at %s", name, address)
        self._begun.set_result(address)
        try:
            await until_told(name, task.stopped, task.chief, chief_timeouts(order.environ))
        finally:
            await task.close()
        if getattr(task, "is_torn", False):  # a ps
            raise PsyncError(f"{name} ended: an update failed partway; see the log")

    def _bind(self) -> tuple[socket.socket, str]:
        """Return a listening socket and its address, which is the name of no task."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        refused: list[socket.socket] = []  # kept until the end: each of them is another port
        try:
            for _ in range(BINDS):
                bound = socket.create_server((self._host, 0), family=family, backlog=BACKLOG)
                address = join_address(self._host, bound.getsockname()[1])
                if address not in self._order.names:
                    return bound, address
                refused.append(bound)
        except OSError as exc:
            raise ConfigurationError(
                f"{self._order.job}-{self._order.index} cannot listen on {self._host}: {exc}",
                hint="is it an address of this machine?",
            ) from exc
        finally:
            for each in refused:
                each.close()
        raise ConfigurationError(f"every free port on {self._host} is the address of another task")
