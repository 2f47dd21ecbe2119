"""Weighted sums and means of gradients, dense and sparse, in one fixed order of addition.

Precision: float16 and bfloat16 are summed in float32 and rounded once, in the result; float32 and
float64 are summed in themselves. A weight of 1 multiplies nothing. Terms are added in the order in
which they come. Infinities and NaN are results.

``begin``, ``accumulate`` and ``finish`` work on memory of the caller, and elementwise: a
sum made block by block equals one made at once, bit for bit.

What takes long is offered as ``Pieces`` too, for event loops. Of a sparse sum all is cut but the
sorting of its indices, and that is quick where they come in ascending order: 20 ms for a million.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import numpy as np

from psync.errors import ValueMismatchError
from psync.numerics.memory import Scratch

T = TypeVar("T")

Pieces = Generator[None, None, T]
"""Work that pauses now and then, and returns its result. Meanwhile nothing else may be done with
what it works on, and it must be carried to its end."""

PIECE_BYTES = 1 << 20
"""About what is worked on between two pauses."""

INDEX_COST = 64
"""What finding a row costs beside its values, expressed in bytes."""

Reduction = Literal["mean", "sum"]

LIGHTEST, HEAVIEST = 1e-30, 1e30
"""Smallest and largest weight: sums of them stay within the range of float32."""


def at_once(pieces: Pieces[T]) -> T:
    """Do all the work, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return cast(T, end.value)


def cuts(count: int, nbytes: int) -> Iterator[slice]:
    """Cut ``count`` things of ``nbytes`` each into pieces, in order."""
    step = max(1, PIECE_BYTES // max(1, nbytes))
    return (slice(start, start + step) for start in range(0, count, step))


@functools.cache  # dtype.name costs microseconds
def sum_dtype(
    dtype: np.dtype, what: str = "gradients can be summed", hint: str | None = None
) -> np.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed.

    Raises:
        ValueMismatchError: ``dtype`` is not a floating one, and only floating-point ``what``.
    """
    name = dtype.name
    if name in ("float16", "bfloat16"):  # by name: bfloat16 is numpy's only with ml_dtypes
        return np.dtype(np.float32)
    if name in ("float32", "float64"):
        return np.dtype(name)
    raise ValueMismatchError(f"only floating-point {what}, got {name}", hint=hint)


@np.errstate(all="ignore")
def begin(total: np.ndarray, gradient: np.ndarray, weight: float = 1.0) -> None:
    """Write the first term of a sum, ``weight * gradient``, over whatever ``total`` holds.

    Not the same as adding it to zeros, which would turn -0.0 into 0.0.

    Args:
        total: Any shape, of ``sum_dtype``; written in place.
        gradient: Of that shape.
        weight: Positive and finite.
    """
    np.multiply(gradient, weight, out=total, dtype=total.dtype)


@np.errstate(all="ignore")
def accumulate(total: np.ndarray, gradient: np.ndarray, weight: float = 1.0) -> None:
    """Add ``weight * gradient`` to ``total``, in place, in its dtype. Arguments as of ``begin``."""
    if weight != 1.0:
        gradient = np.multiply(gradient, weight, dtype=total.dtype)
    np.add(total, gradient, out=total, dtype=total.dtype)


@np.errstate(all="ignore")
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
    if reduction == "mean" and weight_sum != 1.0:
        np.divide(total, weight_sum, out=out, dtype=total.dtype)
    elif out is not total:
        np.copyto(out, total, casting="same_kind")


def check_weight(weight: object, what: object = "a gradient") -> float:
    """Return the weight of a gradient as a float.

    Args:
        weight: The weight.
        what: Begins the message of an error.

    Raises:
        ValueMismatchError: If it is not a number from ``LIGHTEST`` to ``HEAVIEST``.
    """
    number = float(weight) if isinstance(weight, numbers.Real) else math.nan
    if not LIGHTEST <= number <= HEAVIEST:
        expected = f"expected a weight from {LIGHTEST:g} to {HEAVIEST:g}"
        raise ValueMismatchError(f"{what}: {expected}, got {weight!r}")
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
        self.weight = 0.0  # sum of the weights of all that was added
        self.rows = 0  # of a sparse sum
        self._total = np.empty(self.shape, sum_dtype(dtype))  # not initialized while weight is 0

    @property
    def nbytes(self) -> int:
        """Size of the sum in bytes."""
        return self._total.nbytes

    def arrays(self) -> list[np.ndarray]:
        """Return what it holds: read it before the next term, or write it after ``restore``."""
        return [self._total]

    def restore(self, weight: float, rows: int = 0) -> None:
        """Be the same as another sum, once what that holds is written to ``arrays``."""
        self.weight = weight

    def adding(self, values: np.ndarray, weight: float = 1.0) -> Pieces[None]:
        """Add ``weight * values``, whose shape is that of the sum. They are not kept."""
        operation = accumulate if self.weight else begin
        totals, terms = self._total.reshape(-1), values.reshape(-1)
        for part in cuts(totals.size, totals.itemsize):
            operation(totals[part], terms[part], weight)
            yield
        self.weight += weight

    def making(self, reduction: Reduction) -> Pieces[np.ndarray]:
        """Return the sum, or for "mean" that divided by the sum of the weights: a new array."""
        assert self.weight, "a sum to which nothing was added has no result"
        result = np.empty(self.shape, self.dtype)
        totals, results = self._total.reshape(-1), result.reshape(-1)
        for part in cuts(totals.size, totals.itemsize):
            finish(totals[part], self.weight, reduction, results[part])
            yield
        return result


class SparseSum:
    """A running weighted sum of some rows of an array; the others do not exist.

    Args:
        shape: Of one row.
        dtype: Of the results, a floating one; the sum is kept in ``sum_dtype(dtype)``.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.weight = 0.0  # sum of the weights of all that was added
        self.indices = np.empty(0, np.int64)  # of the rows: ascending, each once
        self._rows = np.empty((0, *self.shape), sum_dtype(dtype))
        self._weights = np.empty(0)  # for each row, of the gradients that contained it
        self._row_cost = self._rows.itemsize * math.prod(self.shape) + INDEX_COST

    @property
    def nbytes(self) -> int:
        """Size of the sum in bytes."""
        return self._rows.nbytes + self._weights.nbytes + self.indices.nbytes

    def arrays(self) -> list[np.ndarray]:
        """Return what it holds: read it before the next term, or write it after ``restore``."""
        return [self.indices, self._weights, self._rows]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.indices.size

    def restore(self, weight: float, rows: int) -> None:
        """Be the same as another sum of so many rows, once what it holds is in ``arrays``."""
        self.indices, self._weights = np.empty(rows, np.int64), np.empty(rows)
        self._rows = np.empty((rows, *self.shape), self._rows.dtype)
        self.weight = weight

    def adding(self, indices: np.ndarray, values: np.ndarray, weight: float = 1.0) -> Pieces[None]:
        """Add ``weight * values`` to the rows ``indices``, in any order; neither is kept.

        There is one row of values for each index. Rows that come more than once are summed.
        """
        order = np.argsort(indices, kind="stable")  # quick for those that are in order
        yield
        ordered = indices[order]
        unique = ordered[firsts(ordered)]
        yield
        values = yield from self._merged(ordered, order, values, unique.size)
        union = np.concatenate((self.indices, unique))
        union.sort(kind="stable")  # merges the two
        union = union[firsts(union)]
        yield
        rows, weights = self._rows, self._weights
        if union.size > self.indices.size:
            rows, weights = yield from self._spread(union)
        for part in cuts(unique.size, self._row_cost):
            at = np.searchsorted(union, unique[part])
            touched = rows[at]
            accumulate(touched, values[part], weight)
            rows[at] = touched
            weights[at] += weight
            yield
        self.indices, self._rows, self._weights = union, rows, weights
        self.weight += weight

    def _merged(
        self, ordered: np.ndarray, order: np.ndarray, values: np.ndarray, count: int
    ) -> Pieces[np.ndarray]:
        """Return rows in ascending order; those that come more than once are summed."""
        merged = yield from self._zeros(count)
        position = np.cumsum(firsts(ordered)) - 1
        for part in cuts(order.size, self._row_cost):
            rows = values[order[part]].astype(merged.dtype, copy=False)
            if count == order.size:
                merged[part] = rows
            else:
                with np.errstate(all="ignore"):
                    np.add.at(merged, position[part], rows)
            yield
        return merged

    def _spread(self, union: np.ndarray) -> Pieces[tuple[np.ndarray, np.ndarray]]:
        """Return rows and weights for more indices than there are; the new ones are zeros."""
        rows, weights = (yield from self._zeros(union.size)), np.zeros(union.size)
        for part in cuts(self.indices.size, self._row_cost):
            at = np.searchsorted(union, self.indices[part])
            rows[at], weights[at] = self._rows[part], self._weights[part]
            yield
        return rows, weights

    def _zeros(self, count: int) -> Pieces[np.ndarray]:
        """Return rows of -0.0: adding to it changes nothing, not even the sign of a zero."""
        rows = np.empty((count, *self.shape), self._rows.dtype)
        for part in cuts(count, self._row_cost):
            rows[part] = -0.0
            yield
        return rows

    def making(self, reduction: Reduction, *, per_index: bool = False) -> Pieces[np.ndarray]:
        """Return the sums, or means, of the rows ``indices``: a new array.

        Args:
            reduction: "mean" or "sum".
            per_index: Divide a row by the weights of the gradients that contained it, not of all.
        """
        result = np.empty(self._rows.shape, self.dtype)
        divisors = self._weights.reshape(-1, *(1 for _ in self.shape))
        for part in cuts(self.indices.size, self._row_cost):
            rows, out = self._rows[part], result[part]
            if reduction == "mean" and per_index:
                with np.errstate(all="ignore"):
                    np.divide(rows, divisors[part], out=out, dtype=rows.dtype)
            else:
                finish(rows, self.weight, reduction, out)
            yield
        return result


SQUARES_PIECE = 1 << 16
"""Elements that are converted to float64 at a time, in which squares do not overflow."""


def sum_of_squares(array: np.ndarray, before: float = 0.0, wide: np.ndarray | None = None) -> float:
    """Return the sum of squares of an array, in float64.

    It has the same bits on every CPU and with every number of threads. Those of ``np.dot`` differ,
    and with them a backup that runs on another machine.

    Args:
        array: Any shape.
        before: The sum of what comes before it. An array that is cut into multiples of
            ``SQUARES_PIECE`` has the same sum, bit for bit, as at once.
        wide: Work space, float64, as long as the array or ``SQUARES_PIECE``; None: it is made.
    """
    flat = array.reshape(-1)  # a copy only of what lies scattered
    wide = np.empty(min(flat.size, SQUARES_PIECE)) if wide is None else wide
    total = before
    for start in range(0, flat.size, SQUARES_PIECE):
        piece = flat[start : start + SQUARES_PIECE]
        squares = wide[: piece.size]
        np.copyto(squares, piece)
        with np.errstate(over="ignore"):  # infinity is a result
            np.multiply(squares, squares, out=squares)
            total += float(np.add.reduce(squares))
    return total


def scaled(values: np.ndarray, scale: float) -> np.ndarray:
    """Return values multiplied by a scale, rounded once to their dtype; themselves if it is 1."""
    if scale == 1.0:
        return values
    with np.errstate(all="ignore"):  # infinity times 0 is a result
        wide = np.multiply(values, scale, dtype=sum_dtype(values.dtype))
        product: np.ndarray = wide.astype(values.dtype, copy=False)
    return product


def firsts(ordered: np.ndarray) -> np.ndarray:
    """Say of each element of an ascending array whether it differs from the one before it."""
    firsts = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=firsts[1:])
    return firsts


# --- means of a synchronous step -----------------------------------------------------------------


def reduced(
    gradients: Iterable[np.ndarray], weights: Sequence[float], reduction: Reduction,
    scratch: Scratch, scale: float = 1.0,
) -> np.ndarray:  # fmt: skip
    """Return the mean, or sum, of gradients; valid until the scratch memory is used again.

    It is ``((g0 * w0 + g1 * w1) + …) / (w0 + w1 + …)``, in the order given, computed in
    ``sum_dtype`` and rounded once to the dtype of the gradients. A weight of 1 multiplies nothing.
    With a scale that result is multiplied by it, and rounded, as ``scaled`` says.

    Args:
        gradients: Of each push: 1-D, all of one length and floating dtype, at least one.
        weights: Of each push, above 0.
        reduction: "mean" or "sum".
        scratch: Memory for the result. Called by its ``quietly``: infinities and NaN are results.
        scale: What limits the norm of the mean of the whole variable.
    """
    rest = iter(gradients)
    out = first = next(rest)
    dtype, size, work = first.dtype, first.size, sum_dtype(first.dtype)
    if len(weights) > 1 or weights[0] != 1:
        (room,) = scratch.arrays(work, 1, size)
        total = first if weights[0] == 1 else np.multiply(first, weights[0], out=room, dtype=work)
        for gradient, weight in zip(rest, weights[1:], strict=True):
            if weight != 1:
                gradient = np.multiply(gradient, weight, dtype=work)
            total = np.add(total, gradient, out=room, dtype=work)
        (out,) = (room,) if work == dtype else scratch.arrays(dtype, 1, size)
        divisor = sum(weights) if reduction == "mean" else 1
        if divisor != 1 or out is not total:
            np.divide(total, divisor, out=out, dtype=work)
    if scale != 1.0:
        (_, product) = scratch.arrays(dtype, 2, size)  # the mean may lie in the first
        out = np.multiply(out, scale, out=product, dtype=work)
    return out


@dataclass(slots=True, eq=False)
class MeanGradient:
    """The mean, or sum, of the gradients that several pushes have for one shard.

    It is cut like an array, ``mean[start:stop]``, and computed when it is cut: what is cut off
    is valid until the next cut of anything that shares the scratch memory. ``cut`` does it with
    other scratch memory, in whatever thread.

    ``reduced`` says what the result is.

    Args:
        gradients: Of each push: 1-D, all of one length and floating dtype. They must not change
            until the last cut.
        weights: Of each push, above 0.
        reduction: "mean" or "sum".
        scratch: Memory for the sum; its chunk is the longest possible cut.
        scale: What limits the norm of the mean of the whole variable.
    """

    gradients: Sequence[np.ndarray]
    weights: Sequence[float]
    reduction: Reduction
    scratch: Scratch
    scale: float = 1.0

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return these elements, in the dtype of the gradients; not to be changed."""
        return self.cut(part, self.scratch)

    def cut(self, part: slice, scratch: Scratch) -> np.ndarray:
        """As ``mean[part]``, with other memory for the sum."""
        # One after the other: what widens, or becomes whole, is made anew for each cut.
        gradients = (gradient[part] for gradient in self.gradients)
        given = gradients, self.weights, self.reduction, scratch, self.scale
        mean: np.ndarray = scratch.quietly(reduced, *given)
        return mean


def growing_decay(limit: float, step: int) -> float:
    """Return the decay of moving averages that follow the step, ``limit`` at most.

    Args:
        limit: In [0, 1).
        step: Number of updates that the variables have had.

    Source: ``num_updates`` of ``tf.train.ExponentialMovingAverage``.
    """
    return min(limit, (1 + step) / (10 + step))


def move_average(
    average: np.ndarray, value: np.ndarray, out: np.ndarray, decay: float, scratch: Scratch
) -> None:
    """Compute ``average - (1 - decay) * (average - value)``, in ``sum_dtype``, rounded once.

    Args:
        average: 1-D, floating, not longer than the scratch's chunk.
        value: Of the same length and dtype.
        out: Where the result goes: ``average`` itself or memory apart from it.
        decay: In [0, 1].
        scratch: Work space.

    Source: ``tf.train.ExponentialMovingAverage``.
    """
    work = sum_dtype(average.dtype)
    (difference,) = scratch.arrays(work, 1, average.size)
    with np.errstate(all="ignore"):  # infinities and NaN are results
        np.subtract(average, value, out=difference, dtype=work)
        np.multiply(difference, 1 - decay, out=difference)
        np.subtract(average, difference, out=out, dtype=work)
