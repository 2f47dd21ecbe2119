"""A ps that is lost comes back: all go back to a snapshot, and training goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import cluster_of, coordinating, event_of, until
from psync.errors import ParameterServerLost
from psync.wire.messages import WriteFrozen
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time


def declared(coordinator: psync.ClusterCoordinator) -> tuple[Any, Any]:
    """A counter with a shard on each ps, and a small one."""
    with coordinator.strategy.scope():
        wide = psync.Variable(np.zeros((2, 3), np.float32), name="wide")
        small = psync.Variable(np.zeros((), np.int64), name="small")
    return wide, small


TWO_SHARDS = psync.FixedShardsPartitioner(2)


async def add(wide: Any, small: Any) -> None:
    await wide.assign_add(np.ones((2, 3), np.float32))
    await small.assign_add(1)


async def run(coordinator: psync.ClusterCoordinator, count: int, *variables: Any) -> list[Any]:
    values = [coordinator.schedule(add, args=variables) for _ in range(count)]
    await coordinator.join()
    return values


async def lose(cluster: Any, name: str) -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.stop(name)
    await cluster.start(name)


@pytest.mark.promise("answers.after-rollback")
@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
async def test_all_go_back_to_the_snapshot_and_training_goes_on(lost: str, tmp_path: Path) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 5, *variables)
        await keep_snapshots(coordinator, tmp_path)
        undone = await run(coordinator, 3, *variables)
        await lose(cluster, lost)
        event = await anext(coordinator.events())
        assert event.lost == (f"/job:ps/task:{lost[-1]}",)
        assert event.timeline == 1
        assert event.closures == tuple(value.closure_id for value in undone)
        assert int(await variables[1].read()) == 5
        await run(coordinator, 4, *variables)
        assert int(await variables[1].read()) == 9
        assert np.array_equal(await variables[0].read(), np.full((2, 3), 9))


@pytest.mark.promise("answers.cancelled-calls")
async def test_a_closure_in_flight_runs_again_and_what_the_snapshot_has_of_it_is_not_doubled(
    tmp_path: Path,
) -> None:
    async def step(wide: Any, small: Any) -> None:
        import memory_cluster

        await wide.assign_add(np.ones((2, 3), np.float32))  # in the snapshot
        await memory_cluster.note("first")
        await memory_cluster.event_of("go on").wait()
        await small.assign_add(1)

    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        value = coordinator.schedule(step, args=variables)
        await event_of("first").wait()
        await keep_snapshots(coordinator, tmp_path)
        await lose(cluster, "ps-1")
        event = await anext(coordinator.events())
        event_of("go on").set()
        await coordinator.join()
        await value
        assert event.closures == ()
        assert int(await variables[1].read()) == 1
        assert np.array_equal(await variables[0].read(), np.ones((2, 3)))


async def push(w: Any, optimizer: Any, step: Any) -> None:
    await optimizer.apply_gradients([(np.ones((2, 3), np.float32), w)], global_step=step)


@pytest.mark.parametrize(
    "wrapped", [lambda sgd: sgd, lambda sgd: psync.SyncReplicasOptimizer(sgd, 1)],
    ids=["asynchronous", "synchronous"],
)  # fmt: skip
async def test_a_learning_rate_that_the_program_has_set_stays(wrapped: Any, tmp_path: Path) -> None:
    async with coordinating(2, 1) as (cluster, coordinator):
        wide, _ = declared(coordinator)
        with coordinator.strategy.scope():
            optimizer = wrapped(psync.optimizers.SGD(0.5))
            step = psync.get_or_create_global_step()

        async def train() -> None:
            coordinator.schedule(push, (wide, optimizer, step))
            await coordinator.join()

        await optimizer.iterations.assign(7)
        await train()
        await keep_snapshots(coordinator, tmp_path)
        await optimizer.set_learning_rate(0.25)
        await train()
        await lose(cluster, "ps-1")
        event = await anext(coordinator.events())
        assert event.to_step < event.from_step + 1 <= 10  # counts, also of a number that was set
        assert optimizer.learning_rate == 0.25
        await train()
        assert np.array_equal(await wide.read(), np.full((2, 3), -0.75))


@pytest.mark.parametrize(
    ("call", "returned", "left"),
    [
        (lambda wide: wide.read(), 1, 1),
        (lambda wide: wide.assign_add(np.ones((2, 3), np.float32)), None, 2),
    ],
    ids=["a pull has values of one timeline", "an update is made once on all its shards"],
)
async def test_a_call_of_the_program_under_way_is_of_the_timeline_that_goes_on(
    call: Any, returned: int | None, left: int, tmp_path: Path
) -> None:
    async with cluster_of(2, 1) as cluster:
        strategy = cluster.strategy(TWO_SHARDS)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            wide, _ = declared(coordinator)
            await wide.assign(np.ones((2, 3), np.float32))
            await keep_snapshots(coordinator, tmp_path)
            await wide.assign(np.full((2, 3), 5, np.float32))
            await cluster.stop("ps-1")
            calling = asyncio.ensure_future(call(wide))
            await asyncio.sleep(0)
            await cluster.start("ps-1")
            result = await calling
            assert returned is None or np.array_equal(result, np.full((2, 3), returned))
            assert np.array_equal(await wide.read(), np.full((2, 3), left))


async def test_a_save_that_a_lost_ps_interrupts_is_begun_anew(tmp_path: Path) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        checkpoint = psync.Checkpoint(wide=variables[0], small=variables[1])
        manager = psync.CheckpointManager(checkpoint, tmp_path)
        await run(coordinator, 2, *variables)
        await manager.save()
        await run(coordinator, 1, *variables)
        died = cluster.kill_at("ps-1", "checkpoint.ps.write")
        saving = asyncio.create_task(manager.save())
        await died.wait()
        await cluster.stop("ps-1")
        await cluster.revive("ps-1")
        path = await saving
        assert [each.name for each in tmp_path.iterdir()].count(path.name) == 1
        await run(coordinator, 1, *variables)
        assert int(await variables[1].read()) == 3  # one was undone
        await checkpoint.restore(path)
        assert int(await variables[1].read()) == 2


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.promise("failures.ps-with-damaged-checkpoint")
@pytest.mark.parametrize("streams", [False, True], ids=["ps tasks read", "the chief sends"])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize(
    "name",
    ["COMMIT", "manifest.json", "ps-00001-of-00002.json", "ps-00001-of-00002.safetensors"],
)
async def test_damaged_checkpoints_are_passed_over_and_named(
    name: str, damage: Any, streams: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if streams:
        monkeypatch.setenv("PSYNC_CHECKPOINT_STREAM", "1")
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        checkpoint = psync.Checkpoint(wide=variables[0], small=variables[1])
        manager = psync.CheckpointManager(checkpoint, tmp_path)
        undone, paths = [], []
        for count in (3, 2, 1, 1):
            undone.append(await run(coordinator, count, *variables))
            paths.append(await manager.save())
        whole = (paths[2] / name).read_bytes()
        damage(paths[2] / name)
        flip(paths[3] / "manifest.json")
        await lose(cluster, "ps-0")
        event = await anext(coordinator.events())
        assert event.closures == tuple(value.closure_id for part in undone[2:] for value in part)
        assert np.array_equal(await variables[0].read(), np.full((2, 3), 5))
        said = [each.message for each in caplog.records if each.levelname == "ERROR"]
        assert said[0].startswith("rollback passes over ckpt-00000004: ")
        assert said[1].startswith("rollback passes over ckpt-00000003: ")
        assert name in said[1]
        # It can be read again, but what it has was undone. The others are damaged now.
        (paths[2] / name).write_bytes(whole)
        for path in paths[:2]:
            flip(path / "manifest.json")
        await lose(cluster, "ps-1")
        with pytest.raises(ParameterServerLost, match="rollback to a checkpoint failed") as caught:
            await run(coordinator, 1, *variables)
        assert all(f"{path}" in caught.value.message for path in paths)
        assert str(caught.value.hint).startswith("psync checkpoint inspect PATH")


async def test_variables_that_the_snapshot_does_not_have_cannot_be_brought_back(
    tmp_path: Path,
) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 1, *variables)
        await keep_snapshots(coordinator, tmp_path)
        with coordinator.strategy.scope():
            late = psync.Variable(np.zeros(3), name="late")
        await late.read()
        await lose(cluster, "ps-1")
        with pytest.raises(ParameterServerLost, match="created after it was saved"):
            await run(coordinator, 1, *variables)


@pytest.mark.promise("failures.ps-in-recovery")
async def test_a_ps_that_dies_while_it_is_recovered_is_recovered(tmp_path: Path) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 2, *variables)
        await keep_snapshots(coordinator, tmp_path)
        for name in ("ps-1", "ps-0", "ps-1"):
            await lose(cluster, name)
        await run(coordinator, 3, *variables)
        assert int(await variables[1].read()) == 5


async def test_what_ends_while_the_first_checkpoint_is_written_is_undone_too(
    tmp_path: Path,
) -> None:
    async with coordinating(1, 2, tapped=True) as (cluster, coordinator):
        variables = declared(coordinator)
        go_on = asyncio.Event()
        with cluster.tap("ps-0").at(WriteFrozen, go_on.wait) as reached:
            saving = asyncio.create_task(keep_snapshots(coordinator, tmp_path))
            await reached.wait()
            undone = await run(coordinator, 3, *variables)
            go_on.set()
            await saving
        await lose(cluster, "ps-0")
        event = await anext(coordinator.events())
        assert event.closures == tuple(value.closure_id for value in undone)


async def test_a_take_of_the_program_under_way_waits_on_where_its_ps_goes_back_alive(
    tmp_path: Path,
) -> None:
    async with coordinating(2, 1) as (cluster, coordinator):
        with coordinator.strategy.scope():
            held = psync.ConditionalAccumulator(np.float64, (2,), name="held")
        await held.apply_grad(np.zeros(2))
        await keep_snapshots(coordinator, tmp_path)
        here, other = f"ps-{held.place.ps}", f"ps-{1 - held.place.ps}"
        taking = asyncio.ensure_future(held.take_grad(2))
        await until(lambda: cluster.ps(here).statistics()["accumulators"]["waiting"])
        await lose(cluster, other)
        await anext(coordinator.events())
        assert not taking.done()
        for _ in range(2):
            await held.apply_grad(np.ones(2))
        assert np.array_equal(await taking, [1, 1]), "an accumulator begins empty"


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
async def test_a_checkpoint_that_is_damaged_is_not_gone_back_to(
    suffix: str, tmp_path: Path
) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        variables = declared(coordinator)
        await run(coordinator, 3, *variables)
        checkpoint = psync.Checkpoint(variables=list(variables))
        path = await psync.CheckpointManager(checkpoint, tmp_path).save()
        for file in path.glob(f"ps-*{suffix}"):
            whole = file.read_bytes()
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        await lose(cluster, "ps-1")
        with pytest.raises(psync.PsyncError, match="the rollback to a checkpoint failed"):
            await run(coordinator, 1, *variables)


async def test_ps_tasks_that_go_back_twice_are_where_they_were_each_time(tmp_path: Path) -> None:
    async with coordinating(2, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros((300_000, 2), np.float32), name="w")
            held = psync.ConditionalAccumulator(np.float32, (2,), name="held")
        sgd = psync.optimizers.SGD(1.0, momentum=0.5)
        events = coordinator.events()

        async def step() -> None:
            await sgd.apply_gradients([(np.ones(w.shape, np.float32), w)])
            await held.apply_grad(np.ones(2, np.float32))

        async def train() -> np.ndarray:
            for _ in range(3):
                coordinator.schedule(step)
            await coordinator.join()
            return np.array(await w.read())

        first = await train()
        await keep_snapshots(coordinator, tmp_path)
        then = await train()
        for name in ("ps-0", "ps-1"):
            await lose(cluster, name)
            await anext(events)
            assert np.array_equal(await w.read(), first)
            assert await held.num_accumulated() == 0, "an accumulator begins empty"
            assert np.array_equal(await train(), then)
