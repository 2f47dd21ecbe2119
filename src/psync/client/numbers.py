"""Numbers of what a task sends to one place, and which of them have their answers.

A ps answers a repetition from memory; it forgets an answer when the task says that it has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Numbers:
    """What one task sends to one place, numbered from 1.

    Invariant: ``acked_below`` never falls, and no number below it is under way.
    """

    __slots__ = ("_next", "acked_below", "under_way")

    def __init__(self) -> None:
        self.acked_below = 1  # all smaller numbers are answered, or given up
        self._next = 1
        self.under_way: dict[int, None] = {}  # in order

    def draw(self) -> int:
        """Return the number of a new one; give it back with ``answered``."""
        number, self._next = self._next, self._next + 1
        self.under_way[number] = None
        return number

    @contextmanager
    def drawn(self) -> Iterator[int]:
        """Draw a number for what is done in this context; it counts as answered at the end."""
        number = self.draw()
        try:
            yield number
        finally:
            self.answered(number)

    def answered(self, number: int) -> None:
        """The answer to ``number`` is here, or is not wanted any more."""
        self.under_way.pop(number, None)
        self.acked_below = next(iter(self.under_way), self._next)
