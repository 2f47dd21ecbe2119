"""Which optimizers a process has, and which of them its program pushes through."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import psync
from local_training import inside_a_step, training
from psync import optimizers, schedules
from psync.api.gradient_arguments import trainable_here
from psync.api.optimizers.registry import OptimizerRegistry
from psync.errors import UsageError


@pytest.fixture
def registry() -> OptimizerRegistry:
    return OptimizerRegistry()


def test_a_learning_rate_that_an_earlier_program_has_set_is_noted(
    registry: OptimizerRegistry,
) -> None:
    sgd = optimizers.SGD(0.5)
    registry.add_new(sgd)
    registry.note_learning_rate(1, schedules.Constant(0.25).to_config())
    registry.note_learning_rate(2, schedules.Constant(0.125).to_config())  # which nobody has
    assert sgd.learning_rate == 0.25


def trained_by(optimizer: Any) -> list[Any]:
    """Which variables it would update if it is told none."""
    return trainable_here("minimize", optimizer._arrived)


async def test_an_optimizer_takes_the_trainable_variables_along_to_other_processes() -> None:
    sgd = optimizers.SGD(0.5)
    number = sgd.number
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(3), name="v")
        few = pickle.dumps(sgd)
        with strategy.scope():
            w = psync.Variable(np.float32(3), name="w")
        text = pickle.dumps(sgd)
        origin = strategy._origin
    del sgd, strategy
    again = pickle.loads(few)
    assert again.number == number
    with inside_a_step(origin):
        assert trained_by(again) == [v]
        assert pickle.loads(text) is again
        assert trained_by(again) == [v, w]
        assert pickle.loads(few) is again
        assert trained_by(pickle.loads(pickle.dumps(again))) == [v, w]
    with inside_a_step("another strategy"), pytest.raises(UsageError) as caught:
        trained_by(again)
    assert str(caught.value) == (
        "minimize: no trainable variable is declared here\nhint: declare variables before the step "
        "that captures this optimizer is first scheduled, or say which variables"
    )
