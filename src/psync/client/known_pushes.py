"""What a client knows of the number of an optimizer's pushes; see ``store.push_counts``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psync.client.plans import Plan
from psync.specs import STEP_BITS, count_of
from psync.store.push_counts import HOME
from psync.wire.messages import Pushed


class KnownPushes:
    """What one client knows of the number of an optimizer's pushes, on one timeline.

    Attributes:
        number: The highest number that a ps has named, marked.
        elsewhere: By ps, the pushes without a part there, marked.
    """

    __slots__ = ("elsewhere", "number")

    def __init__(self) -> None:
        self.number = 0
        self.elsewhere: dict[int, int] = {}

    def before(self, plan: Plan, num_ps: int) -> dict[int, int]:
        """Return what is known, before a push, of the ps tasks that get no part of it."""
        if len(plan.ps) == num_ps:
            return {}
        apart = (ps for ps in range(num_ps) if ps not in plan.ps)
        return {ps: self.elsewhere.get(ps, 0) for ps in apart}

    def learn(self, plan: Plan, before: Mapping[int, int], answers: Sequence[Pushed]) -> None:
        """Take in the answers to a push; ``before`` is what ``before`` returned."""
        for request, answer in zip(plan.requests, answers, strict=True):
            self.number = max(self.number, answer.step)
            if count_of(answer.elsewhere):
                self._raise(request.ps, answer.elsewhere)
            if before and request.place == HOME and answer.outcome == "accepted":
                epoch = answer.step >> STEP_BITS
                for ps, known in before.items():
                    if known >> STEP_BITS <= epoch:
                        self._raise(ps, max(known, epoch << STEP_BITS) + 1)

    def _raise(self, ps: int, elsewhere: int) -> None:
        self.elsewhere[ps] = max(elsewhere, self.elsewhere.get(ps, 0))
