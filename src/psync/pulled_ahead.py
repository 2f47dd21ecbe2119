"""Values that come with a token, for the pull with which the next step begins.

Layer: L3. Imports: blocks, plans, ps_link, wire.

They are those of a pull that was made before its time: read on the ps tasks after the push was
sent, and taken later. That must make no difference to who pulls, so the values are dropped unless
the pull is the very next thing that this task does with the ps tasks, and has begun in a closure
that was here when the push was sent: what a program did before it scheduled the closure, or before
it gave it its inputs, is in the values then. So are all updates of this task, none of which may be
under way when the push is sent. Nor has it heard of anything later from a ps: whatever else is
answered after the push was sent drops the values, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psync.blocks import BlockPool
from psync.plans import Plan, targets_of
from psync.ps_link import PsLink
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.tensors import to_bytes_view

NEVER = 1 << 62
"""When a closure came in that is to get nothing that was sent ahead."""


@dataclass(slots=True)
class Wanted:
    """What a push asks for, and how things were when it did."""

    plan: Plan
    arrivals: int
    calls: int
    arrays: list[np.ndarray] | None = None  # once their values are coming in

    def receive(self, pool: BlockPool) -> list[memoryview]:
        """Make the arrays, and return where the bytes belong, in order."""
        plan = self.plan
        roots = [pool.take(nbytes) for nbytes in plan.buffers]
        self.arrays = []
        for buffer, offset, shape, dtype in plan.places:
            array: np.ndarray = np.ndarray(shape, dtype, roots[buffer], offset)
            array.setflags(write=False)
            self.arrays.append(array)
        views = {buffer: to_bytes_view(root) for buffer, root in enumerate(roots)}
        for root in roots:
            pool.give(root)  # handed out again once the arrays are gone
        return [
            target for request in plan.requests for target in targets_of(plan, request, views, {})
        ]


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
        self.arrivals = 0  # how often closures have come in
        self._links = links
        self._plan: Plan | None = None  # of the first pull after the last push
        self._is_first = True  # whether the next pull is that
        self._wanted: Wanted | None = None
        self._values: Values | None = None

    def want(self) -> Wanted | None:
        """A push is about to be sent: return what it should ask for, if anything."""
        self._values = None
        self._is_first = True
        plan = self._plan
        if plan is None or plan.whole.nbytes > SMALL_BODY_BYTES:
            return None
        if any(link.has_updates for link in self._links):
            return None
        return Wanted(plan, self.arrivals, self._calls() + 2)  # the push, and its answer

    def put(self, wanted: Wanted, group: int, step: int) -> None:
        """The push was answered, with values if there were any, of a step."""
        if wanted.arrays is not None:
            self._wanted, self._values = wanted, Values(wanted.arrays, group, step)

    def take(self, plan: Plan, arrival: int) -> Values | None:
        """Somebody pulls: return the values if they are what would be pulled now.

        Args:
            plan: What is pulled.
            arrival: When the closure that pulls came in, by ``arrivals``; 0: it is no closure.
        """
        if self._is_first:
            self._is_first, self._plan = False, plan
        values, self._values = self._values, None
        wanted = self._wanted
        if values is None or wanted is None or wanted.plan is not plan:
            return None
        if arrival > wanted.arrivals or self._calls() != wanted.calls:
            return None
        return values

    def _calls(self) -> int:
        return sum(link.num_calls for link in self._links)
