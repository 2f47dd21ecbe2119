"""The count of an optimizer's pushes: each push is counted on one ps, and all ps tasks learn of it.

A push is counted on its *home*: the lowest ps that holds a shard of its variables. The home counts
it when its ledger says *fresh*, in the same log entry, so retries and second runs never count. The
sum of what all ps tasks have counted is the number of pushes (``total_of``).

A schedule must not wait for a round trip. The step with which a ps applies a push is the number of
pushes before it, as far as that is known there:

    seen         pushes with a part on this ps: it has applied these parts itself
    elsewhere    pushes without one. Their homes know them by the list of ps tasks in each push.
                 Each ps tells ps 0, which adds up and tells every other ps (``count_for``). A
                 client also carries what it knows from its own pushes, so that the steps of a
                 single client are exact as long as its session lasts.

No push is in both, so nothing is counted twice, and where all pushes have a part on every ps there
is nothing to tell. What is known lags by the pushes in flight, and by what has not been told yet.
If a worker dies between the parts of a push and its closure never runs again, some ps tasks have
seen a push that others have not, and their steps differ by it from then on.

Whenever a program sets the number, an *epoch* begins: all counts start at zero on top of the new
``base``. Numbers that travel carry their epoch (``specs.count_of``), and older ones are ignored.

Source: a grow-only counter (Shapiro et al., "A comprehensive study of convergent and commutative
    replicated data types", 2011), summed on the way at ps 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from psync.specs import STEP_BITS, count_of
from psync.store.untrusted_json import Whole

HOME, FIRST, FURTHER, EARLY = range(4)
"""Of the messages of a push: the one that counts, the first to another ps, further ones, and of
these one that is there before the first."""

Counts = tuple[int, int, int]
"""(base, own, steps) of one ps; ``base`` is marked with its epoch."""

Row = Sequence[tuple[int, int]]
"""(ps, number of pushes without a part on that ps)."""

CountState = tuple[
    Whole, Whole, Whole, Whole, tuple[tuple[tuple[Whole, ...], Whole], ...],
    tuple[tuple[Whole, tuple[tuple[Whole, Whole], ...]], ...],
]  # fmt: skip
"""(base, seen, elsewhere, steps, own, told) of a ``PushCount``, for snapshots and digests."""


@dataclass(slots=True)
class PushCount:
    """What one ps knows of the number of an optimizer's pushes.

    Attributes:
        base: The number that was set last, marked with its epoch.
        seen: Pushes since then with a part on this ps.
        elsewhere: Pushes since then without one, as far as they are known.
        steps: Of a synchronous optimizer: the step that comes next.
        own: Pushes counted here since, by the other ps tasks that have a part of them.
        told: On ps 0, by ps, what that has told of its own ones.
    """

    base: int = 0
    seen: int = 0
    elsewhere: int = 0
    steps: int = 0
    own: dict[tuple[int, ...], int] = field(default_factory=dict)
    told: dict[int, dict[int, int]] = field(default_factory=dict)
    _start: int = field(init=False)  # the base without its mark
    _mark: int = field(init=False)  # and without its number

    def __post_init__(self) -> None:
        self._start = count_of(self.base)
        self._mark = self.base - self._start

    @property
    def known(self) -> int:
        """The number of pushes, or of synchronous steps, that is known here."""
        return max(self._start + self.seen + self.elsewhere, self.steps)

    @property
    def marked(self) -> int:
        """What is known, marked with its epoch."""
        return self._mark + self.known

    @property
    def is_hearsay(self) -> bool:
        """Whether nothing was pushed, set or counted here: all that is known was told."""
        return not (self.base or self.seen or self.steps or self.own)

    @property
    def counts(self) -> Counts:
        """What ``total_of`` adds up."""
        return self.base, sum(self.own.values()), self.steps

    @property
    def state(self) -> CountState:
        """All of it."""
        told = ((ps, tuple(sorted(row.items()))) for ps, row in sorted(self.told.items()))
        own = tuple(sorted(self.own.items()))
        return self.base, self.seen, self.elsewhere, self.steps, own, tuple(told)

    @classmethod
    def of(cls, state: CountState) -> PushCount:
        """Return the count whose ``state`` this was."""
        base, seen, elsewhere, steps, own, told = state
        rows = {ps: dict(row) for ps, row in told}
        return cls(base, seen, elsewhere, steps, dict(own), rows)

    def next_step(self, carried: int = 0, place: int = HOME) -> int:
        """Return the step that ``push`` would return now."""
        elsewhere = self.elsewhere
        # Of a newer epoch its client may know, while this ps is still to be told of that.
        if carried - self._mark > elsewhere and carried >> STEP_BITS == self._mark >> STEP_BITS:
            elsewhere = carried - self._mark
        step = self._start + self.seen + elsewhere
        return step - 1 if place == FURTHER and step else step

    def push(self, carried: int = 0, place: int = HOME, others: tuple[int, ...] = ()) -> int:
        """Apply a push, or its part for this ps, and return its step.

        Args:
            carried: Pushes without a part here that its client knows of, marked.
            place: Which of its messages this is.
            others: The other ps tasks that have a part of it.
        """
        if place >= FURTHER:
            return self.next_step(carried, place)
        if carried - self._mark > self.elsewhere:
            self.elsewhere = self.next_step(carried) - self._start - self.seen
        if place == HOME:
            self.own[others] = self.own.get(others, 0) + 1
        self.seen += 1
        return self._start + self.seen - 1 + self.elsewhere

    def answer(self) -> tuple[int, int]:
        """Return what the answer to a push says: (pushes known here, those elsewhere), marked."""
        elsewhere = self._mark + self.elsewhere
        return self._start + self.seen + elsewhere, elsewhere

    def reach(self, step: int) -> int:
        """Apply a synchronous step, which its group counts, and return the optimizer's step."""
        step = max(step, self._start, self.steps)
        self.steps = step + 1
        return step

    def count_for(self, ps: int) -> int:
        """Return how many pushes without a part on a ps have been counted here, or told here."""
        own = sum(count for others, count in self.own.items() if ps not in others)
        return own + sum(row.get(ps, 0) for row in self.told.values())

    def hear(self, ps: int, base: int, row: Row, here: int) -> int:
        """Take in what another ps tells, and return how many pushes of that were news.

        Args:
            ps: Its index.
            base: The number that was set last, as it knows it.
            row: What its ``count_for`` returned, for each ps that it tells of.
            here: Index of this ps.
        """
        self.set(base)
        if base >> STEP_BITS < self.base >> STEP_BITS:
            return 0
        known = {here: self.elsewhere} if here else self.told.setdefault(ps, {})
        news = 0
        for about, count in row:
            more = count - known.get(about, 0)
            if more > 0 and (not here or about == here):
                known[about] = count
                news = max(news, more)
        if here:
            self.elsewhere = known[here]
        else:
            self.elsewhere = max(self.elsewhere, sum(each.get(0, 0) for each in self.told.values()))
        return news

    def absorb(self, other: PushCount) -> None:
        """Take in what another count of the same pushes on the same ps was told."""
        if other.base >> STEP_BITS < self.base >> STEP_BITS:
            return
        self.set(other.base)
        self.elsewhere = max(self.elsewhere, other.elsewhere)
        for ps, row in other.told.items():
            known = self.told.setdefault(ps, {})
            for about, count in row.items():
                known[about] = max(count, known.get(about, 0))

    def set(self, base: int) -> None:
        """Begin an epoch with a number that was set, marked. Older ones are ignored.

        Of two that were set at one time the higher one holds.
        """
        if base >> STEP_BITS > self.base >> STEP_BITS:
            self.seen = self.elsewhere = self.steps = 0
            self.own, self.told = {}, {}
        if base > self.base:
            self.base = base
            self.__post_init__()


def total_of(counts: Iterable[Counts]) -> int:
    """Return the number of pushes, from what all ps tasks have said; marked with its epoch."""
    counts = list(counts)
    base = max((base for base, *_ in counts), default=0)
    newest = [each for each in counts if each[0] >> STEP_BITS == base >> STEP_BITS]
    steps = max((steps for *_, steps in newest), default=0)
    epoch = base >> STEP_BITS << STEP_BITS
    return max(base + sum(own for _, own, _ in newest), epoch + steps)
