"""A ps and its backup without a network: entries reach the backup when the test says so.

Both are real ps tasks, on the loop whose clock is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from asked import peer_of, served
from inside import backups_of, handlers_of
from psync.backups.primary import BackupSender, Live
from psync.client.plan import numbered
from psync.errors import FencedError
from psync.net.connection import AsIfFrom
from psync.net.platform import Parts, Platform
from psync.net.secret import Secret
from psync.ps.life import Life
from psync.ps_task import PsTask
from psync.specs import ShardSpec, dtype_name, dtype_of
from psync.store.commit_log import LogState
from psync.store.store import Key
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, decode, encode, replace
from psync.wire.limits import Limits
from psync.wire.messages import (
    AttachPs,
    BackUp,
    BeginBackup,
    DefinePlan,
    FillSnapshot,
    LogEntries,
    Promote,
    Text,
)
from psync.wire.tensors import to_bytes_view

CHIEF = ("/job:chief/task:0", 100)
ADDRESS = "ps0:1"
HOST = 6  # the index of the process in which the backup lives
SECRET = Secret(b"a secret of at least thirty-two bytes")

PLANS: dict[int, DefinePlan] = {}
"""All that clients have named so far, by their numbers, which mean the same everywhere."""


def planned(definition: DefinePlan) -> DefinePlan:
    """Give a plan its number, and remember it."""
    made = numbered(definition)
    PLANS[made.plan] = made
    return made


class HeldSender:
    """In place of a ``BackupSender``: the test says when the backup takes entries."""

    stage: Stage
    is_unlike = False
    error = None

    def __init__(self, service: Any, begin: BeginBackup, order: BackUp) -> None:
        self.order, self.log = order, service.executor.log
        self.ended = asyncio.Event()
        self._begin, self._service = begin, service
        self._peer = peer_of((f"/job:ps/task:{begin.ps}", begin.coordinator))
        self.stage.sender = self

    async def _tell(self, message: Message, body: Sequence[Any] = ()) -> Message:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        handler = handlers_of(self.stage.host)[type(message)]
        segments = [memoryview(bytes(each)) for each in body]
        served(handler, self._peer, decode(encode(message)), segments, future.set_result)
        outcome = await future
        if isinstance(outcome, Exception):
            raise outcome
        return cast(Message, outcome.message)

    async def copy(self, frozen: Any, live: Live, first: int) -> None:
        state, arrays = live
        begin = replace(self._begin, first=first, beside=len(arrays))
        begun = await self._tell(begin, [frozen.state.to_bytes(), state])
        assert isinstance(begun, Text)
        self._service.begun_with(self.order.task, begun.value)
        beside = enumerate(arrays, len(frozen.state.items))
        for item, data in [*_items_of(frozen), *beside]:
            await self._tell(FillSnapshot(self._begin.ps, self.order.epoch, item, 0), [data])
        frozen.drop()
        self.log.pair()

    async def take(self, count: int, *, heard: bool = True) -> int:
        """Let the backup have the next entries; return how many.

        Args:
            count: At most so many.
            heard: Whether its primary hears that it has them.
        """
        if self.log.state is not LogState.PAIRED:
            return 0
        first = self.log.shipped + 1
        entries, segments = self.log.to_ship(count, 1 << 30)
        if entries:
            await self._tell(LogEntries(0, self.order.epoch, first, entries), segments)
        if heard and entries:
            self.log.note_taken(self.log.shipped)
            self._service.executor.advance()
        return len(entries)

    def ship_soon(self) -> None:
        """Nothing: see ``take``."""

    def close(self) -> Any:
        self.ended.set()
        return settle()


class StageParts(Parts):
    """The parts of all tasks of a stage."""

    def __init__(self, stage: Stage) -> None:
        self._sender = type("HeldSender", (HeldSender,), {"stage": stage})

    def of(self, cls: type[Any]) -> type[Any]:
        return self._sender if cls is BackupSender else cls


class Stage:
    """A ps, its backup, and their clients.

    Attributes:
        serving: Who serves the ps.
        sender: What feeds its backup; None: there is none.
    """

    sender: HeldSender | None = None

    def __init__(self) -> None:
        network = cast(Any, MemoryNetwork())
        platform = Platform(network, SECRET, Limits(), StageParts(self), new_incarnation=lambda: 7)
        self.serving = PsTask(platform, 0, ADDRESS)
        self.host = PsTask(platform, HOST, f"host{HOST}:1")
        self._all = [self.serving, self.host]
        self._peers: dict[tuple[PsTask, str, int], AsIfFrom] = {}

    async def begin(self) -> None:
        """Let a coordinator attach the ps."""
        await self.request(CHIEF, AttachPs(CHIEF[1], [ADDRESS], 15.0))
        assert self.serving.life is Life.SERVING

    def create(self, key: Key, name: str, value: Any) -> None:
        """Create a variable of one shard, before there is anything else."""
        array = np.asarray(value)
        spec = ShardSpec(name, *key, 0, array.shape, dtype_name(array.dtype), 0)
        self.serving.services.store.create(spec, to_bytes_view(array))

    async def close(self) -> None:
        """End all tasks."""
        for each in self._all:
            await each.close()

    # Requests of clients.

    def peer(self, client: tuple[str, int]) -> AsIfFrom:
        """The connection of a client."""
        return self._peers.setdefault((self.serving, *client), peer_of(client))

    def ask(
        self,
        client: tuple[str, int],
        message: Message,
        segments: Sequence[bytes],
        then: Callable[[Any], None],
    ) -> None:
        """Send a request to the ps, as a connection would bring it; ``then`` gets its answer."""
        handlers, peer = handlers_of(self.serving), self.peer(client)
        try:  # a connection is cut when its task is replaced
            self.serving.services.ledger.check_incarnation(*client)
        except FencedError as exc:
            then(exc)
            return
        definition = PLANS.get(getattr(message, "plan", -1))
        if definition is not None and definition.plan not in peer.state.setdefault("plans", set()):
            peer.state["plans"].add(definition.plan)
            served(handlers[DefinePlan], peer, definition)
        served(handlers[type(message)], peer, decode(encode(message)), segments, then)

    async def request(self, client: tuple[str, int], message: Message) -> Message:
        """Send a request and return its answer, which does not wait for anything else."""
        got: list[Any] = []
        self.ask(client, message, (), got.append)
        await settle()
        (answer,) = got
        if isinstance(answer, Exception):
            raise answer
        return cast(Message, answer.message)

    # The backup.

    async def back_up(self) -> None:
        """Let the ps make a backup."""
        order = BackUp(1, self.host.task, self.host.task, lost=False)
        self.ask(CHIEF, order, (), lambda _: None)
        await settle()

    @property
    def backup(self) -> PsTask:
        return cast(PsTask, backups_of(self.host)[0].task)

    async def fail_over(self) -> None:
        """Let the ps die: nothing comes from it any more, and its backup serves."""
        sender, backup = self.sender, self.backup
        assert sender is not None
        self.serving.services.executor.log.depose()  # nothing is judged there any more
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        order = Promote(0, sender.order.epoch, CHIEF[1], [])
        served(handlers_of(self.host)[Promote], peer_of(CHIEF), order, (), told.set_result)
        promoted = (await told).message
        assert isinstance(promoted, Text)
        self.serving, self.sender = backup, None
        await self.request(CHIEF, AttachPs(CHIEF[1], [promoted.value], 15.0, moves=1))

    # What there is.

    def value(self, key: Key) -> np.ndarray:
        """Return what a shard holds."""
        store = self.serving.services.store
        spec = store.spec(key)
        data = b"".join(bytes(block) for block in store.read(key))
        return np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)


def _items_of(frozen: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the items of what a ps holds still, and their bytes."""
    for item, known in enumerate(frozen.state.items):
        if not known.is_constant:
            yield item, b"".join(map(bytes, frozen.part(item, 0, known.nbytes)))
