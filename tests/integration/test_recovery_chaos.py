"""Training while ps tasks are lost, too, and come back from images: simulated from a seed.

The roles are the real ones, on a network in memory and a clock that jumps. Each closure leaves a
trace of its own in a column of every variable: a column of a closure that has ended holds one, in
every shard; of one that a ``RollbackEvent`` lists something is missing, and nothing is there twice.

One seed again: ``pytest "…/test_recovery_chaos.py::test_what_is_not_listed_counts_once[17]"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from pathlib import Path
from typing import Any

import memory_cluster
import numpy as np
import pytest
from image_store import keep_images

import psync
from psync.errors import PsyncError
from psync.testing import run_virtual

NUM_PS, NUM_WORKERS = 2, 3
NUM_CLOSURES = 60
CHAOS_S = 120.0  # of virtual time; then everybody is left in peace
QUIET_S = 100.0  # longer than a recovery takes
FREE = 8  # columns that no closure has


class Simulation:
    """One run: its training, what happens to it, and what must hold at its end."""

    def __init__(
        self,
        rng: random.Random,
        cluster: memory_cluster.MemoryCluster,
        coordinator: psync.ClusterCoordinator,
        folder: Path,
    ) -> None:
        self.rng = rng
        self.cluster = cluster
        self.coordinator = coordinator
        self.folder = folder
        self.events: list[psync.RollbackEvent] = []
        self.own = 0  # updates that the program itself has made
        self._away: set[str] = set()
        shape = (NUM_PS, NUM_CLOSURES + FREE)
        with coordinator.strategy.scope():
            self.added = psync.Variable(np.zeros(shape, np.float32), name="added")
            self.pushed = psync.Variable(np.zeros(shape, np.float32), name="pushed")
            self.whole = psync.Variable(np.zeros(shape, np.float32), name="whole")
            self.count = psync.Variable(np.zeros((NUM_PS, 1), np.int64), name="count")
            self.stepped = psync.Variable(np.zeros(shape, np.float32), name="stepped")
            self.global_step = psync.get_or_create_global_step()
        self.optimizer = psync.optimizers.SGD(1.0)
        self.synchronous = rng.random() < 0.4
        self.in_steps = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), replicas_to_aggregate=2, total_num_replicas=NUM_WORKERS,
            reduction="sum",
        )  # fmt: skip
        self.manager: psync.CheckpointManager | None = None
        if rng.random() < 0.5:
            checkpoint = psync.Checkpoint(
                added=self.added, pushed=self.pushed, whole=self.whole, count=self.count,
                stepped=self.stepped, step=self.global_step, optimizer=self.optimizer,
            )  # fmt: skip
            self.manager = psync.CheckpointManager(
                checkpoint, folder / "checkpoints", max_to_keep=rng.choice((1, 2, 5))
            )

    async def run(self) -> None:
        await self._save()
        values = [
            self.coordinator.schedule(self._step(), args=(i, i % 5, 0.3 * (i % 4)))
            for i in range(NUM_CLOSURES)
        ]
        listening = asyncio.create_task(self._listen())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.coordinator.join(timeout=10_000))
            tasks.create_task(self._disturb())
            tasks.create_task(self._save_often())
            tasks.create_task(self._update())
        await asyncio.sleep(QUIET_S)
        await self.count.read()  # a ps that was lost last is noticed
        await asyncio.sleep(QUIET_S)
        outcomes = await self.coordinator.fetch(values)
        await self._check([value.closure_id for value in values], outcomes)
        listening.cancel()
        await asyncio.wait((listening,))

    def _step(self) -> Any:
        added, pushed, optimizer = self.added, self.pushed, self.optimizer
        stepped, in_steps, global_step = self.stepped, self.in_steps, self.global_step
        synchronous = self.synchronous

        async def step(i: int, kind: int, seconds: float) -> str:
            """Return what became of the synchronous push."""
            trace = np.zeros(added.shape, np.float32)
            trace[:, i] = 1
            await asyncio.sleep(seconds)
            await added.assign_add(trace)
            await asyncio.sleep(kind * 0.05)
            if kind % 2:
                await added.read()
            await optimizer.apply_gradients([(-trace, pushed)])
            await asyncio.sleep(seconds / 2)
            if not synchronous:
                return ""
            result = await in_steps.apply_gradients([(-trace, stepped)], global_step)
            return str(result.outcome.value)

        return step

    async def _listen(self) -> None:
        async for event in self.coordinator.events():
            self.events.append(event)

    async def _save(self) -> None:
        if self.manager is not None:
            await self.manager.save()
        else:
            await keep_images(self.coordinator, self.folder)

    def _is_over(self) -> bool:
        return asyncio.get_running_loop().time() > CHAOS_S

    async def _save_often(self) -> None:
        while not self._is_over():
            await asyncio.sleep(self.rng.uniform(0, 6))
            with contextlib.suppress(PsyncError):
                await self._save()

    async def _update(self) -> None:
        """The program's own updates: of all shards, or of none."""
        while not self._is_over():
            await asyncio.sleep(self.rng.uniform(0, 3))
            self.own += 1
            await self.count.assign_add(np.ones((NUM_PS, 1), np.int64))
            if self.rng.random() < 0.3:
                with contextlib.suppress(psync.LockLost):
                    await self.whole.assign(
                        np.full(self.whole.shape, self.own, np.float32), atomic=True
                    )

    # What happens.

    async def _disturb(self) -> None:
        async with asyncio.TaskGroup() as lasting:
            while not self._is_over():
                await asyncio.sleep(self.rng.uniform(0, 5))
                lasting.create_task(self._happen())

    async def _happen(self) -> None:
        rng, network = self.rng, self.cluster.network
        worker = f"worker-{rng.randrange(NUM_WORKERS)}"
        ps = f"ps-{rng.randrange(NUM_PS)}"
        seconds = rng.choice((0.0, 0.02, 0.5, 4.0, 20.0)) * rng.random()
        match rng.randrange(8):
            case 0 | 1:
                await self._restart(ps, seconds)
            case 2 | 3:
                await self._restart(worker, seconds)
            case 4:
                await self._separate(worker, ps, seconds)
            case 5:
                await self._separate("chief-0", ps, seconds)
            case 6:
                await self._separate("ps-0", "ps-1", seconds)
            case _:
                for link in network.links(f"{ps}:1"):
                    if rng.random() < 0.5:
                        link.cut()

    async def _restart(self, name: str, seconds: float) -> None:
        if name not in self._away:
            self._away.add(name)
            for link in self.cluster.network.links(f"{name}:1"):
                link.cut()
            await self.cluster.stop(name)
            await asyncio.sleep(seconds)
            await self.cluster.start(name)
            self._away.discard(name)

    async def _separate(self, one: str, other: str, seconds: float) -> None:
        network = self.cluster.network
        network.partition(one, other)
        await asyncio.sleep(seconds)
        network.heal(one, other)

    # What must hold.

    async def _check(self, closures: list[int], outcomes: list[str]) -> None:
        listed = [number for event in self.events for number in event.closures]
        tables = {"added": await self.added.read(), "pushed": await self.pushed.read()}
        stepped = await self.stepped.read()
        wrong = []
        for i, closure in enumerate(closures):
            traces = {name: table[:, i].tolist() for name, table in tables.items()}
            if outcomes[i] in ("accepted", "duplicate"):
                traces["stepped"] = stepped[:, i].tolist()
            else:
                assert not stepped[:, i].any()
            each = [count for trace in traces.values() for count in trace]
            if closure in listed:
                right = set(each) <= {0, 1} and 0 in each
            else:
                right = set(each) == {1}
            if not right:
                wrong.append((closure, "listed" if closure in listed else "", traces))
        assert not wrong
        count = (await self.count.read()).ravel().tolist()
        assert len(set(count)) == 1, count
        assert count[0] <= self.own


async def train(seed: int, folder: Path) -> list[psync.RollbackEvent]:
    rng = random.Random(seed)
    async with memory_cluster.cluster_of(NUM_PS, NUM_WORKERS) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(NUM_PS))
        async with psync.ClusterCoordinator(strategy, max_flaps=None, max_losses=99) as coordinator:
            simulation = Simulation(rng, cluster, coordinator, folder)
            await simulation.run()
            return simulation.events


@pytest.mark.parametrize("seed", [*range(14), 67, 76])  # two in which ps 0 notices a loss first
def test_what_is_not_listed_counts_once(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "psync")
    run_virtual(train, seed, tmp_path, seed=seed)
