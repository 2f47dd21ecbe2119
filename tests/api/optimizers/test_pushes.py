"""What becomes of one push: its outcome, the optimizer's step, and the updates of others."""

from __future__ import annotations

import numpy as np
import pytest

import psync
from local_training import in_step, training
from psync import Outcome, PushResult, optimizers
from psync.api.optimizers.handles import result_of
from psync.specs import marked_after
from psync.wire.messages import Pushed

SET_TO_2 = marked_after(90, 2)


@pytest.mark.parametrize(
    ("answers", "known", "result"),
    [
        ([("accepted", 1)], 0, PushResult(Outcome.ACCEPTED, 1, 0)),
        ([("accepted", 7)], 3, PushResult(Outcome.ACCEPTED, 7, 3)),
        ([("accepted", 5), ("accepted", 6)], 4, PushResult(Outcome.ACCEPTED, 6, 1)),
        ([("duplicate", 0)], 4, PushResult(Outcome.DUPLICATE, 4, 0)),
        ([("accepted", 5), ("duplicate", 0)], 4, PushResult(Outcome.DUPLICATE, 5, 0)),
        ([("accepted", SET_TO_2 + 1)], 90, PushResult(Outcome.ACCEPTED, 3, 0)),
        ([("accepted", SET_TO_2 + 4)], SET_TO_2 + 2, PushResult(Outcome.ACCEPTED, 6, 1)),
        ([("accepted", 91), ("accepted", SET_TO_2 + 1)], 90, PushResult(Outcome.ACCEPTED, 3, 0)),
    ],
)
def test_the_highest_step_counts_and_what_was_refused_anywhere_was_refused(
    answers: list[tuple[str, int]], known: int, result: PushResult
) -> None:
    assert result_of([Pushed(*answer) for answer in answers], known) == result


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
