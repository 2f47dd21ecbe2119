"""What a function of the values has to return so that there are gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_training import training

import psync
from psync.errors import GradientError
from psync.value_and_gradients import value_and_gradients


async def test_the_loss_comes_with_a_gradient_for_each_variable() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
        loss, pairs = await value_and_gradients(lambda a, b: (a * b, (b, a)), [v, w])
    assert (loss, pairs) == (12, [(4, v), (3, w)])


async def test_another_number_of_gradients_than_variables_is_an_error() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(3))
        with pytest.raises(GradientError, match="value_and_grad: expected 1 gradients, got 2"):
            await value_and_gradients(lambda a: (a, [a, a]), [v])


@pytest.mark.parametrize("answer", [1.0, (1.0, None), (1.0, [], []), None])
async def test_a_function_that_returns_no_gradients_is_an_error(answer: Any) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v = psync.Variable(np.float32(3))
        with pytest.raises(GradientError, match=r"expected it to return \(loss, gradients\), got"):
            await value_and_gradients(lambda a: answer, [v])
