"""Update rules: the mathematics of optimizers, applied to one piece of a parameter at a time.

A rule is pure: it holds only hyper-parameters. The store owns the arrays and decides when a rule
is applied. ``to_config`` returns all data that a rule needs to travel.

Formulas, arguments and defaults are those of Keras 3. Numbers that are the same for all elements
are an exception: they are computed in double precision, whatever the dtype of the parameter.

All arrays of one ``apply`` are 1-D, of equal length and elementwise related, so the same call
serves a block of a dense shard and a gathered set of rows of a sparse one. An update runs in
chunks that stay in the CPU's cache, with ``out=`` everywhere and scratch memory that is
allocated once. Because the work is elementwise, the result does not depend on the chunk's size,
bit for bit.

Precision: float16 and bfloat16 parameters are computed in float32 and rounded once, when they are
stored. Their slots are float32, because a float16 second moment would underflow to 0 below
gradients of 2e-4. float32 and float64 are computed in their own precision, with coefficients
evaluated in double precision. Integers have no gradient and are refused.

An update needs more than its elements:

    what                                computed by
    learning rate, step t               the ps, which knows the number of pushes before this one
                                        (``store.push_counts``)
    weight_decay, clipvalue             the ps, within the rule: elementwise
    exclude_from_weight_decay           the ps, by the variable's name
    clipnorm, global_clipnorm           the worker, before the push, which has the whole gradient;
                                        of the mean of a synchronous step all ps tasks together
    gradient_accumulation_steps         the ps: a slot, and a count of pushes for each shard
    norms of Lamb                       a ps that has the whole variable; else all ps tasks, in a
                                        round before the push (``MeasurePush``)

Schedules count pushes; Adam's ``t`` and ``iterations`` count updates, as in Keras. Layer-wise rules
and accumulation refuse gradients of some rows.

User-defined rules are subclasses of ``psync.rules.UpdateRule``, a subclass of this one. A new
built-in rule is one subclass with hyper-parameters, slots, ``_coefficients`` and ``_update``; one
name in ``RULES``; and its public handle in ``psync.optimizers``, which documents its arguments. The
tests need a line in ``helpers/rule_table``, and the values of Keras by
``helpers/golden_optimizers``.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Self

import numpy as np

from psync import schedules
from psync.errors import ConfigurationError, ValueMismatchError, check_fits
from psync.numerics.memory import Scratch
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import SQUARES_PIECE, scaled, sum_dtype, sum_of_squares
from psync.schedules import Config, Schedule, as_schedule
from psync.specs import as_number, checked_integer

MAX_WORDS = 10_000
"""Largest number of words that exclude variables from weight decay."""


@dataclass(frozen=True)
class RuleOptions:
    """Arguments that all rules have in common; None turns an option off.

    Args:
        weight_decay: ``w -= learning_rate * weight_decay * w`` before each update ("decoupled").
        clipnorm: Largest norm of a variable's gradient; a larger gradient is scaled down to it.
        global_clipnorm: Largest norm of all gradients of a push, taken as one vector.
        clipvalue: Largest absolute value of an element of a gradient.
        gradient_accumulation_steps: Pushes to a variable whose mean makes one update, at least 2.
        excluded_names: Names of variables without decay.
        excluded_words: Words; variables whose name contains one of them have no decay.

    Raises:
        ConfigurationError: An argument is out of range, or more than one clipping option is given.

    Source: ``keras.optimizers.Optimizer`` of Keras 3.
    """

    weight_decay: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    gradient_accumulation_steps: int | None = None
    excluded_names: tuple[str, ...] = ()
    excluded_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weight_decay is not None:
            self._set("weight_decay", number("optimizer", "weight_decay", self.weight_decay, 0))
        clips = ("clipnorm", "global_clipnorm", "clipvalue")
        given = [name for name in clips if getattr(self, name) is not None]
        if len(given) > 1:
            values = ", ".join(f"{name}={getattr(self, name)}" for name in given)
            raise ConfigurationError(
                f"optimizer: expected at most one of {', '.join(clips)}, got {values}"
            )
        for name in given:
            self._set(name, number("optimizer", name, getattr(self, name), math.ulp(0.0)))
        steps = self.gradient_accumulation_steps
        if steps is not None:
            most = (1 << 31) - 1
            expected = f"optimizer: expected gradient_accumulation_steps between 2 and {most}"
            hint = "leave it out to apply each gradient immediately"
            self._set(
                "gradient_accumulation_steps", checked_integer(expected, steps, 2, most, hint=hint)
            )
        for name in ("excluded_names", "excluded_words"):
            self._set(name, words_of(getattr(self, name)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def excludes_any(self) -> bool:
        """Whether decay depends on the variable."""
        return bool(self.weight_decay and (self.excluded_names or self.excluded_words))

    def excludes(self, variable: str) -> bool:
        """Return whether the variable of this name has no decay."""
        return variable in self.excluded_names or any(
            word in variable for word in self.excluded_words
        )


def number(rule: str, name: str, value: object, minimum: float, maximum: float = math.inf) -> float:
    """Return a number in range as a float.

    Raises:
        ConfigurationError: The value is not such a number; the message begins with ``rule``.
    """
    plain = as_number(f"{rule}: {name}", value)
    expected = f"{rule}: expected {name} between {minimum} and {maximum}"
    check_fits(minimum <= plain <= maximum, expected, plain)
    return float(plain)


def flag(rule: str, name: str, value: object) -> bool:
    """Return a bool. Raises ConfigurationError if ``value`` is not one."""
    check_fits(isinstance(value, bool), f"{rule}: expected {name} to be True or False", value)
    return value is True


def words_of(value: object) -> tuple[str, ...]:
    """Return the given words. Raises ConfigurationError if they are not words, or too many."""
    words: list[Any] = [None]
    if isinstance(value, Iterable) and not isinstance(value, str):
        words = [*value]
    if len(words) > MAX_WORDS or not all(isinstance(word, str) and word for word in words):
        raise ConfigurationError(
            f"exclude_from_weight_decay: expected at most {MAX_WORDS} words, got {str(value)[:100]}"
        )
    return tuple(words)


ACCUMULATOR = "gradient_accumulator"
"""Slot of optimizers that accumulate gradients: their sum since the last update."""


@functools.cache  # dtype.name costs microseconds
def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a parameter of ``dtype`` is computed and its slots are kept.

    Raises:
        ValueMismatchError: ``dtype`` is not a floating one.
    """
    hint = "declare the variable with trainable=False and use assign_add, or make it float32"
    return sum_dtype(dtype, "variables can be optimized", hint)


class RuleRaised(Exception):
    """User code raised in a rule; ``__cause__`` is the original error."""


Arrays = Sequence[np.ndarray]

Coefficients = tuple[float, ...]
"""Inputs of a rule that are the same for all elements."""

Part = tuple[np.ndarray, np.ndarray, Arrays, np.ndarray, Arrays]
"""Arrays of a piece of a parameter:

- the parameter: 1-D, contiguous, floating;
- its gradient, of the same length, and of the parameter's dtype or that of its slots; not changed;
- its slots, of dtype ``slot_dtype(param.dtype)``, one per name of ``own_slots()``;
- for the result: the parameter itself or separate memory;
- for the new slots: the slots themselves or separate memory.
"""


def within(default: float, minimum: float = 0, maximum: float = math.inf) -> Any:
    """Declare a numeric argument of a rule, with its default and its range."""
    return field(default=default, metadata={"range": (minimum, maximum)})


@dataclass(eq=False)
class UpdateRule(ABC):
    """The change of a parameter and its slots by a gradient; fields are arguments and the config.

    Args:
        learning_rate: A number, or a schedule of the number of updates applied so far.
    """

    name: ClassVar[str]  # in configs, and of the optimizer by default
    version: ClassVar[int] = 1  # of the results, where psync's own version does not say it
    takes_norms: ClassVar[bool] = False  # of whole variables: ``Lamb``, which ps tasks measure for
    may_raise: ClassVar[bool] = False  # RuleRaised, from ``apply``: then nothing must have changed
    slots: ClassVar[tuple[str, ...]] = ()  # see ``own_slots``
    temporaries = 2  # scratch arrays that ``_update`` needs, at least 1
    options = RuleOptions()
    learning_rate: Any = 0.001  # a ``Schedule``, once it is set

    def __setattr__(self, name: str, value: Any) -> None:
        # Not after it is made: a user's ``__post_init__`` may be another one.
        super().__setattr__(name, as_schedule(value) if name == "learning_rate" else value)

    def __post_init__(self) -> None:
        for argument in fields(self)[1:]:
            value = getattr(self, argument.name)
            if isinstance(argument.default, bool):
                flag(self.name, argument.name, value)
            else:
                limits = argument.metadata.get("range", (-math.inf,))
                value = number(self.name, argument.name, value, *limits)
            setattr(self, argument.name, value)

    def probe(self) -> Sequence[np.ndarray]:
        """Check a user-defined rule by applying it, and return the results.

        Raises:
            ConfigurationError: The rule fails or violates the requirements of a rule.
        """
        return ()

    def with_options(self, options: RuleOptions) -> Self:
        """Return the same rule with other options."""
        changed = copy.copy(self)
        changed.options = options
        return changed

    def for_variable(self, name: str) -> Self:
        """Return the rule for a variable: without decay if the variable is excluded from it."""
        options = self.options
        if options.weight_decay is None or not options.excludes(name):
            return self
        return self.with_options(replace(options, weight_decay=None))

    def check_rows(self, what: str) -> None:
        """Check that the rule can be applied to some rows alone.

        Args:
            what: Name of the variable, for messages.

        Raises:
            ValueMismatchError: The rule needs the gradient of all rows.
        """
        if self.options.gradient_accumulation_steps is not None:
            raise self._needs_all_rows(
                what, "accumulates gradients, and rows that it updates later may be others"
            )

    def _needs_all_rows(self, what: str, why: str) -> ValueMismatchError:
        return ValueMismatchError(
            f"{what}: {self.name} {why}, so gradients of some rows cannot be applied",
            hint="push a dense gradient, or use another optimizer for this variable",
        )

    def own_slots(self) -> tuple[str, ...]:
        """Return the names of the slots that ``apply`` works on, in the order it takes them."""
        return self.slots

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of all slots of a parameter: its own, then those of the options."""
        accumulating = self.options.gradient_accumulation_steps is not None
        return (*self.own_slots(), ACCUMULATOR) if accumulating else self.own_slots()

    def initial_slot(self, name: str) -> float:
        """Return the initial value of all elements of slot ``name``."""
        return getattr(self, f"initial_{name}_value", 0.0)  # an argument of some rules

    def to_config(self) -> Config:
        """Return a dict of msgpack types from which ``rule_from_config`` rebuilds the rule."""
        config: Config = {"rule": self.name}
        for argument in fields(self):
            value = getattr(self, argument.name)
            config[argument.name] = value.to_config() if isinstance(value, Schedule) else value
        for name, value in vars(self.options).items():
            config[name] = list(value) if isinstance(value, tuple) else value
        return config

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        """Return the numbers that an update needs and that are the same for all elements: the rate.

        A rule that needs others, or more, says so.

        Args:
            rate: The learning rate.
            t: Number of the update, from 1.
        """
        return (rate,)

    @abstractmethod
    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        """Update one chunk. All arrays have one length and dtype; outputs may be the inputs."""

    def iteration(self, step: int) -> int:
        """Return the number of updates that ``step`` pushes make."""
        return step // (self.options.gradient_accumulation_steps or 1)

    def apply(
        self, parts: Iterable[Part], step: int, scratch: Scratch, ratio: float | None = None
    ) -> None:
        """Compute the parameters and slots that follow from one gradient of each part.

        Args:
            parts: Tuples of arrays; see ``Part``. Each one is requested when the previous one is
                done.
            step: Number of pushes that this optimizer had before this one.
            scratch: Work space; its contents do not matter between calls.
            ratio: Result of ``trust_ratio`` for the whole variable; layerwise rules only.
        """
        options = self.options
        rate: float = self.learning_rate(step)
        decay = rate * (options.weight_decay or 0.0)
        scaled_rate = rate if ratio is None else rate * ratio
        iteration = step // (options.gradient_accumulation_steps or 1)
        coefficients = self._coefficients(scaled_rate, iteration + 1)
        if self.may_raise:  # and what it does to the context of others nobody knows
            with np.errstate(all="ignore"):
                self._apply(parts, decay, coefficients, scratch)
        else:
            scratch.quietly(self._apply, parts, decay, coefficients, scratch)

    def _apply(
        self, parts: Iterable[Part], decay: float, coefficients: Coefficients, scratch: Scratch
    ) -> None:
        is_plain = not decay and self.options.clipvalue is None
        for part in parts:
            param = part[0]
            size, dtype = param.size, param.dtype
            if size > scratch.chunk:
                starts = range(0, size, scratch.chunk)
                pieces = (_cut(part, slice(start, start + scratch.chunk)) for start in starts)
                self._apply(pieces, decay, coefficients, scratch)
            elif is_plain and slot_dtype(dtype) is dtype:
                self._update(part, coefficients, scratch.arrays(dtype, self.temporaries, size))
            else:
                self._apply_prepared(part, decay, coefficients, scratch)
            del part, param  # who makes the next one looks who else sees this memory

    def _apply_prepared(
        self, part: Part, decay: float, coefficients: Coefficients, scratch: Scratch
    ) -> None:
        """Apply what needs more than ``_update``: decay, clipping or another dtype."""
        param, grad, slots, out_param, out_slots = part
        work = slot_dtype(param.dtype)
        temps = scratch.arrays(work, self.temporaries + 2, param.size)
        target = out_param
        if work != param.dtype:
            target = temps[-1]
            np.copyto(target, param)
            param = target
        grad = self.prepared(grad, work, temps[-2])
        if decay:
            np.multiply(param, decay, out=temps[0])
            np.subtract(param, temps[0], out=target)
            param = target
        self._update((param, grad, slots, target, out_slots), coefficients, temps)
        if target is not out_param:
            np.copyto(out_param, target, casting="unsafe")  # the only rounding

    def prepared(self, grad: np.ndarray, work: np.dtype, out: np.ndarray) -> np.ndarray:
        """Return the gradient in the dtype of the work and clipped by value: itself or ``out``."""
        if grad.dtype is not work and grad.dtype != work:
            np.copyto(out, grad)
            grad = out
        limit = self.options.clipvalue
        if limit is None:
            return grad
        np.minimum(np.maximum(grad, -limit, out=out), limit, out=out)
        return out


def _cut(part: Part, chunk: slice) -> Part:
    param, grad, slots, out_param, out_slots = part
    return (
        param[chunk], grad[chunk], [slot[chunk] for slot in slots],
        out_param[chunk], [slot[chunk] for slot in out_slots],
    )  # fmt: skip


# --- rules: SGD ----------------------------------------------------------------------------------


@dataclass(eq=False)
class SGD(UpdateRule):
    """Stochastic gradient descent, optionally with momentum.

    Without momentum, ``w -= lr * g``. With momentum, ``v = momentum * v - lr * g`` and then
    ``w += v``, or ``w += momentum * v - lr * g`` if ``nesterov``.

    Source: ``keras.optimizers.SGD`` of Keras 3.
    """

    name = "sgd"
    learning_rate: Any = 0.01
    momentum: float = within(0.0, 0, 1)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.temporaries = 2 if self.momentum and self.nesterov else 1

    def own_slots(self) -> tuple[str, ...]:
        """Return ("momentum",), or () without momentum."""
        return ("momentum",) if self.momentum else ()

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        (rate,) = coefficients
        scaled = scratch[0]
        np.multiply(grad, rate, out=scaled)
        if not slots:
            np.subtract(param, scaled, out=out_param)
            return
        velocity = out_slots[0]
        np.subtract(np.multiply(slots[0], self.momentum, out=velocity), scaled, out=velocity)
        if not self.nesterov:
            np.add(param, velocity, out=out_param)
            return
        ahead = scratch[1]
        np.subtract(np.multiply(velocity, self.momentum, out=ahead), scaled, out=ahead)
        np.add(param, ahead, out=out_param)


BELOW_ONE = math.nextafter(1.0, 0.0)
"""The highest decay of a moment whose bias can be corrected: 1 would divide by zero."""


def move(
    average: np.ndarray, value: np.ndarray, beta: float, out: np.ndarray, temp: np.ndarray
) -> None:
    """Compute ``average + (value - average) * (1 - beta)``; ``temp`` may be ``value``."""
    np.multiply(np.subtract(value, average, out=temp), 1 - beta, out=temp)
    np.add(average, temp, out=out)


@dataclass(eq=False)
class MomentRule(UpdateRule):
    """Base of the rules with two moments and an epsilon."""

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
        np.add(np.sqrt(v, out=a), self.epsilon, out=a)
        np.divide(np.multiply(m, alpha, out=b), a, out=b)
        np.subtract(param, b, out=out_param)


class Adamax(MomentRule):
    """Adam with the infinity norm in place of the second moment.

    ``m += (g - m) * (1 - beta_1)``, ``u = max(beta_2 * u, |g|)``, and then
    ``w -= lr * m / ((1 - beta_1 ** t) * (u + epsilon))``.

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
        np.maximum(np.multiply(slots[1], self.beta_2, out=u), a, out=u)
        np.add(u, self.epsilon, out=a)
        np.divide(np.multiply(m, alpha, out=b), a, out=b)
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
        np.add(a, np.multiply(grad, of_gradient, out=b), out=b)
        np.sqrt(np.divide(v, correction, out=a), out=a)
        np.add(a, self.epsilon, out=a)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


@dataclass(eq=False)
class Lion(UpdateRule):
    """Updates by the sign of a momentum, so that all elements move by the learning rate.

    ``w -= lr * sign(beta_1 * m + (1 - beta_1) * g)``, then ``m = beta_2 * m + (1 - beta_2) * g``.

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
        np.sign(np.add(a, b, out=a), out=a)
        np.multiply(a, rate, out=a)
        np.subtract(param, a, out=out_param)
        np.multiply(slots[0], self.beta_2, out=a)
        np.multiply(grad, 1 - self.beta_2, out=b)
        np.add(a, b, out=out_slots[0])


def decay_towards(
    average: np.ndarray, value: np.ndarray, rho: float, out: np.ndarray, temp: np.ndarray
) -> None:
    """Compute ``rho * average + (1 - rho) * value``; ``temp`` may be ``value``."""
    np.multiply(value, 1 - rho, out=temp)
    np.add(np.multiply(average, rho, out=out), temp, out=out)


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
        np.add(np.multiply(total, x, out=total), coefficient, out=total)
    return total


@dataclass(eq=False)
class Adagrad(UpdateRule):
    """Gradient descent scaled by the root of the sum of squared gradients.

    ``accumulator += g * g`` and ``w -= lr * g / sqrt(accumulator + epsilon)``.

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
        np.sqrt(np.add(accumulator, self.epsilon, out=a), out=a)
        np.divide(np.multiply(grad, rate, out=b), a, out=b)
        np.subtract(param, b, out=out_param)


@dataclass(eq=False)
class Adadelta(UpdateRule):
    """Gradient descent scaled by moving averages of squared gradients and squared updates.

    ``accumulated_grad = rho * accumulated_grad + (1 - rho) * g * g``,
    ``delta = sqrt(accumulated_delta_var + epsilon) * g / sqrt(accumulated_grad + epsilon)``,
    ``accumulated_delta_var = rho * accumulated_delta_var + (1 - rho) * delta * delta``, and
    ``w -= lr * delta``. Updates have the unit of the parameter.

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
        np.sqrt(np.add(slots[1], self.epsilon, out=delta), out=delta)
        np.multiply(delta, grad, out=delta)
        np.sqrt(np.add(squares, self.epsilon, out=a), out=a)
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
            np.subtract(velocity, np.multiply(average, average, out=a), out=a)
            np.maximum(a, 0, out=a)  # a variance, which only rounding makes negative
            np.add(a, self.epsilon, out=a)
        else:
            np.add(velocity, self.epsilon, out=a)
        np.sqrt(a, out=a)
        np.divide(np.multiply(grad, rate, out=step), a, out=step)
        if self.momentum:
            momentum = out_slots[1]
            np.add(np.multiply(slots[1], self.momentum, out=momentum), step, out=momentum)
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
        np.divide(np.subtract(new_power, change, out=change), rate, out=change)
        np.multiply(change, param, out=change)
        np.multiply(param, 2 * self.l2_shrinkage_regularization_strength, out=a)
        np.subtract(np.add(grad, a, out=a), change, out=a)
        np.add(slots[1], a, out=linear)
        np.maximum(linear, -self.l1_regularization_strength, out=a)
        np.subtract(np.minimum(a, self.l1_regularization_strength, out=a), linear, out=a)
        np.add(np.divide(new_power, rate, out=new_power), l2, out=new_power)
        np.maximum(new_power, np.finfo(new_power.dtype).tiny, out=new_power)
        np.divide(a, new_power, out=out_param)

    def _power(self, accumulator: np.ndarray, out: np.ndarray) -> None:
        if self.learning_rate_power == -0.5:
            np.sqrt(accumulator, out=out)
        else:
            power(accumulator, -self.learning_rate_power, out)


Sums = tuple[float, float]
"""Sums of squares of a decayed parameter and of its update, in float64."""


@dataclass(slots=True, eq=False)
class Measurement:
    """The norms of the update of one variable or shard, measured part by part.

    Args:
        rule: Rule of the update.
        decay: Weight decay before the update.
        t: Number of the update, from 1.
        scratch: Work space.
        sums: Of the parts that were measured.
    """

    rule: Lamb
    decay: float
    t: int
    scratch: Scratch
    sums: Sums = (0.0, 0.0)

    def add(self, param: np.ndarray, grad: np.ndarray, slots: Arrays) -> None:
        """Measure a part; the length of all except the last is a multiple of ``SQUARES_PIECE``.

        So neither parts nor the blocks of a shard, which are such multiples, show in a norm.
        """
        rule, work = self.rule, slot_dtype(param.dtype)
        for start in range(0, param.size, SQUARES_PIECE):
            piece = slice(start, start + SQUARES_PIECE)
            value, old = param[piece], [slot[piece] for slot in slots]
            arrays = self.scratch.arrays(work, 5 + len(slots), value.size)
            decayed, prepared, update, temp, wide, *moved = arrays
            if work != np.float64:
                (wide,) = self.scratch.arrays(np.dtype(np.float64), 1, value.size)
            with np.errstate(all="ignore"):
                np.multiply(value, -self.decay, out=decayed, dtype=work)
                np.add(value, decayed, out=decayed, dtype=work)
                gradient = rule.prepared(grad[piece], work, prepared)
                rule.direction(gradient, old, moved, self.t, update, temp)
                self.sums = (
                    sum_of_squares(decayed, self.sums[0], wide),
                    sum_of_squares(update, self.sums[1], wide),
                )


class Lamb(MomentRule):
    """Adam with updates scaled to the norm of each variable, times the learning rate.

    Moments ``m`` and ``v`` are Adam's. ``u = m_hat / (sqrt(v_hat) + epsilon)`` with
    ``m_hat = m / (1 - beta_1 ** t)`` and ``v_hat = v / (1 - beta_2 ** t)``; then
    ``w -= lr * |w| / |u| * u``, where the ratio is 1 if one of the norms is 0.

    It is *layerwise*: it multiplies the learning rate by a trust ratio of each variable.

    Source: You et al., 2019; ``keras.optimizers.Lamb``.
    """

    name = "lamb"
    takes_norms = True

    def check_rows(self, what: str) -> None:
        """Raise, because a norm needs all rows."""
        raise self._needs_all_rows(what, "scales updates by a norm over the whole variable")

    def measurement(self, step: int, scratch: Scratch) -> Measurement:
        """Return an object that measures an update without applying it; see ``apply``.

        Others may use the scratch memory between its calls.
        """
        decay = self.learning_rate(step) * (self.options.weight_decay or 0.0)
        return Measurement(self, decay, self.iteration(step) + 1, scratch)

    @staticmethod
    def trust_ratio(sums: Iterable[Sums]) -> float:
        """Return the norm of a variable divided by that of its update; 1 if one of them is 0.

        Args:
            sums: Of the measurements of all pieces of the variable.

        Source: You et al., 2019, with the identity as phi; ``keras.optimizers.Lamb``.
        """
        of_param, of_update = map(sum, zip(*sums, strict=True))
        if not (of_param > 0 and of_update > 0):
            return 1.0
        return math.sqrt(of_param) / math.sqrt(of_update)

    def apply(
        self, parts: Iterable[Part], step: int, scratch: Scratch, ratio: float | None = None
    ) -> None:
        """As of other rules; without a ratio, each part is a whole variable."""
        for part in parts:
            of_part = ratio
            if of_part is None:
                measurement = self.measurement(step, scratch)
                measurement.add(*part[:3])
                of_part = self.trust_ratio([measurement.sums])
            super().apply((part,), step, scratch, of_part)

    def _coefficients(self, rate: float, t: int) -> Coefficients:
        return rate, t

    def direction(
        self, grad: np.ndarray, slots: Arrays, out_slots: Arrays, t: int, out: np.ndarray,
        temp: np.ndarray,
    ) -> None:  # fmt: skip
        """Compute the unscaled update, which is Adam's with both moments corrected, and the slots.

        Args:
            grad: Gradient as returned by ``prepared``.
            slots: Arrays, one per name of ``own_slots()``.
            out_slots: Arrays for the new slots.
            t: Number of the update, from 1.
            out: Array for the update.
            temp: Scratch memory.
        """
        m, v = self._move_moments(grad, slots, out_slots, temp)
        np.sqrt(np.divide(v, 1 - self.beta_2**t, out=temp), out=temp)
        np.add(temp, self.epsilon, out=temp)
        np.divide(np.divide(m, 1 - self.beta_1**t, out=out), temp, out=out)

    def _update(self, part: Part, coefficients: Coefficients, scratch: Arrays) -> None:
        param, grad, slots, out_param, out_slots = part
        rate, t = coefficients
        update, temp = scratch[:2]
        self.direction(grad, slots, out_slots, int(t), update, temp)
        np.multiply(update, rate, out=update)
        np.subtract(param, update, out=out_param)


# --- clipping by norm ----------------------------------------------------------------------------


Gradient = np.ndarray | IndexedSlices


def clipped_by_norm(
    gradients: Sequence[Gradient],
    variables: Sequence[int],
    options: RuleOptions,
) -> list[Gradient]:
    """Return gradients no longer than ``clipnorm`` each, or ``global_clipnorm`` together.

    What is short enough is returned as it is, not copied; the rest is multiplied by limit / norm.
    Rows that are named more than once count as their sum. Where the global norm is not finite, all
    becomes NaN; where one variable's is infinite, its finite elements become 0.

    Args:
        gradients: Of variables or of some of their shards; not changed.
        variables: Of each gradient the variable's id. Shards of one variable have one norm.
        options: Only the two limits of norms are used.

    Source: ``clip_by_global_norm`` and ``_clip_by_norm`` of ``keras.optimizers.Optimizer``.
    """
    if not clips_norms(options):
        return list(gradients)
    merged = [(None, g) if isinstance(g, np.ndarray) else g.merged() for g in gradients]
    squares = [sum_of_squares(values) for _, values in merged]
    scales = clip_scales(zip(variables, squares, strict=True), options)
    clipped: list[Gradient] = []
    for variable, gradient, (indices, values) in zip(variables, gradients, merged, strict=True):
        values = scaled(values, scales[variable])
        if not isinstance(gradient, np.ndarray):
            clipped.append(IndexedSlices(values, indices, gradient.dense_shape))
        else:
            clipped.append(values)
    return clipped


def clips_norms(options: RuleOptions) -> bool:
    """Return whether a norm is limited."""
    return options.clipnorm is not None or options.global_clipnorm is not None


def clip_scales(squares: Iterable[tuple[int, float]], options: RuleOptions) -> dict[int, float]:
    """Return for each variable what its gradient is multiplied by; 1: it is short enough.

    Args:
        squares: A variable's id, and the sum of squares of its gradient or of a shard of it.
        options: One limit of norms is set.

    Source: as for ``clipped_by_norm``.
    """
    of_variable: dict[int, float] = {}
    for variable, of_gradient in squares:
        of_variable[variable] = of_variable.get(variable, 0.0) + of_gradient
    limit = options.global_clipnorm
    if limit is None:
        return {
            variable: _scale(its_squares, options.clipnorm or 0.0)
            for variable, its_squares in of_variable.items()
        }
    scale = _scale(sum(of_variable.values()), limit)
    scale = scale if scale > 0 else math.nan  # the norm is infinite
    return dict.fromkeys(of_variable, scale)


def _scale(squares: float, limit: float) -> float:
    norm = math.sqrt(squares)
    return 1.0 if norm <= limit else limit / norm


# --- registry ------------------------------------------------------------------------------------


RULES: dict[str, type[UpdateRule]] = {
    cls.name: cls
    for cls in (SGD, Adam, Adamax, Nadam, Lion, Adagrad, Adadelta, RMSprop, Ftrl, Lamb)
}
_OPTIONS = tuple(field.name for field in fields(RuleOptions))


def rule_from_config(config: object) -> UpdateRule:
    """Return the rule that ``to_config`` described.

    Args:
        config: Whatever came over the wire; nothing about it is trusted.

    Raises:
        ConfigurationError: If it is not the config of a rule, or a registered one fails its probe.
    """
    cls, arguments = schedules.described_by(config, "rule", RULES, "an optimizer", _OPTIONS)
    options = RuleOptions(**{key: arguments.pop(key) for key in _OPTIONS})
    arguments["learning_rate"] = schedules.from_config(arguments["learning_rate"])
    rule: UpdateRule = cls(**arguments)
    rule.probe()
    return rule.with_options(options)


Registered = tuple[str, str, int]
"""("rule" or "schedule", name, version) of what a plugin has registered."""


def registered() -> list[Registered]:
    """Return what plugins have registered in this process, in order."""
    return [
        *(("rule", *each) for each in schedules.of_plugins(RULES, __name__)),
        *(("schedule", *each) for each in schedules.registered()),
    ]


def unknown_in(config: object) -> str:
    """Return the rule or schedule that a config names and that is not known here; "": none.

    Args:
        config: Whatever was read; what is no config at all names none.
    """
    if not isinstance(config, Mapping):
        return ""
    name = config.get("rule")
    if isinstance(name, str) and name not in RULES:
        return f"update rule {name[:100]!r}"
    name = schedules.unknown_in(config.get("learning_rate"))
    return f"schedule {name[:100]!r}" if name else ""


def registered_in(rule: UpdateRule) -> list[Registered]:
    """Return what an optimizer needs that plugins register: its rule, its schedules."""
    own = [("rule", rule.name, rule.version)] if type(rule).__module__ != __name__ else []
    rates = schedules.registered_in(rule.learning_rate)
    return [*own, *(("schedule", cls.__name__, cls.version) for cls in rates)]
