from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import ConfigurationError, ValueMismatchError
from psync.numerics.memory import Scratch
from psync.numerics.rules import SGD, Adam, RuleOptions, slot_dtype
from psync.schedules import ExponentialDecay
from psync.specs import dtype_of
from rule_table import RULES, Slots, gradients, run, start

Formula = Callable[[np.ndarray, np.ndarray, Slots, int], np.ndarray]


# As a textbook writes it, in float64. Slots are changed in place.


def sgd(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    return w - 0.1 * g


def momentum(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    slots[0][:] = 0.9 * slots[0] - 0.1 * g
    return w + slots[0]


def nesterov(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    slots[0][:] = 0.9 * slots[0] - 0.1 * g
    return w + 0.9 * slots[0] - 0.1 * g


def decaying(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    return w - 0.1 * 0.5 ** (step / 5) * g


FORMULAS: dict[str, Formula] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "schedule": decaying,
}
ELEMENTWISE = sorted(set(RULES) - {"lamb"})  # the norms of that one are of the whole
every_rule = pytest.mark.parametrize("rule", RULES)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])


class TestMaths:
    @pytest.mark.parametrize("rule", FORMULAS)
    @every_dtype
    def test_twenty_steps_agree_with_the_textbook(self, rule: str, dtype: str) -> None:
        kind = dtype_of(dtype)
        made, formula = RULES[rule], FORMULAS[rule]
        got, got_slots = run(made, kind, chunk=64)
        param, slots = start(made, 1000, kind)
        expected, expected_slots = param.astype(np.float64), [s.astype(np.float64) for s in slots]
        for step, grad in enumerate(gradients(1000, kind, 20)):
            expected = formula(expected, grad.astype(np.float64), expected_slots, step)
        # the parameter is rounded 20 times, and it stays below 16
        tolerance = 20 * 16 * float(ml_dtypes.finfo(kind).eps) / 2
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=tolerance)
        for got_slot, expected_slot in zip(got_slots, expected_slots, strict=True):
            np.testing.assert_allclose(
                got_slot, expected_slot, rtol=0, atol=100 * np.finfo(got_slot.dtype).eps
            )

    @every_rule
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_is_rounded_once_per_update(self, rule: str, dtype: str) -> None:
        """The same as converting to float32, updating there and converting back."""
        made = RULES[rule]
        kind = dtype_of(dtype)
        half, half_slots = start(made, 100, kind)
        single_slots = [slot.copy() for slot in half_slots]
        scratch = Scratch()
        for step, grad in enumerate(gradients(100, kind, 5)):
            single = half.astype(np.float32)
            made.apply(half, grad, half_slots, half, half_slots, step, scratch)
            made.apply(
                single, grad.astype(np.float32), single_slots, single, single_slots, step, scratch
            )
            assert half.tobytes() == single.astype(kind).tobytes()
        assert [s.tobytes() for s in half_slots] == [s.tobytes() for s in single_slots]

    @every_rule
    def test_overflow_and_nan_are_results_and_no_warnings(self, rule: str) -> None:
        made = RULES[rule]
        param, slots = start(made, 3, np.dtype(np.float32))
        grad = np.array([3e38, np.nan, np.inf], np.float32)
        for step in range(3):
            made.apply(param, grad, slots, param, slots, step, Scratch())
        assert np.isnan(param[1])


class TestMemory:
    @pytest.mark.slow
    @every_rule
    @every_dtype
    def test_result_is_bitwise_independent_of_chunks_and_of_copying(
        self, rule: str, dtype: str
    ) -> None:
        made = RULES[rule]
        expected, expected_slots = run(made, dtype_of(dtype), chunk=1 << 18)
        for chunk, in_place in ((7, True), (64, True), (1000, True), (7, False), (1 << 18, False)):
            got, got_slots = run(made, dtype_of(dtype), chunk=chunk, in_place=in_place)
            assert got.tobytes() == expected.tobytes()
            assert [s.tobytes() for s in got_slots] == [s.tobytes() for s in expected_slots]

    @every_rule
    def test_some_slots_may_be_in_place_and_others_not(self, rule: str) -> None:
        made = RULES[rule]
        kind = np.dtype(np.float32)
        expected, expected_slots = start(made, 50, kind)
        param, slots = start(made, 50, kind)
        (grad,) = gradients(50, kind, 1)
        made.apply(expected, grad, expected_slots, expected, expected_slots, 0, Scratch())
        out = np.empty_like(param)
        made.apply(param, grad, slots, out, slots, 0, Scratch())
        assert out.tobytes() == expected.tobytes()
        assert [s.tobytes() for s in slots] == [s.tobytes() for s in expected_slots]

    @given(split=st.integers(0, 100), rule=st.sampled_from(ELEMENTWISE))
    def test_two_parts_give_the_bits_of_the_whole(self, split: int, rule: str) -> None:
        """What lets the store update block by block, and sparse rows by themselves."""
        made = RULES[rule]
        kind = np.dtype(np.float32)
        whole, whole_slots = start(made, 100, kind)
        parts, part_slots = start(made, 100, kind)
        (grad,) = gradients(100, kind, 1)
        made.apply(whole, grad, whole_slots, whole, whole_slots, 3, Scratch())
        for part in (slice(0, split), slice(split, 100)):
            views = [slot[part] for slot in part_slots]
            made.apply(parts[part], grad[part], views, parts[part], views, 3, Scratch())
        assert parts.tobytes() == whole.tobytes()

    def test_gradient_may_be_unaligned_and_read_only(self) -> None:
        grad = np.frombuffer(b"x" + np.ones(8, np.float32).tobytes(), np.uint8)[1:].view(np.float32)
        param = np.ones(8, np.float32)
        SGD(0.5).apply(param, grad, (), param, (), 0, Scratch())
        assert param.tolist() == [0.5] * 8

    @every_rule
    @every_dtype
    def test_an_update_allocates_no_arrays(self, rule: str, dtype: str) -> None:
        made = RULES[rule]
        kind, size, scratch = dtype_of(dtype), 100_000, Scratch(50_000)
        param, slots = start(made, size, kind)
        (grad,) = gradients(size, kind, 1)
        made.apply(param, grad, slots, param, slots, 0, scratch)
        tracemalloc.start()
        try:
            made.apply(param, grad, slots, param, slots, 1, scratch)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Numpy casts through buffers of 8192 elements; powers take some of as many doubles.
        assert peak < (7 * size if rule == "ftrl, power" else size // 2)

    def test_scratch_is_allocated_once(self) -> None:
        scratch = Scratch(16)
        first = scratch.arrays(np.dtype(np.float32), 2, 16)
        second = scratch.arrays(np.dtype(np.float32), 3, 10)
        assert np.shares_memory(first[1], second[1])
        assert not np.shares_memory(second[1], second[2])
        assert [array.size for array in second] == [10, 10, 10]
        assert scratch.arrays(np.dtype(np.float32), 1, 20)[0].size == 20  # longer than a chunk


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            ("float16", "float32"),
            ("bfloat16", "float32"),
            ("float32", "float32"),
            ("float64", "float64"),
        ],
    )
    def test_slots(self, dtype: str, expected: str) -> None:
        for _ in range(2):  # looked up, then remembered
            assert slot_dtype(dtype_of(dtype)) == np.dtype(expected)

    @pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
    def test_integers_are_refused(self, dtype: str) -> None:
        with pytest.raises(
            ValueMismatchError,
            match=f"^only floating-point variables can be optimized, got {dtype}\nhint: declare",
        ):
            slot_dtype(dtype_of(dtype))


class TestOptions:
    def test_weights_decay_by_the_rate_before_the_update(self) -> None:
        rule = SGD(ExponentialDecay(0.5, 1, 0.5)).with_options(RuleOptions(weight_decay=0.25))
        param = np.array([8.0, -8.0])
        rule.apply(param, np.array([1.0, 0.0]), (), param, (), 1, Scratch())
        rate = 0.25
        assert param.tolist() == [8 - rate * 0.25 * 8 - rate, -8 + rate * 0.25 * 8]

    def test_elements_of_the_gradient_are_clipped_and_it_stays_as_it_was(self) -> None:
        rule = SGD(1.0).with_options(RuleOptions(clipvalue=2.0))
        grad = np.array([3.0, -3.0, 1.0, np.inf, np.nan], np.float32)
        before = grad.tobytes()
        param = np.zeros(5, np.float32)
        rule.apply(param, grad, (), param, (), 0, Scratch())
        np.testing.assert_array_equal(param, np.array([-2, 2, -1, -2, np.nan], np.float32))
        assert grad.tobytes() == before

    def test_who_is_excluded_has_the_rule_without_decay(self) -> None:
        rule = Adam(0.5).with_options(RuleOptions(weight_decay=0.25, excluded_words=("b",)))
        assert rule.for_variable("w") is rule
        assert rule.for_variable("b").options.weight_decay is None
        plain = Adam(0.5)
        assert plain.for_variable("b") is plain

    def test_with_accumulation_schedules_count_pushes_and_all_else_updates(self) -> None:
        rule = Adam(ExponentialDecay(0.1, 1, 0.5))
        third = rule.with_options(RuleOptions(gradient_accumulation_steps=3))
        expected, got = np.ones(2), np.ones(2)
        slots = [np.zeros(2), np.zeros(2)]
        Adam(rule.learning_rate(8)).apply(
            expected, np.full(2, 0.5), slots, expected, [np.zeros(2), np.zeros(2)], 2, Scratch()
        )
        third.apply(got, np.full(2, 0.5), slots, got, slots, 8, Scratch())
        assert got.tolist() == expected.tolist()
        assert third.own_slots() == ("m", "v")
        assert third.slot_names() == ("m", "v", "gradient_accumulator")
        assert third.initial_slot("gradient_accumulator") == 0

    def test_a_gradient_may_have_the_dtype_of_the_slots(self) -> None:
        """As the mean of accumulated gradients has."""
        half = np.ones(3, np.float16)
        grad = np.full(3, 2**-12, np.float32)
        SGD(1.0).apply(half, grad, (), half, (), 0, Scratch())
        assert half.tolist() == [np.float16(1 - 2**-12)] * 3


class TestSlots:
    def test_names(self) -> None:
        assert SGD().slot_names() == ()
        assert SGD(momentum=0.5).slot_names() == ("momentum",)

    def test_functions_as_learning_rate_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="runs no user code"):
            SGD(lambda step: 0.1)  # type: ignore[arg-type]
