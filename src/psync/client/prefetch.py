"""Prefetched values: those that come with the answer to a push, for the pull that follows it.

A push may ask for values, and the ps tasks read them once it is applied:

- Of an asynchronous push each ps sends those of its own shards with its answer, unless one of them
  is busy with another update. Only ``push_pull`` asks for them.
- Of a synchronous one ps 0 sends all with the token, and the other ps tasks have sent theirs to it
  when the step was applied: up to 64 KiB, if no shard is busy and there is no second group.

A synchronous push asks by itself for the set that was pulled right after the last one, so a step of
small variables needs no pull. Those values are of a pull that was made early: read on the ps tasks
after the push was sent, and used later. The caller of that pull must not be able to tell, so they
are dropped unless all of this holds:

- The pull is the next thing that this task does with the ps tasks.
- It begins in a closure that was on this worker when the push was sent: what a program did before
  it scheduled the closure, or before it gave it its inputs, is in the values then.
- No update of this task was under way when the push was sent, and no other answer of a ps has come
  since.
- It begins in the turn of the loop in which the push is answered, and within a millisecond: a step
  that waits for anything in between, or computes, may have learned of newer values by other ways.
  If the closure ends in that turn, the values are for the next one, until that waits for something.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from psync.client.landing import Landing
from psync.client.plans import Plan, Request
from psync.client.ps_link import PsLink, Where
from psync.net.shared.windows import Windows
from psync.numerics.memory import BlockPool
from psync.wire.frames import SMALL_BODY_BYTES

Landed = tuple[Request, Where]
"""What is asked of a ps, and where its values belong."""

Steps = Sequence[tuple[int, int]]
"""(group, step) of the synchronous groups in one answer."""

GOOD_FOR_S = 0.001
"""A step that has not let go of the loop for so long has computed, or read something."""

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


@dataclass(slots=True)
class Wanted:
    """What a push asks for, and its values once they have come.

    Attributes:
        plan: Of the variables.
        arrays: Their values, read-only; nobody else has them. None: they have not begun to come.
        steps: That these are of, as the answers to pulls say it.
        room: For values that have not all come.
    """

    plan: Plan
    arrays: list[np.ndarray] | None = None
    steps: Sequence[Steps] = ()
    room: Landing | None = None

    def make_room(self, pool: BlockPool) -> None:
        """Take memory for the arrays: best while nothing else is to be done."""
        self.room = Landing(self.plan, pool)
        self.room.make_room()

    def receive(self, pool: BlockPool) -> list[memoryview]:
        """Return where the bytes belong, in order: the values are coming in, all at once."""
        room, self.room = self.room or Landing(self.plan, pool), None
        targets = [room.place(at) for at in range(len(self.plan.requests))]
        self.arrays = room.arrays()
        return [target for of_request in targets for target in of_request]

    def landings(self, push: Plan, pool: BlockPool, windows: Windows) -> Mapping[int, Landed]:
        """Return what comes with the answer of each ps; nothing, if a push does not reach all.

        Args:
            push: Plan of the push.
            pool: Memory of the arrays.
            windows: As for ``Landing``.
        """
        if self.plan.in_parts or push.in_parts:
            return {}  # of a push in several messages a ps would read before it is applied whole
        if not self.plan.ps <= push.ps:
            return {}
        self.room = room = Landing(self.plan, pool, windows=windows)
        return {
            request.ps: (request, functools.partial(room.place, at))
            for at, request in enumerate(self.plan.requests)
        }

    async def came(self, steps: Sequence[Steps]) -> None:
        """Each ps has answered; those that sent values said which steps these are of.

        Cancellation: There are no values then.
        """
        room, self.room = self.room, None
        if room is not None and len(steps) == len(self.plan.requests):
            self.arrays, self.steps = await room.values(), steps


class PulledAhead:
    """What one task has been sent ahead. Single owner.

    Args:
        links: To all ps tasks.
        now: The time, in seconds: finer than ``GOOD_FOR_S``.

    Attributes:
        is_used: Whether anything was pulled.
        arrivals: How often closures have come in.
    """

    def __init__(self, links: Sequence[PsLink], now: Callable[[], float]) -> None:
        self.is_used = False
        self.arrivals = 0
        self._arrivals_then = NEVER - 1  # when the last push was sent; before the first: anything
        self._links = links
        self._now = now
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._in_turn = True  # whether the loop has not gone on since a push was answered
        self._turns = 0  # so far; a number for ``_end_turn``
        self._calls_then = -1  # expected once the last push is answered; before the first: any
        self._asked: Wanted | None = None  # by the last push
        self._wanted: Wanted | None = None  # the same, once its values have come
        self._came = 0.0  # when they did

    def want(self, announced: Plan | None = None) -> Wanted | None:
        """A push is about to be sent, one message: return what it should ask for, if anything.

        Args:
            announced: What the program says that it pulls next; None: it does not say.
        """
        self._asked = self._wanted = None
        self._is_first = True
        self._arrivals_then = self.arrivals
        self._calls_then = self._calls() + 2  # and its answer
        plan = announced or self._plan
        if plan is None or plan.whole.nbytes > SMALL_BODY_BYTES:
            return None
        for link in self._links:
            if link.updates.under_way:
                return None
        self._asked = Wanted(plan)
        return self._asked

    def put(self, wanted: Wanted | None) -> None:
        """The push was answered, with values if any were wanted, and there were some.

        They are good for this turn of the loop: in it nothing is heard from anybody.
        """
        if wanted is not None and wanted is self._asked and wanted.arrays is not None:
            self._wanted, self._came = wanted, self._now()
        self._begin_turn()

    def begin_closure(self) -> None:
        """The next closure of this task begins, or what comes before it and may wait."""
        if self.is_used and self._in_turn:
            self._begin_turn()

    def end_closure(self) -> None:
        """A closure has returned; the turn in which it did goes on when the next one begins."""
        self._turns += 1

    def _begin_turn(self) -> None:
        self._in_turn, self._turns = True, self._turns + 1
        asyncio.get_running_loop().call_soon(self._end_turn, self._turns)

    def _end_turn(self, turn: int) -> None:
        if turn == self._turns:
            self._in_turn, self._wanted = False, None

    def take(self, plan: Plan, arrival: int) -> Wanted | None:
        """Somebody pulls: return the values if they are what would be pulled now.

        Args:
            plan: What is pulled.
            arrival: When the closure that pulls came in, by ``arrivals``; 0: it is no closure.
        """
        self.is_used = True
        silent = self._calls_then in (-1, self._calls())  # nothing else was asked, or answered
        fresh = self._in_turn and arrival <= self._arrivals_then and silent
        if self._is_first:  # where they come too late once, they will the next time
            is_in_time = self._in_turn and silent  # a closure may come in sooner the next time
            self._is_first, self._plan = False, plan if is_in_time else None
        wanted, self._wanted = self._wanted, None
        if not fresh or wanted is None or wanted.plan is not plan:
            return None
        return wanted if self._now() - self._came <= GOOD_FOR_S else None

    def _calls(self) -> int:
        calls = 0
        for link in self._links:
            calls += link.num_calls
        return calls
