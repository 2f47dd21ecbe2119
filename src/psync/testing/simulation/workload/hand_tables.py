"""Tables that a simulated program changes by other means than optimizers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import psync
from psync.chief.watch import RollbackEvent
from psync.errors import ClosureCancelled, ParameterServerLost, WorkerLost
from psync.testing.simulation.journal import Journal, Note, Run
from psync.testing.simulation.plan import Call, Plan
from psync.testing.simulation.workload.tables import COUNTED, Fault, Handles, Look, Table

NEVER_STALE = 1 << 40
"""A local step that is ahead of every accumulator."""


class Held(Table):
    """A conditional accumulator: closures apply gradients, the program takes them.

    Each gradient has a column of its own, and so tells in which take it is. One more column is
    of the program itself, which brings at the end what a take still waits for.
    """

    has_marks = False

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        self.takes: list[np.ndarray] = []  # what was in each
        self._may_lose = False  # in this life: a value may have been on its way
        self._waits = False
        self._is_ending = False
        self._ended = asyncio.Event()

    def declare(self, steps: Sequence[Any]) -> Handles:
        accumulator = psync.ConditionalAccumulator(
            np.float32, (self.columns + 1,), self.name, **self.plan.accumulator
        )
        return Handles({}, more={"held": accumulator})

    async def change(self, handles: Handles, call: Call, run: Run) -> Note:
        held = handles.more["held"]
        local = await held.step() if call.pulls else 0
        await asyncio.sleep(call.pause_s)
        note = run.begin(call)
        result = await held.apply_grad(self._of(call.column), local_step=local)
        note.heard(str(result.outcome.value))
        before = result.step - (result.count == 0)
        behind = before - self.plan.accumulator["max_staleness"] > local
        journal = Journal.current()
        if note.outcome == "accepted":
            journal.look(not behind, f"{self.name}: local step {local} counted: {result}", "stale")
        elif note.outcome == "stale":
            journal.say("mark", "a gradient in an accumulator is stale")
            journal.look(
                behind or result.count == 0,
                f"{self.name}: local step {local} did not count: {result}",
                "stale",
            )
        return note

    def _of(self, column: int) -> np.ndarray:
        gradient = np.zeros(self.columns + 1, np.float32)
        gradient[column] = 1
        return gradient

    # What the program does.

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        held = handles.more["held"]
        self._may_lose = self._waits = self._is_ending = False
        self._ended = asyncio.Event()
        while not self._is_ending:
            if self.plan.cancels_takes and rng.random() < 0.3:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.0, 0.5)):
                        await self._take(held, 1)
                    continue
                self._may_lose = True
                Journal.current().say("mark", "a take is cancelled")
            else:
                await self._take(held, rng.choice((1, 1, 2, 3)))
            if rng.random() < 0.2:
                await held.set_global_step(await held.step() + rng.choice((-1, 1, 1, 2)))
            await asyncio.sleep(rng.uniform(0.0, 1.0))
        self._ended.set()

    async def _take(self, held: Any, required: int) -> None:
        journal = Journal.current()
        events, self._waits = len(journal.events), True
        try:
            value = await held.take_grad(required)
        finally:
            self._waits = False
            kinds = {isinstance(each, RollbackEvent) for each in journal.events[events:]}
            for is_rollback in sorted(kinds):
                what = "rollback" if is_rollback else "fail-over"
                journal.say("mark", f"a take waits during a {what}")
        mine, is_mean = value[:-1], self.plan.accumulator["reduction_type"] == "MEAN"
        number = 1 / mine.max() if is_mean and mine.any() else 1  # of the gradients in a mean
        counts = np.rint(value * number).astype(int)
        self.takes.append(counts)
        fits = np.allclose(value * number, counts) and set(counts[:-1].tolist()) <= {0, 1}
        if mine.any() or not is_mean:
            fits &= required <= counts.sum() == (round(number) if is_mean else counts.sum())
        journal.look(fits, f"{self.name}: {required} were required, {value.tolist()} taken", "take")

    async def finish(self, handles: Handles) -> None:
        held, self._is_ending = handles.more["held"], True
        while not self._ended.is_set():
            if self._waits:
                await held.apply_grad(self._of(self.columns), NEVER_STALE)
            await asyncio.sleep(0.1)
        count = await held.num_accumulated()
        if count:
            await self._take(held, count)

    # What must hold.

    def check(self, look: Look) -> Iterator[Fault]:
        journal = look.journal
        taken = np.sum([np.zeros(self.columns + 1, int), *self.takes], axis=0).tolist()
        for column, (closure, ordinal, _) in journal.calls_of(self.name).items():
            times = taken[column]
            outcome = closure.outcomes[ordinal] if closure.state == "done" else ""
            wrong = ""
            if times > (max(1, len(closure.runs)) if journal.has_rolled_back else 1):
                wrong = "twice"
            elif outcome == "stale" and times and not journal.has_rolled_back:
                wrong = "stale"
            elif (
                outcome in COUNTED and not times and look.is_last
                and closure.life == journal.lives and not journal.is_rolled_back
                and not self._may_lose
            ):  # fmt: skip
                wrong = "lost"
            if wrong:
                said = (
                    f"{look.when}: closure {closure.number} ({closure.state}), {self.name} "
                    f"column {column}, {outcome or 'no outcome'}: in {times} takes"
                )
                yield wrong, said


class ReplicaFailed(Exception):
    """What a replica raises because it is to."""


async def replica(handles: Handles, name: str, number: int, fails: int, pause_s: float) -> int:
    """One replica of a gang: meet, and change the table together."""
    context, journal = psync.get_replica_context(), Journal.current()
    assert context is not None
    index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
    await asyncio.sleep(pause_s * index)
    if index == fails:
        raise ReplicaFailed(number)
    total = int(await context.all_reduce("sum", np.array(1 << index)))
    whole = (1 << count) - 1
    journal.look(total == whole, f"{name}: {count} replicas met, and reduced {total}", "gang")
    journal.say("mark", "a gang meets in a collective, all of it")
    if count > 1:
        journal.say("mark", "a gang of several meets in a collective, all of it")
    variable = handles.variables[""]
    gradient = np.zeros(variable.shape, np.float32)
    gradient[:, number] = -(1 << index)
    await handles.optimizer.apply_gradients([(gradient, variable)])
    return int(index)


class Ganged(Table):
    """Changed by gangs: each has a column, to which each replica adds a power of two."""

    has_marks = False

    def __init__(self, name: str, plan: Plan, columns: int) -> None:
        super().__init__(name, plan, columns)
        self.made: list[tuple[int, int | None]] = []  # life, and replicas if all had ended well
        self._is_ending = False
        self._ended = asyncio.Event()

    def declare(self, steps: Sequence[Any]) -> Handles:
        return Handles({"": self._dense()}, psync.optimizers.SGD(1.0))

    async def act(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        self._is_ending, self._ended = False, asyncio.Event()
        while len(self.made) < self.columns and not self._is_ending:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await self._gang(handles, coordinator, rng)
        self._ended.set()

    async def _gang(self, handles: Handles, coordinator: Any, rng: random.Random) -> None:
        journal, number = Journal.current(), len(self.made)
        self.made.append((journal.lives, None))
        fails = rng.choice((-1, -1, -1, 0, 1))
        args = (handles, self.name, number, fails, rng.choice((0.0, 0.01, 0.5)))
        journal.gangs += 1
        journal.worked += 1
        try:
            found = await coordinator.strategy.run(replica, args)
        except ReplicaFailed:
            journal.say("mark", "a gang ends by an error of a replica")
        except WorkerLost:
            journal.say("mark", "a gang ends by the loss of a worker")
        except ParameterServerLost:
            journal.say("mark", "a gang ends by the loss of a ps")
        except ClosureCancelled:
            pass  # join has raised
        else:
            told = list(found.values) if hasattr(found, "values") else [found]
            fits = told == list(range(len(told)))
            journal.look(fits, f"{self.name}: gang {number}: replicas returned {told}", "gang")
            self.made[number] = journal.lives, len(told)
        finally:
            journal.gangs -= 1
        journal.say("gang", f"{number} {self.made[number][1]}")

    async def finish(self, handles: Handles) -> None:
        self._is_ending = True
        await self._ended.wait()

    def check(self, look: Look) -> Iterator[Fault]:
        journal = look.journal
        for column, values in enumerate(
            self._rows_of(look.values[self.name][""]).T[: self.columns]
        ):
            life, replicas = self.made[column] if column < len(self.made) else (0, None)
            found = set(values.tolist())
            wrong = ""
            if len(found - {0.0}) > 1 or any(int(each + 1) & int(each) for each in found):
                wrong = "gang"  # some replicas without the others
            elif column >= len(self.made) and found != {0.0}:
                wrong = "gang"
            elif (
                look.is_last and replicas and found != {float((1 << replicas) - 1)}
                and life == journal.lives and not journal.is_rolled_back
            ):  # fmt: skip
                wrong = "lost"
            if wrong:
                said = (
                    f"{look.when}: {self.name}: gang {column} of life {life}, with "
                    f"{replicas} replicas: {values.tolist()}"
                )
                yield wrong, said
