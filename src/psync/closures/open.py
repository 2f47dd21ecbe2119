"""Open closures: those that are not final, and the effects of an end on those that depend on it.

``ClosureQueue`` reports events, and closures are moved here. What may run goes to the dispatcher;
consequences for the rest are collected until ``news`` is called: ``Settle`` and ``Cancel`` actions.

A closure that ends without a value fails those that needed the value. If it ends with an error,
that ends everything: what no worker holds is cancelled, the rest is asked to stop. ``QueueErrors``
keeps the errors that a join raises. ``Waits`` knows who waits for values of inputs, and for gangs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from psync.closures.closure import Closure, Event, State, move
from psync.closures.dispatcher import Dispatcher
from psync.closures.identities import Identities
from psync.errors import (
    ClosureCancelled,
    ClosureError,
    ClosureInputError,
    EndOfData,
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


class Waits:
    """Who waits for whom. A closure counts what it misses itself; a barrier counts as one input."""

    def __init__(self) -> None:
        self.barriers: list[Barrier] = []  # that are not open, in order

    def add_barrier(self, cutoff: int) -> Barrier:
        """Let closures wait that begin to from now on, until the barrier is opened."""
        barrier = Barrier(cutoff)
        self.barriers.append(barrier)
        return barrier

    def begin(self, closure: Closure) -> bool:
        """Return whether this closure, which is new, has to wait; if so, it begins to.

        None of its inputs has ended without a value.
        """
        inputs = dict.fromkeys(closure.dependencies)
        unfinished = [c for c in inputs if c.state is not State.FINISHED]
        for dependency in unfinished:
            if dependency.dependents is None:
                dependency.dependents = []
            dependency.dependents.append(closure)
        closure.num_missing = len(unfinished)
        if self.barriers:
            self.barriers[-1].behind.append(closure)
            closure.num_missing += 1
        if not closure.num_missing:
            closure.dependencies = ()
        return closure.num_missing > 0

    def has_value(self, closure: Closure) -> list[Closure]:
        """A closure has its value. Return those that waited for nothing else."""
        dependents, closure.dependents = closure.dependents, None
        return _less_one(dependents or ())

    def has_no_value(self, closure: Closure) -> list[Closure]:
        """A closure ended without a value. Return those that waited for it, in vain."""
        dependents, closure.dependents = closure.dependents, None
        return [c for c in dependents or () if c.state is State.WAITING]

    def open(self, barrier: Barrier) -> list[Closure]:
        """Take a barrier away. Return those that waited for nothing else.

        What is behind it waits for the barrier before it, if there is one.
        """
        at = self.barriers.index(barrier)
        del self.barriers[at]
        if at:
            self.barriers[at - 1].behind += barrier.behind
            return []
        return _less_one(barrier.behind)


def _less_one(closures: Iterable[Closure]) -> list[Closure]:
    """Each of these misses one thing less. Return those that miss nothing now."""
    ready: list[Closure] = []
    for closure in closures:
        closure.num_missing -= 1
        if closure.num_missing == 0 and closure.state is State.WAITING:  # or it was cancelled
            closure.dependencies = ()
            ready.append(closure)
    return ready


class QueueErrors:
    """What has ended everything, and what is to be raised for it."""

    def __init__(self) -> None:
        self.pending: list[BaseException] = []  # in order, until they are collected
        self.ending: str | None = None  # why everything is being cancelled; None if it is not
        self.remedy = SCHEDULE_AGAIN  # what to do about that
        self.stopped = False  # everything is cancelled for good
        self.request: str | None = None  # a step asked for the end: what runs goes to its own end
        self._end_of_data: BaseException | None = None  # the first, until it is collected

    def note_end_of_data(self, closure: Closure) -> None:
        """A closure ended because its data, or that of an input, had ended."""
        if self._end_of_data is None:
            self._end_of_data = root_of(closure)

    def name_batches(self, error: EndOfData, batches: Mapping[str, int]) -> None:
        """Let the end of data that a join is going to raise say how many each worker had."""
        if self._end_of_data is None:
            workers = sorted(batches, key=lambda worker: (len(worker), worker))
            named = [f"{worker} had {batches[worker]}" for worker in workers]
            more = f", and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            error.message += f" on any worker ({', '.join(named[:MAX_NAMED])}{more})"
            error.args = (error.message,)

    def collect(self) -> tuple[BaseException, tuple[BaseException, ...]] | None:
        """Take what is to be raised, (first, further), or None. Nothing is cancelled then."""
        errors = self.pending
        if self._end_of_data is not None:
            errors.append(self._end_of_data)
        self.pending, self._end_of_data = [], None
        self.request = None
        if not self.stopped:
            self.ending = None
        return (errors[0], tuple(errors[1:])) if errors else None

    def cancelled(self, closure: Closure) -> ClosureCancelled:
        """Return the error of a closure that is cancelled, alone or with everything."""
        if self.ending is None:
            return ClosureCancelled(f"{closure} was cancelled")
        return ClosureCancelled(
            f"{closure} was cancelled: {self.ending}",
            hint=None if self.stopped else self.remedy,
        )


def without_input(closure: Closure, source: Closure) -> tuple[Event, ClosureInputError]:
    """Return how a closure ends whose input ``source`` ended without a value."""
    cause = root_of(source)
    error = ClosureInputError(
        f"{closure} was not run: its input, {source}, ended with "
        f"{type(cause).__name__}: {cause.args[0] if cause.args else cause}"
    )
    error.__cause__ = cause
    return (Event.END_OF_DATA if source.state is State.EXHAUSTED else Event.FAIL), error


WROTE_TO_PULLED = (
    "usually a write, through another library such as torch.from_numpy, to values that were "
    "pulled, which are read-only: pull with copy=True"
)
"""Why a task was killed by SIGSEGV or SIGBUS, if tasks share memory."""


def loss_error(closure: Closure) -> ClosureError:
    """Return the error of a closure that was lost with too many workers."""
    error = ClosureError(
        f"{closure} was lost with its worker {closure.attempts} times: "
        f"{', '.join(closure.lost_on)}",
        hint="it probably kills its process, or blocks its event loop. The log names the signal "
        f"that killed a worker. SIGSEGV or SIGBUS: {WROTE_TO_PULLED}. SIGKILL: look for lack of "
        "memory. Long computations belong in a plain step function, or in a thread",
    )
    error.__cause__ = WorkerLost(closure.worker, f"was lost while it held {closure}")
    return error


def error_of(closure: Closure) -> BaseException:
    """Return what a closure ended with that has no value."""
    assert closure.error is not None, f"{closure} ended without a value and without an error"
    return closure.error


def root_of(closure: Closure) -> BaseException:
    """Return the error behind the error of a closure, so that those of inputs are never nested."""
    error = error_of(closure)
    while isinstance(error, ClosureInputError) and error.__cause__ is not None:
        error = error.__cause__
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


class OpenClosures:
    """All closures that are not final, by id.

    Args:
        dispatcher: Takes those that wait for nothing but a worker.
        identities: Are told of those that end, and have one.
    """

    def __init__(self, dispatcher: Dispatcher, identities: Identities) -> None:
        self.last_id = -1  # of the latest closure
        self.waits = Waits()
        self.errors = QueueErrors()
        self.totals: Counter[State] = Counter()  # of final closures
        self._dispatcher = dispatcher
        self._identities = identities
        self._open: dict[int, Closure] = {}
        self._unsettled: deque[int] = deque()  # ids in order; final ones go when they are first
        self._settled: list[Closure] = []  # for the next news
        self._cancels: list[Cancel] = []  # for the next news

    def __len__(self) -> int:
        return len(self._open)

    def get(self, closure_id: int) -> Closure | None:
        """Return the closure with this id, unless it is final or unknown."""
        return self._open.get(closure_id)

    def low_water(self) -> int:
        """Return the lowest id that is not final, or the next one if all are. It never falls."""
        unsettled, still_open = self._unsettled, self._open
        while unsettled and unsettled[0] not in still_open:
            unsettled.popleft()
        return unsettled[0] if unsettled else self.last_id + 1

    # --- how closures begin ---

    def add(self, closure: Closure) -> None:
        """Note a closure whose id is above all that were added before."""
        closure_id = closure.id
        self.last_id = closure_id
        self._open[closure_id] = closure
        self._unsettled.append(closure_id)

    def queue(self, closure: Closure) -> None:
        """Add a new closure that waits for nothing but a worker."""
        move(closure, Event.QUEUE)
        self.add(closure)
        self._dispatcher.queued.add(closure)

    def wait_or_queue(self, closure: Closure) -> None:
        """Add a new closure that may have to wait for inputs, or behind a barrier."""
        if self.waits.begin(closure):
            move(closure, Event.WAIT)
            self.add(closure)
        else:
            self.queue(closure)

    def queue_late(self, closures: Sequence[Closure]) -> None:
        """Queue, at their places, those that wait for nothing any more."""
        for closure in closures:
            move(closure, Event.QUEUE)
            self._dispatcher.queued.add(closure)

    def come_back(self, closures: list[Closure], event: Event) -> int:
        """Queue again what no worker holds any more, or end it cancelled; return how many queued.

        All are queued first: one that ends cancelled can fail another, and that ends everything.
        """
        stopped = [closure for closure in closures if closure.state is State.CANCELLING]
        back = [closure for closure in closures if closure.state is State.HELD]
        for closure in back:
            move(closure, event)
            self._dispatcher.queued.add(closure)
        for closure in stopped:
            self.end(closure, event, self.errors.cancelled(closure))
        if self.errors.request is not None:
            self._cancel_queued(back)
            return 0
        return len(back)

    # --- how they end ---

    def finish(self, closures: list[Closure]) -> None:
        """These have their values."""
        still_open = self._open
        for closure in closures:
            move(closure, Event.FINISH)
            del still_open[closure.id]
            if closure.dependents is not None:
                self.queue_late(self.waits.has_value(closure))
            if closure.identity is not None:
                self._identities.end(closure, closure.identity)
        self._shrink()
        self._settled += closures
        self.totals[State.FINISHED] += len(closures)

    def end(self, closure: Closure, event: Event, error: BaseException) -> None:
        """A closure ends without a value, and those that needed it do. A replica concerns nobody.

        If one of them fails, that ends everything.
        """
        self._settle(closure, event, error)
        if not closure.is_replica:
            self._ended_without_value(closure)

    def ask_to_stop(self, closure: Closure) -> None:
        """Let the worker that holds a closure be asked to stop it."""
        move(closure, Event.ASK_TO_STOP)
        self._cancels.append(Cancel(closure.worker, (closure.id,)))

    def end_on_request(self, reason: str) -> None:
        """Cancel what no worker holds; the rest goes to its end."""
        self.errors.request = reason
        self.errors.ending = f"training was asked to stop: {reason}"
        self.errors.remedy = "schedule it again after join has returned"
        self._cancel_queued(list(self._open.values()))

    def _cancel_queued(self, closures: Sequence[Closure]) -> None:
        for closure in closures:
            if closure.state is State.WAITING or closure.state is State.QUEUED:
                self._settle(closure, Event.CANCEL, self.errors.cancelled(closure))

    def end_all(self, reason: str, remedy: str | None = None) -> None:
        """Cancel what no worker holds, and ask for the rest to be stopped, if not done before."""
        if self.errors.ending is not None and self.errors.request is None:
            return
        self.errors.request = None
        self.errors.ending, self.errors.remedy = reason, remedy or SCHEDULE_AGAIN
        self._cancel_queued(list(self._open.values()))
        for worker, closures in self._dispatcher.held():
            running = [closure for closure in closures if closure.state is State.HELD]
            for closure in running:
                move(closure, Event.ASK_TO_STOP)
            if running:
                self._cancels.append(Cancel(worker, tuple(closure.id for closure in running)))

    def news(self) -> list[Settle | Cancel]:
        """Return what is to be said since this was asked last: one Settle at most, then Cancels."""
        news: list[Settle | Cancel] = []
        if self._settled:
            news.append(Settle(tuple(self._settled)))
            self._settled = []
        if self._cancels:
            news += self._cancels
            self._cancels = []
        return news

    def _settle(self, closure: Closure, event: Event, error: BaseException) -> None:
        """Make a closure final that has no value."""
        if closure.state is State.QUEUED:
            self._dispatcher.queued.discard(closure)
        move(closure, event)
        closure.error = error
        closure.dependencies = ()
        if closure.identity is not None:
            self._identities.end(closure, closure.identity)
        self._open.pop(closure.id, None)
        self._shrink()
        self.totals[closure.state] += 1
        self._settled.append(closure)

    def _shrink(self) -> None:
        """Keep nothing once nothing is open: a dict keeps the largest table that it needed."""
        if not self._open:
            self._open.clear()
            self._unsettled.clear()

    def _ended_without_value(self, closure: Closure) -> None:
        """Settle all that needed this closure's value, and end everything if this is an error."""
        chain = [closure]
        for source in chain:  # which grows
            for dependent in self.waits.has_no_value(source):
                self._settle(dependent, *without_input(dependent, source))
                chain.append(dependent)
        # One error for the whole chain: the others have the same cause.
        failed = next((c for c in chain if c.state is State.FAILED), None)
        if failed is not None:
            self.errors.pending.append(error_of(failed))
            self.end_all(f"{failed} failed{f' on {failed.worker}' if failed.worker else ''}")
        if closure.state is State.EXHAUSTED:
            self.errors.note_end_of_data(closure)
