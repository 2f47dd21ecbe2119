"""What else goes on while ps tasks go back to a snapshot, at the moments that are worst."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from inside import chief_of, handlers_of, ledger_of
from memory_cluster import MemoryCluster, cluster_of, coordinating, event_of
from ps_cluster import hold, until
from psync.errors import PsyncError
from psync.net.connection import Handler, Request
from psync.ps_task import PsTask
from psync.testing import settle
from psync.training import checkpoint
from psync.wire.codec import Message
from psync.wire.messages import CreateShards, RestoreSnapshot
from snapshot_store import keep_snapshots

pytestmark = pytest.mark.virtual_time

TWO_SHARDS = psync.FixedShardsPartitioner(2)


async def lose(cluster: MemoryCluster, name: str) -> None:
    """As kill -9 and a launcher that starts it again."""
    await cluster.stop(name)
    await cluster.start(name)


def before(
    cluster: MemoryCluster, name: str, kind: type[Message], first: Callable[[], Awaitable[object]]
) -> None:
    """Let something happen before a ps serves the next message of a kind."""
    handlers = handlers_of(cluster.tasks[name])
    handler = handlers[kind]

    async def run(request: Request[Any]) -> None:
        peer, message, body = request.peer, request.message, request.segments
        handlers[kind] = handler
        await first()
        answer = handler.run(peer, message, body)
        return await answer if isinstance(answer, Awaitable) else answer

    handlers[kind] = Handler(run, handler.prepare)


def counter(coordinator: psync.ClusterCoordinator, shape: tuple[int, ...] = ()) -> Any:
    with coordinator.strategy.scope():
        return psync.Variable(np.zeros(shape, np.int64), name="counter")


async def test_a_ps_that_dies_once_it_has_gone_back_is_recovered_too(tmp_path: Path) -> None:
    async with coordinating(2, 1) as (cluster, coordinator):
        v = counter(coordinator)
        await v.assign_add(1)
        await keep_snapshots(coordinator, tmp_path)
        link = chief_of(coordinator).links.ps.links[0]

        async def another() -> None:
            await lose(cluster, "ps-0")
            await until(lambda: link.lost is not None)

        await lose(cluster, "ps-1")
        before(cluster, "ps-1", RestoreSnapshot, another)
        event = await anext(coordinator.events())
        assert set(event.lost) == {"/job:ps/task:0", "/job:ps/task:1"}
        await v.assign_add(1)
        assert int(await v.read()) == 2


async def test_an_update_answered_while_ps_tasks_go_back_is_made_again(tmp_path: Path) -> None:
    """The ps that answers it has gone back already; another one has not."""
    async with coordinating(2, 1) as (cluster, coordinator):
        v = counter(coordinator)
        await v.assign_add(1)
        await keep_snapshots(coordinator, tmp_path)
        ps = cluster.tasks["ps-0"]
        assert isinstance(ps, PsTask)
        let_go = hold(ps, v.spec)
        adding = asyncio.ensure_future(v.assign_add(1))
        await until(lambda: ledger_of(ps).statistics().fresh == 2)

        async def answer() -> None:
            await until(lambda: ps.statistics()["snapshot"]["timeline"] == 1)
            let_go()
            await settle()

        await lose(cluster, "ps-1")
        before(cluster, "ps-1", RestoreSnapshot, answer)
        await adding
        assert int(await v.read()) == 2


async def test_who_closes_during_a_recovery_does_not_wait_for_it(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            v = counter(coordinator, (2,))
            await v.assign_add([1, 1])
            await keep_snapshots(coordinator, tmp_path)
            await cluster.stop("ps-1")
            adding = asyncio.ensure_future(v.assign_add([1, 1]))
            await asyncio.sleep(5)
            assert chief_of(coordinator).recovery.is_rolling_back
            began = loop.time()
        assert loop.time() - began < 1
        with pytest.raises(PsyncError):
            await adding


async def test_variables_that_are_being_created_are_created(tmp_path: Path) -> None:
    async with cluster_of(2, 1) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(TWO_SHARDS)) as coordinator:
            v = counter(coordinator, (2,))
            await v.assign_add([1, 1])
            await keep_snapshots(coordinator, tmp_path)
            with coordinator.strategy.scope():
                late = psync.Variable(np.ones(2), name="late")
            asked = asyncio.Event()

            async def asked_in_vain() -> None:
                asked.set()
                await asyncio.Event().wait()

            before(cluster, "ps-1", CreateShards, asked_in_vain)
            reading = asyncio.ensure_future(late.read())
            await asked.wait()
            await lose(cluster, "ps-1")
            assert (await reading).tolist() == [1, 1]
            assert (await v.read()).tolist() == [1, 1]


async def test_what_was_undone_while_it_was_saved_is_not_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(v: Any) -> None:
        await v.assign_add(1)

    async with coordinating(2, 1) as (cluster, coordinator):
        v = counter(coordinator)
        manager = psync.CheckpointManager(psync.Checkpoint(v=v), tmp_path)
        await manager.save()
        undone = coordinator.schedule(step, args=(v,))
        await coordinator.join()
        write, events = checkpoint.write_cut, coordinator.events()

        async def then_lose_a_ps(*arguments: Any, **options: Any) -> None:
            await write(*arguments, **options)
            monkeypatch.setattr(checkpoint, "write_cut", write)
            await lose(cluster, "ps-1")
            assert (await anext(events)).closures == (undone.closure_id,)

        monkeypatch.setattr(checkpoint, "write_cut", then_lose_a_ps)
        path = await manager.save()
        assert manager.checkpoints[1:] == [path]
        await lose(cluster, "ps-0")
        assert (await anext(events)).closures == ()
        assert int(await v.read()) == 0


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
