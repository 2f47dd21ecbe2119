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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from psync.errors import (
    ClosureCancelled,
    ContextError,
    EndOfData,
    PsyncError,
    WorkerLost,
)


@dataclass(frozen=True, slots=True)
class Merge:
    """All replicas have come to this collective: call the function; ``merged`` follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell those of these replicas who wait in a collective that it will not be."""

    replicas: tuple[int, ...]
    error: PsyncError


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask these replicas to stop. Each still ends, one way or another."""

    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopMerging:
    """Cancel the functions that are running; ``merged`` follows for each all the same."""


GangAction: TypeAlias = Merge | Refuse | Stop | StopMerging


@dataclass(slots=True)
class _Replica:
    """What is known of one replica."""

    worker: str
    arrived: int = 0  # collectives that it has come to
    answered: int = 0  # of these, the ones that it waits in no more
    ended: bool = False

    @property
    def waits(self) -> bool:
        return self.arrived > self.answered


@dataclass(slots=True)
class _Collective:
    """One that not all have been answered."""

    what: str  # as the first replica that came calls it
    here: list[int] = field(default_factory=list)  # in the order of their coming


class Gang:
    """One gang that has begun. Single owner, no clock; never blocks.

    Every method that is told something returns the actions that follow; perform all, in order.

    Args:
        workers: Name of the worker of each replica, by replica id; at least one.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        self._replicas = [_Replica(worker) for worker in workers]
        self._open: dict[int, _Collective] = {}  # by number, in order
        self._merging: set[int] = set()
        self._cause: PsyncError | None = None  # as replicas are told of it
        self.error: BaseException | None = None  # the first

    @property
    def has_ended(self) -> bool:
        """Whether all replicas have ended, and nothing is being merged. Final."""
        return all(replica.ended for replica in self._replicas) and not self._merging

    def waits(self, replica: int) -> bool:
        """Whether a replica is in a collective: it goes on when others have come."""
        return self._replicas[replica].waits

    def describe(self) -> str:
        """Say on whom those wait who are in a collective; "" if nobody is."""
        for number, collective in self._open.items():
            if number not in self._merging:
                here = ", ".join(self._name(replica) for replica in sorted(collective.here))
                away = [r for r in range(len(self._replicas)) if r not in collective.here]
                missing = ", ".join(self._name(replica) for replica in away)
                return f"{here} in {collective.what}, and not yet {missing}"
        if self._merging:
            return f"{self._open[min(self._merging)].what} is being computed"
        return ""

    # What replicas do.

    def arrive(self, replica: int, what: str) -> list[GangAction]:
        """A replica has come to its next collective."""
        record = self._replicas[replica]
        number = record.arrived
        record.arrived += 1
        if self._cause is not None:
            return [self._refuse([replica], self._cause)]
        collective = self._open.setdefault(number, _Collective(what))
        collective.here.append(replica)
        if collective.what != what:
            error = ContextError(
                f"different collectives: {self._name(collective.here[0])} is in {collective.what}, "
                f"{self._name(replica)} in {what}",
                hint="every replica must call the same ones in the same order",
            )
            return self._fail(error, error)
        for left, other in enumerate(self._replicas):
            if other.ended and other.arrived <= number:  # it has returned before it came here
                error = self._different_numbers(left, replica, number)
                return self._fail(error, error)
        if len(collective.here) < len(self._replicas):
            return []
        self._merging.add(number)
        return [Merge(number)]

    def merged(self, number: int) -> bool:
        """The function of a collective has ended; return whether all get what came of it."""
        self._merging.remove(number)
        if self._cause is not None:
            return False
        del self._open[number]
        for record in self._replicas:
            record.answered += 1
        return True

    def gave_up(self, replica: int) -> list[GangAction]:
        """A replica waits in a collective no more, although nobody has answered."""
        what = next((c.what for c in self._open.values() if replica in c.here), "a collective")
        error = ClosureCancelled(
            f"{self._name(replica)} gave up {what}, which needs all replicas",
            hint="it was cancelled there, for example by a timeout, or returned without awaiting "
            "it",
        )
        return self._fail(error, error)

    def finished(self, replica: int) -> list[GangAction]:
        """A replica has returned."""
        record = self._replicas[replica]
        record.ended = True
        if record.waits:
            return self.gave_up(replica)
        if not self._open:
            return []
        number, collective = next(iter(self._open.items()))  # to which it has not come
        error = self._different_numbers(replica, collective.here[0], number)
        return self._fail(error, error)

    def failed(self, replica: int, error: BaseException) -> list[GangAction]:
        """A replica has raised ``error``, was stopped, or its worker was lost (WorkerLost)."""
        self._replicas[replica].ended = True
        return self._fail(error, self._cause_of(replica, error))

    def cancel(self, error: PsyncError) -> list[GangAction]:
        """End the gang from outside; ``error`` is its error, if there is none yet."""
        return [] if self.has_ended else self._fail(error, error)

    # Decisions.

    def _fail(self, error: BaseException, cause: PsyncError) -> list[GangAction]:
        """End all, once: ``error`` is the gang's, ``cause`` is what those who wait are told."""
        if self._cause is not None:
            return []
        self.error, self._cause = error, cause
        living = [r for r, record in enumerate(self._replicas) if not record.ended]
        waiting = [r for r in living if self._replicas[r].waits]
        running = [r for r in living if not self._replicas[r].waits]
        actions: list[GangAction] = [StopMerging()] if self._merging else []
        if waiting:
            actions.append(self._refuse(waiting, cause))
        if running:
            actions.append(Stop(tuple(running)))
        return actions

    def _refuse(self, replicas: Sequence[int], cause: PsyncError) -> Refuse:
        for replica in replicas:
            self._replicas[replica].answered = self._replicas[replica].arrived
        return Refuse(tuple(replicas), cause)

    def _different_numbers(self, left: int, waits: int, number: int) -> ContextError:
        return ContextError(
            f"different numbers of collectives: {self._name(left)} returned after "
            f"{self._replicas[left].arrived}, {self._name(waits)} is in its "
            f"number {number + 1}, {self._open[number].what}",
            hint="every replica must call merge_call, all_reduce, apply_gradients and assign "
            "equally often",
        )

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
