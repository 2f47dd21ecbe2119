"""Embedding lookups: whose row an id is, and how rows become one. Numbers are made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loops import for_each
from psync.errors import ConfigurationError, PartitionError, ValueMismatchError
from psync.numerics.embedding import (
    SparseIds,
    check_choice,
    check_sizes,
    shared_out,
    with_max_norm,
)

SHAPE = (3, 4)
INDICES = [[0, 0], [0, 1], [1, 0], [2, 3]]


def sparse(ids: Any, weights: Any = None, indices: Any = None, shape: Any = SHAPE) -> SparseIds:
    indices = INDICES if indices is None else indices
    given = None if weights is None else (indices, weights, shape)
    return SparseIds.of((indices, ids, shape), given, "lookup")


# --- over a list of variables -----------------------------------------------------------------


def test_div_gives_each_variable_consecutive_ids() -> None:
    owners, local = shared_out(np.arange(13), [3, 3, 3, 2, 2], "div")
    assert owners.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert local.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1]


def test_mod_gives_ids_in_turns() -> None:
    owners, local = shared_out(np.arange(13), [3, 3, 3, 2, 2], "mod")
    assert owners.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    assert local.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]


@for_each("sizes", [[3, 3, 3, 2, 2], [4], [2, 2], [1, 0], [0, 0]])
def test_sizes_as_both_strategies_cut_are_fine(sizes: list[int]) -> None:
    check_sizes(sizes, [f"t{number}" for number in range(len(sizes))], "lookup")


def test_other_sizes_would_give_wrong_rows_and_are_an_error() -> None:
    with pytest.raises(PartitionError) as caught:
        check_sizes([2, 5], ["a", "b"], "lookup")
    assert str(caught.value).startswith(
        'lookup: 2 variables with 7 rows in all: expected "a" to have 4 rows, got 2'
    )


def test_unknown_strategies_and_combiners_are_errors() -> None:
    check_choice("lookup", "combiner", "sqrtn")
    with pytest.raises(ConfigurationError, match='lookup: partition_strategy: expected "div" or'):
        check_choice("lookup", "partition_strategy", "hash")
    with pytest.raises(ConfigurationError, match='lookup: combiner: expected "mean", "sum" or'):
        check_choice("lookup", "combiner", "max")


# --- the largest norm -------------------------------------------------------------------------


def test_rows_with_a_larger_norm_are_scaled_down_to_it() -> None:
    rows = np.array([[3, 4], [0.3, 0.4], [0, 0]], np.float32)
    clipped = with_max_norm(rows, 1.0, "lookup")
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4], [0, 0]], rtol=1e-6)
    assert clipped.dtype == np.float32


def test_the_norm_is_that_of_the_whole_row() -> None:
    rows = np.full((1, 2, 2), 2.0)  # norm 4
    np.testing.assert_allclose(with_max_norm(rows, 1.0, "lookup"), np.full((1, 2, 2), 0.5))
    np.testing.assert_allclose(with_max_norm(np.array([-3.0, 0.5]), 1.0, "lookup"), [-1, 0.5])


def test_half_precision_is_computed_in_single() -> None:
    rows = np.full((1, 4), 300, np.float16)  # squares overflow float16
    clipped = with_max_norm(rows, 2.0, "lookup")
    assert clipped.dtype == np.float16
    assert clipped.tolist() == [[1, 1, 1, 1]]


def test_large_rows_are_scaled_down_like_others() -> None:
    rows = np.array([[3e30, 4e30], [np.inf, 1]], np.float32)
    clipped = with_max_norm(rows, 1.0, "lookup")
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [np.nan, 0]], rtol=1e-6)


def test_a_norm_that_is_none_is_an_error() -> None:
    for norm in (0, -1, float("nan"), float("inf"), "1"):
        with pytest.raises(ConfigurationError, match="lookup: expected a finite max_norm above 0"):
            with_max_norm(np.zeros((1, 1)), norm, "lookup")  # type: ignore[arg-type]
    with pytest.raises(ValueMismatchError, match="lookup: expected a floating variable, got int64"):
        with_max_norm(np.zeros((1, 1), np.int64), 1.0, "lookup")


# --- combining --------------------------------------------------------------------------------

TABLE = np.array([[1, 10], [2, 20], [3, 30], [4, 40]], np.float32)


def combined(given: SparseIds, combiner: str, rows: np.ndarray = TABLE) -> np.ndarray:
    return given.combined(rows, given.ids, combiner, "lookup")


def test_the_example_of_tensorflows_documentation() -> None:
    given = sparse([1, 3, 0, 1], [2.0, 0.5, 1.0, 3.0])
    np.testing.assert_allclose(
        combined(given, "mean"),
        [(TABLE[1] * 2 + TABLE[3] * 0.5) / 2.5, TABLE[0], TABLE[1] * 3 / 3],
    )
    np.testing.assert_allclose(
        combined(given, "sum"), [TABLE[1] * 2 + TABLE[3] * 0.5, TABLE[0], TABLE[1] * 3]
    )
    np.testing.assert_allclose(
        combined(given, "sqrtn"),
        [(TABLE[1] * 2 + TABLE[3] * 0.5) / np.sqrt(4.25), TABLE[0], TABLE[1]],
        rtol=1e-6,
    )


def test_without_weights_each_counts_once() -> None:
    given = sparse([1, 3, 0, 1])
    np.testing.assert_allclose(combined(given, "mean"), [[3, 30], [1, 10], [2, 20]])
    np.testing.assert_allclose(combined(given, "sum"), [[6, 60], [1, 10], [2, 20]])
    root = np.sqrt(2)
    np.testing.assert_allclose(
        combined(given, "sqrtn"), [[6 / root, 60 / root], [1, 10], [2, 20]], rtol=1e-6
    )


def test_rows_without_ids_are_zeros() -> None:
    given = sparse([3], None, [[1, 0]])
    assert given.empty_rows().tolist() == [0, 2]
    assert combined(given, "mean").tolist() == [[0, 0], [4, 40], [0, 0]]
    nothing = sparse([], None, [])
    assert combined(nothing, "sum").tolist() == [[0, 0]] * 3


def test_weights_that_sum_to_zero_make_zeros() -> None:
    given = sparse([1, 3, 0, 1], [1.0, -1.0, 0.0, 1.0])
    assert combined(given, "mean").tolist() == [[0, 0], [0, 0], [2, 20]]
    assert combined(given, "sqrtn")[1].tolist() == [0, 0]


def test_rows_may_have_any_shape_and_half_precision_is_summed_in_single() -> None:
    given = sparse([0, 1, 2, 3])
    assert combined(given, "sum", np.arange(4.0)).tolist() == [1, 2, 3]
    deep = TABLE.reshape(4, 2, 1)
    np.testing.assert_array_equal(
        combined(given, "sum", deep), combined(given, "sum").reshape(3, 2, 1)
    )
    half = np.array([2048, 1, 1, 0], np.float16)
    many = sparse([0, 1, 2, 3], None, [[0, 0], [0, 1], [0, 2], [0, 3]])
    assert combined(many, "sum", half).tolist() == [2050, 0, 0]  # 2048 + 1 is 2048 in half
    with pytest.raises(ValueMismatchError, match="expected a floating variable, got int64"):
        combined(given, "sum", np.arange(4))


# --- what is left out -------------------------------------------------------------------------


def test_ids_below_zero_and_weights_not_above_zero_are_left_out() -> None:
    given = sparse([1, -1, 0, 1], [2.0, 0.5, 0.0, -3.0]).pruned()
    assert given.rows.tolist() == [0]
    assert given.ids.tolist() == [1]
    assert given.weights is not None
    assert given.weights.tolist() == [2.0]
    assert sparse([1, -1, 0, 1]).pruned().ids.tolist() == [1, 0, 1]


def test_empty_rows_get_the_default_id_with_weight_one() -> None:
    filled = sparse([1, -1, 0, 1], [2.0, 0.5, 0.0, 3.0]).pruned().filled(3)
    np.testing.assert_allclose(combined(filled, "sum"), [TABLE[1] * 2, TABLE[3], TABLE[1] * 3])
    assert sparse([3], None, [[1, 0]]).filled(2).ids.tolist() == [3, 2, 2]


@for_each("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_the_default_id_is_what_it_is_whatever_the_dtype_of_the_ids(dtype: type) -> None:
    filled = sparse(np.array([3], dtype), None, [[1, 0]]).filled(300)
    assert filled.ids.tolist() == [3, 300, 300]
    assert filled.ids.dtype.kind in "iu"


# --- what users give --------------------------------------------------------------------------


def test_objects_with_these_attributes_will_do() -> None:
    given = SimpleNamespace(
        indices=np.array(INDICES), values=np.array([1, 3, 0, 1]), dense_shape=np.array(SHAPE)
    )
    read = SparseIds.of(given, None, "lookup")
    assert read.rows.tolist() == [0, 0, 1, 2]
    assert read.num_rows == 3


@for_each(
    "ids, weights, text",
    [
        (7, None, r"sp_ids: expected a triple \(indices, values, dense_shape\) or an object with"),
        ((INDICES, [1, 2, 3], SHAPE), None, r"indices of shape \(n, 2\), integers, and n values"),
        (([0, 1, 2, 3], [1, 2, 3, 1], SHAPE), None, r"got \(4,\) int64 and \(4,\)"),
        ((INDICES, [1, 2, 3, 1], (3,)), None, "expected a dense_shape of two numbers"),
        (([], [], (-1, 4)), None, r"expected a dense_shape of two numbers from 0, got \(-1, 4\)"),
        ((INDICES, [1, 2, 3, 1], (3, float("nan"))), None, "integers as indices and dense_shape"),
        ((INDICES, [[1], [2, 3]], SHAPE), None, "an array of values: setting an array element"),
        (([[0, 0, 0]], [], SHAPE), None, r"got \(1, 3\) int64 and \(0,\)"),
        ((INDICES, [1, 2, 3, 1], (2, 4)), None, r"index \(2, 3\) is out of bounds for dense_shape"),
        ((INDICES, [0.5] * 4, SHAPE), None, "sp_ids: expected integers as values, got float64"),
        ((INDICES, [1] * 4, SHAPE), (INDICES, ["a"] * 4, SHAPE), "sp_weights: expected numbers as"),
        ((INDICES, [1] * 4, SHAPE), (INDICES, [1.0] * 4, (4, 4)), "expected sp_weights at the ind"),
        (
            (INDICES, [1] * 4, SHAPE),
            ([[0, 0], [0, 1], [1, 0], [2, 2]], [1.0] * 4, SHAPE),
            "expected sp_weights at the indices of sp_ids",
        ),
    ],
)
def test_what_does_not_fit_is_named(ids: Any, weights: Any, text: str) -> None:
    with pytest.raises(ValueMismatchError, match=f"lookup: .*{text}"):
        SparseIds.of(ids, weights, "lookup")
