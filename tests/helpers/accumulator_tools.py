"""For tests of the rules of accumulators: one of whole arrays, a gradient, what a refusal says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psync.accumulators import Accumulator, Take
from psync.errors import GradientError
from psync.numerics.sums import at_once
from psync.store.dense_accumulators import ConditionalAccumulator


def accumulator(
    shape: tuple[int | None, ...] | None = (2,), dtype: object = "float32", **options
) -> ConditionalAccumulator:
    return ConditionalAccumulator(dtype, shape, name="w/part_0", **options)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def take_grad(held: Accumulator[Any, Any], num_required: int) -> Take[Any]:
    """Enter a take, and complete what can be completed; the take ends with that, or waits."""
    take = held.enter(num_required)
    at_once(held.complete_pieces())
    return take


def cancel(held: Accumulator[Any, Any], take: Take[Any]) -> tuple[Take[Any], ...]:
    """Cancel a take; return those behind it that were completed by that."""
    return at_once(held.complete_pieces()) if held.withdraw(take) else ()


def refusal(call, *args, error: type[Exception] = GradientError, **options) -> str:
    """What the error says, which names the accumulator."""
    with pytest.raises(error) as info:
        call(*args, **options)
    prefix, _, message = str(info.value).partition(": ")
    assert prefix == 'accumulator "w/part_0"'
    return message
