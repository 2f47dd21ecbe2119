"""The synchronous steps of ps 0 as its backup follows them in the log, for a failover.

    entry              then
    a push counts      kept, in order
    a step is closed   its pushes are counted for good, the step is the group's last one
    closures are final their calls are forgotten

After a failover the last step of each group is closed once more: each ps that has closed it ignores
that. Then the remaining pushes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from psync.sync.group import Contribution
from psync.sync.tokens import Replica

S = TypeVar("S")

Call = tuple[int, int, int, bytes]
"""(group, closure, ordinal, digest of its variables)."""


@dataclass(frozen=True, slots=True)
class LastStep(Generic[S]):
    """The last step of a group that was closed."""

    number: int
    closing: S  # how to close it once more


class FollowedSteps(Generic[S]):
    """The synchronous groups of one cluster, as a log tells of them. Single owner."""

    def __init__(self) -> None:
        self.last: dict[int, LastStep[S]] = {}  # by group
        self._counted: dict[int, dict[tuple[Replica, int], tuple[int, Contribution]]] = {}
        self._calls: list[Call] = []

    def count(self, group: int, step: int, push: Contribution) -> None:
        """A push counts in a step that is not closed; the log may say so more than once."""
        self._counted.setdefault(group, {}).setdefault((push.replica, push.number), (step, push))

    def close(
        self, group: int, step: int, pushes: Sequence[tuple[str, int, int, float]], closing: S
    ) -> None:
        """A step is closed with these pushes: (task, incarnation, number, weight) of each."""
        counted = self._counted.get(group, {})
        for task, incarnation, number, _ in pushes:
            _, push = counted.pop(((task, incarnation), number), (step, None))
            if push is not None and push.closure is not None:
                self._calls.append((group, push.closure, push.ordinal, push.variable_set))
        self.last[group] = LastStep(step, closing)

    def final_below(self, closure: int) -> None:
        """Closures below will not run again."""
        self._calls = [call for call in self._calls if call[1] >= closure]

    def calls(self) -> list[Call]:
        """Return the calls that were counted in steps that are closed."""
        return list(self._calls)

    def left(self) -> dict[int, list[tuple[int, Contribution]]]:
        """Return (step, push) of what counts in steps that are not closed, of each group."""
        return {
            group: list(counted.values()) for group, counted in self._counted.items() if counted
        }
