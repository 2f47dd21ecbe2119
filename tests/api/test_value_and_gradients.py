"""What a function of the values has to return so that there are gradients."""

from __future__ import annotations

from typing import Any

import pytest

from local_training import at_once
from psync.api.gradient_arguments import value_and_gradients
from psync.errors import ValueMismatchError


def test_another_number_of_gradients_than_variables_is_an_error() -> None:
    with pytest.raises(ValueMismatchError, match="value_and_grad: expected 0 gradients, got 2"):
        at_once(value_and_gradients(lambda: (0, [1, 2]), []))


@pytest.mark.parametrize("answer", [1.0, (1.0, None), (1.0, [], [], []), None])
def test_a_function_that_returns_no_gradients_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueMismatchError, match=r"expected it to return \(loss, gradients\), got"):
        at_once(value_and_gradients(lambda: answer, []))
