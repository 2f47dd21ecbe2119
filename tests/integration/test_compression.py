"""Compressed training by whole clusters: asynchronous, synchronous, with backups."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from memory_cluster import replicated
from psync import Outcome, optimizers
from psync.testing import run_virtual

SMALL, MIDDLE, LARGE = 10, 12_000, 40_000  # columns: of two rows of float32

each_kind = pytest.mark.parametrize("kind", ["bf16", "f16"])
each_size = pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])


def thirds(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [min(2, shape[0]), *[1] * (len(shape) - 1)] if shape else []


@each_kind
@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.Adam])
async def test_a_cluster_learns_as_well(kind: Any, make: Any) -> None:
    """The value follows the target of a quadratic loss; steps run on two workers."""
    target = np.random.default_rng(1).normal(size=(2, SMALL)).astype(np.float32)
    async with training(num_workers=2, partitioner=thirds) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.ones((2, SMALL), np.float32), name="v")
        optimizer = make(0.02, compression=kind)

        async def step() -> None:
            value = await psync.pull(v, compression=kind)
            await optimizer.apply_gradients([(value - target, v)])

        for _ in range(400):
            coordinator.schedule(step)
        await coordinator.join()
        assert np.abs(await v.read() - target).max() < 0.05


@each_kind
async def test_norms_are_measured_of_what_is_applied(kind: Any) -> None:
    """A shard on each ps: the ps tasks are asked for the norms of both, before each push."""
    rng = np.random.default_rng(2)
    gradients = rng.integers(-64, 64, size=(3, 2, SMALL)).astype(np.float32)
    found = []
    async with training(partitioner=thirds) as (strategy, _):
        for compression in (None, kind):
            with strategy.scope():
                v = psync.Variable(np.ones((2, SMALL), np.float32), name="v")
            optimizer = optimizers.Lamb(0.1, compression=compression)
            for gradient in gradients:
                await optimizer.apply_gradients([(gradient, v)])
            found.append(await v.read())
    np.testing.assert_array_equal(*found)


@each_kind
@each_size
async def test_synchronous_steps_apply_the_mean_of_what_was_rounded(kind: Any, size: int) -> None:
    dtype = psync.specs.dtype_of({"bf16": "bfloat16", "f16": "float16"}[kind])
    async with training(num_workers=1, partitioner=thirds) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros((2, size), np.float32), name="v")
            w = psync.Variable(np.zeros(3), name="w")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(optimizers.SGD(1.0, compression=kind), 2, 1)
        gradients = np.random.default_rng(3).normal(size=(4, 2, size)).astype(np.float32)

        async def step(number: int) -> Outcome:
            await psync.pull((v, w))
            pairs = [(gradients[number], v), (np.full(3, 1 / 3), w)]
            return (await optimizer.apply_gradients(pairs, global_step)).outcome

        for number in range(4):
            assert await coordinator.schedule(step, args=(number,)) is Outcome.ACCEPTED
        sent, owed = [], np.zeros((2, size), np.float32)
        for gradient in gradients:
            total = gradient + owed
            sent.append(total.astype(dtype).astype(np.float32))
            owed = total - sent[-1]
        expected = -((sent[0] + sent[1]) / 2) - (sent[2] + sent[3]) / 2
        np.testing.assert_array_equal(await v.read(), expected)
        np.testing.assert_array_equal(await w.read(), np.full(3, -1 / 3 - 1 / 3))
        assert await global_step.read() == 2


async def test_a_stale_push_leaves_what_was_owed() -> None:
    tiny = 2.0**-9
    async with training(num_workers=2) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros(1, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(optimizers.SGD(1.0, compression="bf16"), 1, 2)

        async def push(gradient: float) -> Outcome:
            pairs = [(np.full(1, gradient, np.float32), v)]
            return (await optimizer.apply_gradients(pairs, global_step)).outcome

        async def step() -> list[Outcome]:
            await psync.pull(v)
            of_the_same_values = await asyncio.gather(push(1 + tiny), push(64.25))
            await psync.pull(v)
            return [*of_the_same_values, await push(0.0)]

        outcomes = await coordinator.schedule(step)
        assert outcomes == [Outcome.ACCEPTED, Outcome.STALE, Outcome.ACCEPTED]
        assert (await v.read()).tolist() == [-1 - tiny]


async def values_with_backups(kind: Any, synchronous: bool, size: int, kill: bool) -> np.ndarray:
    """Train by gradients that need no rounding, while a ps may die."""
    async with replicated() as (cluster, coordinator):
        with coordinator.strategy.scope():
            v = psync.Variable(np.zeros((2, size), np.float32), name="v")
            n = psync.Variable(np.zeros(3), name="n")
            global_step = psync.get_or_create_global_step()
        made = optimizers.Momentum(0.5, 0.5, compression=kind)
        optimizer: Any = made
        if synchronous:
            optimizer = psync.SyncReplicasOptimizer(made, 2, 2, deterministic=True)

        async def step(number: int, of_pair: int) -> None:
            await psync.pull((v, n), compression=kind)
            rng = np.random.default_rng(number + of_pair * synchronous)
            gradient = rng.integers(-64, 64, size=(2, size)).astype(np.float32)
            await optimizer.apply_gradients(
                [(gradient, v), (gradient[0, :3] / np.float64(3), n)], global_step
            )

        for number in range(8):
            if kill and number == 3:
                await coordinator.backed_up()
                await cluster.kill("ps-1")
            for of_pair in range(2):
                coordinator.schedule(step, args=(number, of_pair))
            await coordinator.join(timeout=60)
        return await v.read()


@each_kind
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_a_backup_has_applied_what_was_compressed(kind: Any, size: int, synchronous: bool) -> None:
    exact = run_virtual(values_with_backups, None, synchronous, size, False)
    found = run_virtual(values_with_backups, kind, synchronous, size, True)
    np.testing.assert_array_equal(found, exact)
