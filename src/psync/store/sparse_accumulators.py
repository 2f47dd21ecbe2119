"""Sparse accumulators: the mean or the sum of gradients of rows, each row with its index.

The mean of a row is over the gradients that contained it, not over all, unless
``divisor="total"``; rows that no gradient contained do not exist in the result.

Source: ``SparseConditionalAccumulator`` of TensorFlow. Different here: indices may come in any
order and more than once, and negative ones are refused. Added: ``divisor``, and what
``accumulators`` adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from psync.accumulators import Accumulator, Held
from psync.numerics.sums import Pieces, SparseSum
from psync.specs import HiddenValues, as_integer, plain_array


class Slices(Protocol):
    """A sparse gradient of any library."""

    @property
    def indices(self) -> Any: ...
    @property
    def values(self) -> Any: ...
    @property
    def dense_shape(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no truth value
class SparseGradient:
    """Some rows of an array; the caller owns what is in it."""

    indices: np.ndarray  # int64, shape (n,), ascending, each once
    values: np.ndarray  # shape (n, …): row i is row indices[i] of the dense array
    dense_shape: tuple[int, ...]  # of the dense array; -1 where the number of rows is not known


class GivenSlices(NamedTuple):
    """A gradient as it came, its dtypes checked."""

    indices: np.ndarray  # int64
    values: np.ndarray
    dense_shape: tuple[int, ...] | None


class SparseConditionalAccumulator(Accumulator[GivenSlices, SparseGradient]):
    """Collects rows of an array, and gives their means or their sums.

    Arguments as of ``Accumulator``; values may have more dimensions than ``shape``.

    Args:
        divisor: Of the mean of a row: "per_index", the weights of the gradients that contained the
            row, or "total", those of all.
    """

    _sum: SparseSum | None = None  # of this step; None before its first gradient

    def __init__(
        self,
        dtype: object,
        shape: Sequence[int | None] | None = None,
        *,
        name: str,
        reduction_type: str = "MEAN",
        divisor: Literal["per_index", "total"] = "per_index",
        forbid_nonfinite: bool = False,
        max_staleness: int = 0,
    ) -> None:
        super().__init__(
            dtype,
            shape,
            name=name,
            reduction_type=reduction_type,
            forbid_nonfinite=forbid_nonfinite,
            max_staleness=max_staleness,
        )
        if divisor not in ("per_index", "total"):
            raise self._misused(f"expected divisor 'per_index' or 'total', got {divisor!r}")
        self.divisor = divisor

    def as_gradient(self, indices: Any, values: Any, dense_shape: Any = None) -> GivenSlices:
        """Return a gradient as arrays, checked as far as it can be without those held.

        Raises:
            ValueMismatchError: A dtype is another, the shapes do not fit each other or the
                accumulator's, or an index is out of range.
        """
        gradient = self._convert((indices, values, dense_shape))
        self._check_shapes(gradient, None)
        return gradient

    def held(self) -> Held | None:
        """Return what is held; None: nothing."""
        total = self._sum
        if total is None:
            return None
        rows = total.indices.size
        return Held(self._count, total.weight, total.row_shape, rows, total.arrays())

    def hold(self, count: int, weight: float, shape: Sequence[int], rows: int) -> list[np.ndarray]:
        """Hold what another one holds; see ``Accumulator``."""
        self._sum = SparseSum(shape, self.dtype)
        self._sum.restore(rows, weight)
        self._count = count
        return self._sum.arrays()

    def _convert(self, given: Any) -> GivenSlices:
        indices, values, dense_shape = given
        return GivenSlices(
            self._as_indices(indices), self._as_array(values), self._as_dense_shape(dense_shape)
        )

    def _as_indices(self, given: object) -> np.ndarray:
        try:
            array = plain_array(given)
        except (TypeError, ValueError, RuntimeError) as exc:
            got = exc if isinstance(exc, HiddenValues) else f"{given!r:.80}"
            raise self._refused(f"expected integers as indices, got {got}") from exc
        empty = not hasattr(given, "dtype") and array.size == 0  # no numbers: no dtype either
        if array.dtype.kind not in "iu" and not empty:
            raise self._refused(f"expected integers as indices, got {array.dtype}")
        return array.astype(np.int64)

    def _as_dense_shape(self, given: Any) -> tuple[int, ...] | None:
        if given is None:
            return None
        try:
            dims = [as_integer(dim) for dim in given]
        except TypeError:  # a scalar
            dims = [None]
        known = tuple(dim for dim in dims if dim is not None)
        if len(known) < len(dims):
            raise self._refused(f"expected integers as dense_shape, got {given!r:.80}")
        return known

    def _check(self, gradient: GivenSlices, nonfinite: int | None) -> None:
        self._check_shapes(gradient, None if self._sum is None else self._sum.row_shape)
        self._check_finite(gradient.values, nonfinite)

    def _check_shapes(self, gradient: GivenSlices, row_shape: tuple[int, ...] | None) -> None:
        indices, values, dense_shape = gradient
        if indices.ndim != 1:
            raise self._refused(f"expected a vector of indices, got shape {indices.shape}")
        if values.ndim == 0:
            raise self._refused("expected one row of values for each index, got a scalar")
        if len(values) != len(indices):
            raise self._refused(
                f"expected {len(indices)} rows of values, one for each index, got {len(values)}"
            )
        if dense_shape is not None:
            self._check_dimensions("dense_shape", dense_shape, first=0)
        self._check_range(indices)
        if row_shape is None:
            self._check_dimensions("values", values.shape, first=1)
        else:
            self._check_like_the_first(values.shape, row_shape)

    def _check_dimensions(self, what: str, shape: Sequence[int], *, first: int) -> None:
        """Compare with the accumulator's shape, dimensions from ``first`` on."""
        expected = self.shape or ()
        if len(shape) < len(expected):
            raise self._refused(
                f"expected {what} of rank {len(expected)} or more, got {len(shape)}"
            )
        for i in range(first, len(expected)):
            if expected[i] is not None and shape[i] not in (expected[i], -1):
                raise self._refused(
                    f"expected dimension {i} of {what} to be {expected[i]}, got {shape[i]}"
                )

    def _check_like_the_first(self, shape: Sequence[int], row_shape: Sequence[int]) -> None:
        if len(shape) != 1 + len(row_shape):
            raise self._refused(f"expected values of rank {1 + len(row_shape)}, got {len(shape)}")
        for i, (size, expected) in enumerate(zip(shape[1:], row_shape, strict=True), 1):
            if size != expected:
                raise self._refused(
                    f"expected dimension {i} of values to be {expected}, got {size}"
                )

    def _check_range(self, indices: np.ndarray) -> None:
        rows = self._num_rows()
        outside = indices < 0 if rows is None else (indices < 0) | (indices >= rows)
        if outside.any():
            place = int(outside.argmax())
            limit = "" if rows is None else f" and below {rows}"
            raise self._refused(
                f"expected indices of 0 or more{limit}, got {indices[place]} at position {place}"
            )

    def _num_rows(self) -> int | None:
        return self.shape[0] if self.shape else None

    def _add(self, gradient: GivenSlices, weight: float) -> Pieces[None]:
        if self._sum is None:
            self._sum = SparseSum(gradient.values.shape[1:], self.dtype)
        return self._sum.adding(gradient.indices, gradient.values, weight)

    def _reduce(self) -> Pieces[SparseGradient]:
        assert self._sum is not None, "a take needs one gradient at least"
        return self._result_of(self._sum)

    def _result_of(self, total: SparseSum) -> Pieces[SparseGradient]:
        values = yield from total.making(self.reduction, per_index=self.divisor == "per_index")
        rows = self._num_rows()
        # The sum belongs to this take alone, and so do its indices.
        return SparseGradient(
            total.indices, values, (-1 if rows is None else rows, *total.row_shape)
        )
