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
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from psync.checkpoints.files import NONCE
from psync.errors import ConnectionLost, CutLost, RemoteProtocolError
from psync.net.peer import Handler, Peer, Reply
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
    peer: Peer  # with whose connection it ends
    frozen: Frozen
    answer: Reply
    writes: dict[str, Awaitable[Reply]] = field(default_factory=dict)  # by path; never cancelled


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
        check_coordinator: Callable[[Peer], None],
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

    async def _freeze(self, peer: Peer, message: Freeze, body: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self._cut.peer = peer
            self._watch(peer)
            return self._cut.answer
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
        answer = Reply(FrozenAnswer(pending), [frozen.state.to_bytes()])
        self._cut = _Cut(message.cut, peer, frozen, answer)
        self._watch(peer)
        return answer

    def _watch(self, peer: Peer) -> None:
        if self._connection_lost not in peer.on_closed:
            peer.on_closed.append(self._connection_lost)

    def _connection_lost(self, peer: Peer) -> None:
        if self._cut is not None and self._cut.peer is peer:
            self.let_go()

    def _held(self, peer: Peer, cut: int) -> _Cut:
        self._check_coordinator(peer)
        if self._cut is None or self._cut.number != cut:
            raise CutLost(f"{self._task} does not hold cut {cut} any more")
        return self._cut

    def _drop(self, peer: Peer, message: DropFrozen, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self.let_go()
        return Reply(Done())

    def _read(self, peer: Peer, message: ReadFrozen, _: list[memoryview]) -> Reply:
        cut = self._held(peer, message.cut)
        if message.stop - message.start > MAX_READ_BYTES:
            raise RemoteProtocolError(
                f"{self._task}: expected at most {MAX_READ_BYTES} bytes to be read at once"
            )
        part = cut.frozen.part(message.item, message.start, message.stop)
        return Reply(FrozenBytes(), [part])

    def _write(self, peer: Peer, message: WriteFrozen, body: list[memoryview]) -> Awaitable[Reply]:
        cut = self._held(peer, message.cut)
        under_way = cut.writes.get(message.path)
        if under_way is None:
            listed, where = body[0] if body else b"", f"{self._task}: items to be written"
            items = read_json(bytes(listed), list[tuple[int, str]], where)
            under_way = self._work.to_the_end(self._written(cut, message, items))
            cut.writes[message.path] = under_way
        return again(under_way)

    async def _written(
        self, cut: _Cut, message: WriteFrozen, items: list[tuple[int, str]]
    ) -> Reply:
        path = Path(message.path)
        if not await asyncio.to_thread(has_text, path.with_name(NONCE), message.nonce):
            return Reply(Written(None))
        size, places = await asyncio.to_thread(write_items, path, cut.frozen, items)
        self._written_bytes += size
        return Reply(Written(size), [to_json(places)])


def again(under_way: Awaitable[Reply]) -> Awaitable[Reply]:
    """Wait for work for which others may wait, too; or nobody any more, who would see its error."""
    work = asyncio.ensure_future(under_way)
    work.add_done_callback(_seen)
    return shielded(work)


def _seen(work: asyncio.Future[Reply]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.debug("what a snapshot was asked for failed: %s", error)
