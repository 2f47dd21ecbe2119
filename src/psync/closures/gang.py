"""The state machine of a gang: one function on several workers at once, with collectives.

    RUNNING --all replicas have returned--> ENDED
    RUNNING --an error--> ENDING --all replicas have ended, nothing is merged--> ENDED

Replicas meet in *collectives*. The k-th call of every replica is the k-th collective; when all
are there it is *merged*: one function is called with the values of all, and its result answered
to all. Everything is all or none:

    what happens                                       what becomes of it
    all replicas have come to the k-th                 Merge, then an answer to all
    one comes to another than the first one has        error: "different collectives"
    one has returned where another waits               error: "different numbers"
    a replica fails, or its worker is lost             error that names it
    a replica gives up waiting                         error that names it
    the caller cancels                                 that error

The first error is the gang's. All waiting and later collectives fail with it, the merge function
is stopped, and replicas that do not wait are asked to stop. So no replica waits for ever: one that
waits, waits for a running replica or a running merge function; if all that are left wait, they are
merged or refused.

Source: ``merge_call`` of TensorFlow's ``mirrored_run``, whose replicas are threads of one process;
there, a replica that stays away is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.errors import (
    ClosureCancelled,
    ContextError,
    EndOfData,
    PsyncError,
    WorkerLost,
)


@dataclass(slots=True)
class _Replica:
    """What is known of one replica."""

    worker: str
    arrived: int = 0  # collectives that it has come to
    ended: bool = False


@dataclass(slots=True)
class _Collective:
    """One that not all have been answered."""

    what: str  # as the first replica that came calls it
    requests: dict[int, Any] = field(default_factory=dict)  # by replica, as they came


@dataclass(eq=False)
class Gang:
    """One gang that has begun. Single owner, no clock; never blocks.

    Args:
        workers: Name of the worker of each replica, by replica id; at least one.
        stop: Asks a replica to stop. It still ends, one way or another.
        stop_merging: Cancels the functions that run; ``merged`` follows for each all the same.

    Attributes:
        error: The first; None: none so far.
    """

    workers: Sequence[str]
    stop: Callable[[int], object]
    stop_merging: Callable[[], object]
    error: BaseException | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._replicas = [_Replica(worker) for worker in self.workers]
        self._open: dict[int, _Collective] = {}  # by number, in order
        self._merging: set[int] = set()
        self._cause: PsyncError | None = None  # as replicas are told of it

    @property
    def has_ended(self) -> bool:
        """Whether all replicas have ended, and nothing is being merged. Final."""
        return all(replica.ended for replica in self._replicas) and not self._merging

    def waits(self, replica: int) -> bool:
        """Whether a replica is in a collective: it goes on when others have come."""
        return any(replica in each.requests for each in self._open.values())

    def describe(self) -> str:
        """Say on whom those wait who are in a collective; "" if nobody is."""
        for number, collective in self._open.items():
            if number not in self._merging:
                here = ", ".join(self._name(replica) for replica in sorted(collective.requests))
                away = [r for r in range(len(self._replicas)) if r not in collective.requests]
                missing = ", ".join(self._name(replica) for replica in away)
                return f"{here} in {collective.what}, and not yet {missing}"
        if self._merging:
            return f"{self._open[min(self._merging)].what} is being computed"
        return ""

    # What replicas do.

    def arrive(self, replica: int, what: str, request: Any) -> int | None:
        """A replica has come to its next collective.

        Args:
            replica: Its id.
            what: Names the collective, for messages.
            request: Waits for the result; its ``fail`` answers with an error.

        Returns:
            Its number if all are there: its function is to be called with what the requests of
            all bring, then ``merged``. None: not all are.
        """
        record = self._replicas[replica]
        number = record.arrived
        record.arrived += 1
        if self._cause is not None:
            request.fail(self._cause)
            return None
        collective = self._open.setdefault(number, _Collective(what))
        collective.requests[replica] = request
        others = enumerate(self._replicas)
        left = [r for r, other in others if other.ended and other.arrived <= number]
        if collective.what != what:
            first = self._name(next(iter(collective.requests)))
            error = ContextError(
                f"different collectives: {first} is in {collective.what}, {self._name(replica)} in "
                f"{what}",
                hint="every replica must call the same ones in the same order",
            )
            self._fail(error, error)
        elif left:  # it has returned before it came here
            self._fail_by_numbers(left[0], replica, number)
        elif len(collective.requests) == len(self._replicas):
            self._merging.add(number)
            return number
        return None

    def requests(self, number: int) -> list[Any]:
        """Return what waits in a collective to which all have come, by replica."""
        return [request for _, request in sorted(self._open[number].requests.items())]

    def merged(self, number: int) -> list[Any]:
        """The function of a collective has ended: return the requests that get what came of it."""
        self._merging.remove(number)
        requests = self.requests(number)  # none if the gang has failed
        del self._open[number]
        return requests

    def gave_up(self, replica: int) -> None:
        """A replica waits in a collective no more, although nobody has answered."""
        what = next((c.what for c in self._open.values() if replica in c.requests), "a collective")
        error = ClosureCancelled(
            f"{self._name(replica)} gave up {what}, which needs all replicas",
            hint="it was cancelled there, for example by a timeout, or returned without awaiting "
            "it",
        )
        self._fail(error, error)

    def finished(self, replica: int) -> None:
        """A replica has returned."""
        self._replicas[replica].ended = True
        if self.waits(replica):
            self.gave_up(replica)
        elif self._open and self._cause is None:
            number, collective = next(iter(self._open.items()))  # to which it has not come
            self._fail_by_numbers(replica, next(iter(collective.requests)), number)

    def failed(self, replica: int, error: BaseException) -> None:
        """A replica has raised ``error``, was stopped, or its worker was lost (WorkerLost)."""
        self._replicas[replica].ended = True
        self._fail(error, self._cause_of(replica, error))

    def cancel(self, error: PsyncError) -> None:
        """End the gang from outside; ``error`` is its error, if there is none yet."""
        if not self.has_ended:
            self._fail(error, error)

    # Decisions.

    def _fail(self, error: BaseException, cause: PsyncError) -> None:
        """End all, once: ``error`` is the gang's, ``cause`` is what those who wait are told."""
        if self._cause is not None:
            return
        self.error, self._cause = error, cause
        if self._merging:
            self.stop_merging()
        waiting = [each for open_one in self._open.values() for each in open_one.requests.items()]
        self._open = {number: _Collective(self._open[number].what) for number in self._merging}
        for _, request in waiting:
            request.fail(cause)
        for replica, record in enumerate(self._replicas):
            if not record.ended and replica not in dict(waiting):
                self.stop(replica)

    def _fail_by_numbers(self, left: int, waits: int, number: int) -> None:
        error = ContextError(
            f"different numbers of collectives: {self._name(left)} returned after "
            f"{self._replicas[left].arrived}, {self._name(waits)} is in its "
            f"number {number + 1}, {self._open[number].what}",
            hint="every replica must call merge_call, all_reduce, apply_gradients and assign "
            "equally often",
        )
        self._fail(error, error)

    def _cause_of(self, replica: int, error: BaseException) -> PsyncError:
        """Return what the others are told of the end of a replica."""
        if isinstance(error, WorkerLost):
            return WorkerLost(error.task, f"was lost with replica {replica}, which all wait for")
        if isinstance(error, EndOfData):
            return ClosureCancelled(f"{self._name(replica)} met the end of its data")
        text = str(error.args[0]) if error.args else ""
        return ClosureCancelled(
            f"{self._name(replica)} failed: {type(error).__name__}{f': {text}' if text else ''}"
        )

    def _name(self, replica: int) -> str:
        return f"replica {replica} on {self._replicas[replica].worker}"
