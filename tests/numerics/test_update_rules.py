"""Update rules: formulas, precision, memory, options, configurations, clipping by norm."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

import own_rules
from loops import for_each
from psync.errors import ConfigurationError
from psync.numerics import rules
from psync.numerics.memory import CHUNK, Scratch
from psync.numerics.rows import IndexedSlices
from psync.numerics.rules import (
    MAX_WORDS,
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Lamb,
    Lion,
    Nadam,
    RMSprop,
    RuleOptions,
    clipped_by_norm,
    momentum_product,
    power,
    registered,
    registered_in,
    rule_from_config,
    slot_dtype,
    unknown_in,
)
from psync.numerics.sums import SQUARES_PIECE, scaled, sum_of_squares
from psync.rules import register
from psync.schedules import ExponentialDecay, PolynomialDecay
from psync.specs import dtype_of
from rule_table import RULES, gradients, run, start

ELEMENTWISE = sorted(set(RULES) - {"lamb"})  # the norms of that one are of the whole
every_rule = for_each("rule", RULES)
every_dtype = for_each("dtype", ["float16", "bfloat16", "float32", "float64"])


class TestMaths:
    @every_rule
    @for_each("dtype", ["float16", "bfloat16"])
    def test_half_precision_is_rounded_once_per_update(self, rule: str, dtype: str) -> None:
        """The same as converting to float32, updating there and converting back."""
        made = RULES[rule]
        kind = dtype_of(dtype)
        half, half_slots = start(made, 100, kind)
        single_slots = [slot.copy() for slot in half_slots]
        scratch = Scratch()
        for step, grad in enumerate(gradients(100, kind, 5)):
            single = half.astype(np.float32)
            made.apply([(half, grad, half_slots, half, half_slots)], step, scratch)
            made.apply(
                [(single, grad.astype(np.float32), single_slots, single, single_slots)],
                step,
                scratch,
            )
            assert half.tobytes() == single.astype(kind).tobytes()
        assert [s.tobytes() for s in half_slots] == [s.tobytes() for s in single_slots]

    @every_rule
    def test_overflow_and_nan_are_results_and_no_warnings(self, rule: str) -> None:
        made = RULES[rule]
        param, slots = start(made, 3, np.dtype(np.float32))
        grad = np.array([3e38, np.nan, np.inf], np.float32)
        for step in range(3):
            made.apply([(param, grad, slots, param, slots)], step, Scratch())
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
        made.apply([(expected, grad, expected_slots, expected, expected_slots)], 0, Scratch())
        out = np.empty_like(param)
        made.apply([(param, grad, slots, out, slots)], 0, Scratch())
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
        made.apply([(whole, grad, whole_slots, whole, whole_slots)], 3, Scratch())
        for part in (slice(0, split), slice(split, 100)):
            views = [slot[part] for slot in part_slots]
            made.apply([(parts[part], grad[part], views, parts[part], views)], 3, Scratch())
        assert parts.tobytes() == whole.tobytes()

    @every_rule
    @every_dtype
    def test_an_update_allocates_no_arrays(self, rule: str, dtype: str) -> None:
        made = RULES[rule]
        kind, size, scratch = dtype_of(dtype), 100_000, Scratch(50_000)
        param, slots = start(made, size, kind)
        (grad,) = gradients(size, kind, 1)
        made.apply([(param, grad, slots, param, slots)], 0, scratch)
        tracemalloc.start()
        try:
            made.apply([(param, grad, slots, param, slots)], 1, scratch)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Numpy casts through buffers of 8192 elements; powers take some of as many doubles.
        assert peak < (7 * size if rule == "ftrl, power" else size // 2)


class TestOptions:
    def test_weights_decay_by_the_rate_before_the_update(self) -> None:
        rule = SGD(ExponentialDecay(0.5, 1, 0.5)).with_options(RuleOptions(weight_decay=0.25))
        param = np.array([8.0, -8.0])
        rule.apply([(param, np.array([1.0, 0.0]), (), param, ())], 1, Scratch())
        rate = 0.25
        assert param.tolist() == [8 - rate * 0.25 * 8 - rate, -8 + rate * 0.25 * 8]

    def test_elements_of_the_gradient_are_clipped_and_it_stays_as_it_was(self) -> None:
        rule = SGD(1.0).with_options(RuleOptions(clipvalue=2.0))
        grad = np.array([3.0, -3.0, 1.0, np.inf, np.nan], np.float32)
        before = grad.tobytes()
        param = np.zeros(5, np.float32)
        rule.apply([(param, grad, (), param, ())], 0, Scratch())
        np.testing.assert_array_equal(param, np.array([-2, 2, -1, -2, np.nan], np.float32))
        assert grad.tobytes() == before

    def test_who_is_excluded_has_the_rule_without_decay(self) -> None:
        rule = Adam(0.5).with_options(RuleOptions(weight_decay=0.25, excluded_words=("b",)))
        assert rule.for_variable("w") is rule
        assert rule.for_variable("b").options.weight_decay is None

    def test_with_accumulation_schedules_count_pushes_and_all_else_updates(self) -> None:
        rule = Adam(ExponentialDecay(0.1, 1, 0.5))
        third = rule.with_options(RuleOptions(gradient_accumulation_steps=3))
        expected, got = np.ones(2), np.ones(2)
        slots = [np.zeros(2), np.zeros(2)]
        Adam(rule.learning_rate(8)).apply(
            [(expected, np.full(2, 0.5), slots, expected, [np.zeros(2), np.zeros(2)])], 2, Scratch()
        )
        third.apply([(got, np.full(2, 0.5), slots, got, slots)], 8, Scratch())
        assert got.tolist() == expected.tolist()
        assert third.own_slots() == ("m", "v")
        assert third.slot_names() == ("m", "v", "gradient_accumulator")
        assert third.initial_slot("gradient_accumulator") == 0

    def test_a_gradient_may_have_the_dtype_of_the_slots(self) -> None:
        """As the mean of accumulated gradients has."""
        half = np.ones(3, np.float16)
        grad = np.full(3, 2**-12, np.float32)
        SGD(1.0).apply([(half, grad, (), half, ())], 0, Scratch())
        assert half.tolist() == [np.float16(1 - 2**-12)] * 3


class TestSlots:
    def test_functions_as_learning_rate_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="runs no user code"):
            SGD(lambda step: 0.1)  # type: ignore[arg-type]


@for_each("t", [1, 2, 17, 999, 1000, 1001, 1500])
def test_the_product_of_momentums_is_that_of_all_of_them(t: int) -> None:
    product = math.prod(0.999 * (1 - 0.5 * 0.96**i) for i in range(1, t + 1))
    assert momentum_product(0.999, t) == pytest.approx(product, rel=1e-12)


def test_nadam_is_known_at_any_step() -> None:
    """Without having made those before: a ps may have missed them."""
    param, slots = np.ones(1), [np.zeros(1), np.zeros(1)]
    Nadam(0.5).apply([(param, np.ones(1), slots, param, slots)], 10**12, Scratch())
    assert np.isfinite(param).all()


def test_ftrl_keeps_elements_with_small_gradients_at_exactly_zero() -> None:
    param, slots = np.zeros(3), [np.full(3, 0.1), np.zeros(3)]
    rule = Ftrl(0.5, l1_regularization_strength=1.0)
    rule.apply([(param, np.array([0.9, -0.9, 1.5]), slots, param, slots)], 0, Scratch())
    assert param[:2].tolist() == [0, 0]
    assert param[2] < 0


def test_ftrl_at_a_learning_rate_of_zero_moves_nothing() -> None:
    """As at the end of a decay; the formula divides by it."""
    rule = Ftrl(PolynomialDecay(0.5, 3, end_learning_rate=0.0), beta=1.0)
    param, slots = np.ones(3), [np.full(3, 0.1), np.full(3, 2.0)]
    out, out_slots = np.empty(3), [np.empty(3), np.empty(3)]
    rule.apply([(param, np.ones(3), slots, out, out_slots)], 3, Scratch())
    assert out.tolist() == param.tolist()
    assert [slot.tolist() for slot in out_slots] == [slot.tolist() for slot in slots]


def test_ftrl_makes_zero_of_what_never_had_a_gradient() -> None:
    """Where the accumulator begins at 0, the formula is 0 / 0."""
    param, slots = np.ones(2), [np.zeros(2), np.zeros(2)]
    rule = Ftrl(0.5, initial_accumulator_value=0.0)
    rule.apply([(param, np.array([0.0, 1.0]), slots, param, slots)], 0, Scratch())
    assert param[0] == 0
    assert np.isfinite(param[1])


def test_centered_rmsprop_survives_gradients_that_are_all_alike() -> None:
    """Their variance is 0, but for rounding, which may make it negative."""
    param, rule = np.ones(1000, np.float32), RMSprop(0.01, centered=True)
    slots = [np.zeros(1000, np.float32), np.zeros(1000, np.float32)]
    grad = np.linspace(100, 2000, 1000, dtype=np.float32)
    for step in range(200):
        rule.apply([(param, grad, slots, param, slots)], step, Scratch())
    assert np.isfinite(param).all()


@for_each("exponent", [0.1, 0.7, 1.0, 2.5])
@for_each("dtype, rtol", [(np.float32, 1.2e-7), (np.float64, 3e-14)])
def test_powers_are_those_of_numpy(dtype: type, rtol: float, exponent: float) -> None:
    base = np.concatenate([10.0 ** np.linspace(-14, 14, 20_000), [1, 2, 0.5]]).astype(dtype)
    out = np.empty_like(base)
    power(base, exponent, out)
    np.testing.assert_allclose(out, np.power(base, exponent, dtype=np.float64), rtol=rtol)
    assert out[-3] == 1


def test_powers_of_what_is_no_ordinary_number() -> None:
    base, out = np.array([0.0, np.inf, np.nan, 1e300, 1e-300]), np.empty(5)
    with np.errstate(all="ignore"):
        power(base, 2.0, out)
        assert out.tolist()[:2] + out.tolist()[3:] == [0, np.inf, np.inf, 0]
        assert np.isnan(out[2])
        power(base, 0.0, out)
    assert out.tolist() == [1] * 5


STEP = 4  # of the updates that are measured


def arrays(
    size: int, dtype: object = np.float64
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A parameter, a gradient, and slots that have been used."""
    rng = np.random.default_rng(3)
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    param, grad = (rng.standard_normal(size).astype(kind) for _ in range(2))
    moments = [rng.standard_normal(size), rng.random(size)]
    return param, grad, [moment.astype(slot_dtype(kind)) for moment in moments]


def update_of(grad: np.ndarray, slots: list[np.ndarray]) -> np.ndarray:
    t = STEP + 1
    m = (0.9 * slots[0] + 0.1 * grad) / (1 - 0.9**t)
    v = (0.999 * slots[1] + 0.001 * grad**2) / (1 - 0.999**t)
    return m / (np.sqrt(v) + 1e-7)


def measured(rule: Lamb, *parts: Any, chunk: int = CHUNK) -> tuple[float, float]:
    measurement = rule.measurement(STEP, Scratch(chunk))
    for part in parts:
        measurement.add(*part)
    return measurement.sums


@for_each("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_measuring_changes_nothing_and_sums_in_float64(dtype: object) -> None:
    param, grad, slots = arrays(3 * SQUARES_PIECE + 5, dtype)
    before = [array.tobytes() for array in (param, grad, *slots)]
    of_param, of_update = measured(Lamb(0.01), (param, grad, slots))
    assert [array.tobytes() for array in (param, grad, *slots)] == before
    assert of_param == pytest.approx(float(np.sum(param.astype(np.float64) ** 2)), rel=1e-13)
    wide = [slot.astype(np.float64) for slot in slots]
    expected = update_of(grad.astype(np.float64), wide)
    assert of_update == pytest.approx(float(np.sum(expected**2)), rel=1e-5)


def test_norms_do_not_depend_on_chunks_or_blocks() -> None:
    param, grad, slots = arrays(5 * SQUARES_PIECE + 17, np.float32)
    whole = measured(Lamb(), (param, grad, slots))
    first, second = 2 * SQUARES_PIECE, 3 * SQUARES_PIECE
    cuts = [slice(0, first), slice(first, second), slice(second, None)]
    blocks = ((param[cut], grad[cut], [slot[cut] for slot in slots]) for cut in cuts)
    assert measured(Lamb(), *blocks, chunk=7) == whole


def test_pieces_applied_with_the_ratio_of_the_whole_make_the_whole() -> None:
    """Shards of a variable, each measured on its own ps."""
    rule = Lamb(0.1)
    param, grad, slots = arrays(1000, np.float32)
    parts = [slice(0, 300), slice(300, 1000)]
    sums = [measured(rule, (param[part], grad[part], [s[part] for s in slots])) for part in parts]
    expected, expected_slots = param.copy(), [slot.copy() for slot in slots]
    rule.apply([(expected, grad, expected_slots, expected, expected_slots)], STEP, Scratch())
    for part in parts:
        cut = [slot[part] for slot in slots]
        ratio = rule.trust_ratio(sums)
        rule.apply([(param[part], grad[part], cut, param[part], cut)], STEP, Scratch(), ratio)
    np.testing.assert_allclose(param, expected, rtol=1e-6)
    assert [s.tobytes() for s in slots] == [s.tobytes() for s in expected_slots]


def test_the_ratio_is_one_where_there_is_none() -> None:
    assert Lamb.trust_ratio([(9.0, 4.0)]) == 1.5
    assert Lamb.trust_ratio([(5.0, 4.0), (4.0, 0.0)]) == 1.5
    assert Lamb.trust_ratio([(0.0, 4.0)]) == 1
    assert Lamb.trust_ratio([(4.0, 0.0)]) == 1
    assert Lamb.trust_ratio([(math.nan, 4.0)]) == 1
    assert Lamb.trust_ratio([(4.0, math.inf)]) == 0
    assert Lamb.trust_ratio([(1e308, 1.0), (1e308, 1.0)]) == math.inf  # its sum is beyond floats


def test_gradients_are_clipped_before_they_are_measured() -> None:
    rule = Lamb().with_options(RuleOptions(clipvalue=0.5))
    param, grad, slots = arrays(100)
    clipped = np.clip(grad, -0.5, 0.5)
    assert measured(rule, (param, grad, slots)) == measured(Lamb(), (param, clipped, slots))


def test_numbers_become_floats_and_lists_tuples() -> None:
    options = RuleOptions(weight_decay=1, clipnorm=2, excluded_words=["a"])  # type: ignore[arg-type]
    assert (options.weight_decay, options.clipnorm) == (1.0, 2.0)
    assert isinstance(options.weight_decay, float)
    assert options.excluded_words == ("a",)
    assert not RuleOptions().excludes("w")


@for_each(
    "arguments, message",
    [
        ({"weight_decay": -0.1}, "optimizer: expected weight_decay between 0 and inf, got -0.1"),
        ({"weight_decay": "x"}, "optimizer: weight_decay: expected a number, got 'x'"),
        ({"clipnorm": 0}, "optimizer: expected clipnorm between 5e-324 and inf, got 0"),
        ({"clipvalue": -1}, "optimizer: expected clipvalue between 5e-324 and inf, got -1"),
        (
            {"clipnorm": 1.0, "clipvalue": 2.0},
            "optimizer: expected at most one of clipnorm, global_clipnorm, clipvalue, "
            "got clipnorm=1.0, clipvalue=2.0",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "optimizer: expected gradient_accumulation_steps between 2 and 2147483647, got 1",
        ),
        (
            {"gradient_accumulation_steps": 2.5},
            "optimizer: expected gradient_accumulation_steps between 2 and 2147483647, got 2.5",
        ),
        (
            {"gradient_accumulation_steps": True},
            "optimizer: expected gradient_accumulation_steps between 2 and 2147483647, got True",
        ),
        (
            {"excluded_words": [""]},
            "exclude_from_weight_decay: expected at most 10000 words, got ['']",
        ),
        (
            {"excluded_words": ("x" * 98,) * (MAX_WORDS + 1)},
            f"exclude_from_weight_decay: expected at most 10000 words, got ('{'x' * 98}",
        ),
        (
            {"excluded_names": "bias"},
            "exclude_from_weight_decay: expected at most 10000 words, got bias",
        ),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RuleOptions(**arguments)  # type: ignore[arg-type]
    assert caught.value.message == message


def test_variables_are_excluded_by_name_or_by_a_word_in_it() -> None:
    options = RuleOptions(excluded_names=("w",), excluded_words=("bias", "norm"))
    assert [name for name in ("w", "w2", "dense/bias", "batchnorm") if options.excludes(name)] == [
        "w",
        "dense/bias",
        "batchnorm",
    ]
    assert not options.excludes_any  # there is no decay
    assert RuleOptions(weight_decay=0.1, excluded_names=("w",)).excludes_any
    assert not RuleOptions(weight_decay=0.1).excludes_any


def test_every_rule_is_in_the_table_of_the_tests() -> None:
    assert {rule.name for rule in RULES.values()} == set(rules.RULES)


@for_each("rule", RULES)
def test_survives_the_wire(rule: str) -> None:
    made = RULES[rule]
    config = msgpack.decode(msgpack.encode(made.to_config()))
    rebuilt = rule_from_config(config)
    assert type(rebuilt) is type(made)
    assert rebuilt.to_config() == made.to_config()
    assert rebuilt.options == made.options
    assert rebuilt.slot_names() == made.slot_names()


def test_options_travel_with_the_rule() -> None:
    options = RuleOptions(0.5, None, None, 2.0, 4, ("a",), ("b", "c"))
    config = msgpack.decode(msgpack.encode(SGD().with_options(options).to_config()))
    assert config["weight_decay"] == 0.5
    assert config["gradient_accumulation_steps"] == 4
    assert rule_from_config(config).options == options


NAMES = "sgd, adam, adamax, nadam, lion, adagrad, adadelta, rmsprop, ftrl, lamb"


@for_each(
    "config, message",
    [
        (None, "expected the config of an optimizer, got None"),
        ({"rule": 1}, "expected the config of an optimizer, got {.rule.: 1}"),
        ({"rule": "lbfgs"}, f"unknown optimizer 'lbfgs'\nhint: use one of {NAMES}"),
        ({"rule": "sgd", "lr": 1}, r"sgd: expected the arguments \[.*\], got \['lr'\]"),
        (SGD().to_config() | {"learning_rate": 0.1}, "expected the config of a schedule, got 0.1"),
        (SGD().to_config() | {"momentum": 2}, "sgd: expected momentum between 0 and 1, got 2"),
        (SGD().to_config() | {"momentum": None}, "sgd: momentum: expected a number, got None"),
        (SGD().to_config() | {"nesterov": 1}, "sgd: expected nesterov to be True or False, got 1"),
        (SGD().to_config() | {"weight_decay": -1}, "expected weight_decay between 0 and inf"),
        (SGD().to_config() | {"excluded_words": "w"}, "exclude_from_weight_decay: expected at"),
        (Adam().to_config() | {"beta_1": 1}, r"adam: expected beta_1 between 0 and 0\.99.*, got 1"),
        (Adam().to_config() | {"beta_2": -1}, "adam: expected beta_2 between 0 and"),
        (Adam().to_config() | {"epsilon": -1}, "adam: expected epsilon between 0 and inf"),
        (Adam().to_config() | {"amsgrad": ""}, "adam: expected amsgrad to be True or False"),
        (Lion().to_config() | {"beta_1": 0}, "lion: expected beta_1 between 5e-324 and 1, got 0"),
        (
            Adagrad().to_config() | {"initial_accumulator_value": -1},
            "adagrad: expected initial_accumulator_value between 0 and inf, got -1",
        ),
        (
            Ftrl().to_config() | {"learning_rate_power": 0.5},
            "ftrl: expected learning_rate_power between -inf and 0, got 0.5",
        ),
        (Ftrl().to_config() | {"beta": -1}, "ftrl: expected beta between 0 and inf, got -1"),
    ],
)
def test_what_is_no_config_is_refused(config: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rule_from_config(config)


# Those of plugins.


@pytest.fixture
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        own_rules.register()
        yield


@pytest.mark.usefixtures("registry")
def test_what_is_registered_is_listed_in_order_and_survives_the_wire() -> None:
    rule = own_rules.Momentum(own_rules.Halving(0.5), momentum=0.25)
    config = msgpack.decode(msgpack.encode(rule.to_config()))
    rebuilt = rule_from_config(config)
    assert type(rebuilt) is own_rules.Momentum
    assert rebuilt.to_config() == config
    assert registered_in(rebuilt) == registered()
    assert own_rules.Momentum(most=-3).most == -3.0  # it has no range
    assert registered() == [("rule", "tests.momentum", 1), ("schedule", "Halving", 1)]
    assert registered_in(SGD(0.1)) == []
    assert registered_in(SGD(own_rules.Halving(0.1))) == [("schedule", "Halving", 1)]


@pytest.mark.usefixtures("registry")
def test_one_name_is_of_one_class() -> None:
    register(own_rules.Momentum)
    with pytest.raises(ConfigurationError, match=r"'tests\.momentum' of .* by own_rules"):
        register(type("Other", (own_rules.Momentum,), {}))


@for_each(
    "config, unknown",
    [
        (None, ""),
        ({"rule": 3}, ""),
        (SGD().to_config(), ""),
        ({"rule": "mine"}, "update rule 'mine'"),
        (SGD().to_config() | {"learning_rate": {"kind": "Mine"}}, "schedule 'Mine'"),
    ],
)
def test_names_what_is_not_known(config: object, unknown: str) -> None:
    assert unknown_in(config) == unknown


EACH, ALL = RuleOptions(clipnorm=5.0), RuleOptions(global_clipnorm=5.0)


def test_without_a_limit_the_gradients_are_returned_as_they_are() -> None:
    gradients = [np.full(3, 1e30, np.float32), IndexedSlices(np.ones((1, 2)), [0])]
    clipped = clipped_by_norm(gradients, [0, 1], RuleOptions(clipvalue=1.0))
    assert all(a is b for a, b in zip(clipped, gradients, strict=True))


def test_each_variable_is_shortened_by_itself_and_no_array_is_changed() -> None:
    long, short = np.array([6.0, 8.0], np.float32), np.array([3.0, 4.0], np.float32)
    clipped = clipped_by_norm([long, short], [0, 1], EACH)
    assert clipped[0].tolist() == [3, 4]
    assert clipped[1] is short
    assert long.tolist() == [6, 8]


def test_the_global_norm_is_of_all_gradients_of_a_push() -> None:
    clipped = clipped_by_norm([np.array([[6.0]]), np.array([8.0, 0.0])], [0, 1], ALL)
    assert [gradient.tolist() for gradient in clipped] == [[[3.0]], [4.0, 0.0]]
    short = np.array([3.0, 4.0])
    assert clipped_by_norm([short], [0], ALL)[0] is short


def test_shards_of_one_variable_have_one_norm() -> None:
    clipped = clipped_by_norm([np.array([6.0]), np.array([8.0]), np.array([4.0])], [0, 0, 1], EACH)
    assert [gradient.tolist() for gradient in clipped] == [[3.0], [4.0], [4.0]]


def test_rows_that_are_named_twice_count_as_their_sum() -> None:
    rows = IndexedSlices(np.array([[1.0, 4.0], [8.0, 0.0], [5.0, -4.0]]), [3, 1, 3], (9, 2))
    (clipped,) = clipped_by_norm([rows], [0], EACH)
    assert isinstance(clipped, IndexedSlices)
    assert clipped.indices.tolist() == [1, 3]
    assert clipped.values.tolist() == [[4.0, 0.0], [3.0, 0.0]]
    assert clipped.dense_shape == (9, 2)


def test_dense_gradients_and_rows_share_a_global_norm() -> None:
    rows = IndexedSlices(np.array([[8.0]]), [3])
    dense, clipped = clipped_by_norm([np.array([6.0]), rows], [0, 1], ALL)
    assert isinstance(clipped, IndexedSlices)
    assert (dense.tolist(), clipped.values.tolist()) == ([3.0], [[4.0]])


@for_each("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_dtype_stays_and_squares_do_not_overflow(dtype: object) -> None:
    long = np.full((2, 2), 1000.0, dtype)  # type: ignore[call-overload]
    for options in (EACH, ALL):
        (clipped,) = clipped_by_norm([long], [0], options)
        assert isinstance(clipped, np.ndarray)
        assert clipped.dtype == long.dtype
        assert clipped.tolist() == [[2.5, 2.5]] * 2


def test_any_memory_layout_and_size() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((3, SQUARES_PIECE)).astype(np.float32)
    for gradient in (wide.T, wide[:, ::2], np.zeros((0, 4), np.float32), np.array(7, np.float32)):
        (clipped,) = clipped_by_norm([gradient], [0], EACH)
        norm = np.linalg.norm(gradient.astype(np.float64))
        expected = gradient * min(1.0, 5 / norm) if norm else gradient
        np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def test_norms_that_are_not_finite() -> None:
    infinite, finite = np.array([math.inf, 1.0]), np.array([1.0])
    (one, other) = clipped_by_norm([infinite, finite], [0, 1], EACH)
    np.testing.assert_array_equal(one, [math.nan, 0.0])
    assert other is finite
    for bad in (infinite, np.array([math.nan])):
        for clipped in clipped_by_norm([bad, finite], [0, 1], ALL):
            assert np.isnan(clipped).all()


def test_a_sum_of_squares_has_the_same_bits_on_every_cpu() -> None:
    program = (
        "import numpy as np; from psync.numerics.sums import SQUARES_PIECE, sum_of_squares;"
        "values = np.random.default_rng(0).standard_normal(3 * SQUARES_PIECE + 7);"
        "print([sum_of_squares(values.astype(kind)).hex() for kind in 'fd'])"
    )
    printed = set()
    for core in ("Prescott", "Haswell", "SkylakeX"):  # an unknown name is taken for the CPU's own
        environ = {**os.environ, "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        printed.add(run.stdout)
    assert len(printed) == 1, printed


def test_a_sum_of_squares_does_not_depend_on_where_an_array_is_cut() -> None:
    array = np.random.default_rng(2).standard_normal(5 * SQUARES_PIECE + 7)
    total = 0.0
    for first, stop in (
        (0, 2 * SQUARES_PIECE),
        (2 * SQUARES_PIECE, 3 * SQUARES_PIECE),
        (3 * SQUARES_PIECE, None),
    ):
        total = sum_of_squares(array[first:stop], total)
    assert total == sum_of_squares(array)


@for_each("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_is_scaled_keeps_its_dtype_and_is_the_same_array_at_one(dtype: object) -> None:
    array = np.array([3.0, -0.0, np.inf], dtype)  # type: ignore[call-overload]
    assert scaled(array, 1.0) is array
    assert scaled(array, 0.5).dtype == array.dtype
    assert str(scaled(array, 0.0).tolist()) == "[0.0, -0.0, nan]"
