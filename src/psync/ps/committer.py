"""Commit order of a ps with a backup: an update is applied when the backup has its entry.

Each message that changes the ps becomes an entry of the log. When the backup has it, and all before
it are done, it is judged, applied and answered. The backup applies the same entries in the same
order, by the same code, so it gets the same bits and the same answers. No update is answered that
the backup does not have.

Gates, and locks of variables, are passed before a message becomes an entry: an entry in the queue
waits only for the backup and for the entries before it.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psync.errors import ClosedError, FencedError, PsyncError
from psync.net.peer import Reply
from psync.net.serving import fail
from psync.store.commit_log import CommitLog, LogNames, LogState, NamesInFull
from psync.store.ledger import Client
from psync.store.shards import Key
from psync.store.store import ShardStore
from psync.wire.codec import Message, encode
from psync.wire.lock_messages import AssignLocked
from psync.wire.ps_messages import Assign, DefineOptimizer, Push

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Of entries, while a backup is being made: a copy that takes longer is given up."""

HEADER_WEIGHT = 8
"""What a byte of an entry's message counts, beside one of its body: a frame has room for few."""

AT_ONCE = 64
"""Entries that are done in one turn of the loop."""

Build = Callable[[LogNames], Message]
"""Makes the message of an entry, if there is a backup that will read it."""

Act = Callable[[], Any]
"""Does an entry: returns what a handler returns."""


@dataclass(slots=True)
class Entry:
    """What is shipped."""

    client: Client
    header: bytes  # the message
    body: Sequence[memoryview]


@dataclass(slots=True)
class _Queued:
    number: int
    act: Act
    answer: asyncio.Future[Any]
    ended: Callable[[], None] | None


class Committer:
    """The entries of one ps under one coordinator and timeline.

    Args:
        task: Name of the ps.
        coordinator: Incarnation of the coordinator.
        store: What is served.
        log: Their order, and what the backup has.

    Attributes:
        is_begun: Whether there was ever a backup: until then nothing is to be put into the log.
    """

    def __init__(
        self, task: str, coordinator: int, store: ShardStore, log: CommitLog[Entry]
    ) -> None:
        self.log = log
        self.is_begun = False
        self.on_entry: Callable[[], None] = lambda: None  # something may be shipped
        self._task = task
        self._coordinator = ("/job:chief/task:0", coordinator)
        self._store = store
        self._queue: deque[_Queued] = deque()
        self._busy: asyncio.Task[None] | None = None  # the entry that takes longer than a turn
        self._again = False  # the loop will look again
        self._acting = False  # an entry is being done just now
        self._optimizers: set[int] = set()  # that the backup knows
        self._names = LogNames()
        self._over: PsyncError | None = None

    @property
    def waiting(self) -> int:
        """Entries that are not done."""
        return len(self._queue) + (self._busy is not None)

    # Entries.

    def commit(
        self,
        client: Client,
        message: Message | Build,
        body: Sequence[memoryview],
        act: Act,
        *,
        keys: tuple[Key, ...] = (),
        ended: Callable[[], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Do something once the backup has it; return what becomes of it.

        Args:
            client: Who asks.
            message: What for; or makes it, with the names that the log has for sets and groups.
            body: Its segments.
            act: Does it.
            keys: The shards of its set, if it names one by number.
            ended: Called when it was done, or will not be.

        Raises:
            FencedError: Another ps has taken this one's place.
            ClosedError: The ps ends.
        """
        if self._over is not None:
            raise self._over.with_traceback(None)
        self._define_new()
        self._append(client, message, body, keys)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(_Queued(self.log.last, act, answer, ended))
        self.on_entry()
        self.advance()
        return answer

    def at_turn(self, act: Act) -> asyncio.Future[Any]:
        """Do something between two entries: when all up to now are done, and none after them."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._over is not None:
            fail(answer, self._over)
            return answer
        self._queue.append(_Queued(0, act, answer, None))
        self.advance()
        return answer

    def begin_copy(self, groups: Iterable[int] = ()) -> int:
        """Keep all entries from now on for a new backup; return the number of the last before.

        Args:
            groups: Synchronous groups that it knows from its snapshot.
        """
        self._optimizers = set(self._store.optimizers())
        self._names.begin(groups)
        return self.log.begin_copy()

    def in_full(self, client: Client, build: Build, body: Sequence[memoryview]) -> Entry:
        """Return an entry that a new backup gets before all others."""
        return Entry(client, encode(build(NamesInFull(self._names))), body)

    def _define_new(self) -> None:
        """An optimizer that a message has defined in passing is known to the backup first."""
        known = self._store.optimizers()
        if len(known) == len(self._optimizers):
            return
        for number in known.keys() - self._optimizers:
            message = DefineOptimizer(number, dict(known[number].config))
            self._append(self._coordinator, message, (), ())
            self._queue.append(
                _Queued(
                    self.log.last, lambda: None, asyncio.get_running_loop().create_future(), None
                )
            )
        self._optimizers = set(known)

    def _append(
        self,
        client: Client,
        message: Message | Build,
        body: Sequence[memoryview],
        keys: tuple[Key, ...],
    ) -> None:
        if self.log.state is LogState.ALONE:
            self.log.append(_NOBODY, 0)
            return
        if not isinstance(message, Message):
            message = message(self._names)
        elif isinstance(message, Push | Assign):
            message = self._numbered(message, keys)
        header = encode(message)
        # Headers weigh more: those of all entries of a message are one frame's header.
        nbytes = sum(map(len, body)) + HEADER_WEIGHT * len(header)
        self.log.append(Entry(client, header, body), nbytes)

    def _numbered(self, message: Push | Assign, keys: tuple[Key, ...]) -> Push | Assign:
        """Name its set by a number of the log's own; the lock has been looked at already."""
        number, members = self._names.of_set(keys)
        if isinstance(message, AssignLocked):
            message = Assign(
                message.sequence, message.acked_below, message.closure, message.ordinal,
                number, members, message.op, message.rows, message.spread,
            )  # fmt: skip
            return message
        return replace(message, set_id=number, members=members)

    # Doing them.

    def advance(self) -> None:
        """Do what may be done; to be called when the backup has more, or is given up."""
        if self._again or self._acting:  # what an entry brings with it comes after that
            return
        done = 0
        while self._queue and self._busy is None and self._over is None:
            head = self._queue[0]
            if head.number and not self._may_act(head.number):
                return
            if done == AT_ONCE:
                self._again = True
                asyncio.get_running_loop().call_soon(self._look_again)
                return
            done += 1
            self._queue.popleft()
            self._acting = True
            try:
                self._act(head)
            finally:
                self._acting = False

    def _may_act(self, number: int) -> bool:
        try:
            return self.log.may_apply(number)
        except FencedError as exc:
            self.end(exc)
            return False

    def _look_again(self) -> None:
        self._again = False
        self.advance()

    def _act(self, entry: _Queued) -> None:
        try:
            outcome = entry.act()
        except Exception as exc:
            self._settle(entry, None, exc)
            return
        if outcome is None or isinstance(outcome, Reply):
            self._settle(entry, outcome, None)
            return
        self._busy = asyncio.get_running_loop().create_task(self._wait(entry, outcome))

    async def _wait(self, entry: _Queued, under_way: Awaitable[Any]) -> None:
        outcome, error = None, None
        try:
            outcome = await under_way
        except Exception as exc:
            error = exc
        self._busy = None
        self._settle(entry, outcome, error)
        self.advance()

    def _settle(self, entry: _Queued, outcome: Any, error: Exception | None) -> None:
        if entry.ended is not None:
            entry.ended()
        if error is not None:
            fail(entry.answer, error)
        elif not entry.answer.done():  # else nobody waits any more
            entry.answer.set_result(outcome)

    # Ends.

    def depose(self) -> None:
        """Another ps has taken this one's place: nothing is done here any more."""
        self.log.depose()
        self.end(FencedError(f"{self._task} has been replaced by its backup"))

    def end(self, error: PsyncError | None = None) -> None:
        """Do nothing more, and tell whoever waits. What is being done is carried to its end."""
        if self._over is None:
            self._over = error or ClosedError(f"{self._task} ends")
        while self._queue:
            self._settle(self._queue.popleft(), None, self._over)

    async def drain(self) -> None:
        """Wait for what is being done. Cancellation: safe."""
        if self._busy is not None:
            await asyncio.wait((self._busy,))


_NOBODY = Entry(("", 0), b"", ())
"""In place of an entry that nobody is to have."""
