"""Rules with moments: their formulas in float64, and what is special about each.

Their laws are in test_update_rules.py; that they compute what Keras does in test_optimizers_golden.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from psync.numerics.memory import Scratch
from psync.numerics.rules import Adam, Adamax, Lion, Nadam, momentum_product
from rule_table import RULES, Slots, gradients, start

Formula = Callable[[np.ndarray, np.ndarray, Slots, int], np.ndarray]


# As a textbook writes it, in float64. Slots are changed in place; t is the number of the update.


def moments(g: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    m, v = slots[:2]
    m[:] = 0.9 * m + 0.1 * g
    v[:] = 0.999 * v + 0.001 * g**2
    return m, v


def adam(w: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    """Kingma and Ba's algorithm 1 with epsilon hat (their section 2, last paragraph)."""
    m, v = moments(g, slots)
    rate = 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * m / (np.sqrt(v) + 1e-7)


def amsgrad(w: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    m, v = moments(g, slots)
    slots[2][:] = np.maximum(slots[2], v)
    rate = 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * m / (np.sqrt(slots[2]) + 1e-7)


def adamax(w: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    m, u = slots
    m[:] = 0.9 * m + 0.1 * g
    u[:] = np.maximum(0.999 * u, abs(g))
    return w - 0.01 / (1 - 0.9**t) * m / (u + 1e-7)


def nadam(w: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    m, v = moments(g, slots)
    mu = [0.9 * (1 - 0.5 * 0.96**i) for i in range(1, t + 2)]
    m_hat = mu[t] * m / (1 - math.prod(mu)) + (1 - mu[t - 1]) * g / (1 - math.prod(mu[:t]))
    return w - 0.01 * m_hat / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)


def lion(w: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    (m,) = slots
    direction = np.sign(0.9 * m + (1 - 0.9) * g)
    m[:] = 0.99 * m + (1 - 0.99) * g
    return w - 0.01 * direction


@pytest.mark.parametrize("formula", [adam, amsgrad, adamax, nadam, lion])
def test_twenty_steps_agree_with_the_textbook(formula: Formula) -> None:
    rule, kind = RULES[formula.__name__], np.dtype(np.float64)
    got, got_slots = start(rule, 1000, kind)
    expected, slots = got.copy(), [slot.copy() for slot in got_slots]
    for step, grad in enumerate(gradients(1000, kind, 20)):
        expected = formula(expected, grad, slots, step + 1)
        rule.apply(got, grad, got_slots, got, got_slots, step, Scratch())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
    for got_slot, slot in zip(got_slots, slots, strict=True):
        np.testing.assert_allclose(got_slot, slot, rtol=0, atol=1e-13)


def test_first_adam_step_has_the_size_of_the_learning_rate() -> None:
    param = np.zeros(2, np.float64)
    slots = [np.zeros(2), np.zeros(2)]
    Adam(0.5, epsilon=0).apply(param, np.array([1e-3, -1e3]), slots, param, slots, 0, Scratch())
    np.testing.assert_allclose(param, [-0.5, 0.5])


def test_every_lion_step_has_the_size_of_the_learning_rate_or_none() -> None:
    param, slots = np.zeros(3), [np.zeros(3)]
    Lion(0.5).apply(param, np.array([1e-9, -1e9, 0.0]), slots, param, slots, 0, Scratch())
    assert param.tolist() == [-0.5, 0.5, 0]


@pytest.mark.parametrize("t", [1, 2, 17, 999, 1000, 1001, 1500])
def test_the_product_of_momentums_is_that_of_all_of_them(t: int) -> None:
    product = math.prod(0.999 * (1 - 0.5 * 0.96**i) for i in range(1, t + 1))
    assert momentum_product(0.999, t) == pytest.approx(product, rel=1e-12)


def test_nadam_is_known_at_any_step() -> None:
    """Without having made those before: a ps may have missed them."""
    param, slots = np.ones(1), [np.zeros(1), np.zeros(1)]
    Nadam(0.5).apply(param, np.ones(1), slots, param, slots, 10**12, Scratch())
    assert np.isfinite(param).all()


def test_slot_names() -> None:
    assert Adam().slot_names() == ("m", "v")
    assert Adam(amsgrad=True).slot_names() == ("m", "v", "vhat")
    assert Adamax().slot_names() == ("m", "u")
    assert Nadam().slot_names() == ("m", "v")
    assert Lion().slot_names() == ("momentum",)
