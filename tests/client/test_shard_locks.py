"""Values read and assigned at one instant over several ps tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from inside import locks_of
from local_training import training
from memory_cluster import until
from ps_cluster import OTHER, WORKER, PsCluster, heard, pull
from psync.client import shard_locks
from psync.client.ps_client import PsClient
from psync.client.shard_locks import LEASE_S, assign_at_once, pull_at_once
from psync.errors import LockLost
from psync.specs import VariableSpec
from psync.testing.sabotage import FailpointError, Failpoints
from psync.wire.messages import LockShards, RenewLock, UnlockShards

ROWS = 7  # 3, 2 and 2 of them on three ps tasks

virtual = pytest.mark.virtual_time


def full(value: float) -> np.ndarray:
    return np.full((ROWS, 2), value, np.float32)


async def write(client: PsClient, variable: VariableSpec, value: float, ordinal: int = 0) -> None:
    plan = client.plan((variable,))
    await assign_at_once(client, plan, [full(value)], op="assign", closure=-1, ordinal=ordinal)


async def read(client: PsClient, *variables: VariableSpec) -> list[np.ndarray]:
    return await pull_at_once(client, client.plan(variables))


def held_locks(cluster: PsCluster) -> list[int]:
    return [task.statistics()["locks"]["held"] for task in cluster.ps]


async def lock(client: PsClient, ps: int, *variables: VariableSpec, lease_s: float = 60) -> None:
    """Hold the shards of variables on one ps, without renewing it."""
    members = [shard.key for variable in variables for shard in variable.shards if shard.ps == ps]
    await client.links[ps].call(lambda peer: LockShards(99, members, lease_s))


async def unlock(client: PsClient, ps: int) -> None:
    await client.links[ps].call(lambda peer: UnlockShards(99))


# --- one instant ------------------------------------------------------------------------------


@pytest.mark.promise("reads.atomic-assign")
@virtual
@pytest.mark.parametrize("seed", range(5))
async def test_an_atomic_assign_is_seen_whole_by_consistent_reads_only(seed: int) -> None:
    async with PsCluster(3, seed=seed, latency=(0.001, 0.02)) as cluster:
        v = await cluster.create("v", full(0), shards=3)
        writers = [cluster.client(f"/job:worker/task:{index}") for index in range(2)]
        reader = cluster.client("/job:worker/task:9")
        writing = True

        async def writes(client: PsClient, first: int) -> None:
            for value in range(first, first + 10):
                await write(client, v, value, ordinal=value)

        async def plain_reads() -> int:
            mixed = 0
            while writing:
                (value,) = await pull(reader, v)
                mixed += len(np.unique(value)) > 1
            return mixed

        async def consistent_reads() -> int:
            count = 0
            while writing:
                (value,) = await read(reader, v)
                assert len(np.unique(value)) == 1
                count += 1
            return count

        readings = [asyncio.ensure_future(plain_reads()), asyncio.ensure_future(consistent_reads())]
        await asyncio.gather(*(writes(client, 100 * n) for n, client in enumerate(writers)))
        writing = False
        mixed, whole = await asyncio.gather(*readings)
        assert mixed > 0  # so the reads at one instant had something to be different from
        assert whole > 2
        assert held_locks(cluster) == [0, 0, 0]


async def test_one_shard_needs_no_lock() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1))
        asked = heard(cluster.ps[0], LockShards)
        await write(cluster.chief, v, 2)
        assert (await read(cluster.chief, v))[0][0, 0] == 2
        assert asked == []


# --- leases and losses ------------------------------------------------------------------------


@virtual
async def test_a_lock_is_renewed_as_long_as_it_is_needed() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        holder, reader = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, 1, v)
        renewed = heard(cluster.ps[0], RenewLock)
        reading = asyncio.ensure_future(read(reader, v))
        await asyncio.sleep(3 * LEASE_S)  # it has its lock on ps 0, and waits for that on ps 1
        assert held_locks(cluster) == [1, 2]
        assert len(renewed) > 5
        await unlock(holder, 1)
        assert (await reading)[0].tolist() == full(1).tolist()
        assert cluster.ps[0].statistics()["locks"]["expired"] == 0


@virtual
async def test_a_writer_that_is_cut_off_for_longer_than_its_lease_is_told_so() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        other = cluster.client(OTHER)
        writer = cluster.client(WORKER, host="far")
        await pull(writer, v)
        await lock(other, 1, v)
        writing = asyncio.ensure_future(write(writer, v, 2))
        await until(lambda: held_locks(cluster) == [1, 2])
        cluster.network.partition("far")
        await asyncio.sleep(LEASE_S + 1)
        assert held_locks(cluster) == [0, 2]  # what is asked for has no lease yet
        cluster.network.heal("far")
        await unlock(other, 1)
        with pytest.raises(LockLost) as caught:
            await writing
        assert 'assign to "v": /job:ps/task:0: lock' in str(caught.value)
        assert "shards on other ps tasks may have been changed" in str(caught.value)
        assert "hint: assign the whole value again" in str(caught.value)
        await write(writer, v, 3, ordinal=2)
        assert (await read(other, v))[0].tolist() == full(3).tolist()


@virtual
async def test_a_reader_whose_connection_is_lost_reads_again() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        other = cluster.client(OTHER)
        reader = cluster.client(WORKER, host="far")
        await lock(other, 1, v)
        reading = asyncio.ensure_future(read(reader, v))
        await until(lambda: held_locks(cluster) == [1, 2])
        for link in cluster.network.links("ps0:1"):
            if "far" in repr(link):
                link.cut()
        await until(lambda: held_locks(cluster)[0] == 0)
        await unlock(other, 1)
        assert (await reading)[0].tolist() == full(1).tolist()
        assert held_locks(cluster) == [0, 0]


@virtual
async def test_a_reader_that_loses_its_locks_again_and_again_gives_up() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        reader = cluster.client(WORKER)
        attempts = heard(cluster.ps[0], LockShards)
        for task in cluster.ps:
            locks = locks_of(task)
            drop = locks._drop
            check = locks.check

            def lost(*arguments: Any, check: Any = check, drop: Any = drop) -> None:
                drop((WORKER, arguments[0][1], arguments[1].lock))
                check(*arguments)

            locks.check = lost  # as if each lock ended just before it is needed
        with pytest.raises(LockLost, match="has ended"):
            await read(reader, v)
        assert len(attempts) == shard_locks.READ_ATTEMPTS


@virtual
async def test_a_reader_that_is_cancelled_leaves_no_lock() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        holder, reader = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, 1, v)
        reading = asyncio.ensure_future(read(reader, v))
        await until(lambda: held_locks(cluster) == [1, 2])
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await reader.outgoing.drain()
        assert held_locks(cluster) == [0, 1]


@virtual
async def test_a_writer_that_is_cancelled_ends_in_the_background() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        holder, writer = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, 1, v)
        writing = asyncio.ensure_future(write(writer, v, 2))
        await until(lambda: held_locks(cluster) == [1, 2])
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await unlock(holder, 1)
        await writer.outgoing.drain()
        assert (await pull(holder, v))[0].tolist() == full(2).tolist()
        assert held_locks(cluster) == [0, 0]


@virtual
async def test_a_writer_that_dies_half_way_holds_nobody_up() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", full(1), shards=2)
        other = cluster.client(OTHER)
        writer = cluster.client(failpoints=Failpoints("worker.push.between_ps=error"))
        with pytest.raises(FailpointError):
            await write(writer, v, 2)
        await writer.close()
        # Its first ps has the new value and the second the old one: what a death there leaves.
        assert sorted(np.unique((await read(other, v))[0])) == [1, 2]
        await write(other, v, 3)
        assert (await read(other, v))[0].tolist() == full(3).tolist()


# --- with all else ----------------------------------------------------------------------------


@pytest.mark.parametrize("locked", ["w", "global_step"])
async def test_a_synchronous_step_waits_for_a_lock_and_is_closed_then(locked: str) -> None:
    async with training(2, 1, lambda shape, dtype: [2]) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(4, np.float32), name="w")
            step_variable = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)
        await w.read()
        client = strategy._runtime.ps
        waiting = w if locked == "w" else step_variable
        ps = waiting.spec.shards[-1].ps
        await lock(client, ps, waiting.spec)

        async def step() -> None:
            await w.read()
            await optimizer.apply_gradients([(np.ones(4, np.float32), w)], step_variable)

        value = coordinator.schedule(step)
        elsewhere = 0 if ps else -1  # an element of w on the ps without the lock
        while not value.done() and (await w.read())[elsewhere] == 0:  # until it has done its part
            pass
        for _ in range(100):  # longer than all else would take
            assert (await waiting.read()).reshape(-1)[-1] == 0
        assert not value.done()
        await unlock(client, ps)
        await coordinator.join()
        assert (await w.read()).tolist() == [-1] * 4
        assert await step_variable.read() == 1


async def test_the_global_step_is_read_at_one_instant_with_the_variables() -> None:
    async with training(2, 1, lambda shape, dtype: [2]) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(4, np.float32), name="w")
            step_variable = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1)

        async def step() -> None:
            await w.read()
            await optimizer.apply_gradients([(np.ones(4, np.float32), w)], step_variable)

        for _ in range(20):
            coordinator.schedule(step)
        seen = []
        while not coordinator.done():
            value, number = await psync.pull((w, step_variable), consistent=True)
            seen.append(int(number))
            assert number <= -value.max()  # the step's number is raised when it is applied
        await coordinator.join()
        assert seen == sorted(seen)
