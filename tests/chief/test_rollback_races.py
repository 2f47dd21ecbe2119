"""What else goes on while ps tasks go back to a snapshot, at the moments that are worst."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, cluster_of, coordinating, event_of, running, until
from psync.errors import PsyncError
from psync.testing import settle
from psync.wire.messages import CreateShards, RestoreSnapshot, Update
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time

TWO_SHARDS = psync.FixedShardsPartitioner(2)


async def lose(cluster: MemoryCluster, name: str) -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.stop(name)
    await cluster.start(name)


def once(do: Callable[[], Any]) -> Callable[[], Any]:
    """Do something the first time."""
    first = iter([do])
    return lambda: next(first, lambda: None)()


def counter(coordinator: psync.ClusterCoordinator, shape: tuple[int, ...] = ()) -> Any:
    with coordinator.strategy.scope():
        return psync.Variable(np.zeros(shape, np.int64), name="counter")


async def test_a_ps_that_dies_once_it_has_gone_back_is_recovered_too(tmp_path: Path) -> None:
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        v = counter(coordinator)
        await v.assign_add(1)
        await keep_snapshots(coordinator, tmp_path)

        async def another() -> None:
            await lose(cluster, "ps-0")
            await asyncio.sleep(5)  # until that is known

        await lose(cluster, "ps-1")
        with cluster.tap("ps-1").at(RestoreSnapshot, once(another)):
            event = await anext(coordinator.events())
        assert set(event.lost) == {"/job:ps/task:0", "/job:ps/task:1"}
        await v.assign_add(1)
        assert int(await v.read()) == 2


async def test_an_update_answered_while_ps_tasks_go_back_is_made_again(tmp_path: Path) -> None:
    """The ps that answers it has gone back already; another one has not."""
    async with coordinating(2, 1, tapped=True) as (cluster, coordinator):
        v = counter(coordinator)
        await v.assign_add(1)
        await keep_snapshots(coordinator, tmp_path)
        go_on = asyncio.Event()
        with cluster.tap("ps-0").at(Update, go_on.wait) as sent:
            adding = asyncio.ensure_future(v.assign_add(1))
            await sent.wait()

            async def answer() -> None:
                await until(lambda: cluster.ps("ps-0").statistics()["snapshot"]["timeline"] == 1)
                go_on.set()
                await settle()

            await lose(cluster, "ps-1")
            with cluster.tap("ps-1").at(RestoreSnapshot, once(answer)):
                await adding
        assert int(await v.read()) == 2


async def test_an_update_that_is_made_again_outlives_lost_connections_as_before(
    tmp_path: Path,
) -> None:
    async with running(MemoryCluster(2, 1, tapped=True)) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            v = counter(coordinator, (2,))
            await v.assign_add([1, 1])
            await keep_snapshots(coordinator, tmp_path)
            sent: list[str] = []

            def cut() -> None:
                sent.append("")
                if len(sent) in (1, 3):  # what it sends first, and first after the rollback
                    cluster.network.cut("ps-0:1")

            with cluster.tap("ps-0").at(Update, cut):
                with cluster.tap("ps-1").at(Update, lambda: False) as lost:
                    adding = asyncio.ensure_future(v.assign_add([1, 1]))
                    await lost.wait()
                await until(lambda: len(sent) == 2)
                await lose(cluster, "ps-1")
                await adding
            assert len(sent) == 4
            assert (await v.read()).tolist() == [2, 2]


async def test_who_closes_during_a_recovery_does_not_wait_for_it(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            v = counter(coordinator, (2,))
            await v.assign_add([1, 1])
            await keep_snapshots(coordinator, tmp_path)
            await cluster.stop("ps-1")
            adding = asyncio.ensure_future(v.assign_add([1, 1]))
            await asyncio.sleep(5)  # it is rolled back, and that waits for the ps
            began = loop.time()
        assert loop.time() - began < 1
        with pytest.raises(PsyncError):
            await adding


async def test_variables_that_are_being_created_are_created(tmp_path: Path) -> None:
    async with running(MemoryCluster(2, 1, tapped=True)) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            v = counter(coordinator, (2,))
            await v.assign_add([1, 1])
            await keep_snapshots(coordinator, tmp_path)
            with coordinator.strategy.scope():
                late = psync.Variable(np.ones(2), name="late")
            with cluster.tap("ps-1").at(CreateShards, lambda: False) as asked:
                reading = asyncio.ensure_future(late.read())
                await asked.wait()
            await lose(cluster, "ps-1")
            assert (await reading).tolist() == [1, 1]
            assert (await v.read()).tolist() == [1, 1]


async def test_a_closure_whose_stale_gradient_was_dropped_is_not_undone_for_that(
    tmp_path: Path,
) -> None:
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros((), np.float32), name="w")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1, 1)

        async def step(late: bool) -> str:
            import memory_cluster

            if late:
                await w.read()  # from here on its gradient is of this step
                await memory_cluster.note("read")
                await memory_cluster.event_of("go on").wait()
            result = await optimizer.apply_gradients([(np.float32(1), w)], global_step)
            return str(result.outcome.value)

        await keep_snapshots(coordinator, tmp_path)  # from here on it is noted what has ended
        late = coordinator.schedule(step, args=(True,))
        await event_of("read").wait()
        assert await coordinator.schedule(step, args=(False,)) == "accepted"
        event_of("go on").set()
        assert await late == "stale"
        await keep_snapshots(coordinator, tmp_path)
        await lose(cluster, "ps-0")
        assert (await anext(coordinator.events())).closures == ()
