"""Synchronous steps with backups: whoever dies, values are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, replicated
from psync import optimizers
from psync.testing import run_virtual

ROUNDS = 12
SMALL, LARGE = 10, 10_000  # columns: pushes come whole to ps 0, or in parts to every ps

RULES: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optimizers.Momentum(0.1, 0.9),
    "adam": lambda: optimizers.Adam(0.1),
    "clipnorm": lambda: optimizers.Adam(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: optimizers.Momentum(0.1, 0.9, global_clipnorm=0.5),
    "lamb": lambda: optimizers.Lamb(0.1, clipnorm=0.5),
}


async def step(v: Any, optimizer: Any, global_step: Any, number: int, of_pair: int) -> str:
    """Push what nobody else pushes; it depends on what was pulled, too."""
    value = await psync.pull(v)
    rng = np.random.default_rng((number, of_pair))
    gradient = (rng.standard_normal(value.shape) + value / 3).astype(np.float32)
    result = await optimizer.apply_gradients([(gradient, v)], global_step)
    return str(result.outcome.value)


async def train(
    rule: str, size: int, disturb: Callable[[MemoryCluster, int], Any] | None = None
) -> dict[str, np.ndarray]:
    """Return all that there is after some steps, each of the two pushes of a round."""
    async with replicated() as (cluster, coordinator):
        with coordinator.strategy.scope():
            start = np.random.default_rng(5).standard_normal((2, size)).astype(np.float32)
            v = psync.Variable(start, name="v")
            global_step = psync.get_or_create_global_step()
        averages = psync.ExponentialMovingAverage(0.9)
        optimizer = psync.SyncReplicasOptimizer(
            RULES[rule](), replicas_to_aggregate=2, total_num_replicas=2, deterministic=True,
            variable_averages=averages, variables_to_average=[v],
        )  # fmt: skip
        for number in range(ROUNDS):
            burying = None
            if disturb is not None:
                burying = disturb(cluster, number)
            results = [
                coordinator.schedule(step, args=(v, optimizer, global_step, number, of_pair))
                for of_pair in range(2)
            ]
            await coordinator.join(timeout=60)
            assert set(await coordinator.fetch(results)) <= {"accepted", "duplicate"}
            if burying is not None:
                await burying
                await coordinator.backed_up()
        found = {"v": await v.read(), "step": await global_step.read()}
        found["average"] = await averages.average(v).read()
        for name in optimizer.get_slot_names():
            slot = optimizer.get_slot(v, name)
            assert slot is not None
            found[name] = await slot.read()
        return found


@functools.cache
def undisturbed(rule: str, size: int) -> dict[str, np.ndarray]:
    return run_virtual(train, rule, size)


PLACES = [
    ("ps-0", "ps.backup.sending"), ("ps-0", "ps.backup.taken"), ("ps-0", "ps0.step.decided"),
    ("ps-0", "ps0.step.measured"), ("ps-0", "ps.step.applied"), ("ps-0", "ps0.step.applied"),
    ("ps-1", "ps.backup.sending"), ("ps-1", "ps.backup.taken"), ("ps-1", "ps.step.measured"),
    ("ps-1", "ps.step.applied"),
]  # fmt: skip


@pytest.mark.promise("answers.steps-after-failover")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "size"),
    [("momentum", SMALL), ("adam", LARGE), ("clipnorm", SMALL), ("global_clipnorm", LARGE),
     ("lamb", SMALL), ("lamb", LARGE)],
)  # fmt: skip
@pytest.mark.parametrize(("lost", "place"), PLACES)
def test_values_are_those_of_a_run_in_which_nobody_dies(
    lost: str, place: str, rule: str, size: int
) -> None:
    deaths = 0

    def disturb(cluster: MemoryCluster, number: int) -> Any:
        if number != 3:
            return None
        died = cluster.kill_at(lost, place, 1 + len(rule) % 3)
        return asyncio.ensure_future(buried(cluster, died))

    async def buried(cluster: MemoryCluster, died: asyncio.Event) -> None:
        nonlocal deaths
        try:
            async with asyncio.timeout(1):
                await died.wait()
        except TimeoutError:
            return  # the place is not reached
        deaths += 1
        await cluster.stop(lost)
        await cluster.revive(lost)

    found, expected = run_virtual(train, rule, size, disturb), undisturbed(rule, size)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)
