"""A backup has all of the accumulators of its ps, bit for bit, whenever it was begun."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from backups import alone, back_up, take_over
from inside import accumulators_of, backup_of, settled, updates_of
from memory_cluster import until
from ps_cluster import OTHER, WORKER, PsCluster
from psync.client.ps_client import PsClient
from psync.errors import ValueMismatchError
from psync.ps.accumulators import AccumulatorService
from psync.ps_task import PsTask
from psync.store.ledger_snapshot import gradients_of
from psync.wire.codec import encode
from psync.wire.frames import Frame
from psync.wire.messages import (
    ApplyGradient,
    DefineAccumulator,
    Fence,
    GradientApplied,
    GradientTaken,
    SetAccumulatorStep,
    TakeGradient,
)
from psync.wire.tensors import to_bytes_view

DTYPES = {
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
    "float64": np.float64,
}  # fmt: skip
LARGE = (10 << 20) // 4  # elements of float32: several pieces


def dense(name: str = "g", dtype: str = "float32", reduction: str = "MEAN") -> DefineAccumulator:
    return DefineAccumulator(name, "dense", dtype, None, reduction, "", False, 0)


def sparse(name: str = "s", dtype: str = "float32", divisor: str = "per_index") -> Any:
    return DefineAccumulator(name, "sparse", dtype, None, "MEAN", divisor, False, 1)


class Scene:
    """Two ps tasks; the first one is backed up in the process of the other."""

    def __init__(self, cluster: PsCluster) -> None:
        self.cluster = cluster
        self.a = cluster.client(WORKER, 1000)
        self.b = cluster.client(OTHER, 1000)
        self.random = np.random.default_rng(5)
        self.sequence = 0

    async def ask(self, client: PsClient, message: Any, *segments: Any) -> Frame:
        return await client.links[0].call(lambda _: message, segments)

    async def apply(
        self,
        definition: DefineAccumulator,
        client: PsClient | None = None,
        *,
        values: Any = None,
        closure: int = -1,
        sequence: int = 0,
        **options: Any,
    ) -> GradientApplied:
        """Apply a gradient, of random numbers, to random rows."""
        self.sequence += not sequence
        dtype = DTYPES[definition.dtype]
        if values is None:
            values = self.random.standard_normal((5, 3))
        values = np.asarray(values, dtype)
        segments = [to_bytes_view(values)]
        if definition.kind == "sparse":
            rows = self.random.integers(0, 9, len(values))
            segments.insert(0, to_bytes_view(rows))
        message = ApplyGradient(
            sequence or self.sequence, 0, closure, 0, definition.name, list(values.shape), None,
            options.get("local_step", 0), options.get("weight", 1.0),
        )  # fmt: skip
        answer = (await self.ask(client or self.a, message, *segments)).message
        assert isinstance(answer, GradientApplied)
        return answer

    async def take(
        self, definition: DefineAccumulator, client: PsClient, number: int, required: int = 1,
        acked_below: int = 1,
    ) -> tuple[bytes, list[bytes]]:  # fmt: skip
        message = TakeGradient(definition.name, number, acked_below, required)
        received = await self.ask(client, message)
        assert isinstance(received.message, GradientTaken)
        return encode(received.message), [bytes(each) for each in received.segments]

    async def follow(self) -> None:
        """Ps 0 is lost, and everybody knows where its backup serves."""
        await take_over(self.cluster)
        for client in (self.a, self.b):
            link = client.links[0]
            link.revive()
            link.address = self.cluster.chief.links[0].address

    @property
    def backup(self) -> PsTask:
        task = backup_of(self.cluster.ps[1], 0)
        assert isinstance(task, PsTask)
        return task

    async def check_same(self) -> None:
        """The backup is what the primary is."""
        await settled(self.cluster.ps[1])
        assert everything(self.backup) == everything(self.cluster.ps[0])


def everything(task: PsTask) -> Any:
    service: AccumulatorService = accumulators_of(task)
    states = gradients_of(service.ledger, lambda a: encode(a) if a is not None else None)
    kinds = [each for each in states.answers if b"accepted" in each[-1] or each[-1]]
    return (
        {name: contents(hosted) for name, hosted in service.hosted.items()},
        sorted(kinds),
        sorted(states.calls),
    )


def contents(hosted: Any) -> Any:
    held = hosted.rule.held()
    takers = {
        client: (
            taker.acked_below,
            sorted(
                (n, encode(w.answer[0]), [bytes(each) for each in w.answer[1]])
                for n, w in taker.takes.items()
                if w.answer is not None
            ),
        )
        for client, taker in hosted.takers.items()
    }
    return (
        hosted.definition, hosted.rule.step, hosted.rule.num_accumulated(),
        held and (held.count, held.weight, held.shape, held.rows,
                  [(each.dtype, each.tobytes()) for each in held.arrays]),
        takers,
        [(wanted.name, take.num_required) for take, wanted in hosted.waiting.items()],
    )  # fmt: skip


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with PsCluster(2) as cluster:
        yield Scene(cluster)


async def busy(scene: Scene, definition: DefineAccumulator) -> list[asyncio.Task[Any]]:
    """Let something be held, something be kept, and somebody wait."""
    chief = scene.cluster.chief
    await scene.ask(chief, definition)
    await scene.apply(definition, scene.a, closure=1)
    await scene.take(definition, chief, 1)
    await scene.apply(definition, scene.a, closure=2, local_step=1, weight=3.0)
    await scene.apply(definition, scene.b, closure=3, local_step=1, weight=0.25)
    hosted = accumulators_of(scene.cluster.ps[0]).hosted[definition.name]
    waiting = []
    for client, required, number in ((chief, 4, 2), (scene.b, 1, 1)):
        waiting.append(asyncio.create_task(scene.take(definition, client, number, required)))
        await until(lambda: len(hosted.waiting) == len(waiting))
    return waiting


KINDS = [
    *[dense(dtype=dtype, reduction=how) for dtype in DTYPES for how in ("MEAN", "SUM")],
    *[sparse(dtype=dtype, divisor=how) for dtype in DTYPES for how in ("per_index", "total")],
]


@pytest.mark.promise("answers.accumulators-after-failover")
@pytest.mark.parametrize("definition", KINDS, ids=lambda d: f"{d.dtype}-{d.reduction}{d.divisor}")
@pytest.mark.parametrize("when", ["before", "after", "anew"])
async def test_a_backup_holds_and_gives_the_same_bits(
    scene: Scene, definition: DefineAccumulator, when: str
) -> None:
    if when != "after":
        await back_up(scene.cluster)
    waiting = await busy(scene, definition)
    if when == "anew":
        await alone(scene.cluster)
        await back_up(scene.cluster, 3)
    elif when == "after":
        await back_up(scene.cluster)
    await scene.check_same()
    await scene.apply(definition, scene.a, local_step=1)
    await scene.check_same()
    await scene.follow()
    hosted = accumulators_of(scene.backup).hosted[definition.name]
    await until(lambda: hosted.rule.step == 2 or len(hosted.waiting) == 2)  # in either order
    for _ in range(5):
        await scene.apply(definition, scene.b, local_step=3, weight=2.0)
    (_, first), (_, second) = await asyncio.gather(*waiting)
    assert first != second


async def test_what_was_answered_is_answered_again_by_the_backup(scene: Scene) -> None:
    g = dense()
    waiting = await busy(scene, g)
    first = await scene.take(g, scene.cluster.chief, 1)
    await back_up(scene.cluster)
    again = await scene.apply(g, scene.a, closure=2, sequence=2)
    assert again == GradientApplied("accepted", 1, 1)
    await scene.follow()
    assert await scene.take(g, scene.cluster.chief, 1) == first
    assert await scene.apply(g, scene.a, closure=2, sequence=2) == again
    assert (await scene.apply(g, scene.b, closure=1)).outcome == "duplicate"
    assert (await scene.apply(g, scene.b, closure=2)).outcome == "duplicate"
    for task in waiting:
        task.cancel()


async def test_a_large_sum_is_followed_in_pieces_and_gradients_come_one_after_the_other(
    scene: Scene,
) -> None:
    g = dense()
    await scene.ask(scene.cluster.chief, g)
    large = scene.random.standard_normal(LARGE)
    await scene.apply(g, values=large)
    await back_up(scene.cluster)
    await scene.check_same()
    chief = scene.cluster.chief
    hosted = accumulators_of(scene.cluster.ps[0]).hosted["g"]
    first = asyncio.create_task(scene.take(g, chief, 1, required=3))
    await until(lambda: len(hosted.waiting) == 1)
    second = asyncio.create_task(scene.take(g, scene.b, 1, required=2))
    await until(lambda: len(hosted.waiting) == 2)
    steps = [scene.apply(g, scene.a, values=large * n) for n in (2, 3)]
    applying = asyncio.gather(*steps)
    await until(lambda: updates_of(scene.cluster.ps[0]))
    first.cancel()  # while something is added
    await asyncio.gather(first, return_exceptions=True)
    answers = await applying
    assert {answer.outcome for answer in answers} <= {"accepted", "stale"}
    await second
    await scene.check_same()


async def test_steps_that_are_set_and_definitions_are_followed(scene: Scene) -> None:
    g = dense()
    await scene.ask(scene.cluster.chief, g)
    await back_up(scene.cluster)
    await scene.ask(scene.cluster.chief, sparse())
    await scene.ask(scene.a, SetAccumulatorStep(1, 0, -1, 0, "g", 7))
    await scene.apply(sparse(), scene.b, values=np.empty((0, 3)))
    await scene.apply(g, scene.b, values=np.empty((0, 3)), local_step=7)
    await scene.check_same()
    await alone(scene.cluster)
    await scene.take(sparse(), scene.b, 1)
    await scene.apply(sparse(), scene.b, values=np.empty((0, 3)), local_step=1)
    await scene.take(g, scene.b, 1)
    await back_up(scene.cluster, 3)
    await scene.check_same()
    await scene.follow()
    _, segments = await scene.take(g, scene.b, 1)
    assert b"".join(segments) == b""


async def test_a_fence_is_answered_when_all_is_done_that_follows_from_it(scene: Scene) -> None:
    g = dense()
    await scene.ask(scene.cluster.chief, g)
    await back_up(scene.cluster)
    hosted = accumulators_of(scene.cluster.ps[0]).hosted["g"]
    waiting = []
    for client, required in ((scene.b, 2), (scene.cluster.chief, 1)):
        waiting.append(asyncio.create_task(scene.take(g, client, 1, required)))
        await until(lambda: len(hosted.waiting) == len(waiting))
    await scene.apply(g, values=np.ones(LARGE))
    await scene.ask(scene.cluster.chief, Fence(OTHER, 1001))
    assert not hosted.waiting  # else what comes next would meet half of it
    await scene.check_same()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_is_refused_for_its_values_is_refused_by_the_backup(scene: Scene) -> None:
    forbids = dataclasses.replace(dense(), forbid_nonfinite=True)
    await scene.ask(scene.cluster.chief, forbids)
    await back_up(scene.cluster)
    large = np.ones(LARGE)
    for step, size in enumerate((LARGE, 3)):
        values = large[:size].copy()
        assert (await scene.apply(forbids, values=values, local_step=step)).count == 1
        values[-1] = np.inf
        with pytest.raises(ValueMismatchError, match="finite values, got 1 of"):
            await scene.apply(forbids, values=values, local_step=step)
        assert (await scene.apply(forbids, values=values, local_step=-1)).outcome == "stale"
        await scene.check_same()
        await scene.take(forbids, scene.b, 1 + step)


async def test_an_addition_for_which_there_is_no_memory_is_left_to_the_backup(
    scene: Scene,
) -> None:
    g = dense()
    await scene.ask(scene.cluster.chief, g)
    await back_up(scene.cluster)

    def no_memory(*_: Any) -> Any:
        raise MemoryError
        yield

    accumulators_of(scene.cluster.ps[0]).hosted["g"].rule._add = no_memory
    with pytest.raises(Exception, match="MemoryError"):
        await scene.apply(g)
    assert scene.cluster.ps[0].is_torn  # its process ends
    await scene.follow()
    assert (await scene.apply(g, sequence=1)).count == 1
    assert len((await scene.take(g, scene.cluster.chief, 1))[1]) == 1
