"""Global steps: raised once for each step, whoever says so how often."""

from __future__ import annotations

import asyncio

import pytest

from backups import alone, back_up, take_over
from inside import depose, sync_of
from ps_by_hand import COORDINATOR, PS_0, A, PsByHand, group_config
from ps_cluster import PsCluster, hold, pull
from psync.client.ps_client import PsClient
from psync.errors import FencedError, NotServedError, UsageError
from psync.specs import VariableSpec
from psync.sync.groups import CLOSER
from psync.testing import settle
from psync.wire.messages import Done
from psync.wire.ps_messages import Fence
from psync.wire.sync_messages import RaiseStep

GROUP, OTHER = 9, 10


async def created(cluster: PsCluster, ps: int = 0) -> VariableSpec:
    cluster.places = iter([ps])
    return await cluster.create("step", 5)


async def raise_for(client: PsClient, step: VariableSpec, number: int, group: int = GROUP) -> None:
    (shard,) = step.shards
    message = RaiseStep(group, number, *shard.key)
    received = await client.links[shard.ps].call(lambda _: message)
    assert received.message == Done()


async def value(cluster: PsCluster, step: VariableSpec) -> int:
    (array,) = await pull(cluster.chief, step)
    return int(array)


async def test_it_is_raised_once_for_each_step_of_each_group() -> None:
    async with PsCluster() as cluster:
        step, closer = await created(cluster), cluster.client(CLOSER, 100)
        for number in (0, 0, 1, 0, 1):
            await raise_for(closer, step, number)
        assert await value(cluster, step) == 7
        await raise_for(closer, step, 0, OTHER)
        assert await value(cluster, step) == 8


async def test_the_same_said_twice_while_it_is_busy_raises_it_once() -> None:
    async with PsCluster() as cluster:
        step, closer = await created(cluster), cluster.client(CLOSER, 100)
        release = hold(cluster.ps[0], step)
        raising = [asyncio.create_task(raise_for(closer, step, 0)) for _ in range(2)]
        await settle()
        release()
        await asyncio.gather(*raising)
        assert await value(cluster, step) == 6


def test_only_ps_0_raises_it_and_not_one_that_was_replaced() -> None:
    ps = PsByHand()
    step = ps.create("step", 5)
    ps.ask(COORDINATOR, Fence(*PS_0))
    with pytest.raises(UsageError, match="only /job:ps/task:0"):
        ps.ask(A, RaiseStep(GROUP, 0, *step))
    with pytest.raises(FencedError):
        ps.ask((PS_0[0], PS_0[1] - 1), RaiseStep(GROUP, 0, *step))
    assert ps.value(step) == 5


@pytest.mark.parametrize("when", ["before the copy", "after it"])
async def test_a_backup_knows_for_which_steps_it_was_raised(when: str) -> None:
    async with PsCluster(2) as cluster:
        step, closer = await created(cluster), cluster.client(CLOSER, 100)
        if when == "after it":
            await back_up(cluster)
        await raise_for(closer, step, 3)
        if when == "before the copy":
            # Of a group that the ps knows, else nothing is said of it.
            sync_of(cluster.ps[0]).define(GROUP, group_config())
            await back_up(cluster)
        await take_over(cluster)
        again = cluster.client(CLOSER, 100)
        again.links[0].address = cluster.chief.links[0].address
        await raise_for(again, step, 3)
        assert await value(cluster, step) == 6
        await raise_for(again, step, 4)
        assert await value(cluster, step) == 7


async def test_one_that_has_been_replaced_raises_nothing() -> None:
    async with PsCluster(2) as cluster:
        step, closer = await created(cluster), cluster.client(CLOSER, 100)
        await back_up(cluster)
        depose(cluster.ps[0])
        await asyncio.sleep(0)
        with pytest.raises(FencedError):
            await raise_for(closer, step, 0)


def test_nor_does_one_that_no_coordinator_has_attached() -> None:
    """It was started again, and ps 0 was not told yet where its backup serves."""
    ps = PsByHand(serves=False)
    step = ps.create("step", 5)
    with pytest.raises(NotServedError, match="not, or no longer, served by this process"):
        ps.ask(PS_0, RaiseStep(GROUP, 0, *step))


async def test_without_a_backup_any_more_it_goes_on() -> None:
    async with PsCluster(2) as cluster:
        step, closer = await created(cluster), cluster.client(CLOSER, 100)
        await back_up(cluster)
        await raise_for(closer, step, 0)
        await alone(cluster)
        await raise_for(closer, step, 0)
        await raise_for(closer, step, 1)
        assert await value(cluster, step) == 7
