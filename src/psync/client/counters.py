"""What one task counts of its dealings with ps tasks: pure, and owned by one task.

``Numbers`` of messages, the lowest steps that were pulled, and the seconds that it all takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Numbers:
    """What one task sends to one place, numbered from 1.

    A ps answers a repetition from memory; it forgets an answer when the task says that it has it.
    Invariant: ``acked_below`` never falls, and no number below it is under way.

    Attributes:
        next: Is drawn next.
    """

    __slots__ = ("acked_below", "next", "under_way")

    def __init__(self) -> None:
        self.acked_below = 1  # all smaller numbers are answered, or given up
        self.next = 1
        self.under_way: dict[int, None] = {}  # in order

    def draw(self) -> int:
        """Return the number of a new one; give it back with ``answered``."""
        number = self.next
        self.next = number + 1
        self.under_way[number] = None
        return number

    def answered(self, number: int) -> None:
        """The answer to ``number`` is here, or is not wanted any more."""
        self.under_way.pop(number, None)
        self.acked_below = next(iter(self.under_way), self.next)


UNNAMED = -1
"""The step of a group in an answer that does not name it: it is where it began."""


class PulledSteps:
    """The lowest step of each synchronous group that the pulls of one closure have seen.

    Each answer to a pull names, for each group, the last step that the ps has closed. A push is as
    old as the oldest of the values that its gradients may be computed from. Most programs have no
    group: then an answer costs one addition.
    """

    __slots__ = ("_answers", "_groups")

    def __init__(self) -> None:
        self._answers = 0
        # By group: answers before its last push; since then those that name it, their lowest step.
        self._groups: dict[int, tuple[int, int, int]] = {}

    def note(self, answers: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Note the answers of ps tasks: of each, (group, step) of each group that it names."""
        for steps in answers:
            self._answers += 1
            for group, step in steps:
                before, named, lowest = self._groups.get(group, (0, 0, step))
                self._groups[group] = before, named + 1, min(lowest, step) if named else step

    def lowest(self, group: int, alone: int = UNNAMED, *, push: bool = False) -> int | None:
        """Return the lowest step of ``group`` in all answers since its last push.

        Args:
            group: Its number.
            alone: Answers that do not name it are of this step, or a later one.
            push: Whether a push is made now: for the next one only later answers count.

        Returns:
            None: there were none. -1: some answer did not name the group.
        """
        before, named, lowest = self._groups.get(group, (0, 0, UNNAMED))
        if push:
            self._groups[group] = self._answers, 0, UNNAMED
        if self._answers == before:
            return None
        if named == self._answers - before:
            return lowest
        return min(lowest, alone) if named else alone


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
    however many are going on: all seconds together are at most the time that has passed. While
    nobody reads, it knows what goes on, and never looks at the clock.

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
        if self._watch is None:
            self.is_on = self._since <= self._until
        elif self._current != before:
            self._watch(self._current)

    def _count(self) -> None:
        """Count up to now."""
        now = self._clock()
        if not self.is_on:
            self.is_on, self._begun = True, now
            self._seconds = [0.0] * len(KINDS)
        elif self._current >= 0:
            self._seconds[self._current] += now - self._since
        self._since = now
        going_on = [place for place, kind in enumerate(self._kinds) if kind.going_on]
        self._current = going_on[-1] if going_on else -1


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
