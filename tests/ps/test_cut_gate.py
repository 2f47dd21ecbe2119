"""The gate of each ps: one instant over all of them, whoever is in the middle of an update."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, peers_of
from ps_cluster import OTHER, WORKER, PsCluster, assign, pull, push
from psync.client.ps_client import PsClient
from psync.errors import FencedError, LockLost, UsageError
from psync.ps import cut_gate
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.messages import Admit, AssignLocked, Fence, Gate, LockShards, OpenGate


async def say(client: PsClient, message: Message, ps: int = 0) -> Any:
    return (await client.links[ps].call(lambda peer: message)).message


async def say_all(client: PsClient, message: Message) -> list[Any]:
    return list(
        await asyncio.gather(*(say(client, message, ps) for ps in range(len(client.links))))
    )


async def values(client: PsClient, *variables: Any) -> list[float]:
    return [float(array.reshape(-1)[0]) for array in await pull(client, *variables)]


@pytest.mark.virtual_time
async def test_a_part_whose_client_is_replaced_or_that_was_refused_is_not_waited_for() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(2), 2)
        worker = cluster.client(WORKER)
        await push(worker, [v], [1])
        with pytest.raises(UsageError):
            await assign(worker, v, np.zeros(2), "mul", ordinal=1)
        await say_all(cluster.chief, Gate(1))
        me = (WORKER, endpoint_of(worker.links[1]).incarnation)
        await say(cluster.chief, Admit(1, [(*me, 2)]), 1)  # refused
        missing = asyncio.ensure_future(say(cluster.chief, Admit(1, [(*me, 3)]), 1))
        await settle()
        assert not missing.done()
        await say(cluster.chief, Fence(WORKER, me[1] + 1), 1)
        await missing


@pytest.mark.promise("checkpoints.save-delays-little")
@pytest.mark.virtual_time
async def test_the_gate_opens_with_the_connection_over_which_it_was_shut() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker = cluster.client(WORKER)
        await say(cluster.chief, Gate(1))
        waiting = asyncio.ensure_future(push(worker, [v], [1]))
        await settle()
        assert not waiting.done()
        for peer in peers_of(cluster.chief.links[0]):
            peer.abort()
        await waiting


@pytest.mark.promise("checkpoints.save-delays-little")
async def test_the_gate_opens_after_a_while_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cut_gate, "MAX_SHUT_S", 0.01)
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        await say(cluster.chief, Gate(1))
        await push(cluster.client(WORKER), [v], [1])
        assert "is cancelled" in caplog.text


# What has arrived is applied: another ps may have its part of it.


@pytest.mark.promise("updates.received-is-applied")
@pytest.mark.virtual_time
@pytest.mark.parametrize("waits_for", ["the gate", "a lock", "both"])
async def test_an_update_that_waits_is_applied_although_its_request_is_given_up(
    waits_for: str,
) -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder, worker = cluster.client(OTHER), cluster.client(WORKER)
        if waits_for != "the gate":
            await say(holder, LockShards(1, [v.shards[0].key], 10.0))
        if waits_for != "a lock":
            await say(cluster.chief, Gate(1))
        waiting = asyncio.ensure_future(push(worker, [v], [1]))
        await settle()
        await worker.close()  # as where the session of a worker ends: it tells the ps
        await asyncio.gather(waiting, return_exceptions=True)
        await settle()
        await holder.close()
        await say(cluster.chief, OpenGate(1))
        await settle()
        assert await values(cluster.chief, v) == [-0.5]


@pytest.mark.promise("updates.received-is-applied")
@pytest.mark.virtual_time
async def test_an_update_that_waits_is_applied_although_its_worker_is_replaced() -> None:
    """A cut that admits it waits for it; the second run of its closure changes nothing more."""
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker, second = cluster.client(WORKER, 1000), cluster.client(WORKER, 1001)
        await say(cluster.chief, Gate(1))
        first_run = asyncio.ensure_future(push(worker, [v], [1], closure=7))
        await settle()
        await say(cluster.chief, Fence(WORKER, 1001))
        with pytest.raises(FencedError):
            await push(worker, [v], [8], closure=8)  # it comes after that
        second_run = asyncio.ensure_future(push(second, [v], [2], closure=7))
        await settle()
        assert await values(cluster.chief, v) == [0]
        await say(cluster.chief, Admit(1, [(WORKER, 1000, 1)]))
        assert await values(cluster.chief, v) == [-0.5]
        await say(cluster.chief, OpenGate(1))
        with pytest.raises(FencedError):  # its connection was cut when it was replaced
            await first_run
        assert [answer.outcome for answer in await second_run] == ["duplicate"]
        assert await values(cluster.chief, v) == [-0.5]


@pytest.mark.virtual_time
async def test_an_update_of_no_closure_is_refused_when_its_client_is_replaced_meanwhile() -> None:
    """It may have come twice, and nobody knows any more."""
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        await say(cluster.chief, Gate(1))
        waiting = asyncio.ensure_future(push(cluster.client(WORKER, 1000), [v], [1]))
        await settle()
        await say(cluster.chief, Fence(WORKER, 1001))
        await say(cluster.chief, OpenGate(1))
        with pytest.raises(FencedError):
            await waiting


@pytest.mark.promise("updates.received-is-applied")
@pytest.mark.virtual_time
async def test_a_write_under_a_lock_that_waits_is_done_although_its_holder_dies() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        key = v.shards[0].key
        holder, other = cluster.client(WORKER), cluster.client(OTHER)
        await say(holder, LockShards(1, [key], 10.0))
        await say(cluster.chief, Gate(1))
        (value,) = np.array([[3.0]])
        write = AssignLocked(1, 0, -1, 0, 1, [key], "assign", None, None, 1)
        build = holder.links[0].call(lambda _: write, [value.data.cast("B")], locked=True)
        writing = asyncio.ensure_future(build)
        await settle()
        for peer in peers_of(holder.links[0]):
            peer.abort()
        locking = asyncio.ensure_future(say(other, LockShards(2, [key], 10.0)))
        with pytest.raises(LockLost):  # it asks again
            await writing
        await settle()
        assert not locking.done()
        await say(cluster.chief, OpenGate(1))
        await locking
        assert await values(cluster.chief, v) == [3.0]


@pytest.mark.virtual_time
async def test_one_that_waits_and_is_refused_in_the_end_is_no_error_where_nobody_listens() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker = cluster.client(WORKER, 1000)
        await say(cluster.chief, Gate(1))
        waiting = asyncio.ensure_future(push(worker, [v], [1]))
        await settle()
        await worker.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await say(cluster.chief, Fence(WORKER, 1001))
        await say(cluster.chief, OpenGate(1))  # the loop's exception handler hears of nothing
        await settle()
        assert await values(cluster.chief, v) == [0.0]
