"""Gradients from a function of the values: pull the variables, call it, check what it returns.

Layer: L4. Imports: errors, gradient_arguments, pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from psync.errors import GradientError
from psync.gradient_arguments import AnyVariable
from psync.pulls import pull

ValueAndGrad = Callable[..., tuple[Any, Any]]
"""Called with the values, one argument each; returns the loss and the gradients in that order."""


async def value_and_gradients(
    value_and_grad: ValueAndGrad, variables: Sequence[AnyVariable]
) -> tuple[Any, list[tuple[Any, AnyVariable]]]:
    """Pull variables; return the loss at their values, and pairs of gradient and variable.

    Raises:
        GradientError: The function returns something else, or another number of gradients.
        PsyncError: As ``pull``.

    Cancellation: Safe.
    """
    answer = value_and_grad(*await pull(variables))
    try:
        loss, grads = answer
        grads = list(grads)
    except (TypeError, ValueError):
        raise GradientError(
            f"value_and_grad: expected it to return (loss, gradients), got {type(answer).__name__}",
            hint="return loss, [gradient_of_w, gradient_of_b]",
        ) from None
    if len(grads) != len(variables):
        raise GradientError(
            f"value_and_grad: expected {len(variables)} gradients, got {len(grads)}"
        )
    return loss, list(zip(grads, variables, strict=True))
