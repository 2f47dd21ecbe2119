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
(``sync.steps``).

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from psync.errors import BusyError, ClosedError, FencedError, PsyncError
from psync.net.connection import AsIfFrom, Handler, OwnRequest, Request, fail
from psync.ps.computes import Compute, Computes, Touches
from psync.ps.cooperative_work import INLINE_BYTES, SHARD_BYTES, LongWork
from psync.store.commit_log import CommitLog, Comparison, LogState, chained
from psync.store.ledger import Client
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message, encode
from psync.wire.messages import CheckState, Done

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Of entries, while a backup is being made: a copy that takes longer is given up."""

HEADER_WEIGHT = 8
"""What a byte of an entry's message counts, beside one of its body: a frame has room for few."""

AT_ONCE = 64
"""Entries that are executed in one turn of the loop."""


class Later(enum.Enum):
    """The type of ``LATER``."""

    LATER = enum.auto()


LATER = Later.LATER
"""Of an act that has been done: its request is answered by somebody else."""

Outcome = Compute | Awaitable[None] | Later | None
"""Of an act: what comes before the answer, or what to wait for, with all later entries."""

Act = Callable[[], Outcome]
"""Judges an entry, and does what takes no arrays. What it leaves unanswered is answered by Done."""

Ended = Callable[[], None] | None
Claim = Callable[[], Callable[[], None]]
"""Called when an entry takes longer than this turn; returns what to call at its end."""


@dataclass(slots=True)
class Entry:
    """What is shipped."""

    client: Client
    header: bytes  # the message
    body: Sequence[memoryview]
    nbytes: int  # of the body
    weight: int  # what it counts: headers more, as those of all entries of a message are one header

    @classmethod
    def of(cls, client: Client, header: bytes, body: Sequence[memoryview]) -> Entry:
        """Return what ships a message."""
        nbytes = sum(map(len, body))
        return cls(client, header, body, nbytes, nbytes + HEADER_WEIGHT * len(header))


class _Queued(msgspec.Struct):
    number: int  # 0: it is no entry, and comes between two
    act: Act
    request: Request[Any]
    claim: Claim | None  # not called so far
    ended: Ended = None


class Executor:
    """Executes the entries of one ps under one coordinator and timeline.

    Args:
        task: Name of the ps.
        coordinator: Incarnation of the coordinator.
        store: What is served.
        work: Of the process.
        log: The order of entries, and what the backup has.

    Attributes:
        on_entry: Called when something may be shipped.
        digest: Returns one of the state that judging has made, equal on a backup.
    """

    def __init__(
        self, task: str, coordinator: int, store: ShardStore, work: LongWork, log: CommitLog[Entry]
    ) -> None:
        self.log = log
        self.computes = Computes(store, work)
        self.on_entry: Callable[[], None] = lambda: None  # there is no backup
        self.digest: Callable[[], bytes] = bytes
        self._task = task
        self._coordinator = ("/job:chief/task:0", coordinator)
        self._store = store
        self._work = work
        self._queue: deque[_Queued] = deque()
        self._busy: asyncio.Task[None] | None = None  # an entry that is awaited
        self._again = False  # the loop will look again
        self._acting = False  # an entry is being judged just now
        self._comparison = Comparison(task, lambda: self.digest())
        self._over: PsyncError | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is no backup, and none is being made."""
        return self.log.state is LogState.ALONE

    @property
    def waiting(self) -> int:
        """Entries that are not executed."""
        return len(self._queue) + (self._busy is not None)

    # Entries.

    def submit(
        self,
        request: Request[Any],
        message: Message,
        body: Sequence[memoryview],
        act: Act,
        claim: Claim | None = None,
        client: Client | None = None,
    ) -> None:
        """Give an entry its number, and execute it as soon as the backup has it.

        Args:
            request: Of whom it is, and who gets the answer, or the error; FencedError or
                ClosedError if another ps has taken this one's place, or this one ends.
            message: The entry; that of the request is kept as it came.
            body: Its segments.
            act: Judges it.
            claim: Called if it is not done in this turn; what is being judged comes first.
            client: Whose entry it is; None: the one's who asks.
        """
        if self._over is not None:
            request.fail(self._over.with_traceback(None))
            return
        log = self.log
        if log.state is LogState.ALONE:
            log.last += 1
            number = log.last
        else:
            as_it_came = request.header if message is request.message else b""
            number = self._ship(client or request.peer.client, as_it_came or encode(message), body)
        is_free = not self._queue and not self._acting and self._busy is None
        if is_free and (log.state is LogState.ALONE or log.may_judge(number)):
            self._execute(number, act, request, claim, None)
            if self._queue:  # what it has brought with it
                self.advance()
        else:
            self._queue.append(_Queued(number, act, request, claim))
            if not self._acting or log.state is LogState.PAIRED:
                self._claim()
            if log.state is not LogState.PAIRED:  # else it goes on when the backup has it
                self.advance()

    def note(self, client: Client, message: Message, act: Act) -> None:
        """Submit an entry for whose answer nobody waits: nobody hears of an error, either."""
        self.submit(_NOBODYS, message, (), act, None, client)

    def in_turn(self, act: Act, request: Request[Any] | None = None) -> None:
        """Do something between two entries: all up to now are executed, and none after them.

        Args:
            act: Does it.
            request: Gets the answer; None: nobody does.
        """
        request = request or _NOBODYS
        if self._over is not None:
            request.fail(self._over.with_traceback(None))
        elif not self._queue and not self._acting and self._busy is None:
            self._execute(0, act, request, None, None)
            if self._queue:
                self.advance()
        else:
            self._queue.append(_Queued(0, act, request, None))
            self.advance()

    def _claim(self) -> None:
        """What is queued is not executed in this turn."""
        for queued in self._queue:
            claim, queued.claim = queued.claim, None
            if claim is not None:
                queued.ended = claim()

    async def run(self, client: Client, message: Message, act: Callable[[Any], Outcome]) -> None:
        """Submit an entry, and wait until it is executed. Raises what the act raises.

        Cancellation: Safe; it is executed all the same.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submit(awaited(client, done), message, (), lambda: act(message))
        await done

    async def turn(self, act: Act) -> None:
        """Do something as ``in_turn``, and wait for its end. Raises what it raises.

        Cancellation: Safe; it is done all the same.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_turn(act, awaited(self._coordinator, done))
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

    def begin_copy(self) -> int:
        """Keep all entries from now on for a new backup; return the number of the last before."""
        self._comparison = Comparison(self._task, lambda: self.digest())
        return self.log.begin_copy()

    # A backup that is not what it should be.

    def compare(self, request: Request[CheckState]) -> None:
        """Execute a check, on a backup."""
        self.in_turn(lambda: self._comparison.execute(request.message), request)

    def _ship(self, client: Client, header: bytes, body: Sequence[memoryview]) -> int:
        """Give an entry its number, and ship it to the backup."""
        if (check := self._comparison.due()) is not None:
            act = functools.partial(self._comparison.execute, check)
            number = self._keep(self._coordinator, encode(check), ())
            self._queue.append(_Queued(number, act, _NOBODYS, None))
            self.advance()
        number = self._keep(client, header, body)
        self.on_entry()
        return number

    def _keep(self, client: Client, header: bytes, body: Sequence[memoryview]) -> int:
        entry, comparison = Entry.of(client, header, body), self._comparison
        comparison.chain = chained(comparison.chain, client, header, entry.nbytes)
        return self.log.append(entry, entry.weight)

    # Executing them.

    def _execute(
        self, number: int, act: Act, request: Request[Any], claim: Claim | None, ended: Ended
    ) -> None:
        failed: Exception | None = None
        self._acting = True
        try:
            outcome = act()
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
                    self._compute(outcome, request, ended if claim is None else claim())
                    return
                outcome.done()
            except Exception as exc:
                failed = exc
        elif outcome is LATER:
            return
        elif outcome is not None:
            ended = ended if claim is None else claim()
            under_way = self._wait(number, request, ended, outcome)
            self._busy = asyncio.get_running_loop().create_task(under_way)
            self._claim()
            return
        if failed is not None or ended is not None:
            _end(request, ended, failed)
        elif request.is_held or not request.over:
            request.answer(_DONE)

    def _compute(self, compute: Compute, request: Request[Any], ended: Ended) -> None:
        def done(failed: Exception | None) -> None:
            if failed is None:
                try:
                    compute.done()
                except Exception as exc:
                    failed = exc
            _end(request, ended, failed)

        self.computes.add(compute, done)

    def advance(self) -> None:
        """Execute what may be executed; called when the backup has more, or is given up."""
        if self._again or self._acting:  # what an entry brings with it comes after that
            return
        done = 0
        while self._queue and self._busy is None and self._over is None:
            head = self._queue[0]
            if head.number and not self.log.may_judge(head.number):
                return
            if done == AT_ONCE:
                self._again = True
                asyncio.get_running_loop().call_soon(self._look_again)
                self._claim()
                return
            done += 1
            self._queue.popleft()
            self._execute(head.number, head.act, head.request, head.claim, head.ended)

    def _look_again(self) -> None:
        self._again = False
        self.advance()

    async def _wait(
        self, number: int, request: Request[Any], ended: Ended, under_way: Awaitable[None]
    ) -> None:
        failed: Exception | None = None
        try:
            await under_way
        except Exception as exc:
            failed = exc
            if number and not isinstance(exc, PsyncError):
                self._work.give_up(exc)
        self._busy = None
        _end(request, ended, failed)
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
            queued = self._queue.popleft()
            _end(queued.request, queued.ended, self._over)

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


def _end(request: Request[Any], ended: Ended, failed: Exception | None) -> None:
    if ended is not None:
        ended()
    if failed is not None:
        request.fail(failed)
    else:
        request.answer(_DONE)


def awaited(client: Client, done: asyncio.Future[None]) -> Request[Any]:
    """Return a request of a client's; a future ends with it."""

    def then(outcome: object) -> None:
        if isinstance(outcome, BaseException):
            fail(done, outcome)
        elif not done.done():
            done.set_result(None)

    return OwnRequest(AsIfFrom(client, {}, _spawn), None, [], then)


def nobodys(client: Client, message: Any = None) -> Request[Any]:
    """Return a request of a client's for whose answer nobody waits."""
    return OwnRequest(AsIfFrom(client, {}, _spawn), message, [], lambda _: None)


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


_DONE = Done()

_NOBODYS = nobodys(("", 0))
"""Of entries whose client is named with them."""

_NOBODYS.over = True
