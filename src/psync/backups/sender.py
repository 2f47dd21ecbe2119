"""Replication from a ps to its backup: a snapshot first, then every entry, in order.

One object feeds one backup. It ends when that no longer follows: its process is gone, has been
restarted, or refuses. What was sent over a connection that is lost, of the snapshot or of the
entries, is sent again; the backup ignores what it has.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from psync.backups.pairing import Computation
from psync.errors import (
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    FencedError,
    PsyncError,
    RemoteProtocolError,
)
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.ps.executor import MAX_KEPT_BYTES, Entry
from psync.store.commit_log import CommitLog, LogState
from psync.store.snapshot import Frozen
from psync.wire.codec import Message
from psync.wire.frames import Frame, Segment
from psync.wire.messages import (
    AttachPs,
    BackUp,
    BackupBegun,
    BeginBackup,
    FillBackup,
    LogEntries,
    LogTaken,
)

logger = logging.getLogger(__name__)

MAX_ENTRIES = 256
MAX_BYTES = 4 << 20
"""Of one message, which has at least one entry."""

MAX_UNDER_WAY = 4
"""Messages that the backup has not answered."""

PIECE_BYTES = 8 << 20

MAX_LOSSES = 16
"""Connections that a part of a snapshot may outlive: more, and it is what breaks them."""

RECONNECT_S = 0.5
"""How long a backup may be away: one whose process has ended does not come back."""

SILENT_S = 10.0
"""A backup that has not answered for so long does not follow."""


@dataclass(frozen=True, slots=True)
class Served:
    """Who is backed up."""

    ps: int
    attach: AttachPs
    timeline: int
    lineage: int  # see ``previous_store``


class BackupSender:
    """Feeds one backup.

    Args:
        platform: Network, secret.
        served: Who is backed up.
        order: Where the backup is.
        log: What is to be sent.
        begun: Called with the order and the fingerprint of the backup's arithmetic; may refuse it.
        advanced: Called when the backup has more.
        deposed: Called when it says that it serves itself, or another one does.
    """

    def __init__(
        self,
        platform: Platform,
        served: Served,
        order: BackUp,
        log: CommitLog[Entry],
        begun: Callable[[BackUp, str], None],
        advanced: Callable[[], None],
        deposed: Callable[[], None],
    ) -> None:
        self.order = order
        self.ended = asyncio.Event()  # it does not follow any more
        self.error: PsyncError | None = None  # why
        self._release = platform.parts.of(Computation)().release
        self._served = served
        self._log = log
        self._begun = begun
        self._advanced = advanced
        self._deposed = deposed
        # Of this coordinator's range: whoever serves a newer one refuses it.
        incarnation = served.attach.coordinator + order.epoch
        self._task = f"/job:ps/task:{served.ps}"
        self._endpoint = Endpoint(platform, self._task, incarnation, {})
        self._peer: Connection | None = None
        self._incarnation: int | None = None  # of the process of the backup
        self._under_way = 0
        self._ships = False  # the snapshot is there
        self._reconnecting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # the backup has more, or does not follow
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def copy(self, frozen: Frozen, first: int, before: Sequence[Entry] = ()) -> None:
        """Send a snapshot, and then all entries until the backup has all that there are.

        Args:
            frozen: The snapshot.
            first: Number of the first entry that it does not have.
            before: What the snapshot does not have either, and comes before that.

        Raises:
            PsyncError: The backup does not follow.

        Cancellation: ``close`` is still to be called.
        """
        try:
            await self._send_snapshot(frozen, first - len(before))
            await self._send_before(before, first)
        except PsyncError as exc:
            self._fail(exc)
            raise
        finally:
            frozen.drop()
        self._check()
        self._log.pair()
        self._ships = True
        wanted = self._log.last
        self._note_heard()
        self._watch()
        if self._peer is not None and not self._peer.is_open:
            self._lost(self._peer)
        self.ship()
        while self._log.taken < wanted:
            self._check()
            self._changed.clear()
            await self._changed.wait()
        self._check()

    async def _send_snapshot(self, frozen: Frozen, first: int) -> None:
        ps, epoch, attach = self._served.ps, self.order.epoch, self._served.attach
        begin = BeginBackup(
            ps, epoch, attach.coordinator, list(attach.ps_addresses), attach.ps_timeout_s,
            self._served.timeline, first, self._served.lineage, self._release,
        )  # fmt: skip
        answer = await self._call(begin, [frozen.state.to_bytes()])
        if not isinstance(answer, BackupBegun):
            raise RemoteProtocolError(f"a backup began with {type(answer).__name__}")
        self._begun(self.order, answer.numerics)
        for item, known in enumerate(frozen.state.items):
            if known.is_constant:
                continue
            for start in range(0, known.nbytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, known.nbytes)
                await self._call(FillBackup(ps, epoch, item, start), frozen.part(item, start, stop))

    async def _send_before(self, before: Sequence[Entry], first: int) -> None:
        """Send what comes before the first entry of the log; this ends the snapshot."""
        number, weight = first - len(before), 0
        batch: list[Entry] = []
        for entry in before:
            if batch and (len(batch) == MAX_ENTRIES or weight + entry.weight > MAX_BYTES):
                await self._call(*self._listed(number, batch))
                number, weight, batch = number + len(batch), 0, []
            batch.append(entry)
            weight += entry.weight
        if batch:
            await self._call(*self._listed(number, batch))
        await self._call(*self._listed(first, ()))

    def _listed(self, first: int, batch: Sequence[Entry]) -> tuple[LogEntries, list[memoryview]]:
        """Return the message that brings entries, and its segments."""
        entries = [(*each.client, each.header, len(each.body)) for each in batch]
        segments = [segment for each in batch for segment in each.body]
        return LogEntries(self._served.ps, self.order.epoch, first, entries), segments

    async def _call(self, message: Message, segments: Sequence[Segment] = ()) -> Message | None:
        """Send a part of a snapshot, again where a connection is lost, until it is answered."""
        for losses in range(1, MAX_LOSSES + 1):
            if self._peer is None or not self._peer.is_open:
                self._peer = await self._connect()
            deadline = asyncio.get_running_loop().time() + SILENT_S
            try:
                answer = await self._peer.call(message, segments, deadline=deadline)
            except ConnectionLost:
                if losses == MAX_LOSSES:
                    raise
            except DeadlineExceeded as exc:
                self._peer.abort(exc)  # it may still have the segments, which are given back now
                raise
            else:
                return answer.message
        return None

    def ship(self) -> None:
        """Send what there is to be sent."""
        log = self._log
        while self._ships and self._peer is not None and self._under_way < MAX_UNDER_WAY:
            if log.state is not LogState.PAIRED or log.shipped == log.last:
                return
            self._send(self._peer, *log.to_ship(MAX_ENTRIES, MAX_BYTES))

    def _send(self, peer: Connection, first: int, batch: Sequence[Entry]) -> None:
        message, segments = self._listed(first, batch)
        if not self._under_way:
            self._note_heard()
        self._under_way += 1
        try:
            peer.ask(message, segments, functools.partial(self._heard, peer))
        except ConnectionLost as exc:
            self._heard(peer, exc)
        except PsyncError as exc:
            self._under_way -= 1
            self._fail(exc)

    def _heard(self, peer: Connection, outcome: Frame | Exception) -> None:
        if peer is not self._peer or self.ended.is_set():
            return  # of a connection that is over
        self._under_way -= 1
        if isinstance(outcome, ConnectionLost):
            self._lost(peer)
        elif isinstance(outcome, PsyncError):
            self._fail(outcome)
        elif isinstance(outcome, Exception) or not isinstance(outcome.message, LogTaken):
            self._fail(RemoteProtocolError(f"a backup answered with {outcome!r}"))
        else:
            self._taken(outcome.message)

    def _taken(self, message: LogTaken) -> None:
        self._note_heard()
        self._log.note_taken(message.upto)
        self._changed.set()
        self._advanced()
        self.ship()

    async def _connect(self) -> Connection:
        try:
            peer = await self._endpoint.connect_retrying(
                self.order.address, self.order.task, timeout_s=RECONNECT_S, level=logging.DEBUG
            )
        except FencedError as exc:
            # It serves a newer coordinator, which may attach this ps yet: none has replaced it.
            raise ConnectFailed(f"{self.order.task}: {exc.message}") from exc
        if self._incarnation not in (None, peer.incarnation):
            peer.close()
            raise ConnectFailed(f"{self.order.task} was started again, and has no backup any more")
        self._incarnation = peer.incarnation
        peer.on_closed.append(self._lost)
        return peer

    def _lost(self, peer: Connection) -> None:
        """Connect again, also if nothing is to be sent: is the backup there?"""
        if peer is self._peer and self._ships and not self.ended.is_set():
            self._peer, self._under_way = None, 0
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        try:
            peer = await self._connect()
        except PsyncError as exc:
            self._fail(exc)
            return
        self._log.ship_again()
        self._peer = peer
        self._note_heard()
        self.ship()

    # How long it has been silent.

    def _note_heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._under_way and loop.time() - self._heard_at > SILENT_S:
            self._fail(ConnectionLost(f"it has been silent for {SILENT_S:g} s"))
        elif not self.ended.is_set():
            self._timer = loop.call_later(SILENT_S / 4, self._watch)

    # Ends.

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

    def _fail(self, error: PsyncError) -> None:
        if self.ended.is_set():
            return
        self.error = error
        self.ended.set()
        self._ships = False
        # That the host is lost is the coordinator's to say, which may know it already.
        level = logging.INFO if isinstance(error, ConnectFailed) else logging.WARNING
        logger.log(level, "%s: its backup is not complete: %s", self._task, error.message)
        self._changed.set()
        if isinstance(error, FencedError):
            self._deposed()

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
        if self._timer is not None:
            self._timer.cancel()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        return self._disconnect()

    async def _disconnect(self) -> None:
        if self._reconnecting is not None:
            await asyncio.wait((self._reconnecting,))
        await self._endpoint.close(goes_on=True)  # the backup may be in the middle of a copy
