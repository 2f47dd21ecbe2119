"""What a worker's time goes to: steps, and in them pulls, pushes, and waiting for others."""

from __future__ import annotations

from collections.abc import Callable

KINDS = ("compute", "pull", "push", "wait")
"""Of two at once the later counts: a pull beside a computation is a pull."""

READ_WITHIN_S = 60.0
"""Time counts for so long after a reading. Of 1,000 workers each is read every ten seconds."""


class WorkMeter:
    """Adds up seconds by kind, while somebody reads. Two readings say what went on in between.

    - "compute": a step runs, and nothing of what follows; what it reads data from counts, too;
    - "pull": values are on their way from ps tasks;
    - "push": updates are on their way to ps tasks, until they are acknowledged;
    - "wait": other workers are waited for, at a synchronous step or a staleness bound, for their
      locks or for gradients in an accumulator. A small push travels with the question, and its
      way counts here.

    The rest is the time in which the worker had nothing to do. An operation counts by the clock,
    however many are going on: all seconds together are at most the time that has passed.

    While nobody reads, it knows what goes on, and never looks at the clock.

    Args:
        clock: Returns seconds.

    Attributes:
        is_on: Whether changes are looked at.

    Example:
        with meter.pull:
            await values()
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_on = False
        self._seconds = [0.0] * len(KINDS)
        self._begun = self._since = 0.0  # when it was turned on; until when it has counted
        self._until = 0.0  # when it is turned off
        self._current = -1  # the kind that counts; -1: none
        self._watch: Callable[[int], None] | None = None
        kinds = tuple(_Kind(self) for _ in KINDS)
        self.compute, self.pull, self.push, self.wait = self._kinds = kinds

    def read(self) -> dict[str, float]:
        """Return the seconds of each kind; from now on time counts, for a while.

        Besides, by the same clock, "at": the time that it is, and "since": when the seconds were 0.
        """
        self._count()
        self._until = self._since + READ_WITHIN_S
        seconds = zip(KINDS, self._seconds, strict=True)
        return {"at": self._since, "since": self._begun, **dict(seconds)}

    def watch(self, told: Callable[[int], None] | None) -> None:
        """Tell somebody which kind counts, now and whenever that changes; -1: none.

        Args:
            told: Called with the place of a kind in ``KINDS``. None: nobody is told any more.
        """
        self._watch = told
        self._count()
        if told is not None:
            told(self._current)

    def changed(self) -> None:
        """Note that something has begun or ended, while it is on."""
        before = self._current
        self._count()
        watch = self._watch
        if watch is None:
            if self._since > self._until:
                self.is_on = False
        elif self._current != before:
            watch(self._current)

    def _count(self) -> None:
        """Count up to now."""
        now, current = self._clock(), self._current
        if not self.is_on:
            self.is_on, self._begun = True, now
            self._seconds = [0.0] * len(KINDS)
        elif current >= 0:
            self._seconds[current] += now - self._since
        self._since = now
        kinds, current = self._kinds, len(KINDS) - 1
        while current >= 0 and not kinds[current].going_on:
            current -= 1
        self._current = current


class _Kind:
    """A context in which time counts as one kind; may be entered again and again."""

    __slots__ = ("_meter", "going_on")

    def __init__(self, meter: WorkMeter) -> None:
        self._meter = meter
        self.going_on = 0  # how many

    def __enter__(self) -> None:
        self.going_on += 1
        if self._meter.is_on:
            self._meter.changed()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.going_on -= 1
        if self._meter.is_on:
            self._meter.changed()
