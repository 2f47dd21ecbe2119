"""Connections come up in any order, go, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from links_owner import Owner
from memory_cluster import MemoryCluster, cluster_of
from psync.chief.links import ClusterLinks
from psync.errors import ConnectFailed
from psync.net.connection import Request
from psync.worker_task import WorkerTask

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def cluster(clean_loop: None) -> AsyncIterator[MemoryCluster]:
    async with cluster_of(2, 2) as cluster:
        yield cluster


@pytest.fixture
async def owner() -> Owner:
    return Owner()


@pytest.fixture
async def links(cluster: MemoryCluster, owner: Owner) -> AsyncIterator[ClusterLinks]:
    links = ClusterLinks(
        cluster.platform(), cluster.strategy().cluster,
        origin="o", program="p", ps_timeout_s=15.0,
    )  # fmt: skip
    owner.listen(links)
    yield links
    await links.close()


async def test_starting_gives_up_and_names_who_is_missing(links, cluster):
    await cluster.stop("worker-0")
    with pytest.raises(ConnectFailed, match="no connection to /job:worker/task:0 at worker-0:1"):
        await links.start(2, 20)


async def test_starting_waits_for_the_next_process_of_a_worker_that_is_leaving(
    links, owner, cluster
):
    await cluster.tasks["worker-1"].leave("SIGTERM")
    starting = asyncio.create_task(links.start(2, 60))
    await asyncio.sleep(5)
    assert not starting.done()
    await cluster.stop("worker-1")
    await cluster.start("worker-1")
    await starting
    assert sorted(owner.events) == ["+0", "+1"]


async def test_starting_bears_that_one_of_two_connections_breaks_while_a_worker_is_attached(
    links, owner, cluster, monkeypatch
):
    await cluster.stop("worker-1")
    attach, broken = WorkerTask._attach, []

    async def break_and_attach(self: WorkerTask, request: Request[Any]) -> None:
        if not broken:
            broken.append(self._lanes[*request.peer.client, "bulk"])
            broken[0].abort()
            await broken[0].wait_closed()
        attach(self, request)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerTask, "_attach", break_and_attach)
        await cluster.start("worker-1")
    await links.start(2, 60)
    assert broken
    assert sorted(owner.events) == ["+0", "+1"]
