"""The host of backups: backups of other ps tasks in this process, fed by logs and promoted.

A backup is a ps task that does not listen: it gets a snapshot first, then every entry of its
primary's log, and executes each: ``Section.replayed`` says who does that, for all other messages it
is the handler that a ps has for them. When it is promoted it listens, at an address of its own, and
is a ps like any other.

    state      BeginBackup  FillSnapshot  LogEntries                   Promote
    filling    restart      taken         refused                      refused
    following  restart      -             acknowledged; then executed  executes the rest, serves
    serving    restart      FencedError   FencedError                  the same answer again
    damaged    restart      refused       refused                      refused

``restart`` needs an epoch that is not older, and for one that serves a newer one: the coordinator
has rolled back to a checkpoint since, and does not know that it serves. A newer coordinator ends
the backups of earlier ones.

An entry that the primary refuses is refused here, too. An error in judging or computing ends the
process, as it does on a ps (``LongWork.give_up``). One in taking an entry, or a checksum or digest
that differs (``store.commit_log``), damages the backup alone: it takes no more entries, is never
promoted, and is replaced.

What a process says of itself to the next coordinator, which asks the task at the process's own
address (a backup that serves speaks for itself alone):

    AskServed   no backup of earlier coordinators is made or promoted from then on; one that is
                being promoted finishes first; then the answer: the ps tasks that are served here,
                the backups that are here
                If it says so, the rest of what they have left here ends first

Source: docs/design.md, "Failover" and "Attach".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from psync.backups.pairing import Computation, check_release
from psync.errors import FencedError, PsyncError, RemoteProtocolError, UsageError
from psync.net.connection import AsIfFrom, Connection, Handler, OwnRequest, Request
from psync.net.shielding import begin, shielded
from psync.ps.snapshots import fill, load
from psync.ps.succession import check_newest
from psync.store.commit_log import Diverged, chained
from psync.store.snapshot import Loaded
from psync.store.snapshot_state import SnapshotState
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    AskServed,
    AttachPs,
    BeginBackup,
    CheckState,
    Done,
    FillSnapshot,
    LogEntries,
    Primary,
    Promote,
    ServedHere,
    Text,
)

if TYPE_CHECKING:
    from psync.ps_task import PsTask

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 << 20
"""Of entries that are not done: more, and the answer waits."""


@dataclass(eq=False, slots=True)
class _Backup:
    """The backup of one ps."""

    order: BeginBackup
    task: PsTask
    loaded: Loaded | None  # None: it is complete
    live: list[memoryview]  # what no snapshot has: its state, then the arrays that are there
    sender: str
    epoch: int
    taken: int  # the last entry that is here
    address: asyncio.Task[str] | None = None  # once it is to serve
    handlers: dict[type[Message], Handler] = field(default_factory=dict)  # once it is complete
    entries: deque[OwnRequest[Message]] = field(default_factory=deque)
    pending_bytes: int = 0  # of entries that are not done; none has no header
    doing: asyncio.Task[None] | None = None
    spawned: list[asyncio.Task[None]] = field(default_factory=list)  # by the entry of just now
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # an entry is done
    chain: int = 0  # over the entries of the log
    diverged: bool = False  # it was compared, and is another one
    failed: bool = False  # an entry has failed as no ps may refuse one

    @property
    def is_damaged(self) -> bool:
        """Whether it may lack what the one that is backed up has."""
        return self.failed or self.task.work.is_torn

    @property
    def coordinator(self) -> int:
        """Incarnation of the newest coordinator that it has served, or serves."""
        return max(self.order.coordinator, self.task.floor)

    async def primary(self) -> Primary | None:
        """Return what it serves; None: nothing. Waits for one that is about to serve."""
        if self.address is None:
            return None
        try:
            address = await shielded(self.address)
        except PsyncError:
            return None
        # A coordinator that has attached it counts its orders anew.
        is_first = self.order.coordinator == self.task.floor
        return self.task.primary(address, self.epoch if is_first else 0)

    async def fill(self, message: FillSnapshot, segments: Sequence[memoryview]) -> None:
        """Take a part of what it begins with; again changes nothing."""
        if self.loaded is None:  # it came before, over a connection that is lost
            return
        beside = message.item - len(self.loaded.state.items)
        if beside < 0:
            await fill(self.loaded, message, segments)
        elif beside == len(self.live) - 1:
            self.live += segments
        self.look()

    def look(self) -> None:
        """Hold what it begins with, if all of it is there."""
        loaded, order = self.loaded, self.order
        if loaded is None or loaded.wanted or len(self.live) <= order.beside:
            return
        self.loaded = None
        attach = AttachPs(order.coordinator, order.ps_addresses, order.ps_timeout_s, keep=True)
        self.handlers = self.task.take_over(attach, loaded, order.timeline, order.lineage)
        self.add(self.taken, ("", 0, encode(order), len(self.live)), self.live)
        self.live = []

    def add(
        self, number: int, sent: tuple[str, int, bytes, int], body: Sequence[memoryview]
    ) -> None:
        """Take the next entry; the one before the first is what no snapshot has."""
        task, incarnation, header, _ = sent
        client, message, nbytes = (task, incarnation), decode(header), sum(map(len, body))
        size = len(header) + nbytes
        done = functools.partial(self._done, number, size)
        entry = OwnRequest(AsIfFrom(client, spawn=self._spawn), message, body, done)
        entry.header = header
        self.pending_bytes += size
        self.taken = number
        if isinstance(message, CheckState) and message.chain != self.chain:
            entry.fail(Diverged(f"{self.sender}: its backup was sent other entries"))
        if number >= self.order.first:
            self.chain = chained(self.chain, client, header, nbytes)
        self.entries.append(entry)
        if self.doing is None:
            self.doing = asyncio.get_running_loop().create_task(self._do())

    async def _do(self) -> None:
        """Let the executor have the entries, one after the other."""
        try:
            begun = 0
            handlers, work = self.handlers, self.task.work
            while self.entries and not (self.failed or work.is_torn):
                entry = self.entries.popleft()
                try:
                    under_way = handlers[type(entry.message)].run(entry)
                    if isinstance(under_way, CoroutineType):
                        entry.start(under_way)
                except Exception as exc:
                    entry.fail(exc)
                while self.spawned:
                    await asyncio.wait((self.spawned.pop(),))
                if not entry.over:
                    # What the next one names may be made by this one.
                    await self.task.services.executor.drain()
                begun += 1
                if not begun % 64:
                    await asyncio.sleep(0)
        finally:
            self.doing = None
            self.changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An entry takes more than a turn: the next one comes after it."""
        task = asyncio.get_running_loop().create_task(work)
        self.spawned.append(task)
        return task

    def _done(self, number: int, size: int, outcome: object) -> None:
        """An entry is done, or refused, as by the primary; or it has failed as none may."""
        if isinstance(outcome, PsyncError) and not isinstance(outcome, Diverged):
            logger.debug("entry %d is refused, as by its primary: %s", number, outcome)
        elif isinstance(outcome, Exception):  # such as no memory here, where the other had enough
            logger.error(
                "%s: its backup failed at log entry %d", self.sender, number, exc_info=outcome
            )
            self.diverged |= isinstance(outcome, Diverged)
            self.failed = True
        self.pending_bytes -= size
        self.changed.set()

    async def settle(self, below: int = 0) -> None:
        """Wait until no more than so many bytes of entries are left that are not done.

        Cancellation: Safe.
        """
        while not self.is_damaged and self.pending_bytes > below:
            self.changed.clear()
            await self.changed.wait()

    async def close(self) -> None:
        """End it."""
        if self.loaded is not None:
            self.loaded.give_up()
        if self.doing is not None:
            self.doing.cancel()
            await asyncio.wait((self.doing,))
        await self.task.close()


class BackupHost:
    """The backups in one process.

    Args:
        own: The ps whose process it is.
    """

    def __init__(self, own: PsTask) -> None:
        self._task = own.task
        self._own = own
        self._backups: dict[int, _Backup] = {}  # by the index of the ps
        self._fenced = 0  # earlier coordinators have nothing to say here
        self.diverged = 0  # backups that were not what they should have been
        self._ending: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            BeginBackup: Handler(self._begin),
            LogEntries: Handler(self._log),
            Promote: Handler(self._promote),
        }

    @property
    def is_torn(self) -> bool:
        """Whether an update failed half-way on one that serves."""
        return any(task.is_torn for task in self.serving)

    @property
    def serving(self) -> list[PsTask]:
        """Those that serve."""
        return [each.task for each in self._backups.values() if each.address is not None]

    def describe(self) -> list[str]:
        """Say whose backups are here; for reports."""
        return [
            f"/job:ps/task:{ps}: "
            + ("serves here" if each.address is not None else f"backup, has {each.taken} entries")
            for ps, each in self._backups.items()
        ]

    # What the next coordinator has to know.

    @property
    def newest(self) -> int:
        """Incarnation of the newest coordinator that was heard of here; 0: none."""
        known = (each.coordinator for each in self._backups.values())
        return max(self._fenced, *known, 0)

    async def ask_served(self, request: Request[AskServed]) -> None:
        """Say what is served here; for the task at the process's own address alone."""
        peer = request.peer
        check_newest(peer, self._task, self._own.newest)
        self._fenced = max(self._fenced, peer.incarnation)
        if request.message.ends:
            self.end_below(peer.incarnation)
            self._own.end_below(peer.incarnation)
        backups = list(self._backups.items())
        primaries = [await each.primary() for _, each in backups]
        copies = [
            (ps, each.order.coordinator, each.epoch) for ps, each in backups if each.address is None
        ]
        primaries.append(self._own.primary("", 0))
        found = [each for each in primaries if each is not None]
        request.answer(ServedHere(found, copies))

    # They are fed.

    def _begin(self, request: Request[BeginBackup]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        sender = f"/job:ps/task:{message.ps}"
        if peer.task != sender:
            raise UsageError(f"{self._task}: {peer.task} is not {sender}")
        own = self._own.platform.parts.of(Computation)()
        check_release(self._task, own.release, sender, message.release)
        begun = Text(own.numerics)
        if message.coordinator < self._own.newest:
            # No FencedError: it has not been replaced, and may be attached by the newer one yet.
            raise UsageError(f"{self._task} serves a newer coordinator")
        if len(body) != 2:
            raise RemoteProtocolError(f"{self._task}: {len(body)} segments with a BeginBackup")
        known = self._backups.get(message.ps)
        if known is not None and known.order.coordinator <= message.coordinator:
            newer = known.order.coordinator < message.coordinator
            oldest = known.epoch + (known.address is not None)
            if not newer and message.epoch < oldest:
                raise FencedError(f"{sender} has been replaced by its backup")
            if message == known.order:  # a repetition: it may have all of the snapshot, and more
                request.answer(begun)
                return
        where = f"snapshot of {sender}"
        state = SnapshotState.from_bytes(bytes(body[0]), where)
        loaded = load(state, self._own, sender, message.coordinator)
        if known is not None:
            self._end(known)
        task = self._own.make_backup(message.ps)
        made = _Backup(message, task, loaded, [body[1]], sender, message.epoch, message.first - 1)
        self._backups[message.ps] = made
        made.look()
        request.answer(begun)

    def _known(self, peer: Connection, ps: int, epoch: int) -> _Backup:
        known = self._backups.get(ps)
        if known is None:
            raise UsageError(f"{self._task} has no backup of /job:ps/task:{ps}")
        if peer.task != known.sender:
            raise UsageError(f"{self._task}: {peer.task} is not {known.sender}")
        if known.address is not None or known.epoch != epoch:
            raise FencedError(f"{known.sender} has been replaced by its backup")
        if known.is_damaged:
            self.diverged += known.diverged
            why = "has diverged" if known.diverged else "is damaged"
            known.diverged = False  # counted
            raise PsyncError(f"the backup of {known.sender} {why}")
        return known

    async def fill(self, request: Request[FillSnapshot]) -> None:
        """Fill a part of the snapshot with which a backup begins."""
        message = request.message
        known = self._known(request.peer, message.ps, message.number)
        await known.fill(message, request.segments)
        request.answer(Done())

    def _log(self, request: Request[LogEntries]) -> None:
        message, body = request.message, request.segments
        known = self._known(request.peer, message.ps, message.epoch)
        if known.loaded is not None:
            known.loaded.check_whole(f"a snapshot of {known.sender}")
            raise UsageError(f"a snapshot of {known.sender} is incomplete")
        if message.first > known.taken + 1:
            raise RemoteProtocolError(
                f"{known.sender}: entry {message.first} follows {known.taken}"
            )
        at = 0
        for number, entry in enumerate(message.entries, message.first):
            segments = body[at : at + entry[3]]
            at += entry[3]
            if number > known.taken:  # else it came before, over a connection that is lost
                known.add(number, entry, segments)
        # In the turn in which they came: the next message has the entries that follow.
        if known.pending_bytes <= MAX_PENDING_BYTES:
            request.answer(Done())
        else:
            request.start(_when_settled(request, known))

    # To serve.

    async def _promote(self, request: Request[Promote]) -> None:
        peer, message = request.peer, request.message
        known = self._backups.get(message.ps)
        if known is None or known.order.coordinator != message.coordinator:
            raise UsageError(f"{self._task} has no backup of /job:ps/task:{message.ps}")
        if peer.task != "/job:chief/task:0" or peer.incarnation != message.coordinator:
            raise FencedError(f"{self._task}: {peer.task} is not this task's coordinator")
        if known.loaded is not None:
            raise UsageError(f"the backup of {known.sender} is incomplete")
        if message.coordinator < self._fenced:
            raise FencedError(f"{self._task} serves a newer coordinator")
        if known.address is None:
            if message.epoch < known.epoch:
                raise FencedError(f"{self._task}: there is a newer backup of {known.sender}")
            known.epoch = message.epoch
            serving = self._serve(known, message.fences)
            known.address = asyncio.get_running_loop().create_task(serving)
        request.answer(Text(await shielded(known.address)))

    async def _serve(self, known: _Backup, fences: Sequence[tuple[str, int]]) -> str:
        await known.settle()
        if known.is_damaged:
            raise PsyncError(f"the backup of {known.sender} is damaged")
        listener = await known.task.promote(fences)
        logger.info(
            "%s is served by its backup, in the process of %s, at %s", known.sender, self._task,
            listener.address,
        )  # fmt: skip
        return listener.address

    # Ends.

    def end_below(self, coordinator: int) -> None:
        """End what belongs to earlier coordinators."""
        for ps, known in list(self._backups.items()):
            if known.coordinator < coordinator:
                del self._backups[ps]
                self._end(known)

    def _end(self, known: _Backup) -> None:
        begin(known.close(), self._ending)

    async def close(self) -> None:
        """End all of them. Cancellation: they go on ending."""
        backups, self._backups = self._backups, {}
        for known in backups.values():
            self._end(known)
        if self._ending:
            await asyncio.wait(list(self._ending))


async def _when_settled(request: Request[Any], known: _Backup) -> None:
    await known.settle(MAX_PENDING_BYTES)
    request.answer(Done())
