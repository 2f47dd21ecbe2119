"""Means and sums of whole arrays, and which shapes fit.

Which gradients count, and who gets them when, is tested in test_accumulators.py.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from accumulator_tools import accumulator, apply_grad, array, refusal, take_grad
from psync.errors import ValueMismatchError
from psync.store.dense_accumulators import ConditionalAccumulator, fits


class TestReduction:
    def test_a_mean_is_over_what_was_applied(self) -> None:
        held = accumulator()
        apply_grad(held, array(1, 2))
        apply_grad(held, array(3, 6))
        assert take_grad(held, 2).result().tolist() == [2, 4]

    def test_a_sum_is_not_divided(self) -> None:
        held = accumulator(reduction_type="SUM")
        apply_grad(held, array(1, 2))
        apply_grad(held, array(3, 6))
        assert take_grad(held, 1).result().tolist() == [4, 8]

    def test_a_mean_is_over_the_actual_number_not_the_one_asked_for(self) -> None:
        held = accumulator((1,))
        for value in range(10):
            apply_grad(held, array(value))
        take = take_grad(held, 1)
        assert take.result().tolist() == [4.5]
        assert take.count == 10

    def test_all_that_was_applied_leaves(self) -> None:
        held = accumulator((1,))
        for _ in range(4):
            apply_grad(held, array(1))
        assert held.num_accumulated() == 4
        assert take_grad(held, 2).count == 4
        assert held.num_accumulated() == 0
        apply_grad(held, array(7), local_step=1)
        assert take_grad(held, 1).result().tolist() == [7]

    def test_a_weighted_mean_is_divided_by_the_weights(self) -> None:
        held = accumulator((1,))
        apply_grad(held, array(1), weight=3)
        apply_grad(held, array(5), weight=1)
        assert held.num_accumulated() == 2  # who waits counts gradients
        assert take_grad(held, 2).result().tolist() == [2]

    def test_a_weighted_sum_is_multiplied(self) -> None:
        held = accumulator((1,), reduction_type="SUM")
        apply_grad(held, array(1), weight=3)
        apply_grad(held, array(5))
        assert take_grad(held, 2).result().tolist() == [8]

    def test_2049_ones_of_float16_are_1_on_average(self) -> None:
        held = accumulator((1,), "float16")
        for _ in range(2049):
            apply_grad(held, np.ones(1, np.float16))
        result = take_grad(held, 2049).result()
        assert result.tolist() == [1]
        assert result.dtype == np.float16

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
    def test_results_are_of_the_accumulators_dtype(self, dtype: object) -> None:
        held = accumulator(dtype=dtype)
        apply_grad(held, np.ones(2, held.dtype))
        assert take_grad(held, 1).result().dtype == held.dtype

    def test_a_gradient_is_not_kept_and_a_result_is_the_takers_own(self) -> None:
        held, gradient = accumulator(), array(1, 2)
        apply_grad(held, gradient)
        gradient[:] = 9
        first = take_grad(held, 1).result()
        apply_grad(held, array(5, 5), local_step=1)
        assert first.tolist() == [1, 2]
        first[:] = 9
        assert take_grad(held, 1).result().tolist() == [5, 5]

    def test_big_endian_gradients_are_of_the_same_dtype(self) -> None:
        held = accumulator()
        apply_grad(held, np.array([1, 2], ">f4"))
        assert take_grad(held, 1).result().tolist() == [1, 2]

    def test_numbers_of_python_take_the_accumulators_dtype(self) -> None:
        held = accumulator(dtype="float16")
        apply_grad(held, [1, 2])
        apply_grad(held, [0.5, math.inf])
        assert take_grad(held, 2).result().tolist() == [0.75, math.inf]

    @pytest.mark.parametrize("given", [[0.5, 1e9], [65520, 1], [0, -(10**5)]])
    def test_numbers_that_the_dtype_cannot_hold_are_refused(self, given: list[float]) -> None:
        held = accumulator(dtype="float16")
        assert "expected values in the range of float16" in refusal(apply_grad, held, given)
        assert held.num_accumulated() == 0

    def test_a_scalar_variable_has_scalar_gradients(self) -> None:
        held = accumulator(())
        apply_grad(held, 1.0)
        apply_grad(held, np.float32(2.0))
        assert take_grad(held, 2).result() == 1.5


class TestShapes:
    @pytest.mark.parametrize("wrong", [(2,), (3, 2), (2, 3, 1), ()], ids=str)
    def test_a_shape_that_is_known_is_demanded(self, wrong: tuple[int, ...]) -> None:
        message = refusal(apply_grad, accumulator((2, 3)), np.ones(wrong, np.float32))
        assert message == f"shape mismatch: expected (2, 3), got {wrong}"

    def test_no_gradient_is_stretched_to_the_shape(self) -> None:
        refusal(apply_grad, accumulator((2, 3)), np.ones((1, 3), np.float32))
        held = accumulator(None)
        apply_grad(held, np.ones((2, 3), np.float32))
        refusal(apply_grad, held, np.ones((1, 3), np.float32))

    def test_an_open_dimension_is_decided_by_the_first_gradient(self) -> None:
        held = accumulator((2, None))
        message = refusal(apply_grad, held, np.ones((3, 2), np.float32))
        assert message == "shape mismatch: expected (2, None), got (3, 2)"
        apply_grad(held, np.ones((2, 5), np.float32))
        message = refusal(apply_grad, held, np.ones((2, 4), np.float32))
        assert message == "shape mismatch: expected (2, 5), got (2, 4)"

    def test_after_a_take_only_the_accumulators_own_shape_counts(self) -> None:
        held = accumulator(None)
        for step, shape in enumerate([(2, 5), (3,), ()]):
            apply_grad(held, np.ones(shape, np.float32), step)
            assert take_grad(held, 1).result().shape == shape

    def test_empty_arrays_are_gradients(self) -> None:
        held = accumulator((0, None))
        apply_grad(held, np.ones((0, 3), np.float32))
        assert take_grad(held, 1).result().shape == (0, 3)

    def test_fits_compares_what_is_known(self) -> None:
        assert fits((2, 3), (2, None))
        assert fits((), ())
        assert not fits((2, 3), (2,))
        assert not fits((2, 3), (None, 2))


def test_a_gradient_is_checked_ahead_of_those_that_are_held() -> None:
    accumulator = ConditionalAccumulator(np.float32, (2, None), name="a")
    assert accumulator.as_gradient([[1, 2, 3], [4, 5, 6]]).shape == (2, 3)
    with pytest.raises(ValueMismatchError, match="shape mismatch"):
        accumulator.as_gradient(np.zeros((3, 2), np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_accumulator_goes_on_from_what_another_one_holds(dtype: str) -> None:
    first, second = accumulator(None, dtype), accumulator(None, dtype)
    assert first.held() is None
    apply_grad(first, [1.1, 2.3], weight=0.3)
    held = first.held()
    assert held is not None
    arrays = second.hold(held.count, held.weight, held.shape, held.rows)
    for mine, its in zip(arrays, held.arrays, strict=True):
        mine[...] = its
    assert second.num_accumulated() == 1
    for each in (first, second):
        apply_grad(each, [0.7, 1e-3], weight=2.0)
    results = [take_grad(each, 2).result() for each in (first, second)]
    assert results[0].tobytes() == results[1].tobytes()
    assert second.held() is None
