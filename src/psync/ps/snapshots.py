"""Snapshots of a ps: frozen for a cut, written to files or read over the network, and restored.

    message           then
    Freeze            lets the messages through the gate that it names, and, once no update is under
                      way, holds references to all blocks
    ReadFrozen        answers with them, uncopied
    WriteFrozen       if this ps sees the directory, writes a file in a thread, and lets go of each
                      block that is written
    OpenGate          updates go on. If it says so, holds the blocks no longer; nor when the
                      connection is lost over which they were frozen
    PrepareSnapshot   makes a store and a ledger beside those that are served; their bytes are read
                      in a thread, or come by FillSnapshot. An earlier preparation is dropped
    RestoreSnapshot   hands them to the task, which serves them from then on

A failure changes nothing of what is served. A message that is repeated after a lost connection
gets the answer of the first one. Only the coordinator that is served may ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psync.checkpoints.files import NONCE, DataFile, read_bounded, read_pieces
from psync.checkpoints.manifest import Place, WrittenFile
from psync.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConnectionLost,
    CutLost,
    PsyncError,
    RemoteProtocolError,
    UsageError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.shielding import shielded
from psync.ps.accumulators import unpack_accumulators
from psync.store.ledger import Ledger
from psync.store.snapshot import Frozen, Loaded, settling
from psync.store.snapshot_state import SnapshotState
from psync.store.store import ShardStore
from psync.store.untrusted_json import Text, Whole, read_json, to_json
from psync.wire.codec import Message
from psync.wire.messages import (
    Done,
    FillSnapshot,
    Freeze,
    OpenGate,
    PrepareSnapshot,
    ReadFrozen,
    RestoreSnapshot,
    WriteFrozen,
)

if TYPE_CHECKING:
    from psync.ps_task import PsTask

MAX_READ_BYTES = 16 << 20
"""Of one ReadFrozen."""


def load(state: SnapshotState, process: PsTask, task: str, floor: int) -> Loaded:
    """Begin to make what a ps holds of the state of a snapshot, or of ``NOTHING``.

    Args:
        state: The state.
        process: The ps task in whose process it is.
        task: Name of the ps.
        floor: Lowest incarnation of any task that may be served.

    Raises:
        CheckpointCorrupt: An answer in it is none.
    """
    parts = process.platform.parts
    store, ledger = parts.of(ShardStore)(task, process.pool), parts.of(Ledger)(floor)
    return Loaded(state, store, ledger)


async def fill(loaded: Loaded, message: FillSnapshot, segments: Sequence[memoryview]) -> None:
    """Write bytes of an item; others go on between two blocks."""
    start = message.start
    for data in segments:
        for _ in loaded.write(message.item, start, data):
            await asyncio.sleep(0)
        start += len(data)


@dataclass(eq=False, slots=True)
class _Cut:
    """What is held for one cut."""

    number: int
    peer: Connection  # with whose connection it ends
    frozen: Frozen
    state: bytes
    # By path; never cancelled.
    writes: dict[str, asyncio.Future[Sequence[bytes]]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Load:
    """A snapshot that is being prepared."""

    number: int
    loaded: Loaded | None = None  # None: its state is being read
    ready: asyncio.Future[Sequence[bytes]] = field(init=False)  # never cancelled


class Snapshots:
    """The snapshots of one ps.

    Args:
        ps: The ps: what it serves may be frozen, or replaced.
    """

    def __init__(self, ps: PsTask) -> None:
        self._ps = ps
        self._task = ps.task
        self._work = ps.work
        self._check_coordinator = ps.check_coordinator
        self._cut: _Cut | None = None
        self._written_bytes = 0
        self._load: _Load | None = None
        self._taken = 0  # number of the load that is served

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Freeze: Handler(self._freeze),
            OpenGate: Handler(self._open_gate),
            WriteFrozen: Handler(self._write),
            ReadFrozen: Handler(self._read),
            PrepareSnapshot: Handler(self._prepare),
            RestoreSnapshot: Handler(self._take),
        }

    def forget(self) -> None:
        """A newer coordinator is served: nothing that was held or prepared is of use."""
        self._let_go()
        self._give_up()
        self._taken = 0

    def statistics(self) -> dict[str, int]:
        """Return bytes of all files that this ps has written, and how often it was rolled back."""
        return {"written_bytes": self._written_bytes, "timeline": self._ps.services.timeline}

    # Frozen for a cut.

    def _let_go(self) -> None:
        if self._cut is not None:
            self._cut.frozen.drop()
            self._cut = None

    async def _freeze(self, request: Request[Freeze]) -> None:
        peer, number = request.peer, request.message.cut
        updates = [((task, incarnation), at) for task, incarnation, at in request.message.updates]
        self._check_coordinator(peer)
        if self._cut is None or self._cut.number != number:
            await self._ps.services.gate.let_through(number, updates)
            for _ in settling(self._ps.services.store):  # nothing changes: the gate is shut
                await asyncio.sleep(0)
            frozen = await self._work.when_idle(lambda: self._ps.services.freeze())
            self._check_coordinator(peer)
            self._ps.services.gate.check(number)
            if peer.is_closed:
                raise ConnectionLost(f"{self._task}: {peer.task} has gone")
            self._let_go()
            self._cut = _Cut(number, peer, frozen, frozen.state.to_bytes())
        self._cut.peer = peer
        if self._connection_lost not in peer.on_closed:
            peer.on_closed.append(self._connection_lost)
        request.answer(Done(), [self._cut.state])

    def _connection_lost(self, peer: Connection) -> None:
        if self._cut is not None and self._cut.peer is peer:
            self._let_go()

    def _held(self, peer: Connection, cut: int) -> _Cut:
        self._check_coordinator(peer)
        if self._cut is None or self._cut.number != cut:
            raise CutLost(f"{self._task} does not hold cut {cut} any more")
        return self._cut

    def _open_gate(self, request: Request[OpenGate]) -> None:
        message = request.message
        self._check_coordinator(request.peer)
        self._ps.services.gate.open(message.cut)
        if not message.holds and self._cut is not None and self._cut.number == message.cut:
            self._let_go()
        request.answer(Done())

    def _read(self, request: Request[ReadFrozen]) -> None:
        message = request.message
        cut = self._held(request.peer, message.cut)
        if message.stop - message.start > MAX_READ_BYTES:
            raise RemoteProtocolError(
                f"{self._task}: expected at most {MAX_READ_BYTES} bytes to be read at once"
            )
        part = cut.frozen.part(message.item, message.start, message.stop)
        request.answer(Done(), [part])

    def _write(self, request: Request[WriteFrozen]) -> None:
        message, body = request.message, request.segments
        cut = self._held(request.peer, message.cut)
        under_way = cut.writes.get(message.path)
        if under_way is None:
            listed, where = body[0] if body else b"", f"{self._task}: items to be written"
            items = read_json(bytes(listed), list[tuple[Whole, Text]], where)
            under_way = self._work.to_the_end(self._written(cut, message, items))
            cut.writes[message.path] = under_way
        request.start(_answered(request, under_way))

    async def _written(
        self, cut: _Cut, message: WriteFrozen, items: list[tuple[int, str]]
    ) -> Sequence[bytes]:
        path = Path(message.path)
        if not await asyncio.to_thread(has_text, path.with_name(NONCE), message.nonce):
            return ()
        written = await asyncio.to_thread(write_items, path, cut.frozen, items)
        self._written_bytes += written.size
        return [to_json(written)]

    # Restored.

    def _prepare(self, request: Request[PrepareSnapshot]) -> None:
        message, body = request.message, request.segments
        self._check_coordinator(request.peer)
        load = self._load
        if load is None or load.number != message.load:
            if message.load <= self._taken or (load is not None and message.load < load.number):
                raise UsageError(f"{self._task}: load {message.load} was cancelled")
            self._give_up()
            load = self._load = _Load(message.load)
            load.ready = self._work.to_the_end(self._prepared(load, message.path, body))
        request.start(_answered(request, load.ready))

    async def _prepared(
        self, prepared: _Load, path: str, body: Sequence[memoryview]
    ) -> Sequence[bytes]:
        where = f"{self._task}: snapshot {prepared.number}"
        try:
            if len(body) != 1 + bool(path):
                raise RemoteProtocolError(f"{where}: {len(body)} segments")
            state = await asyncio.to_thread(SnapshotState.from_bytes, bytes(body[0]), where)
            if self._load is not prepared:
                raise PsyncError(f"{where} was cancelled")
            prepared.loaded = load(state, self._ps, self._task, self._ps.floor)
            unpack_accumulators(state.accumulators)  # that they can be
            if path:
                places = read_json(bytes(body[1]), list[Place], f"{where}: places in {path}")
                await asyncio.to_thread(read_items, Path(path), prepared.loaded, places)
        except Exception:
            if self._load is prepared:
                self._give_up()  # so that it can be tried again
            raise
        return ()

    def _give_up(self) -> None:
        load, self._load = self._load, None
        if load is not None and load.loaded is not None:
            load.loaded.give_up()

    def _loaded(self, peer: Connection, number: int) -> Loaded:
        self._check_coordinator(peer)
        load = self._load
        if load is None or load.number != number or load.loaded is None:
            raise UsageError(f"{self._task}: snapshot {number} is not being prepared")
        return load.loaded

    async def fill(self, request: Request[FillSnapshot]) -> None:
        """Fill a part of the snapshot that is being prepared."""
        loaded = self._loaded(request.peer, request.message.number)
        await fill(loaded, request.message, request.segments)
        request.answer(Done())

    def _take(self, request: Request[RestoreSnapshot]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        if message.load != self._taken:
            loaded = self._loaded(peer, message.load)
            loaded.check_whole(f"{self._task}: snapshot {message.load}")
            self._load = None
            self._let_go()
            self._ps.take(loaded, message)
            self._taken = message.load
        request.answer(Done())


async def _answered(request: Request[Any], work: asyncio.Future[Sequence[bytes]]) -> None:
    """Wait for work for which others may wait, too."""
    segments = await shielded(work)
    request.answer(Done(), segments)


# --- files; what is here blocks: call it in a thread ---------------------------------------------


def write_items(path: Path, frozen: Frozen, items: Sequence[tuple[int, str]]) -> WrittenFile:
    """Write items to a new file, which is on the disk then; let go of each block that is written.

    Args:
        path: Of a safetensors file.
        frozen: Holds them.
        items: (place in the state, name in the file) of each, in the order that they get there.

    Raises:
        CheckpointError: The file is there already, the disk is full, or fails; or an item is not
            held any more. Then there is no such file.
    """
    known = frozen.state.items
    unknown = [place for place, _ in items if not 0 <= place < len(known)]
    if unknown:
        raise CheckpointError(f"{path}: there is no item {unknown[0]} in the snapshot")
    planned = {name: (known[place].shape, known[place].dtype) for place, name in items}
    with DataFile(path, planned) as file:
        for place, _ in items:
            file.write(frozen.letting_go(place))
        return file.close()


def read_items(path: Path, loaded: Loaded, places: Sequence[Place]) -> None:
    """Fill the items that are wanted from a file.

    Args:
        path: Of the file.
        loaded: Is filled.
        places: Where items lie in the file; those that are constant, and need no bytes, are
            passed over.

    Raises:
        CheckpointCorrupt: A checksum or a size is wrong, or an item is not in the file; names it.
        CheckpointError: The file cannot be read, or another snapshot is to be loaded instead.
    """
    wanted = set(loaded.wanted)
    for place, start, nbytes, crc32 in places:
        if place not in wanted:
            continue
        item, at = loaded.state.items[place], 0
        if nbytes != item.nbytes:
            raise CheckpointCorrupt(f"{path}: {item}: expected {item.nbytes} bytes, got {nbytes}")
        for piece in read_pieces(path, start, nbytes, str(item), crc32):
            for _ in loaded.write(place, at, piece.data):
                pass
            at += piece.size
    for place in loaded.wanted:
        raise CheckpointCorrupt(f"{path}: {loaded.state.items[place]} is not in the file")


def has_text(path: Path, text: str) -> bool:
    """Return whether there is a file that holds this text and no more."""
    try:
        return read_bounded(path, len(text.encode())) == text.encode()
    except (OSError, CheckpointCorrupt):
        return False
