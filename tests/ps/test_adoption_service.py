"""What has arrived is applied, what comes later is refused, and the rest is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from inside import points_of
from ps_cluster import (
    CHIEF,
    CONFIG,
    OTHER,
    PsCluster,
    assign,
    hold,
    is_busy,
    pull,
    push,
    until,
)
from psync.client.ps_client import PsClient
from psync.errors import FencedError, UnknownVariableError
from psync.net.endpoint import Endpoint
from psync.numerics.memory import BlockPool
from psync.ps_task import PsTask
from psync.store.reattach import Holding, Orders
from psync.testing import settle
from psync.wire.codec import Message
from psync.wire.messages import (
    AdoptShards,
    AttachPs,
    DefineOptimizer,
    DescribeShards,
    LockShards,
    SetOptimizer,
    ShardsDescribed,
)
from sync_cluster import SyncCluster

LARGE = 2 << 20  # elements: its updates take several turns of the loop


async def say(client: PsClient, message: Message, segments: Any = (), ps: int = 0) -> Any:
    return await client.links[ps].call(lambda _: message, segments)


async def attach(client: PsClient, number: int, *, keep: bool = True, ps: int = 0) -> None:
    addresses = [link.address for link in client.links]
    await say(client, AttachPs(number, addresses, 15.0, keep), ps=ps)


async def held(client: PsClient, ps: int = 0) -> Holding:
    received = await say(client, DescribeShards(), ps=ps)
    assert isinstance(received.message, ShardsDescribed)
    return Holding.from_bytes(b"".join(received.segments))


async def test_what_was_there_is_set_aside_described_and_adopted() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", np.full(3, 2.0, np.float32))
        await push(cluster.client(), (v,), (1.0,))
        newer = cluster.client(CHIEF, 1 << 40)
        await attach(newer, 1 << 40)
        with pytest.raises(UnknownVariableError):
            await pull(newer, v)
        holding = await held(newer)
        assert holding.lineage == 100
        assert [shard.name for shard in holding.shards] == ["v"]
        (optimizer,) = holding.optimizers
        assert (optimizer.identity, optimizer.step) == ((100, 1), 1)
        orders = Orders((("v", 0, v.variable_id),), (), ((100, 1, 1),)).to_bytes()
        for _ in range(2):  # a repetition changes nothing
            await say(newer, AdoptShards(0, True), [orders])
        assert (await pull(newer, v))[0].tolist() == [1.5] * 3
        assert await held(newer) == Holding(100)


async def test_without_keeping_it_is_dropped() -> None:
    async with PsCluster() as cluster:
        await cluster.create("v", np.ones(3, np.float32))
        await attach(cluster.client(CHIEF, 101), 101, keep=True)
        newer = cluster.client(CHIEF, 102)
        await attach(newer, 102, keep=False)
        assert await held(newer) == Holding(102)


async def test_a_ps_that_no_program_has_begun_on_says_so_until_one_has() -> None:
    async with PsCluster() as cluster:
        empty = PsTask(cluster.platform(), 0, "empty:1")
        await empty.start()
        platform = cluster.platform()
        endpoint = Endpoint(platform, CHIEF, 101, {})
        chief = PsClient(endpoint, ["empty:1"], BlockPool())
        await attach(chief, 101)
        assert await held(chief) == Holding(0)
        await say(chief, AdoptShards(101, True), [Orders().to_bytes()])
        assert await held(chief) == Holding(101)
        await chief.close()
        await endpoint.close()
        await empty.close()


async def test_an_update_that_has_begun_is_waited_for() -> None:
    async with PsCluster(chunk=(1 << 20, 1 << 20)) as cluster:
        v = await cluster.create("v", np.zeros(LARGE, np.float32))
        pushing = asyncio.create_task(push(cluster.client(), (v,), (2.0,)))
        await until(is_busy(cluster.ps[0], v))
        newer = cluster.client(CHIEF, 1 << 40)
        await attach(newer, 1 << 40)
        await say(newer, AdoptShards(0, True), [Orders((("v", 0, v.variable_id),)).to_bytes()])
        (value,) = await pull(newer, v)
        assert (value == -1.0).all()
        assert [answer.outcome for answer in await pushing] == ["accepted"]


@pytest.mark.virtual_time
async def test_an_update_that_waits_for_its_turn_is_applied() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        holder, other = cluster.client(), cluster.client(OTHER)
        await say(holder, LockShards(1, [v.shards[0].key], 10.0))
        pushing = asyncio.create_task(push(other, (v,), (1.0,)))
        await settle()
        newer = cluster.client(CHIEF, 1 << 40)
        await attach(newer, 1 << 40)
        assert [answer.outcome for answer in await pushing] == ["accepted"]
        await say(newer, AdoptShards(0, True), [Orders((("v", 0, v.variable_id),)).to_bytes()])
        assert (await pull(newer, v))[0].tolist() == [-0.5]


@pytest.mark.virtual_time
async def test_an_update_for_a_shard_that_is_busy_is_refused_or_waited_for() -> None:
    """The same one comes twice, as after a lost connection: the second waits for the first."""
    async with PsCluster() as cluster:
        v = await cluster.create("v", [0.0])
        release = hold(cluster.ps[0], v)
        pushing = asyncio.create_task(push(cluster.client(), (v,), (1.0,)))
        await settle()
        newer = cluster.client(CHIEF, 1 << 40)
        attaching = asyncio.create_task(attach(newer, 1 << 40))
        again = asyncio.create_task(attach(newer, 1 << 40))
        await settle()
        assert not attaching.done()
        assert not again.done()
        release()
        await asyncio.gather(attaching, again)
        assert [answer.outcome for answer in await pushing] == ["accepted"]
        await say(newer, AdoptShards(0, True), [Orders((("v", 0, v.variable_id),)).to_bytes()])
        assert (await pull(newer, v))[0].tolist() == [-0.5]


@pytest.mark.parametrize("num_ps", [1, 2])
async def test_what_the_replaced_chief_and_its_workers_send_is_refused_everywhere(
    num_ps: int,
) -> None:
    async with PsCluster(num_ps) as cluster:
        v = await cluster.create("v", np.zeros(4, np.float32), shards=num_ps)
        worker = cluster.client()
        await push(worker, (v,), (0.0,))
        newer = cluster.client(CHIEF, 1 << 40)
        for ps in range(num_ps):
            await attach(newer, 1 << 40, ps=ps)
            orders = Orders((("v", ps, v.variable_id),), (), ((100, 1, 1),)).to_bytes()
            await say(newer, AdoptShards(0, True), [orders], ps=ps)
        for client in (cluster.chief, worker):
            for message in (
                LockShards(1, [v.shards[0].key], 10.0),
                DefineOptimizer(9, CONFIG),
                SetOptimizer(1, CONFIG, 5, None),
            ):
                with pytest.raises(FencedError):
                    await say(client, message)
            with pytest.raises(FencedError):
                await push(client, (v,), (1.0,))
            with pytest.raises(FencedError):
                await assign(client, v, np.ones(4, np.float32))
            with pytest.raises(FencedError):
                await pull(client, v)
        for message in (DescribeShards(), AdoptShards(0, True)):
            with pytest.raises(FencedError, match="not the coordinator that it serves"):
                await say(cluster.chief, message, [Orders().to_bytes()])
        assert (await pull(newer, v))[0].tolist() == [0.0] * 4


@pytest.mark.virtual_time
async def test_coordinators_that_come_while_another_one_is_waited_for() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [3.0])
        release = hold(cluster.ps[0], v)
        pushing = asyncio.create_task(push(cluster.client(), (v,), (1.0,)))
        await settle()
        second, third = cluster.client(CHIEF, 101), cluster.client(CHIEF, 102)
        first_attaching = asyncio.create_task(attach(second, 101))
        await settle()
        second_attaching = asyncio.create_task(attach(third, 102))
        await settle()
        assert not second_attaching.done()
        release()
        await asyncio.gather(first_attaching, second_attaching, pushing)
        assert [shard.name for shard in (await held(third)).shards] == ["v"]


@pytest.mark.virtual_time
async def test_one_that_keeps_nothing_does_not_wait() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [3.0])
        release = hold(cluster.ps[0], v)
        pushing = asyncio.create_task(push(cluster.client(), (v,), (1.0,)))
        await settle()
        second, third = cluster.client(CHIEF, 101), cluster.client(CHIEF, 102)
        waiting = asyncio.create_task(attach(second, 101))
        await settle()
        await attach(third, 102, keep=False)
        with pytest.raises(FencedError):
            await waiting
        release()
        await pushing
        await settle()
        assert await held(third) == Holding(102)


@pytest.mark.virtual_time
async def test_a_ps_that_ends_waits_for_nobody() -> None:
    async with PsCluster() as cluster:
        v = await cluster.create("v", [3.0])
        release = hold(cluster.ps[0], v)
        pushing = asyncio.create_task(push(cluster.client(), (v,), (1.0,)))
        await settle()
        waiting = asyncio.create_task(attach(cluster.client(CHIEF, 101), 101))
        await settle()
        closing = asyncio.create_task(cluster.ps[0].close())
        await settle()
        release()
        await closing
        await pushing
        waiting.cancel()
        await asyncio.wait((waiting,))


@pytest.mark.virtual_time
@pytest.mark.parametrize("step_ps", [0, 1])
async def test_a_step_that_ps_0_has_decided_is_applied_everywhere_first(step_ps: int) -> None:
    """ps 1 cannot be reached when the next chief comes: ps 0 waits, with that chief."""
    async with SyncCluster(2, step_ps=step_ps) as cluster:
        w = await cluster.create("w", np.ones((2, 3), np.float32), shards=2)
        points = points_of(cluster.ps[0])
        points.arm("ps0.step.decided", lambda: cluster.network.partition("ps1:1"))
        pushes = [
            asyncio.create_task(cluster.replica(index).push((w,), (1.0,))) for index in range(2)
        ]
        await settle()
        number = 1 << 40
        chief = cluster.client(CHIEF, number)
        attaching = asyncio.create_task(attach(chief, number))
        for answer in await asyncio.gather(*pushes, return_exceptions=True):
            assert isinstance(answer, FencedError)
        await settle()
        assert not attaching.done()
        cluster.network.heal("ps1:1")
        await attaching
        await attach(chief, number, ps=1)
        for ps in range(2):
            shards = tuple(
                (spec.name, shard.index, spec.variable_id)
                for spec in (w, cluster.step)
                for shard in spec.shards
                if shard.ps == ps
            )
            await say(chief, AdoptShards(0, True), [Orders(shards).to_bytes()], ps=ps)
        value, step = await pull(chief, w, cluster.step)
        assert value.tolist() == [[0.5] * 3] * 2
        assert step == 1
        cluster.chief = chief
        again = [cluster.replica(index, number + index) for index in range(2)]
        answers = await asyncio.gather(*(replica.push((w,), (1.0,)) for replica in again))
        assert [answer.token for answer in answers] == [2, 2]  # from the step that there was
        assert cluster.group()["steps"] == 1
