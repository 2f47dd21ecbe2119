"""Synchronous steps with backups: whichever ps dies, a push counts once, everywhere or nowhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from memory_cluster import MemoryCluster, replicated
from psync import FailoverEvent
from replica_training import LARGE, SMALL, ColumnsTraining

pytestmark = pytest.mark.virtual_time


PLACES = [
    ("ps-0", "ps.backup.sending"), ("ps-0", "ps.backup.taken"), ("ps-0", "ps0.step.decided"),
    ("ps-0", "ps.step.applied"), ("ps-0", "ps0.step.applied"), ("ps-1", "ps.backup.sending"),
    ("ps-1", "ps.backup.taken"), ("ps-1", "ps.step.applied"),
]  # fmt: skip


@pytest.mark.promise("answers.steps-after-failover")
@pytest.mark.slow
@pytest.mark.parametrize(("count", "step_ps"), [(1, 0), (1, 1), (4, 1)])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(("lost", "place"), PLACES)
async def test_wherever_a_ps_dies_each_push_counts_once_and_everywhere(
    lost: str, place: str, count: int, size: int, step_ps: int
) -> None:
    async with replicated() as (cluster, coordinator):
        training = ColumnsTraining(coordinator, size, step_ps)
        training.schedule(4)
        await coordinator.join()
        died = cluster.kill_at(lost, place, count)
        burying = asyncio.create_task(buried(cluster, lost, died))
        while not died.is_set():
            training.schedule(4)
            await coordinator.join()
        training.schedule(4)
        await coordinator.join()
        await burying
        await training.check()
        steps = int(await training.global_step.read())
        outcomes = await coordinator.fetch(training.results)
        counted = sum(outcome != "stale" for outcome in outcomes)
        assert counted / 2 <= steps <= counted
        assert isinstance(await anext(coordinator.events()), FailoverEvent)


async def test_a_backup_of_ps_0_is_not_made_in_the_midst_of_a_step() -> None:
    """It would take the step for applied, and not know how to let the others apply it."""
    async with replicated(3) as (cluster, coordinator):
        training = ColumnsTraining(coordinator, SMALL)
        training.schedule(4)
        await coordinator.join()
        cluster.network.partition("ps-0", "ps-2")
        for link in cluster.network.links("ps-0"):
            if link.ends.are("ps-0", "ps-2"):
                link.cut()
        training.schedule(2)
        await asyncio.sleep(0.1)
        await cluster.kill("ps-1")  # it has the backup of ps 0
        await cluster.revive("ps-1")
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        backed_up = asyncio.create_task(coordinator.backed_up())
        await asyncio.sleep(3)
        assert cluster.ps("ps-0").statistics()["backup"]["state"] != "paired"
        cluster.network.heal("ps-0", "ps-2")
        await backed_up
        await cluster.kill("ps-0")
        training.schedule(4)
        await coordinator.join(timeout=60)
        await training.check()


async def buried(cluster: MemoryCluster, lost: str, died: asyncio.Event) -> None:
    await died.wait()
    await cluster.stop(lost)


async def test_join_ends_where_a_step_waits_for_the_log() -> None:
    """Nobody else comes, so the step is closed; but the backup does not answer for a while."""
    async with replicated() as (cluster, coordinator):
        training = ColumnsTraining(
            coordinator, SMALL, replicas_to_aggregate=2, total_num_replicas=1
        )
        training.schedule(1)
        await coordinator.fetch(training.results)  # with an initial token: its step is not closed
        cluster.network.partition("ps-0", "ps-1")
        updating = asyncio.create_task(training.v.assign_add(np.zeros(training.v.shape)))
        joining = asyncio.create_task(coordinator.join())
        await asyncio.sleep(0.1)
        cluster.network.heal("ps-0", "ps-1")
        await asyncio.gather(joining, updating)
        await training.check()


async def push_only(v: Any, optimizer: Any, global_step: Any, column: int) -> str:
    gradient = np.zeros(v.shape, np.float32)
    gradient[:, column] = 1
    result = await optimizer.apply_gradients([(gradient, v)], global_step)
    return str(result.outcome.value)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_step_that_pulls_nothing_knows_no_step_in_a_new_session(size: int) -> None:
    """Each death of a ps ends all sessions, and with them what workers had been told."""
    async with replicated() as (cluster, coordinator):
        training = ColumnsTraining(coordinator, size)
        training.schedule(4)
        await coordinator.join()
        await cluster.kill("ps-0")
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        for column in range(4, 12):
            args = (training.v, training.optimizer, training.global_step, column)
            training.results.append(coordinator.schedule(push_only, args=args))
        await coordinator.join(timeout=60)
        outcomes = await coordinator.fetch(training.results)
        assert {"stale", "accepted"} <= set(outcomes[4:])
        await training.check()
