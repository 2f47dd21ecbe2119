"""What ps 0 does to all ps tasks, below the rule that decides it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from backups import say
from inside import depose, platform_of, points_of, pool_of, sync_of, work_of
from ps_cluster import CHIEF, hold, pull, until
from psync.client.ps_link import PsLink
from psync.errors import (
    ClosedError,
    ConfigurationError,
    FencedError,
    ParameterServerLost,
    PsyncError,
)
from psync.ps_task import PsTask
from psync.store.sync_config import SyncConfig
from psync.sync.cross_ps_sets import Values
from psync.sync.ps_peers import AllPs
from psync.wire.messages import (
    AskStatistics,
    AttachPs,
    BackUp,
    CloseStep,
    Promote,
    Promoted,
    Statistics,
)
from sync_cluster import GROUP, SyncCluster

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def all_ps_of(cluster: SyncCluster, coordinator: int = 100) -> AsyncIterator[AllPs]:
    """Another one beside that of ps 0 itself."""
    task = cluster.ps[0]
    addresses = [link.address for link in cluster.chief.links]
    attach = AttachPs(coordinator, addresses, 15.0)
    all_ps = AllPs(platform_of(task), attach, sync_of(task), pool_of(task), work_of(task))
    try:
        yield all_ps
    finally:
        await all_ps.close()


def close_step(cluster: SyncCluster, step: int) -> CloseStep:
    return CloseStep(GROUP, cluster.config, step, [])


async def closed(all_ps: AllPs, message: CloseStep) -> Values:
    """Let every ps close a step; return what was brought, raise what went wrong."""
    ended: asyncio.Future[Values] = asyncio.get_running_loop().create_future()

    def then(values: Values, failed: Exception | None) -> None:
        if failed is None:
            ended.set_result(values)
        else:
            ended.set_exception(failed)

    all_ps.close_step(message, [], (), then)
    return await ended


def link_of(all_ps: AllPs) -> PsLink:
    """How ps 0 reaches ps 1."""
    return all_ps._links().links[1]


async def test_all_others_are_asked_at_once() -> None:
    async with SyncCluster(3) as cluster, all_ps_of(cluster) as all_ps:
        calls = all_ps.ask_others(AskStatistics())
        assert len(calls) == 2
        for received in await asyncio.gather(*calls):
            assert isinstance(received.message, Statistics)
    async with SyncCluster(1) as cluster, all_ps_of(cluster) as all_ps:
        assert all_ps.ask_others(AskStatistics()) == []


async def test_the_others_are_told_while_ps_0_waits_to_do_its_own_part() -> None:
    async with SyncCluster(2) as cluster, all_ps_of(cluster) as all_ps:
        release = hold(cluster.ps[0], cluster.step)
        closing = asyncio.create_task(closed(all_ps, close_step(cluster, 0)))
        await until(lambda: sync_of(cluster.ps[1]).steps())
        assert sync_of(cluster.ps[0]).steps() == []
        assert not closing.done()
        release()
        await closing
        assert [sync_of(task).steps() for task in cluster.ps] == [[(GROUP, 1)]] * 2


async def test_what_ps_0_refuses_at_once_no_other_is_told() -> None:
    async with SyncCluster(2) as cluster, all_ps_of(cluster) as all_ps:
        cluster.configure(decay=0.5, averages=((99, 98), (cluster.step.variable_id, 98)))
        with pytest.raises(ConfigurationError, match="must be on the same ps tasks"):
            await closed(all_ps, close_step(cluster, 0))
        assert [sync_of(task).steps() for task in cluster.ps] == [[], []]


@pytest.mark.parametrize("broken", [1, 2])
async def test_a_step_that_one_ps_cannot_apply_is_applied_by_the_others(broken: int) -> None:
    async with SyncCluster(3) as cluster, all_ps_of(cluster) as all_ps:
        points_of(cluster.ps[broken]).fail("ps.step.applied")
        with pytest.raises(PsyncError, match=r"ps\.step\.applied"):
            await closed(all_ps, close_step(cluster, 0))
        assert [sync_of(task).steps() for task in cluster.ps] == [[(GROUP, 1)]] * 3


@pytest.mark.parametrize(("step_ps", "shape"), [(0, ()), (1, ()), (0, (1,)), (1, (1,))])
async def test_the_global_step_is_read_and_raised_where_it_is(
    step_ps: int, shape: tuple[int, ...]
) -> None:
    async with SyncCluster(2, step_ps=step_ps) as cluster, all_ps_of(cluster) as all_ps:
        cluster.places = itertools.repeat(step_ps)
        step = await cluster.create("of_this_shape", np.full(shape, 2**40))
        cluster.configure(global_step=(step_ps, *step.shards[0].key))
        config = SyncConfig.from_config(cluster.config)
        assert await all_ps.read_global_step(config) == 2**40
        for _ in range(2):  # the second time nothing is done
            await closed(all_ps, close_step(cluster, 0))
        assert await all_ps.read_global_step(config) == 2**40 + 1
        (value,) = await pull(cluster.chief, step)
        assert value == 2**40 + 1


async def test_a_global_step_elsewhere_is_raised_once_although_the_answer_is_lost() -> None:
    async with SyncCluster(2, step_ps=1) as cluster, all_ps_of(cluster) as all_ps:
        points_of(cluster.ps[1]).arm("ps.step.applied", lambda: cluster.network.cut("ps1:1"))
        await closed(all_ps, close_step(cluster, 0))
        assert await cluster.global_step() == 1


@pytest.mark.parametrize("step_ps", [0, 1])
async def test_a_global_step_that_is_busy_is_raised_afterwards(step_ps: int) -> None:
    async with SyncCluster(2, step_ps=step_ps) as cluster, all_ps_of(cluster) as all_ps:
        release = hold(cluster.ps[step_ps], cluster.step)
        closing = asyncio.create_task(closed(all_ps, close_step(cluster, 0)))
        await until(lambda: work_of(cluster.ps[step_ps]).waiting)
        release()
        await closing
        assert await cluster.global_step() == 1


async def test_the_others_know_which_coordinator_it_speaks_for() -> None:
    async with SyncCluster(2) as cluster:
        await cluster.attach(cluster.client(CHIEF, 200), 200)
        async with all_ps_of(cluster, coordinator=100) as all_ps:
            (call,) = all_ps.ask_others(close_step(cluster, 0))
            with pytest.raises(FencedError):
                await call
        async with all_ps_of(cluster, coordinator=200) as all_ps:
            (call,) = all_ps.ask_others(close_step(cluster, 0))
            await call


async def test_closed_links_stay_closed() -> None:
    async with SyncCluster(2) as cluster, all_ps_of(cluster) as all_ps:
        await all_ps.close()
        with pytest.raises(ClosedError, match="has closed its links"):
            all_ps.ask_others(AskStatistics())
        with pytest.raises(ClosedError, match="has closed its links"):
            await closed(all_ps, close_step(cluster, 0))


async def test_who_is_refused_when_links_are_closed_waits_for_no_move() -> None:
    """Nobody would say any more where the ps is served."""
    async with SyncCluster(2) as cluster:
        link = cluster.chief.links[1]
        await link.close()
        link.hold()
        async with asyncio.timeout(5):
            with pytest.raises(ClosedError):
                await link.call(lambda _: AskStatistics())


async def test_where_a_ps_is_served_may_be_heard_before_it_says_that_it_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has said so already, and whoever has asked has not seen that yet."""
    async with SyncCluster(2, step_ps=1, first=4) as cluster, all_ps_of(cluster) as all_ps:
        config = SyncConfig.from_config(cluster.config)
        all_ps.expect_moves()
        link = link_of(all_ps)

        async def replaced(*_: object, **__: object) -> None:
            monkeypatch.undo()
            all_ps.move([link.address for link in cluster.chief.links])
            raise FencedError("it was replaced by its backup")

        monkeypatch.setattr(link, "call", replaced)
        async with asyncio.timeout(5):
            assert await all_ps.read_global_step(config) == 4


async def test_who_looks_for_a_ps_that_is_served_nowhere_ends_with_the_links() -> None:
    async with SyncCluster(2, step_ps=1) as cluster:
        async with all_ps_of(cluster) as all_ps:
            all_ps.expect_moves()
            await closed(all_ps, close_step(cluster, 0))
            cluster.network.refuse("ps1:1")
            cluster.network.cut("ps1:1")
            closing = asyncio.create_task(closed(all_ps, close_step(cluster, 1)))
            await until(lambda: link_of(all_ps)._attempts)
        with pytest.raises(ClosedError):
            async with asyncio.timeout(5):
                await closing


async def test_what_one_refuses_that_was_replaced_is_said_to_its_backup() -> None:
    async with SyncCluster(2, step_ps=1) as cluster, all_ps_of(cluster) as all_ps:
        await say(cluster, 1, BackUp(1, "/job:ps/task:0", "ps0:1", False))
        promoted = await say(cluster, 0, Promote(1, 9, 100, []))
        assert isinstance(promoted, Promoted)
        all_ps.expect_moves()
        depose(cluster.ps[1])
        closing = asyncio.create_task(closed(all_ps, close_step(cluster, 0)))
        config = SyncConfig.from_config(cluster.config)
        reading = asyncio.create_task(all_ps.read_global_step(config))
        await asyncio.wait((closing, reading), timeout=0.1)
        assert not closing.done()
        assert not reading.done()
        all_ps.move(["ps0:1", promoted.address])
        await asyncio.gather(closing, reading)
        link = cluster.chief.links[1]
        link.revive()
        link.address = promoted.address
        assert await cluster.global_step() == 1


async def test_one_that_came_back_empty_before_it_was_ever_asked_is_lost() -> None:
    """A step that failed with what it says would be the program's error, not a lost ps."""
    async with SyncCluster(2, step_ps=1) as cluster, all_ps_of(cluster) as all_ps:
        await cluster.ps[1].close()
        cluster.ps[1] = PsTask(cluster.platform(incarnation=8), 1, "ps1:1")
        await cluster.ps[1].start()
        with pytest.raises(ParameterServerLost, match="not, or no longer, served"):
            await closed(all_ps, close_step(cluster, 0))
        config = SyncConfig.from_config(cluster.config)
        with pytest.raises(ParameterServerLost):
            await all_ps.read_global_step(config)
