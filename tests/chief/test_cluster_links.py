"""Connections come up in any order, go, and come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inside import ledger_of
from links_owner import Owner
from memory_cluster import MemoryCluster, cluster_of
from psync.api.data_shards import MAX_SHARDS
from psync.chief.cluster_links import ClusterLinks
from psync.errors import ConnectFailed, UsageError
from psync.net.connection import Connection
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


async def test_it_starts_when_all_are_there(links, owner):
    await links.start(2, 60)
    assert sorted(owner.events) == ["+0", "+1"]
    assert links.membership.ready(2)
    assert len(await links.ps_statistics()) == 2
    assert links.endpoint.statistics()["connections"] == 6


async def test_a_worker_that_goes_is_refused_by_ps_tasks_and_comes_back_as_a_new_incarnation(
    links, owner, cluster
):
    await links.start(2, 60)
    before = links.membership.incarnation("/job:worker/task:1")
    cluster.network.cut("worker-1:1")
    await asyncio.sleep(1)
    for name in ("ps-0", "ps-1"):
        ledger: Any = ledger_of(cluster.tasks[name])
        with pytest.raises(Exception, match="worker/task:1"):
            ledger.check_incarnation("/job:worker/task:1", before)
    await asyncio.sleep(4)
    assert owner.events[2:] == ["-1", "+1"]
    assert links.membership.incarnation("/job:worker/task:1") > before


async def test_a_worker_that_refuses_is_reported_and_tried_again(
    links, owner, cluster, caplog, monkeypatch
):
    await cluster.stop("worker-1")
    await links.start(1, 60)

    def refuse(*_: Any) -> None:
        raise UsageError("not today")

    with monkeypatch.context() as patched:
        patched.setattr(WorkerTask, "_attach", refuse)
        await cluster.start("worker-1")
    await asyncio.sleep(100)
    worker = cluster.tasks["worker-1"]
    assert "worker/task:1 cannot join: not today" in caplog.text
    assert worker.statistics()["network"]["connections"] <= 2  # of one attempt at most
    await cluster.stop("worker-1")
    await cluster.start("worker-1")
    await asyncio.sleep(20)
    assert owner.events == ["+0", "+1"]


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

    async def break_and_attach(self: WorkerTask, peer: Connection, *args: Any) -> Any:
        if not broken:
            broken.append(self._lanes[peer.task, peer.incarnation, "bulk"])
            broken[0].abort()
            await broken[0].wait_closed()
        return attach(self, peer, *args)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerTask, "_attach", break_and_attach)
        await cluster.start("worker-1")
    await links.start(2, 60)
    assert broken
    assert sorted(owner.events) == ["+0", "+1"]


async def test_who_closes_its_links_fences_nobody_and_warns_of_nothing(
    links, cluster, caplog, monkeypatch
):
    """A worker that is being attached just then is no lost one."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    await cluster.stop("worker-1")
    with monkeypatch.context() as patched:
        patched.setattr(WorkerTask, "_attach", never)
        await cluster.start("worker-1")
        await links.start(1, 60)
        await asyncio.sleep(20)
    assert links.membership.missing() == []
    caplog.clear()
    for link in cluster.network.links("ps-0:1"):
        link.to_server.stall()  # or a fence might be taken in time
    await links.close()
    await asyncio.sleep(1)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_as_many_closures_may_be_kept_as_there_may_be_data_shards(cluster, links):
    await links.start(2, 60)
    kept = [(closure, 1) for closure in range(0, 2 * MAX_SHARDS, 2)]
    links.final_below(2 * MAX_SHARDS, kept)
    await links.ps_statistics()  # asked for after that
    for task in ("ps-0", "ps-1"):
        final = ledger_of(cluster.tasks[task]).final
        assert final.below == 2 * MAX_SHARDS
        assert final.listed() == kept
