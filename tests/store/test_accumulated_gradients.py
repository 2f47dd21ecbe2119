"""Means and sums of gradients, of whole arrays and of rows, and which shapes fit.

Which gradients count, and who gets them when, is in ``tests/top/test_accumulators.py``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulator_tools import accumulator, apply_grad, apply_slices, refusal, take_grad
from psync.accumulators import Accumulator, Applied, SparseConditionalAccumulator
from psync.errors import ConfigurationError, ValueMismatchError
from psync.specs import Outcome, dtype_of


def sparse(
    shape: tuple[int | None, ...] | None = None, dtype: object = "float32", **options: Any
) -> SparseConditionalAccumulator:
    return SparseConditionalAccumulator(dtype, shape, name="w/part_0", **options)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def taken(held: SparseConditionalAccumulator) -> tuple[list[int], list[Any], tuple[int, ...]]:
    result = take_grad(held, 1).result
    return result.indices.tolist(), result.values.tolist(), result.dense_shape


# --- what comes of them ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "weights", "result"),
    [("MEAN", (1, 1), [3]), ("SUM", (1, 1), [6]), ("MEAN", (3, 1), [2]), ("SUM", (3, 1), [8])],
)
def test_a_mean_is_divided_by_all_weights_and_a_sum_is_not(
    reduction: str, weights: tuple[float, float], result: list[float]
) -> None:
    held = accumulator((1,), reduction_type=reduction)
    for step in range(2):
        for value, weight in zip((1, 5), weights, strict=True):
            apply_grad(held, np.full(1, value, np.float32), step, weight)
        assert held.num_accumulated() == 2  # who waits counts gradients
        take = take_grad(held, 1)
        assert (take.count, take.result.tolist()) == (2, result)
        assert held.num_accumulated() == 0


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=6), min_size=1),
    st.sampled_from(["per_index", "total"]),
    st.sampled_from(["MEAN", "SUM"]),
)
def test_rows_are_means_of_rational_numbers(
    gradients: list[list[tuple[int, int]]], divisor: Any, reduction: str
) -> None:
    """Rows come in any order and more than once; those that nobody touched do not appear."""
    held = sparse((5,), "float64", divisor=divisor, reduction_type=reduction)
    sums: dict[int, int] = {}
    counts: dict[int, int] = {}
    for rows in gradients:
        apply_slices(held, [i for i, _ in rows], [float(value) for _, value in rows])
        for i, value in rows:
            sums[i] = sums.get(i, 0) + value
        for i in {i for i, _ in rows}:
            counts[i] = counts.get(i, 0) + 1
    indices, values, _ = taken(held)
    assert indices == sorted(sums)
    if reduction == "SUM":
        counts = dict.fromkeys(sums, 1)
    elif divisor == "total":
        counts = dict.fromkeys(sums, len(gradients))
    assert values == [float(Fraction(sums[i], counts[i])) for i in indices]


@pytest.mark.parametrize(("divisor", "rows"), [("per_index", [1, 8]), ("total", [0.75, 2])])
def test_the_divisor_of_rows_is_the_sum_of_weights(divisor: Any, rows: list[float]) -> None:
    held = sparse(divisor=divisor)
    apply_slices(held, [1], [1.0], weight=3)
    apply_slices(held, [2], [8.0], weight=1)
    assert taken(held)[1] == rows


def test_2049_ones_of_float16_are_1_on_average() -> None:
    dense, rows, one = accumulator((1,), "float16"), sparse((9,), "float16"), np.ones(1, np.float16)
    for _ in range(2049):
        apply_grad(dense, one)
        apply_slices(rows, [5], one)
    assert take_grad(dense, 2049).result.tolist() == [1]
    assert take_grad(rows, 2049).result.values.tolist() == [1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_are_the_takers_own_and_of_the_accumulators_dtype(dtype: str) -> None:
    one = np.ones(1, dtype_of(dtype))
    dense, rows, indices = accumulator((1,), dtype), sparse(None, dtype), np.array([1])
    for step in range(2):
        one[:], indices[:] = step + 1, step + 1
        apply_grad(dense, one, step)
        apply_slices(rows, indices, one, local_step=step)
        one[:], indices[:] = 8, 8
        array, slices = take_grad(dense, 1).result, take_grad(rows, 1).result
        assert array.tolist() == slices.values.tolist() == slices.indices.tolist() == [step + 1]
        assert array.dtype == slices.values.dtype == dense.dtype
        array[:], slices.values[:], slices.indices[:] = 9, 9, 9


def test_an_empty_gradient_of_rows_counts() -> None:
    held = sparse((4, 2))
    take = take_grad(held, 2)
    assert apply_slices(held, np.empty(0, np.int32), zeros(0, 2)) == Applied(Outcome.ACCEPTED, 1, 0)
    applied = apply_slices(held, [3], [[2, 4]])
    assert applied == Applied(Outcome.ACCEPTED, 0, 1, take)
    assert (take.count, take.result.values.tolist()) == (2, [[2, 4]])
    apply_slices(held, [], zeros(0, 2), local_step=1)
    result = take_grad(held, 1).result
    assert (result.indices.dtype, result.values.shape, result.dense_shape) == (
        np.int64, (0, 2), (4, 2),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.int64, ">i4"])
def test_numbers_of_any_integer_type_and_byte_order_are_taken(dtype: Any) -> None:
    held, dense = sparse(), accumulator()
    apply_slices(held, np.array([3, 1], dtype), zeros(2))
    apply_grad(dense, np.array([1, 2], ">f4"))
    assert taken(held)[0] == [1, 3]
    assert take_grad(dense, 1).result.tolist() == [1, 2]


def test_numbers_of_python_take_the_accumulators_dtype_if_it_can_hold_them() -> None:
    held = accumulator(dtype="float16")
    for wrong in ([0.5, 1e9], [65520, 1], [0, -(10**5)]):
        assert "expected values in the range of float16" in refusal(apply_grad, held, wrong)
    apply_grad(held, [1, 2])
    apply_grad(held, [0.5, math.inf])
    assert take_grad(held, 2).result.tolist() == [0.75, math.inf]


@pytest.mark.parametrize("kind", [accumulator, sparse])
def test_an_accumulator_goes_on_from_what_another_one_holds(kind: Any) -> None:
    def offer(held: Accumulator[Any, Any], numbers: list[float], weight: float) -> None:
        given = numbers if kind is accumulator else ([4, 1], [[n] for n in numbers], None)
        apply_grad(held, given, 0, weight)

    for dtype in ("float16", "bfloat16", "float32", "float64"):
        first, second = kind(None, dtype), kind(None, dtype)
        assert first.held() is None
        offer(first, [1.1, 2.3], 0.3)
        held, contents = first.held()
        for mine, its in zip(second.hold(*held), contents, strict=True):
            mine[...] = its
        assert second.num_accumulated() == 1
        results = []
        for each in (first, second):
            offer(each, [0.7, 1e-3], 2.0)
            result = take_grad(each, 2).result
            results.append(getattr(result, "values", result).tobytes())
        assert results[0] == results[1]


def test_its_size_is_that_of_the_rows_it_holds() -> None:
    held = sparse((4, 2))
    assert held.nbytes == 0
    apply_slices(held, [3, 0], np.ones((2, 2), np.float32))
    assert held.nbytes == 2 * 2 * 4 + 2 * 8 + 2 * 8  # rows, weights, indices


# --- which shapes fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [((2, 3), (2,)), ((2, 3), (3, 2)), ((2, 3), (2, 3, 1)), ((2, 3), ()), ((2, 3), (1, 3)),
     ((2, None), (3, 2))],
)  # fmt: skip
def test_a_shape_that_is_known_is_demanded(shape: Any, wrong: tuple[int, ...]) -> None:
    message = refusal(apply_grad, accumulator(shape), zeros(*wrong))
    assert message == f"shape mismatch: expected {shape}, got {wrong}"
    with pytest.raises(ValueMismatchError, match="shape mismatch"):
        accumulator(shape).as_gradient(zeros(*wrong))


def test_what_is_open_is_decided_by_the_first_gradient_of_each_step() -> None:
    held = accumulator((2, None))
    assert held.as_gradient([[1, 2, 3], [4, 5, 6]]).shape == (2, 3)
    for step, shape in enumerate([(2, 5), (2, 0), (2, 3)]):
        apply_grad(held, zeros(*shape), step)
        message = refusal(apply_grad, held, zeros(2, 4), step)
        assert message == f"shape mismatch: expected {shape}, got (2, 4)"
        assert take_grad(held, 1).result.shape == shape
    scalar = accumulator(())
    apply_grad(scalar, 1.0)
    apply_grad(scalar, np.float32(2.0))
    assert take_grad(scalar, 2).result == 1.5


@pytest.mark.parametrize(
    ("shape", "values", "dense_shape"),
    [
        (None, (1,), (-1,)),
        ((), (1, 2), (-1, 2)),
        ((None,), (1, 2), (-1, 2)),
        ((None, 2), (1, 2, 2, 3), (-1, 2, 2, 3)),
        ((2, None), (1, 2, 2, 2), (2, 2, 2, 2)),
        ((2, 2), (1, 2, 5), (2, 2, 5)),
    ],
    ids=str,
)
def test_the_dense_shape_is_what_is_known_of_it(
    shape: Any, values: tuple[int, ...], dense_shape: tuple[int, ...]
) -> None:
    held = sparse(shape)
    for step, more in enumerate([(), (3,)] if shape is None else [()]):  # anew after each take
        apply_slices(held, [1], zeros(*values, *more), None, step)
        result = take_grad(held, 1).result
        assert result.dense_shape == (*dense_shape, *more)
        assert result.values.shape == (*values, *more)


NAN = np.float32(math.nan)

# (shape, indices, values, dense_shape, local step; what is said). The step is 1. Each is wrong in
# what is said, and in something that is checked later.
WRONG: list[tuple[Any, Any, Any, Any, Any, str]] = [
    *((None, ["a"], ["b"], "c", step, f"expected an integer scalar as local_step, got {step!r}")
      for step in (1.0, None, True, [0])),
    (None, [0.0], np.ones(1), 7, 0, "expected integers as indices, got float64"),
    (None, np.empty(0), np.ones(1), 7, 0, "expected integers as indices, got float64"),
    (None, [True], np.ones(1), 7, 0, "expected integers as indices, got bool"),
    (None, ["a"], np.ones(1), 7, 0, "expected integers as indices, got <U1"),
    (None, [[1], [1, 2]], zeros(1), 7, 0, "expected integers as indices, got [[1], [1, 2]]"),
    (None, [0], np.ones(1), 7, 0, "expected a gradient of float32, got float64"),
    *((None, [[0]], zeros(), shape, 0, f"expected integers as dense_shape, got {shape!r}")
      for shape in (7, "text", [1.0, 2], [[4, 1]], [4, None])),
    (None, [[0]], zeros(), None, 1, "expected a vector of indices, got shape (1, 1)"),
    (None, 0, zeros(), None, 1, "expected a vector of indices, got shape ()"),
    ((4,), [-1], zeros(), [9], 1, "expected one row of values for each index, got a scalar"),
    ((4,), [-1, 0], zeros(3), [9], 1, "expected 2 rows of values, one for each index, got 3"),
    ((3, 2, None), [9], zeros(1, 5), (2, 2), 1, "expected dense_shape of rank 3 or more, got 2"),
    ((3, 2, None), [9], zeros(1, 5), (2, 2, 9), 1,
     "expected dimension 0 of dense_shape to be 3, got 2"),
    ((3, 2, None), [9], zeros(1, 5), (3, 3, 9), 1,
     "expected dimension 1 of dense_shape to be 2, got 3"),
    ((2, 3), [1, 0, 2], zeros(3, 9), None, 1,
     "expected indices of 0 or more and below 2, got 2 at position 2"),
    ((2, 3), [1, -1, 9], zeros(3, 9), None, 1,
     "expected indices of 0 or more and below 2, got -1 at position 1"),
    *((shape, [1 << 40, -2], zeros(2, 9), None, 1,
       "expected indices of 0 or more, got -2 at position 1")
      for shape in (None, (), (None, 3))),
    ((None, 2, None), [0], zeros(1, 2) + NAN, None, 1, "expected values of rank 3 or more, got 2"),
    ((None, 2, None), [0], zeros(1, 3, 1) + NAN, None, 1,
     "expected dimension 1 of values to be 2, got 3"),
    (None, [0, 1], [1.0, math.inf], None, 1, "expected finite values, got 1 of 2 that are not"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "indices", "values", "dense_shape", "step", "said"), WRONG)
def test_a_gradient_of_rows_is_checked_in_this_order(
    shape: Any, indices: Any, values: Any, dense_shape: Any, step: Any, said: str
) -> None:
    held = sparse(shape, forbid_nonfinite=True)
    held.set_global_step(1)
    take = take_grad(held, 1)
    assert refusal(apply_slices, held, indices, values, dense_shape, step) == said
    assert (held.num_accumulated(), held.step, [*held.waiting]) == (0, 1, [take])


def test_a_stale_malformed_gradient_is_no_error() -> None:
    held = sparse((4, 1), max_staleness=1)
    held.set_global_step(2)
    assert apply_slices(held, [[-1]], zeros(), [9], 0) == Applied(Outcome.STALE, 0, 2)
    assert apply_slices(held, [0], [[1]], None, 1).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1, 2, 2), "expected values of rank 4, got 3"),
        ((1, 2, 2, 2, 1), "expected values of rank 4, got 5"),
        ((1, 3, 2, 2), "expected dimension 1 of values to be 2, got 3"),
        ((1, 2, 2, 3), "expected dimension 3 of values to be 2, got 3"),
    ],
    ids=str,
)
def test_later_rows_are_shaped_as_the_first_ones(values: tuple[int, ...], said: str) -> None:
    held = sparse((2, None), forbid_nonfinite=True)
    apply_slices(held, [0], zeros(1, 2, 2, 2))
    assert refusal(apply_slices, held, [0], zeros(*values) + NAN) == said


@pytest.mark.parametrize("dense_shape", [(3, 2, 9), (-1, 2, 4, 4), (3, -1, -1)], ids=str)
def test_a_dense_shape_may_leave_dimensions_open_and_is_not_compared_with_values(
    dense_shape: tuple[int, ...],
) -> None:
    held = sparse((3, 2, None))
    assert held.as_gradient([1], zeros(1, 2, 4), dense_shape).indices.tolist() == [1]
    apply_slices(held, [1], zeros(1, 2, 4), dense_shape)
    assert take_grad(held, 1).result.dense_shape == (3, 2, 4)


@pytest.mark.parametrize("divisor", ["count", "TOTAL", None, ["total"]])
def test_divisors_are_exact(divisor: Any) -> None:
    message = refusal(sparse, divisor=divisor, error=ConfigurationError)
    assert message == f"expected divisor 'per_index' or 'total', got {divisor!r}"
    refusal(sparse, reduction_type="mean", error=ConfigurationError)
