"""Synchronous training in real processes: handles that arrive by pickle alone."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from real_training import training

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.smoke
async def test_a_step_that_captures_the_optimizer_alone_trains_all_variables() -> None:
    async with training(2, 2) as (_, strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(40_000, np.float32), name="w")  # asks before it stages
            b = psync.Variable(np.zeros(3, np.float32), name="b")
            global_step = psync.get_or_create_global_step()
        average = psync.ExponentialMovingAverage(0.5)
        optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(0.5), 2, variable_averages=average, variables_to_average=[b]
        )

        def loss(w: np.ndarray, b: np.ndarray) -> tuple[float, list[np.ndarray]]:
            gradient = 1 + 2 * psync.get_worker_index()
            return float(b[0]), [np.full_like(w, gradient), np.full_like(b, gradient)]

        async def step() -> tuple[float, int | None]:
            value = await optimizer.minimize(loss, global_step)
            return value, optimizer.local_step

        values = [coordinator.schedule(step) for _ in range(6)]
        await coordinator.join()
        assert sorted(await coordinator.fetch(values), reverse=True) == [
            (0, 1), (0, 1), (-1, 2), (-1, 2), (-2, 3), (-2, 3),
        ]  # fmt: skip
        shadow = average.average(b)
        assert shadow is not None
        weights, bias, steps, averaged = await psync.pull((w, b, global_step, shadow))
        assert (weights == -3).all()
        assert bias.tolist() == [-3] * 3
        assert steps == 3
        assert averaged.tolist() == [((-0.5 - 2) / 2 - 3) / 2] * 3
