"""Workers are lost, sent away, set aside; they come, leave and are removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from links_owner import OPTIONS, Owner
from memory_cluster import MemoryCluster, cluster_of
from psync.chief.links import ClusterLinks
from psync.closures.membership import ALONE_S, FIRST_S, TaskState
from psync.errors import ConnectFailed, ProtocolError
from psync.wire.messages import EndSession
from psync.worker_task import WorkerTask

pytestmark = pytest.mark.virtual_time

W1, W2 = "/job:worker/task:1", "/job:worker/task:2"


@pytest.fixture
async def cluster(clean_loop: None) -> AsyncIterator[MemoryCluster]:
    async with cluster_of(1, 2) as cluster:
        yield cluster


@pytest.fixture
async def owner() -> Owner:
    return Owner()


@pytest.fixture
async def links(cluster: MemoryCluster, owner: Owner) -> AsyncIterator[ClusterLinks]:
    links = ClusterLinks(cluster.platform(), cluster.strategy().cluster, OPTIONS, "p")
    owner.listen(links)
    await links.start(2, 60)
    owner.events.clear()
    yield links
    await links.close()


# --- losses ------------------------------------------------------------------------------------


async def test_a_worker_that_flaps_is_set_aside_and_comes_back_when_its_time_is_over(
    links, owner, cluster, caplog
):
    began = asyncio.get_running_loop().time()
    with caplog.at_level(logging.WARNING):
        while len(owner.events) < 7:
            cluster.network.cut("worker-1:1")
            await asyncio.sleep(1)
        assert owner.events == ["-1", "+1"] * 3 + ["-1"]
        await asyncio.sleep(20)
        (text,) = links.workers.describe()
        assert text.startswith(f"{W1} is set aside for ")
        assert owner.events[7:] == []
        await asyncio.sleep(FIRST_S)
    assert owner.events[7:] == ["+1"]
    assert links.workers.describe() == []
    assert caplog.text.count("it is set aside for 30 s") == 1
    assert asyncio.get_running_loop().time() - began < 60
    assert links.membership.state(W1) is TaskState.ALIVE


@pytest.mark.promise("failures.all-workers")
async def test_the_last_worker_is_never_set_aside_though_all_die_again_and_again(
    links, cluster, caplog
):
    with caplog.at_level(logging.WARNING):
        for kill in range(60):  # each of the two is lost more often than is borne
            cluster.network.cut(f"worker-{kill % 2}:1")
            await asyncio.sleep(ALONE_S + 0.5)
            assert links.workers.ready(), f"all are set aside after {kill + 1} losses"
    assert "it is set aside for 30 s" in caplog.text


async def test_a_worker_that_is_gone_as_soon_as_it_is_attached_is_set_aside_too(
    links, owner, cluster, caplog, monkeypatch
):
    attach = WorkerTask._attach

    def attach_and_go(self, request):
        request.peer.abort()
        attach(self, request)

    await cluster.stop("worker-1")
    with monkeypatch.context() as patched:
        patched.setattr(WorkerTask, "_attach", attach_and_go)
        await cluster.start("worker-1")
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(20)
    assert f"{W1} is lost repeatedly; it is set aside for 30 s" in caplog.text
    await cluster.stop("worker-1")
    await cluster.start("worker-1")
    await asyncio.sleep(10)
    assert owner.events == ["-1"]
    await asyncio.sleep(20)
    assert owner.events == ["-1", "+1"]


async def test_a_worker_that_cannot_go_on_is_set_aside_unless_a_ps_is_missing(
    links, owner, cluster
):
    async def gives_up(times: int) -> None:
        for _ in range(times):
            peer, _ = links.workers.records[W1].peers
            ending = EndSession("because", in_order=False)
            links.workers.session_ends(
                SimpleNamespace(peer=peer, message=ending, answer=lambda done: None)
            )
            peer.abort()
            await asyncio.sleep(1)

    await cluster.stop("ps-0")
    await asyncio.sleep(1)
    await gives_up(6)
    assert owner.events == ["=1", "+1"] * 6
    assert links.workers.describe() == [], "that was the reason"
    await cluster.start("ps-0")
    links.membership.connected("/job:ps/task:0", 10**9)
    await gives_up(4)
    assert len(links.workers.describe()) == 1


# --- new ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gives_up", [True, False], ids=["given up", "not in time"])
async def test_one_that_is_given_up_or_does_not_come_in_time_is_forgotten(
    links, owner, cluster, gives_up
):
    adding = asyncio.create_task(links.workers.add("worker-2:1", 2, None if gives_up else 10))
    await asyncio.sleep(5)
    if gives_up:
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
    else:
        with pytest.raises(
            ConnectFailed, match=f"{W2} at worker-2:1 could not be added within 10 s"
        ):
            await adding
    assert links.membership.missing() == []
    assert list(links.workers.addresses()) == ["/job:worker/task:0", W1]
    await cluster.start("worker-2")
    await asyncio.sleep(100)
    assert owner.events == ["given up"]
    assert await links.workers.add("worker-2:1", 2, 10) == W2, "it may be tried again"


async def test_a_worker_of_another_index_is_refused_at_once(links, owner, cluster):
    await cluster.start("worker-3")
    with pytest.raises(ProtocolError, match=f"expected {W2} at this address, /job:worker/task:3"):
        await links.workers.add("worker-3:1", 2, 60)
    assert W2 not in links.workers.addresses()
    assert await links.workers.add("worker-3:1", 3, 60) == "/job:worker/task:3"


# --- those that go -------------------------------------------------------------------------------


async def test_a_worker_that_is_not_there_is_removed_at_once(links, owner, cluster):
    await cluster.stop("worker-1")
    await asyncio.sleep(1)
    await links.workers.remove(W1, "because")
    assert owner.events == ["-1", "given up"]
    assert W1 not in links.workers.addresses()
    assert links.membership.missing() == []
    await cluster.start("worker-1")
    await asyncio.sleep(60)
    assert owner.events == ["-1", "given up"]
    assert await links.workers.add("worker-1:1", 1, 10) == W1
    assert links.workers.names() == ["/job:worker/task:0", W1], "steps know it by its old index"
