"""Ticks that are answered when the worker may go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inside import clocks_of
from ps_by_hand import COORDINATOR, A, PsByHand
from ps_cluster import OTHER, WORKER, PsCluster
from psync.client.ps_client import PsClient
from psync.errors import ConfigurationError, FencedError, RemoteProtocolError
from psync.wire.messages import (
    AskStatistics,
    ClockTicked,
    Fence,
    ReportSchedule,
    Statistics,
    TickClock,
)

pytestmark = pytest.mark.virtual_time

BOUND = 3  # the optimizer's number


class Scene:
    """One ps, the chief's link to it, and two workers of incarnation 1000."""

    def __init__(self, cluster: PsCluster) -> None:
        self.cluster = cluster
        self.a = cluster.client(WORKER, 1000, host="a")
        self.b = cluster.client(OTHER, 1000, host="b")
        self.version = 0
        self.numbers: dict[PsClient, int] = {}

    async def report(
        self, *workers: int, queued: bool = True, in_flight: tuple[int, ...] = (), version: int = 0
    ) -> None:
        self.version = version or self.version + 1
        message = ReportSchedule(
            self.version, [(index, 1000) for index in workers], [], queued,
            [(closure, index) for closure, index in enumerate(in_flight)],
        )  # fmt: skip
        await self.cluster.chief.links[0].call(lambda _: message)

    async def tick(
        self,
        client: PsClient,
        max_staleness: int = 0,
        number: int | None = None,
        bound: int = BOUND,
    ) -> int:
        """Do a round; return how far ahead it was when the answer came."""
        if number is None:
            number = self.numbers[client] = self.numbers.get(client, 0) + 1
        received = await client.links[0].call(lambda _: TickClock(bound, max_staleness, number))
        assert isinstance(received.message, ClockTicked)
        return received.message.ahead

    async def waiting(self, *args: object, **kwargs: object) -> asyncio.Task[int]:
        """Do a round that does not end at once."""
        task = asyncio.create_task(self.tick(*args, **kwargs))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        assert not task.done()
        return task

    async def counters(self) -> dict[str, object]:
        received = await self.cluster.chief.links[0].call(lambda _: AskStatistics())
        assert isinstance(received.message, Statistics)
        counters: dict[str, object] = received.message.counters["clocks"][str(BOUND)]
        return counters


@pytest.fixture
async def scene(clean_loop: None) -> AsyncIterator[Scene]:
    async with PsCluster() as cluster:
        yield Scene(cluster)


async def test_a_report_names_who_waits_and_for_whom(scene):
    await scene.report(0, 1)
    clocks = clocks_of(scene.cluster.ps[0])
    assert clocks.describe() == []
    first = await scene.waiting(scene.a)
    assert clocks.describe() == [
        f"staleness bound {BOUND}: waiting {WORKER}; slowest {OTHER}, at round 0"
    ]
    await scene.tick(scene.b)
    await first
    assert clocks.describe() == []


async def test_a_tick_that_waited_for_the_schedule_is_refused_if_its_worker_was_replaced(scene):
    first = await scene.waiting(scene.a)
    await scene.cluster.chief.links[0].call(lambda _: Fence(WORKER, 1001))
    await scene.report(0, 1)
    with pytest.raises(FencedError):
        await first


async def test_of_two_that_ask_for_the_same_tick_one_may_give_up(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a, number=1)
    again = await scene.waiting(scene.a, number=1)
    first.cancel()
    await asyncio.sleep(1)
    assert not again.done()
    await scene.tick(scene.b)
    assert await again == 0


async def test_the_end_of_training_releases_everybody_for_ever(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    clocks_of(scene.cluster.ps[0]).end()
    await first
    await scene.tick(scene.a)
    clocks_of(scene.cluster.ps[0])._bounds.clear()
    await scene.tick(scene.a)  # nor does anybody wait because of a bound that is new


async def test_one_optimizer_has_one_bound(scene):
    await scene.report(0)
    await scene.tick(scene.a, 2)
    with pytest.raises(ConfigurationError, match="has a staleness bound of 2 rounds, got 3"):
        await scene.tick(scene.b, 3)


@pytest.mark.parametrize(("number", "bound"), [(0, 1), (-1, 1), (1, -1)])
def test_numbers_out_of_range_are_refused(number, bound):
    with pytest.raises(RemoteProtocolError, match=f"got tick {number} and bound {bound}"):
        PsByHand().ask(A, TickClock(BOUND, bound, number))


def test_an_incarnation_that_was_replaced_does_not_tick():
    ps = PsByHand()
    ps.ask(COORDINATOR, Fence(WORKER, 1001))
    with pytest.raises(FencedError, match="has been replaced by 1001"):
        ps.ask(A, TickClock(BOUND, 0, 1))
