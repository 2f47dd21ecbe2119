"""A ps dies and its backup serves: nothing that was answered is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of
from memory_cluster import replicated
from psync import FailoverEvent, RollbackEvent
from psync.errors import ConfigurationError, ParameterServerLost
from psync.testing import settle
from replica_training import add, check, declared, run
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time


@pytest.mark.promise("failures.ps-with-backup")
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_a_ps_dies_and_what_was_answered_is_there(lost: str) -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 5, *variables)
        await cluster.kill(lost)
        event = await anext(coordinator.events())
        assert isinstance(event, FailoverEvent)
        assert event.lost == (f"/job:ps/task:{lost[-1]}",)
        assert event.served_by == (f"/job:ps/task:{1 - int(lost[-1])}",)
        await check(variables, 5)
        await run(coordinator, 4, *variables)
        await check(variables, 9)


@pytest.mark.promise("answers.after-failover")
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("place", ["ps.backup.sending", "ps.backup.taken", "ps.assign.applied"])
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_wherever_a_ps_dies_each_update_is_made_once(
    lost: str, place: str, count: int
) -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 1, *variables)
        died = cluster.kill_at(lost, place, count)
        for _ in range(20):
            coordinator.schedule(add, args=variables)
        await died.wait()
        burying = asyncio.create_task(cluster.stop(lost))
        await coordinator.join()
        await burying
        await check(variables, 21)


async def test_the_one_that_took_over_dies_too_after_its_backup_was_made_anew() -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        for turn, name in enumerate(["ps-0", "ps-1", "ps-0"], 2):
            await cluster.kill(name)
            await run(coordinator, 3, *variables)
            await cluster.revive(name)
            await coordinator.backed_up()
            await check(variables, 3 * turn)
        await run(coordinator, 3, *variables)
        await check(variables, 15)


async def test_without_a_backup_and_a_checkpoint_a_second_death_is_the_end() -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        await cluster.kill("ps-0")
        await run(coordinator, 3, *variables)
        await cluster.kill("ps-1")
        with pytest.raises(ParameterServerLost):
            await run(coordinator, 1, *variables)


@pytest.mark.promise("failures.ps-with-incomplete-backup")
async def test_without_a_backup_all_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        await keep_snapshots(coordinator, tmp_path)
        await cluster.kill("ps-0")
        await run(coordinator, 2, *variables)
        await cluster.kill("ps-1")
        await cluster.revive("ps-0")
        await cluster.revive("ps-1")
        events = coordinator.events()
        assert isinstance(await anext(events), FailoverEvent)
        assert isinstance(await anext(events), RollbackEvent)
        await check(variables, 3)
        await coordinator.backed_up()
        await cluster.kill("ps-0")
        await run(coordinator, 2, *variables)
        await check(variables, 5)


async def push(v: Any, optimizer: Any, scale: float) -> None:
    gradient = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3) * np.float32(scale)
    await optimizer.apply_gradients([(gradient, v)])


@pytest.mark.promise("answers.after-failover")
@pytest.mark.parametrize("name", ["SGD", "Adam"])
async def test_values_slots_and_steps_are_those_of_an_undisturbed_run(name: str) -> None:
    async def train(victims: tuple[str, ...]) -> list[np.ndarray]:
        async with replicated(2, 1) as (cluster, coordinator):
            with coordinator.strategy.scope():
                v = psync.Variable(np.ones((2, 3), np.float32), name="v")
            optimizer = getattr(psync.optimizers, name)(0.1)
            for victim in (*victims, ""):
                for step in range(1, 6):
                    coordinator.schedule(push, args=(v, optimizer, float(step)))
                await coordinator.join()
                if victim:
                    await cluster.kill(victim)
                    await cluster.revive(victim)
                    await anext(coordinator.events())
                    await coordinator.backed_up()
            return [await v.read()]

    undisturbed, disturbed = await train(("", "")), await train(("ps-0", "ps-1"))
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.tobytes() == other.tobytes()


async def test_learning_rates_and_late_variables_are_there_too() -> None:
    async with replicated(2, 1) as (cluster, coordinator):
        v, _ = declared(coordinator)
        optimizer = psync.optimizers.SGD(0.5)
        coordinator.schedule(push, args=(v, optimizer, 1.0))
        await coordinator.join()
        with coordinator.strategy.scope():
            late = psync.Variable(np.full((2, 3), 7, np.float32), name="late")
        await late.assign_add(np.ones((2, 3), np.float32))
        before = await v.read()
        await cluster.kill("ps-1")
        await cluster.revive("ps-1")
        assert np.array_equal(await late.read(), np.full((2, 3), 8))
        assert np.array_equal(await v.read(), before)


async def test_nothing_is_answered_that_the_backup_does_not_have() -> None:
    async with replicated() as (cluster, coordinator):
        _, small = declared(coordinator)
        await small.assign_add(np.ones(1, np.int64))
        cluster.network.partition("ps-0", "ps-1")
        adding = asyncio.create_task(small.assign_add(np.ones(1, np.int64)))
        await settle()
        assert not adding.done()
        await cluster.kill("ps-0")
        cluster.network.heal("ps-0", "ps-1")
        await adding
        assert int((await small.read())[0]) == 2


def test_replica_needs_two_ps_tasks_and_no_attaching() -> None:
    resolver = strategy_of(1).cluster_resolver
    with pytest.raises(ConfigurationError, match="at least two ps tasks, got 1"):
        psync.ParameterServerStrategy(resolver, ps_recovery="backup")
    with pytest.raises(ConfigurationError, match='"checkpoint" or "backup"'):
        psync.ParameterServerStrategy(resolver, ps_recovery="both")
