"""Messages about backups are lost: no death undoes anything for that, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memory_cluster import replicated
from psync import FailoverEvent, RollbackEvent
from psync.testing.sabotage.message_loss import FORMS
from replica_training import check, declared, run
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time

ABOUT_BACKUPS = ("BackUp", "BeginBackup", "FillSnapshot", "LogEntries", "Promote", "AttachPs")


@pytest.mark.promise("failures.ps-with-backup")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ABOUT_BACKUPS)
async def test_whichever_message_is_lost_a_death_undoes_nothing(kind: str) -> None:
    async with replicated(losses={kind: {"min_each": 2}}) as (cluster, coordinator):
        variables = declared(coordinator)
        events = coordinator.events()
        await run(coordinator, 5, *variables)
        for turn, name in enumerate(("ps-0", "ps-1"), 2):
            await cluster.kill(name)
            event = await anext(events)
            assert isinstance(event, FailoverEvent)
            assert event.seconds < 2
            await cluster.revive(name)
            await coordinator.backed_up()
            await run(coordinator, 5, *variables)
            await check(variables, 5 * turn)
        assert cluster.losses is not None
        assert cluster.losses.lost == {(kind, form): 2 for form in FORMS}


async def test_one_that_serves_though_the_coordinator_never_heard_of_it_is_replaced(
    tmp_path: Path,
) -> None:
    async with replicated(losses={"Promote": {"reply": 1}}) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        await keep_snapshots(coordinator, tmp_path)
        await cluster.kill("ps-0")
        await cluster.revive("ps-0")
        assert isinstance(await anext(coordinator.events()), RollbackEvent)
        await coordinator.backed_up()  # in the process where the other one serves
        await run(coordinator, 3, *variables)
        await check(variables, 6)


async def test_a_ps_without_a_backup_is_not_given_up_in_haste() -> None:
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        await cluster.kill("ps-1")
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        cluster.network.refuse("ps-0")
        cluster.network.cut("ps-0")
        running = asyncio.create_task(run(coordinator, 3, *variables))
        await asyncio.sleep(1.5)  # with a backup it would be lost by now
        cluster.network.admit("ps-0")
        await running
        await check(variables, 6)
