"""Dispatch of queued closures to workers: order, prefetch on workers, give-back.

``ClosureOrder`` keeps the queued closures in the order in which they were scheduled. ``Dispatcher``
has them and knows what each living worker holds. It decides where closures run, and nothing about
how they end; that is ``queue``.

**Prefetch.** An idle worker gets one closure, always. Further ones are sent ahead to a worker only
while more are queued than there are workers: as many as take ``TARGET_AHEAD_S`` to run at the pace
that the worker measured, at least 1 and at most ``MAX_AHEAD``, with at most ``MAX_AHEAD_BYTES`` of
inline arguments (a worker whose step computes on its event loop does not read). A worker is filled
up again when half of that is gone, so that messages carry many. It runs what it holds one by
one, in the order sent, and it alone knows which one has started.

**Nothing waits behind a closure that waits for other workers**, for a token say:

- While a worker is idle, the queue is empty, and every worker that may hold closures it has not
  started has been asked for the oldest half of them, rounded up: for one at least.
- A closure that waits for others awaits, so its worker's loop turns and answers. One that computes
  on the loop delays the answer, but it waits for no other closure and ends by itself.
- What comes back goes to the idle worker. What was asked for and does not come back had started:
  it runs, or its result is on the way. It is never asked for again, and the next half is, at once.
  So the asking ends, and when it has, a worker is idle only if every closure anywhere has started.
- While no worker is idle, each runs a closure, and no policy could start another one.

So there always run as many closures as there are workers, or all there are: what closures need that
wait for *any* other. One that waits for a certain later closure, other than through a RemoteValue
argument, is promised nothing (nor is it in TensorFlow). The oldest are asked for, and not the most
loaded worker alone, because the order should hold and because a silent worker must not keep the
others from being asked. A worker may also give back unasked, if its step has been waiting for
long; it is sent nothing ahead until it next reports how a closure ended.

**A worker that leaves** is sent nothing more. It gives back what it has not started, without being
asked, and reports what it runs.

**A worker whose data ended** gets no further closure that needs them (``Closure.needs``), as long
as another worker has all that this closure needs, or is away and will be back with it. Such a
closure waits for that worker, and later ones overtake it. When there is no such worker, it may run
anywhere, and meets the end itself. For an idle worker, others are asked only for closures that it
may run: they would go back and forth. Workers on which the same data ended may run the same, so
all this is decided once for all of them.

**A closure that was lost with its worker runs alone** from then on: sent to an idle worker, with
nothing behind it. So from the second loss on there is no doubt which closure was running.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from psync.closures.closure import NO_DATA, Closure, Needs, State, move
from psync.errors import RemoteProtocolError


class ClosureOrder:
    """Closures that wait for nothing but a worker, in one order for all that need the same data."""

    def __init__(self) -> None:
        self.closures: dict[int, Closure] = {}  # by id, in no order
        # Heaps; what is not queued any more goes when first.
        self._ids: defaultdict[Needs, list[int]] = defaultdict(list)

    def add(self, closure: Closure) -> None:
        """Queue a closure at its place, before those with higher ids."""
        self.closures[closure.id] = closure
        heapq.heappush(self._ids[closure.needs], closure.id)

    def discard(self, closure: Closure) -> None:
        """Take a queued closure out, wherever it stands."""
        del self.closures[closure.id]
        if not self.closures:
            self.closures.clear()  # of its table, too, which is as large as the longest queue was
            self._ids.clear()

    def in_order(self, barred: Collection[Needs] = ()) -> Iterator[Closure]:
        """Yield the queued closures by id, without those that need what is barred.

        Whoever asks for the next one has taken the last one out.
        """
        queued = self.closures
        heaps = [*zip(self._ids.values(), self._ids, strict=True)]
        if barred:
            heaps = [heap for heap in heaps if heap[1] not in barred]
        while heaps:
            (ids, needs), *others = heaps  # as a rule there are none
            if others:
                ids, needs = min(heaps)
            if ids[0] in queued:
                yield queued[ids[0]]
            heapq.heappop(ids)
            if not ids:
                heaps.remove((ids, needs))
                self._ids.pop(needs, None)

    def needs(self) -> list[Needs]:
        """Return the different needs of queued closures."""
        every = list(self._ids)
        return [n for n in every if any(self.in_order([other for other in every if other != n]))]


TARGET_AHEAD_S = 0.05  # several closures that pull and push, soon done by another worker
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 10
PACE_WEIGHT = 0.25  # of the newest closure, in a worker's mean seconds per closure


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send these closures to the worker, to be run one by one in this order."""

    worker: str
    closures: tuple[Closure, ...]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Ask the worker to return those of these closures that it has not started, perhaps none."""

    worker: str
    ids: tuple[int, ...]


DispatchAction: TypeAlias = Dispatch | GiveBack


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One living worker, at one moment."""

    worker: str
    in_flight: int  # closures it holds
    finished: int  # closures it has finished since it joined
    ahead: int  # closures it may hold beyond the running one
    mean_s: float | None  # seconds per closure; None before its first result


@dataclass(slots=True, eq=False)
class _Worker:
    """What is known of one living worker."""

    name: str
    ended: Needs = NO_DATA  # what has ended there: workers where that is the same may run the same
    held: dict[int, Closure] = field(default_factory=dict)  # by id, in the order sent
    held_bytes: int = 0  # inline bytes of all of them
    ahead: int = 1  # closures it may hold beyond the running one
    mean_s: float | None = None
    asked: tuple[int, ...] = ()  # ids asked back and not answered for
    sated: bool = False  # gave back and has reported no end since: gets nothing ahead
    leaving: bool = False  # gets nothing any more
    finished: int = 0

    def take(self, ids: Iterable[int], verb: str) -> list[Closure]:
        """Remove and return the closures with these ids: all, or none and raise."""
        held = self.held
        closures: list[Closure] = []
        for closure_id in ids:
            closure = held.pop(closure_id, None)
            if closure is None:
                # Their order among the others is lost, but such a worker is dropped next.
                held.update((taken.id, taken) for taken in closures)
                raise RemoteProtocolError(
                    f"{self.name} {verb} closure {closure_id}, which it does not hold"
                )
            closures.append(closure)
        for closure in closures:
            self.held_bytes -= closure.inline_bytes
        return closures

    def unstarted(self) -> list[Closure]:
        """Return what it may not have started, oldest first."""
        behind_first = islice(self.held.values(), 1, None)
        return [closure for closure in behind_first if not closure.known_started]


def _decrease(counter: Counter[Needs], key: Needs) -> None:
    """Count one less, and forget what there is none of."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class Dispatcher:
    """The queued closures, the living workers and what they hold."""

    def __init__(self) -> None:
        self.queued = ClosureOrder()
        self._workers: dict[str, _Worker] = {}
        # By what has ended there: who holds nothing, idle for longest first; and how many workers
        # may get more, or will be back.
        self._idle: dict[Needs, deque[_Worker]] = {NO_DATA: deque()}
        self._takers: Counter[Needs] = Counter()
        self._spent: set[_Worker] = set()  # who holds nothing but what needs ended data
        self._roomy: dict[_Worker, None] = {}  # busy, and at least half of what is ahead is free
        self._loaded: dict[_Worker, None] = {}  # may hold unstarted closures and owe no answer
        self._spared: dict[_Worker, None] = {}  # the same, but none with one of these needs:
        self._spared_by: set[Needs] = set()
        # What closures in flight need, and how many of them.
        self._kinds: Counter[Needs] = Counter()
        # What has ended, and after how many batches, on each worker where something has.
        self.ended: dict[str, Mapping[tuple[str, int], int]] = {}
        self._away: dict[str, Needs] = {}  # who is lost and will be back, and what has ended there
        self.num_in_flight = 0  # closures that workers hold

    # --- the queue ---

    @property
    def num_queued(self) -> int:
        """Closures that no worker holds and that wait for nothing but a worker."""
        return len(self.queued.closures)

    # --- workers ---

    def join(self, worker: str) -> None:
        """A worker is ready for closures."""
        assert worker not in self._workers, f"{worker} joined twice"
        self.will_not_return(worker)
        record = self._workers[worker] = _Worker(worker)
        self._enter(record, NO_DATA)

    def retire(self, worker: str) -> None:
        """A worker is about to leave: send it nothing more. What it holds it reports as ever."""
        record = self._workers[worker]
        if not record.leaving:
            self._exit(record)
            record.leaving = True
            self._enter(record, record.ended)

    def leave(self, worker: str, *, returns: bool = False) -> list[Closure]:
        """A worker is gone, and ``returns`` or not. Return what it held, in the order sent."""
        record = self._workers.pop(worker)
        self._exit(record)
        self.ended.pop(worker, None)
        if returns:
            self._away[worker] = record.ended
            self._takers[record.ended] += 1
        closures = list(record.held.values())
        record.held, record.leaving, record.ended = {}, True, NO_DATA
        self._released(record, closures)
        return closures

    # --- their data ---

    def out_of(self, worker: str, data: tuple[str, int], batches: int) -> None:
        """A worker has no further batch of this data; it had so many. Earlier passes are over."""
        others = self.ended.get(worker, {}).items()
        kept = {each: had for each, had in others if each[0] != data[0]}
        self.ended[worker] = {**kept, data: batches}
        self._regroup(worker)

    def batches(self, data: tuple[str, int]) -> dict[str, int]:
        """Return how many batches each worker had on which this data ended."""
        return {worker: had[data] for worker, had in self.ended.items() if data in had}

    def forget(self, uid: str | None = None) -> None:
        """Data begin anew on all workers, or, if ``uid`` is given, there are no such data now."""
        for worker, had in list(self.ended.items()):
            self.ended[worker] = {d: n for d, n in had.items() if uid not in (None, d[0])}
            if not self.ended[worker]:
                del self.ended[worker]
            self._regroup(worker)
        if uid is None:
            for worker in list(self._away):
                self.will_not_return(worker)
                self._away[worker] = NO_DATA
                self._takers[NO_DATA] += 1

    def will_not_return(self, worker: str) -> None:
        """A worker that is away is not expected any more."""
        if (ended := self._away.pop(worker, None)) is not None:
            _decrease(self._takers, ended)

    def has_taker(self, needs: Needs) -> bool:
        """Whether a worker has all of this data, or will be back with it."""
        return any(needs.isdisjoint(ended) for ended in self._takers)

    def _barred(self, ended: Needs, kinds: Iterable[Needs]) -> list[Needs]:
        """Return those of these needs that workers leave to others, for they lack the data."""
        return [n for n in kinds if not n.isdisjoint(ended) and self.has_taker(n)]

    def without_work(self) -> set[str]:
        """Return the workers that have nothing to do, for others use data that ended on them."""
        queued = self.queued.needs()
        idle = {
            ended
            for ended in {record.ended for record in self._spent}
            if not all(n.isdisjoint(ended) for n in (*self._kinds, *queued))
            and len(self._barred(ended, queued)) == len(queued)
        }
        return {record.name for record in self._spent if record.ended in idle}

    def _regroup(self, worker: str) -> None:
        record = self._workers[worker]
        self._exit(record)
        self._enter(record, frozenset(self.ended.get(worker, ())))

    def _exit(self, record: _Worker) -> None:
        """Count a worker no longer among those where the same has ended."""
        if not record.leaving:
            _decrease(self._takers, record.ended)
            if not record.held:
                self._idle[record.ended].remove(record)

    def _enter(self, record: _Worker, ended: Needs) -> None:
        record.ended = ended
        if not record.leaving:
            self._takers[ended] += 1
            if not record.held:
                self._idle.setdefault(ended, deque()).append(record)
        self._classify(record)

    def awaited(self) -> list[str]:
        """Return the workers that are away, and for whose data queued closures wait."""
        here = {each.ended for each in self._workers.values() if not each.leaving}
        kinds = [n for n in self.queued.needs() if n and not any(map(n.isdisjoint, here))]
        return [each for each, ended in self._away.items() if any(map(ended.isdisjoint, kinds))]

    def give(self, worker: str, closure: Closure) -> Dispatch:
        """Send a closure, which was not added, to a worker that holds nothing."""
        record = self._workers[worker]
        self._idle[record.ended].remove(record)
        self._hold(record, (closure,))
        return Dispatch(worker, (closure,))

    def take(self, worker: str, ids: Sequence[int], verb: str) -> list[Closure]:
        """Remove from a worker what it says has ended, and return it in the order of ``ids``.

        Raises:
            RemoteProtocolError: If it does not hold all of them; then nothing is removed.
        """
        record = self._workers[worker]
        closures = record.take(ids, verb)
        record.sated = False
        self._released(record, closures)
        return closures

    def take_finished(self, worker: str, ids: Sequence[int], mean_s: float) -> list[Closure]:
        """Do as ``take``, and note that they took ``mean_s`` seconds each, in the mean.

        Raises:
            RemoteProtocolError: If it does not hold all of them, or the mean is no duration; then
                nothing is removed.
        """
        record = self._workers[worker]
        if not 0 <= mean_s < math.inf:
            raise RemoteProtocolError(
                f"{worker} reported {mean_s} s per closure, expected a finite duration"
            )
        closures = record.take(ids, "finished")
        record.sated = False
        record.finished += len(closures)
        if closures:
            if record.mean_s is not None:
                weight = 1 - (1 - PACE_WEIGHT) ** len(closures)
                mean_s = record.mean_s + (mean_s - record.mean_s) * weight
            record.mean_s = mean_s
            # Compared before it is divided by: it may be 0.
            many = mean_s * MAX_AHEAD <= TARGET_AHEAD_S
            record.ahead = MAX_AHEAD if many else max(1, int(TARGET_AHEAD_S / mean_s))
        self._released(record, closures)
        return closures

    def take_back(self, worker: str, ids: Sequence[int]) -> list[Closure]:
        """Remove from a worker what it gives back, asked or not, and return it.

        What it had been asked for and keeps has started.

        Raises:
            RemoteProtocolError: If it does not hold all of them; then nothing is removed.
        """
        record = self._workers[worker]
        closures = record.take(ids, "gave back")
        for closure_id in record.asked:
            kept = record.held.get(closure_id)
            if kept is not None:
                kept.known_started = True
        record.asked = ()
        record.sated = bool(record.held)
        self._released(record, closures)
        return closures

    def held(self) -> list[tuple[str, list[Closure]]]:
        """Return, for every worker that holds closures, its name and these in the order sent."""
        return [(w.name, list(w.held.values())) for w in self._workers.values() if w.held]

    def oldest(self) -> dict[str, Closure]:
        """Return the first closure of each worker that holds any: the one that it runs."""
        return {w.name: next(iter(w.held.values())) for w in self._workers.values() if w.held}

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return a snapshot of every living worker, in the order in which they joined."""
        return tuple(
            WorkerStatistics(w.name, len(w.held), w.finished, w.ahead, w.mean_s)
            for w in self._workers.values()
        )

    # --- decisions ---

    def decide(self, reporter: str | None = None) -> list[DispatchAction]:
        """Send closures to workers, and ask for some back if there are too few.

        Args:
            reporter: The only worker that can have got room since the last call, if there is one:
                the cost does not depend on the number of workers then. None: any may have.

        Returns:
            At most one Dispatch for a worker, then at most one GiveBack for a worker.
        """
        queued, num_workers = self.queued.closures, len(self._workers)
        batches: defaultdict[_Worker, list[Closure]] = defaultdict(list)
        resting: list[Needs] = []  # what has ended where workers stay idle
        # Those on which data ended come first: who has them is left free for what needs them.
        for ended, idle in [*reversed(self._idle.items())]:
            while idle and queued:
                record = idle.popleft()
                batches[record] += self._send(record, 1, math.inf)
                if not batches[record]:
                    idle.appendleft(record)  # and none of these may take what is queued
                    break
            if idle:
                resting.append(ended)
            elif ended:
                del self._idle[ended]
        if len(queued) > num_workers and self._roomy:
            records = list(self._roomy) if reporter is None else [self._workers[reporter]]
            # The same share of the surplus for each, so that the last ones are spread over all.
            share = -((num_workers - len(queued)) // num_workers)
            for record in records:
                surplus = len(queued) - num_workers
                if surplus > 0 and record in self._roomy:
                    batches[record] += self._send_ahead(record, min(share, surplus))
        actions: list[DispatchAction] = []
        for record, batch in batches.items():
            if batch:
                actions.append(Dispatch(record.name, tuple(batch)))
        if resting and (self._loaded or self._spared) and (wanted := self._wanted(resting)):
            if not self._spared_by.issuperset(wanted):
                self._loaded |= self._spared
                self._spared = {}
            self._spared_by = set(wanted)
            for record in list(self._loaded):
                unstarted = record.unstarted()
                ids = [closure.id for closure in unstarted if closure.needs in wanted]
                record.asked = tuple(ids[: (len(ids) + 1) // 2])  # the oldest half, rounded up
                if record.asked:
                    actions.append(GiveBack(record.name, record.asked))
                del self._loaded[record]
                if unstarted and not record.asked:
                    self._spared[record] = None
        return actions

    def ask_back(self) -> list[GiveBack]:
        """Ask every worker for all that it may not have started, unless it owes an answer."""
        actions = []
        for record in self._workers.values():
            ids = tuple(closure.id for closure in record.unstarted())
            if ids and not record.asked and not record.leaving:
                record.asked = ids
                self._classify(record)
                actions.append(GiveBack(record.name, record.asked))
        return actions

    def _wanted(self, idle: Iterable[Needs]) -> Collection[Needs]:
        """Return the needs of closures in flight that an idle worker may run."""
        if not self.ended:
            return self._kinds
        barred = [set(self._barred(ended, self._kinds)) for ended in idle]
        return self._kinds.keys() - set.intersection(*barred)

    def _send_ahead(self, record: _Worker, share: int) -> list[Closure]:
        first = next(iter(record.held.values()))
        if first.lost_on:  # it runs alone
            return []
        room = record.ahead + 1 - len(record.held)
        budget = MAX_AHEAD_BYTES - (record.held_bytes - first.inline_bytes)
        return self._send(record, min(share, room), budget, ahead=True)

    def _send(
        self, record: _Worker, most: int, max_bytes: float, *, ahead: bool = False
    ) -> list[Closure]:
        """Move up to ``most`` closures from the head of the queue to a worker; return them."""
        batch: list[Closure] = []
        barred = self._barred(record.ended, self.queued.needs()) if self.ended else ()
        for closure in islice(self.queued.in_order(barred), most):
            max_bytes -= closure.inline_bytes
            if max_bytes < 0 or (ahead and closure.lost_on):
                break
            self.queued.discard(closure)
            batch.append(closure)
        self._hold(record, batch)
        return batch

    def _hold(self, record: _Worker, closures: Sequence[Closure]) -> None:
        held, kinds = record.held, self._kinds
        for closure in closures:
            move(closure, State.HELD)
            closure.worker = record.name
            closure.known_started = False
            held[closure.id] = closure
            kinds[closure.needs] += 1
            record.held_bytes += closure.inline_bytes
        self.num_in_flight += len(closures)
        self._classify(record)

    def _released(self, record: _Worker, closures: Sequence[Closure]) -> None:
        """Note that a worker does not hold these any more, and did just now."""
        self.num_in_flight -= len(closures)
        kinds = self._kinds
        for closure in closures:
            kinds[closure.needs] -= 1
            if not kinds[closure.needs]:
                del kinds[closure.needs]
        if closures and not record.held and not record.leaving:
            self._idle.setdefault(record.ended, deque()).append(record)
        self._classify(record)

    def _classify(self, record: _Worker) -> None:
        self._spared.pop(record, None)
        num_held = len(record.held)
        room = record.ahead + 1 - num_held
        if num_held and 2 * room >= record.ahead and not record.sated and not record.leaving:
            self._roomy[record] = None
        else:
            self._roomy.pop(record, None)
        if num_held > 1 and not record.asked and not record.leaving:
            self._loaded[record] = None
        else:
            self._loaded.pop(record, None)
        ended = record.ended
        if ended and not any(c.needs.isdisjoint(ended) for c in record.held.values()):
            self._spent.add(record)
        else:
            self._spent.discard(record)
