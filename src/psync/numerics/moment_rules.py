"""Update rules that follow a moving average of the gradient: Adam and its relatives, and Lion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from psync.numerics.update_rule import Arrays, Coefficients, Part, UpdateRule, within

BELOW_ONE = math.nextafter(1.0, 0.0)
"""The highest decay of a moment whose bias can be corrected: 1 would divide by zero."""


def move(
    average: np.ndarray, value: np.ndarray, beta: float, out: np.ndarray, temp: np.ndarray
) -> None:
    """Compute ``average + (value - average) * (1 - beta)``; ``temp`` may be ``value``."""
    np.subtract(value, average, out=temp)
    np.multiply(temp, 1 - beta, out=temp)
    np.add(average, temp, out=out)


@dataclass(eq=False)
class MomentRule(UpdateRule):
    """Base of the rules with two moments and an epsilon.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number of at least 0.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    slots = ("m", "v")
    beta_1: float = within(0.9, 0, BELOW_ONE)
    beta_2: float = within(0.999, 0, BELOW_ONE)
    epsilon: float = within(1e-7)

    def _move_moments(
        self, grad: np.ndarray, slots: Arrays, out_slots: Arrays, temp: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute and return both moments."""
        move(slots[0], grad, self.beta_1, out_slots[0], temp)
        np.multiply(grad, grad, out=temp)
        move(slots[1], temp, self.beta_2, out_slots[1], temp)
        return out_slots[0], out_slots[1]


@dataclass(eq=False)
class Adam(MomentRule):
    """Adaptive moment estimation.

    ``m += (g - m) * (1 - beta_1)``, ``v += (g * g - v) * (1 - beta_2)``, with ``amsgrad``
    ``vhat = max(vhat, v)``, otherwise ``vhat = v``; then
    ``w -= alpha * m / (sqrt(vhat) + epsilon)``
    where ``alpha = lr * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t)``.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Number added to the root of the uncorrected second moment (the paper's "epsilon
            hat").
        amsgrad: Whether to divide by the largest second moment so far.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: Kingma and Ba, 2014, section 2; Reddi et al., 2018; ``keras.optimizers.Adam``.
    """

    name = "adam"
    amsgrad: bool = False

    def own_slots(self) -> tuple[str, ...]:
        """Return ("m", "v"), and "vhat" with amsgrad."""
        return ("m", "v", "vhat") if self.amsgrad else ("m", "v")

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        return (rate * math.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t),)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (alpha,) = coefficients
        a, b = scratch[:2]
        m, v = self._move_moments(grad, slots, out_slots, a)
        if self.amsgrad:
            np.maximum(slots[2], v, out=out_slots[2])
            v = out_slots[2]
        np.sqrt(v, out=a)
        np.add(a, self.epsilon, out=a)
        np.multiply(m, alpha, out=b)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


class Adamax(MomentRule):
    """Adam with the infinity norm in place of the second moment.

    ``m += (g - m) * (1 - beta_1)``, ``u = max(beta_2 * u, |g|)``, and then
    ``w -= lr * m / ((1 - beta_1 ** t) * (u + epsilon))``.

    Args and Raises: See ``MomentRule``.

    Source: Kingma and Ba, 2014, section 7; ``keras.optimizers.Adamax``.
    """

    name = "adamax"
    slots = ("m", "u")

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        return (rate / (1 - self.beta_1**t),)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (alpha,) = coefficients
        a, b = scratch[:2]
        m, u = out_slots
        move(slots[0], grad, self.beta_1, m, a)
        np.absolute(grad, out=a)
        np.multiply(slots[1], self.beta_2, out=u)
        np.maximum(u, a, out=u)
        np.add(u, self.epsilon, out=a)
        np.multiply(m, alpha, out=b)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


_DECAY = 0.96
_MOMENTUMS = [1 - 0.5 * _DECAY**t for t in range(1, 1001)]  # the later ones are 1, as doubles
_PRODUCTS = list(accumulate(_MOMENTUMS, mul))


def momentum_product(beta_1: float, t: int) -> float:
    """Return the product of Nadam's momentums ``beta_1 * (1 - 0.5 * 0.96 ** i)`` for i from 1 to t.

    Keras keeps it as a variable. Here it is a function of t, so a ps that missed updates has it
    too.
    """
    return float(beta_1**t * _PRODUCTS[min(t, len(_PRODUCTS)) - 1])


class Nadam(MomentRule):
    """Adam with Nesterov's momentum.

    Moments ``m`` and ``v`` are Adam's. ``mu_t = beta_1 * (1 - 0.5 * 0.96 ** t)``, and ``P_t`` is
    the product of ``mu_1`` to ``mu_t``. Then
    ``m_hat = mu_{t+1} * m / (1 - P_{t+1}) + (1 - mu_t) * g / (1 - P_t)`` and
    ``w -= lr * m_hat / (sqrt(v / (1 - beta_2 ** t)) + epsilon)``.

    Args and Raises: See ``MomentRule``.

    Source: Dozat, 2016; ``keras.optimizers.Nadam``.
    """

    name = "nadam"

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        momentum, next_momentum = (self.beta_1 * (1 - 0.5 * _DECAY**i) for i in (t, t + 1))
        product, next_product = (momentum_product(self.beta_1, i) for i in (t, t + 1))
        of_average = rate * next_momentum / (1 - next_product)
        of_gradient = rate * (1 - momentum) / (1 - product)
        return of_average, of_gradient, 1 - self.beta_2**t

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        of_average, of_gradient, correction = coefficients
        a, b = scratch[:2]
        m, v = self._move_moments(grad, slots, out_slots, a)
        np.multiply(m, of_average, out=a)
        np.multiply(grad, of_gradient, out=b)
        np.add(a, b, out=b)
        np.divide(v, correction, out=a)
        np.sqrt(a, out=a)
        np.add(a, self.epsilon, out=a)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


@dataclass(eq=False)
class Lion(UpdateRule):
    """Updates by the sign of a momentum, so that all elements move by the learning rate.

    ``w -= lr * sign(beta_1 * m + (1 - beta_1) * g)``, then ``m = beta_2 * m + (1 - beta_2) * g``.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Weight of the momentum in the direction, above 0 and at most 1.
        beta_2: Decay of the momentum, in [0, 1].

    Raises:
        ConfigurationError: An argument is out of range.

    Source: Chen et al., 2023; ``keras.optimizers.Lion``.
    """

    name = "lion"
    slots = ("momentum",)
    beta_1: float = within(0.9, math.ulp(0.0), 1)
    beta_2: float = within(0.99, 0, 1)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (rate,) = coefficients
        a, b = scratch[:2]
        np.multiply(slots[0], self.beta_1, out=a)
        np.multiply(grad, 1 - self.beta_1, out=b)
        np.add(a, b, out=a)
        np.sign(a, out=a)
        np.multiply(a, rate, out=a)
        np.subtract(param, a, out=out_param)
        np.multiply(slots[0], self.beta_2, out=a)
        np.multiply(grad, 1 - self.beta_2, out=b)
        np.add(a, b, out=out_slots[0])
