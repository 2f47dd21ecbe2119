"""Ticks that are answered when the worker may go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inside import clocks_of
from ps_by_hand import COORDINATOR, A, PsByHand
from ps_cluster import CHIEF, OTHER, WORKER, PsCluster
from psync.client.ps_client import PsClient
from psync.errors import ConfigurationError, FencedError, RemoteProtocolError
from psync.wire.messages import (
    AskStatistics,
    AwaitWaiters,
    ClockTicked,
    Done,
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


OTHER_BOUND = 4


@pytest.fixture
async def scene(clean_loop: None) -> AsyncIterator[Scene]:
    async with PsCluster() as cluster:
        yield Scene(cluster)


async def test_a_tick_is_answered_when_the_others_have_ticked(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    assert await scene.tick(scene.b) == 0
    assert await first == 0
    assert await scene.counters() == {
        "max_staleness": 0, "clocks": {WORKER: 1, OTHER: 1}, "ticks": 2, "waits": 1, "waiting": 0,
    }  # fmt: skip


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


async def test_the_first_tick_asks_for_the_schedule_and_waits_for_it(scene):
    asked = asyncio.create_task(scene.cluster.chief.links[0].call(lambda _: AwaitWaiters()))
    await asyncio.sleep(1)
    assert not asked.done()
    first = await scene.waiting(scene.a)
    assert isinstance((await asked).message, Done)
    await scene.report(0, 1)
    await asyncio.sleep(1)
    assert not first.done(), "the other one, of whom nobody knew, has not ticked"
    assert await scene.tick(scene.b) == 0
    assert await first == 0


async def test_a_tick_that_waited_for_the_schedule_is_refused_if_its_worker_was_replaced(scene):
    first = await scene.waiting(scene.a)
    await scene.cluster.chief.links[0].call(lambda _: Fence(WORKER, 1001))
    await scene.report(0, 1)
    with pytest.raises(FencedError):
        await first


@pytest.mark.parametrize(
    ("workers", "in_flight"), [((0,), None), ((0, 1), (0,))], ids=["lost", "without work"]
)
async def test_a_report_that_somebody_is_lost_or_has_no_work_releases_the_others(
    scene, workers, in_flight
):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    await scene.report(0, 1, queued=False, in_flight=(0, 1))
    await asyncio.sleep(1)
    assert not first.done()
    await scene.report(*workers, queued=in_flight is None, in_flight=in_flight or ())
    assert await first == 0


async def test_an_older_report_is_ignored(scene):
    await scene.report(0, 1, version=7)
    first = await scene.waiting(scene.a)
    await scene.report(0, version=6)
    await asyncio.sleep(1)
    assert not first.done()
    await scene.report(0, version=8)
    await first


async def test_a_tick_that_is_sent_again_after_a_lost_connection_counts_once(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    scene.cluster.network.cut("a")
    await asyncio.sleep(5)
    assert not first.done()
    await scene.tick(scene.b)
    assert await first == 0
    assert (await scene.counters())["ticks"] == 2


async def test_a_wait_that_is_cancelled_leaves_nothing(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    first.cancel()
    await asyncio.sleep(1)
    counters = await scene.counters()
    assert counters["waiting"] == 0
    assert counters["clocks"] == {WORKER: 1, OTHER: 0}
    await scene.tick(scene.b)


async def test_of_two_that_ask_for_the_same_tick_one_may_give_up(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a, number=1)
    again = await scene.waiting(scene.a, number=1)
    first.cancel()
    await asyncio.sleep(1)
    assert not again.done()
    await scene.tick(scene.b)
    assert await again == 0


async def test_who_waits_at_one_clock_is_not_waited_for_at_another(scene):
    await scene.report(0, 1)
    at_one = await scene.waiting(scene.a)
    assert [await scene.tick(scene.b, 0, number, OTHER_BOUND) for number in (1, 2)] == [0, 0]
    assert not at_one.done()  # the other one works
    assert await scene.tick(scene.b) == 0
    assert await at_one == 0
    (await scene.waiting(scene.b, 0, 3, OTHER_BOUND)).cancel()  # and now both do


async def test_of_two_that_wait_at_two_clocks_only_one_goes_on(scene):
    await scene.report(0, 1, 2)
    at_one = await scene.waiting(scene.a)
    at_other = await scene.waiting(scene.b, 0, 1, OTHER_BOUND)  # for the third
    await scene.report(0, 1)  # it is gone
    done, waiting = await asyncio.wait([at_one, at_other], timeout=1)
    assert (len(done), len(waiting)) == (1, 1)
    waiting.pop().cancel()


async def test_who_gives_up_at_another_clock_is_waited_for_again(scene):
    await scene.report(0, 1)
    both = [scene.tick(client, 0, 1, OTHER_BOUND) for client in (scene.a, scene.b)]
    assert await asyncio.gather(*both) == [0, 0]
    (await scene.waiting(scene.a)).cancel()
    await asyncio.sleep(1)
    at_other = await scene.waiting(scene.b, 0, 2, OTHER_BOUND)
    assert await scene.tick(scene.a, 0, 2, OTHER_BOUND) == 0
    assert await at_other == 0


async def test_who_is_let_go_at_one_clock_is_waited_for_at_another_at_once(scene):
    await scene.report(0, 1, 2)
    third = scene.cluster.client("/job:worker/task:2", 1000, host="c")
    await asyncio.gather(*map(scene.tick, (scene.a, scene.b, third)))
    await scene.tick(third, 1, 1, OTHER_BOUND)
    await scene.tick(scene.b, 1, 1, OTHER_BOUND)
    at_other = await scene.waiting(scene.b, 1, 2, OTHER_BOUND)  # for the first worker
    at_one = await scene.waiting(scene.a)  # for the third; so the second is let go
    assert await at_other == 1
    assert not (at_one_too := await scene.waiting(third)).done()  # the second one works
    assert await scene.tick(scene.b) == 0
    assert await asyncio.gather(at_one, at_one_too) == [0, 0]


async def test_a_new_coordinator_finds_no_clocks_and_nobody_waiting(scene):
    await scene.report(0, 1)
    first = await scene.waiting(scene.a)
    await scene.cluster.attach(scene.cluster.client(CHIEF, 200), 200)
    await first
    (ps,) = scene.cluster.ps
    assert ps.statistics()["clocks"] == {}


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
