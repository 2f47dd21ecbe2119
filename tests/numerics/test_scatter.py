from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import UsageError, ValueMismatchError
from psync.numerics.rows import LONG_RUN, SCATTER_OPS, check_scatter, combine, merged
from psync.specs import DTYPE_NAMES, dtype_of


def one_by_one(array: np.ndarray, rows: list[int], values: np.ndarray, op: str) -> np.ndarray:
    """What a loop over the rows would do."""
    made = array.copy()
    for row, value in zip(rows, values, strict=True):
        combine(op, made[row], value)
    return made


@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.sampled_from(SCATTER_OPS),
    st.sampled_from(["int8", "uint16", "int64", "float64"]),
)
def test_merged_rows_change_an_array_as_all_of_them_do(
    rows: list[int], op: str, dtype: str
) -> None:
    if op == "div" and dtype != "float64":
        return
    rng = np.random.default_rng(len(rows))
    # Powers of two: products and quotients of floats are exact. Integers wrap around.
    values = (2 ** rng.integers(0, 4, (len(rows), 2))).astype(dtype)
    array = rng.integers(0, 100, (6, 2)).astype(dtype)
    expected = one_by_one(array, rows, values, op)
    each, made = merged(np.array(rows, np.int64), values, op)
    assert each.tolist() == sorted(set(rows))
    assert made.dtype == values.dtype
    got = array.copy()
    current = got[each]
    combine(op, current, made)
    got[each] = current
    np.testing.assert_array_equal(got, expected)


def test_what_is_in_order_is_returned_as_it_is() -> None:
    rows, values = np.array([2, 5]), np.ones((2, 3))
    assert all(a is b for a, b in zip(merged(rows, values, "add"), (rows, values), strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: str) -> None:
    count = 4 * LONG_RUN
    values = np.full((count, 1), 0.1).astype(dtype_of(dtype))
    rows, made = merged(np.zeros(count, np.int64), values, "add")
    expected = np.float32(values[0, 0]) * count
    assert rows.tolist() == [0]
    assert made.dtype == values.dtype
    assert made[0, 0] == np.float32(expected).astype(values.dtype)


def test_memory_of_the_result_is_what_the_caller_makes() -> None:
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    for rows in ([3, 1], [1, 1]):
        for op in ("add", "assign"):
            _, values = merged(np.array(rows), np.ones((2, 2)), op, empty)
            assert values is made[-1]


def test_an_overflow_is_a_result() -> None:
    current = np.full(1, 3e38, np.float32)
    combine("add", current, current.copy())
    assert np.isinf(current)
    _, values = merged(np.zeros(2, np.int64), np.full((2, 1), 3e38, np.float32), "add")
    assert np.isinf(values)


def test_the_smaller_of_a_number_and_nan_is_nan() -> None:
    current = np.array([1.0, np.nan])
    combine("min", current, np.array([np.nan, 1.0]))
    assert np.isnan(current).all()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("op", SCATTER_OPS)
def test_which_dtypes_an_operation_has(op: str, dtype: str) -> None:
    refused = (dtype == "bool" and op != "assign") or ("int" in dtype and op == "div")
    if not refused:
        check_scatter(op, dtype, '"v"')
        return
    with pytest.raises(ValueMismatchError, match=r'"v": (bool|u?int\d+) values can'):
        check_scatter(op, dtype, '"v"')


def test_an_unknown_operation_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="unknown operation 'pow'\nhint: use one of add, sub"):
        check_scatter("pow", "float32", '"v"')
