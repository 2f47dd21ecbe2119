"""Accumulators with backups: whichever ps dies, each gradient is taken once, or is still there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, replicated, until
from psync import FailoverEvent

SMALL, LARGE = 64, 800_000  # rows: done in a turn of the loop, or in pieces


class Program:
    """Closures give gradients, each with a one at a place of its own; the program takes them."""

    def __init__(
        self, coordinator: psync.ClusterCoordinator, size: int = SMALL, *, sparse: bool = False
    ) -> None:
        self.coordinator, self.size, self.sparse = coordinator, size, sparse
        kind = psync.SparseConditionalAccumulator if sparse else psync.ConditionalAccumulator
        with coordinator.strategy.scope():
            self.held: Any = kind(np.float32, (size,), reduction_type="SUM", max_staleness=10**6)
        self.results: list[Any] = []
        self.total = np.zeros(size, np.float32)
        self.taken = 0  # gradients

    def schedule(self, count: int) -> None:
        for _ in range(count):
            args = (self.held, len(self.results), self.size, self.sparse)
            self.results.append(self.coordinator.schedule(give, args=args))

    async def take(self, num_required: int) -> None:
        taken = await self.held.take_grad(num_required)
        if self.sparse:
            rows, values, _ = taken
            self.total[rows] += values
        else:
            self.total += taken

    async def round(self) -> None:
        """Four gradients, of which three at least are taken."""
        self.schedule(4)
        await self.take(3)
        await self.coordinator.join()

    async def check(self) -> None:
        """Each gradient that was accepted has been taken once, and no other one."""
        await self.coordinator.join()
        while await self.held.num_accumulated():
            await self.take(1)
        outcomes = await self.coordinator.fetch(self.results)
        assert set(outcomes) <= {"accepted", "duplicate"}
        expected = np.zeros(self.size, np.float32)
        expected[: len(outcomes)] = 1
        np.testing.assert_array_equal(self.total, expected)


async def give(held: Any, place: int, size: int, sparse: bool) -> str:
    if sparse:
        result = await held.apply_grad([place], np.ones(1, np.float32))
    else:
        gradient = np.zeros(size, np.float32)
        gradient[place] = 1
        result = await held.apply_grad(gradient)
    return str(result.outcome.value)


async def buried(cluster: MemoryCluster, lost: str, died: asyncio.Event) -> None:
    await died.wait()
    await cluster.stop(lost)


each_kind = pytest.mark.parametrize(
    ("size", "sparse"), [(SMALL, False), (LARGE, False), (SMALL, True)],
    ids=["small", "large", "sparse"],
)  # fmt: skip


@pytest.mark.promise("answers.accumulators-after-failover", "answers.accumulators-in-steps")
@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("count", [1, 3, 5, 10])
@pytest.mark.parametrize("place", ["ps.backup.sending", "ps.backup.taken"])
async def test_wherever_a_ps_dies_each_gradient_is_taken_once(
    place: str, count: int, size: int, sparse: bool
) -> None:
    async with replicated() as (cluster, coordinator):
        program = Program(coordinator, size, sparse=sparse)
        await program.round()
        died = cluster.kill_at("ps-0", place, count)
        burying = asyncio.create_task(buried(cluster, "ps-0", died))
        while not died.is_set():
            await program.round()
        await program.round()
        await burying
        await program.check()
        assert isinstance(await anext(coordinator.events()), FailoverEvent)


async def collect(held: Any, num_required: int) -> np.ndarray:
    taken: np.ndarray = await held.take_grad(num_required)
    return taken


async def test_a_take_that_waits_in_a_step_waits_anew_in_its_next_run() -> None:
    async with replicated() as (cluster, coordinator):
        program = Program(coordinator)
        taken = coordinator.schedule(collect, args=(program.held, 2))
        await until(lambda: cluster.ps("ps-0").statistics()["accumulators"]["waiting"])
        await cluster.kill("ps-0")
        program.schedule(3)
        await coordinator.join()
        program.total += await taken.fetch()
        assert program.total.sum() in (2, 3)
        await program.check()


@pytest.mark.virtual_time
@each_kind
async def test_a_backup_that_is_made_later_has_what_waits_and_what_was_answered(
    size: int, sparse: bool
) -> None:
    """Each process dies once, and is started again empty: all it gets comes from the other one."""
    async with replicated() as (cluster, coordinator):
        program = Program(coordinator, size, sparse=sparse)
        events = coordinator.events()
        for turn, name in enumerate(("ps-0", "ps-1", "ps-0"), 1):
            program.schedule(2)
            await coordinator.join()
            taking = asyncio.create_task(program.take(3 * turn))
            await asyncio.sleep(1)  # it waits
            await cluster.kill(name)
            assert isinstance(await anext(events), FailoverEvent)
            await cluster.revive(name)
            await coordinator.backed_up()
            program.schedule(3 * turn)
            await taking
        await program.check()
