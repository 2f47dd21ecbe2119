"""What a function of the values has to return so that there are gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, training
from psync.api.gradient_arguments import value_and_gradients
from psync.errors import GradientError


async def test_the_loss_comes_with_a_gradient_for_each_variable() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
        loss, pairs = await value_and_gradients(lambda a, b: (a * b, (b, a)), [v, w])
    assert (loss, pairs) == (12, [(4, v), (3, w)])


def test_another_number_of_gradients_than_variables_is_an_error() -> None:
    with pytest.raises(GradientError, match="value_and_grad: expected 0 gradients, got 2"):
        at_once(value_and_gradients(lambda: (0, [1, 2]), []))


@pytest.mark.parametrize("answer", [1.0, (1.0, None), (1.0, [], [], []), None])
def test_a_function_that_returns_no_gradients_is_an_error(answer: Any) -> None:
    with pytest.raises(GradientError, match=r"expected it to return \(loss, gradients\), got"):
        at_once(value_and_gradients(lambda: answer, []))


async def test_of_a_nesting_the_values_are_one_argument_and_gradients_are_nested_alike() -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))

        def value_and_grad(values: Any) -> Any:
            a, b = values["layers"][0]["v"], values["w"]
            return a * b, {"layers": [{"v": b}], "w": a}, "predictions, which are not used"

        tree = {"layers": [{"v": v}], "w": w}
        loss, pairs = await value_and_gradients(value_and_grad, tree)
        assert (loss, pairs) == (12, [(4, v), (3, w)])
        with pytest.raises(GradientError, match="gradients: expected a dict with the keys"):
            await value_and_gradients(lambda values: (0, [1, 2]), tree)
