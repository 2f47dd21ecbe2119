"""Rows, their divisors, and what is refused in which order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulator_tools import apply_slices, cancel, take_grad
from psync.accumulators import Applied, TakeState
from psync.errors import ConfigurationError, ValueMismatchError
from psync.specs import Outcome
from psync.store.sparse_accumulators import SparseConditionalAccumulator

ACCEPTED, STALE = Outcome.ACCEPTED, Outcome.STALE


def accumulator(
    shape: tuple[int | None, ...] | None = None, dtype: object = "float32", **options
) -> SparseConditionalAccumulator:
    return SparseConditionalAccumulator(dtype, shape, name="w/part_0", **options)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def refusal(call, *args, error: type[Exception] = ValueMismatchError, **options) -> str:
    """What the error says, which names the accumulator."""
    with pytest.raises(error) as info:
        call(*args, **options)
    prefix, _, message = str(info.value).partition(": ")
    assert prefix == 'accumulator "w/part_0"'
    return message


def taken(held: SparseConditionalAccumulator) -> tuple[list[int], list, tuple[int, ...]]:
    result = take_grad(held, 1).result()
    return result.indices.tolist(), result.values.tolist(), result.dense_shape


def three_applied(**options) -> SparseConditionalAccumulator:
    held = accumulator((3, 2), **options)
    apply_slices(held, [0, 2], [[3, 3], [6, 0]])
    apply_slices(held, [2], [[2, 4]])
    apply_slices(held, [1, 2], [[5, 5], [1, 2]])
    return held


class TestReduction:
    def test_a_row_is_divided_by_the_number_of_gradients_that_contained_it(self) -> None:
        assert taken(three_applied()) == ([0, 1, 2], [[3, 3], [5, 5], [3, 2]], (3, 2))

    def test_or_by_the_number_of_all(self) -> None:
        held = three_applied(divisor="total", dtype="float64")
        assert taken(held) == ([0, 1, 2], [[1, 1], [5 / 3, 5 / 3], [3, 2]], (3, 2))

    def test_the_total_divisor_gives_the_mean_of_the_dense_gradients(self) -> None:
        dense = [np.array([[3, 3], [0, 0], [6, 0]]), np.array([[0, 0], [0, 0], [2, 4]])]
        held = accumulator((3, 2), "float64", divisor="total")
        for gradient in dense:
            rows = np.flatnonzero(gradient.any(axis=1))
            apply_slices(held, rows, gradient[rows].astype(float))
        result = take_grad(held, 2).result()
        full = np.zeros(result.dense_shape)
        full[result.indices] = result.values
        assert (full == sum(dense) / 2).all()

    @pytest.mark.parametrize("divisor", ["per_index", "total"])
    def test_a_sum_is_not_divided(self, divisor: str) -> None:
        held = three_applied(reduction_type="SUM", divisor=divisor)
        assert taken(held) == ([0, 1, 2], [[3, 3], [5, 5], [9, 6]], (3, 2))

    def test_rows_that_nobody_touched_do_not_appear(self) -> None:
        held = accumulator((5,))
        apply_slices(held, [4, 1], [1, 2])
        assert taken(held) == ([1, 4], [2, 1], (5,))

    def test_indices_come_in_any_order_and_more_than_once(self) -> None:
        held = accumulator()
        apply_slices(held, [7, 3, 7], [[1], [2], [3]])
        apply_slices(held, [3], [[4]])
        assert taken(held) == ([3, 7], [[3], [4]], (-1, 1))  # row 7: in one gradient, (1 + 3) / 1

    @pytest.mark.parametrize(("divisor", "row"), [("per_index", 8), ("total", 2)])
    def test_the_divisor_is_the_sum_of_weights(self, divisor: str, row: float) -> None:
        held = accumulator(divisor=divisor)
        apply_slices(held, [1], [1.0], weight=3)
        apply_slices(held, [2], [8.0], weight=1)
        assert taken(held)[1] == [1.0 if divisor == "per_index" else 0.75, row]

    def test_2049_ones_of_float16_are_1_on_average(self) -> None:
        held = accumulator(dtype="float16")
        for _ in range(2049):
            apply_slices(held, [5], np.ones(1, np.float16))
        result = take_grad(held, 2049).result()
        assert result.values.tolist() == [1]
        assert result.values.dtype == np.float16

    def test_an_empty_gradient_counts(self) -> None:
        held = accumulator((4, 2))
        take = take_grad(held, 2)
        assert apply_slices(held, [], zeros(0, 2)) == Applied(ACCEPTED, 1, 0)
        assert apply_slices(held, [3], [[2, 4]]) == Applied(ACCEPTED, 0, 1, take)
        assert take.result().values.tolist() == [[2, 4]]
        assert take.count == 2

    def test_of_empty_gradients_alone_comes_an_empty_one(self) -> None:
        held = accumulator((4, 2))
        apply_slices(held, np.empty(0, np.int32), zeros(0, 2))
        result = take_grad(held, 1).result()
        assert result.indices.dtype == np.int64
        assert (result.indices.shape, result.values.shape) == ((0,), (0, 2))
        assert result.dense_shape == (4, 2)

    def test_nothing_is_shared_with_those_who_gave_or_took(self) -> None:
        held, indices, values = accumulator(), np.array([1]), np.ones(1, np.float32)
        apply_slices(held, indices, values)
        indices[:], values[:] = 8, 8
        first = take_grad(held, 1).result()
        assert (first.indices.tolist(), first.values.tolist()) == ([1], [1])
        first.indices[:], first.values[:] = 8, 8
        apply_slices(held, [2], [3], local_step=1)
        assert taken(held) == ([2], [3], (-1,))

    @given(
        st.lists(
            st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=6), min_size=1
        ),
        st.sampled_from(["per_index", "total"]),
    )
    def test_it_equals_means_of_rational_numbers(
        self, gradients: list[list[tuple[int, int]]], divisor: str
    ) -> None:
        held = accumulator((5,), "float64", divisor=divisor)
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
        divisors = counts if divisor == "per_index" else dict.fromkeys(sums, len(gradients))
        assert values == [float(Fraction(sums[i], divisors[i])) for i in indices]


class TestShapes:
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
        self, shape: tuple[int, ...] | None, values: tuple[int, ...], dense_shape: tuple[int, ...]
    ) -> None:
        held = accumulator(shape)
        apply_slices(held, [1], zeros(*values))
        result = take_grad(held, 1).result()
        assert result.dense_shape == dense_shape
        assert result.values.shape == values

    def test_after_a_take_only_the_accumulators_own_shape_counts(self) -> None:
        held = accumulator((None, 2))
        for step, shape in enumerate([(1, 2), (1, 2, 3), (2, 2)]):
            apply_slices(held, range(shape[0]), zeros(*shape), None, step)
            assert take_grad(held, 1).result().values.shape == shape

    @pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.int64, ">i4"])
    def test_indices_of_all_integer_types_become_int64(self, dtype: object) -> None:
        held = accumulator()
        apply_slices(held, np.array([3, 1], dtype), zeros(2))
        result = take_grad(held, 1).result()
        assert result.indices.dtype == np.int64
        assert result.indices.tolist() == [1, 3]


class TestOrderOfChecks:
    """Each gradient is wrong in what is checked, and in something that is checked later."""

    @pytest.mark.parametrize("step", [1.0, None, True, [0]])
    def test_first_the_local_step(self, step: object) -> None:
        message = refusal(apply_slices, accumulator(), ["a"], ["b"], "c", step)
        assert message == f"expected an integer scalar as local_step, got {step!r}"

    @pytest.mark.parametrize(
        ("indices", "what"),
        [
            ([0.0], "float64"),
            (np.empty(0), "float64"),
            ([True], "bool"),
            (["a"], "<U1"),
            ([[1], [1, 2]], "[[1], [1, 2]]"),
        ],
        ids=str,
    )
    def test_then_the_dtype_of_indices(self, indices: object, what: str) -> None:
        held = accumulator()
        held.set_global_step(1)
        message = refusal(apply_slices, held, indices, np.ones(1), 7, 0)
        assert message == f"expected integers as indices, got {what}"

    def test_then_the_dtype_of_values(self) -> None:
        message = refusal(apply_slices, accumulator(), [0], np.ones(1), 7)
        assert message == "expected a gradient of float32, got float64"

    @pytest.mark.parametrize("shape", [7, "text", [1.0, 2], [[4, 1]], [4, None]], ids=repr)
    def test_then_the_dtype_of_the_shape(self, shape: object) -> None:
        held = accumulator()
        held.set_global_step(1)
        message = refusal(apply_slices, held, [[0]], zeros(), shape, 0)
        assert message == f"expected integers as dense_shape, got {shape!r}"

    def test_then_staleness_so_a_stale_malformed_gradient_is_no_error(self) -> None:
        held = accumulator((4, 1))
        held.set_global_step(1)
        assert apply_slices(held, [[-1]], zeros(), [9], 0) == Applied(STALE, 0, 1)

    def test_then_the_rank_of_indices(self) -> None:
        message = refusal(apply_slices, accumulator(), [[0]], zeros())
        assert message == "expected a vector of indices, got shape (1, 1)"
        refusal(apply_slices, accumulator(), 0, zeros())

    def test_then_that_values_have_rows(self) -> None:
        message = refusal(apply_slices, accumulator((4,)), [-1], zeros(), [9])
        assert message == "expected one row of values for each index, got a scalar"

    @pytest.mark.parametrize("rows", [0, 1, 3])
    def test_then_the_number_of_rows(self, rows: int) -> None:
        message = refusal(apply_slices, accumulator((4,)), [-1, 0], zeros(rows), [9])
        assert message == f"expected 2 rows of values, one for each index, got {rows}"

    @pytest.mark.parametrize(
        ("dense_shape", "message"),
        [
            ((2, 2), "expected dense_shape of rank 3 or more, got 2"),
            ((2, 2, 9), "expected dimension 0 of dense_shape to be 3, got 2"),
            ((3, 3, 9), "expected dimension 1 of dense_shape to be 2, got 3"),
        ],
        ids=str,
    )
    def test_then_the_dense_shape(self, dense_shape: tuple[int, ...], message: str) -> None:
        held = accumulator((3, 2, None))
        assert refusal(apply_slices, held, [9], zeros(1, 5), dense_shape) == message

    @pytest.mark.parametrize("dense_shape", [(3, 2, 9), (-1, 2, 4, 4), (3, -1, -1)], ids=str)
    def test_a_dense_shape_may_leave_dimensions_open_and_is_not_compared_with_values(
        self, dense_shape: tuple[int, ...]
    ) -> None:
        held = accumulator((3, 2, None))
        apply_slices(held, [1], zeros(1, 2, 4), dense_shape)
        assert take_grad(held, 1).result().dense_shape == (3, 2, 4)

    @pytest.mark.parametrize(
        ("indices", "message"),
        [
            ([3], "expected indices of 0 or more and below 2, got 3 at position 0"),
            ([1, 0, 2], "expected indices of 0 or more and below 2, got 2 at position 2"),
            ([1, -1, 9], "expected indices of 0 or more and below 2, got -1 at position 1"),
        ],
        ids=str,
    )
    def test_then_the_range_of_indices(self, indices: list[int], message: str) -> None:
        assert (
            refusal(apply_slices, accumulator((2, 3)), indices, zeros(len(indices), 9)) == message
        )

    @pytest.mark.parametrize("shape", [None, (), (None, 3)], ids=str)
    def test_negative_indices_are_refused_also_where_the_number_of_rows_is_not_known(
        self, shape: tuple[int | None, ...] | None
    ) -> None:
        message = refusal(apply_slices, accumulator(shape), [1 << 40, -2], zeros(2, 9))
        assert message == "expected indices of 0 or more, got -2 at position 1"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((1, 2), "expected values of rank 3 or more, got 2"),
            ((1, 3, 1), "expected dimension 1 of values to be 2, got 3"),
        ],
        ids=str,
    )
    def test_then_the_shape_of_rows_of_a_first_gradient(
        self, values: tuple[int, ...], message: str
    ) -> None:
        held = accumulator((None, 2, None), forbid_nonfinite=True)
        assert refusal(apply_slices, held, [0], zeros(*values) + np.float32(math.nan)) == message

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((1, 2, 2), "expected values of rank 4, got 3"),
            ((1, 2, 2, 2, 1), "expected values of rank 4, got 5"),
            ((1, 3, 2, 2), "expected dimension 1 of values to be 2, got 3"),
            ((1, 2, 2, 3), "expected dimension 3 of values to be 2, got 3"),
        ],
        ids=str,
    )
    def test_then_the_shape_of_rows_of_a_later_gradient(
        self, values: tuple[int, ...], message: str
    ) -> None:
        held = accumulator((2, None), forbid_nonfinite=True)
        apply_slices(held, [0], zeros(1, 2, 2, 2))
        assert refusal(apply_slices, held, [0], zeros(*values) + np.float32(math.nan)) == message

    def test_then_infinities_and_nan_where_they_are_forbidden(self) -> None:
        held = accumulator(forbid_nonfinite=True)
        message = refusal(apply_slices, held, [0, 1], [1.0, math.inf])
        assert message == "expected finite values, got 1 of 2 that are not"

    def test_a_refused_gradient_changes_nothing(self) -> None:
        held = accumulator((3, 2))
        take = take_grad(held, 2)
        apply_slices(held, [0], [[1, 1]])
        for indices, values in [([3], [[1, 1]]), ([0], [[1, 1, 1]]), ([0, 1], [[1, 1]])]:
            refusal(apply_slices, held, indices, values)
        assert (held.num_accumulated(), held.step, take.state) == (1, 0, TakeState.WAITING)
        apply_slices(held, [0], [[3, 3]])
        assert take.result().values.tolist() == [[2, 2]]


class TestOptions:
    @pytest.mark.parametrize("divisor", ["count", "TOTAL", None, ["total"]])
    def test_divisors_are_exact(self, divisor: object) -> None:
        message = refusal(accumulator, divisor=divisor, error=ConfigurationError)
        assert message == f"expected divisor 'per_index' or 'total', got {divisor!r}"

    def test_the_others_are_those_of_all_accumulators(self) -> None:
        refusal(accumulator, reduction_type="mean", error=ConfigurationError)
        refusal(accumulator, (-1,), error=ConfigurationError)
        refusal(accumulator, dtype="int32", error=ConfigurationError)
        held = accumulator(max_staleness=1)
        held.set_global_step(2)
        assert [apply_slices(held, [0], [1], None, step).outcome for step in (0, 1)] == [
            STALE, ACCEPTED,
        ]  # fmt: skip

    def test_takes_wait_and_are_cancelled_as_those_of_all_accumulators(self) -> None:
        held = accumulator()
        large, small = take_grad(held, 2), take_grad(held, 1)
        apply_slices(held, [0], [1])
        assert cancel(held, large) is small
        assert small.result().indices.tolist() == [0]


def test_a_gradient_is_checked_ahead_of_those_that_are_held() -> None:
    accumulator = SparseConditionalAccumulator(np.float32, (4, 2), name="a")
    rows = np.ones((2, 2), np.float32)
    assert accumulator.as_gradient([3, 0], rows)[0].tolist() == [3, 0]
    with pytest.raises(ValueMismatchError, match="below 4, got 4 at position 0"):
        accumulator.as_gradient([4, 0], rows)


def test_its_size_is_that_of_the_rows_it_holds() -> None:
    accumulator = SparseConditionalAccumulator(np.float32, (4, 2), name="a")
    assert accumulator.nbytes == 0
    apply_slices(accumulator, [3, 0], np.ones((2, 2), np.float32))
    assert accumulator.nbytes == 2 * 2 * 4 + 2 * 8 + 2 * 8  # rows, weights, indices


@pytest.mark.parametrize("divisor", ["per_index", "total"])
def test_an_accumulator_goes_on_from_what_another_one_holds(divisor: str) -> None:
    first, second = accumulator(divisor=divisor), accumulator(divisor=divisor)
    assert first.held() is None
    apply_slices(first, [4, 1], [[1.1], [2.3]], weight=0.3)
    apply_slices(first, [], zeros(0, 1))
    held = first.held()
    assert held is not None
    arrays = second.hold(held.count, held.weight, held.shape, held.rows)
    for mine, its in zip(arrays, held.arrays, strict=True):
        mine[...] = its
    assert second.num_accumulated() == 2
    for each in (first, second):
        apply_slices(each, [7, 4], [[0.7], [1e-3]], weight=2.0)
    one, other = (take_grad(each, 3).result() for each in (first, second))
    assert one.indices.tolist() == other.indices.tolist() == [1, 4, 7]
    assert one.values.tobytes() == other.values.tobytes()
