"""Values read and assigned at one instant over several ps tasks, whoever is cut off or dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import psync
from local_training import in_step
from memory_cluster import MemoryCluster, running, until
from psync.errors import LockLost
from psync.testing import MemoryNetwork
from psync.wire.messages import LockShards, Update

virtual = pytest.mark.virtual_time

ROWS = 7  # 3, 2 and 2 of them on three ps tasks
LEASE_S = 10.0


def full(value: float) -> np.ndarray:
    return np.full((ROWS, 2), value, np.float32)


@contextlib.asynccontextmanager
async def sharded(
    num_ps: int = 2, network: MemoryNetwork | None = None
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator, Any]]:
    """A cluster, its coordinator, and a variable of ones with a shard on each ps."""
    async with running(MemoryCluster(num_ps, 2, network=network, tapped=True)) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(num_ps))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(full(1), name="v")
            await v.read()
            yield cluster, coordinator, v


def held_locks(cluster: MemoryCluster) -> list[int]:
    """How many locks each ps has given."""
    tasks = [cluster.ps(f"ps-{index}") for index in range(cluster.counts["ps"])]
    return [task.statistics()["locks"]["held"] for task in tasks]


async def read(v: Any) -> np.ndarray:
    value: np.ndarray = await psync.pull(v, consistent=True)
    return value


@virtual
@pytest.mark.promise("reads.atomic-assign")
@pytest.mark.parametrize("seed", range(5))
async def test_an_atomic_assign_is_seen_whole_by_consistent_reads_only(seed: int) -> None:
    async with sharded(3, MemoryNetwork(seed, latency=(0.001, 0.02))) as (cluster, coordinator, v):

        async def writes(first: int) -> None:
            for value in range(first, first + 10):
                await v.assign(np.full((ROWS, 2), value, np.float32), atomic=True)

        mixed = whole = 0
        writing = [coordinator.schedule(writes, (100 * n,)) for n in range(2)]

        async def read_plainly() -> None:
            nonlocal mixed
            while not coordinator.done():
                mixed += len(np.unique(await v.read())) > 1

        reading = asyncio.create_task(read_plainly())
        while not coordinator.done():
            assert len(np.unique(await read(v))) == 1
            whole += 1
        await reading
        await coordinator.fetch(writing)
        assert mixed > 0  # so the reads at one instant had something to be different from
        assert whole > 2
        assert held_locks(cluster) == [0, 0, 0]


@virtual
async def test_an_operator_sees_what_an_update_waits_for() -> None:
    async with sharded() as (cluster, _, v):
        go_on = asyncio.Event()
        with cluster.tap("ps-1").at(LockShards, go_on.wait) as asked:
            reading = asyncio.create_task(read(v))
            await asked.wait()
            writing = asyncio.create_task(v.assign(full(2)))
            task = cluster.ps("ps-0")
            await until(lambda: task.statistics()["waiting"]["lock"])
            assert task.statistics()["waiting"] == {"gate": 0, "lock": 1, "backup": 0, "compute": 0}
            go_on.set()
            await reading
            await writing
            assert not any(task.statistics()["waiting"].values())


@virtual
async def test_a_lock_is_renewed_as_long_as_it_is_needed() -> None:
    async with sharded() as (cluster, _, v):
        go_on = asyncio.Event()
        with cluster.tap("ps-1").at(LockShards, go_on.wait) as asked:
            with cluster.tap("ps-0").hearing(LockShards) as renewed:
                reading = asyncio.create_task(read(v))
                await asked.wait()
                await asyncio.sleep(3 * LEASE_S)
                assert held_locks(cluster) == [1, 0]
            go_on.set()
            assert (await reading == 1).all()
        assert len([each for each in renewed if not each.members]) > 5
        assert cluster.ps("ps-0").statistics()["locks"]["expired"] == 0


@virtual
async def test_a_writer_that_is_cut_off_for_longer_than_its_lease_is_told_so() -> None:
    async with sharded() as (cluster, _, v):
        go_on = asyncio.Event()
        with cluster.tap("ps-1").at(LockShards, go_on.wait) as asked:
            writing = asyncio.create_task(v.assign(full(2), atomic=True))
            await asked.wait()
            await until(lambda: held_locks(cluster)[0])
            cluster.network.partition("chief-0", "ps-0:1")
            await asyncio.sleep(LEASE_S + 1)
            assert held_locks(cluster)[0] == 0
            cluster.network.heal("chief-0", "ps-0:1")
            go_on.set()
            with pytest.raises(LockLost) as caught:
                await writing
        assert 'assign to "v": /job:ps/task:0: lock' in str(caught.value)
        assert "shards on other ps tasks may have been changed" in str(caught.value)
        assert "hint: assign the whole value again" in str(caught.value)
        await v.assign(full(3), atomic=True)
        assert (await read(v) == 3).all()


@virtual
async def test_a_reader_that_is_cancelled_leaves_no_lock_and_a_writer_ends_in_the_background() -> (
    None
):
    async with sharded() as (cluster, _, v):
        go_on = asyncio.Event()
        with cluster.tap("ps-1").at(Update, go_on.wait) as sent:
            holder = asyncio.create_task(v.assign(full(2), atomic=True))
            await sent.wait()
            waiting = [
                asyncio.create_task(read(v)),
                asyncio.create_task(v.assign(full(3), atomic=True)),
            ]
            await asyncio.sleep(1)
            for each in waiting:
                each.cancel()
            assert await asyncio.wait(waiting)
            go_on.set()
            await holder
        await asyncio.sleep(1)
        assert all(each.cancelled() for each in waiting)
        assert (await v.read() == 3).all()
        assert held_locks(cluster) == [0, 0]


@virtual
async def test_a_synchronous_step_waits_for_a_lock_and_is_closed_then() -> None:
    async with sharded() as (cluster, coordinator, v):
        with coordinator.strategy.scope():
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)

        async def step() -> None:
            await v.read()
            await optimizer.apply_gradients([(np.ones((ROWS, 2), np.float32), v)], global_step)

        go_on = asyncio.Event()
        with cluster.tap("ps-1").at(Update, go_on.wait) as sent:
            writing = asyncio.create_task(v.assign(full(5), atomic=True))
            await sent.wait()
            value = coordinator.schedule(step)
            await asyncio.sleep(2)
            assert not value.done()
            assert int(await global_step.read()) == 0
            go_on.set()
            await asyncio.gather(writing, coordinator.join())
        assert (await v.read() == 4).all()


@virtual
@pytest.mark.promise("reads.atomic-assign")
async def test_a_consistent_read_may_take_longer_than_the_answer_to_a_ping() -> None:
    network = MemoryNetwork(chunk=(1 << 16, 1 << 16))
    loop = asyncio.get_running_loop()

    def deliver_slowly(link: Any, direction: str, nbytes: int) -> None:
        if direction == "to_client" and nbytes == 1 << 16:
            link.to_client.stall()
            loop.call_later(1.0, link.to_client.flow)

    async with running(MemoryCluster(1, 1, network=network)) as cluster:
        strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy):
            with strategy.scope():
                v = psync.Variable(np.ones((4, 1 << 18), np.float32), name="v")
            await v.read()
            network.trace_deliveries(deliver_slowly)
            value = await read(v)
            assert loop.time() > 60
            assert (value == 1).all()
            network.trace_deliveries(None)


async def test_the_global_step_is_read_at_one_instant_with_the_variables() -> None:
    async with sharded() as (_, coordinator, v):
        with coordinator.strategy.scope():
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)

        async def step() -> None:
            await v.read()
            await optimizer.apply_gradients([(np.ones((ROWS, 2), np.float32), v)], global_step)

        await in_step(coordinator, step)
        for _ in range(20):
            coordinator.schedule(step)
        seen = []
        while not coordinator.done():
            value, number = await psync.pull((v, global_step), consistent=True)
            seen.append(int(number))
            assert number <= 1 - value.max()  # the step's number is raised when it is applied
        await coordinator.join()
        assert seen == sorted(seen)
