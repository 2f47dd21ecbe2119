"""Tables of synchronous groups, and what must hold of their steps.

All columns that were counted in one step have the same value, in other steps others: so values
say which pushes made a step. Where the rule is plain descent of sums, the value is the number of
the step, s + 1 at step s. Whatever the rule, one process that is told who was counted in which
step must come to the same values, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import psync
from psync.client.context import current_closure
from psync.numerics.memory import Scratch
from psync.numerics.rules import Lamb, UpdateRule, clipped_by_norm
from psync.numerics.sums import growing_decay, move_average
from psync.testing.simulation.journal import Closure, Journal, Note, Run
from psync.testing.simulation.plan import Call, Plan
from psync.testing.simulation.workload.tables import Fault, Handles, Look, Table, optimizer_of

MAX_STEPS = 1 << 12
FOR_EVER_S = 10_000.0

Push = tuple[Closure, int, Call]


class Synchronous(Table):
    """Of one group: a table, and a variable that every push of it changes."""

    synchronous = True
    repeats = True
    parts = ("",)
    PARTS = ("", "count")  # its variables
    _rule: UpdateRule

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        self.number = int(name.removeprefix("sync"))
        self.group = plan.groups[self.number]
        options = self.group.options
        self.needed = options["replicas_to_aggregate"]
        self.allowance = -(-self.needed // options["total_num_replicas"])
        self.means = options["reduction"] == "mean"
        self.tells_steps = self.group.rule == "SGD" and not self.means and not self.group.limits
        shared = [plan.step_of(number) for number in range(len(plan.groups))]
        self.has_own_step = shared.count(plan.step_of(self.number)) == 1
        self.first_step = 0 if self.group.own_step and self.number else plan.first_step
        gives_up = (
            options["patience_s"] < FOR_EVER_S
            or not {"visited", "uneven"}.isdisjoint(plan.works)  # joins may raise
            or any(each.may_end for batch in plan.batches for each in batch.closures)
        )
        self.waits_for_tokens = not gives_up

    def declare(self, steps: Sequence[Any]) -> Handles:
        group = self.group
        slope = 1.0 if self.tells_steps else 0.1237  # so that no two steps give one value
        last = MAX_STEPS << self.number  # so that no two groups have one configuration
        rate = psync.schedules.PolynomialDecay(1.0, last, 1.0 + slope * last)
        inner = optimizer_of(group.rule, rate, **group.limits, compression=self.plan.compression)
        self._rule = inner._rule
        variables = {
            "": self._sparse() if group.rows else self._dense(),
            "count": psync.Variable(
                np.zeros((self.plan.num_shards, 1), np.float32), name=self._name_of("count")
            ),
        }
        step, averages = steps[self.plan.step_of(self.number)], None
        more: dict[str, Any] = {}
        if group.averages:
            follows = {"num_updates": step if group.averages["num_updates"] else None}
            averages = psync.ExponentialMovingAverage(**group.averages | follows)
            more = {"variable_averages": averages, "variables_to_average": variables.values()}
        optimizer = psync.SyncReplicasOptimizer(inner, name=self.name, **group.options, **more)
        return Handles(variables, optimizer, step, averages)

    def note_pull(self, values: Mapping[str, np.ndarray], run: Run) -> None:
        if self.tells_steps:
            seen = int(self.marks(values).max(axis=1).min())
            run.pulled[self.name] = min(run.pulled.get(self.name, seen), seen)

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        table, count = handles.variables[""], handles.variables["count"]
        of = -1.0 / call.weight
        make = self._slices if self.group.rows else self._gradient
        ones = np.full(count.shape, of, np.float32)
        pairs = [(make(table, call.column, of), table), (ones, count)]
        note = run.begin(call)
        note.local = self._local_step(handles.optimizer, run)
        result = await handles.optimizer.apply_gradients(pairs, handles.step, weight=call.weight)
        self._overwrite(pairs)
        return note.told(result)

    def _local_step(self, optimizer: Any, run: Run) -> int | None:
        """Return the step of the values that a push comes from; None: nobody can tell."""
        token: int | None = optimizer.local_step
        seen = run.pulled.pop(self.name, None)
        context = current_closure()
        assert context is not None
        lowest: int | None = context.runtime.pulled.lowest(optimizer.number)
        if lowest is None or self.group.options.get("tensorflow_compat"):
            return token
        if self.tells_steps:
            return seen
        return lowest if lowest >= 0 else None

    def marks(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        marks = super().marks(values)
        return marks if self.tells_steps else (marks > 0).astype(np.float32)

    # What must hold.

    def num_steps(self, values: Mapping[str, np.ndarray]) -> int:
        """Return how many steps were made."""
        return len(self._classes(values))

    def _classes(self, values: Mapping[str, np.ndarray]) -> dict[float, list[int]]:
        """Return the columns of each step, by their value."""
        found: dict[float, list[int]] = {}
        for column, value in enumerate(super().marks(values)[0].tolist()):
            if value:
                found.setdefault(value, []).append(column)
        return found

    def check(self, look: Look) -> Iterator[Fault]:
        if look.late or not look.settled:
            return
        values = look.values[self.name]
        table, count = self._rows_of(values[""]), self._rows_of(values["count"])
        where = f"{look.when}: {self.name}"
        if not (table == table[0]).all() or not (count == count[0]).all():
            yield "whole", f"{where}: shards differ: {table.tolist()}, counters {count.tolist()}"
            return
        classes = self._classes(values)
        quiet = look.journal.lives == 1 and not look.journal.has_rolled_back
        if self.tells_steps:
            yield from self._steps_fault(where, classes, contiguous=self.has_own_step or quiet)
            if count[0, 0] != sum(value * len(columns) for value, columns in classes.items()):
                yield "whole", f"{where}: counter {count[0, 0]}, but steps {classes}"
        pushes, era = look.journal.calls_of(self.name), look.journal.era
        for value, columns in classes.items():
            told = [pushes[column] for column in columns if column in pushes]
            yield from self._step_faults(f"{where}: step of value {value}", told, len(columns), era)
        for push in pushes.values():
            yield from self._push_faults(where, push, float(table[0, push[2].column]), era)
        if look.is_last and self.has_own_step:
            yield from self._replay_faults(where, values, classes, pushes, era)

    def _steps_fault(
        self, where: str, classes: Mapping[float, object], *, contiguous: bool
    ) -> Iterator[Fault]:
        steps = {int(value) for value in classes}
        # With a step that groups share, a group begins wherever the others are.
        first = self.first_step + 1 if self.has_own_step else min(steps, default=1)
        if contiguous and steps != set(range(first, first + len(steps))):
            yield "steps", f"{where}: steps {sorted(steps)}, the first is {first}: one is lost"

    def _step_faults(
        self, where: str, pushes: Sequence[Push], size: int, era: object
    ) -> Iterator[Fault]:
        """What is wrong with one step."""
        # With a token that was left, nobody knows yet of how many pushes the step will be.
        counted = [
            (note, run)
            for push in pushes
            if not push[0].undone
            for note, run in _told(push, era)
            if note.outcome == "accepted" and note.count
        ]
        # While too few live no step is closed, and what comes meanwhile counts in it, too.
        if size > self.needed and self.group.options["min_replicas"] == 1:
            yield "target", f"{where}: {size} pushes in a step of {self.needed}"
        for note, _ in counted:
            if note.count != size:
                yield "count", f"{where}: {size} pushes, but {note} was told {note.count}"
            if not note.partial and size < self.needed and self._all_are_there():
                yield "target", f"{where}: {size} pushes, not {self.needed}, and not partial"
        if self.group.options.get("strict") or self.group.options.get("deterministic"):
            shares = Counter(id(run.session) for _, run in counted)
            if max(shares.values(), default=0) > self.allowance:
                yield "share", f"{where}: one replica has {max(shares.values())} of {size} pushes"

    def _all_are_there(self) -> bool:
        """Whether all workers have taken part until now: no target has ever shrunk."""
        plan = self.plan
        return plan.all_workers and Journal.current().is_calm and "uneven" not in plan.works

    def _push_faults(self, where: str, push: Push, value: float, era: object) -> Iterator[Fault]:
        """What is wrong with one push: it is counted in the step that its values came from."""
        closure, ordinal, _ = push
        where = f"{where}: closure {closure.number}, call {ordinal}, value {value}"
        for note, _ in _told(push, era):
            if note.outcome == "stale" and not note.staleness and self.waits_for_tokens:
                yield "stale", f"{where}: stale without a reason: {note}"
            # One that did not end as done is final all the same, so what it still pushes is late.
            if note.outcome == "duplicate" and len(closure.runs) < 2 and closure.state == "done":
                yield "duplicate", f"{where}: duplicate, but there was one run: {note}"
            if note.outcome == "accepted" and note.staleness:
                yield "stale", f"{where}: accepted, and stale: {note}"
            if (
                self.tells_steps and note.outcome == "accepted" and value and note.local is not None
                and self.has_own_step and not closure.undone
                and max(note.local, self.first_step) != value - 1
            ):  # fmt: skip
                yield "step", f"{where}: not counted in the step that its values came from: {note}"

    # The same in one process.

    def _replay_faults(
        self,
        where: str,
        values: Mapping[str, np.ndarray],
        classes: Mapping[float, Sequence[int]],
        pushes: Mapping[int, Push],
        era: object,
    ) -> Iterator[Fault]:
        order = self._order(classes, pushes, era)
        if order is None:
            return
        weights = {column: call.weight for column, (_, _, call) in pushes.items()}
        for part, expected in self._replayed(order, weights).items():
            found = self._rows_of(values[part])
            if not (found.view(np.uint32) == expected.view(np.uint32)).all():
                said = (
                    f"{where}.{part}: steps {order} with {self.group}: {found.tolist()}, one "
                    f"process makes of them {expected.tolist()}"
                )
                yield "replay", said

    def _order(
        self, classes: Mapping[float, Sequence[int]], pushes: Mapping[int, Push], era: object
    ) -> list[Sequence[int]] | None:
        """Return the columns of each step in order; None if nobody can tell."""
        first = self.first_step
        if self.tells_steps:
            return [classes[value] for value in sorted(classes)]
        found: dict[int, Sequence[int]] = {}
        unknown = []
        for columns in classes.values():
            steps = {
                note.local
                for column in columns
                for note, _ in _told(pushes[column], era)
                if note.outcome == "accepted" and note.local is not None
            }
            if len(steps) == 1 and not found.keys() & steps:
                found[max(steps.pop(), first)] = columns
            else:
                unknown.append(columns)
        missing = set(range(first, first + len(classes))) - found.keys()
        if len(unknown) > 1 or len(missing) != len(unknown):
            return None
        found |= dict(zip(missing, unknown, strict=True))
        return [found[step] for step in sorted(found)]

    def _replayed(
        self, order: Sequence[Sequence[int]], weights: Mapping[int, float]
    ) -> dict[str, np.ndarray]:
        """Return what variables and averages become if one process makes these steps."""
        shards, rule = self.plan.num_shards, self._rule
        width = self.columns + (0 if self.group.rows else self.plan.padding)
        values = [np.zeros((shards, width), np.float32), np.zeros((shards, 1), np.float32)]
        slots = [
            [np.full_like(value, rule.initial_slot(name)) for name in rule.own_slots()]
            for value in values
        ]
        means = [np.zeros_like(value) for value in values]
        scratch = Scratch(shards * width)
        of_part = [part for part in range(2) for _ in range(shards)]
        for step, columns in enumerate(order, self.first_step):
            row = np.zeros(width, np.float32)
            row[list(columns)] = -1
            divisor = np.float32(sum(weights[each] for each in columns) if self.means else 1)
            by_index = self.group.rows and self.group.options.get("sparse_divisor") != "total"
            of_row = np.float32(1) if by_index else divisor
            rows: Any = np.array(sorted(columns)) if self.group.rows else slice(None)
            pushed = [row[rows] / of_row] * shards
            pushed += [np.full(1, -len(columns), np.float32) / divisor] * shards
            clipped: Any = clipped_by_norm(pushed, of_part, rule.options)
            places = [(part, shard, rows if not part else slice(None))
                      for part in range(2) for shard in range(shards)]  # fmt: skip
            held = [
                (values[part][shard, at].copy(), [slot[shard, at].copy() for slot in slots[part]])
                for part, shard, at in places
            ]
            ratios = self._ratios(of_part, held, clipped, step, scratch)
            for (part, shard, at), (value, own), mean in zip(places, held, clipped, strict=True):
                rule.apply([(value, mean, own, value, own)], step, scratch, ratios.get(part))
                values[part][shard, at] = value
                for slot, data in zip(slots[part], own, strict=True):
                    slot[shard, at] = data
            for value, mean in zip(values, means, strict=True):
                if self.group.averages:
                    decay = self._decay(step + 1)
                    move_average(mean.ravel(), value.ravel(), mean.ravel(), decay, scratch)
        found = dict(zip(self.PARTS, values, strict=True))
        if self.group.averages:
            found |= {f"mean {part}": mean for part, mean in zip(self.PARTS, means, strict=True)}
        return found

    def _decay(self, step: int) -> float:
        decay: float = self.group.averages["decay"]
        return growing_decay(decay, step) if self.group.averages["num_updates"] else decay

    def _ratios(
        self, of_part: Sequence[int], held: Any, gradients: Any, step: int, scratch: Scratch
    ) -> dict[int, float]:
        rule = self._rule
        if not isinstance(rule, Lamb):
            return {}
        sums: dict[int, list[Any]] = {}
        for part, (value, own), mean in zip(of_part, held, gradients, strict=True):
            measurement = rule.measurement(step, scratch)
            measurement.add(value, mean, own)
            sums.setdefault(part, []).append(measurement.sums)
        return {part: rule.trust_ratio(pieces) for part, pieces in sums.items()}


def _told(push: Push, era: object) -> list[tuple[Note, Run]]:
    """Return what the runs of a closure were told of a push, unless it may have been undone."""
    closure, ordinal, _ = push
    return [
        (run.notes[ordinal], run) for run in closure.runs if ordinal in run.notes and run.era == era
    ]
