"""Gradients of several replicas become one: sums, and accumulators that refuse stale gradients.

Layer: L1. Imports: errors.

Precision: float16 and bfloat16 are summed in float32 and rounded once, in the result; float32 and
float64 are summed in themselves. A weight of 1 multiplies nothing. Infinities and NaN are results.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from psync.errors import GradientError

Reduction = Literal["mean", "sum"]


@functools.cache  # dtype.name costs microseconds
def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed.

    Raises:
        GradientError: If ``dtype`` is not a floating one.
    """
    name = dtype.name
    if name in ("float16", "bfloat16"):  # by name: bfloat16 is numpy's only with ml_dtypes
        return np.dtype(np.float32)
    if name in ("float32", "float64"):
        return np.dtype(name)
    raise GradientError(f"only floating-point gradients can be summed, got {name}")


def begin(total: np.ndarray, gradient: np.ndarray, weight: float = 1.0) -> None:
    """Write the first term of a sum, ``weight * gradient``, over whatever ``total`` holds.

    Not the same as adding it to zeros, which would turn -0.0 into 0.0.

    Args:
        total: Any shape, of ``sum_dtype``; written in place.
        gradient: Of that shape.
        weight: Positive and finite.
    """
    if weight == 1.0:
        np.copyto(total, gradient)
    else:
        with np.errstate(all="ignore"):
            np.multiply(gradient, weight, out=total, dtype=total.dtype)


def accumulate(total: np.ndarray, gradient: np.ndarray, weight: float = 1.0) -> None:
    """Add ``weight * gradient`` to ``total``, in place, in the dtype of ``total``.

    Elementwise, so it does not matter in which blocks a sum is made. See ``begin``.
    """
    with np.errstate(all="ignore"):
        if weight != 1.0:
            gradient = np.multiply(gradient, weight, dtype=total.dtype)
        np.add(total, gradient, out=total, dtype=total.dtype)


def finish(
    total: np.ndarray, weight_sum: float, reduction: Reduction, out: np.ndarray | None = None
) -> None:
    """Make the result of a sum: ``total / weight_sum``, or for "sum" the total itself.

    Args:
        total: The sum; in place the result, unless ``out`` is given.
        weight_sum: Sum of the weights of what was added, added up in double precision.
        reduction: "mean" or "sum".
        out: Of the same shape; gets the result, rounded to its dtype. ``total`` is not changed.
    """
    out = total if out is None else out
    with np.errstate(all="ignore"):
        if reduction == "mean" and weight_sum != 1.0:
            np.divide(total, weight_sum, out=out, dtype=total.dtype)
        elif out is not total:
            np.copyto(out, total, casting="same_kind")
