"""Rules that scale by the gradients so far: their formulas in float64, and what is special.

Their laws are in test_update_rules.py; that they compute what Keras does in test_optimizers_golden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psync.numerics.memory import Scratch
from psync.numerics.rules import Adadelta, Adagrad, Ftrl, RMSprop, power
from psync.schedules import PolynomialDecay
from rule_table import RULES, Slots, gradients, start

Formula = Callable[[np.ndarray, np.ndarray, Slots], np.ndarray]


# As a textbook writes it, in float64. Slots are changed in place.


def adagrad(w: np.ndarray, g: np.ndarray, slots: Slots) -> np.ndarray:
    slots[0] += g**2
    return w - 0.1 * g / np.sqrt(slots[0] + 1e-7)


def adadelta(w: np.ndarray, g: np.ndarray, slots: Slots) -> np.ndarray:
    squares, steps = slots
    squares[:] = 0.95 * squares + 0.05 * g**2
    delta = np.sqrt(steps + 1e-7) / np.sqrt(squares + 1e-7) * g
    steps[:] = 0.95 * steps + 0.05 * delta**2
    return w - delta


def rmsprop(w: np.ndarray, g: np.ndarray, slots: Slots) -> np.ndarray:
    slots[0][:] = 0.9 * slots[0] + 0.1 * g**2
    return w - 0.01 * g / np.sqrt(slots[0] + 1e-7)


def rmsprop_both(w: np.ndarray, g: np.ndarray, slots: Slots) -> np.ndarray:
    velocity, momentum, average = slots
    velocity[:] = 0.9 * velocity + 0.1 * g**2
    average[:] = 0.9 * average + 0.1 * g
    momentum[:] = 0.5 * momentum + 0.01 * g / np.sqrt(velocity - average**2 + 1e-7)
    return w - momentum


def ftrl(w: np.ndarray, g: np.ndarray, slots: Slots) -> np.ndarray:
    """Algorithm 1 of McMahan et al.: ``linear`` is their z, ``accumulator`` their n."""
    accumulator, linear = slots
    sigma = (np.sqrt(accumulator + g**2) - np.sqrt(accumulator)) / 0.1
    linear += g - sigma * w
    accumulator += g**2
    shrunk = np.where(abs(linear) <= 0.1, 0.0, linear - np.sign(linear) * 0.1)
    return -shrunk / (np.sqrt(accumulator) / 0.1)


@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        ("adagrad", adagrad),
        ("adadelta", adadelta),
        ("rmsprop", rmsprop),
        ("rmsprop, both", rmsprop_both),
        ("ftrl", ftrl),
    ],
)
def test_twenty_steps_agree_with_the_textbook(rule: str, formula: Formula) -> None:
    made, kind = RULES[rule], np.dtype(np.float64)
    got, got_slots = start(made, 1000, kind)
    expected, slots = got.copy(), [slot.copy() for slot in got_slots]
    for step, grad in enumerate(gradients(1000, kind, 20)):
        expected = formula(expected, grad, slots)
        made.apply(got, grad, got_slots, got, got_slots, step, Scratch())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
    for got_slot, slot in zip(got_slots, slots, strict=True):
        np.testing.assert_allclose(got_slot, slot, rtol=0, atol=1e-11)


def test_accumulators_begin_where_they_are_told_to() -> None:
    assert Adagrad(initial_accumulator_value=0.25).initial_slot("accumulator") == 0.25
    assert Adagrad().initial_slot("accumulator") == 0.1
    assert Ftrl(initial_accumulator_value=0.25).initial_slot("accumulator") == 0.25
    assert Ftrl().initial_slot("linear") == 0
    assert RMSprop().initial_slot("velocity") == 0


def test_ftrl_keeps_elements_with_small_gradients_at_exactly_zero() -> None:
    param, slots = np.zeros(3), [np.full(3, 0.1), np.zeros(3)]
    rule = Ftrl(0.5, l1_regularization_strength=1.0)
    rule.apply(param, np.array([0.9, -0.9, 1.5]), slots, param, slots, 0, Scratch())
    assert param[:2].tolist() == [0, 0]
    assert param[2] < 0


def test_ftrl_at_a_learning_rate_of_zero_moves_nothing() -> None:
    """As at the end of a decay; the formula divides by it."""
    rule = Ftrl(PolynomialDecay(0.5, 3, end_learning_rate=0.0), beta=1.0)
    param, slots = np.ones(3), [np.full(3, 0.1), np.full(3, 2.0)]
    out, out_slots = np.empty(3), [np.empty(3), np.empty(3)]
    rule.apply(param, np.ones(3), slots, out, out_slots, 3, Scratch())
    assert out.tolist() == param.tolist()
    assert [slot.tolist() for slot in out_slots] == [slot.tolist() for slot in slots]


def test_ftrl_makes_zero_of_what_never_had_a_gradient() -> None:
    """Where the accumulator begins at 0, the formula is 0 / 0."""
    param, slots = np.ones(2), [np.zeros(2), np.zeros(2)]
    rule = Ftrl(0.5, initial_accumulator_value=0.0)
    rule.apply(param, np.array([0.0, 1.0]), slots, param, slots, 0, Scratch())
    assert param[0] == 0
    assert np.isfinite(param[1])


def test_centered_rmsprop_survives_gradients_that_are_all_alike() -> None:
    """Their variance is 0, but for rounding, which may make it negative."""
    param, rule = np.ones(1000, np.float32), RMSprop(0.01, centered=True)
    slots = [np.zeros(1000, np.float32), np.zeros(1000, np.float32)]
    grad = np.linspace(100, 2000, 1000, dtype=np.float32)
    for step in range(200):
        rule.apply(param, grad, slots, param, slots, step, Scratch())
    assert np.isfinite(param).all()


def test_slot_names() -> None:
    assert Adagrad().slot_names() == ("accumulator",)
    assert Adadelta().slot_names() == ("accumulated_grad", "accumulated_delta_var")
    assert RMSprop().slot_names() == ("velocity",)
    assert RMSprop(momentum=0.5).slot_names() == ("velocity", "momentum")
    assert RMSprop(centered=True).slot_names() == ("velocity", "average_gradient")
    assert Ftrl().slot_names() == ("accumulator", "linear")


@pytest.mark.parametrize("exponent", [0.1, 0.7, 1.0, 2.5])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1.2e-7), (np.float64, 3e-14)])
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
