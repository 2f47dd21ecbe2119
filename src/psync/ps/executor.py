"""The executor of a ps: everything that changes it, in the order of one log.

    submit    the entry gets its number, and is kept for the backup, if there is one
    execute   when the backup has it, and all before it were executed: it is judged, in a turn of
              the loop. Alone, that is at once
    compute   what it does to arrays: first in, first out for each of them (``computes``)
    answer    when its computes are done

This is the only rule of release: nothing is judged that the backup does not have, once the two are
paired (``store.commit_log``), so whatever is answered, sent or read afterwards is on the backup,
too (it *has* what it has acknowledged). A backup executes the same entries by the same code, so it
gets the same bits and the same answers. While a copy for a backup is made, entries are kept for it
and judged all the same. A synchronous push is answered later, with its token, when a step is closed
(``sync.steps``). A read is no entry: it is answered from what has been executed (``ps.pulls``).

Gates, and locks of variables, are passed before a message gets its number. From then on it waits
only for the backup, for the entries before it, and for computes of what it touches. An entry whose
act returns something to be awaited holds up the entries after it until that has ended. What judging
refuses is a PsyncError, on the backup as here, and has changed nothing. Any other error ends the
task: nobody knows what is half done.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from psync.errors import BusyError, ClosedError, FencedError, PsyncError
from psync.net.connection import AsIfFrom, Handler, OwnRequest, Request, fail
from psync.numerics.memory import BlockPool
from psync.ps.admission import PsLocks
from psync.ps.computes import Compute, Computes, Touches
from psync.ps.cooperative_work import INLINE_BYTES, SHARD_BYTES, LongWork
from psync.ps.plans import Plans
from psync.store.commit_log import CommitLog, LogState
from psync.store.ledger import Client, Ledger
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message, encode
from psync.wire.messages import Done

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Of entries, while a backup is being made: a copy that takes longer is given up."""

AT_ONCE = 64
"""Entries that are executed in one turn of the loop."""


NOBODY: Client = ("", 0)
"""Of an entry that no task has asked for."""


class Later(enum.Enum):
    """Of an act that has been done: its request is answered by somebody else."""

    LATER = enum.auto()


LATER = Later.LATER

Outcome = Compute | Awaitable[None] | Later | None
"""Of an act: what comes before the answer, or what to wait for, with all later entries."""

Act = Callable[[], Outcome]
"""Judges an entry, and does what takes no arrays. What it leaves unanswered is answered by Done."""

Claim = Callable[[], Callable[[], None]]
"""Called when an entry takes longer than this turn; returns what to call at its end."""


class _Entry(msgspec.Struct, eq=False):
    number: int  # 0: it is none, and comes between two
    act: Act
    request: Request[Any]
    claim: Claim | None  # not called so far
    ended: Callable[[], None] | None = None  # what that has returned


class Executor:
    """Executes the entries of one ps under one coordinator and timeline.

    Args:
        task: Name of the ps.
        store: What is served.
        work: Of the process.
        log: The order of entries, and what the backup has.

    Attributes:
        on_entry: Called when something may be shipped.
    """

    def __init__(self, task: str, store: ShardStore, work: LongWork, log: CommitLog) -> None:
        self.log = log
        self.computes = Computes(store, work)
        self.on_entry: Callable[[], None] = lambda: None  # there is no backup
        self._task = task
        self._work = work
        self._queue: deque[_Entry] = deque()
        self._busy: asyncio.Task[None] | None = None  # an entry that is awaited
        self._again = False  # the loop will look again
        self._acting = False  # an entry is being judged just now
        self._over: PsyncError | None = None

    @property
    def waiting(self) -> int:
        """Entries that are not executed."""
        return len(self._queue) + (self._busy is not None)

    @property
    def num_unreleased(self) -> int:
        """Entries that the backup does not have."""
        return sum(entry.number > self.log.released for entry in self._queue)

    # Entries.

    def submit(
        self,
        request: Request[Any],
        message: Message | None,
        body: Sequence[memoryview],
        act: Act,
        claim: Claim | None = None,
        client: Client | None = None,
    ) -> None:
        """Give an entry its number, and execute it as soon as the backup has it.

        Args:
            request: Of whom it is, and who gets the answer, or the error; FencedError or
                ClosedError if another ps has taken this one's place, or this one ends.
            message: The entry; that of the request is kept as it came. None: it is none, and comes
                between two; all up to now are executed by then, and none after them.
            body: Its segments.
            act: Judges it.
            claim: Called if it is not done in this turn; what is being judged comes first.
            client: Whose entry it is; None: the one's who asks.
        """
        if self._over is not None:
            request.fail(self._over.with_traceback(None))
            return
        log, number = self.log, 0
        if message is None:
            pass
        elif log.state is LogState.ALONE:
            log.last = number = log.last + 1
        else:
            if log.last + 1 >= log.check_at:
                self._check()
            header = request.header if message is request.message else b""
            client = client or request.peer.client
            number = log.append(client, header or encode(message), body)
            self.on_entry()
        entry = _Entry(number, act, request, claim)
        is_free = not self._queue and not self._acting and self._busy is None
        if is_free and number <= log.released:
            self._execute(entry)
            if self._queue:  # what it has brought with it
                self.advance()
            return
        is_paired = log.state is LogState.PAIRED
        if claim is not None and (is_paired or not self._acting):
            entry.claim, entry.ended = None, claim()
        self._queue.append(entry)
        if not (is_paired and number):  # else it goes on when the backup has it
            self.advance()

    def note(self, client: Client, message: Message, act: Act) -> None:
        """Submit an entry for whose answer nobody waits: nobody hears of an error, either."""
        self.submit(_NOBODYS, message, (), act, None, client)

    def in_turn(self, act: Act, request: Request[Any] | None = None) -> None:
        """Do something between two entries; ``request`` gets the answer. None: nobody does."""
        self.submit(request or _NOBODYS, None, (), act)

    def _claim(self) -> None:
        """What is queued is not executed in this turn."""
        for entry in self._queue:
            claim, entry.claim = entry.claim, None
            if claim is not None:
                entry.ended = claim()

    async def run(
        self, client: Client, message: Message | None, act: Callable[[Any], Outcome]
    ) -> None:
        """Submit an entry, and wait until it is executed. Raises what the act raises.

        Cancellation: Safe; it is executed all the same.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submit(awaited(client, done), message, (), lambda: act(message))
        await done

    def logged(self, handler: Handler, touches: Touches | None = None) -> Handler:
        """Return a handler whose messages are entries, and are acted upon by another one.

        Args:
            handler: Acts upon them.
            touches: What has to be computed before.
        """
        serve = cast(Callable[[Request[Any]], Outcome], handler.run)

        def run(request: Request[Any]) -> None:
            act = functools.partial(serve, request)
            if touches is not None:
                act = functools.partial(self._settled, act, touches(request.message))
            # Of a notification nobody hears of an error.
            asks = request if request.request_id else _NOBODYS
            self.submit(asks, request.message, request.segments, act, None, request.peer.client)

        return Handler(run, handler.prepare)

    def _settled(self, act: Act, keys: Sequence[Key]) -> Outcome:
        return self._when_settled(act, keys) if self.computes.waits_at(keys) else act()

    async def _when_settled(self, act: Act, keys: Sequence[Key]) -> None:
        await self.computes.settled(keys)
        outcome = act()
        if outcome is not None:
            await cast(Awaitable[None], outcome)

    # Whether the backup is what it should be.

    def _check(self) -> None:
        """Log the comparison that is due."""
        check = self.log.due()
        if check is not None:
            number = self.log.append(NOBODY, encode(check), ())
            act = functools.partial(self.log.execute, check)
            self._queue.append(_Entry(number, act, _NOBODYS, None))
            self.advance()

    # Executing them.

    def _execute(self, entry: _Entry) -> None:
        request, claim = entry.request, entry.claim
        failed: Exception | None = None
        self._acting = True
        try:
            outcome = entry.act()
        except Exception as exc:
            outcome, failed = None, exc
            if not isinstance(exc, PsyncError):
                self._work.give_up(exc)
        self._acting = False
        if isinstance(outcome, Compute):
            keys, computes = outcome.keys, self.computes
            waits = outcome.nbytes + SHARD_BYTES * len(keys) > INLINE_BYTES
            if not waits and computes.queues:
                waits = computes.waits_at(keys)
            try:
                if self._work.is_torn:
                    self._work.check_whole()
                if not waits:
                    try:
                        outcome.at_once()
                    except BusyError:
                        waits = True
                    except Exception as exc:
                        self._work.give_up(exc)
                        raise
                if waits:
                    if claim is not None:
                        entry.ended = claim()
                    computes.add(outcome, functools.partial(_end, entry))
                    return
                outcome.done()
            except Exception as exc:
                failed = exc
        elif outcome is LATER:
            return
        elif outcome is not None:
            if claim is not None:
                entry.ended = claim()
            self._busy = asyncio.get_running_loop().create_task(self._wait(entry, outcome))
            self._claim()
            return
        if failed is not None or entry.ended is not None:
            _end(entry, failed)
        elif request.is_held or not request.over:
            request.answer(_DONE)

    def advance(self) -> None:
        """Execute what may be executed; called when the backup has more, or is given up."""
        if self._again or self._acting:  # what an entry brings with it comes after that
            return
        done = 0
        while self._queue and self._busy is None and self._over is None:
            if self._queue[0].number > self.log.released:
                return
            if done == AT_ONCE:
                self._again = True
                asyncio.get_running_loop().call_soon(self._look_again)
                self._claim()
                return
            done += 1
            self._execute(self._queue.popleft())

    def _look_again(self) -> None:
        self._again = False
        self.advance()

    async def _wait(self, entry: _Entry, under_way: Awaitable[None]) -> None:
        failed: Exception | None = None
        try:
            await under_way
        except Exception as exc:
            failed = exc
            if entry.number and not isinstance(exc, PsyncError):
                self._work.give_up(exc)
        self._busy = None
        _end(entry, failed)
        self.advance()

    # Ends.

    def depose(self) -> None:
        """Another ps has taken this one's place: nothing is executed here any more."""
        self.log.depose()
        self.end(FencedError(f"{self._task} has been replaced by its backup"))

    def end(self, error: PsyncError | None = None) -> None:
        """Execute nothing more; pending requests fail. What is being computed is completed."""
        if self._over is None:
            self._over = error or ClosedError(f"{self._task} ends")
        while self._queue:
            _end(self._queue.popleft(), self._over)

    async def finish(self) -> None:
        """Execute all that was submitted; there is no backup that it waits for.

        Cancellation: Safe.
        """
        while self.waiting:
            await self.drain()
            self.advance()
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Wait for what is being executed. Cancellation: safe."""
        while self._busy is not None:
            await asyncio.wait((self._busy,))


@dataclass(eq=False)
class Service:
    """One of the services of a ps for one coordinator and timeline, and what they share.

    Args:
        task: Name of the ps.
        store: Its shards.
        ledger: Knows which updates were seen, who has been replaced, and in which steps a rule of
            a user's has raised.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait, and who holds which.
        executor: In whose order all is done.
        plans: Of the clients of this coordinator.
    """

    task: str
    store: ShardStore
    ledger: Ledger
    work: LongWork
    pool: BlockPool
    locks: PsLocks
    executor: Executor
    plans: Plans


def _end(entry: _Entry, failed: Exception | None) -> None:
    if entry.ended is not None:
        entry.ended()
    if failed is not None:
        entry.request.fail(failed)
    else:
        entry.request.answer(_DONE)


def awaited(client: Client, done: asyncio.Future[None]) -> Request[Any]:
    """Return a request of a client's; a future ends with it."""

    def then(outcome: object) -> None:
        if isinstance(outcome, BaseException):
            fail(done, outcome)
        elif not done.done():
            done.set_result(None)

    return OwnRequest(AsIfFrom(client), None, [], then)


def nobodys(client: Client, message: Any = None) -> Request[Any]:
    """Return a request of a client's for whose answer nobody waits."""
    return OwnRequest(AsIfFrom(client), message, [], lambda _: None)


_DONE = Done()

_NOBODYS = nobodys(NOBODY)
"""Of entries whose client is named with them."""

_NOBODYS.over = True
