"""What a task sends, and what it sends again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from inside import ledger_of
from ps_cluster import OTHER, WORKER, PsCluster, until
from psync.client.accumulator_client import AccumulatorClient, Place
from psync.errors import ConfigurationError
from psync.wire.messages import AccumulatorState, DefineAccumulator, GradientApplied
from psync.wire.tensors import to_bytes_view

pytestmark = pytest.mark.virtual_time

PLACE = Place(DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0), 1)


class Scene:
    """Two ps tasks, an accumulator on the second one, and two workers."""

    def __init__(self, cluster: PsCluster) -> None:
        self.cluster = cluster
        self.links_of_a = cluster.client(WORKER, 1000, host="a")
        self.a = AccumulatorClient(self.links_of_a)
        self.b = AccumulatorClient(cluster.client(OTHER, 1000, host="b"))

    async def apply(
        self, client: AccumulatorClient, value: float, closure: int = -1
    ) -> GradientApplied:
        array = np.full(2, value, np.float32)
        return await client.apply(
            PLACE, [to_bytes_view(array)], [2], None, local_step=0, weight=1.0, closure=closure,
            ordinal=0,
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.cluster.ps[1].statistics()["accumulators"]
        return counters


@pytest.fixture
async def scene(clean_loop: None) -> AsyncIterator[Scene]:
    async with PsCluster(2) as cluster:
        yield Scene(cluster)


async def test_an_accumulator_is_made_where_it_belongs_when_it_is_first_used(scene):
    assert scene.counters()["accumulators"] == 0
    assert await scene.a.state(PLACE) == AccumulatorState(0, 0)
    assert scene.counters()["accumulators"] == 1
    assert scene.cluster.ps[0].statistics()["accumulators"]["accumulators"] == 0


async def test_another_one_of_that_name_is_refused_at_each_use(scene):
    await scene.a.state(PLACE)
    other = Place(DefineAccumulator("g", "dense", "float64", None, "MEAN", "", False, 0), 1)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="other parameters than at first"):
            await scene.b.state(other)


async def test_an_apply_whose_answer_is_lost_is_sent_again_and_counts_once(scene):
    await scene.a.state(PLACE)
    ledger = ledger_of(scene.cluster.ps[1])
    applying = asyncio.create_task(scene.apply(scene.a, 1.0))
    await until(lambda: scene.counters()["gradients"])
    scene.cluster.network.cut("a")
    assert not applying.done()
    assert await applying == GradientApplied("accepted", 1, 0)
    assert scene.counters()["gradients"] == 1
    assert ledger.statistics().duplicate == 1


async def test_an_apply_once_begun_ends_though_nobody_waits_for_it(scene):
    await scene.a.state(PLACE)
    scene.cluster.network.partition("a")
    scene.cluster.network.cut("a")
    applying = asyncio.create_task(scene.apply(scene.a, 1.0))
    await asyncio.sleep(1)
    applying.cancel()
    await asyncio.sleep(1)
    assert applying.cancelled()
    assert scene.counters()["gradients"] == 0
    scene.cluster.network.heal("a")
    await asyncio.sleep(5)
    assert scene.counters()["gradients"] == 1


async def test_the_same_call_of_a_closure_counts_once_whoever_makes_it(scene):
    await scene.apply(scene.a, 1.0, closure=5)
    assert (await scene.apply(scene.b, 1.0, closure=5)).outcome == "duplicate"
    await scene.a.set_step(PLACE, 9, closure=6, ordinal=0)
    await scene.a.set_step(PLACE, 4, closure=-1, ordinal=0)
    answer = await scene.b.set_step(PLACE, 9, closure=6, ordinal=0)
    assert answer == GradientApplied("duplicate", 1, 4)


async def test_takes_are_numbered_and_acknowledged(scene):
    first = asyncio.create_task(scene.a.take(PLACE, 1))
    second = asyncio.create_task(scene.a.take(PLACE, 1))
    await asyncio.sleep(1)
    assert scene.counters()["waiting"] == 2
    second.cancel()
    await asyncio.sleep(1)
    assert scene.counters()["waiting"] == 1
    await scene.apply(scene.b, 1.0)
    await first
    await asyncio.sleep(1)
    assert (scene.counters()["waiting"], scene.counters()["kept"]) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_connections_break_each_gradient_is_taken_once(seed):
    chaos = random.Random(seed)
    sums = Place(DefineAccumulator("g", "dense", "float64", [], "SUM", "", False, 1 << 40), 0)
    async with PsCluster(seed=seed, latency=(0.001, 0.02)) as cluster:
        clients = [
            AccumulatorClient(cluster.client(task, 1000, host=host))
            for task, host in ((WORKER, "a"), (OTHER, "b"))
        ]
        taken: list[float] = []

        async def gives(client: AccumulatorClient) -> None:
            for _ in range(40):
                one = to_bytes_view(np.ones((), np.float64))
                await client.apply(
                    sums, [one], [], None, local_step=0, weight=1.0, closure=-1, ordinal=0
                )
                await asyncio.sleep(chaos.random() / 10)

        async def takes(client: AccumulatorClient) -> None:
            while True:
                _, (value,) = await client.take(sums, chaos.randint(1, 4))
                taken.append(float(np.frombuffer(value, np.float64)[0]))

        async def cuts() -> None:
            while True:
                await asyncio.sleep(chaos.random() / 4)
                cluster.network.cut(chaos.choice("ab"))

        others = [asyncio.create_task(work) for work in (*map(takes, clients * 2), cuts())]
        await asyncio.gather(*map(gives, clients))
        others.pop().cancel()
        await asyncio.sleep(60)  # what was asked for when the last connection broke
        left = (await clients[0].state(sums)).count
        assert sum(taken) + left == 80
        for task in others:
            task.cancel()
        await asyncio.sleep(1)
        assert cluster.ps[0].statistics()["accumulators"]["waiting"] == 0
        assert cluster.ps[0].statistics()["accumulators"]["kept"] == 0
