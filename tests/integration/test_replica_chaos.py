"""Synchronous steps while ps tasks with backups die, and are cut off: simulated from a seed.

The roles are the real ones, on a network in memory and a clock that jumps. Each push leaves a trace
that says in which step it was counted: the wrapped optimizer's learning rate at step s is s + 1,
and the gradient is -1 in a column that no other push has. Every shard has a row.

One seed again: ``pytest "…/test_replica_chaos.py::test_whoever_dies_each_push_counts_once[17]"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_cluster import shared
from replica_cluster import ReplicaCluster

import psync
from psync.errors import PsyncError
from psync.events import FailoverEvent
from psync.testing import MemoryNetwork, run_virtual

logger = logging.getLogger("chaos")

CHAOS_S = 30.0  # of virtual time; then everybody is left in peace
NOTICED_S = 1.5  # within which everybody has found out that a process is gone
PATIENCE_S = 300.0  # of virtual time, within which everything must have ended
MAX_STEPS = 1 << 12
NUM_COLUMNS = 400
PLACES = (
    "ps.backup.sending", "ps.backup.taken", "ps0.step.decided", "ps.step.applied",
    "ps0.step.applied", "ps.step.measured", "ps0.step.measured", "ps.assign.applied",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One run, drawn from a seed."""

    num_ps: int
    num_workers: int
    num_groups: int
    options: dict[str, Any]
    clips: bool  # norms are measured in rounds, and too small to change anything
    as_rows: bool
    padding: int  # columns, so that pushes are sent in parts
    fillers: int  # variables before the global step: they shift it to another ps
    own_steps: bool  # each group has a global step of its own
    fault_every_s: float
    pause_s: float
    saves: bool
    gentle: bool  # connections break, and no process dies

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        num_workers = rng.choice((2, 3, 4))
        total = rng.choice((num_workers, num_workers, num_workers, 1))
        needed = max(1, total + rng.choice((-2, -1, 0, 0, 1)))
        options: dict[str, Any] = {}
        match rng.choice(("free", "free", "strict", "deterministic")):
            case "strict":
                options["strict"] = True
            case "deterministic":
                options["deterministic"] = True
                needed = total
        options |= {
            "replicas_to_aggregate": needed, "total_num_replicas": total, "reduction": "sum",
            "pull_ahead": rng.random() < 0.4,
        }  # fmt: skip
        num_groups = rng.choice((1, 1, 2))
        clips = rng.random() < 0.3
        return cls(
            num_ps=rng.choice((2, 2, 3)),
            num_workers=num_workers,
            num_groups=num_groups,
            options=options,
            clips=clips,
            as_rows=rng.random() < 0.25,
            padding=rng.choice((0, 0, 0, 9_000, 40_000)),
            fillers=rng.randrange(3),
            own_steps=rng.random() < 0.5,
            fault_every_s=rng.choice((0.3, 1.0, 3.0)),
            pause_s=rng.choice((0.005, 0.05, 0.3)),
            saves=rng.random() < 0.4,
            gentle=rng.random() < 0.25,
        )


class Simulation:
    """One run: its training, what happens to it, and what must hold at its end."""

    def __init__(
        self,
        plan: Plan,
        rng: random.Random,
        cluster: ReplicaCluster,
        coordinator: psync.ClusterCoordinator,
        folder: Path,
    ) -> None:
        self.plan = plan
        self.rng = rng
        self.cluster = cluster
        self.coordinator = coordinator
        self.results: list[tuple[int, int, Any]] = []  # group, column, value of the closure
        self.events: list[Any] = []
        self.manager: psync.CheckpointManager | None = None
        self._away: set[str] = set()  # workers
        self._losing = False  # a ps
        self._separated = 0  # how many are kept from one another
        with coordinator.strategy.scope():
            self._declare()
        if plan.saves:
            checkpoint = psync.Checkpoint(
                **{f"v{number}": variable for number, variable in enumerate(self.tables)}
            )
            self.manager = psync.CheckpointManager(checkpoint, folder, max_to_keep=2)

    def _declare(self) -> None:
        plan = self.plan
        for number in range(plan.fillers):
            psync.Variable(np.zeros((), np.float32), name=f"filler{number}")
        steps = [psync.get_or_create_global_step()]
        if plan.own_steps:
            steps += [
                psync.Variable(np.zeros((), np.int64), name=f"step{number}")
                for number in range(1, plan.num_groups)
            ]
        self.steps = [steps[number % len(steps)] for number in range(plan.num_groups)]
        shape = (plan.num_ps, NUM_COLUMNS + plan.padding)
        if plan.as_rows:
            shape = (plan.num_ps * NUM_COLUMNS, 1 + plan.padding // 100)
        self.tables = [
            psync.Variable(np.zeros(shape, np.float32), name=f"table{number}")
            for number in range(plan.num_groups)
        ]
        rate = psync.schedules.PolynomialDecay(1.0, MAX_STEPS, MAX_STEPS + 1.0)
        more: dict[str, Any] = {"global_clipnorm": 1e6} if plan.clips else {}
        self.optimizers = [
            psync.SyncReplicasOptimizer(
                psync.optimizers.SGD(rate, **more), name=f"group{number}", **plan.options
            )
            for number in range(plan.num_groups)
        ]

    # Training.

    async def run(self) -> None:
        listening = asyncio.create_task(self._listen())
        try:
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                chaos = tasks.create_task(self._disturb())
                if self.manager is not None:
                    tasks.create_task(self._save_often(chaos))
                await self._train(chaos)
            await self._check()
        finally:
            listening.cancel()
            await asyncio.wait((listening,))

    async def _train(self, chaos: asyncio.Task[None]) -> None:
        columns = [0] * self.plan.num_groups
        while True:
            over = chaos.done() or max(columns) > NUM_COLUMNS - 20
            for _ in range(self.rng.randrange(1, 9)):
                group = self.rng.randrange(self.plan.num_groups)
                column, columns[group] = columns[group], columns[group] + 1
                value = self.coordinator.schedule(self._step(group), args=(column,))
                self.results.append((group, column, value))
            await self.coordinator.join(timeout=PATIENCE_S)
            if over:
                break
            await asyncio.sleep(self.rng.uniform(0, 1.0))
        await chaos

    def _step(self, group: int) -> Any:
        table, optimizer, step = self.tables[group], self.optimizers[group], self.steps[group]
        pause_s, as_rows, num_ps = self.plan.pause_s, self.plan.as_rows, self.plan.num_ps
        seed = self.rng.random()

        async def push(column: int) -> str:
            rng = random.Random(f"{seed}/{column}")
            await psync.pull(table)
            await asyncio.sleep(rng.random() * pause_s)
            gradient: Any
            if as_rows:
                rows = np.arange(num_ps) * NUM_COLUMNS + column
                values = np.full((num_ps, table.shape[1]), -1, np.float32)
                gradient = psync.IndexedSlices(values, rows, table.shape)
            else:
                gradient = np.zeros(table.shape, np.float32)
                gradient[:, column] = -1
            result = await optimizer.apply_gradients([(gradient, table)], step)
            return str(result.outcome.value)

        return push

    async def _listen(self) -> None:
        async for event in self.coordinator.events():
            self.events.append(event)

    async def _save_often(self, chaos: asyncio.Task[None]) -> None:
        assert self.manager is not None
        while not chaos.done():
            await asyncio.sleep(self.rng.uniform(0, 3))
            with contextlib.suppress(PsyncError):
                await self.manager.save()

    # What happens.

    async def _disturb(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + CHAOS_S
        async with asyncio.TaskGroup() as lasting:
            while loop.time() < end:
                await asyncio.sleep(self.rng.uniform(0, 2 * self.plan.fault_every_s))
                if not self.plan.gentle and self.rng.random() < 0.5:
                    await self._lose_ps()
                else:
                    lasting.create_task(self._happen())

    async def _lose_ps(self) -> None:
        """One is lost; nothing else keeps ps tasks from one another until all have backups."""
        rng = self.rng
        if self._separated:
            return
        async with asyncio.timeout(100):
            await self.coordinator.backed_up()
        name = f"ps-{rng.randrange(self.plan.num_ps)}"
        if self._separated:
            return
        self._losing = True
        if rng.random() < 0.2:
            logger.info("%s is cut off from the coordinator", name)
            await self._separate("chief-0", name, rng.uniform(0.1, 3))
        else:
            await self._kill(name)
        await asyncio.sleep(NOTICED_S)
        async with asyncio.timeout(100):
            await self.coordinator.backed_up()
        self._losing = False

    async def _kill(self, name: str) -> None:
        rng, cluster = self.rng, self.cluster
        if rng.random() < 0.7:
            place, count = rng.choice(PLACES), rng.randrange(1, 6)
            logger.info("%s dies at %s, %d", name, place, count)
            died = cluster.kill_at(name, place, count)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 1)):
                    await died.wait()
        if rng.random() < 0.5:
            logger.info("%s is cut off", name)
            cluster.cut_off(name)
            await asyncio.sleep(rng.choice((0.0, 0.1, 2.0)) * rng.random())
        logger.info("%s is killed", name)
        await cluster.kill(name)
        await asyncio.sleep(rng.choice((0.0, 0.3, 2.0)) * rng.random())
        logger.info("%s is revived", name)
        await cluster.revive(name)

    async def _happen(self) -> None:
        rng, network = self.rng, self.cluster.network
        worker = f"worker-{rng.randrange(self.plan.num_workers)}"
        ps, other = rng.sample(range(self.plan.num_ps), 2)
        seconds = rng.choice((0.02, 0.2, 2.0)) * rng.random()
        happening = rng.randrange(6)
        logger.info("case %d: %s, ps-%d, ps-%d, %.3f s", happening, worker, ps, other, seconds)
        match happening:
            case 0 if worker not in self._away:
                self._away.add(worker)
                network.cut(worker)
                await self.cluster.stop(worker)
                await asyncio.sleep(rng.choice((0.0, 0.5, 4.0)) * rng.random())
                await self.cluster.start(worker)
                self._away.discard(worker)
            case 1:
                await self._separate(worker, f"ps-{ps}", seconds)
            case 2 if not self._losing:
                self._separated += 1
                await self._separate(f"ps-{ps}", f"ps-{other}", seconds)
                self._separated -= 1
            case 3 if not self._losing:
                self._separated += 1
                await self._separate("chief-0", f"ps-{ps}", min(seconds, 0.1))
                self._separated -= 1
            case _:
                for link in network.links(f"ps-{ps}"):
                    if rng.random() < 0.5:
                        link.cut()

    async def _separate(self, one: str, other: str, seconds: float) -> None:
        network = self.cluster.network
        network.partition(one, other)
        if self.rng.random() < 0.5:
            for link in network.links(one):
                if link.ends.are(one, other):
                    link.cut()
        await asyncio.sleep(seconds)
        network.heal(one, other)

    # What must hold.

    async def _check(self) -> None:
        assert all(isinstance(event, FailoverEvent) for event in self.events), self.events
        raised: dict[int, int] = {}
        for group in range(self.plan.num_groups):
            steps = await self._check_group(group)
            raised[id(self.steps[group])] = raised.get(id(self.steps[group]), 0) + steps
        for step in self.steps:
            assert int(await step.read()) == raised[id(step)]

    async def _check_group(self, group: int) -> int:
        """Return how many steps the group has made."""
        table = await self.tables[group].read()
        if self.plan.as_rows:
            assert (table == table[:, :1]).all()
            table = table[:, 0].reshape(self.plan.num_ps, NUM_COLUMNS)
        table = table[:, :NUM_COLUMNS]
        assert (table == table[0]).all(), "a push is whole: every shard has the same row"
        for of_group, column, value in self.results:
            if of_group == group:
                outcome = await value
                assert outcome in ("accepted", "duplicate", "stale")
                assert (outcome == "stale") == (table[0, column] == 0), (column, outcome)
        steps = {int(value) for value in table[0] if value}
        first = min(steps, default=1)
        assert steps == set(range(first, first + len(steps))), "a step is lost, or empty"
        if self.plan.num_groups == 1 or self.plan.own_steps:  # else it begins with its first push
            assert first == 1
        return len(steps)


async def simulate(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    plan = Plan.drawn(rng)
    network = MemoryNetwork(seed, latency=(0.0005, 0.005), chunk=(1 << 14, 1 << 20))
    cluster = ReplicaCluster(plan.num_ps, plan.num_workers, network=network)
    partitioner = psync.FixedShardsPartitioner(plan.num_ps)
    shared.clear()
    await cluster.start_all()
    try:
        async with psync.ClusterCoordinator(
            cluster.replica_strategy(partitioner), max_losses=10_000, max_flaps=None
        ) as coordinator:
            await Simulation(plan, rng, cluster, coordinator, folder).run()
    finally:
        await cluster.stop_all()
        shared.clear()


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_each_push_counts_once(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "psync")
    run_virtual(simulate, seed, tmp_path, seed=seed)
