"""psync.empty_like: which arrays it returns, and programs that write to them after each push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import TWO_SHARDS, MemoryCluster, running
from psync.testing import MemoryNetwork
from psync.testing.link import Direction
from psync.testing.simulation.tight import tightened
from psync.wire.frames import SMALL_BODY_BYTES

pytestmark = pytest.mark.timeout(30)

LARGE = (300, 200)  # float32: 234 KiB, half of it on each ps
SMALL = (30, 20)
OVERWRITTEN = np.float32(1e30)


class Pair(NamedTuple):
    large: Any
    small: Any


@asynccontextmanager
async def one_host(
    num_workers: int = 2, **options: Any
) -> AsyncIterator[tuple[psync.ClusterCoordinator, Pair]]:
    network = MemoryNetwork(chunk=(1 << 16, 1 << 20), shares_memory=True)
    async with running(MemoryCluster(2, num_workers, network=network)) as cluster:
        strategy = cluster.strategy(TWO_SHARDS, **options)
        with strategy.scope():
            model = Pair(
                psync.Variable(np.zeros(LARGE, np.float32), name="large"),
                psync.Variable(np.zeros(3, np.float64), name="small"),
            )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            yield coordinator, model


async def test_arrays_are_nested_and_shaped_as_the_variables() -> None:
    async with one_host() as (_, model):
        made = psync.empty_like({"all": model, "again": [model.large], "other": "x"})
        large, small = made["all"]
        assert isinstance(made["all"], Pair)
        assert (large.shape, large.dtype, small.shape, small.dtype) == (LARGE, "f4", (3,), "f8")
        assert made["again"][0] is large
        assert made["other"] == "x"
        assert psync.empty_like(model.large) is not large


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"compression": "bf16"}]
)
async def test_steps_write_to_their_gradients_once_they_are_pushed(options: Any) -> None:
    sgd = psync.optimizers.SGD(0.5, **options)

    async def step(number: int) -> bool:
        gradients = psync.empty_like(model)
        for gradient in gradients:
            gradient.fill(2)
        await sgd.apply_gradients(zip(gradients, model, strict=True))
        for gradient in gradients:
            gradient.fill(OVERWRITTEN)
        return bool((gradients.large == OVERWRITTEN).all())

    async with one_host() as (coordinator, model):
        values = [coordinator.schedule(step, (number,)) for number in range(8)]
        await coordinator.join()
        assert all(await coordinator.fetch(values))
        updates = 4 if "gradient_accumulation_steps" in options else 8
        for value in await psync.pull(model):
            assert (value == -updates).all()


async def test_a_plain_step_makes_them_in_its_thread() -> None:
    sgd = psync.optimizers.SGD(0.5)

    def step() -> bool:
        gradient = psync.empty_like(model.large)
        np.subtract(psync.wait(psync.pull(model.large)), 1, out=gradient)
        psync.wait(sgd.apply_gradients([(gradient, model.large)]))
        return bool((gradient == -1).all())

    async with one_host(1) as (coordinator, model):
        assert await coordinator.schedule(step)
        assert (await model.large.read() == 0.5).all()


async def test_the_program_pushes_from_its_own_memory_and_assigns_and_returns_it() -> None:
    sgd = psync.optimizers.SGD(0.5)

    async def step() -> np.ndarray:
        array = psync.empty_like(model.large)
        array.fill(7)
        return array

    async with one_host(1) as (coordinator, model):
        array = psync.empty_like(model.large)
        for number in range(3):
            array.fill(number)
            await model.large.assign(array)
            array.fill(OVERWRITTEN)
            assert (await model.large.read() == number).all()
            array.fill(2)
            await sgd.apply_gradients([(array[:], model.large)])
            array.fill(OVERWRITTEN)
            assert (await model.large.read() == number - 1).all()
        assert (await coordinator.schedule(step) == 7).all()


async def test_a_push_that_is_cancelled_counts_as_it_was_if_others_are_made_then() -> None:
    sgd = psync.optimizers.SGD(0.5)
    async with one_host(1) as (_, model):
        for _ in range(10):
            gradient = psync.empty_like(model.large)
            gradient.fill(2)
            push = asyncio.ensure_future(sgd.apply_gradients([(gradient, model.large)]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            push.cancel()
            del gradient
            other = psync.empty_like(model.large)
            other.fill(OVERWRITTEN)
            await asyncio.gather(push, return_exceptions=True)
        value = await model.large.read()
        assert value.min() == value.max() >= -10


@pytest.mark.parametrize("options", [{}, {"total_num_replicas": 2, "replicas_to_aggregate": 1}])
async def test_synchronous_steps_are_of_what_was_pushed_though_it_is_overwritten(
    options: Any,
) -> None:
    network = MemoryNetwork(chunk=(1 << 16, 1 << 20), shares_memory=True)
    async with running(MemoryCluster(2, 2, network=network)) as cluster:
        strategy = cluster.strategy(TWO_SHARDS)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(LARGE, np.float32), name="w")
                global_step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(
                psync.optimizers.SGD(1.0), **({"replicas_to_aggregate": 2} | options)
            )

            async def step() -> str:
                value = await psync.pull(w)
                gradient = psync.empty_like(w)
                gradient.fill(-1)
                result = await optimizer.apply_gradients([(gradient, w)], global_step)
                gradient.fill(OVERWRITTEN)
                # What was pulled while a step was applied is of two, and counts in none.
                assert (value == value[0, 0]).all() or result.outcome.value == "stale"
                return str(result.outcome.value)

            values = [coordinator.schedule(step) for _ in range(24)]
            await coordinator.join()
            assert set(await coordinator.fetch(values)) <= {"accepted", "stale"}
            assert (await w.read() == int(await global_step.read())).all()
            for n in range(2):
                assert cluster.ps(f"ps-{n}").statistics()["network"]["bytes_borrowed"]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (LARGE, {}),
        (SMALL, {"lent": 0}),
        (LARGE, {"lent": 1 << 20, "small bodies": 1 << 20}),
    ],
    ids=["large", "small and lent", "large and copied"],
)
async def test_a_synchronous_push_that_returns_before_its_step_is_closed_counts_as_it_was(
    shape: tuple[int, int], sizes: dict[str, float]
) -> None:
    network = MemoryNetwork(chunk=(1 << 16, 1 << 20), shares_memory=True)
    with tightened(sizes):
        async with running(MemoryCluster(2, 1, network=network)) as cluster:
            strategy = cluster.strategy(TWO_SHARDS)
            async with psync.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    w = psync.Variable(np.zeros(shape, np.float32), name="w")
                    global_step = psync.get_or_create_global_step()
                optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)
                await optimizer.init_tokens(global_step, 1)

                async def step() -> list[int]:
                    counts = []
                    for _ in range(2):  # there is a token for the first one, before the second
                        gradient = psync.empty_like(w)
                        gradient.fill(-1)
                        result = await optimizer.apply_gradients([(gradient, w)], global_step)
                        gradient.fill(OVERWRITTEN)
                        counts.append(result.count)
                    return counts

                assert await coordinator.schedule(step) == [0, 2]
                assert (await w.read() == 1).all()


@pytest.mark.parametrize(
    ("shape", "is_rows"),
    [(LARGE, False), (LARGE, True), ((2, SMALL_BODY_BYTES // 4), False)],
    ids=["large", "rows", "just small"],
)
async def test_a_synchronous_push_that_is_cancelled_reads_no_gradient_afterwards(
    shape: tuple[int, int], is_rows: bool
) -> None:
    network = MemoryNetwork(chunk=(1 << 16, 1 << 20))

    def to_ps_1() -> list[Direction]:
        links = network.links("ps-1")
        return [link.to_server for link in links if link.ends.client_host == "worker-0"]

    async def step() -> None:
        gradient = np.full(shape, -1, np.float32)
        rows = psync.IndexedSlices(gradient, np.arange(len(gradient)), shape)
        pairs = [(rows if is_rows else gradient, w)]
        await psync.pull(w)
        push = asyncio.ensure_future(optimizer.apply_gradients(pairs, global_step))
        push.add_done_callback(lambda _: gradient.fill(OVERWRITTEN))
        ways = []
        while not any(way.buffered_bytes > SMALL_BODY_BYTES for way in ways):
            await asyncio.sleep(0)
            ways = memory_cluster.shared["to_ps_1"]()
        for way in ways:
            way.stall()
        push.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        for way in ways:
            way.flow()
        await asyncio.gather(push, return_exceptions=True)

    async with running(MemoryCluster(2, 1, network=network)) as cluster:
        strategy = cluster.strategy(TWO_SHARDS)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(shape, np.float32), name="w")
                global_step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)
            memory_cluster.shared["to_ps_1"] = to_ps_1
            await coordinator.schedule(step)
    network.check()
