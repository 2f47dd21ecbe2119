"""The executor of a ps: everything that changes it, in the order of one log.

    submit    the entry gets its number, and is kept for the backup, if there is one
    execute   when the backup has it, and all before it were executed: it is judged, in a turn of
              the loop. Alone, that is at once
    compute   what it does to arrays: first in, first out for each of them (``computes``)
    answer    when its computes are done

This is the only rule of release: nothing is judged that the backup does not have, once the two are
paired (``store.commit_log``), so whatever is answered, sent or read afterwards is on the backup,
too (it *has* what it has acknowledged). A
backup executes the same entries by the same code, so it gets the same bits and the same answers. A
synchronous push is answered later, with its token: the table of ``sync.steps`` says when.

Gates, and locks of variables, are passed before a message gets its number. From then on it waits
only for the backup, for the entries before it, and for computes of what it touches. An entry whose
act returns something to be awaited holds up the entries after it until that has ended. What judging
refuses is a PsyncError, on the backup as here, and has changed nothing. Any other error ends the
task: nobody knows what is half done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from psync.errors import ClosedError, FencedError, PsyncError
from psync.net.peer import Handler, Later, Peer, Reply
from psync.net.serving import fail
from psync.ps.comparison import Comparison
from psync.ps.computes import Compute, Computes, Touches
from psync.ps.cooperative_work import LongWork
from psync.store.commit_log import CommitLog, LogNames, LogState, NamesInFull
from psync.store.ledger import Client
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message, encode
from psync.wire.messages import CheckState, DefineOptimizer, Done

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Of entries, while a backup is being made: a copy that takes longer is given up."""

HEADER_WEIGHT = 8
"""What a byte of an entry's message counts, beside one of its body: a frame has room for few."""

AT_ONCE = 64
"""Entries that are executed in one turn of the loop."""


Build = Callable[[LogNames], Message]
"""Makes the message of an entry, if there is a backup that will read it."""

Listed = tuple[Client, Message | Build, Sequence[memoryview]]
"""(client, message, segments) of an entry."""

Outcome = Reply | Compute | Awaitable[Reply | None] | None
"""Of an act: the answer, what comes before it, or what to wait for, with all later entries."""

Act = Callable[[], Outcome]
"""Judges an entry, and does what takes no arrays."""

Ended = Callable[[], None] | None
Claim = Callable[[], Callable[[], None]]
"""Called when an entry takes longer than this turn; returns what to call at its end."""


@dataclass(slots=True)
class Entry:
    """What is shipped."""

    client: Client
    header: bytes  # the message
    body: Sequence[memoryview]


class Answer(Later):
    """The answer to an entry that is not executed yet, or computed; may be awaited as well."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(lambda _: None)  # an entry is executed whoever waits

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for it. Cancellation: safe, the entry is executed all the same."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Reply | Exception) -> None:
            if isinstance(outcome, Exception):
                fail(future, outcome)
            elif not future.done():
                future.set_result(outcome)

        self.deliver_to(deliver)
        return (yield from future)


@dataclass(slots=True)
class _Queued:
    number: int  # 0: it is no entry, and comes between two
    act: Act
    answer: Answer
    ended: Ended


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
        self._optimizers: set[int] = set()  # that the backup knows
        self._names = LogNames()
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
        client: Client,
        message: Message | Build,
        body: Sequence[memoryview],
        act: Act,
        claim: Claim | None = None,
    ) -> Reply | Answer | None:
        """Give an entry its number, and execute it as soon as the backup has it.

        Args:
            client: Who asks.
            message: What for; or makes it, with the names that the log has for sets and groups.
            body: Its segments.
            act: Judges it.
            claim: Called if it is not done in this turn.

        Returns:
            What ``act`` has returned, if it is done; else what will be the answer.

        Raises:
            FencedError, ClosedError: Another ps has taken this one's place; or this one ends.
            PsyncError: It was refused.
        """
        if self._over is not None:
            raise self._over.with_traceback(None)
        number = self._append(client, message, body)
        if self._is_free and (self.log.state is LogState.ALONE or self._may_execute(number)):
            return self._execute_now(number, act, claim)
        return self._enqueue(number, act, None if claim is None else claim())

    def note(
        self, client: Client, message: Message | Build, body: Sequence[memoryview], act: Act
    ) -> None:
        """Submit an entry for whose answer nobody waits: nobody hears of an error, either."""
        with contextlib.suppress(PsyncError):  # it is refused, or the log has ended
            self.submit(client, message, body, act)

    def in_turn(self, act: Callable[[], Any]) -> Any:
        """Do something between two entries: all up to now are executed, and none after them.

        Returns:
            What ``act`` has returned, or if that is to be awaited, or its turn comes later, what
            will be its result.
        """
        if self._over is not None:
            raise self._over.with_traceback(None)
        if self._is_free:
            return self._execute_now(0, act, None)
        return self._enqueue(0, act, None)

    def logged(
        self, handler: Handler, touches: Touches | None = None, *, notified: bool = False
    ) -> Handler:
        """Return a handler whose messages are entries, and are acted upon by another one.

        Args:
            handler: Acts upon them.
            touches: What has to be computed before.
            notified: Whether they are notifications, see ``note``.
        """
        submit = self.note if notified else self.submit

        def run(peer: Peer, message: Any, body: list[memoryview]) -> Any:
            client = (peer.task, peer.incarnation)
            act = cast(Act, functools.partial(handler.run, peer, message, body))
            if touches is None:
                return submit(client, message, body, act)
            return submit(client, message, body, lambda: self._settled(act, touches(message)))

        return Handler(run, handler.prepare)

    def _settled(self, act: Act, keys: Sequence[Key]) -> Outcome:
        return self._when_settled(act, keys) if self.computes.waits_at(keys) else act()

    async def _when_settled(self, act: Act, keys: Sequence[Key]) -> Reply | None:
        await self.computes.settled(keys)
        outcome = cast(Reply | Awaitable[Reply | None] | None, act())
        return await outcome if isinstance(outcome, Awaitable) else outcome

    def begin_copy(self, groups: Iterable[int] = ()) -> int:
        """Keep all entries from now on for a new backup; return the number of the last before.

        Args:
            groups: Synchronous groups that it knows from its snapshot.
        """
        self._optimizers = set(self._store.optimizers())
        self._names.begin(groups)
        self._comparison = Comparison(self._task, lambda: self.digest())
        return self.log.begin_copy()

    def in_full(
        self, client: Client, message: Message | Build, body: Sequence[memoryview]
    ) -> Entry:
        """Return an entry that a new backup gets before all others."""
        if not isinstance(message, Message):
            message = message(NamesInFull(self._names))
        return Entry(client, encode(message), body)

    # A backup that is not what it should be.

    def compare(self, message: CheckState) -> Reply | Answer | None:
        """Execute a check, on a backup."""
        return self.in_turn(lambda: self._comparison.execute(message))  # type: ignore[no-any-return]

    def _append(self, client: Client, message: Message | Build, body: Sequence[memoryview]) -> int:
        """Give an entry its number; with a backup, ship it, after what that must know before."""
        if self.log.state is LogState.ALONE:
            return self.log.append(_NOBODY, 0)
        known = self._store.optimizers()
        for new in known.keys() - self._optimizers:  # that a message has defined in passing
            self._optimizers.add(new)
            self._keep(self._coordinator, DefineOptimizer(new, dict(known[new].config)), ())
        if (check := self._comparison.due()) is not None:
            act = functools.partial(self._comparison.execute, check)
            self._enqueue(self._keep(self._coordinator, check, ()), act, None)
        number = self._keep(client, message, body)
        self.on_entry()
        return number

    def _keep(self, client: Client, message: Message | Build, body: Sequence[memoryview]) -> int:
        if not isinstance(message, Message):
            message = message(self._names)
        header = encode(message)
        nbytes = sum(map(len, body))
        self._comparison.shipped(client, header, nbytes)
        # Headers weigh more: those of all entries of a message are one frame's header.
        return self.log.append(Entry(client, header, body), nbytes + HEADER_WEIGHT * len(header))

    # Executing them.

    @property
    def _is_free(self) -> bool:
        """Whether nothing is before what comes now."""
        return not self._queue and not self._acting and self._busy is None

    def _enqueue(self, number: int, act: Act, ended: Ended) -> Answer:
        answer = Answer()
        self._queue.append(_Queued(number, act, answer, ended))
        self.advance()
        return answer

    def _execute_now(self, number: int, act: Act, claim: Claim | None) -> Reply | Answer | None:
        outcome = self._judge(act)
        if isinstance(outcome, Compute):
            if self.computes.done_now(outcome):
                try:
                    outcome = outcome.reply()
                except PsyncError:  # a rule of a user's raised
                    self._look_soon()
                    raise
            else:
                compute, outcome = outcome, Answer()
                self._compute(compute, outcome, None if claim is None else claim())
        elif outcome is not None and not isinstance(outcome, Reply):
            answer = Answer()
            self._await(_Queued(number, act, answer, None if claim is None else claim()), outcome)
            outcome = answer
        if self._queue:  # what it has brought with it
            self.advance()
        return outcome

    def _judge(self, act: Act) -> Outcome:
        self._acting = True
        try:
            return act()
        except PsyncError:
            if self._queue:
                self._look_soon()
            raise
        except Exception as exc:
            self._work.give_up(exc)
            raise
        finally:
            self._acting = False

    def advance(self) -> None:
        """Execute what may be executed; called when the backup has more, or is given up."""
        if self._again or self._acting:  # what an entry brings with it comes after that
            return
        done = 0
        while self._queue and self._busy is None and self._over is None:
            head = self._queue[0]
            if head.number and not self._may_execute(head.number):
                return
            if done == AT_ONCE:
                self._look_soon()
                return
            done += 1
            self._queue.popleft()
            self._execute(head)

    def _may_execute(self, number: int) -> bool:
        try:
            return self.log.may_judge(number)
        except FencedError as exc:
            self.end(exc)
            return False

    def _look_soon(self) -> None:
        self._again = True
        asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._again = False
        self.advance()

    def _execute(self, queued: _Queued) -> None:
        try:
            outcome = self._judge(queued.act)
            if isinstance(outcome, Compute):
                if not self.computes.done_now(outcome):
                    self._compute(outcome, queued.answer, queued.ended)
                    return
                outcome = outcome.reply()
        except Exception as exc:
            _settle(queued.answer, queued.ended, exc)
            return
        if outcome is None or isinstance(outcome, Reply):
            _settle(queued.answer, queued.ended, outcome)
        else:
            self._await(queued, outcome)

    def _compute(self, compute: Compute, answer: Answer, ended: Ended) -> None:
        self.computes.add(compute, lambda exc: _settle(answer, ended, exc or compute.outcome()))

    def _await(self, queued: _Queued, under_way: Awaitable[Reply | None]) -> None:
        self._busy = asyncio.get_running_loop().create_task(self._wait(queued, under_way))

    async def _wait(self, queued: _Queued, under_way: Awaitable[Reply | None]) -> None:
        outcome: Reply | Exception | None
        try:
            outcome = await under_way
        except Exception as exc:
            outcome = exc
            if queued.number and not isinstance(exc, PsyncError):
                self._work.give_up(exc)
        self._busy = None
        _settle(queued.answer, queued.ended, outcome)
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
            _settle(queued.answer, queued.ended, self._over)

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


def _settle(answer: Answer, ended: Ended, outcome: Reply | Exception | None) -> None:
    if ended is not None:
        ended()
    answer.give(Reply(Done()) if outcome is None else outcome)


_NOBODY = Entry(("", 0), b"", ())
"""In place of an entry that nobody is to have."""
