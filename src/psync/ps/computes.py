"""Computes of a ps: work on arrays, first in, first out for each shard and each accumulator.

An entry of the log is judged within a turn of the loop; what it does to arrays is a *compute*. The
computes of one shard are done in the order of their entries, one after the other; those of shards
that do not meet do not wait for each other. An accumulator is one more such place, with its name
for a key. A small compute, before which there is none, is done within the turn in which its entry
is judged; a large one piece by piece, with the loop running in between.

Nothing can refuse a compute: what could be wrong was judged before. One that fails has torn its
shards, and the task ends; so does a backup's process, and not the other one of the pair. The one
exception are rules of users (``psync.rules``): their results are swapped in, so a rule that raises
leaves its shard whole. Such a compute goes to its end, and ``Compute.done`` raises what the answer
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from psync.errors import BusyError
from psync.ps.cooperative_work import LongWork
from psync.store.store import Key, ShardStore

Place = Key | str
"""Key of a shard, or name of an accumulator."""

Touches = Callable[[Any], Sequence[Key]]
"""Returns the shards, given a message, whose computes have to be done before."""


class Compute(msgspec.Struct, eq=False):
    """What an entry does to arrays.

    Args:
        keys: Of what it reads or changes.
        done: Answers, when it is done; raises a RuleError instead.
        nbytes: That it touches.
        at_once: Does it, if that is little; raises BusyError, with nothing done, if shards are
            read or filled just now.
        in_pieces: Or else; None: there is nothing to do.
        ended: Told of the end, after ``done``, if it was not done at once.
        behind: Places at which others are before it then.
    """

    keys: Sequence[Place]
    done: Callable[[], None]
    nbytes: int = 0
    at_once: Callable[[], None] = lambda: None
    in_pieces: Callable[[], Awaitable[None]] | None = None
    ended: Callable[[Exception | None], None] = lambda _: None
    behind: int = 0


class Computes:
    """The computes of one store.

    Args:
        store: Has the shards.
        work: Of the process.
    """

    def __init__(self, store: ShardStore, work: LongWork) -> None:
        self._store = store
        self._work = work
        self.queues: dict[Place, deque[Compute]] = {}  # the first of each is being done, or waits

    @property
    def waiting(self) -> int:
        """How many are not done."""
        return len({id(each) for queue in self.queues.values() for each in queue})

    def check_idle(self) -> None:
        """Raise BusyError unless all of shards are done."""
        if shards := sum(not isinstance(key, str) for key in self.queues):
            raise BusyError(f"{self._store.task}: updates of {shards} shards wait")

    def waits_at(self, places: Sequence[Place]) -> bool:
        """Return whether some of these places are not done."""
        return bool(self.queues) and any(place in self.queues for place in places)

    async def settled(self, places: Sequence[Place] | None = None) -> None:
        """Wait until all are done, or those of some places.

        Raises:
            PsyncError: The task ends.

        Cancellation: Safe.
        """
        while self.queues if places is None else self.waits_at(places):
            await self._work.next_turn()

    def add(self, compute: Compute, ended: Callable[[Exception | None], None]) -> None:
        """Do a compute when those before it are done, and answer; then call ``ended``."""
        compute.ended = ended
        for key in dict.fromkeys(compute.keys):
            queue = self.queues.setdefault(key, deque())
            compute.behind += bool(queue)
            queue.append(compute)
        if not compute.behind:
            self._work.to_the_end(self._run(compute))

    async def _run(self, compute: Compute) -> None:
        failed: Exception | None = None
        try:
            self._work.check_whole()
            if compute.in_pieces is not None:
                await compute.in_pieces()
        except Exception as exc:
            if not self._work.is_torn:
                self._work.give_up(exc)
            failed = exc
        self._end(compute)
        if failed is None:
            try:
                compute.done()
            except Exception as exc:
                failed = exc
        compute.ended(failed)
        self._work.wake()

    def _end(self, compute: Compute) -> None:
        for key in dict.fromkeys(compute.keys):
            queue = self.queues[key]
            queue.popleft()
            if not queue:
                del self.queues[key]
                continue
            queue[0].behind -= 1
            if not queue[0].behind:
                self._work.to_the_end(self._run(queue[0]))
