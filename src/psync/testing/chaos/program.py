"""The training program of a chaotic run: it knows which of its closures are done.

Closure c adds 1 to row c of a table on each ps, and to a total on each ps, in one push; adds 1 to
row c of other counters by an assign; and moves a small model with SGD, and another with Adam, by
gradients of what it has pulled. So every state of the cluster that is a cut says of each closure
which of its calls it has, on each ps the same, and the totals are the sums of the rows.

The program goes on from its newest checkpoint when it is started again. A checkpoint is saved
while closures run: it says which were scheduled then, and those that have left no trace in it run
again, as new closures. So after any number of restarts each closure has been done once.

Environment: ``PSYNC_CHAOS`` is JSON: directory, mode, seed, num_ps, num_workers, batch,
checkpoints, rows. The program ends when the file ``stop`` is in the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import psync
from psync.chief.watch import RollbackEvent
from psync.errors import AttachError, PsyncError
from psync.testing.chaos import oracle
from psync.testing.chaos.evidence import Journal, marks_at, read_journal

VARIABLE = "PSYNC_CHAOS"
STOP = "stop"
FINAL = "final.npz"
MODEL_SHAPE = (8, 4)
RATE = 0.0625


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is."""

    directory: str
    mode: str = "async"  # or "sync"
    seed: int = 0
    num_ps: int = 2
    num_workers: int = 3
    batch: int = 60  # closures that are scheduled at once
    checkpoint_every: int = 3  # batches; 0: none is saved
    rows: int = 1 << 16  # for each ps; closures that are as many apart share one
    recovery: str = "checkpoint"  # or "backup", or "none"
    attach: bool = False  # whether a life goes on with what the ps tasks hold, where they live

    @classmethod
    def from_environment(cls) -> Settings:
        """Return what ``PSYNC_CHAOS`` says."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def to_environment(self) -> dict[str, str]:
        """Return the variable."""
        return {VARIABLE: json.dumps({name: getattr(self, name) for name in self.__slots__})}


class Parts:
    """The variables and optimizers of the program; made in a strategy's scope.

    Args:
        settings: Of the run.
    """

    def __init__(self, settings: Settings) -> None:
        num_ps, rows = settings.num_ps, settings.rows
        self.rows = psync.Variable(np.zeros((num_ps * rows, 1), np.float32), name="rows")
        self.total = psync.Variable(np.zeros(num_ps, np.float32), name="total")
        self.marked = psync.Variable(np.zeros((num_ps * rows, 1), np.int32), name="marked")
        shape = (MODEL_SHAPE[0] * num_ps, MODEL_SHAPE[1])
        rng = np.random.default_rng(settings.seed)
        self.by_sgd = psync.Variable(rng.normal(size=shape).astype(np.float32), name="by_sgd")
        self.by_adam = psync.Variable(rng.normal(size=shape).astype(np.float32), name="by_adam")
        counting = psync.optimizers.SGD(1.0)
        adam = psync.optimizers.Adam(0.01)
        self.counting: Any = counting
        self.adam: Any = adam
        self.steps: dict[str, Any] = {}  # what synchronous optimizers want to be told
        if settings.mode == "sync":
            counts = max(1, settings.num_workers - 1), settings.num_workers
            self.counting = psync.SyncReplicasOptimizer(
                counting, *counts, reduction="sum", patience_s=600.0, name="counting"
            )
            self.adam = psync.SyncReplicasOptimizer(adam, *counts, patience_s=600.0, name="adam")
            self.steps = {"global_step": psync.get_or_create_global_step()}

    def __iter__(self) -> Any:
        return iter((self.rows, self.total, self.marked, self.by_sgd, self.by_adam))


def closure_of(settings: Settings, parts: Parts) -> Any:
    """Return the step function of the run."""
    rows, total, marked = parts.rows, parts.total, parts.marked
    by_sgd, by_adam = parts.by_sgd, parts.by_adam
    counting, adam, steps = parts.counting, parts.adam, parts.steps
    path = str(Path(settings.directory, "marks"))
    num_ps, num_rows, seed = settings.num_ps, settings.rows, settings.seed

    async def step(number: int) -> tuple[str, str]:
        marks = marks_at(path)
        worker = psync.get_worker_index()
        rng = random.Random(f"{seed}/{number}")
        first, second = await psync.pull((by_sgd, by_adam))
        mine = [ps * num_rows + number % num_rows for ps in range(num_ps)]
        ones = psync.IndexedSlices(np.full((num_ps, 1), -1, np.float32), mine)
        await asyncio.sleep(rng.choice((0.0, 0.002, 0.01)))
        gradient = ((first - rng.random()) * RATE).astype(np.float32)
        with marks.pushing(worker):
            counted = await counting.apply_gradients(
                [(ones, rows), (np.full(num_ps, -1, np.float32), total), (gradient, by_sgd)],
                **steps,
            )
        with marks.pushing(worker):
            await marked.scatter_add(psync.IndexedSlices(np.ones((num_ps, 1), np.int32), mine))
        with marks.pushing(worker):
            pushed = second - np.float32(rng.random())
            moved = await adam.apply_gradients([(pushed, by_adam)], **steps)
        return counted.outcome.value, moved.outcome.value

    return step


class Program:
    """One life of the program.

    Args:
        settings: Of the run.
        coordinator: That runs.
        parts: Its variables.
        journal: Of the run.
    """

    def __init__(
        self,
        settings: Settings,
        coordinator: psync.ClusterCoordinator,
        parts: Parts,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._parts = parts
        self._journal = journal
        self._step = closure_of(settings, parts)
        self._progress: Any = psync.SavedState(next=0, pending=[])
        self._running: dict[int, psync.RemoteValue[Any]] = {}  # by closure, until it is said
        checkpoint = psync.Checkpoint(
            rows=parts.rows, total=parts.total, marked=parts.marked, by_sgd=parts.by_sgd,
            by_adam=parts.by_adam, counting=parts.counting, adam=parts.adam,
            progress=self._progress, **parts.steps,
        )  # fmt: skip
        directory = Path(settings.directory, "checkpoints")
        self._manager = psync.CheckpointManager(checkpoint, directory, 2)

    async def run(self) -> None:
        """Train until somebody says stop, and write down what is there then."""
        again = await self._resume()
        listening = asyncio.create_task(self._listen())
        stop = Path(self._settings.directory, STOP)
        try:
            for number in range(1 << 40):
                await self._batch(again, number)
                again = []
                if await asyncio.to_thread(stop.exists):
                    break
            await self._write_final()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _resume(self) -> list[int]:
        """Go on from where an earlier life was; return the closures that have to run again."""
        restored: object = None
        if self._coordinator.attached:
            self._remember()
        else:
            restored = await self._manager.restore_or_initialize()
        pending = list(self._progress.pending)
        again, partial = [], {}
        if pending:
            counted, marked = await self._traces(pending)
            for number, *trace in zip(pending, counted, marked, strict=True):
                if any(trace):
                    partial[number] = trace
                else:
                    again.append(number)
        self._journal.say(
            "life", restored=restored and str(restored), next=self._progress.next,
            again=again, partial=partial, attached=self._coordinator.attached, pid=os.getpid(),
        )  # fmt: skip
        return again

    def _remember(self) -> None:
        """The variables are what they were: the journal says what was scheduled, and done."""
        known = oracle.read(read_journal(self._settings.directory))
        self._progress.next = known.stop
        self._progress.pending = [
            number
            for number in range(known.stop)
            if number not in known.done and number not in known.partial
        ]

    async def _traces(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return which of these closures the restored counters have: those that share no row."""
        rows, marked = await psync.pull((self._parts.rows, self._parts.marked))
        num_rows = self._settings.rows

        def times(counted: np.ndarray) -> list[int]:
            return [int(counted[n % num_rows, 0]) - n // num_rows for n in numbers]

        return times(rows), times(marked)

    async def _batch(self, again: Sequence[int], number: int) -> None:
        first = self._progress.next
        numbers = [*again, *range(first, first + self._settings.batch)]
        self._journal.say("scheduled", first=first, stop=first + self._settings.batch)
        self._progress.next = first + self._settings.batch
        for each in numbers:
            self._running[each] = self._coordinator.schedule(self._step, (each,))
        every = self._settings.checkpoint_every
        saves = every and number % every == 0
        if saves:
            # Closures that end meanwhile are taken for pending ones; they left their traces.
            self._progress.pending = numbers
            await self._save("hot")
        await self._coordinator.join()
        self._progress.pending = []
        await self._say_done()
        if saves:
            await self._save("quiet")

    async def _save(self, kind: str) -> None:
        began = time.monotonic()
        try:
            path = await self._manager.save()
        except PsyncError as exc:  # a ps was lost meanwhile: the next one will do
            self._journal.say("unsaved", reason=exc.message)
        else:
            took = round(time.monotonic() - began, 3)
            self._journal.say("saved", path=path.name, how=kind, next=self._progress.next, s=took)

    async def _say_done(self) -> None:
        done = []
        for number, value in self._running.items():
            outcomes = await value
            done.append([number, value.closure_id, *outcomes])
        self._running.clear()
        self._journal.say("done", closures=done)

    async def _listen(self) -> None:
        """Write down each rollback; when a backup takes over, nothing is undone."""
        async for event in self._coordinator.events():
            if not isinstance(event, RollbackEvent):
                self._journal.say("failover", lost=event.lost, seconds=event.seconds)
                continue
            self._journal.say(
                "rollback", lost=event.lost, timeline=event.timeline, seconds=event.seconds,
                from_step=event.from_step, to_step=event.to_step, closures=event.closures,
            )  # fmt: skip

    async def _write_final(self) -> None:
        names = ("rows", "total", "marked", "by_sgd", "by_adam")
        arrays = dict(zip(names, await psync.pull(tuple(self._parts)), strict=True))
        path = Path(self._settings.directory, FINAL)
        await asyncio.to_thread(np.savez, path, **arrays)
        self._journal.say("end", next=self._progress.next)


async def main() -> None:
    """Train."""
    settings = Settings.from_environment()
    await _wait_for_cluster(settings)
    with contextlib.closing(Journal(settings.directory)) as journal:
        journal.say("begin", pid=os.getpid())
        if settings.attach:
            try:
                await _live(settings, journal, attach=True)
                return
            except AttachError as exc:  # a ps has died with the chief
                journal.say("unattached", reason=exc.message)
        await _live(settings, journal, attach=False)


async def _live(settings: Settings, journal: Journal, *, attach: bool) -> None:
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(),
        psync.FixedShardsPartitioner(settings.num_ps),
        ps_recovery="backup" if settings.recovery == "backup" else "checkpoint",
    )
    async with psync.ClusterCoordinator(
        strategy, max_losses=1 << 20, max_flaps=None, min_workers=1, attach=attach
    ) as coordinator:
        with strategy.scope():
            parts = Parts(settings)
        await Program(settings, coordinator, parts, journal).run()


async def _wait_for_cluster(settings: Settings) -> None:
    """Take the addresses of proxies for those of the tasks, once somebody has written them."""
    path = Path(settings.directory, "addresses.json")
    while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.02)
    config = json.loads(os.environ["TF_CONFIG"])
    proxied: dict[str, str] = json.loads(await asyncio.to_thread(path.read_text))
    config["cluster"] = {
        job: [proxied.get(address, address) for address in addresses]
        for job, addresses in config["cluster"].items()
    }
    os.environ["TF_CONFIG"] = json.dumps(config)


if __name__ == "__main__":
    psync.run(main)
