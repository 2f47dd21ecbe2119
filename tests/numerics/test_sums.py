"""Sums and means of gradients, in one order of addition; moving averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops import for_each
from psync.errors import ValueMismatchError
from psync.numerics import sums
from psync.numerics.memory import BLOCK_ELEMENTS, Scratch
from psync.numerics.rules import SGD, Adam, UpdateRule
from psync.numerics.sums import (
    DenseSum,
    MeanGradient,
    Reduction,
    SparseSum,
    at_once,
    check_weight,
    cuts,
    finish,
    growing_decay,
    move_average,
    scaled,
    sum_dtype,
    sum_of_squares,
)
from psync.specs import ShardSpec, dtype_of
from psync.store.store import Means, Plan, ShardStore, Work

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BF16 = np.dtype(ml_dtypes.bfloat16)
each_dtype = for_each("dtype", [F16, BF16, F32, F64])


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
    def test_big_endian_gradients_are_summed_in_native_order(self) -> None:
        assert sum_dtype(np.dtype(">f8")).isnative

    @for_each("name", ["int32", "bool", "complex64"])
    def test_others_cannot_be_summed(self, name: str) -> None:
        with pytest.raises(ValueMismatchError) as info:
            sum_dtype(np.dtype(name))
        assert str(info.value) == f"only floating-point gradients can be summed, got {name}"


class TestWeights:
    @for_each("weight", [1, 2.5, 1e-30, 1e30, np.float32(3), np.int64(4)])
    def test_positive_numbers_are_weights(self, weight: object) -> None:
        assert check_weight(weight) == weight
        assert type(check_weight(weight)) is float

    @for_each("weight", [0, -1.0, math.nan, math.inf, 1e31, "1", None, [1.0]])
    def test_nothing_else_is_one(self, weight: object) -> None:
        with pytest.raises(ValueMismatchError) as info:
            check_weight(weight)
        assert (
            str(info.value) == f"a gradient: expected a weight from 1e-30 to 1e+30, got {weight!r}"
        )


class TestDenseSum:
    def test_it_sums_averages_and_counts(self) -> None:
        total = DenseSum((2,), F32)
        assert total.weight == 0.0
        add(total, np.array([1.0, 2.0], F32))
        add(total, np.array([3.0, 6.0], F32), 3.0)
        assert total.weight == 4.0
        assert mean(total).tolist() == [2.5, 5.0]
        assert sum_of(total).tolist() == [10.0, 20.0]  # asking changes nothing

    @each_dtype
    def test_results_are_of_the_dtype_asked_for(self, dtype: np.dtype) -> None:
        total = DenseSum((3,), dtype)
        add(total, np.ones(3, dtype), 2.0)
        assert mean(total).dtype == sum_of(total).dtype == dtype

    def test_a_mean_exists_where_the_sum_is_not_a_float16(self) -> None:
        total = DenseSum((1,), F16)
        for _ in range(3):
            add(total, np.array([60000.0], F16))
        assert mean(total).tolist() == [60000.0]
        assert sum_of(total).tolist() == [np.inf]

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

    @for_each(
        "values",
        [
            np.asfortranarray(np.arange(6, dtype=F32).reshape(2, 3)),
            np.arange(12, dtype=F32).reshape(2, 6)[:, ::2],
            np.arange(6, dtype=">f4").reshape(2, 3),
        ],
    )
    def test_any_layout_is_added(self, values: np.ndarray) -> None:
        total = DenseSum((2, 3), F32)
        add(total, values)
        add(total, values, 2.0)
        assert (mean(total) == values).all()
        assert mean(total).dtype.isnative

    @for_each("shape", [(), (0,), (0, 3)])
    def test_scalars_and_empty_arrays_are_added(self, shape: tuple[int, ...]) -> None:
        total = DenseSum(shape, F64)
        add(total, np.full(shape, 2.0))
        add(total, np.full(shape, 4.0))
        assert mean(total).shape == shape
        assert (mean(total) == 3.0).all()


class TestSparseSum:
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
    @for_each(
        "count, nbytes, lengths",
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


@each_dtype
def test_a_sum_goes_on_from_what_another_one_holds(dtype: np.dtype) -> None:
    first, second = DenseSum((2, 3), dtype), DenseSum((2, 3), dtype)
    add(first, random((2, 3), dtype), 0.3)
    second.restore(first.weight)
    for mine, its in zip(second.arrays(), first.arrays(), strict=True):
        mine[...] = its
    for total in (first, second):
        add(total, random((2, 3), dtype, 1), 3.0)
    assert (first.weight, bits(mean(first))) == (second.weight, bits(mean(second)))


@each_dtype
@for_each("per_index", [True, False])
def test_a_sum_of_rows_goes_on_from_what_another_one_holds(
    dtype: np.dtype, per_index: bool
) -> None:
    first, second = SparseSum((3,), dtype), SparseSum((3,), dtype)
    add(first, np.array([4, 1, 4]), random((3, 3), dtype), 0.3)
    second.restore(first.weight, first.rows)
    for mine, its in zip(second.arrays(), first.arrays(), strict=True):
        mine[...] = its
    for total in (first, second):
        add(total, np.array([1, 7]), random((2, 3), dtype, 1), 3.0)
    assert first.indices.tolist() == second.indices.tolist() == [1, 4, 7]
    assert bits(mean(first, per_index=per_index)) == bits(mean(second, per_index=per_index))
    assert first.nbytes == second.nbytes


TASK = "/job:ps/task:1"
KEY = (0, 0)
LARGE = 2 * BLOCK_ELEMENTS + 5
DTYPES = ("float32", "float16", "bfloat16", "float64")
RULES = {"sgd": SGD(0.1), "momentum": SGD(0.1, momentum=0.9), "adam": Adam(0.1)}

each_dtype_means = for_each("dtype", DTYPES)
each_rule = for_each("rule", RULES.values())
each_size = for_each("size", [1, 1000, LARGE])


def spec_of(size: int, dtype: str = "float32", variable_id: int = 0) -> ShardSpec:
    return ShardSpec("w", variable_id, 0, 0, (size,), dtype, ps=1)


def store_of(values: np.ndarray, rule: UpdateRule | None = None) -> ShardStore:
    """A store with one shard, and ``rule`` as optimizer 0."""
    store = ShardStore(TASK)
    store.create(spec_of(values.size, values.dtype.name), values)
    store.define_optimizer(0, (rule or SGD(0.5)).to_config())
    return store


def numbers(size: int, dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(dtype_of(dtype))


def value(store: ShardStore, key: tuple[int, int] = KEY) -> np.ndarray:
    return np.frombuffer(b"".join(store.read(key)), dtype_of(store.spec(key).dtype))


def run(work: Work) -> None:
    for _ in work:
        pass


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def mean_of(
    gradients: Sequence[np.ndarray], weights: Sequence[float], reduction: Reduction = "mean"
) -> np.ndarray:
    """The definition, on whole arrays: ``((g0 * w0 + g1 * w1) + …) / W``, rounded once."""
    dtype = gradients[0].dtype
    number = sum_dtype(dtype).type
    terms = [
        gradient.astype(number) * number(weight)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if reduction == "mean":
        total = total / number(sum(weights))
    return total.astype(dtype)


class TestMeanGradient:
    @each_dtype_means
    @for_each("reduction", ["mean", "sum"])
    @for_each("weights", [(1.0,), (3.0,), (1.0, 1.0, 1.0), (1.0, 0.3, 7.0)])
    def test_is_what_it_says_whatever_it_is_cut_into(
        self, dtype: str, reduction: Reduction, weights: tuple[float, ...]
    ) -> None:
        gradients = [numbers(1000, dtype, seed) for seed in range(len(weights))]
        expected = mean_of(gradients, weights, reduction)
        mean = MeanGradient(gradients, weights, reduction, Scratch())
        for bounds in ([0, 1000], [0, 1, 17, 600, 1000]):
            parts = [mean[start:stop].copy() for start, stop in pairwise(bounds)]
            assert same_bits(np.concatenate(parts), expected)

    def test_a_negative_zero_keeps_its_sign(self) -> None:
        zeros = [np.array([-0.0], np.float32)] * 2
        assert np.signbit(MeanGradient(zeros, (1.0, 1.0), "mean", Scratch())[0:1]).all()

    def test_one_gradient_is_not_copied(self) -> None:
        gradient = numbers(10, "float32", 0)
        assert np.shares_memory(MeanGradient([gradient], [1.0], "mean", Scratch())[2:5], gradient)

    @for_each("dtype", ["float32", "float16"])
    def test_gradients_stay_what_they_are(self, dtype: str) -> None:
        gradients = [numbers(10, dtype, seed) for seed in range(2)]
        before = [gradient.tobytes() for gradient in gradients]
        _ = MeanGradient(gradients, (2.0, 3.0), "mean", Scratch())[0:10]
        assert [gradient.tobytes() for gradient in gradients] == before

    def test_overflow_is_a_result_and_no_warning(self) -> None:
        large = [np.array([3e38], np.float32)] * 2
        assert MeanGradient(large, (1.0, 1.0), "mean", Scratch())[0:1].tolist() == [np.inf]


class TestApplyMean:
    @each_dtype_means
    @each_rule
    @each_size
    def test_equals_the_rule_applied_to_the_mean_of_whole_arrays(
        self, dtype: str, rule: UpdateRule, size: int
    ) -> None:
        initial = numbers(size, dtype, 99)
        store, expected = store_of(initial, rule), store_of(initial, rule)
        for step, weights in enumerate([(1.0, 1.0), (1.0, 2.5, 0.3), (1.0,)]):
            gradients = [numbers(size, dtype, 10 * step + i) for i in range(len(weights))]
            run(store.apply_checked(0, KEY, store.mean_of(gradients, weights), step))
            mean = expected.check_apply(0, KEY, mean_of(gradients, weights))
            run(expected.apply_checked(0, KEY, mean, step))
        assert same_bits(value(store), value(expected))
        for name in rule.slot_names():
            assert b"".join(store.read_slot(KEY, 0, name)) == b"".join(
                expected.read_slot(KEY, 0, name)
            )
        assert store.statistics()["applies"] == store.version(KEY) == 3


class TestApplyMeanAtOnce:
    SIZES = (3, 0, LARGE, 16)

    @each_dtype_means
    @each_rule
    @for_each("read", [False, True])
    def test_is_the_same_as_shard_by_shard(self, dtype: str, rule: UpdateRule, read: bool) -> None:
        at_once, one_by_one = ShardStore(TASK), ShardStore(TASK)
        for store in (at_once, one_by_one):
            for number, size in enumerate(self.SIZES):
                store.create(spec_of(size, dtype, number), numbers(size, dtype, number))
            store.define_optimizer(0, rule.to_config())
        keys = at_once.keys()
        snapshots = [at_once.read(key) for key in keys] if read else []
        before = [b"".join(snapshot) for snapshot in snapshots]
        weights = (1.0, 0.25)
        pushes = [[numbers(size, dtype, 7 + i) for size in self.SIZES] for i in range(2)]
        at_once.apply_at_once(0, Plan(keys), Means(pushes, weights), 5)
        for key, *gradients in zip(keys, *pushes, strict=True):
            run(one_by_one.apply_checked(0, key, one_by_one.mean_of(gradients, weights), 5))
        for key in keys:
            assert same_bits(value(at_once, key), value(one_by_one, key))
            assert at_once.version(key) == 1
            assert not at_once.busy(key)
        assert at_once.statistics()["applies"] == len(keys)
        assert [b"".join(snapshot) for snapshot in snapshots] == before


class TestAverage:
    OTHER = (1, 0)

    def stores(self, shadow: np.ndarray, values: np.ndarray) -> ShardStore:
        store = store_of(shadow)
        store.create(spec_of(values.size, values.dtype.name, 1), values)
        return store

    @each_dtype_means
    @each_size
    def test_equals_the_formula_on_whole_arrays(self, dtype: str, size: int) -> None:
        shadow, values = numbers(size, dtype, 0), numbers(size, dtype, 1)
        store = self.stores(shadow, values)
        number = sum_dtype(shadow.dtype).type
        for decay in (0.9, 0.0, 1.0):
            run(store.average(KEY, self.OTHER, decay))
            wide, target = shadow.astype(number), values.astype(number)
            shadow = (wide - (wide - target) * number(1 - decay)).astype(shadow.dtype)
            assert same_bits(value(store), shadow)
        assert same_bits(value(store, self.OTHER), values)
        assert (store.statistics()["assigns"], store.version(KEY)) == (3, 3)
        assert (store.version(self.OTHER), store.statistics()["copies"]) == (0, 0)

    def test_infinities_are_results_and_no_warning(self) -> None:
        infinite = np.full(1, np.inf, np.float32)
        out = np.empty(1, np.float32)
        move_average(infinite, infinite, out, 0.5, Scratch())
        assert np.isnan(out).all()


def test_a_sum_that_is_not_divided_is_the_total_itself() -> None:
    total = np.array([1.5, -0.0])
    finish(total, 3.0, "sum")
    assert total.tobytes() == np.array([1.5, -0.0]).tobytes()


@for_each("step, decay", [(0, 0.1), (8, 0.5), (80, 0.9), (10**9, 0.9)])
def test_a_decay_that_follows_the_step_grows_to_its_limit(step: int, decay: float) -> None:
    assert growing_decay(0.9, step) == decay


@each_dtype_means
@for_each("count", [1, 2])
@for_each("scale", [0.3, 1.0, 0.0, float("nan")])
def test_a_scaled_mean_is_the_mean_as_a_worker_shortens_it(
    dtype: str, count: int, scale: float
) -> None:
    gradients = [numbers(1000, dtype, seed) for seed in range(count)]
    gradients[0][5] = np.inf
    plain = MeanGradient(gradients, [1.0] * count, "mean", Scratch(1000))
    expected = scaled(plain[0:1000].copy(), scale).tobytes()
    mean = MeanGradient(gradients, [1.0] * count, "mean", Scratch(1000), scale)
    assert b"".join(mean[i : i + 250].tobytes() for i in range(0, 1000, 250)) == expected


@each_dtype_means
@each_size
def test_the_squares_of_a_mean_are_those_of_what_is_applied_whatever_the_blocks(
    dtype: str, size: int
) -> None:
    store = store_of(np.zeros(size, dtype_of(dtype)))
    gradients = [numbers(size, dtype, seed) for seed in range(2)]
    whole = MeanGradient(gradients, [1.0, 3.0], "mean", Scratch(size))[0:size]
    applying = store.assign(KEY, "add", np.zeros(size, dtype_of(dtype)))  # it may be busy
    sums: list[tuple[float, float]] = []
    for _ in store.square_mean(KEY, store.mean_of(gradients, [1.0, 3.0]), sums):
        pass
    assert sums == [(sum_of_squares(whole), 0.0)]
    for _ in applying:
        pass
    assert store.version(KEY) == 1
