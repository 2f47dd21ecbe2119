"""What a function of the values has to return so that there are gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from local_training import at_once, training
from psync.api.gradient_arguments import value_and_gradients
from psync.errors import ValueMismatchError


def nested(values: Any) -> Any:
    a, b = values["layers"][0]["v"], values["w"]
    return a * b, {"layers": [{"v": b}], "w": a}, "predictions, which are not used"


@pytest.mark.parametrize(
    ("value_and_grad", "tree"),
    [
        (lambda a, b: (a * b, (b, a)), lambda v, w: [v, w]),  # an argument for each
        (nested, lambda v, w: {"layers": [{"v": v}], "w": w}),  # one, and gradients nested alike
    ],
)
async def test_the_loss_comes_with_a_gradient_for_each_variable(
    value_and_grad: Any, tree: Any
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            v, w = psync.Variable(np.float32(3)), psync.Variable(np.float32(4))
        loss, pairs = await value_and_gradients(value_and_grad, tree(v, w))
    assert (loss, pairs) == (12, [(4, v), (3, w)])


def test_another_number_of_gradients_than_variables_is_an_error() -> None:
    with pytest.raises(ValueMismatchError, match="value_and_grad: expected 0 gradients, got 2"):
        at_once(value_and_gradients(lambda: (0, [1, 2]), []))


@pytest.mark.parametrize("answer", [1.0, (1.0, None), (1.0, [], [], []), None])
def test_a_function_that_returns_no_gradients_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueMismatchError, match=r"expected it to return \(loss, gradients\), got"):
        at_once(value_and_gradients(lambda: answer, []))


def test_gradients_that_are_nested_otherwise_are_an_error() -> None:
    with pytest.raises(ValueMismatchError, match="gradients: expected a dict with the same keys"):
        at_once(value_and_gradients(lambda values: (0, [1, 2]), {"rate": 0.5}))
