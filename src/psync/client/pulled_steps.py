"""The local step of a push: the lowest step of the values that its closure has pulled.

Each answer to a pull names, for each synchronous group, the last step that the ps has closed.
A push is as old as the oldest of the values that its gradients may be computed from, so what
counts is the lowest of all answers since the last push.
"""

from __future__ import annotations

from collections.abc import Sequence

UNNAMED = -1
"""The step of a group in an answer that does not name it: it is where it began."""


class PulledSteps:
    """The lowest step of each group that the pulls of one closure have seen.

    Single owner. Costs one addition for an answer that names no group: most programs have none.
    """

    __slots__ = ("_answers", "_groups")

    def __init__(self) -> None:
        self._answers = 0
        self._groups: dict[int, _Seen] = {}

    def note(self, steps: Sequence[tuple[int, int]]) -> None:
        """Note the answer of one ps: (group, step) of each group that it names."""
        self._answers += 1
        for group, step in steps:
            seen = self._groups.setdefault(group, _Seen(0))
            seen.lowest = step if seen.lowest is None else min(seen.lowest, step)
            seen.named += 1

    def lowest(self, group: int) -> int | None:
        """Return the lowest step of ``group`` in all answers since ``forget``.

        Returns:
            None: there were none. -1: some answer did not name the group.
        """
        seen = self._groups.get(group)
        if seen is None:
            return UNNAMED if self._answers else None
        answers = self._answers - seen.forgotten
        if not answers:
            return None
        return UNNAMED if seen.lowest is None or seen.named < answers else seen.lowest

    def forget(self, group: int) -> None:
        """A push was made in ``group``: for its next one only later pulls count."""
        self._groups[group] = _Seen(self._answers)


class _Seen:
    """What the answers say of one group."""

    __slots__ = ("forgotten", "lowest", "named")

    def __init__(self, forgotten: int) -> None:
        self.forgotten = forgotten  # answers that came before the last push
        self.named = 0  # answers since then that named the group
        self.lowest: int | None = None  # in those
