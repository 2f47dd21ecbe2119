"""What a coordinator does about a ps that is lost, and about another coordinator."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import (
    MemoryCluster,
    cluster_of,
    coordinating,
    event_of,
    replicated,
    running,
    shared,
)
from psync import RollbackEvent
from psync.errors import ConnectFailed, FencedError, ParameterServerLost, WorkerLost
from psync.wire.messages import Update
from replica_training import declared, run
from snapshot_store import keep_snapshots

# --- everything ends -------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_run_after_a_ps_was_lost_for_good_ends_with_that_error() -> None:
    async def step() -> int:
        return 1

    async with coordinating(1, 2) as (cluster, coordinator):
        declared(coordinator)
        await coordinator.strategy.run(step)
        await cluster.stop("ps-0")
        coordinator.schedule(step)
        await asyncio.sleep(60)
        for _ in range(2):  # also where a join has collected the error
            with pytest.raises(ParameterServerLost):
                await coordinator.join()
            with pytest.raises(ParameterServerLost):
                await coordinator.strategy.run(step)


@pytest.mark.virtual_time
async def test_a_lost_ps_is_an_error_at_join_and_of_what_is_scheduled_later() -> None:
    async with cluster_of() as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.ones(4, np.float32), name="w")

            async def step() -> None:
                await w.read()
                event_of("read").set()
                await asyncio.sleep(3600)

            coordinator.schedule(step)
            await event_of("read").wait()
            await cluster.stop("ps-0")
            with pytest.raises(ParameterServerLost, match="/job:ps/task:0 at ps-0:1 cannot be"):
                await coordinator.join()
            value = coordinator.schedule(step)
            await asyncio.sleep(1)  # it was to be sent
            with pytest.raises(ParameterServerLost, match="ps-0:1 cannot be") as raised:
                await coordinator.join()
            assert value.status is psync.RemoteValueStatus.ABORTED
            assert "1 more failed likewise" not in getattr(raised.value, "__notes__", [])
            with pytest.raises(ParameterServerLost, match="/job:ps/task:0 at ps-0:1 cannot be"):
                await coordinator.join()  # nothing was scheduled, and nothing ever can be


# --- nothing was computed yet ----------------------------------------------------------------


async def lose(cluster: MemoryCluster, name: str) -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.kill(name)
    await cluster.revive(name)


async def kept_alive(cluster: MemoryCluster, name: str, place: str, count: int) -> None:
    """Let a ps die at a place, and start it again."""
    await cluster.kill_at(name, place, count).wait()
    await cluster.stop(name)
    await cluster.revive(name)


def some_variables(strategy: psync.ParameterServerStrategy) -> dict[str, Any]:
    """Arrays, a constant, and what is drawn."""
    with strategy.scope():
        return {
            "w": psync.Variable(np.arange(6.0).reshape(2, 3), name="w"),
            "ones": psync.Variable(np.broadcast_to(np.float32(1), (2, 3)), name="ones"),
            "drawn": psync.Variable(
                lambda shape, offset: np.full(shape, 7, np.float32), name="drawn", shape=(2, 3),
                dtype="float32",
            ),
        }  # fmt: skip


async def trains(coordinator: psync.ClusterCoordinator, variables: dict[str, Any]) -> None:
    """Ten steps, whose updates are all there in the end."""
    before = {name: np.array(await each.read()) for name, each in variables.items()}

    async def step() -> None:
        for each in variables.values():
            await each.assign_add(np.ones((2, 3)))

    for _ in range(10):
        coordinator.schedule(step)
    await coordinator.join(timeout=60)
    for name, each in variables.items():
        assert (await each.read() == before[name] + 10).all()


def are_initial(values: dict[str, np.ndarray]) -> bool:
    first = {
        "w": np.arange(6.0).reshape(2, 3),
        "ones": np.ones((2, 3)),
        "drawn": np.full((2, 3), 7),
    }
    return all((values[name] == first[name]).all() for name in first)


@pytest.mark.promise("failures.ps-before-work")
@pytest.mark.virtual_time
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
@pytest.mark.parametrize("attach", [False, True])
async def test_a_ps_may_die_while_the_coordinator_starts(lost: str, attach: bool) -> None:
    async with cluster_of(2, 2) as cluster:
        await cluster.stop("worker-1")  # is still importing
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        variables = some_variables(strategy)
        coordinator = psync.ClusterCoordinator(strategy, attach=attach)
        starting = asyncio.create_task(coordinator.start())
        for _ in range(3):
            await asyncio.sleep(3)
            await lose(cluster, lost)
        await cluster.start("worker-1")
        await starting
        assert not coordinator.attached
        assert are_initial(await psync.pull(variables))
        await trains(coordinator, variables)
        await coordinator.close()


@pytest.mark.promise("failures.ps-before-work-repeatedly")
@pytest.mark.virtual_time
async def test_a_ps_that_dies_whenever_a_coordinator_starts_is_an_error() -> None:
    async with cluster_of(1, 2) as cluster:
        await cluster.stop("worker-1")
        coordinator = psync.ClusterCoordinator(cluster.strategy(), connect_timeout=200)
        starting = asyncio.create_task(coordinator.start())
        while not starting.done():
            await asyncio.sleep(3)
            await lose(cluster, "ps-0")
        with pytest.raises(ParameterServerLost, match="was restarted and has lost its shards"):
            await starting
        assert asyncio.get_running_loop().time() < 30


@pytest.mark.promise("failures.ps-before-work")
@pytest.mark.virtual_time
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_a_ps_may_die_while_variables_are_created(lost: str) -> None:
    async with cluster_of(2, 2) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        variables = some_variables(strategy)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            dying = asyncio.create_task(kept_alive(cluster, lost, "ps.create.done", 1))
            coordinator.schedule(asyncio.sleep, (0,))
            await coordinator.join()
            assert are_initial(await psync.pull(variables))
            await trains(coordinator, variables)
            await dying


def checkpoint_of(
    strategy: psync.ParameterServerStrategy,
) -> tuple[psync.Checkpoint, Any, dict[str, Any]]:
    with strategy.scope():
        variables = [psync.Variable(np.zeros((4, 2)), name=name) for name in "abc"]
        adam = psync.optimizers.Adam(0.1)

    async def step() -> None:
        ones = np.ones((4, 2))
        await adam.apply_gradients([(ones, each) for each in variables])

    saved = {"variables": variables, "adam": adam}
    return psync.Checkpoint(**saved), step, saved


async def everything(variables: Any, adam: Any) -> Any:
    """Values, slots and step, as a checkpoint of them has them."""
    slots = [
        await slot.read()
        for name in adam.get_slot_names()
        for each in variables
        if (slot := adam.get_slot(each, name)) is not None
    ]
    return [*await psync.pull(variables), *slots, int(await adam.iterations.read())]


@pytest.mark.promise("failures.ps-before-work")
@pytest.mark.virtual_time
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("saved_on", [1, 2])
async def test_a_ps_may_die_while_a_checkpoint_is_restored(
    lost: str, count: int, saved_on: int, tmp_path: Path
) -> None:
    async with cluster_of(saved_on, 1) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(saved_on))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            checkpoint, step, objects = checkpoint_of(strategy)
            for _ in range(3):
                coordinator.schedule(step)
            await coordinator.join()
            await psync.CheckpointManager(checkpoint, tmp_path).save()
            saved = await everything(**objects)
    async with cluster_of(2, 1) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            checkpoint, step, objects = checkpoint_of(strategy)
            dying = asyncio.create_task(kept_alive(cluster, lost, "ps.assign.applied", count))
            manager = psync.CheckpointManager(checkpoint, tmp_path)
            assert await manager.restore_or_initialize() is not None
            await dying
            for found, expected in zip(await everything(**objects), saved, strict=True):
                assert np.array_equal(found, expected)
            coordinator.schedule(step)
            await coordinator.join()
            assert await objects["adam"].iterations.read() == 4


@pytest.mark.promise("failures.replaced-chief")
async def test_a_coordinator_that_was_replaced_says_so_in_every_join_and_does_not_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with coordinating(num_ps=2, num_workers=1) as (cluster, old):

        async def never() -> None:
            event_of("started").set()
            await asyncio.Event().wait()

        old.schedule(never)
        await event_of("started").wait()
        async with psync.ClusterCoordinator(cluster.strategy()) as newer:
            with pytest.raises(
                FencedError, match="a newer coordinator, which has replaced this one"
            ):
                await old.join()
            value = old.schedule(never)
            with pytest.raises(
                FencedError, match="a newer coordinator, which has replaced this one"
            ):
                await old.join()
            assert value.status is psync.RemoteValueStatus.ABORTED

            async def one() -> int:
                return 1

            assert await newer.schedule(one) == 1
    assert caplog.text.count("a newer coordinator has taken over") == 1, "whoever else says it"


async def test_a_gang_ends_with_a_ps_though_it_is_recovered(tmp_path: Path) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 1, *variables)
        await keep_snapshots(coordinator, tmp_path)

        async def replica() -> None:
            event_of("started").set()
            await asyncio.Event().wait()

        gang = asyncio.ensure_future(coordinator.strategy.run(replica))
        await event_of("started").wait()
        await cluster.stop("ps-1")
        await cluster.start("ps-1")
        with pytest.raises(ParameterServerLost, match="was lost while replicas ran"):
            await gang
        await run(coordinator, 1, *variables)
        assert int((await variables[1].read())[0]) == 2


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_scheduled", [True, False])
async def test_what_is_scheduled_ends_where_no_worker_may_come_again(is_scheduled: bool) -> None:
    async def step() -> None:
        await asyncio.Event().wait()

    async with coordinating(1, 1) as (cluster, coordinator):
        if is_scheduled:
            coordinator.schedule(step)
        await asyncio.sleep(1)
        await cluster.stop("worker-0")
        resolver = coordinator.strategy.cluster_resolver
        resolver.platform.given_up.note("worker-0:1", "has ended")  # as psync run does
        await asyncio.sleep(1)
        if is_scheduled:
            with pytest.raises(WorkerLost, match="has ended, and there is no other worker"):
                await coordinator.join()
        else:
            await coordinator.join()


@pytest.mark.virtual_time
async def test_a_report_says_that_closures_stand_still_as_long_as_they_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_back = "closures are held back: a ps is being recovered"
    async with coordinating(2, 1, watchdog_timeout=2.0) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 1, *variables)
        await keep_snapshots(coordinator, tmp_path)
        await cluster.stop("ps-1")
        waiting = asyncio.create_task(run(coordinator, 1, *variables))
        await asyncio.sleep(5)
        assert held_back in caplog.text
        await cluster.start("ps-1")
        await anext(coordinator.events())
        await waiting
        caplog.clear()
        coordinator.schedule(asyncio.sleep, (5,))
        await coordinator.join()
        assert held_back not in caplog.text


# --- training goes on ------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_ps_0_is_told_again_who_takes_part_in_steps(lost: str, tmp_path: Path) -> None:
    async def step(v: Any, optimizer: Any, global_step: Any) -> None:
        await psync.pull(v)
        await optimizer.apply_gradients([(np.ones(2, np.float32), v)], global_step)

    async with coordinating(2, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), replicas_to_aggregate=2, reduction="sum"
        )

        async def train() -> None:
            for _ in range(4):
                coordinator.schedule(step, args=(v, optimizer, global_step))
            await coordinator.join(timeout=60)

        await train()
        await keep_snapshots(coordinator, tmp_path)
        await cluster.stop(lost)
        await cluster.start(lost)
        assert isinstance(await anext(coordinator.events()), RollbackEvent)
        await train()
        assert (await v.read() == -8).all()


# --- ps 0 says that another one is lost ------------------------------------------------------


async def told_by_ps_0() -> str:
    """A step that fails as one does whose push needs a ps that is lost, when it runs first."""
    import memory_cluster
    import psync.errors

    runs = memory_cluster.shared["runs"] = memory_cluster.shared.get("runs", 0) + 1
    if runs == 1:
        raise psync.errors.ParameterServerLost("/job:ps/task:1", "is lost, says ps 0")
    return "done"


async def test_a_step_that_hears_first_of_a_lost_ps_runs_again_once_it_is_recovered(
    tmp_path: Path,
) -> None:
    async with coordinating(2, 1) as (_, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 1, *variables)
        await keep_snapshots(coordinator, tmp_path)
        value = coordinator.schedule(told_by_ps_0)
        event = await anext(coordinator.events())
        assert isinstance(event, RollbackEvent)
        assert event.lost == ("/job:ps/task:1",)
        await coordinator.join()
        assert await value == "done"
        assert shared["runs"] == 2


async def test_where_nothing_can_be_recovered_it_is_the_error_of_that_step() -> None:
    async with coordinating(2, 1) as (_, coordinator):
        coordinator.schedule(told_by_ps_0)
        with pytest.raises(ParameterServerLost, match="is lost, says ps 0"):
            await coordinator.join()
        assert await coordinator.schedule(told_by_ps_0) == "done"


# --- backups ---------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_that_nothing_was_saved_is_said_once_a_ps_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    unsaved = "no CheckpointManager has saved anything yet"
    async with coordinating(2, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(0.0, name="v")
        await asyncio.wait_for(coordinator.backed_up(), 5)
        await coordinator.join()
        await v.read()
        assert unsaved not in caplog.text
        await cluster.stop("ps-0")
        with pytest.raises(ParameterServerLost):
            await v.read()
        assert f"/job:ps/task:0 cannot be recovered: {unsaved}" in caplog.text


@pytest.mark.virtual_time
async def test_a_report_says_where_each_backup_is_and_nothing_is_said_of_checkpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster_of(2, 1) as cluster:
        strategy = cluster.replica_strategy()
        async with psync.ClusterCoordinator(strategy, watchdog_timeout=2.0) as coordinator:
            coordinator.schedule(asyncio.sleep, (5,))
            await coordinator.join()
    where = "/job:ps/task:0 is served in the process of /job:ps/task:0, its backup in that of"
    assert f"{where} /job:ps/task:1" in caplog.text
    assert "no CheckpointManager has saved anything yet" not in caplog.text


@pytest.mark.virtual_time
async def test_first_backups_that_are_not_made_in_time_are_named() -> None:
    cluster = MemoryCluster(2, 1, losses={"BackUp": {"request": 1}})
    await cluster.start_all()
    try:
        coordinator = psync.ClusterCoordinator(cluster.replica_strategy(), connect_timeout=3)
        with pytest.raises(ConnectFailed, match=r"within 3 s: /job:ps/task:0 .* is not complete"):
            async with coordinator:
                pass
    finally:
        await cluster.stop_all()


@pytest.mark.virtual_time
async def test_an_update_that_no_ps_answers_does_not_hold_up_the_end() -> None:
    """As one on a ps that waits for a backup: none is ordered any more."""
    async with running(MemoryCluster(tapped=True)) as cluster:
        strategy = cluster.strategy()
        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                v = psync.Variable(np.zeros(1), name="v")
            await v.read()
            with cluster.tap("ps-0").at(Update, lambda: False) as sent:
                adding = asyncio.ensure_future(v.assign_add(np.ones(1)))
                await sent.wait()
                adding.cancel()  # it goes on in the background
            leaves = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - leaves < 30


@pytest.mark.virtual_time
async def test_what_waits_for_a_backup_ends_where_a_ps_is_lost_that_has_none() -> None:
    async with replicated(3, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            variables = [psync.Variable(np.zeros(1), name=f"v{i}") for i in range(3)]
        await coordinator.backed_up()
        for variable in variables:
            await variable.assign_add(np.ones(1))
        await cluster.kill("ps-1")  # in it was the backup of ps 0
        await anext(coordinator.events())
        cluster.network.partition("ps-2", "ps-0")  # in which is that of ps 2
        await cluster.kill("ps-0")
        await cluster.revive("ps-0")
        await asyncio.wait_for(variables[2].assign_add(np.ones(1)), 60)
        with pytest.raises(ParameterServerLost, match="/job:ps/task:0 at ps-0:1"):
            await coordinator.join()
