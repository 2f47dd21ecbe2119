"""Which optimizers a process has, and which of them its program pushes through."""

from __future__ import annotations

import pytest

from psync import optimizers, schedules
from psync.api.optimizers.registry import OptimizerRegistry


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
