"""What becomes of one push: its outcome, the optimizer's step, and the updates of others."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, training
from psync import Outcome, PushResult, optimizers


@pytest.mark.parametrize("where", ["the program", "a step"])
async def test_a_number_that_is_set_holds_whoever_knew_more(where: str) -> None:
    """Bias corrections of Adam, and schedules, go on from there."""
    rates = psync.schedules.PiecewiseConstantDecay([3], [1.0, 0.0])
    sgd = optimizers.SGD(rates)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            variables = [psync.Variable(np.float32(0)) for _ in range(2)]  # on a ps each

        async def step(which: int) -> int:
            return (await sgd.apply_gradients([(np.float32(1), variables[which])])).step

        async def pushed(which: int) -> int:
            return await (
                step(which) if where == "the program" else coordinator.schedule(step, (which,))
            )

        assert [await pushed(0) for _ in range(9)] == list(range(1, 10))
        await sgd.iterations.assign(2)
        assert [await pushed(0), await pushed(1)] == [3, 4]
        assert await sgd.iterations.read() == 4
        assert [float(await v.read()) for v in variables] == [-5, -1]  # the last at a rate of 1


async def test_staleness_counts_the_updates_of_others() -> None:
    sgd = optimizers.SGD(0.1)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.float32(0))

        async def step() -> PushResult:
            return await sgd.apply_gradients([(np.float32(1), v)])

        assert await in_step(coordinator, step) == PushResult(Outcome.ACCEPTED, 1, 0)
        await sgd.apply_gradients([(np.float32(1), v)])  # the coordinator's: step 1 is its first
        await sgd.apply_gradients([(np.float32(1), v)])
        assert await in_step(coordinator, step) == PushResult(Outcome.ACCEPTED, 4, 2)
