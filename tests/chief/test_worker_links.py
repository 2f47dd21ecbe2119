"""Workers are lost, sent away, set aside; they come, leave and are removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from memory_cluster import MemoryCluster, running, until
from psync.chief.links import ClusterLinks, CoordinatorOptions, FollowedWorkers
from psync.closures.membership import ALONE_S, FIRST_S, TaskState
from psync.closures.queue import ClosureQueue
from psync.errors import ConnectFailed, ProtocolError
from psync.wire.messages import EndSession, Fence
from psync.worker_task import WorkerTask

pytestmark = pytest.mark.virtual_time

W0, W1, W2 = (f"/job:worker/task:{index}" for index in range(3))

OPTIONS = CoordinatorOptions(15.0, 60.0, 1, "o", max_losses=3, max_flaps=3)


class Owner:
    """What links tell of workers, written down."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def listen(self, links: ClusterLinks) -> None:
        links.workers.on_joined = lambda worker: self.events.append(f"+{worker[-1]}")
        links.workers.on_lost = self._worker_lost
        links.on_worker_given_up = lambda: self.events.append("given up")

    def _worker_lost(self, worker: str, blame: bool) -> None:
        self.events.append(f"-{worker[-1]}" if blame else f"={worker[-1]}")


@pytest.fixture
async def cluster(clean_loop: None) -> AsyncIterator[MemoryCluster]:
    async with running(MemoryCluster(1, 2, tapped=True)) as cluster:
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


async def test_a_ps_that_was_away_refuses_the_workers_that_were_lost_meanwhile(links, cluster):
    with cluster.tap("ps-0").hearing(Fence) as heard:
        cluster.network.partition("ps-0")
        cluster.network.cut("ps-0")
        cluster.network.cut("worker-1:1")
        await asyncio.sleep(1)
        assert heard == []
        cluster.network.heal("ps-0")
        await until(lambda: heard)
    assert heard == [Fence(W1, links.membership.incarnation(W1))]


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
    links.attached["/job:ps/task:0"] = 10**9
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
    assert links.missing() == []
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
    assert links.missing() == []
    await cluster.start("worker-1")
    await asyncio.sleep(60)
    assert owner.events == ["-1", "given up"]
    assert await links.workers.add("worker-1:1", 1, 10) == W1
    assert links.workers.names() == ["/job:worker/task:0", W1], "steps know it by its old index"


# --- a coordinator follows whoever starts workers; clusters: tests/launch/test_cluster.py ------


@pytest.fixture
async def follower(links: ClusterLinks) -> FollowedWorkers:
    return FollowedWorkers(links, ClosureQueue())


async def test_what_comes_is_taken_in_and_what_leaves_is_forgotten(follower, links, cluster, owner):
    (taking_in,) = follower.workers_changed({2: "worker-2:1"}, [])
    await asyncio.sleep(20)
    assert not taking_in.done()
    await cluster.start("worker-2")
    await taking_in
    assert list(links.workers.addresses()) == [W0, W1, W2]
    (leaving,) = follower.workers_changed({}, [2])
    await leaving
    assert list(links.workers.addresses()) == [W0, W1]
    assert (owner.events[0], owner.events[-1]) == ("+2", "given up")


async def test_nothing_happens_twice(follower: FollowedWorkers, links: ClusterLinks) -> None:
    addresses = links.workers.addresses()
    assert follower.workers_changed({1: addresses[W1]}, [7]) == []


async def test_one_that_is_elsewhere_now_takes_the_place_of_its_predecessor(
    follower: FollowedWorkers, links: ClusterLinks, cluster: MemoryCluster
) -> None:
    await cluster.stop("worker-1")
    (replacing,) = follower.workers_changed({1: "worker-1:2"}, [])
    await asyncio.sleep(5)
    assert links.workers.addresses()[W1] == "worker-1:2"
    (leaving,) = follower.workers_changed({}, [1])
    await leaving
    await replacing


async def test_one_that_is_given_up_before_it_came_is_no_error_of_the_program(
    follower, links, owner, caplog
):
    (taking_in,) = follower.workers_changed({2: "worker-2:1"}, [])
    await asyncio.sleep(5)
    with caplog.at_level(logging.ERROR):
        await links.workers.give_up(W2, "exited with code 1")
        await taking_in
    assert f"{W2} at worker-2:1 was not added: {W2} exited with code 1" in caplog.text
    assert owner.events == ["given up"]
