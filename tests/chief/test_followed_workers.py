"""A coordinator follows whoever starts workers; clusters: tests/launch/test_cluster.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from links_owner import OPTIONS, Owner
from memory_cluster import MemoryCluster, cluster_of
from psync.chief.links import ClusterLinks, FollowedWorkers
from psync.closures.queue import ClosureQueue

pytestmark = pytest.mark.virtual_time

W0, W1, W2 = (f"/job:worker/task:{index}" for index in range(3))


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


@pytest.fixture
async def follower(links: ClusterLinks) -> FollowedWorkers:
    return FollowedWorkers(links, ClosureQueue())


async def test_what_comes_is_taken_in_and_what_leaves_is_forgotten(
    follower: FollowedWorkers, links: ClusterLinks, cluster: MemoryCluster, owner: Owner
) -> None:
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
    follower: FollowedWorkers,
    links: ClusterLinks,
    cluster: MemoryCluster,
    owner: Owner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (taking_in,) = follower.workers_changed({2: "worker-2:1"}, [])
    await asyncio.sleep(5)
    with caplog.at_level(logging.ERROR):
        await links.workers.give_up(W2, "exited with code 1")
        await taking_in
    assert f"{W2} at worker-2:1 was not added: {W2} exited with code 1" in caplog.text
    assert owner.events == ["given up"]
