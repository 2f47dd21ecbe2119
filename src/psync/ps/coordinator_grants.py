"""Under which incarnation a coordinator serves: the rule of ps 0, which alone grants them.

Everything that a coordinator gives out, to its workers and to ps 0 towards the others, lies in the
``RANGE`` that begins with its own incarnation. So whoever works for it bears a number below that of
its successor, and one comparison tells them apart. A clock makes sure that ps 0 grants higher
numbers after it was started anew; where that clock has gone backwards, the other tasks tell what
they have seen.
"""

from __future__ import annotations

from psync.errors import FencedError

RANGE = 1 << 20
"""Incarnations that belong to one coordinator: 1 ms of a clock that counts nanoseconds.

No more, since each grant may be so far ahead of the clock, and a ps 0 that is started anew knows
only the clock. No less, since one is drawn for each attachment of a worker."""


class CoordinatorGrants:
    """What ps 0 has granted, and seen. Single owner, no clock; never blocks."""

    def __init__(self) -> None:
        self._highest = 0

    def note(self, coordinator: int) -> None:
        """A coordinator is served here, whoever has granted its incarnation."""
        self._highest = max(self._highest, coordinator)

    def grant(self, clock: int, previous: int, seen: int) -> int:
        """Return an incarnation above all that was granted, and above all that anybody has seen.

        Args:
            clock: What ps 0 would take if nothing were known.
            previous: What the one that asks was granted before; 0: nothing.
            seen: The highest that another task has served; 0: none is known.

        Raises:
            FencedError: Another coordinator has asked after this one: it stays with that.
        """
        if previous and self._highest > previous:
            raise FencedError(
                f"a newer coordinator (incarnation {self._highest}) has come after this one "
                f"({previous})"
            )
        highest = max(self._highest, seen)
        self._highest = max(clock, highest + RANGE) if highest else clock
        return self._highest
