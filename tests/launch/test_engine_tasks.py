"""Tasks on an engine: begun in a process that is not theirs, begun again elsewhere, found there.

The engine of these tests runs each task in this process, in a thread and on a loop of its own, and
can lose it. Ray and Dask are met in tests/integrations/engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import numpy as np
import pytest

import psync
from psync.errors import ConfigurationError
from psync.launch.cluster import Host, TaskCluster
from psync.launch.engine_tasks import SeatLost, TasksOnEngine
from psync.launch.hosted_task import HostedTask, Order
from psync.testing import settle


class ThreadSeat:
    """A seat in this process, which can be lost."""

    def __init__(self) -> None:
        self.task: HostedTask | None = None
        self.orders: list[Order] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()  # where it listens, each time
        self.lost = asyncio.Event()
        self.is_gone_for_good = False

    async def begin(self, order: Order) -> str:
        if self.is_gone_for_good:
            raise SeatLost("nobody sits here any more", is_final=True)
        self.lost.clear()
        self.orders.append(order)
        self.task = HostedTask(order, "127.0.0.1")
        address = await self.task.begin()
        self.begun.put_nowait(address)
        return address

    async def ended(self) -> str:
        assert self.task is not None
        waits = [asyncio.ensure_future(w) for w in (self.lost.wait(), self.task.ended())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self.lost.is_set():
            raise SeatLost("its process was killed")
        return self.task.done.result()

    async def know(self, places: Mapping[str, str]) -> None:
        assert self.task is not None
        self.task.know(places)

    async def leave(self) -> None:
        assert self.task is not None
        await self.task.leave()

    async def close(self) -> None:
        assert self.task is not None
        await self.task.stop()

    async def abandon(self) -> None:
        pass

    async def lose(self) -> None:
        """Let the process be gone, from one moment to the next."""
        assert self.task is not None
        self.lost.set()
        await self.task.stop()


class ThreadEngine:
    chief = "127.0.0.1"

    def __init__(self) -> None:
        self.seats: dict[tuple[str, int], ThreadSeat] = {}

    async def check(self, num_workers: int) -> None:
        if num_workers > 5:
            raise ConfigurationError("there are five chairs")

    async def seat(self, job: str, index: int) -> ThreadSeat:
        seat = self.seats[job, index] = ThreadSeat()
        return seat


class ThreadCluster(TaskCluster):
    """A cluster on that engine."""

    def __init__(self, num_ps: int, num_workers: int, max_restarts: int = 3) -> None:
        super().__init__(num_ps, num_workers, ())
        self.engine = ThreadEngine()
        self._max_restarts = max_restarts

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        host = TasksOnEngine(self.engine, {"PSYNC_LIMIT_CONNECTIONS": "99"}, self._max_restarts)
        resources.push_async_callback(host.close)
        return host


@contextlib.asynccontextmanager
async def counting(
    cluster: ThreadCluster, **options: str
) -> AsyncIterator[tuple[psync.ClusterCoordinator, psync.Variable]]:
    """A coordinator and a variable, one shard of which is on each ps."""
    strategy = psync.ParameterServerStrategy(None, psync.FixedShardsPartitioner(2), **options)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros(4), name="v")
        yield coordinator, v


async def count(coordinator: psync.ClusterCoordinator, v: psync.Variable, times: int) -> None:
    async def step() -> None:
        await v.assign_add(np.ones(4))

    for _ in range(times):
        coordinator.schedule(step)
    await coordinator.join()


async def test_tasks_train_where_the_engine_runs_them() -> None:
    async with ThreadCluster(2, 2) as cluster, counting(cluster) as (coordinator, v):
        await count(coordinator, v, 20)
        assert (await v.read() == 20).all()
        spec = cluster.resolver.cluster_spec()
        for seat, address in (
            (cluster.engine.seats["ps", 1], spec.task_address("ps", 1)),
            (cluster.engine.seats["worker", 0], spec.task_address("worker", 0)),
        ):
            [order] = seat.orders
            assert order.name is None
            assert order.environ["PSYNC_LIMIT_CONNECTIONS"] == "99"
            assert address.startswith("127.0.0.1:")
        assert f"runs at {address}" in cluster._repr_html_()


async def test_a_ps_that_is_begun_elsewhere_is_found_there_and_counts_are_exact() -> None:
    async with (
        ThreadCluster(2, 2) as cluster,
        counting(cluster, ps_recovery="backup") as (coordinator, v),
    ):
        await count(coordinator, v, 10)
        before = cluster.resolver.cluster_spec().task_address("ps", 1)
        seat = cluster.engine.seats["ps", 1]
        assert await seat.begun.get() == before
        await seat.lose()
        await count(coordinator, v, 10)
        assert (await v.read() == 20).all()
        assert await seat.begun.get() != before
        again = cluster.engine.seats["ps", 1].orders[1]
        assert again.name == before  # all know it by this
        await count(coordinator, v, 10)
        assert (await v.read() == 30).all()
        assert cluster.resolver.cluster_spec().task_address("ps", 1) == before


async def test_what_was_begun_again_is_known_to_those_that_come_later() -> None:
    async with ThreadCluster(1, 1) as cluster:
        name = cluster.resolver.cluster_spec().task_address("ps", 0)
        seat = cluster.engine.seats["ps", 0]
        assert await seat.begun.get() == name
        await seat.lose()
        await seat.begun.get()
        await settle()
        assert "begun 2 times" in cluster._repr_html_()
        async with counting(cluster) as (coordinator, v):
            await cluster.scale(2)
            order = cluster.engine.seats["worker", 1].orders[0]
            assert list(order.places) == [name]
            assert name in order.names
            await count(coordinator, v, 10)
            assert (await v.read() == 10).all()


async def test_workers_come_and_leave_by_scale() -> None:
    async with ThreadCluster(1, 1) as cluster, counting(cluster) as (coordinator, v):
        await cluster.scale(3)
        await count(coordinator, v, 10)
        await cluster.scale(1)
        await count(coordinator, v, 10)
        assert (await v.read() == 20).all()
        assert cluster.engine.seats["worker", 2].task.done.result() == ""
        with pytest.raises(ConfigurationError, match="five chairs"):
            await cluster.scale(6)


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_a_task_that_is_lost_too_often_is_given_up(max_restarts: int) -> None:
    async with ThreadCluster(1, 2, max_restarts) as cluster:
        address = cluster.resolver.cluster_spec().task_address("worker", 1)
        given_up, seat = cluster.resolver.platform.given_up, cluster.engine.seats["worker", 1]
        gone: asyncio.Queue[str] = asyncio.Queue()
        given_up.listen(lambda at, reason: gone.put_nowait(f"{at}: {reason}"))
        for _ in range(max_restarts + 1):
            await seat.begun.get()
            await settle()
            await seat.lose()
        said = await gone.get()
        assert said.startswith(f"{address}: its process was killed, and is not started again (")


async def test_a_task_whose_engine_has_no_place_for_it_is_given_up_at_once() -> None:
    async with ThreadCluster(1, 2) as cluster:
        address = cluster.resolver.cluster_spec().task_address("worker", 1)
        given_up, seat = cluster.resolver.platform.given_up, cluster.engine.seats["worker", 1]
        gone: asyncio.Queue[str] = asyncio.Queue()
        given_up.listen(lambda at, reason: gone.put_nowait(f"{at}: {reason}"))
        seat.is_gone_for_good = True
        await seat.lose()
        assert await gone.get() == (
            f"{address}: nobody sits here any more, and is not started again"
        )
