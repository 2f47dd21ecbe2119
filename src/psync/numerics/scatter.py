"""Rows of an array by their numbers: sparse gradients, scatter operations, merging of duplicates.

Arithmetic is numpy's in the array's own dtype: integers wrap around, overflow of floats is
infinite, the smaller of a number and NaN is NaN. Row numbers are sorted and made unique first;
each operation says how it combines the operands of duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from psync.errors import UsageError, ValueMismatchError
from psync.numerics.sums import firsts, sum_dtype
from psync.specs import plain_array


def ascending(rows: np.ndarray) -> bool:
    """Return whether row numbers ascend strictly, so that each is there once."""
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())


def in_order(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers in ascending order, and which of ``rows`` each one was.

    Equal ones stay in their order.

    Args:
        rows: int64, not negative.
    """
    bits = len(rows).bit_length()
    if len(rows) and int(rows.max()) >> (63 - bits):
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    # Sorting numbers that end with their position takes a fifth of the time of argsort.
    packed = rows << bits
    packed |= np.arange(len(rows))
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    return packed, order


def distinct(rows: np.ndarray, *, sort: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the row numbers ascending, each once, and where each of ``rows`` is among them.

    The second is None if ``rows`` are like this already.

    Args:
        rows: int64, not negative.
        sort: Whether they must ascend. Else they stay as they are if each is there once.
    """
    if ascending(rows) or (not sort and ascending(np.sort(rows))):
        return rows, None
    ordered, order = in_order(rows)
    inverse = np.empty(len(rows), np.int64)
    first = firsts(ordered)
    inverse[order] = np.cumsum(first) - 1
    return ordered[first], inverse


def starts_of(ordered: np.ndarray) -> np.ndarray:
    """Return where each run of equal numbers begins."""
    return np.flatnonzero(firsts(ordered))


ScatterOp = Literal["add", "sub", "mul", "div", "min", "max", "assign"]

Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an array of a shape and dtype with any contents."""

SCATTER_OPS: tuple[str, ...] = get_args(ScatterOp)

LONG_RUN = 8
"""Duplicates of one row beyond this many are reduced on their own, row by row."""

_UFUNCS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
_MERGES = {**_UFUNCS, "sub": np.add, "div": np.multiply}


def check_scatter(op: str, dtype: str, what: str) -> None:
    """Check that rows of a dtype can be changed by an operation.

    Args:
        op: Anything that came from outside.
        dtype: Name of the array's.
        what: The array, for messages.

    Raises:
        UsageError: There is no such operation.
        ValueMismatchError: There is none for the dtype.
    """
    if op not in SCATTER_OPS:
        raise UsageError(
            f"{what}: unknown operation {op[:100]!r}", hint=f"use one of {', '.join(SCATTER_OPS)}"
        )
    if dtype == "bool" and op != "assign":
        raise ValueMismatchError(f"{what}: bool values can only be assigned, not {op!r}")
    if op == "div" and "int" in dtype:
        raise ValueMismatchError(
            f"{what}: {dtype} values cannot be divided: the quotient is no integer",
            hint="declare the variable with a floating dtype, or read, divide and assign",
        )


def combine(op: str, current: np.ndarray, operand: np.ndarray) -> None:
    """Change ``current`` in place: ``current = current op operand``."""
    if op == "assign":
        np.copyto(current, operand)
        return
    with np.errstate(all="ignore"):  # an overflow is a result
        _UFUNCS[op](current, operand, out=current)


def merged(
    rows: np.ndarray, values: np.ndarray, op: str, empty: Empty = np.empty
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, values) with each row once, ascending, that change an array as these do.

    Operands of one row are summed for "add" and "sub", multiplied for "mul" and "div"; of several
    values to assign the last one stays. Half precision is computed in float32, and rounded once.

    Args:
        rows: int64, not negative, in any order.
        values: One row for each.
        op: One of SCATTER_OPS.
        empty: Makes the array of the result: called with shape and dtype.

    Returns:
        What was given, if it is like this already.
    """
    if ascending(rows):
        return rows, values
    ordered, order = in_order(rows)
    starts = starts_of(ordered)
    if len(starts) == len(ordered):
        return ordered, taken(values, order, empty)
    if op == "assign":
        ends = np.append(starts[1:], len(ordered)) - 1
        return ordered[starts], taken(values, order[ends], empty)
    half = values.dtype.itemsize == 2 and values.dtype.kind not in "iu"
    work = sum_dtype(values.dtype) if half else values.dtype
    with np.errstate(all="ignore"):
        made = _reduced(_MERGES[op], values, order, starts, work, empty)
    return ordered[starts], made.astype(values.dtype, copy=False)


def taken(values: np.ndarray, order: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Return ``values[order]``, all of which exist, in memory that ``empty`` makes."""
    made = empty((len(order), *values.shape[1:]), values.dtype)
    return values.take(order, 0, made, "clip")


def _reduced(
    ufunc: np.ufunc,
    values: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
    dtype: np.dtype,
    empty: Empty,
) -> np.ndarray:
    """Return each run of ``values[order]`` as one row.

    As ``ufunc.reduceat`` does, which takes ten times as long where most runs are of one row.
    """
    lengths = np.diff(starts, append=len(order))
    made = taken(values, order[starts], empty).astype(dtype, copy=False)
    longer = np.flatnonzero(lengths > 1)
    for position in range(1, LONG_RUN):  # the second ones of all runs, the third ones, …
        if not len(longer):
            return made
        operand = values[order[starts[longer] + position]].astype(dtype, copy=False)
        made[longer] = ufunc(made[longer], operand)
        longer = longer[lengths[longer] > position + 1]
    for run in longer.tolist():
        rest = order[starts[run] + LONG_RUN : starts[run] + lengths[run]]
        made[run] = ufunc(made[run], ufunc.reduce(values[rest], axis=0, dtype=dtype))
    return made


class IndexedSlices:
    """Some rows of an array: row ``i`` of ``values`` belongs to row ``indices[i]``.

    As a gradient, it means that all other rows have none. An optimizer updates only the named rows
    and their slots. Rows that are named more than once are summed first.

    Args:
        values: Array of shape (n, …), or a value that numpy converts to one.
        indices: Integers of shape (n,), in any order.
        dense_shape: Shape of the whole array, if known.

    Raises:
        ValueMismatchError: Values or indices are not arrays, the indices are not integers, or their
            number differs from the number of rows.

    Source: ``tf.IndexedSlices``.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        try:
            self.values = plain_array(values)
            indices = plain_array(indices)
            shape = None if dense_shape is None else tuple(map(int, dense_shape))
        except (TypeError, ValueError) as exc:
            raise ValueMismatchError(
                "IndexedSlices: expected values and indices that are arrays, and integers as "
                f"dense_shape: {exc}"
            ) from exc
        if indices.size == 0 and indices.dtype.kind == "f":
            indices = indices.astype(np.int64)  # what numpy makes of an empty list
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueMismatchError(
                f"IndexedSlices: expected indices of shape (n,), integers, got {indices.shape} "
                f"{indices.dtype}"
            )
        if self.values.ndim < 1 or len(self.values) != len(indices):
            raise ValueMismatchError(
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
        """Return (indices, values) with each index once, in ascending order, and its rows summed.

        Half precision is summed in float32 and rounded once. If there is nothing to merge, the
        result may share memory with this object.

        Raises:
            ValueMismatchError: There are duplicates, and the values are not floating.
        """
        indices, values = merged(self.indices.astype(np.int64, copy=False), self.values, "add")
        if len(indices) < len(self.indices):
            sum_dtype(values.dtype)  # raises
        return indices, values
