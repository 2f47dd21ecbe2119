"""Tasks in processes of an engine, such as actors of Ray or Dask's workers.

An engine gives each task a *seat*: it runs a process for it, and when that is lost another one,
perhaps on another machine. ``TasksOnEngine`` begins the task there, begins it again, as often a
minute as a local cluster would, and tells all others where it is now. The cluster's secret is
handed to the process by a call, when it runs: it is in nothing that an engine writes down, such as
the arguments with which it makes a process again.

There the task, a ``HostedTask``, has a thread and an event loop to itself: neither does a step that
computes on its loop hold up what the engine has to say to its process, nor the other way round.

Everybody in a cluster knows a task by one address for as long as the cluster lives. So the address
at which a task first listened is its *name*, and ``MovedTasks`` is a network that connects to where
the task of that name is now.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import importlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from psync.cluster import join_address, task_name
from psync.errors import ConfigurationError, PsyncError
from psync.launch.cluster import Host, TaskCluster
from psync.launch.plugins import load_plugins
from psync.launch.process import check_settings, loop_factory
from psync.launch.processes import RestartPolicy
from psync.launch.tasks import make_task
from psync.net.certificates import load_tls
from psync.net.chief_presence import until_told
from psync.net.environment import network_of, platform_of_tf_config
from psync.net.platform import Platform, chief_timeouts, limits_of
from psync.net.secret import Secret, mint_secret
from psync.net.shared.door_names import BACKLOG
from psync.net.shared.doors import shares_memory
from psync.net.tls import TlsNetwork
from psync.net.transport import Factory, Listener, Network, SocketNetwork

if TYPE_CHECKING:
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
        leave = getattr(self._task, "leave", None)  # a ps has none
        if self._loop is not None and leave is not None:
            leaving = leave("the cluster is made smaller")
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


# On the chief.

CLOSE_WITHIN_S = 10.0
"""A task that has not ended by then is left to the engine, which ends its process."""

FOLLOWED = ("PSYNC_LIMIT_", "PSYNC_PLUGINS", "PSYNC_LOG_LEVEL", "PSYNC_CHIEF_TIMEOUT")
"""Beginnings of those variables of the chief that hold on all tasks."""


class SeatLost(Exception):
    """The process of a task has died, or cannot be reached any more. The text says why.

    Args:
        why: As in "the actor has died".
        is_final: Whether the engine will have no other process for it.
    """

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class Seat(Protocol):
    """Where an engine runs one task."""

    async def begin(self, order: Order) -> str:
        """Run a task, in a new process if the last one was lost; return where it listens.

        A process that runs it already goes on doing so. Waits until the engine has a process.

        Raises:
            SeatLost: The process was lost meanwhile.
            PsyncError: The task cannot begin there, once more would be no better.
        """

    async def ended(self) -> str:
        """Wait until the task has ended; return what it failed of, or "". Raises SeatLost."""

    async def know(self, places: Mapping[str, str]) -> None:
        """Tell the task where others have moved. Raises SeatLost."""

    async def leave(self) -> None:
        """Let a worker finish what it runs, and end. Raises SeatLost."""

    async def close(self) -> None:
        """End the task if it runs, and give back what it had. Raises SeatLost."""

    async def abandon(self) -> None:
        """Give back what it had, whatever the task does. Raises nothing."""


class Engine(Protocol):
    """Runs processes on machines.

    Attributes:
        chief: IP address of this process, by which the chief is known.
    """

    chief: str

    async def check(self, num_workers: int) -> None:
        """Is there room for so many workers? Raises ConfigurationError."""

    async def seat(self, job: str, index: int) -> Seat:
        """Return a place for a task. Raises ConfigurationError: there is none."""


@dataclass
class _Entry:
    """One task that was started."""

    seat: Seat
    name: str = ""  # the address by which all know it, once it has begun
    place: str = ""  # where it listens now
    begun: int = 0  # how often
    state: str = "is starting"
    watching: asyncio.Task[None] | None = None


class TasksOnEngine(Host):
    """Each task on a seat of an engine, where it is begun again when its process is lost.

    A host, see ``cluster.Host``.

    Args:
        engine: That.
        environ: Of the chief.
        max_restarts: How often a minute each task may be begun again.
    """

    def __init__(self, engine: Engine, environ: Mapping[str, str], max_restarts: int) -> None:
        check_settings(environ)
        self._engine = engine
        self._max_restarts = max_restarts
        self._secret = mint_secret().encode()
        followed = {name: text for name, text in environ.items() if name.startswith(FOLLOWED)}
        self._environ = {**followed, "PSYNC_LAUNCHED": "1"}
        self._network = MovedTasks(network_of(environ), engine.chief, {})
        limits = limits_of(environ)
        self.platform = Platform(self._network, Secret(self._secret), limits=limits)
        self.chief = join_address(engine.chief, 1)  # nobody connects to it
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._leaving: set[tuple[str, int]] = set()
        self._telling: set[asyncio.Task[None]] = set()  # the others, where one has moved

    async def check(self, num_workers: int) -> None:
        await self._engine.check(num_workers)

    async def start(self, job: str, index: int) -> str:
        entry = _Entry(await self._engine.seat(job, index))
        policy = RestartPolicy(self._max_restarts)
        self._entries[job, index] = entry
        while True:
            try:
                await self._begin(job, index, entry)
                break
            except SeatLost as exc:
                if exc.is_final or not policy.allow():
                    raise ConfigurationError(
                        f"{job}-{index} cannot be started: {exc}",
                        hint="the engine's log says why the process dies",
                    ) from exc
                logger.warning("%s-%d is started again: %s", job, index, exc)
        self.platform.given_up.forget(entry.name)
        watching = self._watch(job, index, entry, policy)
        entry.watching = asyncio.get_running_loop().create_task(watching)
        return entry.name

    async def leave(self, index: int) -> None:
        entry = self._entries["worker", index]
        self._leaving.add(("worker", index))
        assert entry.watching is not None
        try:
            await entry.seat.leave()
        except SeatLost as exc:
            logger.info("worker-%d: %s, as it was to leave", index, exc)
        await asyncio.wait((entry.watching,))

    def has_left(self, index: int) -> bool:
        watching = self._entries["worker", index].watching
        return watching is not None and watching.done()

    def describe(self, job: str, index: int) -> str:
        entry = self._entries[job, index]
        again = f", begun {entry.begun} times" if entry.begun > 1 else ""
        return f"{entry.state}{again}"

    async def close(self) -> None:
        """End all tasks, and give their seats back. Cancellation: what is left is abandoned."""
        for running in (own := [*self._telling, *self._watchers()]):
            running.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        entries = list(self._entries.values())
        self._entries.clear()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await asyncio.gather(*(self._close(entry) for entry in entries))
        except TimeoutError:
            logger.info(
                "some tasks have not ended in %g s: their processes are killed", CLOSE_WITHIN_S
            )
        finally:
            await asyncio.gather(*(entry.seat.abandon() for entry in entries))

    def _watchers(self) -> list[asyncio.Task[None]]:
        return [e.watching for e in self._entries.values() if e.watching is not None]

    async def _close(self, entry: _Entry) -> None:
        try:
            await entry.seat.close()
        except Exception as exc:  # also the engine's own: it may have been shut down
            logger.debug("%s: %s, as it was to end", entry.name, exc)

    # Beginning, and watching.

    async def _begin(self, job: str, index: int, entry: _Entry) -> None:
        """Begin a task, for the first time or again; all others hear where it is."""
        places = self._network.places
        order = Order(
            job, index, self._secret, entry.name or None, self._names(entry), places, self._environ
        )
        entry.place = await entry.seat.begin(order)
        entry.name = entry.name or entry.place
        entry.state, entry.begun = f"runs at {entry.place}", entry.begun + 1
        known = places.get(entry.name, entry.name)
        if entry.place != known:
            moved = {name: at for name, at in self._network.places.items() if name != entry.name}
            if entry.place != entry.name:
                moved[entry.name] = entry.place
            self._network.places = moved
            logger.info("%s-%d is at %s now", job, index, entry.place)
            self._tell_all()
        elif self._network.places is not places:  # others have moved meanwhile
            self._tell(entry)

    def _names(self, besides: _Entry) -> Collection[str]:
        return [entry.name for entry in self._entries.values() if entry is not besides]

    def _tell_all(self) -> None:
        for entry in self._entries.values():
            self._tell(entry)

    def _tell(self, entry: _Entry) -> None:
        async def tell() -> None:
            try:
                await entry.seat.know(self._network.places)
            except SeatLost:  # it is told when it begins again
                pass

        telling = asyncio.get_running_loop().create_task(tell())
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _watch(self, job: str, index: int, entry: _Entry, policy: RestartPolicy) -> None:
        name, level, why = f"{job}-{index}", logging.ERROR, ""
        while True:
            is_final = False
            try:
                death = await entry.seat.ended()
            except SeatLost as exc:
                death, is_final = str(exc), exc.is_final
            if (job, index) in self._leaving:
                level, why = logging.INFO, "has left: it was asked to"
                break
            if job == "worker" and not death:  # somebody else has asked it, and it did
                level, why = logging.INFO, "has ended by itself and is not started again"
                break
            death = death or "has ended"
            if is_final or not policy.allow():
                reason = "" if is_final else f" ({policy.exceeded})"
                why = f"{death}, and is not started again{reason}"
                break
            entry.state = "is being started again"
            logger.warning("%s is started again: %s", name, death)
            try:
                await self._begin(job, index, entry)
            except SeatLost as exc:
                if exc.is_final:
                    why = f"{exc}, and is not started again"
                    break
                logger.debug("%s: %s", name, exc)  # `ended` says it, too
            except Exception as exc:  # also what the engine raised: a package is missing there
                why = f"{death}, and could not be started again: {exc}"
                break
        logger.log(level, "%s: %s", name, why)
        entry.state = why
        self._leaving.discard((job, index))
        self.platform.given_up.note(entry.name, why)
        await entry.seat.abandon()


# For ``psync run --on``. There is no launcher that stays: its process becomes the script's, and
# ``psync.run`` opens the cluster in it.

PACKAGES = {"ray": "ray", "dask": "distributed"}
"""The package that each engine needs."""


def run_on(
    engine: str, command: Sequence[str], environ: Mapping[str, str], **options: Any
) -> NoReturn:
    """Run a script as the chief of a cluster on an engine, in place of this process.

    Args:
        engine: One of ``PACKAGES``.
        command: Runs the script.
        environ: What it inherits.
        options: Arguments of the engine's ``cluster_of_command``.

    Raises:
        ConfigurationError: The engine's package is not installed.
    """
    if find_spec(PACKAGES[engine]) is None:
        raise ConfigurationError(
            f"--on {engine} needs the package {PACKAGES[engine]}, which is not installed here",
            hint=f"pip install 'psync[{engine}]'",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    settings = json.dumps({"engine": engine, **options})
    os.execve(command[0], [*command], {**environ, "PSYNC_ON": settings})


@contextlib.asynccontextmanager
async def cluster_on_engine(settings: str) -> AsyncIterator[TaskCluster]:
    """Return the cluster that ``run_on`` was asked for, as a context manager.

    Args:
        settings: ``PSYNC_ON``.

    Raises:
        ConfigurationError: The engine is not there, or has no room.
    """
    options = json.loads(settings)
    engine = importlib.import_module(f"psync.integrations.{options.pop('engine')}")
    async with engine.cluster_of_command(**options) as cluster:
        # For scripts that ask for it by name.
        task = {"type": "chief", "index": 0}
        config = {"cluster": cluster.resolver.cluster_spec().as_dict(), "task": task}
        os.environ["TF_CONFIG"] = json.dumps(config)
        platform_of_tf_config.set(cluster.resolver.platform)
        yield cluster
