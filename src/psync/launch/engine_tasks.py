"""Tasks in processes of an engine, such as Ray's or Dask's: where they are, restarts, moves.

An engine gives each task a *seat*: it runs a process for it, and when that is lost another one,
perhaps on another machine. This begins the task there, begins it again, as often a minute as a
local cluster would, and tells all others where it is now. The cluster's secret is handed to the
process by a call, when it runs: it is in nothing that an engine writes down, such as the arguments
with which it makes a process again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from psync.errors import ConfigurationError
from psync.launch.hosted_task import MovedTasks, Order, join_address
from psync.launch.processes import RestartPolicy
from psync.net.environment import limits_of, shares_memory
from psync.net.platform import Platform
from psync.net.secret import Secret, mint_secret
from psync.net.tls import TlsNetwork
from psync.net.tls_config import load_tls
from psync.net.transport import SocketNetwork

logger = logging.getLogger(__name__)

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


class TasksOnEngine:
    """Each task on a seat of an engine, where it is begun again when its process is lost.

    A host, see ``cluster.Host``.

    Args:
        engine: That.
        environ: Of the chief.
        max_restarts: How often a minute each task may be begun again.
    """

    def __init__(self, engine: Engine, environ: Mapping[str, str], max_restarts: int) -> None:
        self._engine = engine
        self._max_restarts = max_restarts
        self._secret = mint_secret().encode()
        followed = {name: text for name, text in environ.items() if name.startswith(FOLLOWED)}
        self._environ = {**followed, "PSYNC_LAUNCHED": "1"}
        tls = load_tls(environ)
        sockets = SocketNetwork(shares_memory=tls is None and shares_memory(environ))
        network = sockets if tls is None else TlsNetwork(sockets, tls)
        self._network = MovedTasks(network, engine.chief, {})
        limits = limits_of(environ)
        self.platform = Platform(self._network, Secret(self._secret), limits=limits)
        self.chief = join_address(engine.chief, 1)  # nobody connects to it
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._leaving: set[tuple[str, int]] = set()
        self._telling: set[asyncio.Task[None]] = set()  # the others, where one has moved

    async def open(self) -> None:
        """Nobody can join: the secret is this cluster's own, and known to nobody else."""

    async def check(self, num_workers: int) -> None:
        """See ``Host``."""
        await self._engine.check(num_workers)

    async def start(self, job: str, index: int) -> str:
        """Start a task; see ``Host``. Several may be started at a time."""
        entry = _Entry(await self._engine.seat(job, index))
        policy = RestartPolicy(self._max_restarts)
        self._entries[job, index] = entry
        while True:
            try:
                await self._begin(job, index, entry)
                break
            except SeatLost as exc:
                if exc.is_final or not self._allows(policy):
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
        """Let a worker leave; see ``Host``."""
        entry = self._entries["worker", index]
        self._leaving.add(("worker", index))
        assert entry.watching is not None
        try:
            await entry.seat.leave()
        except SeatLost as exc:
            logger.info("worker-%d: %s, as it was to leave", index, exc)
        await asyncio.wait((entry.watching,))

    def has_left(self, index: int) -> bool:
        """Return whether a worker has ended, and is not started again; see ``Host``."""
        watching = self._entries["worker", index].watching
        return watching is not None and watching.done()

    def describe(self, job: str, index: int) -> str:
        """Say where a task is; see ``Host``."""
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

    def _allows(self, policy: RestartPolicy) -> bool:
        return policy.allow(asyncio.get_running_loop().time())

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
            if is_final or not self._allows(policy):
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
