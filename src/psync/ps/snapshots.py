"""Restore of snapshots on a ps: prepared beside the live state, then swapped in.

    message           then
    PrepareSnapshot   makes a store and a ledger beside those that are served; their bytes are read
                      in a thread, or come by FillSnapshot. An earlier preparation is dropped
    RestoreSnapshot   hands them to the task, which serves them from then on

A failure changes nothing of what is served. A message that is repeated after a lost connection
gets the answer of the first one. Only the coordinator that is served may ask. ``frozen_snapshots``
is the other direction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psync.accumulators import rule_of
from psync.checkpoints.manifest import Place
from psync.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    PsyncError,
    RemoteProtocolError,
    UsageError,
)
from psync.net.connection import Answer, Connection, Handler, Request
from psync.net.platform import Parts
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import LongWork
from psync.ps.frozen_snapshots import Freezable, FrozenSnapshots, answered
from psync.ps.snapshot_files import read_items
from psync.store.ledger import Ledger
from psync.store.shards import Optimizer
from psync.store.snapshot import Loaded, SnapshotState, load_snapshot
from psync.store.store import ShardStore
from psync.store.untrusted_json import read_json
from psync.wire.closure_numbers import Finality
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    DefineAccumulator,
    Done,
    FillSnapshot,
    PrepareSnapshot,
    Pushed,
    RestoreSnapshot,
)


def pack_answer(answer: object) -> bytes | None:
    """Return how a snapshot keeps the answer to an update; None: it does not."""
    return encode(answer) if isinstance(answer, Pushed) else None


def unpack_answer(data: bytes) -> Pushed:
    """Return what ``pack_answer`` packed.

    Raises:
        CheckpointCorrupt: It is no such answer.
    """
    try:
        answer = decode(data)
    except RemoteProtocolError as exc:
        raise CheckpointCorrupt(f"an answer in a snapshot is damaged: {exc.message}") from exc
    if not isinstance(answer, Pushed):
        raise CheckpointCorrupt(f"an answer in a snapshot is a {type(answer).__name__}")
    return answer


def pack_accumulators(
    definitions: Iterable[tuple[DefineAccumulator, int]],
) -> list[tuple[bytes, int]]:
    """Return how a snapshot keeps what accumulators are, and their steps."""
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
            raise CheckpointCorrupt(f"an accumulator in a snapshot: {exc.message}") from exc
        definitions.append((definition, step))
    return definitions


@dataclass(frozen=True, slots=True)
class Contents:
    """What a timeline of a ps begins with."""

    store: ShardStore
    ledger: Ledger
    accumulators: Sequence[tuple[DefineAccumulator, int]] = ()  # with their global steps
    groups: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # their configurations
    counted: Sequence[tuple[int, int, int, bytes]] = ()  # see ``SyncSteps.note_calls``
    final: Finality = field(default_factory=Finality)

    @classmethod
    def empty(cls, parts: Parts, task: str, pool: BlockPool, floor: int = 0) -> Contents:
        """Return nothing, of which no incarnation below ``floor`` hears."""
        return cls(parts.of(ShardStore)(task, pool), parts.of(Ledger)(floor))

    @classmethod
    def restored(
        cls,
        loaded: Loaded,
        optimizers: Mapping[int, Optimizer],
        accumulators: Iterable[tuple[DefineAccumulator, int]],
        groups: Mapping[int, dict[str, Any]],
    ) -> Contents:
        """Return what a snapshot holds.

        Args:
            loaded: The snapshot. It may be older than the definitions below.
            optimizers: That clients of this ps take for known, by their numbers.
            accumulators: That they take for defined; the steps do not count.
            groups: Configurations of the synchronous groups that they know, by their numbers.
        """
        store, state = loaded.store, loaded.state
        for number, optimizer in optimizers.items():
            store.define_optimizer(number, optimizer.config)
        defined = {each.name: (each, 0) for each, _ in accumulators}
        for definition, step in unpack_accumulators(state.accumulators):
            defined[definition.name] = definition, step
        return cls(
            store, loaded.ledger, list(defined.values()), {**groups, **state.groups},
            state.counted, state.ledger.final,
        )  # fmt: skip


@dataclass(eq=False, slots=True)
class _Load:
    """A snapshot that is being prepared."""

    number: int
    loaded: Loaded | None = None  # None: its state is being read
    ready: asyncio.Future[Answer] | None = None  # never cancelled
    given_up: bool = False


class Snapshots:
    """The snapshots of one ps.

    Args:
        task: Name of the ps.
        work: What takes long.
        pool: Memory of what is prepared.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        served: Returns what is served, as of now.
        floor: Returns the lowest incarnation of any task that may be served.
        take: Serves a snapshot from now on.
        parts: Of the task.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        pool: BlockPool,
        check_coordinator: Callable[[Connection], None],
        served: Callable[[], Freezable],
        floor: Callable[[], int],
        take: Callable[[Loaded, RestoreSnapshot], None],
        parts: Parts,
    ) -> None:
        self._task = task
        self._work = work
        self._pool = pool
        self._check_coordinator = check_coordinator
        self._floor = floor
        self._serve = take
        self._parts = parts
        self._frozen = parts.of(FrozenSnapshots)(task, work, check_coordinator, served)
        self._load: _Load | None = None
        self._taken = 0  # number of the load that is served
        self._loads = self._takes = 0

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            **self._frozen.handlers(),
            PrepareSnapshot: Handler(self._prepare),
            FillSnapshot: Handler(self._fill),
            RestoreSnapshot: Handler(self._take),
        }

    def forget(self) -> None:
        """A newer coordinator is served: nothing that was held or prepared is of use."""
        self._frozen.let_go()
        self._give_up()
        self._taken = 0

    def statistics(self) -> dict[str, int]:
        """Return counters, and whether something is held or being prepared."""
        return {
            **self._frozen.statistics(),
            "loads": self._loads,
            "preparing": int(self._load is not None),
            "taken": self._takes,
        }

    def _prepare(self, request: Request[PrepareSnapshot]) -> None:
        message, body = request.message, request.segments
        self._check_coordinator(request.peer)
        load = self._load
        if load is None or load.number != message.load:
            if message.load <= self._taken or (load is not None and message.load < load.number):
                raise UsageError(f"{self._task}: load {message.load} was cancelled")
            self._give_up()
            self._loads += 1
            load = self._load = _Load(message.load)
            load.ready = self._work.to_the_end(self._prepared(load, message.path, body))
        assert load.ready is not None, "it has been begun"
        request.start(answered(request, load.ready))

    async def _prepared(self, load: _Load, path: str, body: Sequence[memoryview]) -> Answer:
        where = f"{self._task}: snapshot {load.number}"
        try:
            if len(body) != 1 + bool(path):
                raise RemoteProtocolError(f"{where}: {len(body)} segments")
            state = await asyncio.to_thread(SnapshotState.from_bytes, bytes(body[0]), where)
            if load.given_up:
                raise PsyncError(f"{where} was cancelled")
            load.loaded = self._load_state(state)
            unpack_accumulators(state.accumulators)  # that they can be
            if path:
                places = read_json(bytes(body[1]), list[Place], f"{where}: places in {path}")
                await asyncio.to_thread(read_items, Path(path), load.loaded, places)
        except Exception:
            if self._load is load:
                self._give_up()  # so that it can be tried again
            raise
        return Done(), ()

    def _load_state(self, state: SnapshotState) -> Loaded:
        store = self._parts.of(ShardStore)(self._task, self._pool)
        return load_snapshot(state, store, self._parts.of(Ledger)(self._floor()), unpack_answer)

    def _give_up(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.given_up = True
            if load.loaded is not None:
                load.loaded.give_up()

    def _loaded(self, peer: Connection, number: int) -> Loaded:
        self._check_coordinator(peer)
        load = self._load
        if load is None or load.number != number or load.loaded is None:
            raise UsageError(f"{self._task}: snapshot {number} is not being prepared")
        return load.loaded

    async def _fill(self, request: Request[FillSnapshot]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        loaded = self._loaded(peer, message.load)
        for data in body:
            for _ in loaded.write(message.item, message.start, data):
                await asyncio.sleep(0)
        request.answer(Done())

    def _take(self, request: Request[RestoreSnapshot]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        if message.load != self._taken:
            loaded = self._loaded(peer, message.load)
            wanted = loaded.wanted()
            if wanted:
                raise UsageError(
                    f"{self._task}: snapshot {message.load} is incomplete: "
                    f"{loaded.state.items[wanted[0]]} is missing"
                )
            self._load = None
            self._frozen.let_go()
            self._serve(loaded, message)
            self._taken = message.load
            self._takes += 1
        request.answer(Done())
