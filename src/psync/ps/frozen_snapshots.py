"""Frozen snapshots on a ps, held for a cut: written to files, or read over the network.

    message       then
    Freeze        once no update is under way: holds references to all blocks
    ReadFrozen    answers with them, uncopied
    WriteFrozen   if this ps sees the directory, writes a file in a thread, and lets go of each
                  block that is written
    DropFrozen    holds them no longer; nor when the connection is lost over which they were frozen

A message that is repeated after a lost connection gets the answer of the first one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from psync.checkpoints.files import NONCE
from psync.errors import ConnectionLost, CutLost, RemoteProtocolError
from psync.net.connection import Answer, Connection, Handler, Request
from psync.net.shielding import shielded
from psync.ps.cooperative_work import LongWork
from psync.ps.snapshot_files import has_text, write_items
from psync.store.snapshot import Frozen
from psync.store.untrusted_json import read_json, to_json
from psync.wire.codec import Message
from psync.wire.messages import (
    Done,
    DropFrozen,
    Freeze,
    FrozenBytes,
    ReadFrozen,
    WriteFrozen,
    Written,
)
from psync.wire.messages import Frozen as FrozenAnswer

logger = logging.getLogger(__name__)

MAX_READ_BYTES = 16 << 20
"""Of one ReadFrozen."""


@dataclass(eq=False, slots=True)
class _Cut:
    """What is held for one cut."""

    number: int
    peer: Connection  # with whose connection it ends
    frozen: Frozen
    answer: Answer
    writes: dict[str, asyncio.Future[Answer]] = field(
        default_factory=dict
    )  # by path; never cancelled


class Freezable(Protocol):
    """What a ps serves."""

    def settling(self) -> Iterator[None]:
        """Make ``freeze`` quick, in pieces. Nothing depends on it."""

    def check_gate(self, cut: int) -> None:
        """Raise CutLost unless updates are held back for this cut, and have been since it began."""

    def freeze(self) -> tuple[Frozen, list[int]]:
        """Hold what is served, and say which closures are counted in steps not yet applied.

        Raises:
            BusyError: An update is under way.
        """


class FrozenSnapshots:
    """What one ps holds for a cut.

    Args:
        task: Name of the ps.
        work: What takes long.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        served: Returns what is served, as of now.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        check_coordinator: Callable[[Connection], None],
        served: Callable[[], Freezable],
    ) -> None:
        self._task = task
        self._work = work
        self._check_coordinator = check_coordinator
        self._served = served
        self._cut: _Cut | None = None
        self._frozen = self._written_bytes = 0

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Freeze: Handler(self._freeze),
            DropFrozen: Handler(self._drop),
            WriteFrozen: Handler(self._write),
            ReadFrozen: Handler(self._read),
        }

    def let_go(self) -> None:
        """Hold nothing any more."""
        if self._cut is not None:
            self._cut.frozen.drop()
            self._cut = None

    def statistics(self) -> dict[str, int]:
        """Return counters, and whether something is held."""
        return {
            "frozen": self._frozen,
            "held": int(self._cut is not None),
            "written_bytes": self._written_bytes,
        }

    async def _freeze(self, request: Request[Freeze]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self._cut.peer = peer
            self._watch(peer)
            request.answer(*self._cut.answer)
            return
        served = self._served()
        served.check_gate(message.cut)
        for _ in served.settling():  # nothing changes meanwhile, as the gate is shut
            await asyncio.sleep(0)
        frozen, pending = await self._work.when_idle(lambda: self._served().freeze())
        self._check_coordinator(peer)
        self._served().check_gate(message.cut)
        if peer.is_closed:
            raise ConnectionLost(f"{self._task}: {peer.task} has gone")
        self.let_go()
        self._frozen += 1
        answer = FrozenAnswer(pending), [frozen.state.to_bytes()]
        self._cut = _Cut(message.cut, peer, frozen, answer)
        self._watch(peer)
        request.answer(*answer)

    def _watch(self, peer: Connection) -> None:
        if self._connection_lost not in peer.on_closed:
            peer.on_closed.append(self._connection_lost)

    def _connection_lost(self, peer: Connection) -> None:
        if self._cut is not None and self._cut.peer is peer:
            self.let_go()

    def _held(self, peer: Connection, cut: int) -> _Cut:
        self._check_coordinator(peer)
        if self._cut is None or self._cut.number != cut:
            raise CutLost(f"{self._task} does not hold cut {cut} any more")
        return self._cut

    def _drop(self, request: Request[DropFrozen]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self.let_go()
        request.answer(Done())

    def _read(self, request: Request[ReadFrozen]) -> None:
        peer, message = request.peer, request.message
        cut = self._held(peer, message.cut)
        if message.stop - message.start > MAX_READ_BYTES:
            raise RemoteProtocolError(
                f"{self._task}: expected at most {MAX_READ_BYTES} bytes to be read at once"
            )
        part = cut.frozen.part(message.item, message.start, message.stop)
        request.answer(FrozenBytes(), [part])

    def _write(self, request: Request[WriteFrozen]) -> None:
        message, body = request.message, request.segments
        cut = self._held(request.peer, message.cut)
        under_way = cut.writes.get(message.path)
        if under_way is None:
            listed, where = body[0] if body else b"", f"{self._task}: items to be written"
            items = read_json(bytes(listed), list[tuple[int, str]], where)
            under_way = self._work.to_the_end(self._written(cut, message, items))
            cut.writes[message.path] = under_way
        request.start(answered(request, under_way))

    async def _written(
        self, cut: _Cut, message: WriteFrozen, items: list[tuple[int, str]]
    ) -> Answer:
        path = Path(message.path)
        if not await asyncio.to_thread(has_text, path.with_name(NONCE), message.nonce):
            return Written(None), ()
        size, places = await asyncio.to_thread(write_items, path, cut.frozen, items)
        self._written_bytes += size
        return Written(size), [to_json(places)]


async def answered(request: Request[Any], work: asyncio.Future[Answer]) -> None:
    """Wait for work for which others may wait, too; or nobody any more, who would see its error."""
    work.add_done_callback(_seen)
    request.answer(*await shielded(work))


def _seen(work: asyncio.Future[Answer]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.debug("what a snapshot was asked for failed: %s", error)
