"""For tests of the rules of accumulators: one of whole arrays, a gradient, what a refusal says."""

from __future__ import annotations

import numpy as np
import pytest

from psync.errors import GradientError
from psync.store.dense_accumulators import ConditionalAccumulator


def accumulator(
    shape: tuple[int | None, ...] | None = (2,), dtype: object = "float32", **options
) -> ConditionalAccumulator:
    return ConditionalAccumulator(dtype, shape, name="w/part_0", **options)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def refusal(call, *args, error: type[Exception] = GradientError, **options) -> str:
    """What the error says, which names the accumulator."""
    with pytest.raises(error) as info:
        call(*args, **options)
    prefix, _, message = str(info.value).partition(": ")
    assert prefix == 'accumulator "w/part_0"'
    return message
