"""What ps 0 does to all ps tasks, below the rule that decides it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backups import say
from inside import depose, platform_of, points_of, pool_of, sync_of, work_of
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


async def test_closed_links_stay_closed() -> None:
    async with SyncCluster(2) as cluster, all_ps_of(cluster) as all_ps:
        await all_ps.close()
        with pytest.raises(ClosedError, match="has closed its links"):
            all_ps.ask_others(AskStatistics())
        with pytest.raises(ClosedError, match="has closed its links"):
            await closed(all_ps, close_step(cluster, 0))


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
