"""Prefetched values: those that come with a token, for the pull at the start of the next step.

ps 0 and the other ps tasks read them when the step is applied, and send them with its tokens: up to
64 KiB, if no shard is busy and there is no second group. So a step of small variables needs no
pull.

They are those of a pull that was made early: read on the ps tasks after the push was sent, and
used later. The caller of that pull must not be able to tell, so the values are dropped unless all
of this holds:

- The pull is the next thing that this task does with the ps tasks.
- It begins in a closure that was on this worker when the push was sent: what a program did before
  it scheduled the closure, or before it gave it its inputs, is in the values then.
- No update of this task was under way when the push was sent, and no other answer of a ps has come
  since.
- It begins in the turn of the loop in which the push is answered: a step that waits for anything in
  between may have learned of newer values by other ways. If the closure ends in that turn, the
  values are for the next one, until that waits for something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psync.client.plans import Plan, landing
from psync.client.ps_link import PsLink
from psync.numerics.blocks import BlockPool
from psync.wire.frames import SMALL_BODY_BYTES

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


@dataclass(slots=True)
class Wanted:
    """What a push asks for, and how things were when it did."""

    plan: Plan
    calls: int
    arrays: list[np.ndarray] | None = None  # once their values are coming in
    room: tuple[list[np.ndarray], list[list[memoryview]]] | None = None  # made before that

    def make_room(self, pool: BlockPool) -> None:
        """Make the arrays: best while nothing else is to be done."""
        self.room = landing(self.plan, pool)

    def receive(self, pool: BlockPool) -> list[memoryview]:
        """Return where the bytes belong, in order: the values are coming in."""
        (self.arrays, targets), self.room = self.room or landing(self.plan, pool), None
        return [target for of_request in targets for target in of_request]


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a plan's variables."""

    arrays: list[np.ndarray]  # read-only; nobody else has them
    group: int  # with whose token they came
    step: int  # of which they are, at least


class PulledAhead:
    """What one task has been sent ahead. Single owner.

    Args:
        links: To all ps tasks.
    """

    def __init__(self, links: Sequence[PsLink]) -> None:
        self.is_used = False  # whether anything was pulled: else it need not hear of turns
        self.arrivals = 0  # how often closures have come in
        self._arrivals_then = NEVER - 1  # when the last push was sent; before the first: anything
        self._links = links
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._in_turn = True  # whether the loop has not gone on since a push was answered
        self._turns = 0  # so far; a number for ``_end_turn``
        self._wanted: Wanted | None = None
        self._values: Values | None = None

    def want(self) -> Wanted | None:
        """A push is about to be sent: return what it should ask for, if anything."""
        self._values = None
        self._is_first = True
        self._arrivals_then = self.arrivals
        plan = self._plan
        if plan is None or plan.whole.nbytes > SMALL_BODY_BYTES:
            return None
        if any(link.updates for link in self._links):
            return None
        return Wanted(plan, self._calls() + 2)  # the push, and its answer

    def put(self, wanted: Wanted | None, group: int, step: int) -> None:
        """The push was answered, with values of a step if any were wanted, and there were some.

        They are good for this turn of the loop: in it nothing is heard from anybody.
        """
        if wanted is not None and wanted.arrays is not None:
            self._wanted, self._values = wanted, Values(wanted.arrays, group, step)
        self._begin_turn()

    def begin_closure(self) -> None:
        """The next closure of this task begins."""
        if self._in_turn:
            self._begin_turn()

    def end_closure(self) -> None:
        """A closure has returned; the turn in which it did goes on when the next one begins."""
        self._turns += 1

    def _begin_turn(self) -> None:
        self._in_turn, self._turns = True, self._turns + 1
        asyncio.get_running_loop().call_soon(self._end_turn, self._turns)

    def _end_turn(self, turn: int) -> None:
        if turn == self._turns:
            self._in_turn, self._values = False, None

    def take(self, plan: Plan, arrival: int) -> Values | None:
        """Somebody pulls: return the values if they are what would be pulled now.

        Args:
            plan: What is pulled.
            arrival: When the closure that pulls came in, by ``arrivals``; 0: it is no closure.
        """
        self.is_used = True
        in_time = self._in_turn and arrival <= self._arrivals_then
        if self._is_first:  # where they come too late once, they will the next time
            self._is_first, self._plan = False, plan if in_time else None
        values, self._values = self._values, None
        wanted = self._wanted
        if values is None or wanted is None or wanted.plan is not plan:
            return None
        return values if in_time and self._calls() == wanted.calls else None

    def _calls(self) -> int:
        return sum(link.num_calls for link in self._links)
