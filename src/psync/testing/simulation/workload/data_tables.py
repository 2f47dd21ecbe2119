"""Data of a simulated program: shards that are visited once, workers' own data, uneven data."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import psync
from psync.client.context import current_closure
from psync.errors import ClosureCancelled, ClosureInputError, EndOfData, NotEnoughReplicas
from psync.testing.simulation.journal import Journal
from psync.testing.simulation.plan import Plan
from psync.testing.simulation.workload.tables import Fault, Handles, Look, StepFailed, Table

NUM_SHARDS = 4
NUM_EPOCHS = 3
"""Of the data that is visited."""


def numbers() -> Iterator[int]:
    """What every worker reads for itself: batch n is n."""
    return itertools.count()


class Reading:
    """Where each worker is in its own data: see ``worker.iterators``.

    In each of its sessions a worker hands its steps all batches in order, from where the iterator
    began; that is where the program was when it saved the checkpoint from which it goes on.
    """

    def __init__(self) -> None:
        self.positions: Mapping[int, int] = {}  # as they were told last, by worker
        self._next: dict[tuple[int, str, object], int] = {}  # by worker, iterator, session

    def hand_out(self, batches: Any) -> None:
        """A step takes the next batch of its worker."""
        journal, context, worker = Journal.current(), current_closure(), psync.get_worker_index()
        assert context is not None
        session, begins = (worker, batches.uid, context.runtime), batches.starts.get(worker, 0)
        if session not in self._next:
            anew = any(known[:2] == session[:2] for known in self._next)
            if anew:
                journal.say("mark", "a worker begins its own data anew")
            if begins:
                journal.say("mark", "a worker's own data go on from a saved position")
        expected, found = self._next.get(session, begins), next(batches)
        what = f"worker {worker} hands out batch {found}, not {expected}; it began at {begins}"
        journal.look(found == expected, what, "position")
        self._next[session] = expected + 1

    async def ask(self, batches: Any) -> None:
        """Ask for all positions: what was handed out, or of who is lost, where it began."""
        journal, before = Journal.current(), dict(self._next)
        self.positions = await batches.positions()
        for worker, position in self.positions.items():
            begins = batches.starts.get(worker, 0)
            mine = [each for each in self._next if each[:2] == (worker, batches.uid)]
            may_be = set() if mine and journal.is_calm else {begins}
            for each in mine:
                may_be.update(range(before.get(each, begins), self._next[each] + 1))
            what = f"worker {worker} says position {position}, which may be {sorted(may_be)}"
            journal.look(position in may_be, what, "position")


async def visit(
    shard: int, variable: Any, name: str, column: int, pause_s: float, bad: int, batches: Any
) -> int:
    """One closure of a data shard; one that is bad raises when it has changed something."""
    journal, context = Journal.current(), current_closure()
    table = journal.tables[name]
    assert isinstance(table, Visited)
    assert context is not None
    runs = table.runs.setdefault(column + shard, [])
    journal.say("visit", f"{column + shard} {context.closure_id}")
    runs.append((journal.lives, context.closure_id))
    table.reading.hand_out(batches)
    await asyncio.sleep(pause_s)
    table.reading.hand_out(batches)
    one = np.zeros(variable.shape, np.float32)
    one[:, column + shard] = 1
    await variable.assign_add(one)
    await asyncio.sleep(pause_s)
    if shard == bad:
        journal.shard_raised = True
        raise StepFailed(column + shard)
    return shard


class Visited(Table):
    """Changed by closures of data shards: each epoch has a column for each shard.

    Each of them also takes batches of a dataset that every worker reads for itself. A few raise,
    and all come again until they are done, as those that a rollback has undone do: in each life of
    the program a column becomes one more, on each ps, and only if no earlier life had done it.
    """

    has_marks = False

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        self.reading = Reading()
        self.runs: dict[int, list[tuple[int, int]]] = {}  # by column: life, closure
        self._done: dict[int, tuple[int, int]] = {}  # by column: in which life, by which closure
        self._base = np.zeros((1, columns))  # when this life began
        self._before: frozenset[int] = frozenset()  # columns that were done then
        self._ended = asyncio.Event()

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._dense()})

    def prepare(self, handles: Handles, coordinator: Any) -> None:
        handles.stated["visits"] = coordinator.distribute_once(
            list(range(NUM_SHARDS)), num_epochs=NUM_EPOCHS, shuffle_seed=self.plan.seed
        )
        handles.more["dataset"] = coordinator.create_per_worker_dataset(numbers)

    def noted(self) -> Any:
        return dict(self._done), self.reading.positions

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        undone = Journal.current().undone
        done = {column for column, by in noted[0].items() if by not in undone} if noted else set()
        self.reading.positions = noted[1] if noted else {}
        handles.more["batches"] = handles.more["dataset"].iterator(self.reading.positions)
        lost = done - set(self._columns_done(handles))
        if lost:
            yield "visits", f"{self.name}: columns {sorted(lost)} were done before it was saved"
        self._done = dict.fromkeys(self._columns_done(handles), (0, -1))
        self._before = frozenset(self._done)
        self._ended = asyncio.Event()
        self._base = self._rows_of(values[""])[:, : self.columns]
        for column in self._done:
            found = self._base[:, column].tolist()
            Journal.current().say("mark", "data shards go on from a checkpoint")
            if not all(found):
                yield "visits", f"{self.name}: column {column} is done, and restored as {found}"

    def _columns_done(self, handles: Handles) -> list[int]:
        return [
            epoch.epoch * NUM_SHARDS + shard
            for epoch in handles.stated["visits"].account()
            for shard in range(NUM_SHARDS)
            if shard not in epoch.undone
        ]

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        visits, journal = handles.stated["visits"], Journal.current()
        batches = handles.more["batches"]
        running: list[tuple[int, Any]] = []
        raises = rng.choice((0, 0, 0, 1, 2))  # so many steps of shards still raise
        while True:
            column = visits.epoch * NUM_SHARDS
            pause_s = rng.choice((0.0, 0.01, 0.5))
            bad = rng.randrange(NUM_SHARDS) if raises > 0 else -1
            args = (handles.variables[""], self.name, column, pause_s, bad, batches)
            if not visits.done():
                self._ended.clear()
                journal.worked += 1
                running += [(column, value) for value in visits.schedule(visit, args)]
            for at, value in [each for each in running if each[1].done()]:
                running.remove((at, value))
                try:
                    shard = await value
                except ClosureCancelled:
                    journal.say("mark", "a data shard is handed out again after an error")
                except StepFailed:
                    raises -= 1
                    journal.say("mark", "a data shard's step raises, and the shard comes again")
                    expected = StepFailed, ClosureInputError, NotEnoughReplicas, EndOfData
                    with contextlib.suppress(*expected):
                        await coordinator.join()
                else:
                    self._done[at + shard] = journal.lives, value.closure_id
            if not visits.done() or running:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await self.reading.ask(batches)
                continue
            if not self._ended.is_set():
                self._look_at_account(handles)
                self._ended.set()
            await asyncio.sleep(1.0)  # a rollback may still undo some

    def _look_at_account(self, handles: Handles) -> None:
        """Each is done once, and who ran more than once is named."""
        journal, account = Journal.current(), handles.stated["visits"].account()
        once = set(self._columns_done(handles))
        journal.look(
            set(self._done) == once and len(once) == NUM_EPOCHS * NUM_SHARDS,
            f"{self.name}: all is done, in {self._done}: {account}",
            "visits",
        )
        if any(by in journal.undone for by in self._done.values()):
            journal.look(False, f"{self.name}: undone closures are done: {self._done}", "visits")
        for column in once:
            runs = [each for each in self.runs.get(column, ()) if each[0] == journal.lives]
            named = account[column // NUM_SHARDS].runs.get(column % NUM_SHARDS, 1)
            if len(runs) > len(set(runs)):
                journal.say("mark", "a data shard runs again after its worker's loss")
            journal.look(
                len(runs) <= named,
                f"{self.name}: column {column} had {len(runs)} runs, and {named} are named",
                "visits",
            )

    async def finish(self, handles: Handles) -> None:
        if not handles.stated["visits"].done():  # a rollback has undone some since
            self._ended.clear()
        await self._ended.wait()

    def check(self, look: Look) -> Iterator[Fault]:
        if look.late:
            return
        found = self._rows_of(look.values[self.name][""])[:, : self.columns]
        for column, applied in enumerate(found.T.tolist()):
            base = self._base[:, column]
            new = column < NUM_EPOCHS * NUM_SHARDS and column not in self._before
            # A checkpoint that a rollback goes back to may be older than this life.
            at_least = (0 if look.journal.is_rolled_back else base) + (new and look.is_last)
            few = (np.array(applied) < at_least).any()
            if few or (np.array(applied) > base + new).any():
                yield (
                    "lost" if few else "twice",
                    (
                        f"{look.when}: {self.name}: column {column}: {applied}, in runs "
                        f"{self.runs.get(column, [])}; done by {self._done.get(column)}; life "
                        f"{look.journal.lives} began with {base.tolist()}"
                    ),
                )


def own_share(sizes: Sequence[int], context: psync.InputContext) -> range:
    """Return the batches of one worker: columns, of which it has as many as its size says."""
    worker = context.input_pipeline_id
    return range(sum(sizes[:worker]), sum(sizes[: worker + 1]))


async def train(variable: Any, name: str, pause_s: float, takes: int, batches: Any) -> None:
    """One closure that trains on some batches of its worker, if there are so many left."""
    journal, context = Journal.current(), current_closure()
    table = journal.tables[name]
    assert isinstance(table, Uneven)
    assert context is not None
    closure = journal.lives, context.closure_id
    moved = closure in table.ended and journal.is_calm
    journal.look(not moved, f"{name}: {closure} has trained, and runs again elsewhere", "data")
    for number in range(takes):
        try:
            batch = next(batches)
        except EndOfData:
            journal.say("mark", "a closure finds that its worker's data ended")
            if number:
                table.ended.add(closure)
            raise
        table.handed[batch] += 1
        await asyncio.sleep(pause_s)
        one = np.zeros(variable.shape, np.float32)
        one[:, batch] = 1
        await variable.assign_add(one)


class Uneven(Table):
    """Changed by closures that train on data of which workers have more or less.

    A column is a batch. Each reading of it is trained at most once; where nothing goes wrong, each
    batch is read and trained, by however many workers the data end before.
    """

    has_marks = False

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        rng = random.Random(f"{plan.seed}:{name}")
        self.sizes = [rng.choice((0, 1, 3, 8)) for _ in range(plan.num_workers)]
        self.takes = rng.choice((1, 1, 2))
        self.handed: Counter[int] = Counter()  # how often a batch was read, in this life
        self.ended: set[tuple[int, int]] = set()  # closures that had trained when data ended
        self._base = np.zeros((1, columns))  # when it began
        self._cancelled = 0
        self._ended = asyncio.Event()

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._dense()})

    def begin(
        self, handles: Handles, values: Mapping[str, np.ndarray], noted: Any
    ) -> Iterator[Fault]:
        self._base = self._rows_of(values[""])[:, : self.columns]
        self.handed, self._cancelled, self._ended = Counter(), 0, asyncio.Event()
        return iter(())

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        share = functools.partial(own_share, self.sizes)
        batches = iter(coordinator.create_per_worker_dataset(share))
        pause_s = rng.choice((0.0, 0.01, 0.5))
        args = (handles.variables[""], self.name, pause_s, self.takes, batches)
        Journal.current().worked += 1
        values = [coordinator.schedule(train, args) for _ in range(sum(self.sizes))]
        ended = False
        for value in values:
            try:
                await value
            except EndOfData:
                ended = True
            except ClosureCancelled:  # a step of the program has raised
                self._cancelled += 1
        if ended:
            with contextlib.suppress(EndOfData, StepFailed, ClosureInputError, NotEnoughReplicas):
                await coordinator.join()
        self._ended.set()

    async def finish(self, handles: Handles) -> None:
        await self._ended.wait()

    def check(self, look: Look) -> Iterator[Fault]:
        if look.late:
            return
        trained = self._rows_of(look.values[self.name][""])[:, : self.columns] - self._base
        exact = look.is_last and look.journal.is_calm and not self._cancelled
        for batch in range(sum(self.sizes)):
            times, read = trained[:, batch], self.handed[batch]
            unread = exact and self.plan.all_workers and read != 1
            if unread or (times > read).any() or (exact and (times < read).any()):
                said = (
                    f"{look.when}: {self.name}: of batches {self.sizes}, {self.takes} for each "
                    f"closure, batch {batch} was read {read} times and trained "
                    f"{times.tolist()}"
                )
                yield "data", said
