"""Who wants to be the coordinator asks, whatever is known of it."""

from __future__ import annotations

import asyncio

import pytest

from asked import Reply
from inside import handlers_of
from memory_cluster import cluster_of
from psync.chief.links import absent, enquire
from psync.errors import RemoteProtocolError
from psync.net.connection import Handler
from psync.wire.messages import Done, GrantCoordinator

pytestmark = pytest.mark.virtual_time
PS = ("/job:ps/task:0", "ps-0:1")


async def test_other_tasks_say_whom_they_have_served() -> None:
    async with cluster_of(2, 1) as cluster:
        platform = cluster.platform()
        assert await enquire(platform, "/job:ps/task:1", "ps-1:1") == 0
        assert await enquire(platform, "/job:worker/task:0", "worker-0:1") == 0


async def test_a_ps_that_comes_later_and_a_connection_that_is_lost_are_waited_for() -> None:
    async with cluster_of() as cluster:
        await cluster.stop("ps-0")
        asking = asyncio.create_task(enquire(cluster.platform(), *PS))
        await asyncio.sleep(3)
        await cluster.start("ps-0")
        ps = cluster.tasks["ps-0"]
        handlers = handlers_of(ps)
        granting = handlers[GrantCoordinator]

        async def lose(*_: object) -> Reply:
            cluster.network.cut("ps-0:1")
            handlers[GrantCoordinator] = granting
            return Reply(Done())

        handlers[GrantCoordinator] = Handler(lose)
        assert await asking > 0
        assert handlers[GrantCoordinator] is granting


async def test_another_answer_is_nonsense() -> None:
    async with cluster_of() as cluster:
        ps = cluster.tasks["ps-0"]
        handlers_of(ps)[GrantCoordinator] = Handler(lambda request: request.answer(Done()))
        with pytest.raises(RemoteProtocolError, match="answered GrantCoordinator with Done"):
            await enquire(cluster.platform(), *PS)


async def test_those_that_do_not_answer_are_named() -> None:
    async with cluster_of(2, 1) as cluster:
        await cluster.stop("ps-1")
        tasks = {"/job:ps/task:0": "ps-0:1", "/job:ps/task:1": "ps-1:1", "/job:ps/task:7": "ps-0:1"}
        assert await absent(cluster.platform(), tasks) == ["/job:ps/task:1 at ps-1:1"]
