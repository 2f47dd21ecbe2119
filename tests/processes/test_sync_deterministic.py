"""``deterministic=True``: three workers compute, bit for bit, what one process does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import psync
from psync import optimizers
from psync.numerics.memory import Scratch
from psync.numerics.rules import Adam, RuleOptions, clipped_by_norm
from real_training import ONE_LOOP, coordinated

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

WORKERS = 3
STEPS = 20
RATE = 0.1  # no power of two, so everything is rounded
CLIPNORM = 0.01

Apply = Callable[[np.ndarray, np.ndarray, int], None]
"""Changes values in place by a mean gradient; the number is that of the step."""


def sgd(values: np.ndarray) -> Apply:
    def apply(values: np.ndarray, gradient: np.ndarray, step: int) -> None:
        values -= np.float32(RATE) * gradient

    return apply


def momentum(values: np.ndarray) -> Apply:
    velocity = np.zeros_like(values)

    def apply(values: np.ndarray, gradient: np.ndarray, step: int) -> None:
        velocity[...] = np.float32(0.9) * velocity - np.float32(RATE) * gradient
        values += velocity

    return apply


def adam(values: np.ndarray) -> Apply:
    rule, scratch = Adam(RATE), Scratch()
    slots = [np.zeros(values.size, np.float32) for _ in rule.slot_names()]

    def apply(values: np.ndarray, gradient: np.ndarray, step: int) -> None:
        flat = values.reshape(-1)
        rule.apply([(flat, gradient.reshape(-1), slots, flat, slots)], step, scratch)

    return apply


def clipped_sgd(values: np.ndarray) -> Apply:
    limit = RuleOptions(global_clipnorm=CLIPNORM)

    def apply(values: np.ndarray, gradient: np.ndarray, step: int) -> None:
        (clipped,) = clipped_by_norm([gradient], [0], limit)
        assert clipped is not gradient  # it was longer
        values -= np.float32(RATE) * np.asarray(clipped)

    return apply


CASES: list[tuple[optimizers.Optimizer, Callable[[np.ndarray], Apply], int]] = [
    (optimizers.SGD(RATE), sgd, 30),
    (optimizers.SGD(RATE, momentum=0.9), momentum, 200_001),  # large: applied block by block
    (optimizers.Adam(RATE), adam, 30),
    (optimizers.SGD(RATE, global_clipnorm=CLIPNORM), clipped_sgd, 30),  # measured by both ps tasks
]


@pytest.mark.promise("steps.deterministic")
async def test_workers_compute_what_one_process_does_that_sums_in_their_order() -> None:
    async with psync.LocalCluster(2, WORKERS) as cluster:
        for optimizer, reference, rows in CASES:
            await compare(cluster, optimizer, reference, (rows, 2))


async def compare(
    cluster: psync.LocalCluster,
    wrapped: optimizers.Optimizer,
    reference: Callable[[np.ndarray], Apply],
    shape: tuple[int, int],
) -> None:
    def batches(context: psync.InputContext):  # type: ignore[no-untyped-def]
        random = np.random.default_rng(context.input_pipeline_id)
        for _ in range(STEPS):
            yield random.random((2, *shape), np.float32) - np.float32(0.5)

    def gradient(values: np.ndarray, batch: np.ndarray) -> np.ndarray:
        slopes: np.ndarray = ((values - batch) * abs(batch)).mean(axis=0)
        return slopes

    async with coordinated(cluster) as (strategy, coordinator):
        first = np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)
        with strategy.scope():
            trained = psync.Variable(first)
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(wrapped, WORKERS, deterministic=True)

        async def step(data: psync.PerWorkerIterator) -> bool:
            slopes = gradient(await trained.read(), next(data))
            result = await optimizer.apply_gradients([(slopes, trained)], global_step)
            return result.outcome is psync.Outcome.ACCEPTED and result.count == WORKERS

        data = iter(coordinator.create_per_worker_dataset(batches))
        counted = [coordinator.schedule(step, (data,)) for _ in range(STEPS * WORKERS)]
        await coordinator.join()
        assert all(await coordinator.fetch(counted))
        assert await global_step.read() == STEPS
        result = await trained.read()

    values = first.copy()
    apply = reference(values)
    replicas = [batches(psync.InputContext(WORKERS, index)) for index in range(WORKERS)]
    for number in range(STEPS):
        one, two, three = (gradient(values, next(replica)) for replica in replicas)
        apply(values, (one + two + three) / np.float32(WORKERS), number)
    assert np.array_equal(result, values)
