"""The table of failpoints: each is the beginning or the end of a method.

A method that is called for more than one purpose has a condition, which is given what the method
is given. What is no row here is a method of a subclass by hand: see ``interrupted``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from psync.checkpoints.files import Writer
from psync.client.link import Answers, Outgoing
from psync.client.ps import PlanUpdate
from psync.client.sync import PartAnswers, SyncClient
from psync.coordinator import Coordinator
from psync.net.connection import OwnRequest, Request
from psync.ps.snapshots import Snapshots
from psync.ps.updates import PsUpdate, PsUpdates
from psync.store.commit_log import CommitLog
from psync.sync.ps_sync import PsSync
from psync.sync.step_closer import StepCloser
from psync.worker.session import Session

T = TypeVar("T")

BETWEEN_PS = "worker.push.between_ps"  # one ps task has answered, nothing is sent to the next
STEP_DECIDED = "ps0.step.decided"  # a synchronous step is to be closed, no other ps knows


class Place(NamedTuple):
    """Where a failpoint is."""

    name: str
    cls: type
    method: str
    is_end: bool  # else it is reached before the method does anything
    only: Callable[..., bool] = lambda *_: True


def _is_push(_: PsUpdates, update: PsUpdate, *__: Any) -> bool:
    return update.known.is_push


def _is_no_push(_: PsUpdates, update: PsUpdate, *__: Any) -> bool:
    return not update.known.is_push


def _is_update(_: Outgoing, update: Answers[Any]) -> bool:
    return isinstance(update, PlanUpdate)  # of variables


def _came(_: PsUpdates, request: Request[Any]) -> bool:
    return not isinstance(request, OwnRequest)  # not out of the log of another one


def _is_current(coordinator: Coordinator, request: Request[Any]) -> bool:
    # Not one of a worker that was given up.
    return coordinator.workers.current(request.peer) is not None


BEGIN, END = False, True

PLACES = (
    # Arguments are there, the step has not begun.
    Place("worker.closure.start", Session, "_call", BEGIN),
    # The step has returned, its result is not sent.
    Place("worker.closure.end", Session, "_call", END),
    # Nothing is sent.
    Place("worker.push.begun", Outgoing, "deliver", BEGIN, _is_update),
    Place("worker.push.begun", SyncClient, "contribute", BEGIN),
    # All parts of a synchronous push are on their way.
    Place("worker.push.sent", PartAnswers, "send", END),
    # All ps tasks have answered, the step does not know yet.
    Place("worker.push.answered", Outgoing, "deliver", END, _is_update),
    Place("worker.push.answered", SyncClient, "contribute", END),
    # Complete, nothing is applied.
    Place("ps.push.received", PsUpdates, "_arrived", BEGIN, _came),
    # Applied and recorded, not answered.
    Place("ps.push.applied", PsUpdates, "_applied", BEGIN, _is_push),
    Place("ps.assign.applied", PsUpdates, "_applied", BEGIN, _is_no_push),
    # Entries are about to be sent to a backup, and nothing is applied.
    Place("ps.backup.sending", CommitLog, "to_ship", END),
    # A backup has them, nothing is applied here.
    Place("ps.backup.taken", CommitLog, "note_taken", BEGIN),
    # Shards exist, not answered.
    Place("ps.create.done", PsUpdates, "_fill_shards", END),
    # A part of a synchronous push is held here, ps 0 does not know.
    Place("ps.part.held", PsSync, "_tell", BEGIN),
    # Norms of a synchronous step are about to be measured here.
    Place("ps.step.measured", PsSync, "_measure", BEGIN),
    # A synchronous step is applied here, just now, ps 0 does not know.
    Place("ps.step.applied", PsSync, "_applied", BEGIN, lambda *given: len(given) > 3),
    # Ps 0 knows norms of a synchronous step, no ps applies it yet.
    Place("ps0.step.measured", StepCloser, "_conclude", END),
    # It is applied on every ps, the log of ps 0 does not say so.
    Place("ps0.step.applied", StepCloser, "_ended", BEGIN),
    # Closures are about to be sent.
    Place("coordinator.dispatch", Coordinator, "_send", BEGIN),
    # Results came in, nothing is settled.
    Place("coordinator.result", Coordinator, "_results", BEGIN, _is_current),
    # A ps is about to write its file of a checkpoint.
    Place("checkpoint.ps.write", Snapshots, "_written", BEGIN),
    # A ps's file of a checkpoint is written, and the checkpoint does not say so yet.
    Place("checkpoint.file.written", Writer, "add_file", BEGIN),
    # A checkpoint's files are written, COMMIT is not.
    Place("checkpoint.before_commit", Writer, "_mark_complete", BEGIN),
    # It is complete but for its name.
    Place("checkpoint.before_rename", Writer, "_rename_to", BEGIN),
)

NAMES = frozenset({BETWEEN_PS, STEP_DECIDED, *(place.name for place in PLACES)})
"""Every failpoint there is."""


@functools.cache
def with_places(base: type[T], of: type) -> type[T]:
    """Return a subclass that tells ``failpoints``, an attribute of it, of the places it reaches.

    Args:
        base: A subclass of ``of``.
        of: The class in the table, or a subclass of it.
    """
    here = [place for place in PLACES if issubclass(of, place.cls)]
    made = type(base.__name__, (base,), {"__slots__": (), "__doc__": base.__doc__})
    for method in {place.method: None for place in here}:
        setattr(made, method, _reaching(made, method, [p for p in here if p.method == method]))
    return made


def _reaching(made: type, method: str, places: Sequence[Place]) -> Callable[..., Any]:
    plain = getattr(made, method)

    def reach(is_end: bool, *given: Any) -> None:
        for place in places:
            if place.is_end is is_end and place.only(*given):
                given[0].failpoints.hit(place.name)

    # What is called is looked up each time: mutants take the place of methods of the class.
    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def later(self: Any, *args: Any, **options: Any) -> Any:
            reach(BEGIN, self, *args)
            result = await getattr(super(made, self), method)(*args, **options)
            reach(END, self, *args)
            return result

        return later

    @functools.wraps(plain)
    def now(self: Any, *args: Any, **options: Any) -> Any:
        reach(BEGIN, self, *args)
        result = getattr(super(made, self), method)(*args, **options)
        reach(END, self, *args)
        return result

    return now
