"""Tables of a simulated program: variables that closures change so that each call leaves a mark.

A table has a row for each shard and a column for each call of a step. What its variables and
optimizer are, how a call changes them, how marks are read from values, and what must hold of them,
is said by one class for each kind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import psync
from psync.testing.simulation.plan import Call, Plan

if TYPE_CHECKING:
    from psync.testing.simulation.journal import Closure, Journal, Note, Run

SPARE = 8
"""Columns of each table for calls that are made when all faults are over."""

OVERWRITTEN = -4096.0
"""In gradients whose push has returned."""

COUNTED = ("accepted", "duplicate")

STEPS = (1 << 31, 1 << 20)
"""The program sets an optimizer's step to so much, less so much each time: more than all pushes."""

Fault = tuple[str, str]
"""An oracle, and what it has found."""


class StepFailed(Exception):
    """What a step of the program raises because its plan says so."""


@dataclass
class Handles:
    """What a step needs to change a table; it travels with the closure."""

    variables: dict[str, Any]
    optimizer: Any = None
    step: Any = None  # the global step of a synchronous group
    averages: Any = None  # moving averages of the variables
    more: dict[str, Any] = field(default_factory=dict)  # what is no variable
    stated: dict[str, Any] = field(default_factory=dict)  # of the program: has a state to save

    def pulled(self) -> dict[str, Any]:
        """Return what the program looks at: the variables, and their moving averages."""
        if self.averages is None:
            return self.variables
        means = {
            f"mean {part}": self.averages.average(variable)
            for part, variable in self.variables.items()
        }
        return self.variables | means

    def saved(self, name: str) -> dict[str, Any]:
        """Return what a checkpoint of the table has."""
        held = {f"v.{name}.{part}": variable for part, variable in self.variables.items()}
        more = {f"o.{name}": self.optimizer, f"s.{name}": self.step, f"a.{name}": self.averages}
        more |= self.stated
        return held | {key: value for key, value in more.items() if value is not None}


Values = Mapping[str, Mapping[str, np.ndarray]]
"""Pulled values, by table and variable."""


Slots = dict[str, dict[str, np.ndarray]]
"""Slots of an optimizer, by table and name."""


@dataclass(frozen=True)
class Look:
    """Values that were pulled at one time, and what the program had been told then.

    Attributes:
        late: Whether there was a rollback at that time of which the program had not heard.
        settled: Whether all that was counted must be applied.
        is_last: Whether nothing comes afterwards.
    """

    journal: Journal
    values: Values
    when: str
    late: bool = False
    settled: bool = True
    is_last: bool = False
    iterations: Mapping[str, int] = field(default_factory=dict)  # of optimizers, at the end
    slots: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)  # at the end


@dataclass(frozen=True)
class Seen:
    """One call of a closure at one look."""

    closure: Closure
    state: str
    outcome: str
    found: np.ndarray  # marks on each shard
    before: np.ndarray  # when this life of the program began
    former: bool  # the closure is of another life
    rolled_back: bool  # in this life
    late: bool


class Table:
    """One kind of table.

    Args:
        name: Of the table.
        plan: Of the run.
        columns: How many calls there are, with spare ones.
    """

    synchronous = False
    parts: Sequence[str] = ("",)
    repeats = False  # whether a column is more than 0 or 1
    has_copies = False  # one for each worker, among which is shared out what is restored
    has_marks = True  # else ``check`` alone says what must hold of its calls
    applies_at_once = False  # a run that pulls sees what it has changed

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        self.name = name
        self.plan = plan
        self.columns = columns

    def declare(self, steps: Sequence[Any]) -> Handles:
        """Make variables and optimizer, in the scope of a strategy.

        Args:
            steps: The global steps of the synchronous groups.
        """
        raise NotImplementedError

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        """Make a call, and return what was told."""
        raise NotImplementedError

    def prepare(self, handles: Handles, coordinator: Any) -> None:
        """There is a coordinator, and nothing is restored yet."""

    def noted(self) -> Any:
        """Return what is known when a checkpoint is begun, for ``begin``."""

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        """Return what is wrong with that from which a life of the program goes on.

        Args:
            handles: Of the table.
            values: That were found.
            noted: When the checkpoint was begun that was restored; None: none, or nobody knows.
        """
        return iter(())

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        """What the program itself does meanwhile, until it is cancelled."""

    async def finish(self, handles: Handles) -> None:
        """The program is at its end, and no fault happens any more."""

    def marks(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the marks: a row for each shard, a column for each call."""
        if not self.has_marks:
            return np.zeros((1, self.columns), np.float32)
        return np.concatenate(
            [self._rows_of(values[part])[:, : self.columns] for part in self.parts]
        )

    def note_pull(self, values: Mapping[str, np.ndarray], run: Run) -> None:
        """A run of a closure has pulled these values."""
        if self.applies_at_once:
            marks = self.marks(values)
            run.look_for_own(
                self.name, marks[:, [column for name, column in run.changed if name == self.name]]
            )
            run.look_for_told(self.name, marks)

    def wrong(self, seen: Seen) -> str:
        """Return the oracle by which the marks of a call are wrong, or ""."""
        found = seen.found
        whole, counts = bool((found == found[0]).all()), found > 0
        if not self.repeats and not set(found.tolist()) <= {0.0, 1.0}:
            return "twice"
        if self.synchronous and not whole:
            return "whole"
        if seen.former:
            if seen.rolled_back:
                return "" if set(found.tolist()) <= {0.0, *seen.before.tolist()} else "fence"
            return "" if (found == seen.before).all() else "fence"
        if seen.state != "done":
            return ""
        if seen.outcome == "stale":
            return "stale" if counts.any() else ""
        if seen.late or seen.closure.undone or seen.outcome == "rolled_back":
            # Of a run that was cut short a cut may have a part: see ``closures.rollback``.
            return "" if whole or len(seen.closure.runs) > 1 else "cut"
        if seen.outcome not in COUNTED:
            return "outcome"
        return "" if counts.all() else "lost"

    def check(self, look: Look) -> Iterator[Fault]:
        """Return what is wrong with the table as a whole."""
        return iter(())

    def num_steps(self, values: Mapping[str, np.ndarray]) -> int:
        """Return how many synchronous steps were made."""
        return 0

    # What kinds are made of.

    def _dense(self, part: str = "") -> Any:
        shape = (self.plan.num_shards, self.columns + self.plan.padding)
        return psync.Variable(np.zeros(shape, np.float32), name=self._name_of(part))

    def _sparse(self, part: str = "") -> Any:
        shape = (self.plan.num_shards * self.columns, 1)
        return psync.Variable(np.zeros(shape, np.float32), name=self._name_of(part))

    def _name_of(self, part: str) -> str:
        return f"{self.name}.{part}" if part else self.name

    def _rows_of(self, value: np.ndarray) -> np.ndarray:
        return value.reshape(self.plan.num_shards, -1)

    def _gradient(self, variable: Any, column: int, of: float = -1.0) -> np.ndarray:
        gradient: np.ndarray = psync.empty_like(variable)
        gradient.fill(0)
        gradient[:, column] = of
        return gradient

    @staticmethod
    def _overwrite(pairs: Iterable[tuple[Any, Any]]) -> None:
        """Write to gradients whose push has returned: nothing may be computed from that."""
        for gradient, _ in pairs:
            if isinstance(gradient, np.ndarray):
                gradient.fill(OVERWRITTEN)

    def _slices(self, variable: Any, column: int, of: float = -1.0) -> psync.IndexedSlices:
        shards = self.plan.num_shards
        rows = np.arange(shards) * self.columns + column
        return psync.IndexedSlices(np.full((shards, 1), of, np.float32), rows, variable.shape)

    def _descent(self) -> Any:
        """Return plain descent at rate 1, of a configuration that no other table has.

        A chief that attaches tells optimizers apart by that, where some were not used.
        """
        number = 1 + ("dense", "rows", "both").index(self.name)
        rate = psync.schedules.PolynomialDecay(1.0, number, 1.0)
        return psync.optimizers.SGD(rate, **self._options())

    def _options(self) -> dict[str, Any]:
        """Return options of an optimizer whose pushes are applied at once."""
        bound = self.plan.bound
        held = {"staleness_bound": psync.StalenessBound(bound)} if bound >= 0 else {}
        return {"compression": self.plan.compression, **held}


class Dense(Table):
    """Two variables, whose shards lie side by side, pushed together as whole gradients.

    Values come with the answers of every second call. The program may set, while it trains, how
    many updates the optimizer has made: then that number holds, and the pushes since count from it.
    """

    applies_at_once = True
    parts: Sequence[str] = ("", "twin")
    sets_steps = True  # if the plan says so

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        self._times = self._certain = 0  # the step was set; and of these, surely
        self._all_set = asyncio.Event()

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({part: self._dense(part) for part in self.parts}, self._descent())

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = run.begin(call)
        pairs = list(self._pairs(handles.variables, call.column))
        if call.column % 2:
            result, values = await handles.optimizer.push_pull(pairs, pull=handles.variables)
            if note.told(result).outcome == "accepted":
                run.look_for_own(self.name, self.marks(values)[:, call.column])
        else:
            note.told(await handles.optimizer.apply_gradients(pairs))
        self._overwrite(pairs)
        run.end_round(self.name, note)
        return note

    def _pairs(self, variables: Mapping[str, Any], column: int) -> Iterator[tuple[Any, Any]]:
        for part in self.parts:
            yield self._gradient(variables[part], column), variables[part]

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        self._certain, self._all_set = 0, asyncio.Event()
        return iter(())

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        for _ in range(rng.choice((1, 3)) if self.plan.sets_steps and self.sets_steps else 0):
            await asyncio.sleep(rng.uniform(0.0, self.plan.train_s))
            self._times += 1
            await handles.optimizer.iterations.assign(self._step_set(self._times))
            self._certain = self._times
        self._all_set.set()

    def _step_set(self, time: int) -> int:
        return STEPS[0] - STEPS[1] * time if time else 0

    async def finish(self, handles: Handles) -> None:
        await self._all_set.wait()

    def check(self, look: Look) -> Iterator[Fault]:
        journal, made = look.journal, look.iterations.get(self.name)
        if look.late or made is None:
            return
        calls = journal.calls_of(self.name).values()
        pushes = sum(any(at in run.notes for run in closure.runs) for closure, at, _ in calls)
        times = range(0 if journal.is_rolled_back else self._certain, self._times + 1)
        steps = [self._step_set(time) for time in times]
        if self._certain:
            journal.say("mark", "a program sets how many updates an optimizer has made")
        if not any(0 <= made - step <= pushes for step in steps):
            said = f"{made} iterations, set to one of {steps}, with {pushes} pushes at most"
            yield "iterations", f"{look.when}: {self.name}: {said}"


class Rows(Dense):
    """Pushed as gradients of some rows."""

    parts = ("",)

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._sparse()}, self._descent())

    def _pairs(self, variables: Mapping[str, Any], column: int) -> Iterator[tuple[Any, Any]]:
        yield self._slices(variables[""], column), variables[""]


class Both(Dense):
    """Two variables, one whole and of one some rows, in one push."""

    parts = ("dense", "rows")

    def declare(self, steps: Sequence[Any]) -> Handles:
        variables = {"dense": self._dense("dense"), "rows": self._sparse("rows")}
        return Handles(variables, self._descent())

    def _pairs(self, variables: Mapping[str, Any], column: int) -> Iterator[tuple[Any, Any]]:
        yield self._gradient(variables["dense"], column), variables["dense"]
        yield self._slices(variables["rows"], column), variables["rows"]


class Added(Table):
    """Changed by ``assign_add``, without an optimizer."""

    applies_at_once = True

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._dense()})

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = run.begin(call)
        variable = handles.variables[""]
        await variable.assign_add(self._gradient(variable, call.column, 1.0))
        note.heard("accepted")
        return note


class Counted(Added):
    """Changed by ``assign_add`` of a copy for each worker, as the sums of metrics are."""

    has_copies = True
    applies_at_once = False  # in its own copy, and the mean may be one of another moment

    def declare(self, steps: Sequence[Any]) -> Handles:
        variable = psync.Variable(
            np.zeros((self.plan.num_shards, self.columns), np.float32),
            name=self.name,
            synchronization=psync.VariableSynchronization.ON_READ,
            aggregation=psync.VariableAggregation.SUM,
        )
        return Handles({"": variable})

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = await super().change(handles, call, run)
        run.say("copy")
        return note


class Scattered(Table):
    """Changed by ``scatter_add``: some rows, without an optimizer."""

    applies_at_once = True

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._sparse()})

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        note = run.begin(call)
        variable = handles.variables[""]
        await variable.scatter_add(self._slices(variable, call.column, 1.0))
        note.outcome = "accepted"
        return note


def optimizer_of(rule: str, rate: Any, **options: Any) -> Any:
    """Return an optimizer by the name of its class."""
    more = {"momentum": 0.5} if rule in ("Momentum", "Nesterov") else {}
    return getattr(psync.optimizers, rule)(rate, **more, **options)
