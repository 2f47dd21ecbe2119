"""The oracle of staleness bounds: no worker is ahead of another by more than the bound.

Looked at where each clock is certain: in the first batch, which all workers begin at one clock, as
long as all closures are about one table and nothing has gone wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from psync.testing.simulation.plan import Plan
from psync.testing.simulation.workload.tables import Fault

if TYPE_CHECKING:
    from psync.testing.simulation.journal import Journal


class Rounds:
    """The rounds of all workers.

    Args:
        plan: Of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._at_work: Counter[str] = Counter()  # runs that are under way, by worker
        self._begun: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    @contextlib.contextmanager
    def working(self, worker: str) -> Iterator[None]:
        """A worker is in a step."""
        self._at_work[worker] += 1
        try:
            yield
        finally:
            self._at_work[worker] -= 1

    def begin(self, worker: str) -> None:
        """A worker begins a call."""
        self._begun[worker] += 1

    def end(self, worker: str, table: str, journal: Journal) -> Iterator[Fault]:
        """A push under a bound has counted: nobody who works is further behind than that."""
        self._ended[worker] += 1
        if not (journal.is_calm and (journal.lives, journal.next_batch) == (1, 1)):
            return
        bound = self._bound_of(table)
        for other, runs in self._at_work.items():
            if bound < 0 or not runs or other == worker:
                continue
            ahead = self._ended[worker] - self._begun[other]
            if ahead == bound:
                journal.say("mark", "a worker is ahead by all that a bound allows")
            if ahead > bound:
                yield (
                    "ahead",
                    (
                        f"{table}: {worker} has ended {ahead} rounds more than {other} has begun, "
                        f"which works; the bound is {bound}"
                    ),
                )

    def _bound_of(self, table: str) -> int:
        """Return the bound if all that workers do is about this table; -1: rounds are uncertain."""
        plan = self._plan
        is_alone = all(
            (each.fails, each.cancel_s, each.needs) == (False, None, -1)
            and {call.kind for call in each.calls} == {table}
            for each in plan.batches[0].closures
        )
        return plan.bound if plan.all_workers and not plan.works and is_alone else -1
