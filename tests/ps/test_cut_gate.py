"""The gate of each ps: one instant over all of them, whoever is in the middle of an update."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import endpoint_of, ledger_of, peers_of
from ps_cluster import OTHER, WORKER, PsCluster, assign, hold, pull, push, until
from psync.client.ps_client import PsClient
from psync.errors import CutLost, FencedError, LockLost, UsageError
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
async def test_updates_wait_at_a_shut_gate_and_pulls_do_not() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker = cluster.client(WORKER)
        assert (await say(cluster.chief, Gate(1))).others == []
        waiting = [
            asyncio.ensure_future(push(worker, [v], [1])),
            asyncio.ensure_future(assign(worker, v, [5.0], "add", ordinal=1)),
        ]
        await settle()
        assert await values(worker, v) == [0]
        assert not any(update.done() for update in waiting)
        await say(cluster.chief, OpenGate(1))
        await asyncio.gather(*waiting)
        assert await values(worker, v) == [4.5]


@pytest.mark.virtual_time
async def test_an_update_that_began_before_has_all_its_parts_let_through() -> None:
    """One ps has it, the other not yet: the cut must have both or none."""
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(2), 2)
        worker, other = cluster.client(WORKER), cluster.client(OTHER)
        release = hold(cluster.ps[1], _shard_as_variable(v, 1))  # its part there is under way
        update = asyncio.ensure_future(push(worker, [v], [1]))
        await until(lambda: ledger_of(cluster.ps[0]).others())
        shut = asyncio.ensure_future(say_all(cluster.chief, Gate(1)))
        await settle()
        late = asyncio.ensure_future(push(other, [v], [1]))
        await settle()
        assert not shut.done()  # ps 1 is in the middle of it
        release()
        first, second = await shut
        assert [(ps, task) for ps, task, *_ in first.others] == [(1, WORKER)]
        wanted = [tuple(part[1:]) for part in first.others]
        await say(cluster.chief, Admit(1, wanted), 1)  # type: ignore[arg-type]
        wanted = [tuple(part[1:]) for part in second.others]
        await say(cluster.chief, Admit(1, wanted), 0)  # type: ignore[arg-type]
        await update
        assert [float(x) for x in (await pull(other, v))[0]] == [-0.5, -0.5]
        assert not late.done()
        await say_all(cluster.chief, OpenGate(1))
        await late
        assert [float(x) for x in (await pull(other, v))[0]] == [-1.0, -1.0]


def _shard_as_variable(spec: Any, index: int) -> Any:
    class Only:
        variable_id = spec.variable_id
        shards = (spec.shards[index],)

    return Only


async def test_a_part_that_has_not_come_yet_is_waited_for() -> None:
    async with PsCluster(2) as cluster:
        v = await cluster.create("v", np.zeros(2), 2)
        worker = cluster.client(WORKER)
        await say(cluster.chief, Gate(1), 1)  # ps 1 is shut before, ps 0 after its part came
        update = asyncio.ensure_future(push(worker, [v], [1]))
        await until(lambda: ledger_of(cluster.ps[0]).others())
        ((ps, *part),) = (await say(cluster.chief, Gate(1), 0)).others
        assert ps == 1
        assert not update.done()
        await say(cluster.chief, Admit(1, [tuple(part)]), 1)  # type: ignore[list-item]
        await update
        await say_all(cluster.chief, OpenGate(1))


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


@pytest.mark.virtual_time
async def test_the_gate_opens_when_the_task_ends_or_a_newer_coordinator_comes() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker = cluster.client(WORKER, 99)
        await say(cluster.chief, Gate(1))
        waiting = asyncio.ensure_future(push(worker, [v], [1]))
        await settle()
        newer = cluster.client("/job:chief/task:0", 200)
        await cluster.attach(newer, 200)
        await asyncio.gather(waiting, return_exceptions=True)  # it ends where it began
        assert "gate" not in "".join(cluster.ps[0].describe())


async def test_a_gate_that_was_opened_is_not_shut_by_what_comes_late() -> None:
    """What opens it goes another way, and may be faster."""
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        worker = cluster.client(WORKER)
        await say(cluster.chief, OpenGate(3))
        with pytest.raises(CutLost, match="cut 3 is over"):
            await say(cluster.chief, Gate(3))
        await push(worker, [v], [1])
        await say(cluster.chief, Gate(4))
        await say(cluster.chief, OpenGate(4))


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
        assert [answer.outcome for answer in await first_run] == ["accepted"]
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
