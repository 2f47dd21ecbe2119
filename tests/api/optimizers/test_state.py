"""What an optimizer keeps on the ps tasks, as its user sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, in_step, strategy_of, training
from psync import optimizers
from psync.errors import UsageError


def halves(shape: tuple[int, ...], dtype: object) -> list[int]:
    return [2, *[1] * (len(shape) - 1)]


async def test_a_slot_is_read_in_the_shape_of_its_variable() -> None:
    sgd = optimizers.SGD(0.5, momentum=0.9)
    async with training(partitioner=halves) as (strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
        slot = sgd.get_slot(v, "momentum")
        assert slot is not None
        assert (await slot.read()).tolist() == [0, 0, 0, 0]
        await sgd.apply_gradients([(np.arange(4, dtype=np.float32), v)])
        assert (await slot.read()).tolist() == [0, -0.5, -1, -1.5]

        async def step() -> list[float]:
            momentum = sgd.get_slot(v, "momentum")
            assert momentum is not None
            return (await momentum.read()).tolist()

        assert await in_step(coordinator, step) == [0, -0.5, -1, -1.5]


def test_a_slot_cannot_be_read_without_a_coordinator() -> None:
    with strategy_of().scope():
        v = psync.Variable(np.float32(0), name="v")
    slot = optimizers.SGD(0.1, momentum=0.5).get_slot(v, "momentum")
    assert slot is not None
    with pytest.raises(UsageError, match='read of slot "momentum" of "v": no connection'):
        at_once(slot.read())


@pytest.mark.parametrize("step", [-1, 2.5, True, "7", None, (1 << 32) + 1])
def test_what_is_no_number_of_updates_is_refused_here(step: Any) -> None:
    with pytest.raises(UsageError, match="iterations: expected a whole number from 0 to 42949672"):
        at_once(optimizers.Adam(0.1).iterations.assign(step))
