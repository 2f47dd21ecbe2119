"""Numbers of what a task sends, and which of them have their answers.

A ps answers a repetition from memory; it forgets an answer when the task says that it has it.
"""

from __future__ import annotations


class Outgoing:
    """What one task sends to one place, numbered from 1. True while something is under way."""

    __slots__ = ("_next", "_outstanding")

    def __init__(self) -> None:
        self._next = 1
        self._outstanding: dict[int, None] = {}  # in order

    def __bool__(self) -> bool:
        return bool(self._outstanding)

    def draw(self) -> int:
        """Return the number of a new one; give it back with ``answered``."""
        number, self._next = self._next, self._next + 1
        self._outstanding[number] = None
        return number

    def answered(self, number: int) -> None:
        """The answer to ``number`` is known, or nobody wants it any more."""
        self._outstanding.pop(number, None)

    @property
    def acked_below(self) -> int:
        """All smaller numbers have their answers, or nobody wants them any more."""
        return next(iter(self._outstanding), self._next)
