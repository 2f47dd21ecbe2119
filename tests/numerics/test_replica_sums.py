"""Sums, means and concatenations over replicas, with numbers."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psync.errors import ReplicaValueError, ValueMismatchError
from psync.numerics.replicas import ReduceOp, as_axes, as_reduce_op, gather_arrays, reducing_arrays
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import PIECE_BYTES, at_once

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
ROWS_4 = np.arange(8, dtype=np.float32).reshape(4, 2)
ROWS_2 = np.full((2, 2), 10, np.float32)


def reduce_arrays(op: ReduceOp, values: Any, axes: Any) -> Any:
    return at_once(reducing_arrays(op, values, axes))


@pytest.mark.parametrize("op", [SUM, "sum", "SUM", "Sum"])
def test_a_reduction_may_be_called_by_its_name(op: object) -> None:
    assert as_reduce_op(op) is SUM


@pytest.mark.parametrize("op", ["none", 1, None, object()])
def test_what_is_no_reduction_is_refused(op: object) -> None:
    with pytest.raises(ReplicaValueError, match="expected a reduction, SUM or MEAN, got"):
        as_reduce_op(op)


def test_axes_are_whole_numbers() -> None:
    assert as_axes(None) is None
    assert as_axes(-1) == (-1,)
    assert as_axes([0, np.int64(1)]) == (0, 1)
    for axis in (0.5, "0", True, [0, None]):
        with pytest.raises(ReplicaValueError, match="axis: expected a whole number, or a list"):
            as_axes(axis)


def test_arrays_are_added_in_the_order_of_replicas() -> None:
    big, one = np.array([1e8], np.float32), np.array([1], np.float32)
    assert reduce_arrays(SUM, [big, one, -big], None).tolist() == [0.0]
    assert reduce_arrays(SUM, [big, -big, one], None).tolist() == [1.0]


def test_a_sum_has_the_dtype_of_its_terms_and_a_mean_of_integers_is_float64() -> None:
    ints = [np.array([1, 2], np.int32), np.array([2, 2], np.int32)]
    assert reduce_arrays(SUM, ints, None).dtype == np.int32
    mean = reduce_arrays(MEAN, ints, None)
    assert (mean.tolist(), mean.dtype) == ([1.5, 2.0], np.float64)
    single = reduce_arrays(MEAN, [ROWS_2, ROWS_2 + 1], None)
    assert (single.tolist(), single.dtype) == ([[10.5] * 2] * 2, np.float32)


def test_bools_are_counted() -> None:
    flags = [np.array([True, False]), np.array([True, True])]
    assert reduce_arrays(SUM, flags, None).tolist() == [2, 1]
    assert reduce_arrays(MEAN, flags, None).tolist() == [1.0, 0.5]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_summed_in_single_and_rounded_once(dtype: type) -> None:
    big = 2048 if dtype is np.float16 else 256  # from here on one more is no longer seen
    values = [np.array([number], dtype) for number in (big, 1, 1)]
    total = reduce_arrays(SUM, values, None)
    assert (float(total[0]), total.dtype) == (big + 2, np.dtype(dtype))
    assert reduce_arrays(MEAN, values, None).dtype == np.dtype(dtype)


def test_numbers_stay_numbers() -> None:
    assert reduce_arrays(SUM, [1, 2], None) == 3
    assert reduce_arrays(MEAN, [1.0, 2.0], None) == 1.5
    assert np.isinf(reduce_arrays(SUM, [np.float32(3e38)] * 2, None))
    assert reduce_arrays(SUM, [1j, 2j], None) == 3j


def test_what_is_reduced_is_not_changed() -> None:
    values = [ROWS_2.copy(), ROWS_2.copy()]
    reduce_arrays(SUM, values, None)
    assert all(np.array_equal(value, ROWS_2) for value in values)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
@pytest.mark.parametrize("op", ReduceOp)
def test_large_arrays_are_reduced_in_pieces_to_the_same(dtype: type, op: ReduceOp) -> None:
    draw = np.random.default_rng(7)
    values = [draw.integers(0, 9, PIECE_BYTES // 4).astype(dtype) for _ in range(3)]
    pieces = reducing_arrays(op, values, None)
    assert sum(1 for _ in pieces) >= 1
    whole = reduce_arrays(op, values, None)
    parts = [reduce_arrays(op, [value[n : n + 999] for value in values], None) for n in (0, 10**5)]
    assert all(whole[n : n + 999].tolist() == part.tolist()
               for n, part in zip((0, 10**5), parts, strict=True))  # fmt: skip
    rows = [value.reshape(-1, 8) for value in values]
    assert sum(1 for _ in reducing_arrays(op, [row.astype(np.float64) for row in rows], (0,))) == 3


def test_a_sum_along_an_axis_is_one_within_each_replica_and_then_across() -> None:
    assert reduce_arrays(SUM, [ROWS_4, ROWS_2], (0,)).tolist() == [32.0, 36.0]
    assert reduce_arrays(SUM, [ROWS_4, ROWS_2], (0, 1)) == 68.0
    assert reduce_arrays(SUM, [ROWS_4, ROWS_4], (-1,)).tolist() == [2.0, 10.0, 18.0, 26.0]


def test_a_mean_along_an_axis_is_that_of_all_elements() -> None:
    mean = reduce_arrays(MEAN, [ROWS_4, ROWS_2], (0,))
    assert mean.tolist() == pytest.approx([32 / 6, 36 / 6])
    assert mean.dtype == np.float32
    assert reduce_arrays(MEAN, [ROWS_4, ROWS_2], (0, 1)) == pytest.approx(68 / 12)
    assert reduce_arrays(MEAN, [np.array([1, 2, 3, 6]), np.array([0, 0])], (0,)) == 2.0


def test_a_mean_of_nothing_is_not_a_number() -> None:
    assert np.isnan(reduce_arrays(MEAN, [np.zeros(0), np.zeros(0)], (0,)))


@pytest.mark.parametrize("axes", [(2,), (-3,), (0, 0), (1, -1)])
def test_an_axis_that_is_not_there_is_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(ReplicaValueError, match=r"value of shape \(4, 2\), from -2 to 1"):
        reduce_arrays(SUM, [ROWS_4], axes)


def test_shapes_that_differ_are_refused_and_never_broadcast() -> None:
    with pytest.raises(ReplicaValueError, match=r"one shape on all replicas, got \(4, 2\), \(2,"):
        reduce_arrays(SUM, [ROWS_4, ROWS_2], None)
    with pytest.raises(ReplicaValueError, match=r"got \(2,\), \(\)"):
        reduce_arrays(SUM, [ROWS_4, np.zeros(3)], (0,))


@pytest.mark.parametrize("value", ["text", object(), [[1], [2, 3]], np.datetime64("2000-01-01")])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ReplicaValueError, match="expected numbers or arrays from replicas"):
        reduce_arrays(SUM, [value], None)


# --- rows ----------------------------------------------------------------------------------------


def rows(indices: list[int], value: float = 1.0, **options: object) -> IndexedSlices:
    return IndexedSlices(np.full((len(indices), 2), value, np.float32), indices, **options)


def test_rows_of_all_replicas_are_put_together_and_those_of_one_index_summed() -> None:
    total = reduce_arrays(SUM, [rows([3, 1], dense_shape=(9, 2)), rows([3], 4.0)], None)
    assert isinstance(total, IndexedSlices)
    assert total.indices.tolist() == [1, 3]
    assert total.values.tolist() == [[1, 1], [5, 5]]
    assert total.dense_shape == (9, 2)


def test_a_mean_of_rows_divides_by_the_replicas_also_what_only_one_of_them_has() -> None:
    mean = reduce_arrays(MEAN, [rows([3, 1]), rows([3])], None)
    assert isinstance(mean, IndexedSlices)
    assert mean.values.tolist() == [[0.5, 0.5], [1, 1]]
    assert (mean.values.dtype, mean.dense_shape) == (np.float32, None)


def test_rows_of_another_library_are_rows() -> None:
    class Slices:
        values, indices, dense_shape = np.ones((1, 2), np.float32), np.array([3]), (9, 2)

    total = reduce_arrays(SUM, [Slices(), rows([3])], None)
    assert isinstance(total, IndexedSlices)
    assert (total.indices.tolist(), total.values.tolist()) == ([3], [[2, 2]])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ReplicaValueError, match="IndexedSlices on some replicas"):
        reduce_arrays(SUM, [rows([1]), ROWS_2], None)
    with pytest.raises(ReplicaValueError, match="along an axis is not possible"):
        reduce_arrays(SUM, [rows([1])], (0,))
    with pytest.raises(ReplicaValueError, match=r"one shape on all replicas, got \(2,\), \(3,\)"):
        reduce_arrays(SUM, [rows([1]), IndexedSlices(np.zeros((1, 3)), [1])], None)
    with pytest.raises(ReplicaValueError, match="expected one dense_shape, got"):
        reduce_arrays(SUM, [rows([1], dense_shape=(n, 2)) for n in (8, 9)], None)
    with pytest.raises(ValueMismatchError, match="only floating-point"):
        reduce_arrays(SUM, [IndexedSlices(np.ones((1, 2), np.int64), [1])] * 2, None)


# --- gather --------------------------------------------------------------------------------------


def test_what_is_gathered_stands_one_after_the_other_along_the_axis() -> None:
    assert gather_arrays([ROWS_4, ROWS_2], 0).tolist() == [*ROWS_4.tolist(), *ROWS_2.tolist()]
    assert gather_arrays([ROWS_2, np.zeros((2, 1))], -1).tolist() == [[10, 10, 0]] * 2


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(ReplicaValueError, match="differ along axis 1 only, got \\(4, 2\\), \\(2,"):
        gather_arrays([ROWS_4, ROWS_2], 1)
    with pytest.raises(ReplicaValueError, match="rank 1 or more"):
        gather_arrays([1, 2], 0)
    with pytest.raises(ReplicaValueError, match="expected one axis"):
        gather_arrays([ROWS_2], [0, 1])
    with pytest.raises(ReplicaValueError, match="expected one axis"):
        gather_arrays([ROWS_2], None)
    with pytest.raises(ReplicaValueError, match="axis 2: expected axes of a value of shape"):
        gather_arrays([ROWS_2], 2)
    with pytest.raises(ReplicaValueError, match="gather of IndexedSlices is not possible"):
        gather_arrays([rows([1])], 0)
