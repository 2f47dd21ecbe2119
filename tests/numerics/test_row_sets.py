from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.numerics.rows import ascending, distinct, in_order, starts_of

FAR = 1 << 62  # beyond what can be packed with a position

numbers = st.lists(st.integers(0, 9) | st.integers(0, 2**40) | st.integers(FAR, 2**63 - 1))


def rows_of(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(numbers)
def test_each_row_is_there_once_in_ascending_order_and_is_found_again(values: list[int]) -> None:
    each, inverse = distinct(rows_of(values))
    assert each.tolist() == sorted(set(values))
    if inverse is None:
        assert values == sorted(set(values))
    else:
        assert each[inverse].tolist() == values


@given(numbers)
def test_rows_that_need_not_ascend_stay_as_they_are_if_each_is_there_once(
    values: list[int],
) -> None:
    each, inverse = distinct(rows_of(values), sort=False)
    if len(set(values)) == len(values):
        assert (each.tolist(), inverse) == (values, None)
    else:
        assert inverse is not None
        assert each.tolist() == sorted(set(values))
        assert each[inverse].tolist() == values


@given(numbers)
def test_rows_are_put_in_order_and_equal_ones_stay_in_theirs(values: list[int]) -> None:
    ordered, order = in_order(rows_of(values))
    expected = sorted(range(len(values)), key=values.__getitem__)
    assert (ordered.tolist(), order.tolist()) == (sorted(values), expected)


@pytest.mark.parametrize(
    ("values", "answer"),
    [([], True), ([7], True), ([1, 3], True), ([1, 1], False), ([2, 1], False)],
)
def test_ascending_means_strictly(values: list[int], answer: bool) -> None:
    assert ascending(rows_of(values)) is answer


def test_a_run_begins_where_a_number_differs_from_the_one_before() -> None:
    assert starts_of(rows_of([3, 3, 5, 8, 8, 8])).tolist() == [0, 2, 3]
    assert starts_of(rows_of([])).tolist() == []
