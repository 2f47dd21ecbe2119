"""What becomes of one push: its outcome, the optimizer's step, and the updates of others."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, training
from psync import Outcome, PushResult, optimizers
from psync.api.optimizers.handles import result_of
from psync.wire.ps_messages import Pushed


@pytest.mark.parametrize(
    ("answers", "known", "result"),
    [
        ([("accepted", 1)], 0, PushResult(Outcome.ACCEPTED, 1, 0)),
        ([("accepted", 7)], 3, PushResult(Outcome.ACCEPTED, 7, 3)),
        ([("accepted", 5), ("accepted", 6)], 4, PushResult(Outcome.ACCEPTED, 6, 1)),
        ([("duplicate", 0)], 4, PushResult(Outcome.DUPLICATE, 4, 0)),
        ([("accepted", 5), ("duplicate", 0)], 4, PushResult(Outcome.DUPLICATE, 5, 0)),
    ],
)
def test_the_highest_step_counts_and_what_was_refused_anywhere_was_refused(
    answers: list[tuple[str, int]], known: int, result: PushResult
) -> None:
    assert result_of([Pushed(*answer) for answer in answers], known) == result


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


async def test_the_step_that_a_push_has_made_is_known_to_the_next_one() -> None:
    sgd = optimizers.SGD(1.0)
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.zeros(2, np.float32), name="v")
        await v.read()
        runtime = strategy.runtime
        assert runtime is not None
        for step in (1, 2):
            result = await sgd.apply_gradients([(np.ones(2, np.float32), v)])
            assert result == PushResult(Outcome.ACCEPTED, step, 0)
            assert runtime.steps[sgd.number] == step
        assert (await v.read()).tolist() == [-2, -2]
