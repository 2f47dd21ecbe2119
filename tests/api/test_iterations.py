"""``optimizer.iterations`` is the number of pushes on any number of ps; schedules follow it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import coordinating, replicated
from psync import optimizers, schedules

pytestmark = pytest.mark.virtual_time

NUM_PS = 3


def heads_of(strategy: psync.ParameterServerStrategy, count: int = NUM_PS) -> list[Any]:
    """Variables that round robin puts on one ps each."""
    with strategy.scope():
        return [psync.Variable(np.zeros(4, np.float32), name=f"head{k}") for k in range(count)]


async def pushes(coordinator: Any, optimizer: Any, variables: list[Any], pause_s: float) -> None:
    """Push 60 times, each time to the next variables."""

    async def step(chosen: list[Any]) -> None:
        await asyncio.sleep(pause_s)
        await optimizer.apply_gradients([(-np.ones(4, np.float32), v) for v in chosen])

    for i in range(60):
        coordinator.schedule(step, (variables[i % len(variables)],))
    await coordinator.join()


async def test_a_single_worker_has_the_steps_of_a_single_process() -> None:
    """Also where each push goes to other ps tasks than the one before."""
    async with coordinating(NUM_PS, 1) as (_, coordinator):
        heads = heads_of(coordinator.strategy)
        optimizer = optimizers.SGD(schedules.PolynomialDecay(1.0, 60, 0.0))
        chosen = [[heads[0]], [heads[1]], heads[1:], [heads[2]], heads, [heads[0], heads[2]]]
        await pushes(coordinator, optimizer, chosen, 0.0)
        expected = np.zeros(NUM_PS, np.float32)
        rates = [optimizer.learning_rate(i) for i in range(60)]  # type: ignore[operator]
        for i in range(60):
            for head in chosen[i % len(chosen)]:
                expected[heads.index(head)] += np.float32(rates[i])
        assert [(await head.read())[0] for head in heads] == expected.tolist()


async def test_numbers_survive_the_loss_of_each_ps() -> None:
    async with replicated(NUM_PS, 2) as (cluster, coordinator):
        heads = heads_of(coordinator.strategy)
        optimizer = optimizers.Adam(0.1)
        for lost in range(NUM_PS):
            await coordinator.backed_up()
            for _ in range(2):
                await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
            await cluster.kill(f"ps-{lost}")
            assert await optimizer.iterations.read() == 120 * (lost + 1)
            await cluster.revive(f"ps-{lost}")


async def test_a_number_that_is_set_is_counted_on_by_every_ps() -> None:
    async with coordinating(NUM_PS, 2) as (_, coordinator):
        heads = heads_of(coordinator.strategy)
        optimizer = optimizers.SGD(schedules.PiecewiseConstantDecay([999], [1.0, 0.25]))
        await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
        await optimizer.iterations.assign(1000)
        await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
        assert await optimizer.iterations.read() == 1060
        assert [float((await head.read())[0]) for head in heads] == [25.0] * NUM_PS


async def test_a_checkpoint_has_one_number_for_any_number_of_ps_tasks(tmp_path: Any) -> None:
    for num_ps in (3, 2, 1):
        async with coordinating(num_ps, 2) as (_, coordinator):
            heads, optimizer = heads_of(coordinator.strategy), optimizers.Adam(0.1)
            manager = psync.CheckpointManager(psync.Checkpoint(heads=heads, o=optimizer), tmp_path)
            await manager.restore_or_initialize()
            await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
            await manager.save()
            assert await optimizer.iterations.read() == 60 * (4 - num_ps)


async def test_a_rollback_undoes_the_number_with_the_pushes(tmp_path: Any) -> None:
    async with coordinating(NUM_PS, 2) as (cluster, coordinator):
        heads, optimizer = heads_of(coordinator.strategy), optimizers.SGD(1.0)
        manager = psync.CheckpointManager(psync.Checkpoint(heads=heads, o=optimizer), tmp_path)
        await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
        await manager.save()
        await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
        await cluster.kill("ps-1")
        await cluster.revive("ps-1")
        await pushes(coordinator, optimizer, [[head] for head in heads], 0.0)
        total = sum([float((await head.read())[0]) for head in heads])
        assert await optimizer.iterations.read() == total  # those that were undone count in neither
        assert 60 < total <= 120
