"""Gradients from a function of the values: pull the variables, call it, check what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psync.api.gradient_arguments import AnyVariable
from psync.api.pulls import is_flat, pairs, pull
from psync.errors import GradientError

ValueAndGrad = Callable[..., Any]
"""Called with the values of a list of variables, one argument each, or with another nesting of
values as one argument. Returns the loss and the gradients in that order, or nested so; and
predictions, if it has any."""


async def value_and_gradients(
    value_and_grad: ValueAndGrad, variables: Any
) -> tuple[Any, list[tuple[Any, AnyVariable]]]:
    """Pull variables; return the loss at their values, and pairs of gradient and variable.

    Args:
        value_and_grad: Of the values.
        variables: As ``listed`` returns them.

    Raises:
        GradientError: The function returns something else, another number of gradients, or
            gradients that are nested otherwise.
        PsyncError: As ``pull``.

    Cancellation: Safe.
    """
    flat, values = is_flat(variables), await pull(variables)
    answer = value_and_grad(*values) if flat else value_and_grad(values)
    try:
        loss, grads, *predictions = answer
        grads = list(grads) if flat else grads
        if len(predictions) > 1:
            raise ValueError("too many values")
    except (TypeError, ValueError):
        raise GradientError(
            f"value_and_grad: expected it to return (loss, gradients), got {type(answer).__name__}",
            hint="return loss, [gradient_of_w, gradient_of_b]",
        ) from None
    if flat and len(grads) != len(variables):
        raise GradientError(
            f"value_and_grad: expected {len(variables)} gradients, got {len(grads)}"
        )
    return loss, [
        (gradient, variable) for variable, gradient in pairs(variables, grads, "gradients")
    ]
