"""Membership: which workers are alive, fenced, set aside, and reported to ps 0.

``Membership`` is the coordinator's view. Its inputs are connections made and ended; it returns the
fence that follows from that.

**Incarnations** distinguish a worker from its earlier runs. On every connection it is assigned
another one, above the last. So a worker whose connection broke and came back is a new client too:
its closures run elsewhere by then.

**A worker** is lost as soon as its connection is: its closures are cheap to run again. Before that,
every ps is told to refuse what the lost incarnation may still send.

**A worker that leaves** says so before its connection ends. It is not waited for, and is taken back
if it returns. Its incarnation is fenced like a lost one's, since messages may be under way.

**Workers may be added** while training goes on. A name is never forgotten, so that the
next worker of that name gets incarnations above all earlier ones.

**A ps** holds state, so a broken connection says little: whether it is lost, finds its link
(``client.link``). A ps that connects is sent the fences of all workers that were lost before, by
``chief.links``.

Source: TensorFlow's ``ClusterCoordinator`` and its ``WorkerPreemptionHandler``. Different: every
task recovers by itself, a lost task is known by its connection and incarnation and not by the text
of an error, and a ps may return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from psync.closures.queue import ClosureQueue
from psync.errors import LocalProtocolError, check_fits
from psync.wire.messages import Fence, ReportSchedule

BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 5.0
BACKOFF_FACTOR = 1.6


class TaskState(Enum):
    CONNECTING = "connecting"  # was never here
    ALIVE = "alive"
    LOST = "lost"  # its connection; it may return
    LEFT = "left"  # in order, or it is not wanted any more: nobody waits for it


@dataclass(slots=True)
class _Worker:
    """What is known of one worker."""

    address: str
    state: TaskState = TaskState.CONNECTING
    incarnation: int = -1  # last assigned; -1 before the first
    fenced_below: int = 0  # incarnations that are refused; 0: none was lost


class Membership:
    """The workers of one cluster. Names are those of the cluster, as in ``/job:worker/task:0``.

    Args:
        workers: Address of every worker, by its name.
    """

    def __init__(self, workers: Mapping[str, str]) -> None:
        self._workers = {name: _Worker(address) for name, address in workers.items()}

    def add_worker(self, worker: str, address: str) -> None:
        """A worker belongs to the cluster from now on: one that is new, or that has left.

        Raises:
            LocalProtocolError: If it belongs to it already.
        """
        if worker not in self._workers:
            self._workers[worker] = _Worker(address)
        else:
            self._move(worker, TaskState.CONNECTING, TaskState.LEFT).address = address

    def connected(self, worker: str, lowest: int) -> None:
        """A connection to a worker was made: it is assigned another incarnation, at least this.

        Raises:
            LocalProtocolError: If it is connected already.
        """
        before = TaskState.CONNECTING, TaskState.LOST, TaskState.LEFT
        record = self._move(worker, TaskState.ALIVE, *before)
        record.incarnation = max(lowest, record.incarnation + 1)

    def disconnected(self, worker: str) -> Fence:
        """The connection to a worker ended: it is lost, and ps tasks are told what is returned.

        Raises:
            LocalProtocolError: If it is not connected.
        """
        return self._gone(worker, self._move(worker, TaskState.LOST, TaskState.ALIVE))

    def left(self, worker: str) -> Fence | None:
        """A worker has left in order, or is not wanted any more."""
        record = self._workers[worker]
        was_alive, record.state = record.state is TaskState.ALIVE, TaskState.LEFT
        return self._gone(worker, record) if was_alive else None

    def _gone(self, worker: str, record: _Worker) -> Fence:
        """Fence a worker whose connection has ended."""
        record.fenced_below = record.incarnation + 1
        return Fence(worker, record.fenced_below)

    def state(self, worker: str) -> TaskState:
        """Return the state of a worker of the cluster."""
        return self._workers[worker].state

    def incarnation(self, worker: str) -> int:
        """Return the incarnation that a worker was last assigned; -1 if it never connected."""
        return self._workers[worker].incarnation

    def fences(self) -> list[tuple[str, int]]:
        """Return (worker, lowest incarnation that may be served) of each that was lost."""
        workers = self._workers.items()
        return [(name, each.fenced_below) for name, each in workers if each.fenced_below]

    def missing(self) -> list[tuple[str, str]]:
        """Return (name, address) of every worker that is waited for."""
        workers, settled = self._workers.items(), (TaskState.ALIVE, TaskState.LEFT)
        return [(name, each.address) for name, each in workers if each.state not in settled]

    def gone(self) -> list[str]:
        """Return the names of the workers that have left and are not back."""
        return [name for name, each in self._workers.items() if each.state is TaskState.LEFT]

    def _move(self, worker: str, state: TaskState, *before: TaskState) -> _Worker:
        """Change the state of a worker, which has to be in one of some others."""
        record = self._workers[worker]
        if record.state not in before:
            raise LocalProtocolError(
                f"{worker} cannot become {state.value}: it is {record.state.value}"
            )
        record.state = state
        return record


def backoff(attempt: int, uniform: float) -> float:
    """Return how long to wait before connecting again, in seconds: exponential, with jitter.

    The second half of the wait is random, so that tasks which lost the same peer spread out.

    Args:
        attempt: Number of attempts that have failed before, from 0.
        uniform: A random number in [0, 1).

    Returns:
        Between 0.02 and 0.04 s at first, a factor of 1.6 more each time, and at most 5 s.
    """
    # Far beyond the cap already; a power of any attempt would overflow.
    longest = min(BACKOFF_MAX_S, 2 * BACKOFF_MIN_S * BACKOFF_FACTOR ** min(attempt, 64))
    return longest * (1 + uniform) / 2


LIMIT = 3
WINDOW_S = 60.0
FIRST_S = 30.0
LONGEST_S = 300.0
ALONE_S = 1.0
"""Pause after a loss while no worker takes part: less would be a busy loop if each attach fails."""


@dataclass(slots=True)
class _Record:
    """What is known of one worker."""

    losses: deque[float] = field(default_factory=deque)  # those within the window, oldest first
    last_lost: float = 0.0
    pause_s: float = 0.0  # how long it was set aside last; 0: it never was, or is forgiven
    until: float = 0.0  # time until which it is set aside


class Flapping:
    """Counts losses. Times are seconds on one clock.

    A worker whose machine has no memory left, say, is lost with each closure that it gets, and
    connects again at once: it is of no use, and each closure that it had runs late. So one that is
    lost more often than ``limit`` times within a minute is set aside for half a minute, and each
    time that this is not enough for twice as long, up to five minutes. Its count is reset when it
    comes back; the time aside does, once it has not been lost for as long as it was set aside last
    and a minute.

    The last worker is never set aside: while no worker takes part, those that are set aside may
    come back, each a second after it was lost. Otherwise workers that die alternately would be set
    aside all at once, and training would stand still although some of them live.

    A worker that leaves in order is not lost, nor is one whose session the coordinator ends.

    Source: Kubernetes' CrashLoopBackOff, whose pauses double up to five minutes.

    Args:
        limit: Losses within the window that are borne; the next one sets the worker aside. None:
            none is ever set aside.

    Raises:
        ConfigurationError: If the limit is below 0.

    Attributes:
        is_anyone_there: Returns whether a worker takes part; nobody is set aside for long if not.
    """

    def __init__(self, limit: int | None = LIMIT) -> None:
        fits = limit is None or limit >= 0
        check_fits(fits, "max_flaps: expected at least 0 or None", limit)
        self._limit = limit
        self.is_anyone_there: Callable[[], bool] = lambda: True
        self._records: dict[str, _Record] = {}

    def lost(self, worker: str, now: float) -> float:
        """Count a loss; return for how many seconds the worker is set aside, mostly 0."""
        if self._limit is None:
            return 0.0
        record = self._records.setdefault(worker, _Record())
        well_since = max(record.until, record.last_lost)
        if now - well_since >= record.pause_s + WINDOW_S:
            record.pause_s = 0.0
        record.last_lost = now
        losses = record.losses
        losses.append(now)
        while now - losses[0] >= WINDOW_S:
            losses.popleft()
        if len(losses) <= self._limit:
            return 0.0
        losses.clear()
        record.pause_s = min(2 * record.pause_s or FIRST_S, LONGEST_S)
        record.until = now + record.pause_s
        return record.pause_s

    def remaining(self, worker: str, now: float) -> float:
        """Return for how many seconds more a worker is set aside; 0 if it is not."""
        record = self._records.get(worker)
        if record is None:
            return 0.0
        until = record.until
        if not self.is_anyone_there():
            until = min(until, record.last_lost + ALONE_S)
        return max(0.0, until - now)

    def joined(self, worker: str, now: float) -> None:
        """A worker takes part, perhaps before its time is over."""
        if (record := self._records.get(worker)) is not None:
            record.until = min(record.until, now)

    def set_aside(self, now: float) -> list[tuple[str, float]]:
        """Return (worker, seconds left) of all that are set aside, whose time ends first first."""
        left = [(worker, self.remaining(worker, now)) for worker in self._records]
        return sorted([pair for pair in left if pair[1] > 0], key=lambda pair: pair[1])

    def forget(self, worker: str) -> None:
        """Another one may bear this name next."""
        self._records.pop(worker, None)


# --- reports of the schedule ---------------------------------------------------------------------

SETTLE_S = 0.005
"""A worker or closure that is gone for less is not missed, one that is new waits no longer."""

RETURN_S = 1.0
"""For so long a worker is not missed whose session was ended with those of all others."""


class ScheduleReports:
    """Decides what is reported, and when. While the queue is full it is not looked at closer.

    ps 0 must know for which workers a synchronous step, or a worker at a staleness bound, still
    waits. Reports are whole states with a version, of which the newest counts, so that one may be
    lost or skipped.

    - **Who takes part**: the workers that have joined, less those that have no work because their
      data ended: the dispatcher keeps what is queued for others, or their last closure ended with
      EndOfData. One of the latter is back with its next value. All are back when nothing is left to
      do, or when no other worker would be left.
    - **Queued**: there are closures that no worker has begun, so each worker has work, or is about
      to get some. They are in the queue, or held behind others: more are in flight than there are
      workers.
    - **In flight**: where nothing is queued, what runs where. A closure that waits for the value of
      another one counts as neither. It cannot begin before one of these has ended, and to wait for
      it could be a deadlock, where that one waits for a synchronous step. Nor does one that waits
      for a gang to end, or a replica of a gang that waits in a collective for another one.

    A worker that comes and a queue that fills are news that is due at once. More work is due at
    once, too, if the last report is older than ``SETTLE_S``: closures that a program schedules one
    by one are not worth a report each. News of less is not due before ``SETTLE_S`` has passed: such
    a program leaves a worker idle for a moment, and in that moment its absence must not end a step,
    nor let the others run ahead.

    When a ps is lost all worker sessions are ended and begun again at once. For ``RETURN_S`` the
    members are reported as before: otherwise steps would be closed, as partial ones, without
    workers that never died.

    Args:
        workers: Names of all workers of the cluster; others may join.
        queue: Knows what is left to do.
    """

    def __init__(self, workers: Iterable[str], queue: ClosureQueue) -> None:
        self._workers = dict.fromkeys(workers)
        self._queue = queue
        self._joined: dict[str, int] = {}  # incarnation of each
        self._exhausted: set[str] = set()  # of these, whose last closure met the end of its data
        # Of these, whose data ended: they may run nothing else.
        self._idle: set[str] = set()
        self._returning: dict[str, int] = {}  # who took part when all sessions were ended
        self._returned_by: float | None = None  # then they are missed; None: not asked since
        self._members_changed = False
        self._version = 0  # of the last report
        self._reported: ReportSchedule | None = None
        self._reported_at = 0.0
        self._deadline: float | None = None  # of news that is not due yet

    # What happens.

    def worker_joined(self, worker: str, incarnation: int) -> None:
        """A worker is ready for closures, with all of its data before it."""
        self._workers[worker] = None  # it may have been added
        self._joined[worker] = incarnation
        self._returning.pop(worker, None)
        self._members_changed = True

    def worker_lost(self, worker: str) -> None:
        """A worker is gone."""
        del self._joined[worker]
        self._exhausted.discard(worker)
        self._members_changed = True
        self._check_exhausted()

    def sessions_end(self) -> None:
        """All workers are about to be lost, and will be back at once."""
        self._returning |= dict(self._here(self._exhausted | self._idle))
        self._returned_by = None

    def out_of_data(self, worker: str) -> None:
        """A closure met the end of this worker's data, and ended with that."""
        if worker not in self._exhausted:
            self._exhausted.add(worker)
            self._members_changed = True
            self._check_exhausted()

    def has_data(self, worker: str) -> None:
        """A closure of this worker has a value."""
        if worker in self._exhausted:
            self._exhausted.discard(worker)
            self._members_changed = True

    def _check_exhausted(self) -> None:
        if self._exhausted.issuperset(self._joined):
            self._exhausted.clear()

    def tell_all(self) -> None:
        """Report everything again: ps 0 knows nothing of what it was told."""
        self._reported = None

    # What follows.

    def look(self) -> bool:
        """Return whether ``decide`` may have news. To be called when the queue has changed."""
        dispatcher = self._queue.dispatcher
        if dispatcher.ended or self._idle:
            if (idle := dispatcher.without_work()) != self._idle:
                self._members_changed, self._idle = True, idle
        if self._exhausted and not dispatcher.num_queued and not dispatcher.num_in_flight:
            self._exhausted.clear()
            self._members_changed = True
        if self._members_changed or self._reported is None:
            return True
        if self._is_queued():
            return not self._reported.queued
        return self._deadline is None  # else it is looked at then

    def decide(self, now: float) -> ReportSchedule | None:
        """Return what is to be reported now, or None.

        It is taken for reported from then on.

        Args:
            now: The time, in seconds, on any clock.
        """
        self._members_changed = False
        if self._returning:
            if self._returned_by is None:
                self._returned_by = now + RETURN_S
            if now >= self._returned_by:
                self._returning.clear()
        state = self._state()
        if state == self._reported:
            self._deadline = None
            return None
        before = self._reported
        # A worker that has come, and a queue that has filled, are urgent.
        if before is not None and not (
            (state.queued and not before.queued) or set(state.workers) - set(before.workers)
        ):
            adds = not before.queued and not set(state.in_flight) <= set(before.in_flight)
            since = self._reported_at if adds else now
            due = since + SETTLE_S
            self._deadline = due if self._deadline is None else min(due, self._deadline)
            if now < self._deadline:
                return None
        self._deadline = None
        self._version += 1
        self._reported, self._reported_at = replace(state, version=self._version), now
        return self._reported

    def next_deadline(self) -> float | None:
        """Return the time at which ``decide`` is to be asked again, if nothing happens; or None."""
        if self._deadline is None and self._returning:
            return self._returned_by
        return self._deadline

    def _is_queued(self) -> bool:
        dispatcher = self._queue.dispatcher
        return dispatcher.num_queued > 0 or dispatcher.num_in_flight > len(self._joined)

    def _state(self) -> ReportSchedule:
        here = self._here(self._exhausted | self._idle) or self._here(set())
        here += self._returning.items()  # who has joined anew is none of these
        present = {worker for worker, _ in here}
        missing = [worker for worker in self._workers if worker not in present]
        queued = self._is_queued()
        held = [] if queued else self._queue.in_flight()
        in_flight = [(c.number_on_ps, worker) for worker, c in held if not c.in_collective]
        return ReportSchedule(self._version, here, missing, queued, in_flight)

    def _here(self, absent: set[str]) -> list[tuple[str, int]]:
        joined = self._joined
        here = [worker for worker in self._workers if worker in joined and worker not in absent]
        return [(worker, joined[worker]) for worker in here]
