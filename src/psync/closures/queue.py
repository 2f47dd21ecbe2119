"""The closure queue: the state of every closure, and the actions that each event leads to.

``ClosureQueue`` gets events and returns what to do, as a list of actions. It knows no clock, no
network and no function to call. ``dispatcher`` decides which worker runs a closure.

**An error ends everything**, at once: what is queued is cancelled, what is in flight is asked to
stop, and what is scheduled from then on is cancelled too. Nothing is dispatched. What cannot be
stopped stays in flight until its worker answers (``in_flight`` names it). When nothing is in flight
any more the error may be raised, and ``collect_error`` resets the queue.

**A step may ask for the end**: what no worker has started is cancelled, and what is scheduled from
then on; what runs goes to its end. Nothing is dispatched. ``collect_error`` resets the queue.

**A closure that kills its workers** is given up, and not called so where workers die of something
else, see ``Losses``.

**Data end on one worker after the other.** A closure that meets the end of data that it is known to
need, before it has updated anything, is queued again if another worker has these data, or is away
and will be back with them. It has made no call that ps tasks could know, so it is the same closure
there. One that has updated something ends with EndOfData: run elsewhere, its first updates would be
taken for those that it has made, and the batches behind them would be lost.

**The replicas of a gang** are closures with identities of their own, sent to certain workers; none
runs twice. How they end concerns the gang alone (``gang``), but an error that ends everything
stops them too.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from psync.closures.closure import Closure, Identities, Replica, State, move
from psync.closures.dispatcher import Dispatch, Dispatcher, GiveBack, WorkerStatistics
from psync.closures.scaling import Load
from psync.errors import (
    ClosureCancelled,
    ClosureError,
    ClosureInputError,
    EndOfData,
    PsyncError,
    RemoteProtocolError,
    WorkerLost,
)

MAX_NAMED = 32
"""Workers that an error names."""

SCHEDULE_AGAIN = "schedule it again after join has raised the error"


@dataclass(slots=True, eq=False)
class Barrier:
    """What keeps closures that come before a gang from those that come after it."""

    cutoff: int  # closures with ids below it come before
    behind: list[Closure] = field(default_factory=list)  # they wait until it is opened


def without_input(closure: Closure, source: Closure) -> tuple[State, ClosureInputError]:
    """Return how a closure ends whose input ``source`` ended without a value."""
    cause = root_of(source)
    error = ClosureInputError(
        f"{closure} was not run: its input, {source}, ended with "
        f"{type(cause).__name__}: {cause.args[0] if cause.args else cause}"
    )
    error.__cause__ = cause
    return (State.EXHAUSTED if source.state is State.EXHAUSTED else State.FAILED), error


WROTE_TO_PULLED = (
    "usually a write, through another library such as torch.from_numpy, to values that were "
    "pulled, which are read-only: pull with copy=True"
)
"""Why a task was killed by SIGSEGV or SIGBUS, if tasks share memory."""


def loss_error(closure: Closure) -> ClosureError:
    """Return the error of a closure that was lost with too many workers."""
    error = ClosureError(
        f"{closure} was lost with its worker {len(closure.lost_on)} times: "
        f"{', '.join(closure.lost_on)}",
        hint="it probably kills its process, or blocks its event loop. The log names the signal "
        f"that killed a worker. SIGSEGV or SIGBUS: {WROTE_TO_PULLED}. SIGKILL: look for lack of "
        "memory. Long computations belong in a plain step function, or in a thread",
    )
    error.__cause__ = WorkerLost(closure.worker, f"was lost while it held {closure}")
    return error


def root_of(closure: Closure) -> BaseException:
    """Return the error behind the error of a closure, so that those of inputs are never nested."""
    error = closure.error
    while isinstance(error, ClosureInputError) and error.__cause__ is not None:
        error = error.__cause__
    assert error is not None, f"{closure} ended without a value and without an error"
    return error


@dataclass(frozen=True, slots=True)
class Settle:
    """These closures are final; ``closure.error`` is None for those that have a value.

    In the answer to ``finished`` they begin with those that were reported, in that order.
    """

    closures: tuple[Closure, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask the worker to stop these closures. It reports how each of them ends all the same."""

    worker: str
    ids: tuple[int, ...]


MAX_LOSSES = 3  # as Dask, which gives a task up when it has taken three workers with it
RECENT_LOSSES = 12  # of workers, among which those by chance are counted


Action: TypeAlias = Settle | Cancel | Dispatch | GiveBack
"""What to do. In a list: at most one Settle first, then Cancels, Dispatches and GiveBacks."""


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Where closures are now, and totals since the queue was made."""

    waiting: int  # for an input
    queued: int
    in_flight: int
    finished: int
    failed: int
    exhausted: int  # ended because their data, or that of an input, had ended
    cancelled: int
    put_back: int  # times a closure was queued again because its worker was gone
    given_back: int  # times a worker returned a closure unstarted, or lacked its data
    workers: tuple[WorkerStatistics, ...]

    def load(self) -> Load:
        """Return what there is to do; the mean is that of the workers."""
        means = [worker.mean_s for worker in self.workers if worker.mean_s is not None]
        return Load(self.queued, self.in_flight, sum(means) / len(means) if means else None)


class Losses:
    """Tells closures that kill their workers from those that were there when workers died.

    A worker was lost *by chance* if it held nothing, or only calls of functions of which some call
    has run to its end. A closure is given up when it was lost with ``limit`` workers more than were
    lost by chance, and without it, among the last twelve. So where nothing else dies it is given up
    at the third loss; so is the step that crashes in every call. Where all workers are killed
    again and again, it has to be lost more often than workers are, in the mean. It is given up at
    the fifteenth loss in any case. After chance losses that are over it takes eight at most: its
    own replace them among the last twelve.
    """

    def __init__(self, limit: int) -> None:
        self.proven: set[str] = set()  # functions of which a call has run to its end
        self._limit = limit
        self._recent: deque[dict[int, str]] = deque(maxlen=RECENT_LOSSES)  # held: names by id

    def lost(self, held: Sequence[Closure]) -> None:
        """A worker was lost that held these."""
        self._recent.append({closure.id: closure.name for closure in held})

    def is_killer(self, closure: Closure) -> bool:
        """Whether the losses of a closure are not by chance."""
        others = [held for held in self._recent if closure.id not in held]
        chance = [held for held in others if self.proven.issuperset(held.values())]
        return len(closure.lost_on) >= self._limit + len(chance)


class ClosureQueue:
    """All closures that are not final, and the decisions about them.

    Every method that is told something returns the actions that follow; perform all of them, in
    order. Pass the reports of a worker in the order in which it sent them, and none of them after
    ``worker_lost``. A report that raises has changed nothing.

    The record of a final closure is not kept here. Whoever keeps it (it may become the dependency
    of a later one) drops its payload, if that is large.

    Args:
        max_losses: A closure fails when this many workers were lost while they held it, and none
            without it; see ``Losses``.

    Attributes:
        dispatcher: Which closures are queued, and what each worker holds.
        open: All closures that are not final, by id; to be read only.
        identities: Of closures that may come again.
        pending_errors: What a join is going to raise and to name, in order.
        ending: Why everything is being cancelled, and what is scheduled too; None if it is not.
        requested_stop: Why a step has asked for the end of training; None once ``collect_error``
            was called.
        exhausted_at: Lowest closure whose data, or those of an input, had ended, and which
            ``collect_error`` has not told; infinity: there is none.
        next_id: Lowest id that the next closure may have: the cut-off of a join that begins now.
    """

    def __init__(self, *, max_losses: int = MAX_LOSSES) -> None:
        self.dispatcher = Dispatcher()
        self.identities = Identities()
        self.pending_errors: list[BaseException] = []
        self.ending: str | None = None
        self.requested_stop: str | None = None
        self.exhausted_at = math.inf
        self.next_id = 0
        self._remedy = SCHEDULE_AGAIN  # what to do about ``ending``
        self._stopped = False  # everything is cancelled for good
        self._end_of_data: BaseException | None = None  # the first, until it is collected
        self._losses = Losses(max_losses)
        self.open: dict[int, Closure] = {}
        self._unsettled: deque[int] = deque()  # ids in order; final ones go when they are first
        self._barriers: list[Barrier] = []  # that are not open, in order
        self._settled: list[Closure] = []  # to be told with the next actions
        self._cancels: list[Cancel] = []  # the same
        self._totals: Counter[State] = Counter()  # of final closures
        self._pauses = 0
        self._num_put_back = 0
        self._num_given_back = 0

    # --- what the user does ---

    def schedule(self, closure: Closure) -> list[Action]:
        """Take a new closure. The next ``dispatch`` sends it, or a report that comes before that.

        It is not sent at once, so that a hundred calls in a row become one message per worker.

        Its id is above all earlier ones, and its dependencies were scheduled before.
        """
        assert closure.id >= self.next_id, f"{closure} comes after closure {self.next_id - 1}"
        if closure.identity is not None:
            self.identities.begin(closure, closure.identity)
        if closure.dependencies or self.ending is not None or self._barriers:
            return self._schedule_unusual(closure)
        move(closure, State.QUEUED)
        closure_id = closure.id
        self.next_id = closure_id + 1
        self.open[closure_id] = closure
        self._unsettled.append(closure_id)
        self.dispatcher.queued.add(closure)
        return []

    def _schedule_unusual(self, closure: Closure) -> list[Action]:
        """Schedule a closure with dependencies, behind a barrier, or after an error."""
        inputs = closure.dependencies
        if self.ending is not None:
            self._end(closure, State.CANCELLED, self._cancelled(closure))
        elif failed := [c for c in inputs if c.is_final and c.state is not State.FINISHED]:
            self._end(closure, *without_input(closure, failed[0]))
        else:
            self._note_missing(closure)
            move(closure, State.WAITING if closure.num_missing else State.QUEUED)
            self._add(closure)
            if closure.state is State.QUEUED:
                self.dispatcher.queued.add(closure)
        self.next_id = closure.id + 1
        return self.dispatch(sends=False)

    def _add(self, closure: Closure) -> None:
        """Note a closure whose id is above all that were added before."""
        self.next_id = closure.id + 1
        self.open[closure.id] = closure
        self._unsettled.append(closure.id)

    def _note_missing(self, closure: Closure) -> None:
        """Count what a new closure misses, also a barrier; no input has ended without a value."""
        for dependency in dict.fromkeys(closure.dependencies):
            if dependency.state is not State.FINISHED:
                if dependency.dependents is None:
                    dependency.dependents = []
                dependency.dependents.append(closure)
                closure.num_missing += 1
        if self._barriers:
            self._barriers[-1].behind.append(closure)
            closure.num_missing += 1
        if not closure.num_missing:
            closure.dependencies = ()

    def _miss_less(self, closures: Iterable[Closure]) -> None:
        """Each of these misses one thing less. Queue those that miss nothing now."""
        for closure in closures:
            closure.num_missing -= 1
            if closure.num_missing == 0 and closure.state is State.WAITING:  # or it was cancelled
                closure.dependencies = ()
                move(closure, State.QUEUED)
                self.dispatcher.queued.add(closure)

    def cancel(self, closure_id: int) -> list[Action]:
        """Cancel one closure: at once if no worker holds it, else its worker is asked to stop it.

        A final closure is left as it is, and one is asked to stop only once. Closures that wait for
        its value fail, if it ends without one.
        """
        closure = self.open.get(closure_id)
        if closure is None or closure.state is State.CANCELLING:
            return []
        if closure.state is State.HELD:
            move(closure, State.CANCELLING)
            self._cancels.append(Cancel(closure.worker, (closure.id,)))
        else:
            self._end(closure, State.CANCELLED, self._cancelled(closure))
        return self.dispatch()

    def pause(self) -> None:
        """Dispatch nothing until ``resume`` was called as often as this. Reports go on."""
        self._pauses += 1

    def resume(self) -> list[Action]:
        """Take one ``pause`` back."""
        assert self._pauses, "the closure queue was resumed more often than paused"
        self._pauses -= 1
        return self.dispatch()

    def fail(self, error: BaseException) -> list[Action]:
        """End everything with an error that is no closure's own, such as the loss of a ps."""
        self.pending_errors.append(error)
        if isinstance(error, PsyncError):
            self._end_all(error.message, error.hint)
        else:
            self._end_all(str(error))
        return self.dispatch()

    def request_stop(self, reason: str) -> list[Action]:
        """A step asks for the end of training; see above. Nothing, if everything ends already."""
        if self.ending is not None:
            return []
        self.requested_stop = reason
        self.ending = f"training was asked to stop: {reason}"
        self._remedy = "schedule it again after join has returned"
        self._cancel_queued(list(self.open.values()))  # the rest goes to its end
        return [*self.dispatch(), *self.dispatcher.ask_back()]

    def stop(self) -> list[Action]:
        """Cancel everything, now and from now on."""
        self._stopped = True
        self._end_all("the coordinator was closed")
        return self.dispatch()

    # --- gangs ---

    def add_barrier(self) -> Barrier:
        """Let what is scheduled from now on wait until the barrier is opened."""
        self._barriers.append(barrier := Barrier(self.next_id))
        return barrier

    def may_begin(self, barrier: Barrier) -> bool:
        """Whether the gang of this barrier, which is the first, may begin.

        All that comes before is final then, so every worker is idle.
        """
        return not self._pauses and self.ending is None and self.low_water() >= barrier.cutoff

    def open_barrier(self, barrier: Barrier) -> list[Action]:
        """Queue what waited for nothing but this barrier: its gang has ended, or will never be.

        What is behind it waits for the barrier before it, if there is one.
        """
        at = self._barriers.index(barrier)
        del self._barriers[at]
        if at:
            self._barriers[at - 1].behind += barrier.behind
        else:
            self._miss_less(barrier.behind)
        return self.dispatch()

    def begin_gang(self, replicas: Sequence[tuple[str, Replica]]) -> list[Action]:
        """Send each replica to its worker, which is idle."""
        sent: list[Dispatch] = []
        for worker, replica in replicas:
            move(replica, State.QUEUED)
            sent.append(self.dispatcher.give(worker, replica))
            self._add(replica)
        return [*self.dispatch(sends=False), *sent]

    # --- what workers do ---

    def worker_joined(self, worker: str) -> list[Action]:
        """A worker is ready for closures."""
        self.dispatcher.join(worker)
        return self.dispatch()

    def worker_leaves(self, worker: str) -> list[Action]:
        """A worker is about to leave: send it nothing more. It gives back what it has not started.

        What it runs it reports, and then it is lost, blamelessly.
        """
        self.dispatcher.retire(worker)
        return self.dispatch()

    def worker_lost(
        self, worker: str, *, blame: bool = True, returns: bool = False
    ) -> list[Action]:
        """A worker is gone. What it held is queued again, in its place, or ends cancelled.

        Args:
            worker: Name of the worker.
            blame: Whether what it held may be the cause, and is given up when that has happened
                too often. False where the reason is known: the worker left, or was sent away.
            returns: Whether it is expected back: then closures wait for the data that it had left.
        """
        closures = self.dispatcher.leave(worker, returns=returns)
        if blame:
            self._losses.lost(closures)
        for closure in closures:
            if closure.is_replica:  # none other is held beside it; it does not run again
                state = State.FAILED if closure.state is State.HELD else State.CANCELLED
                lost = f"was lost while it ran {closure}, a replica of a gang"
                self._end(closure, state, WorkerLost(worker, lost))
                return self.dispatch()
            closure.times_back += 1
            if blame:
                closure.lost_on += (worker,)
        self._num_put_back += self._come_back(closures)
        for closure in closures:
            # The first one to be given up ends everything, and cancels the others.
            if closure.state is State.QUEUED and self._losses.is_killer(closure):
                self._end(closure, State.FAILED, loss_error(closure))
        return self.dispatch()

    def worker_will_not_return(self, worker: str) -> list[Action]:
        """A worker that was lost is not expected back any more."""
        self.dispatcher.will_not_return(worker)
        return self.dispatch()

    def finished(self, worker: str, ids: Sequence[int], mean_s: float) -> list[Action]:
        """A worker ran these closures to their end, and each has a value.

        Once an error ends everything they end cancelled all the same: updates that they made since
        are refused, on one ps task sooner than on another.

        Args:
            worker: Name of the worker.
            ids: Ids of the closures.
            mean_s: Mean of the seconds that these took, each from its start to its end.

        Raises:
            RemoteProtocolError: If it does not hold one of them, or the mean is no duration.
        """
        closures = self.dispatcher.take_finished(worker, ids, mean_s)
        still_open, proven = self.open, self._losses.proven
        counts = self.ending is None or self.requested_stop is not None
        if counts:
            self._settled += closures
            self._totals[State.FINISHED] += len(closures)
        for closure in closures:
            if closure.name not in proven:
                proven.add(closure.name)
            if not counts:
                # Ps tasks may have refused its updates since the error, and some of them not.
                self._end(closure, State.CANCELLED, self._cancelled(closure))
                continue
            move(closure, State.FINISHED)
            del still_open[closure.id]
            if closure.dependents is not None:
                dependents, closure.dependents = closure.dependents, None
                self._miss_less(dependents)
            if closure.identity is not None:
                self.identities.end(closure, closure.identity)
        return self.dispatch(worker)

    def failed(self, worker: str, closure_id: int, error: BaseException) -> list[Action]:
        """A closure raised ``error`` on a worker. Raises as ``finished`` does."""
        (closure,) = self.dispatcher.take(worker, (closure_id,), "failed")
        self._end(closure, State.FAILED, error)
        return self.dispatch(worker)

    def end_of_data(self, worker: str, closure_id: int, error: BaseException) -> list[Action]:
        """A closure met the end of its worker's data, ``error``. Raises as ``finished`` does."""
        (closure,) = self.dispatcher.take(worker, (closure_id,), "met the end of data in")
        if isinstance(error, EndOfData) and error.data in closure.needs:
            self.dispatcher.out_of(worker, error.data, error.batches)
            has_taker = self.dispatcher.has_taker(closure.needs)
            if has_taker and not error.updates:
                self._num_given_back += self._come_back([closure])
                return self.dispatch()
            if has_taker:
                error.hint = (
                    f"other workers have data, but {closure} had made updates before it met the "
                    "end, so it cannot run there: let a step take one batch, or catch EndOfData"
                )
            elif self._end_of_data is None:  # a join is going to raise it
                batches = self.dispatcher.batches(error.data)
                workers = sorted(batches, key=lambda worker: (len(worker), worker))
                named = [f"{worker} had {batches[worker]}" for worker in workers]
                more = f", and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
                error.message += f" on any worker ({', '.join(named[:MAX_NAMED])}{more})"
                error.args = (error.message,)
        state = State.FAILED if closure.is_replica else State.EXHAUSTED
        self._end(closure, state, error)
        return self.dispatch()

    def cancelled(self, worker: str, closure_id: int) -> list[Action]:
        """A worker stopped a closure, or did not start it, because it was asked to.

        Raises:
            RemoteProtocolError: If it does not hold the closure, or was not asked to stop it.
        """
        held = self.open.get(closure_id)
        if held is not None and held.state is State.HELD:
            raise RemoteProtocolError(f"{worker} cancelled {held}, which it was not asked to")
        (closure,) = self.dispatcher.take(worker, (closure_id,), "cancelled")
        self._end(closure, State.CANCELLED, self._cancelled(closure))
        return self.dispatch(worker)

    def given_back(self, worker: str, ids: Sequence[int]) -> list[Action]:
        """A worker returns closures that it has not started: the answer to a GiveBack, or unasked.

        The answer to a GiveBack may be empty, and must come all the same.

        Raises:
            RemoteProtocolError: If it does not hold one of them.
        """
        for closure_id in ids:
            closure = self.open.get(closure_id)
            if closure is not None and closure.is_replica:
                raise RemoteProtocolError(f"{worker} gave back {closure}, which it has to run")
        closures = self.dispatcher.take_back(worker, ids)
        self._num_given_back += self._come_back(closures)
        more = [] if self.requested_stop is None else self.dispatcher.ask_back()
        return [*self.dispatch(), *more]

    # --- what join needs ---

    def low_water(self) -> int:
        """Return the lowest id that is not final, or ``next_id`` if all are. It never falls."""
        unsettled, still_open = self._unsettled, self.open
        while unsettled and unsettled[0] not in still_open:
            unsettled.popleft()
        return unsettled[0] if unsettled else self.next_id

    def is_settled(self, cutoff: int) -> bool:
        """Whether a join with this cut-off is over; ``collect_error`` then says how.

        That is when all closures with lower ids are final, or, if there is an error or a request
        to stop, when nothing runs any more.
        """
        if self.pending_errors:
            return self.ready_to_raise
        runs_out = self.requested_stop is not None and self.dispatcher.num_in_flight > 0
        return self.low_water() >= cutoff and not runs_out

    @property
    def ready_to_raise(self) -> bool:
        """Whether there is an error that was not collected, and nothing runs any more."""
        return bool(self.pending_errors) and not self.dispatcher.num_in_flight

    def collect_error(self) -> tuple[BaseException, tuple[BaseException, ...]] | None:
        """Take what join is to raise, (first, further), or None. The queue is good again then.

        An end of data is the first if there was no error, else the last of the further ones. If
        several joins wait, one of them collects, and the others are told by the coordinator.
        """
        assert self.ready_to_raise or not self.pending_errors, "closures are in flight"
        errors, self.pending_errors = self.pending_errors, []
        if self._end_of_data is not None:
            errors.append(self._end_of_data)
        self._end_of_data = self.requested_stop = None
        self.exhausted_at = math.inf
        if not self._stopped:
            self.ending = None
        return (errors[0], tuple(errors[1:])) if errors else None

    def kept(self, below: int) -> list[tuple[int, int]]:
        """Return those of the closures below ``below`` that ps tasks have to remember.

        They may come again: (id of the first run, the lowest run that is not final). After an
        error that ends everything no run that workers hold counts any more.
        """
        held = [closure for _, closure in self.in_flight()]
        fails = self.ending is not None and self.requested_stop is None
        return self.identities.kept(below, held, ending=fails)

    def in_flight(self) -> list[tuple[str, Closure]]:
        """Return (worker, closure) for all that workers hold, by worker in the order they run."""
        return [(worker, c) for worker, closures in self.dispatcher.held() for c in closures]

    def statistics(self) -> QueueStatistics:
        """Return a snapshot."""
        queued, in_flight = self.dispatcher.num_queued, self.dispatcher.num_in_flight
        return QueueStatistics(
            waiting=len(self.open) - queued - in_flight,
            queued=queued,
            in_flight=in_flight,
            finished=self._totals[State.FINISHED],
            failed=self._totals[State.FAILED],
            exhausted=self._totals[State.EXHAUSTED],
            cancelled=self._totals[State.CANCELLED],
            put_back=self._num_put_back,
            given_back=self._num_given_back,
            workers=self.dispatcher.statistics(),
        )

    # --- how closures end ---

    def _come_back(self, closures: list[Closure]) -> int:
        """Queue again what no worker holds any more, or end it cancelled; return how many queued.

        All are queued first: one that ends cancelled can fail another, and that ends everything.
        """
        stopped = [closure for closure in closures if closure.state is State.CANCELLING]
        back = [closure for closure in closures if closure.state is State.HELD]
        for closure in back:
            move(closure, State.QUEUED)
            self.dispatcher.queued.add(closure)
        for closure in stopped:
            self._end(closure, State.CANCELLED, self._cancelled(closure))
        if self.requested_stop is not None:
            self._cancel_queued(back)
            return 0
        return len(back)

    def _end(self, closure: Closure, state: State, error: BaseException) -> None:
        """A closure ends without a value, and those that needed it do. A replica concerns nobody.

        If one of them fails, that ends everything.
        """
        self._settle(closure, state, error)
        if closure.is_replica:
            return
        chain = [closure]
        for source in chain:  # which grows
            dependents, source.dependents = source.dependents, None
            for dependent in dependents or ():
                if dependent.state is State.WAITING:
                    self._settle(dependent, *without_input(dependent, source))
                    chain.append(dependent)
        # One error for the whole chain: the others have the same cause.
        failed = next((c for c in chain if c.state is State.FAILED), None)
        if failed is not None:
            assert failed.error is not None
            self.pending_errors.append(failed.error)
            self._end_all(f"{failed} failed{f' on {failed.worker}' if failed.worker else ''}")
        if closure.state is State.EXHAUSTED and self._end_of_data is None:
            self._end_of_data = root_of(closure)

    def _settle(self, closure: Closure, state: State, error: BaseException) -> None:
        """Make a closure final that has no value."""
        if closure.state is State.QUEUED:
            self.dispatcher.queued.discard(closure)
        move(closure, state)
        if state is State.EXHAUSTED:
            self.exhausted_at = min(self.exhausted_at, closure.id)
        closure.error = error
        closure.dependencies = ()
        if closure.identity is not None:
            self.identities.end(closure, closure.identity)
        self.open.pop(closure.id, None)
        self._totals[closure.state] += 1
        self._settled.append(closure)

    def _end_all(self, reason: str, remedy: str | None = None) -> None:
        """Cancel what no worker holds, and ask for the rest to be stopped, if not done before."""
        if self.ending is not None and self.requested_stop is None:
            return
        self.requested_stop = None
        self.ending, self._remedy = reason, remedy or SCHEDULE_AGAIN
        self._cancel_queued(list(self.open.values()))
        for worker, closures in self.dispatcher.held():
            running = [closure for closure in closures if closure.state is State.HELD]
            for closure in running:
                move(closure, State.CANCELLING)
            if running:
                self._cancels.append(Cancel(worker, tuple(closure.id for closure in running)))

    def _cancel_queued(self, closures: Sequence[Closure]) -> None:
        for closure in closures:
            if closure.state is State.WAITING or closure.state is State.QUEUED:
                self._settle(closure, State.CANCELLED, self._cancelled(closure))

    def _cancelled(self, closure: Closure) -> ClosureCancelled:
        """Return the error of a closure that is cancelled, alone or with everything."""
        if self.ending is None:
            return ClosureCancelled(f"{closure} was cancelled")
        return ClosureCancelled(
            f"{closure} was cancelled: {self.ending}",
            hint=None if self._stopped else self._remedy,
        )

    def dispatch(self, reporter: str | None = None, *, sends: bool = True) -> list[Action]:
        """Return what is to be done now. To be called in each turn of the loop that scheduled.

        Args:
            reporter: As of ``Dispatcher.decide``.
            sends: Whether closures are sent to workers; False: ends are told, and no more.
        """
        actions: list[Action] = []
        if self._settled:
            actions.append(Settle(tuple(self._settled)))
            self._settled = []
            if not self.open:  # a dict keeps the largest table that it needed
                self.open.clear()
                self._unsettled.clear()
        if self._cancels:
            actions += self._cancels
            self._cancels = []
        if sends and self.ending is None and not self._pauses:
            actions += self.dispatcher.decide(reporter)
        return actions
