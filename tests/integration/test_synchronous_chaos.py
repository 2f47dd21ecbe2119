"""Synchronous training while workers and connections are lost at random, simulated from a seed.

The roles are the real ones, on a network in memory and a clock that jumps. Each push leaves a
trace that says in which step it was counted: the wrapped optimizer's learning rate at step s is
s + 1, and the gradient is -1 in a column that no other push has. Every shard has a row.

One seed again: ``pytest "…/test_synchronous_chaos.py::test_every_push_counts_once_and_whole[17]"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import memory_cluster
import numpy as np
import pytest
from sync_chaos import (
    ACCEPTED,
    DUPLICATE,
    FENCED_AFTER_S,
    NUM_SPARE,
    STALE,
    Faults,
    Journal,
    Plan,
    PushPlan,
)

import psync
from psync.errors import ClosureCancelled, ClosureInputError, NotEnoughReplicas
from psync.testing import MemoryNetwork, run_virtual

NUM_PS = 2
PATIENCE_S = 120.0  # of virtual time, within which everything must have ended
SOON_S = 30.0  # once all is well
MAX_STEPS = 1 << 12
LOOK_EVERY_S = 0.2


class Simulation:
    """One run: its training, and what must hold at its end."""

    def __init__(
        self, seed: int, plan: Plan, cluster: memory_cluster.MemoryCluster,
        coordinator: psync.ClusterCoordinator,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.plan = plan
        self.cluster = cluster
        self.coordinator = coordinator
        self.faults = Faults(cluster, random.Random(f"{seed}/faults"))
        self.journal = memory_cluster.shared["journal"] = Journal()
        self.results: dict[tuple[int, int], str] = {}  # by group and column
        self._columns = iter(range(plan.num_columns - NUM_SPARE, plan.num_columns))
        with coordinator.strategy.scope():
            self._declare()

    def _declare(self) -> None:
        plan = self.plan
        for number in range(plan.fillers):
            psync.Variable(np.zeros((), np.float32), name=f"filler{number}")
        self.step = psync.get_or_create_global_step()
        shape = (plan.num_shards, plan.num_columns + plan.padding)
        self.tables = [
            psync.Variable(np.zeros(shape, np.float32), name=f"table{number}")
            for number in range(len(plan.groups))
        ]
        self.counters = [
            psync.Variable(np.zeros((plan.num_shards, 1), np.float32), name=f"counter{number}")
            for number in range(len(plan.groups))
        ]
        self.optimizers = [self._optimizer(number) for number in range(len(plan.groups))]

    def _optimizer(self, number: int) -> psync.optimizers.Optimizer:
        group = self.plan.groups[number]
        if group.bound is not None:
            bound = psync.StalenessBound(group.bound)
            return psync.optimizers.SGD(1.0, staleness_bound=bound)
        rate = psync.schedules.PolynomialDecay(1.0, MAX_STEPS, MAX_STEPS + 1.0)
        return psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(rate), name=f"group{number}", **group.options
        )

    # Training.

    async def run(self) -> None:
        if self.plan.first_step:
            await self.step.assign(self.plan.first_step)
        async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.faults.run(self.plan.fault_every_s))
            tasks.create_task(self._watch())
            await self._train()
            self.faults.over = True
        for number, group in enumerate(self.plan.groups):
            if group.bound is None:
                await self._finish_steps(number)
                await self._check_group(number)
            else:
                await self._check_bounded(number)
        await self._check_all()

    async def _train(self) -> None:
        step, values = self._make_step(), list[psync.RemoteValue]()
        for number, closure in enumerate(self.plan.closures):
            needed = None if closure.needs is None else values[closure.needs]
            values.append(self.coordinator.schedule(step, (number, closure.pushes, needed)))
            if closure.cancelled_after_s is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(closure.cancelled_after_s, values[number].cancel)
            if not self.plan.at_once and number >= self.plan.num_workers:
                with contextlib.suppress(ClosureCancelled, NotEnoughReplicas):
                    await asyncio.wait_for(values[number - self.plan.num_workers], PATIENCE_S)
        try:
            await self.coordinator.join(timeout=PATIENCE_S)
        except NotEnoughReplicas:
            assert self.plan.is_impatient
        else:
            for number, group in enumerate(self.plan.groups):
                if group.options.get("min_replicas") == 1:  # else there may be too few
                    assert not self._counters(number)["counted"], "join applies what was counted"
        for closure, value in zip(self.plan.closures, values, strict=True):
            try:
                self._note_results(closure.pushes, await value)
            except (ClosureCancelled, ClosureInputError, NotEnoughReplicas):
                assert closure.cancelled_after_s is not None or self.plan.is_impatient

    async def _finish_steps(self, group: int) -> None:
        """Push until all that was counted is applied, and one more step is closed."""
        step, before = self._make_step(), self._counters(group)["steps"]
        while (counters := self._counters(group))["counted"] or counters["steps"] == before:
            column = next(self._columns, None)
            assert column is not None, f"it never ends: {counters}"
            push = PushPlan(column, group, pulls=True, weight=1.0)
            value = self.coordinator.schedule(step, (-push.column, (push,)))
            await self.coordinator.join(timeout=SOON_S)
            self._note_results((push,), await value)

    def _note_results(self, pushes: Sequence[PushPlan], outcomes: Sequence[str]) -> None:
        for push, outcome in zip(pushes, outcomes, strict=True):
            self.results[push.group, push.column] = outcome

    def _make_step(self) -> Callable[..., Any]:
        seed, pause_s, groups = self.seed, self.plan.pause_s, self.plan.groups
        compat = [group.bound is None and group.is_compat for group in groups]
        bounded = [group.bound is not None for group in groups]
        means = [group.bound is None and group.reduction == "mean" for group in groups]
        tables, counters, optimizers = self.tables, self.counters, self.optimizers
        global_step = self.step

        async def step(number: int, pushes: Sequence[PushPlan], needed: object = None) -> list[str]:
            journal, outcomes = memory_cluster.shared["journal"], []
            run = journal.begin_run(number)
            rng = random.Random(f"{seed}/{number}/{run}")
            pulled: dict[int, int] = {}
            for push in pushes:
                await asyncio.sleep(rng.random() * pause_s)
                if push.pulls:
                    for group, table in enumerate(tables):
                        pulled[group] = int((await table.read()).max(axis=1).min())
                await asyncio.sleep(rng.random() * pause_s)
                table, counter = tables[push.group], counters[push.group]
                optimizer = optimizers[push.group]
                one = -1.0 if means[push.group] else -1 / push.weight
                gradient = np.zeros(table.shape, np.float32)
                gradient[:, push.column] = one
                ones = np.full(counter.shape, one, np.float32)
                pairs = [(gradient, table), (ones, counter)]
                if bounded[push.group]:
                    note = journal.push(push.group, push.column, -1)
                    result = await optimizer.apply_gradients(pairs)
                else:
                    token = optimizer.local_step
                    local = pulled.pop(push.group, None)
                    if local is None or compat[push.group]:
                        local = -1 if token is None else token
                    note = journal.push(push.group, push.column, local)
                    result = await optimizer.apply_gradients(pairs, global_step, weight=push.weight)
                note.outcome = result.outcome.value
                note.staleness, note.token = result.staleness, result.step
                outcomes.append(note.outcome)
            await asyncio.sleep(rng.random() * pause_s)
            return outcomes

        return step

    # What must hold.

    def _counters(self, group: int) -> dict[str, Any]:
        """What ps 0 counts of a group."""
        groups = self.cluster.tasks["ps-0"].statistics()["sync"]
        name = f"group{group}/{self.optimizers[group].number}"
        counters: dict[str, Any] = groups.get(name, {"steps": 0, "counted": 0})
        return counters

    async def _watch(self) -> None:
        """Look at the groups while they train, and until all workers are there again."""
        while not self.faults.over or len(self._alive()) < self.plan.num_workers:
            heard = self.cluster.tasks["ps-0"]._closer.steps._alive
            for number, group in enumerate(self.plan.groups):
                counters = self._counters(number)
                if group.bound is None and "target" in counters:
                    _check_tokens(counters["tokens"])
                    if heard is not None:
                        fewest = group.options["min_replicas"]
                        assert counters["target"] <= max(fewest, len(heard) * group.allowance)
            await asyncio.sleep(LOOK_EVERY_S)

    def _alive(self) -> dict[str, int]:
        coordinator = self.coordinator._coordinator
        assert coordinator is not None
        return dict(coordinator._reports._joined)

    async def _check_group(self, number: int) -> None:
        group, counters = self.plan.groups[number], self._counters(number)
        first = counters["step"] - counters["steps"]
        table, rows = await self._rows(number)
        assert (rows == table).all(), "a push is whole: every shard has the same row"
        counts = await self.counters[number].read()
        assert (counts == counts[0, 0]).all()
        accepted = sum(of_task["accepted"] for of_task in counters["replicas"].values())
        assert np.count_nonzero(table) == accepted, "what was counted was applied, and just once"
        if group.reduction == "mean":
            assert counts[0, 0] == sum(range(first + 1, counters["step"] + 1))
        else:
            assert counts[0, 0] == table.sum()
            assert set(table[table > 0]) == set(range(first + 1, counters["step"] + 1))
        told: dict[tuple[str, str], int] = self.journal.told(number)
        for (task, outcome), count in told.items():
            assert count <= counters["replicas"][task][outcome]
        self._check_shares(number, table)
        _check_tokens(counters["tokens"])
        assert not counters["waiting"]
        for column, value in enumerate(table.tolist()):
            outcome = self.results.get((number, column))
            if outcome is not None:
                assert (value > 0) == (outcome in (ACCEPTED, DUPLICATE)), (column, outcome, value)
            self._check_push(number, column, value, first)

    def _check_shares(self, number: int, table: np.ndarray) -> None:
        """With bound tokens nobody contributes more often to a step than it may."""
        group = self.plan.groups[number]
        if group.is_bound and group.reduction == "sum":
            shares = Counter(
                (value, id(note.session))
                for column, value in enumerate(table.tolist())
                for note in self.journal.notes.get((number, column), [])
                if note.outcome == ACCEPTED
            )
            assert max(shares.values(), default=0) <= group.allowance

    def _check_push(self, group: int, column: int, value: float, first: int) -> None:
        """A push was counted in the step from which its values came."""
        notes = self.journal.notes.get((group, column), [])
        for note in notes:
            assert note.outcome != STALE or note.staleness or self.plan.gives_up
            assert note.outcome != DUPLICATE or len(notes) > 1
            assert note.outcome != ACCEPTED or (value and not note.staleness)
            for worker, since, until in self.faults.given_up:
                if (
                    worker == f"worker-{note.worker}"
                    and since + FENCED_AFTER_S < note.began < until
                ):
                    assert note.outcome is None, "who was given up is not served any more"
        if value and self.plan.groups[group].reduction == "sum":
            steps = [max(note.local, first) for note in notes]
            assert value - 1 in steps
            assert all(
                step == value - 1
                for step, note in zip(steps, notes, strict=True)
                if note.outcome == ACCEPTED
            )

    async def _check_bounded(self, number: int) -> None:
        """Asynchronous pushes: each counts once, on every shard."""
        _, rows = await self._rows(number)
        pushed = [column for group, column in self.results if group == number]
        assert (rows[:, pushed] == 1).all(), "a push counts once, on every shard"
        assert set(rows.flat) <= {0, 1}  # of closures that were cancelled
        assert rows.any(axis=0).sum() <= len(self.journal.notes)
        clocks = self.cluster.tasks["ps-0"].statistics()["clocks"]
        assert [of_bound["waiting"] for of_bound in clocks.values()] == [0] * len(clocks)

    async def _rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = await self.tables[number].read()
        assert not rows[:, self.plan.num_columns :].any()
        return rows[0, : self.plan.num_columns], rows[:, : self.plan.num_columns]

    async def _check_all(self) -> None:
        steps = sum(self._counters(number)["steps"] for number in range(len(self.plan.groups)))
        assert await self.step.read() == self.plan.first_step + steps
        for name, task in self.cluster.tasks.items():
            if name.startswith("ps"):
                staged = task.statistics()["staging"]
                assert (staged["parts"], staged["bytes"]) == (0, 0), "of steps that are closed"
        assert self.coordinator.statistics()["closures"].in_flight == 0


def _check_tokens(tokens: dict[str, int]) -> None:
    assert tokens["published"] == tokens["taken"] + tokens["void"] + tokens["left"]


async def simulate(seed: int) -> None:
    plan = Plan.drawn(random.Random(seed))
    network = MemoryNetwork(seed, latency=(0.0005, 0.005), chunk=(1 << 14, 1 << 20))
    partitioner = psync.FixedShardsPartitioner(plan.num_shards)
    async with memory_cluster.cluster_of(NUM_PS, plan.num_workers, network=network) as cluster:
        strategy = cluster.strategy(partitioner)
        async with psync.ClusterCoordinator(
            strategy, max_losses=1000, max_flaps=None
        ) as coordinator:
            await Simulation(seed, plan, cluster, coordinator).run()


@pytest.mark.parametrize("seed", range(40))
def test_every_push_counts_once_and_whole(seed: int) -> None:
    run_virtual(simulate, seed, seed=seed)
