"""Gradients of rows: what is one, and how rows named more than once are merged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psync.errors import ValueMismatchError
from psync.numerics.rows import IndexedSlices


def test_rows_named_more_than_once_are_summed_in_ascending_order() -> None:
    slices = IndexedSlices(np.array([[1.0], [2.0], [4.0]], np.float32), [5, 2, 5])
    indices, values = slices.merged()
    assert indices.tolist() == [2, 5]
    assert values.tolist() == [[2.0], [5.0]]
    assert values.dtype == np.float32


def test_what_needs_no_change_is_not_copied() -> None:
    values = np.ones((2, 3), np.float32)
    _, merged = IndexedSlices(values, np.array([1, 7])).merged()
    assert merged is values


def test_rows_in_another_order_are_only_sorted() -> None:
    indices, values = IndexedSlices(np.array([1, 2], np.int32), [7, 1]).merged()
    assert indices.tolist() == [1, 7]
    assert values.tolist() == [2, 1]


def test_half_precision_is_summed_in_single_and_rounded_once() -> None:
    values = np.array([2048.0, 1.0, 1.0], np.float16)  # 2048 + 1 is 2048 in float16
    _, merged = IndexedSlices(values, [0, 0, 0]).merged()
    assert merged.tolist() == [2050.0]
    assert merged.dtype == np.float16


def test_a_list_without_rows_is_a_gradient_too() -> None:
    slices = IndexedSlices(np.zeros((0, 4), np.float32), [])
    indices, values = slices.merged()
    assert indices.dtype == np.int64
    assert values.shape == (0, 4)


@pytest.mark.parametrize(
    ("values", "indices"),
    [
        (np.zeros((2, 3)), [0]),
        (np.zeros((2, 3)), [[0, 1]]),
        (np.zeros((2, 3)), [0.5, 1.0]),
        (np.float32(1), [0]),
        ([[1], [2, 3]], [0, 1]),
        ([1, 2], [[0], [1, 2]]),
    ],
)
def test_what_does_not_belong_together_is_refused(values: object, indices: object) -> None:
    with pytest.raises(ValueMismatchError, match="IndexedSlices: expected"):
        IndexedSlices(values, indices)


def test_integers_named_twice_are_refused_since_nobody_can_train_with_them() -> None:
    with pytest.raises(ValueMismatchError, match="floating-point"):
        IndexedSlices(np.array([1, 2]), [0, 0]).merged()


def test_what_it_is_can_be_read() -> None:
    slices = IndexedSlices(np.zeros((2, 3), np.float32), [1, 1], (10, 3))
    assert repr(slices) == "IndexedSlices(2 rows of shape (3,) float32, dense_shape=(10, 3))"


@given(
    hnp.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 9)),
    st.integers(0, 3),
)
def test_merging_equals_adding_to_a_dense_array(indices: np.ndarray, width: int) -> None:
    values = np.arange(len(indices) * width, dtype=np.float64).reshape(len(indices), width)
    expected = np.zeros((10, width))
    np.add.at(expected, indices, values)
    rows, sums = IndexedSlices(values, indices).merged()
    assert np.all(np.diff(rows) > 0)
    got = np.zeros((10, width))
    got[rows] = sums
    np.testing.assert_array_equal(got, expected)
