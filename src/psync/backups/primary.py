"""The primary's side of its backup: made, fed, replaced or given up at the coordinator's command.

``BackupService`` serves one coordinator and timeline, with its store; a newer one gets another.
Before the first ``BackUp`` nothing is queued, and nothing is slower.

    message         then
    BackUp          a snapshot is taken between two entries of the log, and sent while others go on;
                    answered when the backup has it, and all that was answered meanwhile
    BackUp, lost    answered when the backup no longer follows. No entry is applied until then, nor
                    until the coordinator has said that there is none: it might promote it
    BackUp to ""    goes on alone

``BackupSender`` feeds one backup: with a snapshot first, then with every entry, in order. It ends
when the backup no longer follows: its process is gone, has been restarted, or refuses. What is not
answered when a connection is lost is sent again; the backup ignores what it has.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from psync.backups.pairing import Computation, check_deterministic
from psync.cluster import parse_task_name
from psync.errors import (
    BusyError,
    ConnectFailed,
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    PsyncError,
    RemoteProtocolError,
    TransportError,
    UsageError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.shielding import shielded
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import MAX_KEPT_BYTES, NOBODY, Executor
from psync.store.commit_log import LogState
from psync.store.snapshot import Frozen
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message, replace
from psync.wire.frames import Frame, Segment
from psync.wire.messages import (
    BackUp,
    BeginBackup,
    Done,
    FillSnapshot,
    LogEntries,
    Text,
)

if TYPE_CHECKING:
    from psync.sync.ps_services import PsServices

logger = logging.getLogger(__name__)

MAX_ENTRIES = 256
MAX_BYTES = 4 << 20
"""Of one message, which has at least one entry."""

MAX_UNDER_WAY = 4
"""Messages that the backup has not answered."""

PIECE_BYTES = 8 << 20

MAX_LOSSES = 16
"""Connections in a row that bring no answer: more, and what is sent over them breaks them."""

RECONNECT_S = 0.5
"""How long a backup may be away: one whose process has ended does not come back."""

SILENT_S = 10.0
"""A backup that has not answered for so long does not follow."""


Live = tuple[bytes, Sequence[memoryview]]
"""What no snapshot has of a ps, see ``Section``: its state, and its arrays, of which none is empty.
"""


class BackupSender:
    """Feeds one backup.

    Args:
        service: Whose backup it is: has the log that is to be sent.
        begin: With what the backup begins, but for the number of its first entry.
        order: Where the backup is.

    Attributes:
        ended: Set when the backup does not follow any more.
        error: Why.
        is_unlike: Whether the last bits of the backup may differ.
    """

    def __init__(self, service: BackupService, begin: BeginBackup, order: BackUp) -> None:
        self.order = order
        self.ended = asyncio.Event()
        self.error: PsyncError | None = None
        self.is_unlike = False
        self._service = service
        self._begin = begin
        self._log = service.executor.log
        # Of this coordinator's range: whoever serves a newer one refuses it.
        incarnation = begin.coordinator + order.epoch
        self._task = f"/job:ps/task:{begin.ps}"
        self._endpoint = Endpoint(service.ps.platform, self._task, incarnation, {})
        self._peer: Connection | None = None
        self._sent = 0  # messages, which outlive connections
        # By number, what the backup has not answered: message, segments, and the last of its
        # entries; 0: it is a part of the snapshot, of which one at a time is sent.
        self._unanswered: dict[int, tuple[Message, Sequence[Segment], int]] = {}
        self._answer: Message | None = None  # of the last part of the snapshot
        self._losses = 0  # connections since the last answer
        self._ships = False  # the snapshot is there
        self._is_soon = False  # ``ship`` is called soon
        self._connecting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # the backup has more, or does not follow
        self._now = asyncio.get_running_loop().time
        self._heard_at = 0.0

    async def copy(self, frozen: Frozen, live: Live, first: int) -> None:
        """Send what there is, and then all entries until the backup has all that there are.

        Args:
            frozen: A snapshot.
            live: What no snapshot has.
            first: Number of the first entry that neither has.

        Raises:
            PsyncError: The backup does not follow.

        Cancellation: ``close`` is still to be called.
        """
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        try:
            begin = replace(self._begin, first=first, beside=len(live[1]))
            await self._send_snapshot(frozen, live, begin)
        except PsyncError as exc:
            self._fail(exc)
            raise
        finally:
            frozen.drop()
        self._ships = True
        await self._until_taken(first - 1)
        self._log.pair()
        await self._until_taken(self._log.last)

    async def _send_snapshot(self, frozen: Frozen, live: Live, begin: BeginBackup) -> None:
        state, arrays = live
        answer = await self._call(begin, [frozen.state.to_bytes(), state])
        if not isinstance(answer, Text):
            raise RemoteProtocolError(f"a backup began with {type(answer).__name__}")
        self.is_unlike = self._service.begun_with(self.order.task, answer.value)
        for item, known in enumerate(frozen.state.items):
            if known.is_constant:
                continue
            for start in range(0, known.nbytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, known.nbytes)
                part = frozen.part(item, start, stop)
                await self._call(FillSnapshot(begin.ps, begin.epoch, item, start), part)
        for place, array in enumerate(arrays, len(frozen.state.items)):
            await self._call(FillSnapshot(begin.ps, begin.epoch, place, 0), [array])

    async def _call(self, message: Message, segments: Sequence[Segment]) -> Message | None:
        """Send a part of a snapshot, and return its answer."""
        self._check()
        self._put(message, segments)
        number = self._sent
        while number in self._unanswered:
            await self._change()
        return self._answer

    async def _until_taken(self, number: int) -> None:
        """Ship entries, and wait until the backup has all up to this one."""
        self._check()
        self.ship()
        while self._log.taken < number:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self.error is None and self._log.state is LogState.ALONE:
            self._fail(
                PsyncError(
                    f"more than {MAX_KEPT_BYTES >> 20} MiB of updates arrived while the backup was "
                    "being made; it is made again"
                )
            )
        if self.error is not None:
            raise self.error.with_traceback(None)

    def ship_soon(self) -> None:
        """Send what there is in the next turn: what else comes in this one goes along."""
        if not self._is_soon:
            self._is_soon = True
            asyncio.get_running_loop().call_soon(self.ship)

    def ship(self) -> None:
        """Send what there is to be sent."""
        self._is_soon = False
        log = self._log
        while self._ships and log.shipped < log.last and len(self._unanswered) < MAX_UNDER_WAY:
            first = log.shipped + 1
            entries, segments = log.to_ship(MAX_ENTRIES, MAX_BYTES)
            if not entries:
                return
            message = LogEntries(self._begin.ps, self.order.epoch, first, entries)
            self._put(message, segments, log.shipped)

    def _put(self, message: Message, segments: Sequence[Segment], upto: int = 0) -> None:
        """Send a message, again where a connection is lost, until it is answered."""
        if not self._unanswered:
            self._heard_at = self._now()
        self._sent += 1
        self._unanswered[self._sent] = message, segments, upto
        if self._peer is not None:
            self._ask(self._peer, self._sent)

    def _ask(self, peer: Connection, number: int) -> None:
        message, segments, _ = self._unanswered[number]
        try:
            peer.ask(message, segments, functools.partial(self._heard, number))
        except ConnectionLost:
            pass  # it is sent over the next one
        except PsyncError as exc:
            self._fail(exc)

    def _heard(self, number: int, outcome: Frame | Exception) -> None:
        if self.ended.is_set() or isinstance(outcome, ConnectionLost):
            return
        if isinstance(outcome, Exception):
            self._fail(outcome)
            return
        *_, upto = self._unanswered.pop(number)
        self._losses = 0
        self._heard_at = self._now()
        self._changed.set()
        if not upto:
            self._answer = outcome.message
            return
        log = self._log
        log.note_taken(upto)
        self._service.executor.advance()
        if log.shipped < log.last:
            self.ship()

    async def _connect(self) -> None:
        """Connect again and again, also if nothing is to be sent: is the backup there?"""
        where, incarnation = self.order.task, None
        try:
            while not self.ended.is_set():
                if self._losses == MAX_LOSSES:
                    raise ConnectionLost(f"{MAX_LOSSES} connections to it in a row were lost")
                try:
                    peer = await self._endpoint.connect_retrying(
                        self.order.address, where, timeout_s=RECONNECT_S, level=logging.DEBUG
                    )
                except FencedError as exc:
                    # A newer coordinator, which may attach this ps yet: none has replaced it.
                    raise ConnectFailed(f"{where}: {exc.message}") from exc
                if incarnation not in (None, peer.incarnation):
                    peer.close()
                    raise ConnectFailed(f"{where} was started again, and has no backup any more")
                incarnation = peer.incarnation
                await self._until_lost(peer)
                self._losses = self._losses + 1 if self._unanswered else 0
        except PsyncError as exc:
            self._fail(exc)

    async def _until_lost(self, peer: Connection) -> None:
        """Send what is not answered over a connection, until it is lost.

        Raises:
            ConnectionLost: The backup is silent.
        """
        lost = asyncio.Event()
        peer.on_closed.append(lambda _: lost.set())
        self._peer, self._heard_at = peer, self._now()
        for number in list(self._unanswered):
            self._ask(peer, number)
        while not (lost.is_set() or peer.is_closed):
            try:
                async with asyncio.timeout(SILENT_S / 4):
                    await lost.wait()
            except TimeoutError:
                if self._unanswered and self._now() - self._heard_at > SILENT_S:
                    error = ConnectionLost(f"it has been silent for {SILENT_S:g} s")
                    # It may still have segments of a snapshot, which are given back now.
                    peer.abort(error)
                    raise error from None
        self._peer = None

    # Ends.

    def _fail(self, error: Exception) -> None:
        if self.ended.is_set():
            return
        if not isinstance(error, PsyncError):
            error = RemoteProtocolError(f"a backup answered with {error!r}")
        self.error = error
        self.ended.set()
        self._ships = False
        # That the host is lost is the coordinator's to say, which may know it already.
        level = logging.INFO if isinstance(error, ConnectFailed) else logging.WARNING
        logger.log(level, "%s: its backup is not complete: %s", self._task, error.message)
        self._changed.set()
        if isinstance(error, FencedError):
            self._service.depose()

    def close(self) -> Coroutine[Any, Any, None]:
        """Send nothing more, and depose nobody; return what closes its connection.

        The first from this turn on: in the same one its ps may begin to serve something else,
        which what the backup still answers does not concern.

        Cancellation: A connection may still be closing.
        """
        self._ships = False
        if self.error is None:
            self.error = PsyncError(f"{self._task}: its backup was removed")
        self.ended.set()
        self._changed.set()
        if self._connecting is not None:
            self._connecting.cancel()
        return self._disconnect()

    async def _disconnect(self) -> None:
        if self._connecting is not None:
            await asyncio.wait((self._connecting,))
        await self._endpoint.close(goes_on=True)  # the backup may be in the middle of a copy


class Section(Protocol):
    """A part of the state of a ps, which is its sections: entries are judged by them.

    To add one: a class with these four, in ``PsServices.sections``, which is what digests and
    backups are made of; its changes through ``Executor.submit``. No two may replay the same
    message. ``ps.accumulators`` is a small one.

    Its own handlers are listed in ``PsServices.handlers``. If it remembers clients it is told who
    has been replaced (``PsServices.refuse_below``), if requests wait in it, when it ends (``end``).

    A newer coordinator that keeps the variables keeps the store alone, so it begins empty then.

    What checkpoints have of it besides, and backups begin with: a field of ``SnapshotState`` (for
    older files with a default; with a check in ``from_bytes``) that ``PsServices.freeze`` fills in;
    a new ``PsServices`` begins with it. Shards, ledger and optimizers are there.
    """

    def control(self) -> Any:
        """Return the state that judging has made, as plain data in an order of its own."""

    async def live(self, arrays: list[memoryview]) -> Any:
        """Return what no snapshot has, for a backup; meanwhile nothing changes.

        Args:
            arrays: Gets its arrays, whose number the state says.

        Returns:
            Its state, as plain data for msgpack.

        Cancellation: Safe.
        """

    async def restore(self, state: Any, arrays: Iterator[memoryview]) -> None:
        """Be, on a backup that has the snapshot, where that is which has returned this.

        Cancellation: The backup is of no use.
        """

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes, on a backup, what only a log says, or says otherwise."""


class PsProcess(Protocol):
    """What the ps task, which lives as long as its process, is to its services."""

    task: str
    index: int
    platform: Platform
    pool: BlockPool
    work: LongWork

    def check_coordinator(self, peer: Connection) -> None:
        """Raise FencedError unless a peer is the coordinator that is served."""

    def lineage(self) -> int | None:
        """Return that of what is served, see ``store.reattach``; None: nothing is."""

    def depose(self) -> None:
        """The backup serves in its place."""

    def cut_off(self) -> None:
        """Close the connections of tasks that are not served any more."""


class BackupService:
    """Keeps the backup of one ps.

    Args:
        ps: The ps.
        contents: What is backed up.
    """

    def __init__(self, ps: PsProcess, contents: PsServices) -> None:
        self.ps = ps
        self._contents = contents
        self.executor: Executor = contents.executor
        self._epoch = 0
        self._sender: BackupSender | None = None
        self._unequal = 0  # how many backups had another fingerprint
        self._copying: asyncio.Task[None] | None = None
        self._over = False

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {BackUp: Handler(self._back_up)}

    def statistics(self) -> dict[str, Any]:
        """Return counters."""
        log = self.executor.log
        return {
            "state": log.state.value, "epoch": self._epoch, "entries": log.last,
            "taken": log.taken, "waiting": self.executor.waiting, "unequal": self._unequal,
        }  # fmt: skip

    def waits_for(self) -> tuple[int, int]:
        """Return (process, epoch) of the backup without which nothing is done; (-1, 0): none.

        Without such a one it was certainly not replaced: the coordinator lets no backup serve
        before it has heard that it is complete, nor after it has said that there is none.
        """
        if self.executor.log.state is not LogState.PAIRED or self._sender is None:
            return -1, 0
        order = self._sender.order
        return parse_task_name(order.task)[1], order.epoch

    def describe(self) -> list[str]:
        """Say how it stands with the backup; for reports."""
        if not self._epoch:
            return []
        log, sender = self.executor.log, self._sender
        where = "" if sender is None else f" in the process of {sender.order.task}"
        unlike = ", last bits may differ" if sender is not None and sender.is_unlike else ""
        return [
            f"backup{where}: {log.state.value}, has {log.taken} of {log.last} entries, "
            f"{self.executor.waiting} wait to be executed{unlike}"
        ]

    # Whether the backup computes the same bits.

    def begun_with(self, host: str, numerics: str) -> bool:
        """Return whether a backup has another fingerprint, or refuse it; see ``pairing``."""
        if numerics == self.ps.platform.parts.of(Computation)().numerics:
            return False
        task = self.ps.task
        check_deterministic(task, host, self._contents.deterministic())
        self._unequal += 1
        logger.warning(
            "%s and its backup in the process of %s do not compute bit-identical results: CPU, "
            "numpy or C library differ; after a failover, values may differ in their last bits",
            task, host,
        )  # fmt: skip
        return True

    def check_group(self, config: SyncConfig) -> None:
        """Refuse a new group that is deterministic, if the backup is not."""
        if config.deterministic and self._sender is not None and self._sender.is_unlike:
            check_deterministic(self.ps.task, self._sender.order.task, [config.name])

    # The coordinator's word.

    async def _back_up(self, request: Request[BackUp]) -> None:
        message = request.message
        self.ps.check_coordinator(request.peer)
        if not message.lost:
            self._order(message)
            if self._copying is not None:
                try:
                    await shielded(self._copying)
                except TransportError as exc:  # who asks would take it for a loss of his own
                    raise PsyncError(f"its backup is not complete: {exc.message}") from exc
        elif self._sender is not None and self._sender.order.epoch == message.epoch:
            await self._sender.ended.wait()
            if self._over:
                raise FencedError(f"{self.ps.task} now serves other contents")
        request.answer(Done())

    def _order(self, message: BackUp) -> None:
        if message.epoch < self._epoch:
            raise UsageError(f"backup order {message.epoch} is older than {self._epoch}")
        if message.epoch == self._epoch:
            return  # it was asked before, over a connection that is lost
        ps, attach, lineage = self.ps, self._contents.attach, self.ps.lineage()
        if attach is None or lineage is None:  # the backup of nothing would be no backup
            raise ParameterServerLost(ps.task, "has been replaced by its backup")
        self._epoch = message.epoch
        self._go_alone()
        if not message.address:
            return
        self._contents.sync.expect_moves()
        parts = ps.platform.parts
        begin = BeginBackup(
            ps.index, message.epoch, attach.coordinator, attach.ps_addresses,
            attach.ps_timeout_s, self._contents.timeline, 0, 0, lineage,
            parts.of(Computation)().release,
        )  # fmt: skip
        self._sender = sender = parts.of(BackupSender)(self, begin, message)
        self.executor.on_entry = sender.ship_soon
        self._copying = asyncio.get_running_loop().create_task(self._copy(sender))

    async def _hold(
        self, sender: BackupSender, plans: object, held: list[tuple[Frozen, Live]]
    ) -> None:
        """Hold what the ps holds between two entries."""
        await self.executor.computes.settled()
        live = await self._contents.live(plans)
        while True:
            if self._sender is not sender:  # what it names would be taken for known to the next
                raise PsyncError("making the backup was cancelled")
            try:
                held.append((self._contents.freeze(), live))
                return
            except BusyError:  # a shard is read or filled by what is no entry
                await self.ps.work.next_turn()

    async def _copy(self, sender: BackupSender) -> None:
        executor, contents = self.executor, self._contents
        began, why = asyncio.get_running_loop().time(), f"copy {sender.order.epoch} to its backup"
        try:
            try:
                # A step that is being closed is wholly in the snapshot, or in the log.
                await contents.sync.pause(why)
                # Entries from now on are kept for the backup, though the snapshot may have to wait
                # for its turn; all before them are in it.
                first = executor.log.begin_copy() + 1
                # Plans come and go as messages arrive, and not in the order of the log: those that
                # entries name are there as it begins.
                plans = contents.plans.snapshot()
                held: list[tuple[Frozen, Live]] = []
                await executor.run(NOBODY, None, lambda _: self._hold(sender, plans, held))
            finally:
                contents.sync.resume(why)
            await sender.copy(*held[0], first)
        except BaseException:
            if self._sender is sender and not self._over:
                executor.log.give_up()
                executor.advance()
            raise
        logger.info(
            "%s: its backup in the process of %s is complete, after %.2f s", self.ps.task,
            sender.order.task, asyncio.get_running_loop().time() - began,
        )  # fmt: skip

    def depose(self) -> None:
        """The backup serves, or another one does: nothing is done here any more."""
        self._contents.deposed()  # first: nobody is to hear of it from here
        self.executor.depose()

    def _drop(self) -> None:
        """Feed the backup no more."""
        sender, self._sender = self._sender, None
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.cancel()
        if sender is not None:
            self.ps.work.to_the_end(sender.close())

    def _go_alone(self) -> None:
        self._drop()
        self.executor.on_entry = lambda: None  # the sender has what is on its way
        self.executor.log.give_up()
        self.executor.advance()

    def leave(self) -> None:
        """Execute the rest without the backup: none of this coordinator's is promoted any more."""
        self._over = True
        self._go_alone()

    def end(self, error: PsyncError | None = None) -> None:
        """Something else is served from now on, or nothing: whoever waits is told."""
        self._over = True
        self.executor.end(error)
        self._drop()
