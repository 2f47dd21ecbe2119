"""What happens in a cluster: events for its program, notes for people, and reports of silence.

``Events`` has rollbacks and failovers, in order. The watchdog reports stuck work when no closure
has ended for too long: a program that hangs in a cluster looks the same from outside whatever the
reason: a step that loops, a task that waits for a token which is never published, a ps that is
away. It writes down which task holds what since when, and the stacks of the process. It ends
nothing. It looks ten times within its timeout at the count of ended closures, so it costs nothing
while closures run.

Source: TensorFlow's ``WatchDog``. Different: an idle coordinator is no reason for a report, there
only the end of a closure is a sign of life.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from psync.closures.closure import Closure, State
from psync.closures.queue import ClosureQueue
from psync.errors import other_loop
from psync.net.task_reports import report_text
from psync.serialization.payloads import text_of

logger = logging.getLogger(__name__)

KEPT_NOTES = 100
"""The newest are kept: what a status shows as recent."""


@dataclass(frozen=True, slots=True)
class RollbackEvent:
    """A ps was lost, and all ps tasks returned to a checkpoint.

    Attributes:
        lost: Names of the ps tasks whose contents were lost.
        timeline: Number of the timeline that began with it, from 1.
        from_step: Number of updates of the most used optimizer before the loss, as far as the
            remaining ps tasks knew; ``to_step`` if none remained.
        to_step: Number of its updates in the checkpoint.
        closures: Ids (``RemoteValue.closure_id``), ascending, of closures that had succeeded and
            some of whose updates are not in the checkpoint. They run again only if the program
            calls ``coordinator.reschedule(event)``. Not included are data shards of
            ``distribute_once``, which are pending again, and closures that had not ended: these run
            again, and their updates count once.
        seconds: Seconds from noticing the loss until training continued.
        updates: Number of undone updates of these closures (pushes, assigns, metrics). Updates of
            the program itself since the checkpoint are undone as well, and not counted.
    """

    lost: tuple[str, ...]
    timeline: int
    from_step: int
    to_step: int
    closures: tuple[int, ...]
    seconds: float
    updates: int = 0

    def __str__(self) -> str:
        """Say what was lost, for people."""
        began = f"from step {self.from_step} " if self.from_step > self.to_step else ""
        return (
            f"{', '.join(self.lost)} lost: {began}back to step {self.to_step}; undone: "
            f"{_count(self.updates, 'update')} of {_count(len(self.closures), 'closure')}"
        )


@dataclass(frozen=True, slots=True)
class FailoverEvent:
    """Ps tasks were lost, and their backups serve in their place. Nothing is undone.

    Attributes:
        lost: Names of the lost ps tasks.
        served_by: Names of the tasks in whose processes they are served now, one for each.
        seconds: Seconds from noticing the loss until training continued.
    """

    lost: tuple[str, ...]
    served_by: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Say what was lost, for people."""
        return f"{', '.join(self.lost)} lost: served by {', '.join(self.served_by)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


Event = RollbackEvent | FailoverEvent


class Note(NamedTuple):
    """Something that happened to a task, for people who look at the cluster."""

    at: float  # loop time
    kind: str  # "joined", "lost", "left", "error", "rollback", …: one word, or two
    text: str


class Events:
    """The events of one coordinator, all of which are kept: there are few.

    Attributes:
        notes: The newest notes, oldest first.
    """

    def __init__(self) -> None:
        self.notes: deque[Note] = deque(maxlen=KEPT_NOTES)
        self._events: list[Event] = []
        self._news = asyncio.Event()  # another one for each event
        self._closed = False
        self._loop = asyncio._get_running_loop()  # None: only in tests of rules

    def emit(self, event: Event) -> None:
        """Note an event, and tell whoever waits for the next one."""
        self._events.append(event)
        self.note("rollback" if isinstance(event, RollbackEvent) else "failover", str(event))
        self._wake()

    @property
    def rollbacks(self) -> list[RollbackEvent]:
        """The rollbacks so far, in order."""
        return [event for event in self._events if isinstance(event, RollbackEvent)]

    def note(self, kind: str, text: str) -> None:
        """Note something that is shown to people, and told to no program."""
        self.notes.append(Note(asyncio.get_running_loop().time(), kind, text))

    def close(self) -> None:
        """There are no further ones: streams end after the last."""
        self._closed = True
        self._wake()

    async def stream(self) -> AsyncIterator[Event]:
        """Yield every event, from the first on, until the coordinator is closed."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise other_loop("events")
        at = 0
        while True:
            while at < len(self._events):
                at += 1
                yield self._events[at - 1]
            if self._closed:
                return
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


LOOKS = 10
"""How often it is looked within the timeout; a report is that much late at most."""

CLOSURE_LOOKS = 8
"""The same of a closure's own timeout."""

LONGEST_LOOK_S = 30.0
"""Between two looks at closures: workers count what they wait for a minute after each question."""

ANSWER_S = 1.0
"""A worker whose loop is free says sooner how long it has waited."""

Waits = Callable[[Collection[str], float], Awaitable[Mapping[str, tuple[float, float]]]]
"""Asks these workers how long they have waited for other workers: since when they count, seconds.
Those that do not answer within so many seconds are left out."""

MAX_LISTED = 20
"""Workers, and names of steps, that a report lists."""


async def watch(
    timeout_s: float,
    progress: Callable[[], int | None],
    describe: Callable[[], Iterable[str]],
    on_stall: Callable[[str], object] | None,
) -> None:
    """Report when ``progress()`` has been the same number for ``timeout_s``.

    After that the time begins anew, so a silence that lasts is told of again and again.

    Args:
        timeout_s: Seconds.
        progress: Number of closures that have ended; None while there is nothing to do.
        describe: Returns lines of the report.
        on_stall: Is given each report, beside the log. What it raises is logged.

    Cancellation: Safe; it ends in no other way.
    """
    loop = asyncio.get_running_loop()
    pause = timeout_s / LOOKS
    last, since, looked = progress(), loop.time(), loop.time()
    while True:
        await asyncio.sleep(pause)
        now = loop.time()
        late, looked = now - looked > 2 * pause, now
        ended = progress()
        if ended is None or ended != last:
            last, since = ended, now
        elif now - since >= timeout_s and not late:  # late: first hear what came in meanwhile
            try:
                text = report_text(
                    f"by the watchdog: no closure has ended for {now - since:.0f} s while there is "
                    "work", [describe],
                )  # fmt: skip
                logger.warning("%s", text)
                if on_stall is not None:
                    on_stall(text)
            except Exception:
                logger.exception("the watchdog could not report")
            since = now


async def watch_closures(
    queue: ClosureQueue, timeout_s: float, waits: Waits, give_up: Callable[[str, Closure], None]
) -> None:
    """Call ``give_up(worker, closure)`` where the same closure is the oldest for ``timeout_s``.

    A step may compute for minutes on its worker's loop, which then answers nothing: a silent worker
    is not taken for dead. Only the program knows how long its steps may take. Time in which a step
    waits for other workers is theirs, and does not count; nor does time in which this process
    itself stood still, for results may be unread.

    Args:
        queue: Knows what each worker holds; the oldest is the one that runs.
        timeout_s: Seconds that a closure may take.
        waits: Asks workers. One that does not answer computes, or is stopped.
        give_up: Ends the connection to the worker.

    Cancellation: Safe; it ends in no other way.
    """
    loop = asyncio.get_running_loop()
    pause = min(timeout_s / CLOSURE_LOOKS, LONGEST_LOOK_S)
    # For how long each run was seen as the oldest, and what its worker has answered last.
    seen: dict[tuple[str, Closure, int], tuple[float, tuple[float, float] | None]] = {}
    looked = loop.time()
    while True:
        await asyncio.sleep(pause)
        answers = await waits(queue.dispatcher.oldest(), min(pause, ANSWER_S))
        passed, looked = loop.time() - looked, loop.time()
        if passed > 3 * pause:
            passed = pause
        before, seen = seen, {}
        for worker, closure in queue.dispatcher.oldest().items():
            if closure.in_collective:
                continue  # it waits for the replicas of other workers
            run = worker, closure, closure.times_back
            seconds, last = before.get(run, (-passed, None))
            answer = answers.get(worker, last)
            if last is not None and answer is not None and answer[0] == last[0]:
                seconds -= answer[1] - last[1]
            seen[run] = seconds + passed, answer
        for run in [run for run, (seconds, _) in seen.items() if seconds >= timeout_s]:
            del seen[run]
            give_up(*run[:2])


def describe_closures(queue: ClosureQueue, now: float) -> list[str]:
    """Say what each worker holds and since when, and what waits.

    Args:
        queue: Of the coordinator. The payload of closures that were sent has ``sent_at``, in
            seconds of the same clock as ``now``.
        now: Loop time.
    """
    counts = queue.statistics()
    lines = [
        f"closures: {counts.in_flight} in flight, {counts.queued} queued, "
        f"{counts.waiting} wait for inputs; {counts.finished} finished, {counts.failed} failed, "
        f"{counts.cancelled} cancelled"
    ]
    held = queue.dispatcher.held()
    lines += [
        f"  {worker}: {_since(closures[0], now)}"
        + (f"; {len(closures) - 1} more are there" if len(closures) > 1 else "")
        for worker, closures in held[:MAX_LISTED]
    ]
    if len(held) > MAX_LISTED:
        lines.append(f"  and {len(held) - MAX_LISTED} other workers")
    kinds = {State.QUEUED: "queued", State.WAITING: "waits for inputs"}
    waiting = Counter((c.state, c.name) for c in queue.open.values() if c.state in kinds)
    lines += [
        f"  {kinds[state]}: {number} of {name or 'a step without a name'}"
        for (state, name), number in waiting.most_common(MAX_LISTED)
    ]
    for error in queue.pending_errors[:MAX_LISTED]:
        lines.append(f"  an error is to be raised: {type(error).__name__}: {text_of(error)}")
    return lines


def _since(closure: Closure, now: float) -> str:
    sent_at = getattr(closure.payload, "sent_at", None)
    asked = ", asked to stop" if closure.state is State.CANCELLING else ""
    return f"{closure}" + ("" if sent_at is None else f", sent {now - sent_at:.1f} s ago") + asked
