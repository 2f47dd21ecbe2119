"""What a worker's time goes to: steps, and in them pulls, pushes, and waiting for others."""

from __future__ import annotations

from collections.abc import Callable

KINDS = ("compute", "pull", "push", "wait")
"""Of two at once the later counts: a pull beside a computation is a pull."""


class WorkMeter:
    """Adds up seconds by kind. Two readings of it say what went on in between.

    - "compute": a step runs, and nothing of what follows; what it reads data from counts, too;
    - "pull": values are on their way from ps tasks;
    - "push": updates are on their way to ps tasks, until they are acknowledged;
    - "wait": other workers are waited for, at a synchronous step or a staleness bound. A small push
      travels with the question, and its way counts here.

    The rest is the time in which the worker had nothing to do. An operation counts by the clock,
    however many are going on: all seconds together are at most the time that has passed.

    Args:
        clock: Returns seconds.

    Example:
        with meter.pull:
            await values()
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = [0.0] * len(KINDS)
        self._open = [0] * len(KINDS)  # how many of each kind are going on
        self._current = -1  # the kind that counts; -1: none
        self._since = clock()
        self.compute, self.pull, self.push, self.wait = (
            _Kind(self, number) for number in range(len(KINDS))
        )

    def read(self) -> dict[str, float]:
        """Return the seconds of each kind, and "at": the time that it is, by the same clock."""
        self.change(0, 0)
        return {"at": self._since, **dict(zip(KINDS, self._seconds, strict=True))}

    def change(self, kind: int, by: int) -> None:
        """Note that one operation of a kind begins (1) or ends (-1)."""
        now, current = self._clock(), self._current
        if current >= 0:
            self._seconds[current] += now - self._since
        self._since = now
        counts = self._open
        counts[kind] += by
        if by > 0:
            if kind > current:
                self._current = kind
        elif kind == current and not counts[kind]:
            while current >= 0 and not counts[current]:
                current -= 1
            self._current = current


class _Kind:
    """A context in which time counts as one kind; may be entered again and again."""

    __slots__ = ("_change", "_kind")

    def __init__(self, meter: WorkMeter, kind: int) -> None:
        self._change = meter.change
        self._kind = kind

    def __enter__(self) -> None:
        self._change(self._kind, 1)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._change(self._kind, -1)
