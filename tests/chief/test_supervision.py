"""Who is the newest coordinator: whatever clocks say, and whoever was started again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

import psync
from memory_cluster import MemoryCluster, cluster_of, running
from psync.errors import ConnectFailed, FencedError
from psync.testing import MemoryNetwork
from psync.testing.seams import new_task
from psync.wire.codec import Message
from psync.wire.messages import AskServed, AttachPs, AttachWorker, GrantCoordinator

pytestmark = pytest.mark.virtual_time


def coordinator_of(
    cluster: MemoryCluster, clock: int = 1, min_workers: int | None = None
) -> psync.ClusterCoordinator:
    """A chief whose clock stands still."""
    strategy = cluster.strategy()
    resolver = strategy.cluster_resolver
    resolver.platform = dataclasses.replace(resolver.platform, new_incarnation=lambda: clock)
    return psync.ClusterCoordinator(strategy, min_workers=min_workers)


async def start_again(cluster: MemoryCluster, name: str, clock: int) -> None:
    """Start a task again on a machine whose clock says this."""
    await cluster.stop(name)
    job, _, index = name.partition("-")
    platform = dataclasses.replace(cluster.platform(host=name), new_incarnation=lambda: clock)
    task = cluster.tasks[name] = new_task(platform, job, int(index), f"{name}:1")
    await task.start()


async def works(coordinator: psync.ClusterCoordinator) -> None:
    async def step() -> int:
        return 7

    value = coordinator.schedule(step)
    await coordinator.join()
    assert await value == 7


@pytest.mark.promise("coordinators.newest-wins")
async def test_the_clock_of_the_chief_does_not_matter() -> None:
    async with cluster_of(2, 2) as cluster:
        async with coordinator_of(cluster, clock=1 << 60) as first:
            async with coordinator_of(cluster, clock=3) as second:
                await works(second)
                with pytest.raises(FencedError):
                    await works(first)


@pytest.mark.promise("coordinators.newest-wins")
@pytest.mark.parametrize("again", [("ps-0",), ("ps-0", "ps-1")], ids=["ps 0", "every ps"])
async def test_ps_tasks_that_were_started_again_with_a_clock_that_is_behind(
    again: tuple[str, ...],
) -> None:
    """Then another ps, or the workers, still know better."""
    async with cluster_of(2, 2) as cluster:
        async with coordinator_of(cluster):
            pass
        for name in again:
            await start_again(cluster, name, clock=1)
        async with coordinator_of(cluster) as second:
            await works(second)
            statistics = await second.ps_statistics()
            assert len(statistics) == 2


async def test_of_two_that_start_at_once_one_stays() -> None:
    async with cluster_of(2, 2) as cluster:
        both = [coordinator_of(cluster), coordinator_of(cluster)]
        ended = await asyncio.gather(*(one.start() for one in both), return_exceptions=True)
        await asyncio.sleep(5)
        worked = []
        for one, error in zip(both, ended, strict=True):
            assert error is None or isinstance(error, FencedError)
            if error is None:
                try:
                    await works(one)
                    worked.append(one)
                except FencedError:
                    pass
                await one.close()
        assert len(worked) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_a_program_that_has_begun_keeps_its_number_and_its_variables(seed: int) -> None:
    """Also if a worker that is not waited for has seen a newer coordinator than ps 0."""
    network = MemoryNetwork(seed, latency=(0.001, 0.02))
    async with cluster_of(1, 2, network=network) as cluster:
        async with coordinator_of(cluster):
            pass
        for name in ("ps-0", "worker-1"):
            await start_again(cluster, name, clock=1)
        coordinator = coordinator_of(cluster, min_workers=1)
        try:
            async with coordinator:
                with coordinator.strategy.scope():
                    variable = psync.Variable(1.0)
                await variable.assign(2.0)
                await asyncio.sleep(5)
                assert await variable.read() == 2.0
        except FencedError:
            pass  # the worker came too late: whoever has its number may be there yet


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("kind", [GrantCoordinator, AskServed, AttachPs, AttachWorker])
async def test_whatever_connection_is_lost_at_the_start_it_is_asked_again(
    kind: type[Message], attach: bool
) -> None:
    async with running(MemoryCluster(2, 1, tapped=True)) as cluster:
        strategy = cluster.replica_strategy()
        names = iter(["ps-0", "ps-1", "worker-0"])
        with contextlib.ExitStack() as stack:
            for name in ("ps-0", "ps-1", "worker-0"):
                lose = lambda: cluster.network.cut(f"{next(names, 'nobody')}:1")  # noqa: E731
                stack.enter_context(cluster.tap(name).at(kind, lose))
            async with psync.ClusterCoordinator(strategy, attach=attach) as coordinator:
                await works(coordinator)
        assert len(list(names)) < 3 or (kind is AskServed and not attach), "none was lost"


async def test_a_start_that_gives_up_names_who_is_missing() -> None:
    async with cluster_of(2, 2) as cluster:
        for names in (("worker-1",), ("ps-1",), ("ps-0", "ps-1")):
            for name in names:
                await cluster.stop(name)
            for attach in (False, True):
                strategy = cluster.strategy()
                with pytest.raises(ConnectFailed) as caught:
                    await psync.ClusterCoordinator(
                        strategy, connect_timeout=3, attach=attach
                    ).start()
                assert f"{names[-1]}:1" in str(caught.value)
            for name in names:
                await cluster.start(name)


async def test_a_start_waits_for_the_next_process_of_a_worker_that_leaves() -> None:
    async with cluster_of(1, 2) as cluster:
        leaving = asyncio.create_task(cluster.tasks["worker-1"].leave("SIGTERM"))
        coordinator = psync.ClusterCoordinator(cluster.strategy())
        starting = asyncio.create_task(coordinator.start())
        await leaving
        await cluster.stop("worker-1")
        await asyncio.sleep(5)
        assert not starting.done()
        await cluster.start("worker-1")
        await starting
        await works(coordinator)
        await coordinator.close()
