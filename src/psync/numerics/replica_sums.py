"""Reductions over replicas of one array each: sum, mean, concatenation."""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.errors import ReplicaValueError
from psync.numerics.scatter import IndexedSlices
from psync.numerics.sums import PIECE_BYTES, Pieces, cuts, sum_dtype
from psync.specs import DTYPE_NAMES, plain_array


class ReduceOp(enum.Enum):
    """How the values of several replicas become one: as their sum or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: object) -> ReduceOp:
    """Return ``op``, which may be the name of one in any case: "sum".

    Raises:
        ReplicaValueError: It is neither. A ``VariableAggregation`` is none: NONE and
            ONLY_FIRST_REPLICA are no reductions.

    Source: the check in ``tf.distribute.StrategyExtended.reduce_to``.
    """
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise ReplicaValueError(
        f"expected a reduction, SUM or MEAN, got {op!r}",
        hint="psync.ReduceOp.SUM, psync.ReduceOp.MEAN, or their names",
    )


def as_axes(axis: Any) -> tuple[int, ...] | None:
    """Return an axis, or a list of them, as a tuple; None as it is.

    Raises:
        ReplicaValueError: It is no whole number, or one stands twice.
    """
    if axis is None:
        return None
    given = axis if isinstance(axis, list | tuple) else (axis,)
    try:
        if not any(isinstance(number, bool | np.bool_) for number in given):
            return tuple(operator.index(number) for number in given)
    except TypeError:
        pass
    raise ReplicaValueError(f"axis: expected a whole number, or a list of them, got {axis!r}")


def reducing_arrays(
    op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None
) -> Pieces[np.ndarray | np.generic | IndexedSlices]:
    """Make the sum or mean of one number, array or ``IndexedSlices`` from each replica.

    Dense arrays are worked on in pieces; rows, and sums along an axis, array by array.

    Args:
        op: SUM or MEAN.
        values: In the order of replica ids: that of the additions. Not to be changed meanwhile.
        axes: Along which each is reduced as well, or None.

    Raises:
        ReplicaValueError: They do not fit each other, or there is no such axis.
        ValueMismatchError: ``IndexedSlices`` of integers.
    """
    if any(_is_slices(value) for value in values):
        return _reduce_slices(op, values, axes)
    arrays = [_as_array(value) for value in values]
    dtype = np.result_type(*(array.dtype for array in arrays))
    work = _work_dtype(dtype)
    count = len(arrays)
    if axes is not None:
        count = 0
        for position, own in enumerate([_axes_within(axes, array) for array in arrays]):
            count += math.prod(arrays[position].shape[axis] for axis in own)
            with np.errstate(all="ignore"):  # infinities and NaN are results
                arrays[position] = np.asarray(arrays[position].sum(axis=own, dtype=work))
            if getattr(values[position], "nbytes", 0) > PIECE_BYTES:
                yield
    _check_shapes([array.shape for array in arrays], "reduce")
    result = np.empty(arrays[0].shape, _result_dtype(op, dtype, work))
    results, terms = result.reshape(-1), [array.reshape(-1) for array in arrays]
    divisor = np.asarray(count, _mean_dtype(work))
    for part in cuts(results.size, result.itemsize * len(terms)):
        with np.errstate(all="ignore"):
            total = terms[0][part].astype(work)
            for term in terms[1:]:
                np.add(total, term[part], out=total)
            results[part] = total / divisor if op is ReduceOp.MEAN else total
        if part.stop < results.size:
            yield
    return result[()]  # a number, not an array without axes


def gather_arrays(values: Sequence[Any], axis: object) -> np.ndarray:
    """Return one array from each replica, one after the other along ``axis``.

    Raises:
        ReplicaValueError: They do not fit each other, or there is no such axis.
    """
    axes = as_axes(axis)
    if axes is None or len(axes) != 1:
        raise ReplicaValueError(f"gather: expected one axis, a whole number, got {axis!r}")
    if any(_is_slices(value) for value in values):
        raise ReplicaValueError(
            "gather of IndexedSlices is not possible",
            hint="gather their values and their indices: gather((s.values, s.indices), axis=0)",
        )
    arrays = [_as_array(value) for value in values]
    if any(array.ndim == 0 for array in arrays):
        raise ReplicaValueError(
            "gather: expected values of rank 1 at least, got a number",
            hint="give it an axis: np.reshape(value, (1,))",
        )
    along = [_axes_within(axes, array)[0] for array in arrays]
    rest = [
        (*array.shape[:own], None, *array.shape[own + 1 :])
        for array, own in zip(arrays, along, strict=True)
    ]
    if any(shape != rest[0] for shape in rest):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ReplicaValueError(
            f"gather: expected shapes that differ along axis {along[0]} only, got {shapes}"
        )
    return np.concatenate(arrays, axis=along[0])


def _reduce_slices(
    op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None
) -> IndexedSlices:
    slices = [
        IndexedSlices(value.values, value.indices, getattr(value, "dense_shape", None))
        for value in values
        if _is_slices(value)
    ]
    if len(slices) != len(values):
        raise ReplicaValueError("reduce: IndexedSlices on some replicas, something else on others")
    if axes is not None:
        raise ReplicaValueError(
            "reduce of IndexedSlices along an axis is not possible",
            hint="reduce them over the replicas, without axis",
        )
    _check_shapes([part.values.shape[1:] for part in slices], "reduce of IndexedSlices")
    dense = {part.dense_shape for part in slices} - {None}
    if len(dense) > 1:
        raise ReplicaValueError(
            f"reduce of IndexedSlices: expected one dense_shape, got {sorted(map(str, dense))}"
        )
    dtype = np.result_type(*(part.values.dtype for part in slices))
    rows = np.concatenate([part.values for part in slices]).astype(sum_dtype(dtype), copy=False)
    indices = np.concatenate([part.indices.astype(np.int64, copy=False) for part in slices])
    merged, sums = IndexedSlices(rows, indices).merged()
    if op is ReduceOp.MEAN:
        with np.errstate(all="ignore"):
            sums = sums / np.asarray(len(slices), sums.dtype)
    return IndexedSlices(sums.astype(dtype, copy=False), merged, dense.pop() if dense else None)


def _is_slices(value: Any) -> bool:
    """Whether these are rows: ours, or those of another library, such as ``tf.IndexedSlices``."""
    return isinstance(value, IndexedSlices) or (
        hasattr(value, "values") and hasattr(value, "indices") and not callable(value.indices)
    )


def _as_array(value: Any) -> np.ndarray:
    try:
        array = plain_array(value)
    except (TypeError, ValueError) as exc:
        raise ReplicaValueError(f"expected numbers or arrays from replicas: {exc}") from exc
    if not _are_numbers(array.dtype):
        got = type(value).__name__ if array.dtype.kind == "O" else str(array.dtype)
        raise ReplicaValueError(f"expected numbers or arrays from replicas, got {got}")
    return array


@functools.cache  # dtype.name costs microseconds
def _are_numbers(dtype: np.dtype) -> bool:
    return dtype.name in DTYPE_NAMES or dtype.kind == "c"


def _work_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    if dtype.kind == "b":
        return np.dtype(np.int64)
    return dtype if dtype.kind in "iuc" else sum_dtype(dtype)


def _result_dtype(op: ReduceOp, dtype: np.dtype, work: np.dtype) -> np.dtype:
    """Return the dtype of a sum or mean of values of ``dtype``."""
    if dtype.kind in "biu":
        return work if op is ReduceOp.SUM else _mean_dtype(work)
    return dtype


def _mean_dtype(work: np.dtype) -> np.dtype:
    return np.dtype(np.float64) if work.kind in "iu" else work


def _axes_within(axes: tuple[int, ...], array: np.ndarray) -> tuple[int, ...]:
    """Return ``axes`` counted from the front."""
    own = tuple(axis + array.ndim if axis < 0 else axis for axis in axes)
    if not all(0 <= axis < array.ndim for axis in own) or len(set(own)) < len(own):
        raise ReplicaValueError(
            f"axis {axes[0] if len(axes) == 1 else list(axes)}: expected axes of a value of shape "
            f"{array.shape}, from {-array.ndim} to {array.ndim - 1}, each once"
        )
    return own


def _check_shapes(shapes: list[tuple[int, ...]], operation: str) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise ReplicaValueError(
            f"{operation}: expected one shape on all replicas, got {', '.join(map(str, shapes))}"
        )
