"""Metrics as handles: counted on workers, read by the program."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, strategy_of, training
from psync.errors import ValueMismatchError


def test_it_has_one_variable_and_the_name_that_it_was_given() -> None:
    with strategy_of().scope():
        metric = psync.metrics.Mean("loss")
        auc = psync.metrics.AUC(10)
    assert [v.name for v in metric.variables] == ["loss/sums"]
    assert auc.variables[0].shape == (4, 10)
    assert not metric.variables[0].trainable
    assert (repr(metric), auc.name) == ("<Mean 'loss'>", "auc")


async def test_what_steps_count_is_added_up_over_workers() -> None:
    async with training(num_workers=3) as (strategy, coordinator):
        with strategy.scope():
            loss = psync.metrics.Mean("loss")
            accuracy = psync.metrics.SparseCategoricalAccuracy()

        async def step(number: int) -> None:
            await loss.update_state([float(number), number + 2.0])
            await accuracy.update_state([0, 1], [[0.9, 0.1], [0.8, 0.2]])

        for number in range(10):
            coordinator.schedule(step, args=(number,))
        await coordinator.join()
        assert await loss.result() == pytest.approx(5.5)
        assert await accuracy.result() == 0.5
        await loss.reset_state()
        assert await loss.result() == 0.0
        assert await accuracy.result() == 0.5
        coordinator.schedule(step, args=(7,))
        await coordinator.join()
        assert await loss.result() == 8.0


async def test_a_step_sees_what_its_own_worker_has_counted() -> None:
    async with training(num_workers=1) as (strategy, coordinator):
        with strategy.scope():
            total = psync.metrics.Sum("total")

        async def step() -> float:
            await total.update_state([1.0, 2.0])
            return await total.result()

        assert await in_step(coordinator, step) == 3.0
        assert await in_step(coordinator, step) == 6.0


async def test_a_batch_that_does_not_fit_is_not_counted() -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            error = psync.metrics.MeanSquaredError()

        async def step() -> str:
            with pytest.raises(ValueMismatchError, match="of one shape") as caught:
                await error.update_state(np.zeros(3), np.zeros(4))
            return str(caught.value)

        assert "mean_squared_error" in await in_step(coordinator, step)
        assert await error.result() == 0.0
