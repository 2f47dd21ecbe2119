"""For tests of the rules of accumulators: one of whole arrays, a gradient, what a refusal says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psync.accumulators import Accumulator, Applied, ConditionalAccumulator, Take
from psync.errors import ValueMismatchError
from psync.numerics.sums import at_once


def accumulator(
    shape: tuple[int | None, ...] | None = (2,), dtype: object = "float32", **options
) -> ConditionalAccumulator:
    return ConditionalAccumulator(dtype, shape, name="w/part_0", **options)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def apply_grad(
    held: Accumulator[Any, Any], given: Any, local_step: Any = 0, weight: Any = 1.0
) -> Applied[Any]:
    """Offer a gradient, and add it at once."""
    applied = held.offer(given, local_step, weight)
    at_once(applied.work())
    return applied


def apply_slices(
    held: Accumulator[Any, Any], indices: Any, values: Any, dense_shape: Any = None, *more, **named
) -> Applied[Any]:
    """Offer a gradient of some rows, and add it at once."""
    return apply_grad(held, (indices, values, dense_shape), *more, **named)


def complete(held: Accumulator[Any, Any]) -> Take[Any] | None:
    """Complete the take that can be completed; it gets its result at once."""
    take = held.complete()
    if take is not None:
        at_once(take.making())
    return take


def take_grad(held: Accumulator[Any, Any], num_required: int) -> Take[Any]:
    """Enter a take, and complete what can be completed; the take ends with that, or waits."""
    take = held.enter(num_required)
    complete(held)
    return take


def cancel(held: Accumulator[Any, Any], take: Take[Any]) -> Take[Any] | None:
    """Cancel a take; return the one behind it that was completed by that."""
    held.withdraw(take)
    return complete(held)


def refusal(call, *args, error: type[Exception] = ValueMismatchError, **options) -> str:
    """What the error says, which names the accumulator."""
    with pytest.raises(error) as info:
        call(*args, **options)
    prefix, _, message = str(info.value).partition(": ")
    assert prefix == 'accumulator "w/part_0"'
    return message
