"""The journal of a simulated run: what the program did, what it and its steps were told.

The journal lives outside of the simulated processes, so no death takes anything back. What a dead
process would still say is not heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psync.chief.watch import FailoverEvent, RollbackEvent
from psync.client.context import current_closure
from psync.testing.simulation import oracle
from psync.testing.simulation.plan import Call, ClosurePlan, Plan
from psync.testing.simulation.processes import Process, current_process
from psync.testing.simulation.told import Told
from psync.testing.simulation.workload.tables import Fault, Look, Table, Values
from psync.wire.tensors import to_bytes_view

if TYPE_CHECKING:
    from psync.testing.simulation.workload.own_updates import OwnUpdates


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
                said = (
                    f"{table}: {worker} has ended {ahead} rounds more than {other} has begun, "
                    f"which works; the bound is {bound}"
                )
                yield "ahead", said

    def _bound_of(self, table: str) -> int:
        """Return the bound if all that workers do is about this table; -1: rounds are uncertain."""
        plan = self._plan
        is_alone = all(
            (each.fails, each.cancel_s, each.needs) == (False, None, -1)
            and {call.kind for call in each.calls} == {table}
            for each in plan.batches[0].closures
        )
        return plan.bound if plan.all_workers and not plan.works and is_alone else -1


PULLS = 3
"""That a worker holds; the oldest goes first."""

_Pulled = list[tuple[np.ndarray, np.ndarray]]
"""Of each array, what it was."""


class Holdings:
    """What each process holds."""

    def __init__(self) -> None:
        self._pulls: weakref.WeakKeyDictionary[Process, deque[_Pulled]] = (
            weakref.WeakKeyDictionary()
        )

    def hold(self, arrays: Iterable[np.ndarray]) -> None:
        """The present process has pulled these."""
        process = current_process.get()
        if process is not None:
            pulls = self._pulls.setdefault(process, deque(maxlen=PULLS))
            pulls.append([(array, array.copy()) for array in arrays])

    def any_leased(self) -> bool:
        """Return whether the present process holds something that is a ps's memory."""
        return any(_is_leased(array) for array, _ in self._here())

    def faults(self) -> Iterator[Fault]:
        """Look at what the present process holds."""
        for array, then in self._here():
            if to_bytes_view(array) != to_bytes_view(then):
                yield ("held", f"an array that was pulled as {then.ravel()} became {array.ravel()}")

    def _here(self) -> _Pulled:
        process = current_process.get()
        if process is None or process.is_dead:
            return []
        return [pair for pull in self._pulls.get(process, ()) for pair in pull]


def _is_leased(array: np.ndarray) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, memoryview) and owner.readonly


LOOKED_AFTER_S = 1.0
"""After which what was pulled is compared: until then the program has heard of every rollback."""


class Violation(AssertionError):
    """A promise was broken.

    Attributes:
        oracle: Which check found it: shrinking keeps to the same one.
        at_s: When it was found.
    """

    def __init__(self, oracle: str, message: str, at_s: float | None = None) -> None:
        super().__init__(f"{oracle}: {message}")
        self.oracle = oracle
        self.at_s = asyncio.get_running_loop().time() if at_s is None else at_s


@dataclass
class Note:
    """One call of a run, as its worker saw it."""

    call: str  # numbers of its closure, and of it in the closure
    local: int | None = None  # step of the values, as far as it is known; -1: the first
    outcome: str | None = None  # None: nobody was told
    staleness: int = 0
    partial: bool = False
    count: int = 0  # pushes in its step

    def told(self, result: Any) -> Note:
        """Note the result of a push."""
        self.outcome, self.staleness = str(result.outcome.value), result.staleness
        self.partial, self.count = result.partial, result.count
        return self.heard()

    def heard(self, outcome: str = "") -> Note:
        """Say what was told."""
        self.outcome = outcome or self.outcome
        Journal.current().say("told", f"{self.call} {self.outcome}")
        return self


@dataclass
class Run:
    """One run of a closure on a worker."""

    closure: int
    worker: str
    era: tuple[int, int]  # lives of the program, and rollbacks that it had heard of
    session: object  # one for each incarnation of the worker
    pulled: dict[str, int] = field(default_factory=dict)  # lowest step that was seen, by table
    notes: dict[int, Note] = field(default_factory=dict)  # by the ordinal of a call
    changed: list[tuple[str, int]] = field(default_factory=list)  # (table, column) that counted
    ordinal: int = 0  # of the call that is made
    has_raised: bool = False

    def say(self, kind: str) -> None:
        """Note something for the report."""
        Journal.current().say(kind)

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """What the run raises may end other closures at any moment from now on."""
        try:
            yield
        except Exception:
            self.has_raised = True
            raise

    def look_for_own(self, table: str, found: np.ndarray) -> None:
        """What this run has changed in a table, and was told so, is in what it pulls."""
        journal = Journal.current()
        if not journal.is_rolled_back and not journal.may_be_ending(self.closure):
            seen = bool((found > 0).all())
            journal.look(seen, f"{table}: of own changes {found.tolist()} is seen", "own")

    def look_for_told(self, table: str, marks: np.ndarray) -> None:
        """What the program knew when it scheduled the closure is in what the run pulls."""
        Journal.current().look_for_told(table, marks, self.closure)

    def end_round(self, table: str, note: Note) -> None:
        """A push that may have to wait for others was answered."""
        Journal.current().end_round(table, self, note)

    def begin(self, call: Call) -> Note:
        """Note that a call is made."""
        Journal.current().rounds.begin(self.worker)
        name = f"{self.closure} {self.ordinal}"
        note = self.notes[self.ordinal] = Note(name)
        Journal.current().say("call", name)
        return note


@dataclass
class Closure:
    """One closure of one life of the program."""

    number: int
    plan: ClosurePlan
    life: int
    id: int = -1  # as rollback events name it
    state: str = "open"  # then "done", "failed" or "cancelled"; "lost" with its program
    outcomes: tuple[str, ...] = ()
    undone: bool = False  # named by a rollback
    undone_to: Save | None = None  # the checkpoint to which that went, if it is known
    settled: bool = False  # a join without an error has returned since then
    runs: list[Run] = field(default_factory=list)
    told: Mapping[str, int] = field(default_factory=dict)  # when it was scheduled, see ``Told``

    def ended(self, state: str, outcomes: Sequence[str] = ()) -> None:
        """Note what the program was told."""
        if _is_heard():
            self.state, self.outcomes = state, tuple(outcomes)
            Journal.current().hear(self)
            Journal.current().say("ended", f"{self.number} {state}")


@dataclass
class Save:
    """One attempt to save."""

    began: frozenset[int]  # closures that had ended then, and were not undone
    settled: frozenset[int]  # those of them whose synchronous pushes were applied
    noted: Mapping[str, Any]  # what tables knew then, by name
    life: int
    layout: tuple[int, int]  # numbers of ps tasks, and of shards of a variable
    name: str | None = None  # of the checkpoint; None: it failed, or was cut short
    scheduled: int | None = None  # how many closures had been scheduled when it ended
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)  # in its files, by table
    own: np.ndarray = field(default_factory=lambda: np.zeros(1))  # likewise: since its life began
    counted: Counter[tuple[str, int]] = field(default_factory=Counter)  # see ``saved_calls``

    def failed(self, error: Exception) -> None:
        """It was refused, or a ps was lost meanwhile."""
        Journal.current().say("save failed", repr(error))

    def ended(self, name: str) -> None:
        """It is complete."""
        if _is_heard():
            self.name = name
            self.scheduled = len(Journal.current().closures)
            Journal.current().say("saved", name)


def _is_heard() -> bool:
    process = current_process.get()
    return process is None or not process.is_dead


class Journal:
    """Of one run.

    Args:
        plan: Of the run.
        tables: That its closures change, by name.
    """

    _current: Journal
    own: OwnUpdates  # of this life

    def __init__(self, plan: Plan, tables: Mapping[str, Table]) -> None:
        Journal._current = self
        self.plan = plan
        self.tables = tables
        self.closures: list[Closure] = []
        self.saves: list[Save] = []
        self.events: list[Any] = []
        self.lives = 0
        self.next_batch = 0
        self.next_spare = 0
        self.ended = False
        self.ends = 0  # lives that came to the end of the program
        self.left: Any = None  # name of the last checkpoint at such an end, and all values there
        self.listener: Callable[..., None] = lambda *_: None  # told of all that is said
        self.violations: list[Violation] = []
        self.baseline: dict[str, np.ndarray] = {}  # marks when this life began
        self.held: frozenset[int] = frozenset()  # closures of former lives that still count
        self.dropped = 0  # closures whose marks are not on the ps tasks since they began anew
        self.kept: dict[str, np.ndarray] | None = None  # marks then; None: nobody knows
        self.moved: dict[str, str] = {}  # in whose process a ps is served, since one was lost
        self.is_rolled_back = False  # anything, in this life
        self.partial = 0  # updates of the last life that are on some ps tasks only: so we were told
        # By (life, closure id, ordinal): ps tasks at which parts have arrived, and their number.
        self.arrived: dict[tuple[int, int, int], tuple[set[str], int]] = {}
        self.gangs = 0  # that run
        self.worked = 0  # how often what works beside the batches has scheduled something
        self.shard_raised = False  # in this life: steps may be cancelled at any moment since then
        self.targets: dict[int, str] = {}  # where rollbacks of this life went, by their timelines
        self.undone: set[tuple[int, int]] = set()  # by rollbacks: lives, and ids of closures
        self.is_calm = True  # nothing has gone wrong yet
        self.told = Told()  # in this life
        self.rounds = Rounds(plan)
        self.holdings = Holdings()
        # By the updates of a ps: identities of those that have arrived, and are not judged.
        self.admitted: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
        # By services of a ps, for each section: the last digest, and what was in it.
        self.digests: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> Journal:
        """Return the journal of the run that is under way."""
        return cls._current

    @classmethod
    def put_away(cls) -> None:
        """Nothing is kept of a run that is over."""
        del cls._current

    @property
    def has_rolled_back(self) -> bool:
        """Whether anything was rolled back in any life."""
        return any(isinstance(event, RollbackEvent) for event in self.events)

    @property
    def era(self) -> tuple[int, int]:
        """How many lives and rollbacks there were: what was told in another one may be undone."""
        return self.lives, sum(isinstance(event, RollbackEvent) for event in self.events)

    def may_be_ending(self, number: int) -> bool:
        """Whether a closure may be cancelled: from then on ps tasks refuse what it changes."""
        if self.shard_raised or self.closures[number].plan.cancel_s is not None:
            return True
        return any(run.has_raised for each in self.closures[self.dropped :] if each.state == "open"
                   for run in each.runs)  # fmt: skip

    def calls_of(self, table: str) -> dict[int, tuple[Closure, int, Call]]:
        """Return all calls that change a table, by their columns."""
        return {
            call.column: (closure, ordinal, call)
            for closure in self.closures
            for ordinal, call in enumerate(closure.plan.calls)
            if call.kind == table
        }

    def marks(self, values: Values) -> dict[str, np.ndarray]:
        """Return the marks of all tables."""
        return {name: table.marks(values[name]) for name, table in self.tables.items()}

    def say(self, kind: str, what: object = "") -> None:
        """Note something for the report."""
        if _is_heard():
            self.listener(kind, what)

    # What the program does.

    def begin_life(
        self, attached: bool, restored: str | None, values: Values, own: OwnUpdates
    ) -> None:
        """A chief has begun, with these values; what was open in the life before it is lost."""
        if not _is_heard():
            return
        self.say("life", f"attached {attached}, restored {restored}")
        for closure in self.closures:
            if closure.state == "open":
                closure.state = "lost"
        self.find(oracle.faults_of_beginning(self, attached, restored, values))
        if attached:
            self.find(oracle.faults_of_attaching(self, values))
        self.partial = 0
        self.lives += 1
        self.is_rolled_back, self.shard_raised, self.gangs = False, False, 0
        self.told = Told()
        self.moved.clear()
        self.baseline = self.marks(values)
        if attached:
            self.held |= {each.number for each in self.closures[self.dropped :]}
        else:
            self.kept = self.baseline
            for save in self.saves:
                if restored is not None and save.name == restored:
                    self.held = save.began
                    for number in save.began:
                        self.closures[number].settled = number in save.settled
        self.own, own.base = own, values["own"]["count"].ravel()

    def note_partial(self, count: int) -> None:
        """A chief has attached, and was told so; one before it that lived no longer may have it."""
        if _is_heard():
            self.partial = max(self.partial, count)

    def end_life(self, left: Mapping[str, Any]) -> None:
        """A life has come to the end of the program, and these are all values."""
        if _is_heard():
            self.ends += 1
            self.left = self.saves[-1].name if self.saves else None, left

    def begin_anew(self) -> None:
        """The ps tasks hold nothing any more, or are about to be told to drop it.

        What a life without attach then puts there is known when it has begun, if it lives so long.
        """
        if _is_heard():
            self.dropped, self.kept, self.held = len(self.closures), None, frozenset()

    def schedule(self, plan: ClosurePlan) -> Closure:
        """Note a closure that is about to be scheduled."""
        told = self.told.so_far()
        closure = Closure(len(self.closures), plan, self.lives, told=told)
        self.closures.append(closure)
        return closure

    def begin_run(self, number: int) -> Run:
        """Note that a closure runs on a worker."""
        process, context = current_process.get(), current_closure()
        worker = "" if process is None else process.name
        run = Run(number, worker, self.era, context and context.runtime)
        if _is_heard():
            self.say("run", number)
            self.closures[number].runs.append(run)
        return run

    def hear(self, closure: Closure) -> None:
        """The program was told what became of a closure."""
        if closure.life == self.lives:
            for call, outcome in zip(closure.plan.calls, closure.outcomes, strict=False):
                self.told.hear(call.kind, call.column, outcome)

    def look_for_told(self, table: str, marks: np.ndarray, number: int) -> None:
        """A closure has pulled marks: what the program knew when it scheduled it is there."""
        closure = self.closures[number]
        if closure.life == self.lives and table in closure.told and not self.is_rolled_back:
            self.told.look(table, marks, closure.told[table], number)

    def end_round(self, table: str, run: Run, note: Note) -> None:
        """A push that may have to wait for others was answered."""
        if note.outcome == "accepted" and _is_heard():
            self.find(self.rounds.end(run.worker, table, self))

    def note_event(self, event: Any) -> None:
        """Note a rollback or failover."""
        if not _is_heard():
            return
        self.events.append(event)
        self.say("event", repr(event))
        if isinstance(event, FailoverEvent):
            self.moved |= dict(zip(event.lost, event.served_by, strict=True))
        if isinstance(event, RollbackEvent):
            self.is_rolled_back = True
            self.undone |= {(self.lives, closure) for closure in event.closures}
            undone, self.held = set(self.held), frozenset()  # of former lives: perhaps
            name = self.targets.get(event.timeline)
            target = next((save for save in self.saves if name and save.name == name), None)
            for closure in self.closures:
                if closure.life == self.lives and closure.id in event.closures:
                    closure.undone, closure.undone_to = True, target
                    undone.add(closure.number)
            for save in self.saves:
                if save.name is None:  # one that is under way is of what there is afterwards
                    save.began, save.settled = save.began - undone, save.settled - undone

    def settle(self) -> None:
        """A join has returned without an error: what was accepted in open steps is applied."""
        for closure in self.closures:
            if closure.life == self.lives and closure.state == "done" and _is_heard():
                closure.settled = True

    def begin_save(self, layout: tuple[int, int]) -> Save:
        """Note that a checkpoint is saved."""
        done = [
            each
            for each in self.closures
            if each.state == "done" and not each.undone
            and (each.life == self.lives or each.number in self.held)
        ]  # fmt: skip
        save = Save(
            frozenset(each.number for each in done),
            frozenset(each.number for each in done if each.settled),
            {name: table.noted() for name, table in self.tables.items()},
            self.lives,
            layout,
        )
        if _is_heard():
            self.saves.append(save)
            self.say("save")
        return save

    # What must hold.

    def look_into(self, save: Save, path: Path) -> None:
        """Compare what a checkpoint holds with what the program is told.

        Args:
            save: That has ended.
            path: Of the checkpoint.
        """
        values, save.counted = oracle.saved_values(path), oracle.saved_calls(path)
        save.own = values["own"]["count"].ravel() - self.own.base
        save.marks = {
            name: table.marks(values[name]) for name, table in self.tables.items()
            if table.has_marks
        }  # fmt: skip
        asyncio.get_running_loop().call_later(
            LOOKED_AFTER_S, lambda: self.find(oracle.faults_of_save(self, save))
        )

    def look(self, holds: bool, message: str, oracle: str = "torn") -> None:
        """Note a violation unless something holds."""
        if not holds and _is_heard():
            self.violations.append(Violation(oracle, message))

    def find(self, faults: Iterable[Fault]) -> None:
        """Note what an oracle has found."""
        self.violations += [Violation(*fault) for fault in faults]

    def known(self) -> tuple[int, int]:
        """Return how many events and own updates the program has heard of."""
        return len(self.events), self.own.ended

    def check(self, values: Values, when: str, known: tuple[int, int], **more: Any) -> None:
        """Compare values with what the program was told.

        Args:
            values: Of all tables, pulled after everything that was told.
            when: For the message.
            known: Before the pull: a rollback in between, which the program has not heard of
                yet, may have undone anything.
            **more: As for ``Look``.
        """
        if not _is_heard():
            return
        told = [(each, each.state, each.outcomes, self.is_rolled_back) for each in self.closures]
        asyncio.get_running_loop().call_later(
            LOOKED_AFTER_S, functools.partial(self._check, told, values, when, known, more)
        )

    def _check(
        self,
        told: Sequence[oracle.Told],
        values: Values,
        when: str,
        known: tuple[int, int],
        more: Any,
    ) -> None:
        events, own = known
        late = any(isinstance(event, RollbackEvent) for event in self.events[events:])
        look = Look(self, values, when, late, **more)
        self.find(oracle.faults_of_calls(look, told))
        for table in self.tables.values():
            self.find(table.check(look))
        self.find(oracle.faults_of_steps(look))
        self.find(self.own.check(look, own))
        if not self.is_rolled_back:
            self.find(self.told.faults(asyncio.get_running_loop().time() - LOOKED_AFTER_S))
