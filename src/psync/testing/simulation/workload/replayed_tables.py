"""Tables of which each value is what one process makes of so many updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import psync
from psync.numerics.memory import Scratch
from psync.numerics.rules import UpdateRule
from psync.numerics.sums import move_average
from psync.testing.simulation.journal import Journal, Note, Run
from psync.testing.simulation.plan import Call, Plan
from psync.testing.simulation.workload.tables import (
    Added,
    Dense,
    Fault,
    Handles,
    Look,
    Table,
    optimizer_of,
)


class Moved(Dense):
    """Pushed through an optimizer with slots and a schedule.

    Each push moves one column, so a column's value and slots say as how manieth a shard has
    applied its push: all of them together are what one process makes of so many pushes. Each push
    has a part on every ps with a shard, so that holds for each shard by itself.

    But a push of a closure that was cancelled may have reached some ps tasks only. A life that
    restores into another number of ps tasks then goes on with one step for all shards: the number
    of pushes that their home has counted, which is more than some had, and fewer than others.
    """

    _rule: UpdateRule
    parts = ("",)
    sets_steps = False

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        # (pushes that a shard had, steps by which it may have jumped then)
        self._jumps: dict[int, set[tuple[int, int]]] = {}

    def declare(self, steps: Sequence[Any]) -> Handles:
        rate = psync.schedules.PolynomialDecay(1.0, 1 << 12, 0.1)
        optimizer = optimizer_of(self.plan.rule, rate, **self._options())
        self._rule = optimizer._rule
        return Handles({"": self._dense()}, optimizer)

    def marks(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return (super().marks(values) > 0).astype(np.float32)

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        pushes = (self._rows_of(values[""]) != 0).sum(axis=1)
        counts = range(pushes.min(), pushes.max() + 1)  # one of them is what the home has counted
        for shard, had in enumerate(pushes.tolist()):
            jumps = self._jumps.setdefault(shard, set())
            jumps.update((had, count - had) for count in counts if count != had)
        return super().begin(handles, values, noted)

    def check(self, look: Look) -> Iterator[Fault]:
        if look.late:
            return
        rule = self._rule
        slots = look.slots.get(self.name, {})
        held = [self._rows_of(look.values[self.name][""])]
        pushes = (held[0] != 0).sum(axis=1)
        made = look.iterations.get(self.name)
        if made is not None and not pushes.min() <= made <= pushes.max():
            said = f"{made} iterations of its optimizer, but {pushes.tolist()} pushes to its shards"
            yield "iterations", f"{look.when}: {self.name}: {said}"
        held += [self._rows_of(slots[name]) for name in rule.own_slots() if slots]
        for shard in range(self.plan.num_shards):
            found = np.stack([each[shard, : self.columns] for each in held])
            found = found[:, found[0] != 0]
            if not self.plan.sizes.get("turns", 1):  # the order of steps need not be that of turns
                continue
            expected = self._replayed(rule, found.shape[1])[: len(found)]
            jumped = (
                self._replayed(rule, found.shape[1], *jump)[: len(found)]
                for jump in self._jumps.get(shard, ())
            )
            if all(_in_order(found) != _in_order(each) for each in (expected, *jumped)):
                said = (
                    f"{look.when}: {self.name}: shard {shard} after {found.shape[1]} pushes "
                    f"with {self.plan.rule}: values and slots {found.tolist()}, one process "
                    f"makes of them {expected.tolist()}"
                )
                yield "replay", said

    def _replayed(self, rule: UpdateRule, pushes: int, had: int = 0, jump: int = 0) -> np.ndarray:
        """Return what values and slots become if push n moves column n.

        Args:
            rule: Of the optimizer.
            pushes: Number of pushes.
            had: Number of pushes after which the step is higher than that.
            jump: By how much.
        """
        value = np.zeros(pushes, np.float32)
        slots = [np.full(pushes, rule.initial_slot(name), np.float32) for name in rule.own_slots()]
        scratch = Scratch(max(1, pushes))
        for step in range(pushes):
            gradient = np.zeros(pushes, np.float32)
            gradient[step] = -1
            at = step + (jump if step >= had else 0)
            rule.apply([(value, gradient, slots, value, slots)], at, scratch)
        return np.stack([value, *slots])


class Spread(Dense):
    """Pushed to one or two of three variables that lie on different ps tasks, by one optimizer.

    A value is the learning rate with which it was pushed, and so says with which step.
    """

    parts = ("a", "b", "c")
    sets_steps = False
    RATE = psync.schedules.PolynomialDecay(1.0, 1 << 12, 0.1)

    def declare(self, steps: Sequence[Any]) -> Handles:
        optimizer = psync.optimizers.SGD(self.RATE, name=self.name, **self._options())
        variables = {
            part: psync.Variable(np.zeros((1, self.columns), np.float32), name=self._name_of(part))
            for part in self.parts
        }
        self._ps = {part: each.spec.shards[0].ps for part, each in variables.items()}
        return Handles(variables, optimizer)

    def _touched(self, column: int) -> list[str]:
        first = column % 3
        return [self.parts[first], *([self.parts[first - 1]] if column % 4 == 3 else [])]

    def _pairs(self, variables: Mapping[str, Any], column: int) -> Iterator[tuple[Any, Any]]:
        for part in self._touched(column):
            yield self._gradient(variables[part], column), variables[part]

    def marks(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        found = np.zeros((2, self.columns), np.float32)
        for column in range(self.columns):
            touched = self._touched(column)
            for row, part in enumerate((touched[0], touched[-1])):
                found[row, column] = values[part][0, column] != 0
        return found

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        self._before = values  # from here on each ps gives a step once
        return super().begin(handles, values, noted)

    def check(self, look: Look) -> Iterator[Fault]:
        made, values = look.iterations.get(self.name), look.values[self.name]
        if look.late or made is None:
            return
        marks = self.marks(values)
        # Of a push whose worker has died between its parts, and that never ran again, one is there.
        if not marks.min(axis=0).sum() <= made <= marks.max(axis=0).sum():
            said = f"{made} iterations of its optimizer, but {marks.tolist()} pushes"
            yield "iterations", f"{look.when}: {self.name}: {said}"
        torn = int((marks[0] != marks[1]).sum())
        for ps in set(self._ps.values()):
            steps = []
            for column in range(self.columns):
                here = [part for part in self._touched(column) if self._ps[part] == ps]
                found = {
                    float(values[part][0, column])
                    for part in here
                    if values[part][0, column] != self._before[part][0, column]
                }
                # Of a push in several messages, another one may have come in between.
                steps += [self._step_of(value) for value in found if len(found) == 1]
            if len(set(steps)) < len(steps) or max(steps, default=-1) >= made + torn:
                said = f"ps {ps} gave its pushes the steps {sorted(steps)}, of {made} in all"
                yield "steps", f"{look.when}: {self.name}: {said}"
        if len(set(self._ps.values())) > 1 and made:
            look.journal.say("mark", "pushes of one optimizer are counted on several ps tasks")

    def _step_of(self, value: float) -> int:
        return round((1.0 - value) / 0.9 * (1 << 12))


def _in_order(columns: np.ndarray) -> list[tuple[float, ...]]:
    return sorted(tuple(column) for column in columns.T.tolist())


class Averaged(Added):
    """As ``Added``; each call then moves the average of the variable.

    A column's average says how many calls have moved it since the column was added.
    """

    DECAY = 0.9

    def declare(self, steps: Sequence[Any]) -> Handles:
        handles = super().declare(steps)
        handles.averages = psync.ExponentialMovingAverage(self.DECAY)
        handles.averages.apply(handles.variables.values())
        return handles

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = await super().change(handles, call, run)
        await handles.averages.update()
        return note

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        counts = self._counts(values)
        if counts is None:
            yield "average", f"{self.name}: began with {values['mean ']}"
        self._base = np.zeros(1, int) if counts is None else counts

    def _counts(self, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return how often the average of each row was moved since its first change.

        None: one of them is no average of so many moves.
        """
        means = self._rows_of(values["mean "])[:, : self.columns]
        if not ((means == 0) | (self._rows_of(values[""])[:, : self.columns] == 1)).all():
            return None
        known = moved(1, 2 * self.columns + 1, self.DECAY)
        counts = np.searchsorted(known, means)
        fits = known[np.minimum(counts, len(known) - 1)] == means
        return counts.max(axis=1) if fits.all() else None

    def check(self, look: Look) -> Iterator[Fault]:
        journal, counts = look.journal, self._counts(look.values[self.name])
        means = f"{look.when}: {self.name}: averages {look.values[self.name]['mean '].tolist()}"
        if counts is None:
            yield "average", means
            return
        begun, done = map(len, calls_made(journal, self.name))
        few = look.is_last and not journal.is_rolled_back and (counts < self._base + done).any()
        if few or (counts > begun).any():
            said = (
                f"{means}: moved {counts.tolist()} times by {begun} calls, of which {done} "
                f"are done in this life, which began with {self._base.tolist()}"
            )
            yield "average", said


class Metered(Table):
    """Counted by a metric, to which each call brings one more than its column."""

    has_marks = False
    has_copies = True

    def declare(self, steps: Sequence[Any]) -> Handles:
        metric = psync.metrics.Mean(self.name)
        (sums,) = metric.variables
        return Handles({"sums": sums}, more={"metric": metric})

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = run.begin(call)
        await handles.more["metric"].update_state(np.full(1, call.column + 1.0))
        return note.heard("accepted")

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        self._base = np.round(values["sums"], 6)
        return iter(())

    def check(self, look: Look) -> Iterator[Fault]:
        # What is restored is shared out among the copies, so the last bit may be another one.
        total, count = np.round(look.values[self.name]["sums"], 6).tolist()
        begun, done = calls_made(look.journal, self.name)
        certain = look.is_last and not look.late and not look.journal.is_rolled_back
        few = certain and count < self._base[1] + len(done)
        all_of_them = sum(column + 1 for column in begun)
        if few or count > len(begun) or (total != all_of_them and count == len(begun)):
            said = (
                f"{look.when}: {self.name}: {count} values, their sum is {total}; {begun} "
                f"were begun, {done} are done in this life, which began with {self._base}"
            )
            yield "metric", said


def calls_made(journal: Journal, table: str) -> tuple[list[int], list[int]]:
    """Return columns of calls that were begun, and of those whose closures are done in this life.

    What a rollback has undone is done all the same.
    """
    begun, done = [], []
    for column, (closure, ordinal, _) in journal.calls_of(table).items():
        if any(ordinal in run.notes for run in closure.runs):
            begun.append(column)
        if closure.state == "done" and closure.life == journal.lives:
            done.append(column)
    return begun, done


def moved(value: float, times: int, decay: float) -> np.ndarray:
    """Return what an average that was 0 becomes of a constant value, move by move."""
    found = np.zeros(times + 1, np.float32)
    value_ = np.full(1, value, np.float32)
    for at in range(times):
        move_average(found[at : at + 1], value_, found[at + 1 : at + 2], decay, Scratch(1))
    return found
