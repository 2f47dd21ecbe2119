"""Reports of the schedule: what ps 0 has to know to close steps without workers that are gone."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from psync.closures.queue import ClosureQueue

SETTLE_S = 0.005
"""A worker or closure that is gone for less is not missed, one that is new waits no longer."""

RETURN_S = 1.0
"""For so long a worker is not missed whose session was ended with those of all others."""


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """One state of the schedule."""

    workers: tuple[tuple[str, int], ...]  # (name, incarnation) of those that take part
    missing: tuple[str, ...]  # names of the others
    queued: bool
    in_flight: tuple[tuple[int, str], ...]  # (closure, worker); empty while closures are queued

    def is_urgent_after(self, earlier: ScheduleState) -> bool:
        """Whether a worker has come, or the queue has filled."""
        if self.queued and not earlier.queued:
            return True
        return not set(self.workers) <= set(earlier.workers)

    def adds_to(self, earlier: ScheduleState) -> bool:
        """Whether there is a closure that ``earlier`` does not know of."""
        return not earlier.queued and not set(self.in_flight) <= set(earlier.in_flight)


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
        self._idle: AbstractSet[str] = set()
        self._returning: dict[str, int] = {}  # who took part when all sessions were ended
        self._returned_by: float | None = None  # then they are missed; None: not asked since
        self._members_changed = False
        self._reported: ScheduleState | None = None
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
            idle = dispatcher.without_work()
            if idle is not self._idle:
                self._members_changed |= idle != self._idle
                self._idle = idle
        if self._exhausted and not dispatcher.num_queued and not dispatcher.num_in_flight:
            self._exhausted.clear()
            self._members_changed = True
        if self._members_changed or self._reported is None:
            return True
        if self._is_queued():
            return not self._reported.queued
        return self._deadline is None  # else it is looked at then

    def decide(self, now: float) -> ScheduleState | None:
        """Return the state that is to be reported now, or None.

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
        if self._reported is not None and not state.is_urgent_after(self._reported):
            since = self._reported_at if state.adds_to(self._reported) else now
            due = since + SETTLE_S
            self._deadline = due if self._deadline is None else min(due, self._deadline)
            if now < self._deadline:
                return None
        self._deadline = None
        self._reported, self._reported_at = state, now
        return state

    def next_deadline(self) -> float | None:
        """Return the time at which ``decide`` is to be asked again, if nothing happens; or None."""
        if self._deadline is None and self._returning:
            return self._returned_by
        return self._deadline

    def _is_queued(self) -> bool:
        dispatcher = self._queue.dispatcher
        return dispatcher.num_queued > 0 or dispatcher.num_in_flight > len(self._joined)

    def _state(self) -> ScheduleState:
        here = self._here(self._exhausted | self._idle) or self._here(set())
        here += self._returning.items()  # who has joined anew is none of these
        present = {worker for worker, _ in here}
        missing = tuple(worker for worker in self._workers if worker not in present)
        queued = self._is_queued()
        held = [] if queued else self._queue.in_flight()
        in_flight = tuple((c.number_on_ps, worker) for worker, c in held if not c.in_collective)
        return ScheduleState(tuple(here), missing, queued, in_flight)

    def _here(self, absent: AbstractSet[str]) -> list[tuple[str, int]]:
        return [
            (worker, self._joined[worker])
            for worker in self._workers
            if worker in self._joined and worker not in absent
        ]
