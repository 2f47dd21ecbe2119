"""Weighted sums and means of gradients: of whole arrays, and of rows.

Layer: L1. Imports: errors.

Precision: float16 and bfloat16 are summed in float32 and rounded once, in the result; float32 and
float64 are summed in themselves. A weight of 1 multiplies nothing. Terms are added in the order in
which they come. Infinities and NaN are results.

``begin``, ``accumulate`` and ``finish`` work on memory that somebody else owns, and elementwise: a
sum made block by block equals one made at once, bit for bit.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Literal

import numpy as np

from psync.errors import GradientError, UsageError

Reduction = Literal["mean", "sum"]

WEIGHTS = (1e-30, 1e30)
"""Smallest and largest weight: sums of them stay within the range of float32."""


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
    """Add ``weight * gradient`` to ``total``, in place, in its dtype. Arguments as of ``begin``."""
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


def check_weight(weight: object) -> float:
    """Return the weight of a gradient as a float.

    Raises:
        GradientError: If it is not a number within ``WEIGHTS``.
    """
    low, high = WEIGHTS
    number = float(weight) if isinstance(weight, numbers.Real) else math.nan
    if not low <= number <= high:
        raise GradientError(f"expected a weight from {low:g} to {high:g}, got {weight!r}")
    return number


class DenseSum:
    """A running weighted sum of arrays of one shape.

    Args:
        shape: Of the arrays.
        dtype: Of the results, a floating one; the sum is kept in ``sum_dtype(dtype)``.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.count = 0  # arrays added
        self.weight = 0.0  # sum of their weights
        self._total = np.empty(self.shape, sum_dtype(dtype))  # not initialized while count is 0

    def add(self, values: np.ndarray, weight: float = 1.0) -> None:
        """Add ``weight * values``. They are not kept.

        Raises:
            GradientError: If shape or weight does not fit; the sum is as before.
        """
        weight = check_weight(weight)
        if values.shape != self.shape:
            raise GradientError(f"shape mismatch: expected {self.shape}, got {values.shape}")
        (accumulate if self.count else begin)(self._total, values, weight)
        self.count += 1
        self.weight += weight

    def mean(self) -> np.ndarray:
        """Return the sum divided by the sum of the weights: a new array."""
        return self._result("mean")

    def sum(self) -> np.ndarray:
        """Return the sum: a new array."""
        return self._result("sum")

    def _result(self, reduction: Reduction) -> np.ndarray:
        if not self.count:
            raise UsageError("a sum to which nothing was added has no result")
        result = np.empty(self.shape, self.dtype)
        finish(self._total, self.weight, reduction, result)
        return result


class SparseSum:
    """A running weighted sum of some rows of an array; the others do not exist.

    Args:
        row_shape: Shape of one row.
        dtype: Of the results, a floating one; the sum is kept in ``sum_dtype(dtype)``.
    """

    def __init__(self, row_shape: Sequence[int], dtype: np.dtype) -> None:
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.weight = 0.0  # sum of the weights of all that was added
        self.indices = np.empty(0, np.int64)  # of the rows: ascending, each once
        self._rows = np.empty((0, *self.row_shape), sum_dtype(dtype))
        self._weights = np.empty(0)  # for each row, of the gradients that contained it

    def add(self, indices: np.ndarray, values: np.ndarray, weight: float = 1.0) -> None:
        """Add ``weight * values`` to the rows ``indices``; neither is kept.

        Args:
            indices: int64, shape (n,), in any order; rows that come more than once are summed.
            values: Shape (n, *row_shape).
            weight: As of ``check_weight``.

        Raises:
            GradientError: If a shape or the weight does not fit; the sum is as before.
        """
        weight = check_weight(weight)
        if indices.ndim != 1:
            raise GradientError(f"expected a vector of indices, got shape {indices.shape}")
        expected = (indices.size, *self.row_shape)
        if values.shape != expected:
            raise GradientError(f"shape mismatch: expected {expected}, got {values.shape}")
        indices, values = _merged(indices, values, self._rows.dtype)
        union = np.union1d(self.indices, indices)
        rows, weights = self._rows, self._weights
        if union.size > self.indices.size:
            known = np.searchsorted(union, self.indices)
            # Adding to -0.0 changes nothing, not even the sign of a zero.
            rows = np.full((union.size, *self.row_shape), -0.0, rows.dtype)
            rows[known] = self._rows
            weights = np.zeros(union.size)
            weights[known] = self._weights
        at = np.searchsorted(union, indices)
        touched, touched_weights = rows[at], weights[at]
        accumulate(touched, values, weight)
        touched_weights += weight
        rows[at], weights[at] = touched, touched_weights
        self.indices, self._rows, self._weights = union, rows, weights
        self.weight += weight

    def sum(self) -> np.ndarray:
        """Return the sums of the rows ``indices``: a new array."""
        result = np.empty(self._rows.shape, self.dtype)
        finish(self._rows, self.weight, "sum", result)
        return result

    def mean(self, *, per_index: bool) -> np.ndarray:
        """Return the means of the rows ``indices``: a new array.

        Args:
            per_index: Divide a row by the weights of the gradients that contained it, not of all.
        """
        result = np.empty(self._rows.shape, self.dtype)
        if per_index:
            divisors = self._weights.reshape(-1, *(1 for _ in self.row_shape))
            with np.errstate(all="ignore"):
                np.divide(self._rows, divisors, out=result, dtype=self._rows.dtype)
        else:
            finish(self._rows, self.weight, "mean", result)
        return result


def _merged(
    indices: np.ndarray, values: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Sort the rows by index, and sum those that come more than once, in ``dtype``."""
    unique, position = np.unique(indices, return_inverse=True)
    rows = np.full((unique.size, *values.shape[1:]), -0.0, dtype)
    if unique.size == indices.size:
        rows[position] = values
    else:
        values = values.astype(dtype, copy=False)  # add.at casts too, but takes four times as long
        with np.errstate(all="ignore"):
            np.add.at(rows, position, values)
    return unique, rows
