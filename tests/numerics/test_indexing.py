"""Index expressions: whatever numpy makes of them, with only the rows that are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loops import for_each
from psync.errors import IndexTypeError, IndexValueError, VariableIndexError
from psync.numerics.indexing import Selection, row_numbers, select


class Elsewhere:
    """Stands for a value that is not here."""


def value_of(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def fetched(value: np.ndarray, selection: Selection) -> np.ndarray:
    """What a variable of this value sends."""
    if selection.rows is None:
        return value
    rows = selection.rows
    return value[np.asarray(rows, np.int64)] if isinstance(rows, range) else value[rows]


def through_rows(value: np.ndarray, index: Any) -> Any:
    selection = select(index, value.shape, "v")
    return selection.of(fetched(value, selection))


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def outcome_of(function: Any) -> Any:
    try:
        return function()
    except (IndexError, TypeError, ValueError) as exc:
        return exc


def agrees_with_numpy(value: np.ndarray, index: Any) -> None:
    expected = outcome_of(lambda: value[index])
    got = outcome_of(lambda: through_rows(value, index))
    if isinstance(expected, Exception):
        assert isinstance(got, VariableIndexError), (index, got, expected)
        assert isinstance(got, type(expected))
    elif isinstance(got, Exception):  # numpy does not look at numbers that it does not use
        assert expected.size == 0, (index, got)
        assert "out of bounds" in str(got)
    else:
        same(got, expected)


# --- which rows travel ------------------------------------------------------------------------


@for_each(
    "index, rows",
    [
        (3, range(3, 4)),
        (-1, range(9, 10)),
        (np.int64(3), range(3, 4)),
        (np.array(3), range(3, 4)),
        (slice(2, 7), range(2, 7)),
        (slice(None, None, -3), range(9, -1, -3)),
        (slice(-12, None, 3), range(0, 10, 3)),
        (slice(11, None, -3), range(9, -1, -3)),
        (slice(5, 5), range(5, 5)),
        (..., range(10)),
        ((..., 1), range(10)),
        (None, range(10)),
        ((None, 3), range(3, 4)),
        ((), range(10)),
        ((slice(1, 3), slice(0, 2)), range(1, 3)),
        (True, range(10)),
    ],
)
def test_plain_items_need_a_range_of_rows(index: Any, rows: range) -> None:
    assert select(index, (10, 3), "v").rows == rows


@for_each(
    "index, rows",
    [
        ([4, 4, -1], [4, 4, 9]),
        ([[1, 2], [3, 1]], [1, 2, 3, 1]),
        ([], []),
        (([2, 5], [0, 1]), [2, 5]),
        (np.arange(10) % 4 == 1, [1, 5, 9]),
        ([False] * 10, []),
        (value_of(10, 3) > 25, [8, 9]),  # element by element: rows with one that is wanted
        (np.array([7], np.uint8), [7]),
    ],
)
def test_arrays_and_masks_need_their_rows(index: Any, rows: list[int]) -> None:
    selected = select(index, (10, 3), "v").rows
    assert isinstance(selected, np.ndarray)
    assert selected.dtype == np.int64
    assert selected.tolist() == rows


def test_a_scalar_variable_has_no_rows() -> None:
    assert select((), (), "v").rows is None
    same(through_rows(np.array(7.0), ()), np.array(7.0)[()])
    same(through_rows(np.array(7.0), ...), np.array(7.0)[...])
    same(through_rows(np.array(7.0), None), np.array(7.0)[None])


# --- the same as numpy ------------------------------------------------------------------------

bounds = st.none() | st.integers(-14, 14)
BORDERS = (0, 4, 7, 10)  # of shards: 10 rows on three ps tasks
near_borders = st.sampled_from([border + off for border in BORDERS for off in (-11, -10, -1, 0, 1)])


@given(start=bounds | near_borders, stop=bounds | near_borders, step=st.none() | st.integers(-4, 4))
@example(start=-12, stop=None, step=3)
@example(start=11, stop=None, step=-3)
@settings(max_examples=200)
def test_any_slice_is_numpys(start: int | None, stop: int | None, step: int | None) -> None:
    agrees_with_numpy(value_of(10, 2), slice(start, stop, step))


def indices(size: int) -> st.SearchStrategy[Any]:
    """What may stand for an axis of this size, and a little that may not."""
    within = st.integers(-size - 1, size) if size else st.integers(-1, 1)
    numbers = st.lists(within, max_size=3)
    return st.one_of(
        within,
        within.map(np.int32),
        st.builds(slice, bounds, bounds, st.none() | st.integers(-3, 3)),
        numbers,
        numbers.map(lambda row: np.array(row, np.int64)),
        st.lists(st.lists(within, min_size=2, max_size=2), min_size=1, max_size=2),
        st.lists(st.booleans(), min_size=size, max_size=size).map(np.array),
        st.lists(st.booleans(), min_size=1, max_size=4),
        st.sampled_from([..., None, True, np.False_, 1.0, "a", np.array([])]),
    )


@st.composite
def values_and_indices(draw: st.DrawFn) -> tuple[np.ndarray, Any]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = lambda axis: shape[axis] if axis < len(shape) else 2  # noqa: E731
    if shape and draw(st.integers(0, 9)) == 0:
        axes = draw(st.integers(1, len(shape)))
        mask = np.array(draw(st.lists(st.booleans(), min_size=64, max_size=64)))
        return value_of(*shape), mask[: int(np.prod(shape[:axes]))].reshape(shape[:axes])
    count = draw(st.integers(0, len(shape) + 1))
    items = tuple(draw(indices(size(axis))) for axis in range(count))
    return value_of(*shape), items[0] if count == 1 and draw(st.booleans()) else items


@given(values_and_indices())
@settings(max_examples=400)
def test_any_index_is_numpys(drawn: tuple[np.ndarray, Any]) -> None:
    value, index = drawn
    agrees_with_numpy(value, index)


# --- errors ----------------------------------------------------------------------------------


@for_each(
    "index, kind, text",
    [
        (10, IndexError, 'index 10 of "v": index 10 is out of bounds for axis 0 with size 10'),
        (-11, IndexError, "index -11 is out of bounds for axis 0 with size 10"),
        ((0, 3), IndexError, "index 3 is out of bounds for axis 1 with size 3"),
        ([1, 12], IndexError, "index 12 is out of bounds for axis 0 with size 10"),
        (10**30, IndexError, "is out of bounds for axis 0 with size 10"),
        ((0, 0, 0), IndexError, "array is 2-dimensional, but 3 were indexed"),
        ((..., ...), IndexError, "an index can only have a single ellipsis"),
        (
            np.ones(3, bool),
            IndexError,
            "boolean index did not match indexed array along",
        ),
        (
            np.ones((10, 2), bool),
            IndexError,
            "boolean index did not match indexed array along",
        ),
        (([0, 1], [0, 1, 2]), IndexError, "could not be broadcast together with shapes (2,) (3,)"),
        (np.array([0, 2**64 - 1], np.uint64), IndexError, "is out of bounds for axis 0 with"),
        (1.0, IndexError, "expected integers, slices, ..., None, or arrays of integers or bools"),
        ([0.5], IndexError, "got float64"),
        ("a", IndexError, "got str"),
        (slice(None, None, 0), ValueError, "slice step cannot be zero"),
        ([[1], [2, 3]], ValueError, "the list is not an array"),
        (np.ma.masked_array([1, 2], [True, False]), TypeError, "a masked array, whose mask hides"),
        (slice(0, 2.5), TypeError, "index slice(0, 2.5, None) of"),
        (Elsewhere(), TypeError, "Elsewhere is not allowed, because its value is remote"),
        ([0, [Elsewhere()]], TypeError, "Elsewhere is not allowed, because its value is remote"),
        (
            slice(Elsewhere(), None),
            TypeError,
            "Elsewhere is not allowed, because its value is remote",
        ),
    ],
)
def test_what_is_no_index_is_an_error_that_names_the_variable(
    index: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(VariableIndexError) as caught:
        select(index, (10, 3), "v", (Elsewhere,))
    assert isinstance(caught.value, kind)
    assert text in str(caught.value)
    assert '"v"' in str(caught.value)


# --- row numbers ------------------------------------------------------------------------------


def test_row_numbers_keep_their_shape_and_become_int64() -> None:
    numbers = row_numbers(np.array([[3, 0], [9, 3]], np.uint8), 10, "lookup")
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [[3, 0], [9, 3]]
    assert row_numbers([], 10, "lookup").dtype == np.int64


@for_each(
    "given_indices, num_rows, kind, text",
    [
        ([1, -1], 10, VariableIndexError, "lookup: index -1 is out of bounds, expected 0 to 9"),
        ([1, 10], 10, VariableIndexError, "lookup: index 10 is out of bounds, expected 0 to 9"),
        (np.array([2**63], np.uint64), 10, VariableIndexError, "index 9223372036854775808 is out"),
        ([0], 0, VariableIndexError, "lookup: index 0 is out of bounds: there are no rows"),
        ([0.5], 10, IndexTypeError, "lookup: expected integers as indices, got float64"),
        ([True], 10, IndexTypeError, "lookup: expected integers as indices, got bool"),
        ([[0]], 10, IndexValueError, r"lookup: expected indices of shape \(n,\), got \(1, 1\)"),
        (3, 10, IndexValueError, r"lookup: expected indices of shape \(n,\), got \(\)"),
        ([[0], [1, 2]], 10, IndexValueError, "lookup: the indices are not an array"),
    ],
)
def test_row_numbers_that_are_none_are_errors(
    given_indices: Any, num_rows: int, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        row_numbers(given_indices, num_rows, "lookup", ndim=1)
