"""The record of one closure: its states, and the table of moves between them.

Every change of a closure's state goes through ``move`` and ``MOVES``. The coordinator cannot know
which of the closures that it sent to a worker has started until the worker says so; HELD claims no
more than that the worker has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet, WeakValueDictionary

from psync.errors import LocalProtocolError
from psync.wire.closure_numbers import MAX_RUN, numbered


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Identity:
    """What closures that do one thing, one after another, are for ps tasks.

    A closure that is lost with its worker runs again under its id, so that ps tasks know its calls.
    A data shard whose closure has ended without finishing comes again in *another* closure, with an
    id of its own in the queue. On ps tasks that has the number of the first one: what that has done
    is not done twice::

                           began on a worker   kept on ps tasks
        queued             no                  no: its id is not below the low-water mark
        held, or queued
        after a loss       yes                 once an error refuses what runs
        ended, not done    yes                 yes: it may come again, as the next run
        ended, not done    no                  no: the next closure is a first run
        done               yes                 no, so ps tasks forget its calls
        undone by a        yes                 yes: the checkpoint may have some of its calls
        rollback

    An identity lasts as long as somebody has it: its closure while that is open, whoever schedules
    the next one (``api.data_shards``), and ``EndedClosures``, while a rollback may undo it. Once
    nobody has it no closure can come again, and it is not kept any more.
    """

    what: Any  # they do, for whoever schedules them
    undone: list[Identity] = field(default_factory=list)  # where it is put when it is undone
    first: int = -1  # id of the first closure
    newest: int = -1  # id of the last one
    run: int = -1  # number of the last one
    is_open: bool = False  # the last one has not ended
    has_begun: bool = False  # a worker had one that has ended
    is_done: bool = False


class Identities:
    """The identities of one queue's closures. Single owner."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, Identity] = WeakValueDictionary()  # by first closure
        self._may_come: WeakSet[Identity] = WeakSet()  # again: they have begun, and are not done

    def get(self, first: int) -> Identity | None:
        """Return the identity of the closures of which the first one had this id."""
        return self._known.get(first)

    def begin(self, closure: Closure, identity: Identity) -> None:
        """A closure is scheduled: it is the next run, or the first if none was on a worker."""
        if not identity.has_begun:
            identity.first, identity.run = closure.id, -1
            self._known[closure.id] = identity
        identity.newest, identity.is_open, identity.is_done = closure.id, True, False
        identity.run += 1
        closure.number = numbered(identity.first, identity.run)

    def end(self, closure: Closure, identity: Identity) -> None:
        """The newest closure has ended."""
        identity.is_open = False
        identity.has_begun = identity.has_begun or closure.worker != ""
        identity.is_done = closure.error is None
        if identity.is_done:
            self._may_come.discard(identity)
        elif identity.has_begun:
            self._may_come.add(identity)

    def undo(self, identity: Identity) -> None:
        """A rollback has undone updates of it: it is done no more."""
        if identity.is_done:
            identity.is_done = False
            identity.undone.append(identity)
            self._may_come.add(identity)

    def kept(self, below: int, held: Iterable[Closure], *, ending: bool) -> list[tuple[int, int]]:
        """Return what ps tasks must not forget, as ``FinalBelow`` tells it.

        Args:
            below: Closures with smaller ids are final.
            held: Those that workers hold.
            ending: Whether what these still do is refused.
        """
        runs = {closure.identity for closure in held if closure.identity is not None}
        return sorted(
            (identity.first, min(identity.run + (ending or not identity.is_open), MAX_RUN))
            for identity in runs.union(self._may_come)
            if identity.first < below
        )


class State(Enum):
    """Where a closure is. The states without moves are final."""

    NEW = "new"  # not scheduled yet
    WAITING = "waiting"  # for the value of an earlier closure, or for a gang to end
    QUEUED = "queued"  # for a worker
    HELD = "held"  # sent to a worker, which has started it or not
    CANCELLING = "cancelling"  # held, and the worker was asked to stop it
    FINISHED = "finished"  # has a value
    FAILED = "failed"  # has an error that join raises
    EXHAUSTED = "exhausted"  # its data, or that of an input, had ended
    CANCELLED = "cancelled"  # not run, or stopped

    __hash__ = object.__hash__  # Enum's own is written in Python: 100 ns in every move


Needs: TypeAlias = frozenset[tuple[str, int]]
"""Per-worker data that a closure takes: (uid of the iterator, pass over its data) of each."""

NO_DATA: Needs = frozenset()

_UNSENT = frozenset({State.QUEUED, State.FAILED, State.EXHAUSTED, State.CANCELLED})
_ENDED = frozenset({State.FINISHED, State.FAILED, State.EXHAUSTED})

MOVES: dict[State, frozenset[State]] = {
    State.NEW: _UNSENT | {State.WAITING},
    State.WAITING: _UNSENT,
    # It fails where it was lost with too many workers.
    State.QUEUED: frozenset({State.HELD, State.FAILED, State.CANCELLED}),
    State.HELD: _ENDED | {State.QUEUED, State.CANCELLING},
    State.CANCELLING: _ENDED | {State.CANCELLED},
    **dict.fromkeys((*_ENDED, State.CANCELLED), frozenset()),
}
"""The states that may follow each one."""


@dataclass(slots=True, eq=False, repr=False)
class Closure:
    """One scheduled call of a step function. Only the queue changes it; others read it."""

    id: int  # grows in the order of ``schedule``
    payload: Any = None  # what is needed to send it and to settle it; the queue never looks
    name: str = ""  # of the step function, for messages
    needs: Needs = NO_DATA  # it runs where none of these has ended, if there is such a worker
    inline_bytes: int = 0  # sent with it
    dependencies: Sequence[Closure] = ()  # it takes their values; emptied once it waits no more
    identity: Identity | None = None  # if it may come again in another closure
    number: int = -1  # on ps tasks, if it has an identity; else its id is
    state: State = State.NEW
    error: BaseException | None = None  # how it ended, if not FINISHED
    worker: str = ""  # holds it now, or held it last; "" before the first
    lost_on: tuple[str, ...] = ()  # workers that were lost, perhaps by its fault, in order
    times_back: int = 0  # how often a worker was gone that held it, for whatever reason
    num_missing: int = 0  # dependencies that have no value yet
    dependents: list[Closure] | None = None  # those that wait for the value of this one
    known_started: bool = False  # its worker was asked to give it back and did not
    in_collective: bool = False  # it runs, and waits for other closures of its gang
    is_replica: ClassVar[bool] = False  # one of a gang, see ``Replica``

    @property
    def number_on_ps(self) -> int:
        """Under which number ps tasks know it."""
        return self.id if self.identity is None else self.number

    @property
    def is_final(self) -> bool:
        """Whether nothing can happen to it any more."""
        return not MOVES[self.state]

    def __str__(self) -> str:
        return f"closure {self.id} ({self.name})" if self.name else f"closure {self.id}"

    def __repr__(self) -> str:
        where = f" on {self.worker}" if self.worker else ""
        return f"<{self}, {self.state.value}{where}>"


class Replica(Closure):
    """One of a gang: sent to a certain worker, run once at most, and its end concerns no other.

    Its error is not one of the queue: it does not end what else is scheduled.
    """

    is_replica = True


def move(closure: Closure, state: State) -> None:
    """Change the state of ``closure``.

    Raises:
        LocalProtocolError: If this one does not follow its state.
    """
    if state not in MOVES[closure.state]:
        raise LocalProtocolError(
            f"{closure} cannot become {state.value}: it is {closure.state.value}"
        )
    closure.state = state
