"""Update rules with a step size for each element: Adagrad, Adadelta, RMSprop, Ftrl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from psync.numerics.update_rule import Arrays, Coefficients, Part, UpdateRule, within


def decay_towards(
    average: np.ndarray, value: np.ndarray, rho: float, out: np.ndarray, temp: np.ndarray
) -> None:
    """Compute ``rho * average + (1 - rho) * value``; ``temp`` may be ``value``."""
    np.multiply(value, 1 - rho, out=temp)
    np.multiply(average, rho, out=out)
    np.add(out, temp, out=out)


_LN2 = 0.6931471805599453
# Coefficients, the highest power first: of log2((1 + q) / (1 - q)) / q in q * q, and of 2 ** x.
_LOG2 = [2 / ((2 * k + 1) * _LN2) for k in reversed(range(12))]
_EXP2 = [*accumulate(range(1, 15), lambda term, k: term * _LN2 / k, initial=1.0)][::-1]


def power(base: np.ndarray, exponent: float, out: np.ndarray) -> None:
    """Compute ``base ** exponent`` in float64 for numbers that are not negative.

    It uses elementary operations, whose bits are the same on every CPU. Those of ``np.power``
    differ, and so would a backup ps on another machine. Rounding errors are below those of
    ``np.power`` for float32, and a few units in the last place for float64.

    Args:
        base: Array, 1-D, floating.
        exponent: Number of at least 0.
        out: Array of the same shape and dtype.
    """
    if not exponent:
        out.fill(1.0)
        return
    for start in range(0, base.size, _POWER_CHUNK):
        part = slice(start, start + _POWER_CHUNK)
        wide = base[part].astype(np.float64)
        mantissa, of_two = np.frexp(wide)
        below = mantissa < 0.7071067811865476
        mantissa[below] *= 2  # now it lies around 1, where the series is short
        q = (mantissa - 1) / (mantissa + 1)
        exponents = exponent * (q * _polynomial(_LOG2, q * q) + (of_two - below))
        np.clip(exponents, -2000, 2000, out=exponents)  # beyond: 0 and infinity
        whole = np.rint(exponents)
        powers = np.ldexp(_polynomial(_EXP2, exponents - whole), whole.astype(np.int32))
        out[part] = np.where((wide > 0) & (wide < np.inf), powers, wide)


_POWER_CHUNK = 1 << 13  # elements: their temporary arrays stay in the CPU's cache


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        np.multiply(total, x, out=total)
        np.add(total, coefficient, out=total)
    return total


@dataclass(eq=False)
class Adagrad(UpdateRule):
    """Gradient descent scaled by the root of the sum of squared gradients.

    ``accumulator += g * g`` and ``w -= lr * g / sqrt(accumulator + epsilon)``.

    Args:
        learning_rate: A number or a schedule.
        initial_accumulator_value: First value of the accumulator, at least 0.
        epsilon: Number of at least 0.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: Duchi et al., 2011; ``keras.optimizers.Adagrad``.
    """

    name = "adagrad"
    slots = ("accumulator",)
    initial_accumulator_value: float = within(0.1)
    epsilon: float = within(1e-7)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (rate,) = coefficients
        a, b = scratch[:2]
        accumulator = out_slots[0]
        np.multiply(grad, grad, out=a)
        np.add(slots[0], a, out=accumulator)
        np.add(accumulator, self.epsilon, out=a)
        np.sqrt(a, out=a)
        np.multiply(grad, rate, out=b)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


@dataclass(eq=False)
class Adadelta(UpdateRule):
    """Gradient descent scaled by moving averages of squared gradients and squared updates.

    ``accumulated_grad = rho * accumulated_grad + (1 - rho) * g * g``,
    ``delta = sqrt(accumulated_delta_var + epsilon) * g / sqrt(accumulated_grad + epsilon)``,
    ``accumulated_delta_var = rho * accumulated_delta_var + (1 - rho) * delta * delta``, and
    ``w -= lr * delta``. Updates have the unit of the parameter.

    Args:
        learning_rate: A number or a schedule; the paper uses 1.
        rho: Decay of both averages, in [0, 1].
        epsilon: Number of at least 0.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: Zeiler, 2012; ``keras.optimizers.Adadelta``.
    """

    name = "adadelta"
    slots = ("accumulated_grad", "accumulated_delta_var")
    rho: float = within(0.95, 0, 1)
    epsilon: float = within(1e-7)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (rate,) = coefficients
        a, delta = scratch[:2]
        squares = out_slots[0]
        np.multiply(grad, grad, out=a)
        decay_towards(slots[0], a, self.rho, squares, a)
        np.add(slots[1], self.epsilon, out=delta)
        np.sqrt(delta, out=delta)
        np.multiply(delta, grad, out=delta)
        np.add(squares, self.epsilon, out=a)
        np.sqrt(a, out=a)
        np.divide(delta, a, out=delta)
        np.multiply(delta, delta, out=a)
        decay_towards(slots[1], a, self.rho, out_slots[1], a)
        np.multiply(delta, rate, out=delta)
        np.subtract(param, delta, out=out_param)


@dataclass(eq=False)
class RMSprop(UpdateRule):
    """Gradient descent scaled by the root of a moving average of squared gradients.

    ``velocity = rho * velocity + (1 - rho) * g * g``; ``d = velocity``, or if ``centered``
    ``average_gradient = rho * average_gradient + (1 - rho) * g`` and
    ``d = velocity - average_gradient ** 2``. Then ``step = lr * g / sqrt(d + epsilon)``; and
    ``w -= step``, or ``m = momentum * m + step`` and ``w -= m``.

    Args:
        learning_rate: A number or a schedule.
        rho: Decay of the averages, in [0, 1].
        momentum: Number in [0, 1]; 0 needs no slot.
        epsilon: Number of at least 0.
        centered: Whether to divide by the standard deviation of gradients instead of their size.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: Hinton, 2012; Graves, 2013, for the centered form; ``keras.optimizers.RMSprop``.
    """

    name = "rmsprop"
    rho: float = within(0.9, 0, 1)
    momentum: float = within(0.0, 0, 1)
    epsilon: float = within(1e-7)
    centered: bool = False

    def own_slots(self) -> tuple[str, ...]:
        """Return "velocity", "momentum" if momentum is not 0, "average_gradient" if centered."""
        wanted = (True, self.momentum, self.centered)
        names = ("velocity", "momentum", "average_gradient")
        return tuple(name for name, needed in zip(names, wanted, strict=True) if needed)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (rate,) = coefficients
        a, step = scratch[:2]
        velocity = out_slots[0]
        np.multiply(grad, grad, out=a)
        decay_towards(slots[0], a, self.rho, velocity, a)
        if self.centered:
            average = out_slots[-1]
            decay_towards(slots[-1], grad, self.rho, average, a)
            np.multiply(average, average, out=a)
            np.subtract(velocity, a, out=a)
            np.maximum(a, 0, out=a)  # a variance, which only rounding makes negative
            np.add(a, self.epsilon, out=a)
        else:
            np.add(velocity, self.epsilon, out=a)
        np.sqrt(a, out=a)
        np.multiply(grad, rate, out=step)
        np.divide(step, a, out=step)
        if self.momentum:
            momentum = out_slots[1]
            np.multiply(slots[1], self.momentum, out=momentum)
            np.add(momentum, step, out=momentum)
            step = momentum
        np.subtract(param, step, out=out_param)


@dataclass(eq=False)
class Ftrl(UpdateRule):
    """Follow the regularized leader, for sparse models: elements with small gradients stay 0.

    With ``p = -learning_rate_power``, and the strengths as ``l1``, ``l2`` and ``shrinkage``:
    ``new = accumulator + g * g``,
    ``linear += g + 2 * shrinkage * w - (new ** p - accumulator ** p) / lr * w``,
    ``w = (clip(linear, -l1, l1) - linear) / (new ** p / lr + 2 * l2 + beta / lr)``, and
    ``accumulator = new``. At a learning rate of 0 nothing changes. Elements that never had a
    gradient are 0.

    Args:
        learning_rate: A number or a schedule.
        learning_rate_power: Number of at most 0; at 0 the learning rate does not decay.
        initial_accumulator_value: Number of at least 0.
        l1_regularization_strength: Number of at least 0.
        l2_regularization_strength: Number of at least 0.
        l2_shrinkage_regularization_strength: Number of at least 0; a penalty on the size of the
            parameter.
        beta: Number of at least 0; the paper's beta.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: McMahan et al., 2013; ``keras.optimizers.Ftrl``, which gives NaN in the last two cases.
    """

    name = "ftrl"
    slots = ("accumulator", "linear")
    temporaries = 3
    learning_rate_power: float = within(-0.5, -math.inf, 0)
    initial_accumulator_value: float = within(0.1)
    l1_regularization_strength: float = within(0.0)
    l2_regularization_strength: float = within(0.0)
    l2_shrinkage_regularization_strength: float = within(0.0)
    beta: float = within(0.0)

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        regularization = self.l2_regularization_strength + self.beta / (2 * rate) if rate else 0.0
        return rate, 2 * regularization

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        rate, l2 = coefficients
        accumulator, linear = out_slots
        if not rate:
            for value, out in zip((param, *slots), (out_param, *out_slots), strict=True):
                np.copyto(out, value)
            return
        new_power, change, a = scratch[:3]
        np.multiply(grad, grad, out=a)
        self._power(slots[0], change)
        np.add(slots[0], a, out=accumulator)
        self._power(accumulator, new_power)
        np.subtract(new_power, change, out=change)
        np.divide(change, rate, out=change)
        np.multiply(change, param, out=change)
        np.multiply(param, 2 * self.l2_shrinkage_regularization_strength, out=a)
        np.add(grad, a, out=a)
        np.subtract(a, change, out=a)
        np.add(slots[1], a, out=linear)
        np.maximum(linear, -self.l1_regularization_strength, out=a)
        np.minimum(a, self.l1_regularization_strength, out=a)
        np.subtract(a, linear, out=a)
        np.divide(new_power, rate, out=new_power)
        np.add(new_power, l2, out=new_power)
        np.maximum(new_power, np.finfo(new_power.dtype).tiny, out=new_power)
        np.divide(a, new_power, out=out_param)

    def _power(self, accumulator: np.ndarray, out: np.ndarray) -> None:
        if self.learning_rate_power == -0.5:
            np.sqrt(accumulator, out=out)
        else:
            power(accumulator, -self.learning_rate_power, out)
