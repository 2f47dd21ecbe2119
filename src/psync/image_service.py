"""Images on a ps: held for a cut, written, read; and prepared, to be taken up instead of what is.

Layer: L3. Imports: errors, blocks, ps_image, untrusted_json, image_files, rpc, long_work,
hosted_accumulators, wire.

    message       then
    Freeze        once no update is under way: holds references to all blocks
    ReadFrozen    answers with them, uncopied
    WriteFrozen   writes a file in a thread, and lets go of each block that is written
    DropFrozen    holds them no longer; nor when the connection is lost over which they were frozen
    PrepareImage  makes a store and a ledger beside those that are served; their bytes are read in
                  a thread, or come by FillImage. What was being prepared before is given up
    TakeImage     hands them to the task, which serves them from then on

What fails changes nothing of what is served. A message that is repeated, since a connection was
lost, gets the answer of the first one. Only the coordinator that is served may ask.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from psync.blocks import BlockPool
from psync.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    ConnectionLost,
    CutLost,
    PsyncError,
    RemoteProtocolError,
    UsageError,
)
from psync.hosted_accumulators import rule_of
from psync.image_files import Place, has_text, read_items, write_items
from psync.long_work import LongWork
from psync.ps_image import Frozen, ImageState, Thawed, thaw
from psync.rpc import Handler, Peer, Reply
from psync.untrusted_json import UntrustedJson
from psync.wire.accumulator_messages import DefineAccumulator
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import Done
from psync.wire.ps_messages import Pushed
from psync.wire.recovery_messages import (
    AskShared,
    DropFrozen,
    FillImage,
    Freeze,
    FrozenBytes,
    PrepareImage,
    ReadFrozen,
    Shared,
    TakeImage,
    WriteFrozen,
    Written,
)
from psync.wire.recovery_messages import Frozen as FrozenAnswer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_READ_BYTES = 16 << 20
"""Of one ReadFrozen."""


def pack_answer(answer: object) -> bytes | None:
    """Return how an image keeps the answer to an update; None: it does not."""
    return encode(answer) if isinstance(answer, Pushed) else None


def unpack_answer(data: bytes) -> Pushed:
    """Return what ``pack_answer`` packed.

    Raises:
        CheckpointCorrupt: It is no such answer.
    """
    try:
        answer = decode(data)
    except RemoteProtocolError as exc:
        raise CheckpointCorrupt(f"an answer in an image is damaged: {exc.message}") from exc
    if not isinstance(answer, Pushed):
        raise CheckpointCorrupt(f"an answer in an image is a {type(answer).__name__}")
    return answer


def pack_accumulators(
    definitions: Iterable[tuple[DefineAccumulator, int]],
) -> list[tuple[bytes, int]]:
    """Return how an image keeps what accumulators are, and their steps."""
    return [(encode(definition), step) for definition, step in definitions]


def unpack_accumulators(packed: Iterable[tuple[bytes, int]]) -> list[tuple[DefineAccumulator, int]]:
    """Return what ``pack_accumulators`` packed.

    Raises:
        CheckpointCorrupt: It is no such thing.
    """
    definitions = []
    for data, step in packed:
        try:
            definition = decode(data)
            if not isinstance(definition, DefineAccumulator):
                raise CheckpointCorrupt(f"an accumulator is a {type(definition).__name__}")
            rule_of(definition)
        except (RemoteProtocolError, ConfigurationError) as exc:
            raise CheckpointCorrupt(f"an accumulator in an image: {exc.message}") from exc
        definitions.append((definition, step))
    return definitions


@dataclass(eq=False, slots=True)
class _Cut:
    """What is held for one cut."""

    number: int
    peer: Peer  # with whose connection it ends
    frozen: Frozen
    answer: Reply
    writes: dict[str, Awaitable[Reply]] = field(default_factory=dict)  # by path; never cancelled


@dataclass(eq=False, slots=True)
class _Load:
    """An image that is being prepared."""

    number: int
    thawed: Thawed | None = None  # None: its state is being read
    ready: Awaitable[Reply] | None = None  # never cancelled
    given_up: bool = False


class Held(Protocol):
    """What a ps serves, and may be told to serve instead."""

    @property
    def floor(self) -> int:
        """The lowest incarnation of any task that may be served."""

    def settling(self) -> Iterator[None]:
        """Make ``freeze`` quick, in pieces. Nothing depends on it."""

    def check_gate(self, cut: int) -> None:
        """Raise CutLost unless updates are held back for this cut, and have been since it began."""

    def freeze(self) -> tuple[Frozen, list[int]]:
        """Hold what is served, and say which closures are counted in steps not yet applied.

        Raises:
            BusyError: An update is under way.
        """

    def take(self, thawed: Thawed, message: TakeImage) -> None:
        """Serve this from now on."""


class ImageService:
    """The images of one ps.

    Args:
        task: Name of the ps.
        work: What takes long.
        pool: Memory of what is prepared.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        held: What is served.
        reached: Told the name of a place where a test may stop the task.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        pool: BlockPool,
        check_coordinator: Callable[[Peer], None],
        held: Held,
        reached: Callable[[str], None],
    ) -> None:
        self._task = task
        self._work = work
        self._pool = pool
        self._check_coordinator = check_coordinator
        self._held_now = held
        self._reached = reached
        self._cut: _Cut | None = None
        self._load: _Load | None = None
        self._taken = 0  # number of the load that is served
        self._frozen = self._written_bytes = self._loads = self._takes = 0

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Freeze: Handler(self._freeze),
            DropFrozen: Handler(self._drop),
            AskShared: Handler(self._ask_shared),
            WriteFrozen: Handler(self._write),
            ReadFrozen: Handler(self._read),
            PrepareImage: Handler(self._prepare),
            FillImage: Handler(self._fill),
            TakeImage: Handler(self._take),
        }

    def forget(self) -> None:
        """A newer coordinator is served: nothing that was held or prepared is of use."""
        self._let_go()
        self._give_up()
        self._taken = 0

    def statistics(self) -> dict[str, int]:
        """Return counters, and whether something is held or being prepared."""
        return {
            "frozen": self._frozen,
            "held": int(self._cut is not None),
            "written_bytes": self._written_bytes,
            "loads": self._loads,
            "preparing": int(self._load is not None),
            "taken": self._takes,
        }

    # What is held.

    async def _freeze(self, peer: Peer, message: Freeze, body: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self._cut.peer = peer
            self._watch(peer)
            return self._cut.answer
        self._held_now.check_gate(message.cut)
        for _ in self._held_now.settling():  # nothing changes meanwhile, as the gate is shut
            await asyncio.sleep(0)
        frozen, pending = await self._work.when_idle(self._held_now.freeze)
        self._check_coordinator(peer)
        self._held_now.check_gate(message.cut)
        if peer.is_closed:
            raise ConnectionLost(f"{self._task}: {peer.task} has gone")
        self._let_go()
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
            self._let_go()

    def _let_go(self) -> None:
        if self._cut is not None:
            self._cut.frozen.drop()
            self._cut = None

    def _held(self, peer: Peer, cut: int) -> _Cut:
        self._check_coordinator(peer)
        if self._cut is None or self._cut.number != cut:
            raise CutLost(f"{self._task} does not hold cut {cut} any more")
        return self._cut

    def _drop(self, peer: Peer, message: DropFrozen, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        if self._cut is not None and self._cut.number == message.cut:
            self._let_go()
        return Reply(Done())

    async def _ask_shared(self, peer: Peer, message: AskShared, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        return Reply(Shared(await asyncio.to_thread(has_text, Path(message.path), message.nonce)))

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
            items = _listed(body, f"{self._task}: items to be written", _item_and_name)
            under_way = self._work.to_the_end(self._written(cut, Path(message.path), items))
            cut.writes[message.path] = under_way
        return _again(under_way)

    async def _written(self, cut: _Cut, path: Path, items: list[tuple[int, str]]) -> Reply:
        self._reached("checkpoint.ps.write")
        size, places = await asyncio.to_thread(write_items, path, cut.frozen, items)
        self._written_bytes += size
        return Reply(Written(size), [json.dumps(places).encode()])

    # What is prepared.

    def _prepare(
        self, peer: Peer, message: PrepareImage, body: list[memoryview]
    ) -> Awaitable[Reply]:
        self._check_coordinator(peer)
        load = self._load
        if load is None or load.number != message.load:
            if message.load <= self._taken or (load is not None and message.load < load.number):
                raise UsageError(f"{self._task}: load {message.load} has been given up")
            self._give_up()
            self._loads += 1
            load = self._load = _Load(message.load)
            load.ready = self._work.to_the_end(self._prepared(load, message.path, body))
        assert load.ready is not None, "it has been begun"
        return _again(load.ready)

    async def _prepared(self, load: _Load, path: str, body: list[memoryview]) -> Reply:
        where = f"{self._task}: image {load.number}"
        try:
            if len(body) != 1 + bool(path):
                raise RemoteProtocolError(f"{where}: {len(body)} segments")
            state = await asyncio.to_thread(ImageState.from_bytes, bytes(body[0]), where)
            if load.given_up:
                raise PsyncError(f"{where} has been given up")
            load.thawed = self._thawed(state)
            unpack_accumulators(state.accumulators)  # that they can be
            if path:
                places = _listed(body[1:], f"{where}: places in {path}", _item_and_place)
                await asyncio.to_thread(read_items, Path(path), load.thawed, places)
        except Exception:
            if self._load is load:
                self._give_up()  # so that it can be tried again
            raise
        return Reply(Done())

    def _thawed(self, state: ImageState) -> Thawed:
        return thaw(state, self._task, self._pool, self._held_now.floor, unpack_answer)

    def _give_up(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.given_up = True
            if load.thawed is not None:
                load.thawed.give_up()

    def _loaded(self, peer: Peer, number: int) -> Thawed:
        self._check_coordinator(peer)
        load = self._load
        if load is None or load.number != number or load.thawed is None:
            raise UsageError(f"{self._task}: image {number} is not being prepared")
        return load.thawed

    async def _fill(self, peer: Peer, message: FillImage, body: list[memoryview]) -> Reply:
        thawed = self._loaded(peer, message.load)
        for data in body:
            for _ in thawed.write(message.item, message.start, data):
                await asyncio.sleep(0)
        return Reply(Done())

    def _take(self, peer: Peer, message: TakeImage, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        if message.load != self._taken:
            thawed = self._loaded(peer, message.load)
            wanted = thawed.wanted()
            if wanted:
                raise UsageError(
                    f"{self._task}: image {message.load} is not complete: "
                    f"{thawed.state.items[wanted[0]]} is missing"
                )
            self._load = None
            self._let_go()
            self._held_now.take(thawed, message)
            self._taken = message.load
            self._takes += 1
        return Reply(Done())


def _again(under_way: Awaitable[Reply]) -> Awaitable[Reply]:
    """Wait for work for which others may wait, too; or nobody any more, who would see its error."""
    work = asyncio.ensure_future(under_way)
    work.add_done_callback(_seen)
    return asyncio.shield(work)


def _seen(work: asyncio.Future[Reply]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.debug("what an image was asked for failed: %s", error)


def _listed(
    body: Sequence[memoryview], where: str, entry: Callable[[UntrustedJson, Any], T]
) -> list[T]:
    """Return the entries of a JSON list, which is the first segment."""
    take = UntrustedJson(where)
    listed = take.parse_list(bytes(body[0]) if body else b"")
    return [entry(take, each) for each in listed]


def _item_and_name(take: UntrustedJson, entry: Any) -> tuple[int, str]:
    item, name = take.sequence(entry, "an entry", 2)
    return take.number(item, "an item"), take.text(name, "a name")


def _item_and_place(take: UntrustedJson, entry: Any) -> tuple[int, Place]:
    item, start, nbytes, crc32 = (
        take.number(each, "a place") for each in take.sequence(entry, "a place", 4)
    )
    return item, (start, nbytes, crc32)
