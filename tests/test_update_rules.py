from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import ConfigurationError, GradientError
from psync.schedules import ExponentialDecay
from psync.specs import dtype_of
from psync.update_rules import SGD, Adam, Scratch, UpdateRule, rule_from_config, slot_dtype

Slots = list[np.ndarray]
Formula = Callable[[np.ndarray, np.ndarray, Slots, int], np.ndarray]


# Each rule as a textbook writes it, in float64. Slots are changed in place.


def sgd(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    return w - 0.1 * g


def momentum(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    slots[0][:] = 0.9 * slots[0] - 0.1 * g
    return w + slots[0]


def nesterov(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    slots[0][:] = 0.9 * slots[0] - 0.1 * g
    return w + 0.9 * slots[0] - 0.1 * g


def adam(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    """Kingma and Ba's algorithm 1 with epsilon hat (their section 2, last paragraph)."""
    m, v = slots[:2]
    m[:] = 0.9 * m + 0.1 * g
    v[:] = 0.999 * v + 0.001 * g**2
    t = step + 1
    rate = 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * m / (np.sqrt(v) + 1e-7)


def amsgrad(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    m, v, vhat = slots
    m[:] = 0.9 * m + 0.1 * g
    v[:] = 0.999 * v + 0.001 * g**2
    vhat[:] = np.maximum(vhat, v)
    t = step + 1
    rate = 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * m / (np.sqrt(vhat) + 1e-7)


def decaying(w: np.ndarray, g: np.ndarray, slots: Slots, step: int) -> np.ndarray:
    return w - 0.1 * 0.5 ** (step / 5) * g


RULES: dict[str, tuple[UpdateRule, Formula]] = {
    "sgd": (SGD(0.1), sgd),
    "momentum": (SGD(0.1, momentum=0.9), momentum),
    "nesterov": (SGD(0.1, momentum=0.9, nesterov=True), nesterov),
    "adam": (Adam(0.01), adam),
    "amsgrad": (Adam(0.01, amsgrad=True), amsgrad),
    "schedule": (SGD(ExponentialDecay(0.1, 5, 0.5)), decaying),
}
every_rule = pytest.mark.parametrize("rule", RULES)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])


def gradients(size: int, dtype: np.dtype, steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [(rng.standard_normal(size) * (step + 1) / 8).astype(dtype) for step in range(steps)]


def start(rule: UpdateRule, size: int, dtype: np.dtype) -> tuple[np.ndarray, Slots]:
    param = np.linspace(-2, 2, size).astype(dtype)
    slots = [
        np.full(size, rule.initial_slot(name), slot_dtype(dtype)) for name in rule.slot_names()
    ]
    return param, slots


def run(
    rule: UpdateRule, dtype: np.dtype, *, chunk: int, in_place: bool = True, size: int = 1000
) -> tuple[np.ndarray, Slots]:
    """Twenty updates."""
    param, slots = start(rule, size, dtype)
    scratch = Scratch(chunk)
    for step, grad in enumerate(gradients(size, dtype, 20)):
        if in_place:
            rule.apply(param, grad, slots, param, slots, step, scratch)
        else:
            new, new_slots = np.empty_like(param), [np.empty_like(slot) for slot in slots]
            before = (param.tobytes(), grad.tobytes(), [slot.tobytes() for slot in slots])
            rule.apply(param, grad, slots, new, new_slots, step, scratch)
            assert before == (param.tobytes(), grad.tobytes(), [slot.tobytes() for slot in slots])
            param, slots = new, new_slots
    return param, slots


class TestMaths:
    @every_rule
    @every_dtype
    def test_twenty_steps_agree_with_the_textbook(self, rule: str, dtype: str) -> None:
        kind = dtype_of(dtype)
        made, formula = RULES[rule]
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
        made, _ = RULES[rule]
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

    def test_first_adam_step_has_the_size_of_the_learning_rate(self) -> None:
        param = np.zeros(2, np.float64)
        slots = [np.zeros(2), np.zeros(2)]
        Adam(0.5, epsilon=0).apply(param, np.array([1e-3, -1e3]), slots, param, slots, 0, Scratch())
        np.testing.assert_allclose(param, [-0.5, 0.5])

    @every_rule
    def test_overflow_and_nan_are_results_and_no_warnings(self, rule: str) -> None:
        made, _ = RULES[rule]
        param, slots = start(made, 3, np.dtype(np.float32))
        grad = np.array([3e38, np.nan, np.inf], np.float32)
        for step in range(3):
            made.apply(param, grad, slots, param, slots, step, Scratch())
        assert not np.isfinite(param[1:]).any()


class TestMemory:
    @every_rule
    @every_dtype
    def test_result_is_bitwise_independent_of_chunks_and_of_copying(
        self, rule: str, dtype: str
    ) -> None:
        made, _ = RULES[rule]
        expected, expected_slots = run(made, dtype_of(dtype), chunk=1 << 18)
        for chunk, in_place in ((7, True), (64, True), (1000, True), (7, False), (1 << 18, False)):
            got, got_slots = run(made, dtype_of(dtype), chunk=chunk, in_place=in_place)
            assert got.tobytes() == expected.tobytes()
            assert [s.tobytes() for s in got_slots] == [s.tobytes() for s in expected_slots]

    @every_rule
    def test_some_slots_may_be_in_place_and_others_not(self, rule: str) -> None:
        made, _ = RULES[rule]
        kind = np.dtype(np.float32)
        expected, expected_slots = start(made, 50, kind)
        param, slots = start(made, 50, kind)
        (grad,) = gradients(50, kind, 1)
        made.apply(expected, grad, expected_slots, expected, expected_slots, 0, Scratch())
        out = np.empty_like(param)
        made.apply(param, grad, slots, out, slots, 0, Scratch())
        assert out.tobytes() == expected.tobytes()
        assert [s.tobytes() for s in slots] == [s.tobytes() for s in expected_slots]

    @given(split=st.integers(0, 100), rule=st.sampled_from(sorted(RULES)))
    def test_two_parts_give_the_bits_of_the_whole(self, split: int, rule: str) -> None:
        """What lets the store update block by block, and sparse rows by themselves."""
        made, _ = RULES[rule]
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
        made, _ = RULES[rule]
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
        assert peak < size // 4

    def test_scratch_is_allocated_once(self) -> None:
        scratch = Scratch(16)
        first = scratch.arrays(np.dtype(np.float32), 2, 16)
        second = scratch.arrays(np.dtype(np.float32), 3, 10)
        assert np.shares_memory(first[1], second[1])
        assert not np.shares_memory(second[1], second[2])
        assert [array.size for array in second] == [10, 10, 10]


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
            GradientError,
            match=f"^only floating-point variables can be optimized, got {dtype}\nhint: declare",
        ):
            slot_dtype(dtype_of(dtype))


class TestConfig:
    @every_rule
    def test_survives_the_wire(self, rule: str) -> None:
        made, _ = RULES[rule]
        config = msgpack.unpackb(msgpack.packb(made.to_config()))
        rebuilt = rule_from_config(config)
        assert type(rebuilt) is type(made)
        assert rebuilt.to_config() == made.to_config()
        assert rebuilt.slot_names() == made.slot_names()

    def test_slot_names(self) -> None:
        assert SGD().slot_names() == ()
        assert SGD(momentum=0.5).slot_names() == ("momentum",)
        assert Adam().slot_names() == ("m", "v")
        assert Adam(amsgrad=True).slot_names() == ("m", "v", "vhat")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (None, "expected the config of an optimizer, got NoneType"),
            ({"rule": 1}, "expected the config of an optimizer, got dict"),
            ({"rule": "lbfgs"}, "unknown optimizer 'lbfgs'\nhint: use one of sgd, adam"),
            (
                {"rule": "sgd", "lr": 1},
                r"sgd: expected the arguments \['learning_rate', 'momentum', 'nesterov'\], "
                r"got \['lr'\]",
            ),
            (
                SGD().to_config() | {"learning_rate": 0.1},
                "expected the config of a schedule, got 0.1",
            ),
            (SGD().to_config() | {"momentum": 2}, "sgd: expected momentum between 0 and 1, got 2"),
            (SGD().to_config() | {"momentum": None}, "sgd: momentum: expected a number, got None"),
            (
                SGD().to_config() | {"nesterov": 1},
                "sgd: expected nesterov to be True or False, got 1",
            ),
            (
                Adam().to_config() | {"beta_1": 1},
                r"adam: expected beta_1 between 0 and 0\.99.*, got 1",
            ),
            (Adam().to_config() | {"beta_2": -1}, "adam: expected beta_2 between 0 and"),
            (Adam().to_config() | {"epsilon": -1}, "adam: expected epsilon between 0 and inf"),
            (Adam().to_config() | {"amsgrad": ""}, "adam: expected amsgrad to be True or False"),
        ],
    )
    def test_refuses(self, config: object, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            rule_from_config(config)

    def test_function_as_learning_rate_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="runs no user code"):
            SGD(lambda step: 0.1)  # type: ignore[arg-type]
