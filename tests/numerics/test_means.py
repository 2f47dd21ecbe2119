from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import (
    BusyError,
    PartitionError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.memory import BLOCK_ELEMENTS, Scratch
from psync.numerics.rules import SGD, Adam, Lamb, UpdateRule
from psync.numerics.sums import (
    MeanGradient,
    Reduction,
    growing_decay,
    move_average,
    scaled,
    sum_dtype,
    sum_of_squares,
)
from psync.specs import ShardSpec, dtype_of
from psync.store.store import ShardStore, Work

TASK = "/job:ps/task:1"
KEY = (0, 0)
LARGE = 2 * BLOCK_ELEMENTS + 5
DTYPES = ("float32", "float16", "bfloat16", "float64")
RULES = {"sgd": SGD(0.1), "momentum": SGD(0.1, momentum=0.9), "adam": Adam(0.1)}

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
each_size = pytest.mark.parametrize("size", [1, 1000, LARGE], ids=["scalar", "a block", "blocks"])


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
    @each_dtype
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("weights", [(1.0,), (3.0,), (1.0, 1.0, 1.0), (1.0, 0.3, 7.0)])
    def test_is_what_it_says_whatever_it_is_cut_into(
        self, dtype: str, reduction: Reduction, weights: tuple[float, ...]
    ) -> None:
        gradients = [numbers(1000, dtype, seed) for seed in range(len(weights))]
        expected = mean_of(gradients, weights, reduction)
        mean = MeanGradient(gradients, weights, reduction, Scratch())
        for cuts in ([0, 1000], [0, 1, 17, 600, 1000]):
            parts = [mean[start:stop].copy() for start, stop in pairwise(cuts)]
            assert same_bits(np.concatenate(parts), expected)

    def test_the_order_of_the_terms_is_the_order_given(self) -> None:
        gradients = [np.array([x], np.float32) for x in (1.0, 1e8, -1e8)]
        for order, total in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0)):
            mean = MeanGradient([gradients[i] for i in order], (1, 1, 1), "sum", Scratch())
            assert mean[0:1].tolist() == [total]

    def test_halves_are_rounded_once(self) -> None:
        gradients = [np.array([x], np.float16) for x in (2048, 1, 1)]  # 2048 + 1 is 2048 in float16
        assert MeanGradient(gradients, (1, 1, 1), "sum", Scratch())[0:1].tolist() == [2050]

    def test_a_negative_zero_keeps_its_sign(self) -> None:
        zeros = [np.array([-0.0], np.float32)] * 2
        assert np.signbit(MeanGradient(zeros, (1.0, 1.0), "mean", Scratch())[0:1]).all()

    def test_one_gradient_is_not_copied(self) -> None:
        gradient = numbers(10, "float32", 0)
        assert np.shares_memory(MeanGradient([gradient], [1.0], "mean", Scratch())[2:5], gradient)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_gradients_stay_what_they_are(self, dtype: str) -> None:
        gradients = [numbers(10, dtype, seed) for seed in range(2)]
        before = [gradient.tobytes() for gradient in gradients]
        _ = MeanGradient(gradients, (2.0, 3.0), "mean", Scratch())[0:10]
        assert [gradient.tobytes() for gradient in gradients] == before

    @pytest.mark.parametrize(("gradients", "weights"), [(0, 0), (2, 1), (1, 2)])
    def test_needs_a_weight_for_each_of_at_least_one_gradient(
        self, gradients: int, weights: int
    ) -> None:
        with pytest.raises(
            UsageError,
            match=f"^expected gradients, and a weight for each, got {gradients} and {weights}$",
        ):
            MeanGradient([np.ones(1)] * gradients, [1.0] * weights, "mean", Scratch())

    def test_overflow_is_a_result_and_no_warning(self) -> None:
        large = [np.array([3e38], np.float32)] * 2
        assert MeanGradient(large, (1.0, 1.0), "mean", Scratch())[0:1].tolist() == [np.inf]


class TestApplyMean:
    @each_dtype
    @each_rule
    @each_size
    def test_equals_the_rule_applied_to_the_mean_of_whole_arrays(
        self, dtype: str, rule: UpdateRule, size: int
    ) -> None:
        initial = numbers(size, dtype, 99)
        store, expected = store_of(initial, rule), store_of(initial, rule)
        for step, weights in enumerate([(1.0, 1.0), (1.0, 2.5, 0.3), (1.0,)]):
            gradients = [numbers(size, dtype, 10 * step + i) for i in range(len(weights))]
            run(store.apply_mean(0, KEY, gradients, weights, step))
            run(expected.apply(0, KEY, mean_of(gradients, weights), step))
        assert same_bits(value(store), value(expected))
        for name in rule.slot_names():
            assert b"".join(store.read_slot(KEY, 0, name)) == b"".join(
                expected.read_slot(KEY, 0, name)
            )
        assert store.statistics().applies == store.version(KEY) == 3

    @each_size
    def test_equals_numpy_alone(self, size: int) -> None:
        w = numbers(size, "float32", 9)
        g0, g1, g2 = (numbers(size, "float32", seed) for seed in range(3))
        store = store_of(w, SGD(0.1))
        run(store.apply_mean(0, KEY, [g0, g1, g2], [1.0, 2.0, 1.0], 0))
        mean = ((g0 + g1 * np.float32(2)) + g2) / np.float32(4)
        assert same_bits(value(store), w - mean * np.float32(0.1))

    def test_of_one_push_equals_that_push(self) -> None:
        gradient = numbers(LARGE, "float32", 0)
        store, expected = (store_of(np.zeros(LARGE, np.float32), Adam()) for _ in range(2))
        run(store.apply_mean(0, KEY, [gradient], [1.0], 0))
        run(expected.apply(0, KEY, gradient, 0))
        assert same_bits(value(store), value(expected))

    def test_sums_where_that_is_asked_for(self) -> None:
        store = store_of(np.zeros(3, np.float32), SGD(1.0))
        ones = np.ones(3, np.float32)
        run(store.apply_mean(0, KEY, [ones, ones], [1.0, 1.0], 0, reduction="sum"))
        assert value(store).tolist() == [-2, -2, -2]

    def test_does_one_block_per_next_and_the_shard_is_busy_meanwhile(self) -> None:
        store = store_of(np.zeros(LARGE, np.float32))
        ones = np.ones(LARGE, np.float32)
        work = store.apply_mean(0, KEY, [ones, ones], [1.0, 1.0], 0)
        steps = 0
        while store.busy(KEY):
            for call in (
                lambda: store.read(KEY),
                lambda: store.apply_mean(0, KEY, [ones], [1.0], 0),
            ):
                with pytest.raises(BusyError):
                    call()
            steps += 1
            next(work, None)
        assert steps == 3
        assert (value(store) == -0.5).all()

    def test_works_on_two_shards_may_take_turns(self) -> None:
        store = store_of(np.zeros(LARGE, np.float32), SGD(1.0))
        store.create(spec_of(LARGE, variable_id=1))
        works = [
            store.apply_mean(
                0, (variable_id, 0), [np.full(LARGE, x, np.float32) for x in pair], [1.0, 1.0], 0
            )
            for variable_id, pair in enumerate(((1, 3), (10, 30)))
        ]
        while works:
            works = [work for work in works if next(work, "ended") is None]
        assert (value(store) == -2).all()
        assert (value(store, (1, 0)) == -20).all()

    def test_a_reader_keeps_the_old_value(self) -> None:
        initial = numbers(LARGE, "float32", 0)
        store = store_of(initial, SGD(0.1, momentum=0.9))
        values, slot = store.read(KEY), store.read_slot(KEY, 0, "momentum")
        gradients = [numbers(LARGE, "float32", seed) for seed in range(2)]
        run(store.apply_mean(0, KEY, gradients, [1.0, 1.0], 0))
        assert b"".join(values) == initial.tobytes()
        assert not any(b"".join(slot))
        assert store.statistics().copies == 6

    def test_without_readers_nothing_is_copied(self) -> None:
        store = store_of(np.zeros(LARGE, np.float32))
        gradients = [numbers(LARGE, "float32", seed) for seed in range(2)]
        run(store.apply_mean(0, KEY, gradients, [1.0, 1.0], 0))
        assert store.statistics().copies == 0

    def test_refuses_before_the_shard_is_busy(self) -> None:
        store = store_of(np.zeros(3, np.float32))
        with pytest.raises(UsageError, match="expected gradients"):
            store.apply_mean(0, KEY, [], [], 0)
        with pytest.raises(UnknownVariableError):
            store.apply_mean(0, (7, 0), [np.zeros(3, np.float32)], [1.0], 0)
        assert not store.busy(KEY)


class TestApplyMeanAtOnce:
    SIZES = (3, 0, LARGE, 16)

    @each_dtype
    @each_rule
    @pytest.mark.parametrize("read", [False, True], ids=["in place", "held"])
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
        at_once.apply_mean_at_once(0, keys, pushes, weights, 5)
        for key, *gradients in zip(keys, *pushes, strict=True):
            run(one_by_one.apply_mean(0, key, gradients, weights, 5))
        for key in keys:
            assert same_bits(value(at_once, key), value(one_by_one, key))
            assert at_once.version(key) == 1
            assert not at_once.busy(key)
        assert at_once.statistics().applies == len(keys)
        assert [b"".join(snapshot) for snapshot in snapshots] == before

    def test_sums_where_that_is_asked_for(self) -> None:
        store = store_of(np.zeros(3, np.float32), SGD(1.0))
        store.apply_mean_at_once(0, [KEY], [[np.ones(3, np.float32)]] * 3, [1.0] * 3, 0, "sum")
        assert value(store).tolist() == [-3, -3, -3]

    def test_a_busy_shard_is_an_error(self) -> None:
        store = store_of(np.zeros(LARGE, np.float32))
        ones = np.ones(LARGE, np.float32)
        work = store.assign(KEY, "add", ones)
        with pytest.raises(BusyError):
            store.apply_mean_at_once(0, [KEY], [[ones]], [1.0], 0)
        run(work)

    @pytest.mark.parametrize(
        ("pushes", "weights", "message"),
        [
            ([[np.ones(3, np.float32)], []], [1.0, 1.0], "expected 1 gradients of each push"),
            ([], [], "expected gradients, and a weight for each, got 0 and 0"),
            ([[np.ones(3, np.float32)]], [], "expected gradients, and a weight for each, got 1 an"),
        ],
    )
    def test_refuses_before_anything_changes(
        self, pushes: list[list[np.ndarray]], weights: list[float], message: str
    ) -> None:
        store = store_of(np.zeros(3, np.float32))
        with pytest.raises(UsageError, match=message):
            store.apply_mean_at_once(0, [KEY], pushes, weights, 0)
        assert (store.busy(KEY), store.version(KEY)) == (False, 0)


class TestAverage:
    OTHER = (1, 0)

    def stores(self, shadow: np.ndarray, values: np.ndarray) -> ShardStore:
        store = store_of(shadow)
        store.create(spec_of(values.size, values.dtype.name, 1), values)
        return store

    @each_dtype
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
        assert (store.statistics().assigns, store.version(KEY)) == (3, 3)
        assert (store.version(self.OTHER), store.statistics().copies) == (0, 0)

    def test_of_itself_changes_nothing(self) -> None:
        values = numbers(LARGE, "float32", 0)
        store = store_of(values)
        run(store.average(KEY, KEY, 0.5))
        assert same_bits(value(store), values)

    def test_is_of_the_value_at_its_beginning(self) -> None:
        store = self.stores(np.zeros(LARGE, np.float32), np.ones(LARGE, np.float32))
        work = store.average(KEY, self.OTHER, 0.5)
        next(work)
        run(store.assign(self.OTHER, "assign", np.full(LARGE, 9, np.float32)))
        assert store.statistics().copies == 2  # the block that was read already is not held
        run(work)
        assert (value(store) == 0.5).all()
        assert (value(store, self.OTHER) == 9).all()

    def test_a_reader_keeps_the_old_value(self) -> None:
        store = self.stores(np.zeros(LARGE, np.float32), np.ones(LARGE, np.float32))
        snapshot = store.read(KEY)
        run(store.average(KEY, self.OTHER, 0.5))
        assert not any(b"".join(snapshot))
        assert store.statistics().copies == 3

    def test_only_the_average_is_busy(self) -> None:
        store = self.stores(np.zeros(LARGE, np.float32), np.ones(LARGE, np.float32))
        work = store.average(KEY, self.OTHER, 0.5)
        assert (store.busy(KEY), store.busy(self.OTHER)) == (True, False)
        for keys in ((KEY, self.OTHER), (self.OTHER, KEY)):
            with pytest.raises(BusyError):
                store.average(*keys, 0.5)
        run(work)
        assert not store.busy(KEY)

    def test_refuses_what_does_not_fit(self) -> None:
        store = self.stores(np.zeros(3, np.float32), np.zeros(4, np.float32))
        store.create(spec_of(3, "int32", 2))
        store.create(spec_of(3, "int32", 3))
        with pytest.raises(PartitionError) as shapes:
            store.average(KEY, self.OTHER, 0.5)
        assert str(shapes.value) == (
            '"w/part_0" on /job:ps/task:1: expected shape (4,) float32, as "w/part_0" has, whose '
            "moving average it is, got shape (3,) float32"
        )
        with pytest.raises(PartitionError, match=r"expected shape \(3,\) int32"):
            store.average(KEY, (2, 0), 0.5)
        with pytest.raises(
            ValueMismatchError,
            match='"w/part_0" on /job:ps/task:1: only floating-point variables have moving '
            "averages, got int32",
        ):
            store.average((2, 0), (3, 0), 0.5)
        with pytest.raises(UnknownVariableError):
            store.average(KEY, (9, 0), 0.5)
        assert not any(map(store.busy, store.keys()))

    def test_infinities_are_results_and_no_warning(self) -> None:
        infinite = np.full(1, np.inf, np.float32)
        out = np.empty(1, np.float32)
        move_average(infinite, infinite, out, 0.5, Scratch())
        assert np.isnan(out).all()


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([3, BLOCK_ELEMENTS + 7]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["read", "drop", "mean", "at once", "average", "assign"]),
            st.integers(0, 3),
        ),
        max_size=20,
    ),
)
def test_every_snapshot_stays_what_it_was(size: int, steps: list[tuple[str, int]]) -> None:
    """Any interleaving of reads that are kept and updates, against plain numpy."""
    store = store_of(np.zeros(size, np.float32), SGD(0.5))
    store.create(spec_of(size, variable_id=1))
    model, shadow = np.zeros((2, size), np.float32)
    kept: list[tuple[list[memoryview], np.ndarray]] = []
    half = np.float32(0.5)
    for op, number in steps:
        gradients = [np.arange(size, dtype=np.float32) * np.float32(i) for i in range(number + 1)]
        weights = [1.0] * len(gradients)
        if op == "read":
            kept += [(store.read(KEY), model), (store.read((1, 0)), shadow)]
        elif op == "drop" and kept:
            kept.pop(number % len(kept))
        elif op == "average":
            run(store.average((1, 0), KEY, 0.5))
            shadow = shadow - half * (shadow - model)
        elif op == "assign":
            run(store.assign(KEY, "assign", gradients[-1]))
            model = gradients[-1]
        elif op in ("mean", "at once"):
            if op == "mean":
                run(store.apply_mean(0, KEY, gradients, weights, 0))
            else:
                store.apply_mean_at_once(0, [KEY], [[grad] for grad in gradients], weights, 0)
            model = model - half * mean_of(gradients, weights)
        for snapshot, expected in kept:
            assert b"".join(snapshot) == expected.tobytes()
        assert same_bits(value(store), model)
        assert same_bits(value(store, (1, 0)), shadow)


@pytest.mark.parametrize(("step", "decay"), [(0, 0.1), (8, 0.5), (80, 0.9), (10**9, 0.9)])
def test_a_decay_that_follows_the_step_grows_to_its_limit(step: int, decay: float) -> None:
    assert growing_decay(0.9, step) == decay


@each_dtype
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("scale", [0.3, 1.0, 0.0, float("nan")])
def test_a_scaled_mean_is_the_mean_as_a_worker_shortens_it(
    dtype: str, count: int, scale: float
) -> None:
    gradients = [numbers(1000, dtype, seed) for seed in range(count)]
    gradients[0][5] = np.inf
    plain = MeanGradient(gradients, [1.0] * count, "mean", Scratch(1000))
    expected = scaled(plain[0:1000].copy(), scale).tobytes()
    mean = MeanGradient(gradients, [1.0] * count, "mean", Scratch(1000), scale)
    assert b"".join(mean[i : i + 250].tobytes() for i in range(0, 1000, 250)) == expected


@each_dtype
@each_size
def test_the_squares_of_a_mean_are_those_of_what_is_applied_whatever_the_blocks(
    dtype: str, size: int
) -> None:
    store = store_of(np.zeros(size, dtype_of(dtype)))
    gradients = [numbers(size, dtype, seed) for seed in range(2)]
    whole = MeanGradient(gradients, [1.0, 3.0], "mean", Scratch(size))[0:size]
    applying = store.assign(KEY, "add", np.zeros(size, dtype_of(dtype)))  # it may be busy
    sums: list[tuple[float, float]] = []
    for _ in store.square_mean(KEY, gradients, [1.0, 3.0], sums, reduction="mean"):
        pass
    assert sums == [(sum_of_squares(whole), 0.0)]
    for _ in applying:
        pass
    assert store.version(KEY) == 1


def test_the_norms_of_a_mean_are_measured_like_those_of_a_gradient() -> None:
    store = store_of(np.ones(4, np.float32), Lamb(0.5))
    gradients = [np.full(4, value, np.float32) for value in (1.0, 3.0)]
    sums: list[tuple[float, float]] = []
    for scale in (1.0, 0.5):
        work = store.measure_mean(
            0, KEY, gradients, [1.0, 1.0], 0, sums, reduction="mean", scale=scale
        )
        for _ in work:
            pass
        for _ in store.measure(0, KEY, np.full(4, 2 * scale, np.float32), 0, sums):
            pass
    assert sums[::2] == sums[1::2]
    for _ in store.apply_mean(0, KEY, gradients, [1.0, 1.0], 0, scale=0.5, ratio=2.0):
        pass
    np.testing.assert_allclose(np.frombuffer(store.read(KEY)[0], np.float32), 0, atol=1e-6)
