"""IndexedSlices: a sparse gradient, row numbers with a gradient for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.errors import GradientError
from psync.numerics.scatter import merged
from psync.numerics.sums import sum_dtype


class IndexedSlices:
    """Some rows of an array: row ``i`` of ``values`` belongs to row ``indices[i]``.

    As a gradient it says that all other rows have none. An optimizer touches only the rows that
    are named and what it keeps beside them; rows named more than once are summed first.

    Args:
        values: Shape (n, …), or what numpy makes an array of.
        indices: Integers, shape (n,), in any order.
        dense_shape: Of the whole array, if it is known.

    Raises:
        GradientError: Values or indices are no arrays; the indices are no integers, or not as many
            as there are rows.

    Source: ``tf.IndexedSlices``.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        try:
            self.values = np.asarray(values)
            indices = np.asarray(indices)
            shape = None if dense_shape is None else tuple(map(int, dense_shape))
        except (TypeError, ValueError) as exc:
            raise GradientError(
                "IndexedSlices: expected values and indices that are arrays, and integers as "
                f"dense_shape: {exc}"
            ) from exc
        if indices.size == 0 and indices.dtype.kind == "f":
            indices = indices.astype(np.int64)  # what numpy makes of an empty list
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise GradientError(
                f"IndexedSlices: expected indices of shape (n,), integers, got {indices.shape} "
                f"{indices.dtype}"
            )
        if self.values.ndim < 1 or len(self.values) != len(indices):
            raise GradientError(
                f"IndexedSlices: expected values for {len(indices)} indices, shape "
                f"({len(indices)}, …), got {self.values.shape}"
            )
        self.indices = indices
        self.dense_shape = shape

    def __repr__(self) -> str:
        return (
            f"IndexedSlices({len(self.indices)} rows of shape {self.values.shape[1:]} "
            f"{self.values.dtype}, dense_shape={self.dense_shape})"
        )

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices, values) with each index once, in ascending order, its rows summed.

        Half precision is summed in float32 and rounded once. What needs no change is returned as it
        is, so the result may share memory with this object.

        Raises:
            GradientError: There are duplicates, and the values are not floating.
        """
        indices, values = merged(self.indices.astype(np.int64, copy=False), self.values, "add")
        if len(indices) < len(self.indices):
            sum_dtype(values.dtype)  # raises
        return indices, values
