"""The end of a program: which tasks hear that they should exit, and which do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import psync
from memory_cluster import SECRET, MemoryCluster, cluster_of
from psync.launch.identity import SHUTDOWN_TIMEOUT_S, OwnTask, shut_down
from psync.net.environment import added_workers, newest_incarnation, note_incarnation
from psync.net.secret import Secret

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def _no_coordinator_before() -> Iterator[None]:
    before = newest_incarnation()
    note_incarnation(0)
    yield
    note_incarnation(before)


def chief_of(cluster: MemoryCluster, secret: Secret = SECRET) -> OwnTask:
    resolver = cluster.strategy().cluster_resolver
    resolver.platform = cluster.platform(secret, "chief-0")
    return OwnTask(resolver, resolver.cluster_spec(), "chief", 0)


def told(cluster: MemoryCluster) -> list[str]:
    return [name for name, task in cluster.tasks.items() if task.stopped.is_set()]


async def test_every_task_of_the_jobs_is_told() -> None:
    async with cluster_of(2, 1) as cluster:
        await shut_down(chief_of(cluster), ("ps",), 10**18)
        assert told(cluster) == ["ps-0", "ps-1"]
        await shut_down(chief_of(cluster), ("worker", "ps"), 10**18)
        assert told(cluster) == ["ps-0", "ps-1", "worker-0"]


async def test_a_worker_that_was_added_is_told_too() -> None:
    async with cluster_of(1, 1) as cluster:
        await cluster.start("worker-7")
        token = added_workers.set({"/job:worker/task:7": "worker-7:1"})
        try:
            await shut_down(chief_of(cluster), ("worker",), 10**18)
        finally:
            added_workers.reset(token)
        assert told(cluster) == ["worker-0", "worker-7"]


async def test_tasks_that_serve_a_newer_chief_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psync.launch.identity")
    async with cluster_of(1, 1) as cluster:
        own = chief_of(cluster)
        async with psync.ClusterCoordinator(cluster.strategy()):
            newer = newest_incarnation()
        note_incarnation(0)
        await shut_down(own, ("ps",), newer - 1)
        assert told(cluster) == []
        assert "/job:ps/task:0 was not told to exit" in caplog.text
        note_incarnation(newer)  # it was this program that had the coordinator
        await shut_down(own, ("ps",), newer - 1)
        assert told(cluster) == ["ps-0"]


async def test_a_task_that_cannot_be_reached_holds_nobody_up() -> None:
    async with cluster_of(2, 1) as cluster:
        cluster.network.partition("chief-0", "ps-0")
        await shut_down(chief_of(cluster), ("ps",), 10**18)
        assert told(cluster) == ["ps-1"]
        cluster.network.heal("chief-0", "ps-0")
    assert SHUTDOWN_TIMEOUT_S < 10


async def test_who_holds_another_secret_is_not_listened_to() -> None:
    async with cluster_of(1, 1) as cluster:
        await shut_down(
            chief_of(cluster, Secret(b"another secret of thirty-two bytes..")), ("ps",), 1
        )
        assert told(cluster) == []
