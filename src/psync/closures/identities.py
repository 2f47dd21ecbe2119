"""Identities of closures that may come again after they have ended: those of data shards.

A closure that is lost with its worker runs again under its id, so that ps tasks know its calls. A
data shard whose closure has ended without finishing comes again in *another* closure, with an id of
its own in the queue. On ps tasks that has the number of the first one: what that has done is not
done twice::

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
the next one (``api.data_shards``), and ``EndedClosures``, while a rollback may undo it. Once nobody
has it no closure can come again, and it is not kept any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from psync.wire.closure_numbers import MAX_RUN, numbered

if TYPE_CHECKING:
    from psync.closures.closure import Closure


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Identity:
    """What closures that do one thing, one after another, are for ps tasks."""

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
