"""Messages about backups are lost: no death undoes anything for that, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memory_cluster import replicated
from psync import FailoverEvent, RollbackEvent
from psync.errors import ParameterServerLost
from psync.testing.sabotage.message_loss import FORMS
from replica_training import check, declared, run
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time

ABOUT_BACKUPS = ("BackUp", "BeginBackup", "FillBackup", "LogEntries", "Promote", "AttachPs")


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


async def test_a_process_that_is_slow_to_answer_still_lets_its_backup_serve() -> None:
    """It was stopped while the ps died, say: the backup in it is complete."""
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        cluster.network.partition("chief-0", "ps-1")
        await cluster.kill("ps-0")
        await asyncio.sleep(5)
        cluster.network.heal("chief-0", "ps-1")
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        await check(variables, 3)


async def test_at_the_end_nobody_looks_for_variables_where_they_were_at_the_beginning() -> None:
    """The process of before is there again, and knows none of them."""
    async with replicated() as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        await cluster.kill("ps-0")
        assert isinstance(await anext(coordinator.events()), FailoverEvent)
        cluster.network.partition("ps-0", "ps-1")  # so there is no backup
        await cluster.revive("ps-0")
        await cluster.kill("ps-1")
        with pytest.raises(ParameterServerLost):
            await run(coordinator, 1, *variables)
        for variable in variables:
            with pytest.raises(ParameterServerLost):
                await variable.read()
        cluster.network.heal("ps-0", "ps-1")
