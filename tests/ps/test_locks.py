"""Locks on the shards of a ps: what waits for them, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import locks_of, work_of
from memory_cluster import until
from ps_by_hand import A, PsByHand
from ps_cluster import OTHER, WORKER, PsCluster, assign, hold, is_busy, pull
from psync.client.ps_client import PsClient
from psync.errors import LockLost, UnknownVariableError, UsageError
from psync.ps.locks import MAX_LEASE_S
from psync.specs import VariableSpec
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.messages import (
    AssignLocked,
    LockShards,
    PullLocked,
    RenewLock,
    UnlockShards,
)


async def say(client: PsClient, message: Message, ps: int = 0, **options: Any) -> Any:
    return (await client.links[ps].call(lambda peer: message, **options)).message


async def lock(client: PsClient, *variables: VariableSpec, number: int = 1, lease_s: float = 10):
    members = [shard.key for variable in variables for shard in variable.shards]
    await say(client, LockShards(number, members, lease_s))


async def unlock(client: PsClient, number: int = 1) -> None:
    await say(client, UnlockShards(number))


async def value_of(client: PsClient, variable: VariableSpec) -> float:
    return float((await pull(client, variable))[0].reshape(-1)[0])


async def test_the_holder_may_assign_and_pull_under_its_lock() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder = cluster.client()
        await lock(holder, v)
        keys = [(v.variable_id, 0)]
        message = AssignLocked(1, 1, -1, 0, 9, keys, "assign", lock=1)
        value = memoryview(np.array([3.0]).tobytes())
        answer = await say_body(holder, message, value)
        assert answer.outcome == "accepted"
        received = await holder.links[0].call(lambda peer: PullLocked(9, keys, -1, "", 1))
        assert np.frombuffer(received.segments[0]).tolist() == [3.0]


async def say_body(client: PsClient, message: Message, body: memoryview) -> Any:
    return (await client.links[0].call(lambda peer: message, [body])).message


async def test_who_holds_no_lock_may_not_speak_under_it() -> None:
    async with PsCluster() as cluster:
        v, w = await cluster.create("v", [0.0]), await cluster.create("w", [0.0])
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, v)
        for client, variable, number in ((other, v, 1), (holder, v, 2), (holder, w, 1)):
            keys = [(variable.variable_id, 0)]
            with pytest.raises(LockLost, match=rf"/job:ps/task:0: lock {number} has ended"):
                await say(client, PullLocked(9, keys, -1, "", number))
            with pytest.raises(LockLost):
                await say_body(
                    client,
                    AssignLocked(1, 1, -1, 0, 9, keys, "assign", lock=number),
                    memoryview(bytes(8)),
                )
        assert await value_of(other, v) == 0


@pytest.mark.virtual_time
async def test_a_lock_waits_for_an_update_that_is_under_way() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        task = cluster.ps[0]
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        release = hold(task, v)
        update = asyncio.ensure_future(assign(other, v, [1.0], "add"))
        await until(lambda: work_of(task).waiting)
        locking = asyncio.ensure_future(lock(holder, v))
        await settle()
        assert not locking.done()
        assert is_busy(task, v)()
        release()
        await asyncio.gather(update, locking)
        assert await value_of(holder, v) == 1


@pytest.mark.virtual_time
async def test_a_lock_ends_with_its_connection() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, v)
        update = asyncio.ensure_future(assign(other, v, [1.0]))
        await settle()
        assert not update.done()
        await holder.close()
        await update
        assert cluster.ps[0].statistics()["locks"]["held"] == 0


@pytest.mark.virtual_time
async def test_who_waited_for_a_lock_and_is_gone_holds_nobody_back() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        clients = [cluster.client(f"/job:worker/task:{index}") for index in range(4)]
        holder, gone, gives_up, other = clients
        await lock(holder, v)
        lost = asyncio.ensure_future(lock(gone, v))
        given_up = asyncio.ensure_future(lock(gives_up, v))
        await settle()
        await gone.close()
        given_up.cancel()
        await asyncio.gather(lost, given_up, return_exceptions=True)
        await unlock(holder)
        await assign(other, v, [1.0])
        assert await value_of(other, v) == 1


async def test_a_lock_that_is_not_renewed_ends_with_its_lease() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, v, lease_s=0.01)
        await assign(other, v, [1.0])  # waits for the end of the lease
        assert cluster.ps[0].statistics()["locks"]["expired"] == 1
        with pytest.raises(LockLost, match="its holder was silent for longer than its lease"):
            await say(holder, RenewLock(1))
        await unlock(holder)  # of a lock that has ended: nothing


@pytest.mark.virtual_time
async def test_a_lock_can_be_renewed() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder = cluster.client()
        await lock(holder, v)
        for _ in range(3):
            await asyncio.sleep(7)  # of ten that it is held without a word
            await say(holder, RenewLock(1))
        assert cluster.ps[0].statistics()["locks"] == {"held": 1, "taken": 1, "expired": 0}


async def test_the_same_lock_again_is_a_new_one() -> None:
    async with PsCluster() as cluster:
        v, w = await cluster.create("v", [0.0]), await cluster.create("w", [0.0])
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, v)
        await lock(holder, w)
        await assign(other, v, [1.0])
        with pytest.raises(LockLost):
            await say(holder, PullLocked(9, [(v.variable_id, 0)], -1, "", 1))


def test_what_makes_no_sense_is_refused() -> None:
    ps = PsByHand()
    v = ps.create("v", [0.0])
    for lease_s in (0, -1, MAX_LEASE_S + 1, float("nan")):
        with pytest.raises(UsageError, match="expected a lease above 0 and up to 60 s"):
            ps.ask(A, LockShards(1, [v], lease_s))
    with pytest.raises(UnknownVariableError, match="holds no shard 3"):
        ps.ask(A, LockShards(1, [(v[0], 3)], 1.0))
    assert ps.services.locks.statistics() == {"held": 0, "taken": 0, "expired": 0}


@pytest.mark.virtual_time
async def test_a_lock_whose_turn_comes_as_all_of_them_end_is_not_held() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await lock(holder, v)
        waiting = asyncio.ensure_future(lock(other, v))
        await settle()
        locks_of(cluster.ps[0]).close()
        with pytest.raises(LockLost, match="lock 1 has ended"):
            await waiting
        assert cluster.ps[0].statistics()["locks"] == {"held": 0, "taken": 1, "expired": 0}
