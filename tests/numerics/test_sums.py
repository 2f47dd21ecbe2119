"""Arithmetic of gradients, in which dtype and in which order."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import UsageError, ValueMismatchError
from psync.numerics import sums
from psync.numerics.sums import (
    DenseSum,
    SparseSum,
    accumulate,
    at_once,
    begin,
    check_weight,
    cuts,
    finish,
    sum_dtype,
    sum_into,
)

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BF16 = np.dtype(ml_dtypes.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)


def random(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def add(total: DenseSum | SparseSum, *terms: Any) -> None:
    at_once(total.adding(*terms))


def mean(total: Any, **options: bool) -> np.ndarray:
    return at_once(total.making("mean", **options))


def sum_of(total: DenseSum | SparseSum) -> np.ndarray:
    return at_once(total.making("sum"))


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


class TestDtype:
    @pytest.mark.parametrize(("dtype", "wide"), [(F16, F32), (BF16, F32), (F32, F32), (F64, F64)])
    def test_halves_are_summed_in_float32_the_others_in_themselves(
        self, dtype: np.dtype, wide: np.dtype
    ) -> None:
        assert sum_dtype(dtype) == wide

    def test_big_endian_gradients_are_summed_in_native_order(self) -> None:
        assert sum_dtype(np.dtype(">f8")).isnative

    @pytest.mark.parametrize("name", ["int32", "bool", "complex64"])
    def test_others_cannot_be_summed(self, name: str) -> None:
        with pytest.raises(ValueMismatchError) as info:
            sum_dtype(np.dtype(name))
        assert str(info.value) == f"only floating-point gradients can be summed, got {name}"


class TestArithmetic:
    @each_dtype
    def test_a_mean_is_the_weighted_sum_divided_by_the_weights(self, dtype: np.dtype) -> None:
        wide = sum_dtype(dtype)
        gradients = [random((5, 3), dtype, seed) for seed in range(3)]
        total = np.empty((5, 3), wide)
        begin(total, gradients[0], 1.0)
        accumulate(total, gradients[1], 2.0)
        accumulate(total, gradients[2])
        a, b, c = (gradient.astype(wide) for gradient in gradients)
        expected = a + b * wide.type(2.0) + c
        assert bits(total) == bits(expected)
        finish(total, 4.0, "mean")
        assert bits(total) == bits(expected / wide.type(4.0))

    def test_the_first_term_of_a_sum_keeps_the_sign_of_its_zeros(self) -> None:
        total = np.ones(2, F32)
        begin(total, np.array([-0.0, 0.0], F32))
        assert np.signbit(total).tolist() == [True, False]

    def test_the_first_term_has_its_weight(self) -> None:
        total = np.empty(2, F32)
        begin(total, np.array([1.0, 2.0], F16), 0.5)
        assert total.tolist() == [0.5, 1.0]

    def test_a_product_with_a_weight_is_computed_in_the_dtype_of_the_sum(self) -> None:
        total = np.empty(1, F32)
        begin(total, np.array([60000.0], F16), 3.0)  # no float16 is as large
        accumulate(total, np.array([60000.0], F16), 2.0)
        assert total.tolist() == [300000.0]

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_several_are_summed_as_one_by_one(self, reduction: sums.Reduction) -> None:
        gradients = [np.array([-0.0, 1e20, 3.0], F32) * factor for factor in (1, 3, 1e18)]
        for weights in ([1.0, 1.0, 1.0], [2.0, 1.0, 0.5]):
            expected, total = np.empty(3, F32), np.empty(3, F32)
            begin(expected, gradients[0], weights[0])
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                accumulate(expected, gradient, weight)
            finish(expected, sum(weights), reduction)
            sum_into(total, iter(gradients), weights, sum(weights), reduction)
            assert total.tobytes() == expected.tobytes()

    def test_the_result_of_a_sum_is_the_total_itself(self) -> None:
        total = np.array([1.0, 2.0], F32)
        finish(total, 7.0, "sum")
        assert total.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize(("reduction", "expected"), [("mean", [0.5, 1.0]), ("sum", [1.0, 2.0])])
    def test_a_result_elsewhere_is_rounded_and_leaves_the_total(
        self, reduction: str, expected: list[float]
    ) -> None:
        total, out = np.array([1.0, 2.0], F32), np.empty(2, F16)
        finish(total, 2.0, reduction, out)
        assert out.tolist() == expected
        assert total.tolist() == [1.0, 2.0]

    def test_a_mean_of_weight_1_is_copied_where_it_shall_be(self) -> None:
        out = np.empty(1, F16)
        finish(np.array([3.0], F32), 1.0, "mean", out)
        assert out.tolist() == [3.0]

    @given(
        cuts=st.lists(st.integers(0, 40), max_size=4),
        weights=st.lists(st.sampled_from([1.0, 0.3, 2.0]), min_size=1, max_size=4),
        dtype=st.sampled_from([F16, BF16, F32, F64]),
    )
    def test_a_sum_made_block_by_block_equals_one_made_at_once(
        self, cuts: list[int], weights: list[float], dtype: np.dtype
    ) -> None:
        gradients = [random((40,), dtype, seed) for seed in range(len(weights))]
        whole, blocks = np.empty(40, sum_dtype(dtype)), np.empty(40, sum_dtype(dtype))
        edges = [0, *sorted(cuts), 40]
        parts = [slice(0, 40), *(slice(a, b) for a, b in pairwise(edges))]
        for number, part in enumerate(parts):
            total = blocks if number else whole
            begin(total[part], gradients[0][part], weights[0])
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                accumulate(total[part], gradient[part], weight)
            finish(total[part], sum(weights), "mean")
        assert bits(whole) == bits(blocks)

    def test_infinities_and_nan_are_results_not_warnings(self) -> None:
        total, huge = np.empty(3, F32), np.array([3e38, np.inf, np.nan], F32)
        begin(total, huge, 2.0)
        accumulate(total, np.array([3e38, -np.inf, 0.0], F32))
        out = np.empty(3, F16)
        finish(total, 2.0, "mean", out)
        assert out[0] == np.inf
        assert np.isnan(out[1:]).all()


class TestWeights:
    @pytest.mark.parametrize("weight", [1, 2.5, 1e-30, 1e30, np.float32(3), np.int64(4)])
    def test_positive_numbers_are_weights(self, weight: object) -> None:
        assert check_weight(weight) == weight
        assert type(check_weight(weight)) is float

    @pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, 1e31, "1", None, [1.0]])
    def test_nothing_else_is_one(self, weight: object) -> None:
        with pytest.raises(ValueMismatchError) as info:
            check_weight(weight)
        assert str(info.value) == f"expected a weight from 1e-30 to 1e+30, got {weight!r}"

    def test_many_of_the_largest_weight_stay_finite(self) -> None:
        total = DenseSum((1,), F32)
        for _ in range(1000):
            add(total, np.ones(1, F32), 1e30)
        assert mean(total) == pytest.approx(1.0, rel=1e-5)


class TestDenseSum:
    def test_it_sums_averages_and_counts(self) -> None:
        total = DenseSum((2,), F32)
        assert (total.count, total.weight) == (0, 0.0)
        add(total, np.array([1.0, 2.0], F32))
        add(total, np.array([3.0, 6.0], F32), 3.0)
        assert (total.count, total.weight) == (2, 4.0)
        assert mean(total).tolist() == [2.5, 5.0]
        assert sum_of(total).tolist() == [10.0, 20.0]  # asking changes nothing

    @each_dtype
    def test_results_are_of_the_dtype_asked_for(self, dtype: np.dtype) -> None:
        total = DenseSum((3,), dtype)
        add(total, np.ones(3, dtype), 2.0)
        assert mean(total).dtype == sum_of(total).dtype == dtype

    def test_2049_ones_of_float16_are_1_on_average(self) -> None:
        total = DenseSum((3,), F16)
        for _ in range(2049):  # in float16, 2048 + 1 is 2048
            add(total, np.ones(3, F16))
        assert mean(total).tolist() == [1.0, 1.0, 1.0]

    def test_a_mean_exists_where_the_sum_is_not_a_float16(self) -> None:
        total = DenseSum((1,), F16)
        for _ in range(3):
            add(total, np.array([60000.0], F16))
        assert mean(total).tolist() == [60000.0]
        assert sum_of(total).tolist() == [np.inf]

    def test_1000_ones_of_bfloat16_are_1_on_average(self) -> None:
        total = DenseSum((1,), BF16)
        for _ in range(1000):  # in bfloat16, 256 + 1 is 256
            add(total, np.ones(1, BF16))
        assert mean(total).astype(F32).tolist() == [1.0]

    def test_what_was_added_is_not_kept(self) -> None:
        total, values = DenseSum((2,), F32), np.ones(2, F32)
        add(total, values)
        values[:] = 7
        assert sum_of(total).tolist() == [1.0, 1.0]

    def test_results_are_the_callers_own(self) -> None:
        total = DenseSum((2,), F32)
        add(total, np.ones(2, F32))
        sum_of(total)[:] = 7
        assert sum_of(total).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        "values",
        [
            np.asfortranarray(np.arange(6, dtype=F32).reshape(2, 3)),
            np.arange(12, dtype=F32).reshape(2, 6)[:, ::2],
            np.arange(6, dtype=">f4").reshape(2, 3),
        ],
        ids=["fortran", "strided", "big-endian"],
    )
    def test_any_layout_is_added(self, values: np.ndarray) -> None:
        total = DenseSum((2, 3), F32)
        add(total, values)
        add(total, values, 2.0)
        assert (mean(total) == values).all()
        assert mean(total).dtype.isnative

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3)], ids=str)
    def test_scalars_and_empty_arrays_are_added(self, shape: tuple[int, ...]) -> None:
        total = DenseSum(shape, F64)
        add(total, np.full(shape, 2.0))
        add(total, np.full(shape, 4.0))
        assert mean(total).shape == shape
        assert (mean(total) == 3.0).all()

    @pytest.mark.parametrize(
        ("values", "weight", "message"),
        [
            (np.ones(1, F32), 1.0, "shape mismatch: expected (2,), got (1,)"),
            (np.ones((1, 2), F32), 1.0, "shape mismatch: expected (2,), got (1, 2)"),
            (np.ones(2, F32), 0.0, "expected a weight from 1e-30 to 1e+30, got 0.0"),
        ],
    )
    def test_what_does_not_fit_leaves_it_as_it_was(
        self, values: np.ndarray, weight: float, message: str
    ) -> None:
        total = DenseSum((2,), F32)
        add(total, np.ones(2, F32))
        with pytest.raises(ValueMismatchError) as info:
            add(total, values, weight)
        assert str(info.value) == message
        assert (total.count, total.weight, sum_of(total).tolist()) == (1, 1.0, [1.0, 1.0])

    def test_a_sum_of_nothing_has_no_result(self) -> None:
        total = DenseSum((2,), F32)
        for ask in (mean, sum_of):
            with pytest.raises(UsageError, match="a sum to which nothing was added has no result"):
                ask(total)


class TestSparseSum:
    def test_rows_are_sorted_and_divided_by_those_that_contained_them(self) -> None:
        total = SparseSum((2,), F32)
        add(total, np.array([2, 0]), np.array([[6, 0], [3, 3]], F32))
        add(total, np.array([2]), np.array([[2, 4]], F32))
        assert total.indices.tolist() == [0, 2]
        assert sum_of(total).tolist() == [[3, 3], [8, 4]]
        assert mean(total, per_index=True).tolist() == [[3, 3], [4, 2]]
        assert mean(total, per_index=False).tolist() == [[1.5, 1.5], [4, 2]]

    def test_rows_that_come_twice_in_a_gradient_are_summed_not_counted_twice(self) -> None:
        total = SparseSum((), F32)
        add(total, np.array([5, 1, 5]), np.array([1, 2, 3], F32), 2.0)
        assert total.indices.tolist() == [1, 5]
        assert mean(total, per_index=True).tolist() == [2, 4]

    def test_divisors_are_weights(self) -> None:
        total = SparseSum((), F32)
        add(total, np.array([0, 1]), np.array([1, 1], F32), 3.0)
        add(total, np.array([1]), np.array([5], F32))
        assert total.weight == 4.0
        assert mean(total, per_index=True).tolist() == [1, 2]
        assert mean(total, per_index=False).tolist() == [0.75, 2]

    def test_2049_ones_of_float16_are_1_on_average_also_within_one_gradient(self) -> None:
        total = SparseSum((), F16)
        for _ in range(2049):
            add(total, np.array([3]), np.ones(1, F16))
        assert mean(total, per_index=True).tolist() == [1.0]
        within = SparseSum((), F16)
        add(within, np.zeros(2049, np.int64), np.ones(2049, F16), 3.0)
        add(within, np.zeros(2046, np.int64), np.ones(2046, F16))
        assert mean(within, per_index=True).tolist() == [2048.0]  # (3 * 2049 + 2046) / 4 = 2048.25

    def test_zeros_keep_their_sign(self) -> None:
        total = SparseSum((), F32)
        add(total, np.array([1, 0, 0]), np.array([-0.0, -0.0, -0.0], F32))
        assert np.signbit(mean(total, per_index=True)).all()

    def test_an_empty_gradient_has_a_weight_and_no_rows(self) -> None:
        total = SparseSum((2,), F32)
        add(total, np.empty(0, np.int64), np.empty((0, 2), F32))
        assert mean(total, per_index=True).shape == (0, 2)
        add(total, np.array([4]), np.ones((1, 2), F32))
        assert mean(total, per_index=False).tolist() == [[0.5, 0.5]]

    def test_infinities_and_nan_are_results_not_warnings(self) -> None:
        total = SparseSum((), F32)
        add(total, np.array([0, 0, 1, 1]), np.array([3e38, 3e38, np.inf, -np.inf], F32))
        assert sum_of(total)[0] == np.inf
        assert np.isnan(mean(total, per_index=True)[1])

    @pytest.mark.parametrize(
        ("indices", "shape", "weight", "message"),
        [
            ((2,), (2, 4), 1.0, "shape mismatch: expected (2, 3), got (2, 4)"),
            ((2,), (1, 3), 1.0, "shape mismatch: expected (2, 3), got (1, 3)"),
            ((1, 2), (2, 3), 1.0, "expected a vector of indices, got shape (1, 2)"),
            ((2,), (2, 3), -1, "expected a weight from 1e-30 to 1e+30, got -1"),
        ],
    )
    def test_what_does_not_fit_leaves_it_as_it_was(
        self, indices: tuple[int, ...], shape: tuple[int, ...], weight: float, message: str
    ) -> None:
        total = SparseSum((3,), F32)
        with pytest.raises(ValueMismatchError) as info:
            add(total, np.zeros(indices, np.int64), np.zeros(shape, F32), weight)
        assert str(info.value) == message
        assert (total.weight, total.indices.size) == (0.0, 0)

    @given(
        st.lists(
            st.tuples(
                st.lists(st.tuples(st.integers(0, 6), st.integers(-50, 50)), max_size=8),
                st.sampled_from([1.0, 2.0, 0.5]),
            ),
            max_size=6,
        )
    )
    def test_it_equals_sums_of_rational_numbers(
        self, gradients: list[tuple[list[tuple[int, int]], float]]
    ) -> None:
        total = SparseSum((2,), F64)
        sums: dict[int, Fraction] = {}
        weights: dict[int, Fraction] = {}
        for rows, weight in gradients:
            indices = np.array([i for i, _ in rows], np.int64)
            values = np.array([[v, -v] for _, v in rows], F64).reshape(-1, 2)
            add(total, indices, values, weight)
            for i, v in rows:
                sums[i] = sums.get(i, Fraction(0)) + v * Fraction(weight)
            for i in {i for i, _ in rows}:
                weights[i] = weights.get(i, Fraction(0)) + Fraction(weight)
        assert total.indices.tolist() == sorted(sums)
        assert sum_of(total).tolist() == [[float(sums[i]), -float(sums[i])] for i in sorted(sums)]
        means = [float(sums[i] / weights[i]) for i in sorted(sums)]
        assert mean(total, per_index=True).tolist() == [[mean, -mean] for mean in means]


class TestPieces:
    @pytest.mark.parametrize(
        ("count", "nbytes", "lengths"),
        [
            (0, 4, []),
            (5, 0, [5]),
            (5, sums.PIECE_BYTES, [1] * 5),
            (3, sums.PIECE_BYTES // 2, [2, 1]),
            (2, 9 * sums.PIECE_BYTES, [1, 1]),
        ],
    )
    def test_cuts_cover_everything_once(self, count: int, nbytes: int, lengths: list[int]) -> None:
        parts = [range(count)[part] for part in cuts(count, nbytes)]
        assert [len(part) for part in parts] == lengths
        assert [i for part in parts for i in part] == list(range(count))

    def test_a_large_sum_pauses_after_each_piece(self) -> None:
        total = DenseSum((4, sums.PIECE_BYTES // 4), F32)
        values = np.ones(total.shape, np.float32)
        assert len(list(total.adding(values))) == 4
        assert len(list(total.making("mean"))) == 4

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_sums_made_in_pieces_have_the_same_bits(
        self, dtype: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def results() -> list[bytes]:
            random = np.random.default_rng(3)
            dense, sparse = DenseSum((7, 5), np.dtype(dtype)), SparseSum((5,), np.dtype(dtype))
            for weight in (1.0, 0.3, 7.0):
                values = random.standard_normal((40, 5)).astype(dtype)
                add(dense, values[:7], weight)
                add(sparse, random.integers(0, 30, 40), values, weight)
                add(sparse, random.permutation(50)[:40], values, weight)
            made = [mean(dense), sum_of(dense), sparse.indices, sum_of(sparse)]
            made += [mean(sparse, per_index=True), mean(sparse, per_index=False)]
            return [array.tobytes() for array in made]

        whole = results()
        for piece in (1, 100, 500):
            monkeypatch.setattr(sums, "PIECE_BYTES", piece)
            assert results() == whole


def test_the_size_of_a_sparse_sum_is_that_of_its_rows() -> None:
    total = sums.SparseSum((2,), np.dtype(np.float32))
    assert total.nbytes == 0
    add(total, np.array([3, 1]), np.ones((2, 2), np.float32))
    assert total.nbytes == 2 * 2 * 4 + 2 * 8 + 2 * 8  # rows, weights, indices


@each_dtype
def test_a_sum_goes_on_from_what_another_one_holds(dtype: np.dtype) -> None:
    first, second = DenseSum((2, 3), dtype), DenseSum((2, 3), dtype)
    add(first, random((2, 3), dtype), 0.3)
    second.restore(first.count, first.weight)
    for mine, its in zip(second.arrays(), first.arrays(), strict=True):
        mine[...] = its
    for total in (first, second):
        add(total, random((2, 3), dtype, 1), 3.0)
    assert (first.count, bits(mean(first))) == (second.count, bits(mean(second)))


@each_dtype
@pytest.mark.parametrize("per_index", [True, False])
def test_a_sum_of_rows_goes_on_from_what_another_one_holds(
    dtype: np.dtype, per_index: bool
) -> None:
    first, second = SparseSum((3,), dtype), SparseSum((3,), dtype)
    add(first, np.array([4, 1, 4]), random((3, 3), dtype), 0.3)
    second.restore(first.indices.size, first.weight)
    for mine, its in zip(second.arrays(), first.arrays(), strict=True):
        mine[...] = its
    for total in (first, second):
        add(total, np.array([1, 7]), random((2, 3), dtype, 1), 3.0)
    assert first.indices.tolist() == second.indices.tolist() == [1, 4, 7]
    assert bits(mean(first, per_index=per_index)) == bits(mean(second, per_index=per_index))
    assert first.nbytes == second.nbytes
