"""Prefetched values: those that come with the answer to a push, for the pull that follows it.

A push may ask for values, and the ps tasks read them once it is applied:

- Of an asynchronous push each ps sends those of its own shards with its answer, unless one of them
  is busy with another update.
- Of a synchronous one ps 0 sends all with the token, and the other ps tasks have sent theirs to it
  when the step was applied: up to 64 KiB, if no shard is busy and there is no second group.

So a program that pulls and pushes in turns needs no pulls. What is asked for is the set that was
pulled right after the last push, up to 64 KiB, or what the program says that it pulls next
(``push_pull``).

They are those of a pull that was made early: read on the ps tasks after the push was sent, and
used later. The caller of that pull must not be able to tell, so the values are dropped unless all
of this holds:

- The pull is the next thing that this task does with the ps tasks.
- It begins in a closure that was on this worker when the push was sent: what a program did before
  it scheduled the closure, or before it gave it its inputs, is in the values then. (Or in a program
  that trains without a coordinator, or in ``push_pull``.)
- No update of this task was under way when the push was sent, and no other answer of a ps has come
  since, but for that of a global step which is raised with the push.
- It begins in the turn of the loop in which the push is answered, and the global step is raised:
  a step that waits for anything in between may have learned of newer values by other ways. If the
  closure ends in that turn, the values are for the next one, until that waits for something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from psync.client.plans import Plan, Request, landing
from psync.client.ps_link import PsLink
from psync.numerics.blocks import BlockPool
from psync.specs import VariableSpec
from psync.wire.frames import SMALL_BODY_BYTES

Landing = tuple[Request, list[memoryview]]
"""What is asked of a ps, and where its values belong."""

Steps = Sequence[tuple[int, int]]
"""(group, step) of the synchronous groups in one answer."""

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


@dataclass(slots=True)
class Wanted:
    """What a push asks for, and its values once they have come.

    Attributes:
        plan: Of the variables.
        arrays: Their values, read-only; nobody else has them. None: they have not begun to come.
        steps: That these are of, as the answers to pulls say it.
        room: Arrays that were made before.
    """

    plan: Plan
    arrays: list[np.ndarray] | None = None
    steps: Sequence[Steps] = ()
    room: tuple[list[np.ndarray], list[list[memoryview]]] | None = None

    def make_room(self, pool: BlockPool) -> None:
        """Make the arrays: best while nothing else is to be done."""
        self.room = landing(self.plan, pool)

    def receive(self, pool: BlockPool) -> list[memoryview]:
        """Return where the bytes belong, in order: the values are coming in, all at once."""
        (self.arrays, targets), self.room = self.room or landing(self.plan, pool), None
        return [target for of_request in targets for target in of_request]

    def landings(self, push: Plan, pool: BlockPool) -> Mapping[int, Landing]:
        """Return what comes with the answer of each ps; nothing, if a push does not reach all.

        Args:
            push: Plan of the push.
            pool: Memory of the arrays.
        """
        requests = self.plan.requests
        reached = {request.ps for request in push.requests}
        if any(request.part or request.ps not in reached for request in requests):
            return {}
        self.make_room(pool)
        assert self.room is not None, "it was made"
        each = zip(requests, self.room[1], strict=True)
        return {request.ps: (request, targets) for request, targets in each}

    def came(self, steps: Sequence[Steps]) -> None:
        """Each ps has answered; those that sent values said which steps these are of."""
        room, self.room = self.room, None
        if room is not None and len(steps) == len(self.plan.requests):
            self.arrays, self.steps = room[0], steps


class PulledAhead:
    """What one task has been sent ahead. Single owner.

    Args:
        links: To all ps tasks.

    Attributes:
        is_used: Whether anything was pulled: else it need not hear of pushes and turns.
        arrivals: How often closures have come in.
    """

    def __init__(self, links: Sequence[PsLink]) -> None:
        self.is_used = False
        self.arrivals = 0
        self._announced: Plan | None = None
        self._arrivals_then = NEVER - 1  # when the last push was sent; before the first: anything
        self._links = links
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._in_turn = True  # whether the loop has not gone on since a push was answered
        self._turns = 0  # so far; a number for ``_end_turn``
        self._calls_then = -1  # expected once the last push is answered; before the first: any
        self._wanted: Wanted | None = None  # by the last push, whose values have come

    def announce(self, plan: Plan | None) -> None:
        """The program says what it pulls after the next push; None: it does not."""
        self.is_used = True
        self._announced = plan

    def want(
        self,
        messages: int = 1,
        *,
        unseen: bool = True,
        bounded: bool = True,
        raises: VariableSpec | None = None,
    ) -> Wanted | None:
        """A push is about to be sent: return what it should ask for, if anything.

        Args:
            messages: Of the push.
            unseen: Whether it may ask for what was pulled after the push before. Not so where
                others report what they have done: in a program with a coordinator.
            bounded: Whether also what was announced is at most 64 KiB.
            raises: A global step that is raised with one message more, before ``put``: the answer
                to that tells nothing of others.
        """
        if not self.is_used:
            return None
        self._wanted = None
        self._is_first = True
        self._arrivals_then = self.arrivals
        messages += raises is not None
        self._calls_then = self._calls() + 2 * messages  # and their answers
        announced, self._announced = self._announced, None
        plan = announced or (self._plan if unseen else None)
        bounded = bounded or announced is None
        if plan is None or (bounded and plan.whole.nbytes > SMALL_BODY_BYTES):
            return None
        if any(link.updates for link in self._links):
            return None
        if raises is not None and any(v.variable_id == raises.variable_id for v in plan.variables):
            return None
        return Wanted(plan)

    def put(self, wanted: Wanted | None) -> None:
        """The push was answered, with values if any were wanted, and there were some.

        They are good for this turn of the loop: in it nothing is heard from anybody.
        """
        if wanted is not None and wanted.arrays is not None:
            self._wanted = wanted
        if self.is_used:
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
            self._is_first, self._plan = False, plan if fresh else None
        wanted, self._wanted = self._wanted, None
        return wanted if fresh and wanted is not None and wanted.plan is plan else None

    def _calls(self) -> int:
        return sum(link.num_calls for link in self._links)
