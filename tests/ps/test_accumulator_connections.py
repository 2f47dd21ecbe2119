"""Accumulators over connections: large gradients, takes that wait, and what ends a wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from inside import accumulators_of
from memory_cluster import until
from ps_cluster import OTHER, WORKER, PsCluster
from psync.client.ps_client import PsClient
from psync.errors import (
    FencedError,
    PsyncError,
    ValueMismatchError,
)
from psync.ps.takes import HostedAccumulator
from psync.wire.codec import Message
from psync.wire.frames import Frame
from psync.wire.messages import (
    ApplyGradient,
    DefineAccumulator,
    Done,
    Fence,
    GradientApplied,
    GradientTaken,
    TakeGradient,
)
from psync.wire.tensors import to_bytes_view

pytestmark = pytest.mark.virtual_time

DENSE = DefineAccumulator("g", "dense", "float32", None, "MEAN", "", False, 0)
LARGE = (6 << 20) // 4  # elements of float32: several pieces


class Scene:
    """One ps, the chief, and two workers of incarnation 1000."""

    def __init__(self, cluster: PsCluster) -> None:
        self.cluster = cluster
        self.chief = cluster.chief
        self.a = cluster.client(WORKER, 1000, host="a")
        self.b = cluster.client(OTHER, 1000, host="b")
        self.service = accumulators_of(cluster.ps[0])
        self._sequences: dict[PsClient, int] = {}

    async def define(self, definition: DefineAccumulator = DENSE) -> HostedAccumulator:
        assert await self.ask(self.chief, definition) == Done()
        return self.hosted(definition)

    def hosted(self, definition: DefineAccumulator = DENSE) -> HostedAccumulator:
        return self.service.hosted[definition.name]

    async def call(
        self, client: PsClient, message: Message, segments: Sequence[memoryview] = ()
    ) -> Frame:
        return await client.links[0].call(lambda _: message, segments)

    async def ask(self, *args: Any) -> Message:
        return (await self.call(*args)).message

    async def apply(
        self,
        client: PsClient,
        gradient: Any,
        *,
        local_step: int = 0,
        weight: float = 1.0,
        closure: int = -1,
        ordinal: int = 0,
        sequence: int = 0,
        definition: DefineAccumulator = DENSE,
    ) -> GradientApplied:
        if not sequence:
            sequence = self._sequences[client] = self._sequences.get(client, 0) + 1
        array = np.asarray(gradient, np.float32)
        message = ApplyGradient(
            sequence, 1, closure, ordinal, definition.name, list(array.shape), None, local_step,
            weight,
        )  # fmt: skip
        answer = await self.ask(client, message, [to_bytes_view(array)])
        assert isinstance(answer, GradientApplied)
        return answer

    async def take(
        self,
        client: PsClient,
        num_required: int = 1,
        number: int = 1,
        acked_below: int = 1,
        definition: DefineAccumulator = DENSE,
    ) -> tuple[GradientTaken, list[np.ndarray]]:
        message = TakeGradient(definition.name, number, acked_below, num_required)
        received = await self.call(client, message)
        assert isinstance(received.message, GradientTaken)
        return received.message, [np.frombuffer(*received.segments, np.float32)]

    async def value(self, *args: Any, **options: Any) -> list[float]:
        _, arrays = await self.take(*args, **options)
        return arrays[-1].tolist()

    async def waiting(self, *args: Any, **options: Any) -> asyncio.Task[list[float]]:
        """Begin a take that does not end at once."""
        task = asyncio.create_task(self.value(*args, **options))
        await asyncio.sleep(1)
        assert not task.done()
        return task

    async def waiting_for_value(self, client: PsClient) -> asyncio.Task[Any]:
        """Begin a take that gets its gradients at once, and its value later."""
        task = asyncio.create_task(self.take(client))
        for _ in range(50):  # no time passes while something is being computed
            await asyncio.sleep(0)
        assert not task.done()
        return task

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.cluster.ps[0].statistics()["accumulators"]
        return counters

    def held(self) -> tuple[int, int, int, int]:
        """Gradients held, the step, takes that wait, values that are kept."""
        rule, counters = self.hosted().rule, self.counters()
        return rule.num_accumulated(), rule.step, counters["waiting"], counters["kept"]


@pytest.fixture
async def scene(clean_loop: None) -> AsyncIterator[Scene]:
    async with PsCluster() as cluster:
        made = Scene(cluster)
        await made.define()
        yield made


# --- large ones ------------------------------------------------------------------------------


async def begun(ps):
    """Wait until something is being computed."""
    await until(lambda: not ps.services.executor.computes.is_idle)


async def slow_addition(scene):
    """Apply a large gradient that is not added before its ``Event`` is set, or a long time."""
    rule, go_on = scene.hosted().rule, asyncio.Event()
    plain = rule._add

    def slowly(gradient: np.ndarray, weight: float) -> Any:
        adding = plain(gradient, weight)
        for _ in range(2000):
            if not go_on.is_set():
                yield
        yield from adding

    rule._add = slowly
    adding = asyncio.create_task(scene.apply(scene.a, np.ones(LARGE, np.float32)))
    await begun(scene.cluster.ps[0])
    del rule._add
    return adding, go_on


async def test_a_take_gets_what_was_judged_before_it_and_its_value_when_that_is_added(scene):
    adding, go_on = await slow_addition(scene)
    first = await scene.waiting_for_value(scene.chief)
    assert scene.held() == (0, 1, 0, 1)  # it has its gradient: who comes later is stale
    assert (await scene.apply(scene.b, [5.0])).outcome == "stale"
    behind = asyncio.create_task(scene.apply(scene.b, [7.0], local_step=1))
    again = await scene.waiting_for_value(scene.chief)
    assert not adding.done()
    assert not behind.done()
    go_on.set()
    (_, (mean,)), (_, (same,)) = await first, await again
    assert (mean == 1).all()
    assert (same == mean).all()
    assert (await behind).count == (await adding).count == 1
    assert await scene.value(scene.a) == [7]


async def test_a_fence_does_not_undo_a_take_that_has_its_gradients(scene):
    adding, go_on = await slow_addition(scene)
    first = await scene.waiting_for_value(scene.b)
    fence = asyncio.create_task(scene.ask(scene.chief, Fence(OTHER, 1001)))
    assert await fence == Done()
    assert scene.held() == (0, 1, 0, 0)
    go_on.set()
    await adding
    with pytest.raises(FencedError):  # its connection was cut
        await first
    assert scene.held() == (0, 1, 0, 0)


async def test_a_large_gradient_that_is_refused_leaves_nothing(scene):
    forbids = DefineAccumulator("f", "dense", "float32", None, "MEAN", "", True, 0)
    await scene.define(forbids)
    large = np.ones(LARGE, np.float32)
    large[-1] = np.nan
    with pytest.raises(ValueMismatchError, match="expected finite values, got 1 of"):
        await scene.apply(scene.a, large, definition=forbids)
    large[-1] = 1
    assert (await scene.apply(scene.a, large, definition=forbids)).count == 1


async def test_a_sum_torn_half_way_ends_the_task(scene, caplog):
    (ps,) = scene.cluster.ps
    large = np.ones(LARGE, np.float32)
    await scene.apply(scene.a, large)

    def adding(values: np.ndarray, weight: float) -> Any:
        yield
        raise MemoryError

    scene.hosted().rule._sum.adding = adding
    with pytest.raises(PsyncError):
        await scene.apply(scene.a, large)
    (ps,) = scene.cluster.ps
    assert ps.is_torn
    assert ps.stopped.is_set()
    assert "failed partway" in caplog.text


# --- takes -----------------------------------------------------------------------------------


async def test_of_many_takes_that_go_together_none_gets_what_another_leaves(scene):
    await scene.apply(scene.b, [1, 3])
    takes = [await scene.waiting(scene.a, 3 if n == 1 else 1, number=n) for n in (1, 2, 3)]
    scene.cluster.network.partition("a")
    scene.cluster.network.cut("a")
    await asyncio.sleep(1)
    assert scene.held() == (1, 0, 0, 0)
    scene.cluster.network.heal("a")
    await asyncio.sleep(5)
    assert scene.held() == (1, 0, 3, 0)  # they are back, and the first one waits for two more
    await scene.ask(scene.chief, Fence(WORKER, 1001))
    assert scene.held() == (1, 0, 0, 0)
    ends = await asyncio.gather(*takes, return_exceptions=True)
    assert [type(end) for end in ends] == [FencedError] * 3


async def test_a_fenced_client_takes_nothing(scene):
    taking = await scene.waiting(scene.a)
    behind = await scene.waiting(scene.b)
    await scene.ask(scene.chief, Fence(WORKER, 1001))
    with pytest.raises(FencedError, match="has been replaced by"):
        await taking
    await scene.apply(scene.b, [1, 3])
    assert await behind == [1, 3]
    with pytest.raises(FencedError):
        await scene.value(scene.a, number=2)
    with pytest.raises(FencedError):
        await scene.apply(scene.a, [1, 3])


@pytest.mark.parametrize("completed_by", ["a gradient", "itself"])
async def test_a_value_for_which_there_is_no_memory_ends_the_task_and_answers_nobody(
    scene, completed_by
):
    def no_memory() -> Any:
        raise MemoryError
        yield

    scene.hosted().rule._reduce = no_memory
    taking = asyncio.create_task(scene.value(scene.b))
    if completed_by == "itself":
        await scene.apply(scene.a, [1, 3])
        await asyncio.sleep(1)
    else:
        await asyncio.sleep(1)
        with pytest.raises(Exception, match="MemoryError"):
            await scene.apply(scene.a, [1, 3])
    assert scene.cluster.ps[0].is_torn
    assert not taking.done()
    taking.cancel()
