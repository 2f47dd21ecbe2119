"""Embedding arithmetic: mapping ids to tables and rows, and combining the rows of several ids."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, PartitionError, ValueMismatchError, check_fits
from psync.numerics.sums import sum_dtype
from psync.specs import plain_array

CHOICES = {"partition_strategy": ("div", "mod"), "combiner": ("mean", "sum", "sqrtn")}
"""How ids are spread over a list of variables, and how rows become one."""


def check_choice(what: str, name: str, given: str) -> None:
    """Check an argument that is one of ``CHOICES``.

    Raises:
        ConfigurationError: It is none of them.
    """
    if given in CHOICES[name]:
        return
    *others, last = (f'"{choice}"' for choice in CHOICES[name])
    expected = f"{what}: {name}: expected {', '.join(others)} or {last}"
    check_fits(False, expected, given)


def check_sizes(sizes: Sequence[int], names: Sequence[str], what: str) -> None:
    """Check that a list of variables has the rows that either strategy gives each of them.

    Raises:
        PartitionError: One has not: lookups would find other rows than were meant.
    """
    total, count = sum(sizes), len(sizes)
    # The same numbers for both: the ones left over go to the first variables.
    expected = [len(range(first, total, count)) for first in range(count)]
    for name, size, rows in zip(names, sizes, expected, strict=True):
        all_of_them = f"{what}: {count} variables with {total} rows in all"
        hint = "numbers of rows may differ by one, with the larger ones first"
        what_fits = f'{all_of_them}: expected "{name}" to have {rows} rows'
        check_fits(size == rows, what_fits, size, hint, error=PartitionError)


def shared_out(
    ids: np.ndarray, sizes: Sequence[int], strategy: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each id the number of its variable in a list, and its row there.

    Args:
        ids: int64, each below the sum of ``sizes``.
        sizes: Of the variables, as ``check_sizes`` wants them.
        strategy: "div": consecutive ids; "mod": in turns.
    """
    if strategy == "mod":
        return ids % len(sizes), ids // len(sizes)
    ends = np.array(list(itertools.accumulate(sizes)))
    owners = np.searchsorted(ends, ids, side="right")
    return owners, ids - (ends - np.array(sizes))[owners]


def with_max_norm(rows: np.ndarray, max_norm: float, what: str) -> np.ndarray:
    """Return rows, those with a larger Euclidean norm scaled down to it.

    Args:
        rows: Floating; axis 0 counts them.
        max_norm: Above 0.
        what: For messages.

    Raises:
        ConfigurationError: The norm is no finite number above 0.
        ValueMismatchError: The rows are not floating.
    """
    if not isinstance(max_norm, Real) or not 0 < max_norm < math.inf:
        raise ConfigurationError(f"{what}: expected a finite max_norm above 0, got {max_norm!r}")
    work = _work_dtype(rows.dtype, what)
    wide = rows.astype(work, copy=False)
    with np.errstate(all="ignore"):  # infinities and NaN are results
        squares = np.square(wide, dtype=np.float64)  # which large numbers do not overflow
        norms = np.sqrt(np.sum(squares, axis=tuple(range(1, rows.ndim)), keepdims=True))
        clipped = np.multiply(wide, (max_norm / np.maximum(norms, max_norm)).astype(work))
    return clipped.astype(rows.dtype, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class SparseIds:
    """A matrix of which some places hold an id."""

    rows: np.ndarray  # of each id, int64, in any order
    ids: np.ndarray  # as they were given
    weights: np.ndarray | None  # of each id; None: 1
    num_rows: int

    @staticmethod
    def of(sp_ids: Any, sp_weights: Any, what: str) -> SparseIds:
        """Read what a user gives: triples (indices, values, dense_shape), or such objects.

        Raises:
            ValueMismatchError: They are none, or do not fit each other.
        """
        indices, ids, shape = _triple(sp_ids, f"{what}: sp_ids")
        if ids.dtype.kind not in "iu":
            expected = f"{what}: sp_ids: expected integers as values"
            raise ValueMismatchError(f"{expected}, got {ids.dtype}")
        weights = None
        if sp_weights is not None:
            at, weights, weights_shape = _triple(sp_weights, f"{what}: sp_weights")
            if weights_shape != shape or not np.array_equal(at, indices):
                raise ValueMismatchError(
                    f"{what}: expected sp_weights at the indices of sp_ids, in a matrix of shape "
                    f"{shape}, got {len(weights)} at other indices or in shape {weights_shape}"
                )
            if weights.dtype.kind not in "fiu":
                raise ValueMismatchError(
                    f"{what}: sp_weights: expected numbers as values, got {weights.dtype}"
                )
        return SparseIds(indices[:, 0], ids, weights, shape[0])

    def pruned(self) -> SparseIds:
        """Return those without ids below 0, and without weights that are not above 0."""
        keep = self.ids >= 0
        if self.weights is not None:
            keep &= self.weights > 0
        weights = None if self.weights is None else self.weights[keep]
        return SparseIds(self.rows[keep], self.ids[keep], weights, self.num_rows)

    def empty_rows(self) -> np.ndarray:
        """Return the numbers of the rows that have no id."""
        return np.flatnonzero(np.bincount(self.rows, minlength=self.num_rows) == 0)

    def filled(self, default_id: int) -> SparseIds:
        """Return them with an id, of weight 1, in each row that has none.

        Args:
            default_id: The id, not negative.
        """
        empty = self.empty_rows()
        # Wide enough for the default, and not floating, as uint64 and int64 together would be.
        dtype = np.uint64 if self.ids.dtype == np.uint64 else np.int64
        weights = self.weights
        if weights is not None:
            weights = np.concatenate([weights, np.ones(len(empty), weights.dtype)])
        rows, added = np.concatenate([self.rows, empty]), np.full(len(empty), default_id, dtype)
        ids = np.concatenate([self.ids.astype(dtype), added])
        return SparseIds(rows, ids, weights, self.num_rows)

    def combined(self, rows: np.ndarray, which: np.ndarray, combiner: str, what: str) -> np.ndarray:
        """Return for each row of the matrix what its ids' rows amount to; zeros if it has none.

        Args:
            rows: Of the variable, floating.
            which: Of them belongs to each id.
            combiner: One of ``CHOICES``.
            what: For messages.

        Raises:
            ValueMismatchError: The rows are not floating.
        """
        work = _work_dtype(rows.dtype, what)
        order = np.argsort(self.rows, kind="stable")
        numbers = self.rows[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        result = np.zeros((self.num_rows, *rows.shape[1:]), work)
        with np.errstate(all="ignore"):  # infinities and NaN are results
            if len(numbers):
                terms = rows[which[order]].astype(work, copy=False)
                weights = None if self.weights is None else self.weights[order].astype(work)
                result[numbers[starts]] = _reduced(terms, weights, starts, combiner)
            return result.astype(rows.dtype, copy=False)


def _reduced(
    terms: np.ndarray, weights: np.ndarray | None, starts: np.ndarray, combiner: str
) -> np.ndarray:
    """Return one row for each run of rows."""
    if weights is None:
        weights = np.ones(len(terms), terms.dtype)
    else:
        terms = terms * _along(weights, terms.ndim)
    sums: np.ndarray = np.add.reduceat(terms, starts, axis=0)
    if combiner == "mean":
        return _divided(sums, np.add.reduceat(weights, starts))
    if combiner == "sqrtn":
        return _divided(sums, np.sqrt(np.add.reduceat(weights * weights, starts)))
    return sums


def _triple(given: Any, what: str) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Return (indices, values, dense shape) of a sparse matrix."""

    def wrong(text: str) -> ValueMismatchError:
        return ValueMismatchError(f"{what}: {text}")

    if all(hasattr(given, name) for name in ("indices", "values", "dense_shape")):
        given = (given.indices, given.values, given.dense_shape)
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise wrong(
            "expected a triple (indices, values, dense_shape) or an object with these attributes, "
            f"got {type(given).__name__}"
        )
    try:
        indices, values = plain_array(given[0]), plain_array(given[1])
        shape = tuple(map(operator.index, np.asarray(given[2]).reshape(-1).tolist()))
    except (TypeError, ValueError) as exc:
        expected = "arrays of integers as indices and dense_shape, and an array of values"
        raise wrong(f"expected {expected}: {exc}") from exc
    if not indices.size and not values.size:  # numpy makes floats of empty lists
        indices = np.empty((0, 2), np.int64)
        values = values.astype(np.int64) if values.dtype.kind == "f" else values
    if len(shape) != 2 or min(shape) < 0:
        raise wrong(f"expected a dense_shape of two numbers from 0, got {shape}")
    if indices.shape != (values.size, 2) or values.ndim != 1 or indices.dtype.kind not in "iu":
        got = f"{indices.shape} {indices.dtype} and {values.shape}"
        raise wrong(f"expected indices of shape (n, 2), integers, and n values, got {got}")
    outside = ((indices < 0) | (indices >= np.array(shape))).any(axis=1)
    if outside.any():
        index = tuple(indices[outside][0].tolist())
        raise wrong(f"index {index} is out of bounds for dense_shape {shape}")
    return indices.astype(np.int64, copy=False), values, (shape[0], shape[1])


def _work_dtype(dtype: np.dtype, what: str) -> np.dtype:
    try:
        return sum_dtype(dtype)
    except ValueMismatchError as exc:
        raise ValueMismatchError(f"{what}: expected a floating variable, got {dtype}") from exc


def _along(numbers: np.ndarray, ndim: int) -> np.ndarray:
    return numbers.reshape(-1, *[1] * (ndim - 1))


def _divided(sums: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divide each row; by 0: zeros, as in TensorFlow."""
    divisors = np.broadcast_to(_along(by, sums.ndim), sums.shape)
    result: np.ndarray = np.divide(sums, divisors, out=np.zeros_like(sums), where=divisors != 0)
    return result
