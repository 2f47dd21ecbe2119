"""The mathematics of optimizers, applied to one piece of a parameter at a time.

Layer: L1. Imports: errors, schedules.

A rule is pure: it owns no state but its hyper-parameters. The store owns the arrays and
says WHEN; a rule says HOW. Everything a rule needs to travel is in ``to_config``.

All arrays of one ``apply`` are 1-D, of equal length and elementwise related, so the same call
serves a block of a dense shard and a gathered set of rows of a sparse one. An update runs in
chunks that stay in the CPU's cache, with ``out=`` everywhere and scratch memory that is
allocated once; elementwise work makes the result independent of the chunk's size, bit for bit.

Precision: float16 and bfloat16 parameters are computed in float32 and rounded once, when
they are stored, and their slots are float32 (a float16 second moment would underflow
to 0 below gradients of 2e-4). float32 and float64 are computed in themselves, with
coefficients evaluated in double precision. Integers have no gradient: refused.

A new rule is one subclass: hyper-parameters, slots, ``_coefficients`` and ``_update``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from psync import schedules
from psync.errors import ConfigurationError, GradientError
from psync.schedules import Config, Schedule, as_schedule

CHUNK = 1 << 18
"""Elements per chunk: 1 MiB of float32. Measured for chunks of 16 to 256 Ki elements on a CPU with
1 MiB of L2 and 32 MiB of L3: each doubling makes SGD (6 to 12 GB/s) and Adam (1.8 to 2.4 GB/s)
faster, with two such processes at once too."""

_HALVES = ("float16", "bfloat16")  # by name: bfloat16 is numpy's only where ml_dtypes is there
_SLOT_DTYPES: dict[np.dtype, np.dtype] = {}  # answers of slot_dtype: dtype.name costs microseconds


def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a parameter of ``dtype`` is computed and its slots are kept.

    Raises:
        GradientError: If ``dtype`` is not a floating one.
    """
    known = _SLOT_DTYPES.get(dtype)
    if known is not None:
        return known
    name = dtype.name
    if name not in (*_HALVES, "float32", "float64"):
        raise GradientError(
            f"only floating-point variables can be optimized, got {name}",
            hint="declare the variable with trainable=False and use assign_add, or make it float32",
        )
    _SLOT_DTYPES[dtype] = np.dtype(np.float32) if name in _HALVES else dtype
    return _SLOT_DTYPES[dtype]


class Scratch:
    """Work space that rules share: a few chunk-long arrays per dtype, made when first asked for.

    Single owner: one ``apply`` at a time uses it.

    Args:
        chunk: Elements per chunk; the results do not depend on it.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._arrays: dict[np.dtype, list[np.ndarray]] = {}

    def arrays(self, dtype: np.dtype, count: int, size: int) -> list[np.ndarray]:
        """Return ``count`` distinct arrays of ``size`` <= ``chunk`` elements, not initialized."""
        made = self._arrays.setdefault(dtype, [])
        while len(made) < count:
            made.append(np.empty(self.chunk, dtype))
        return [made[i][:size] for i in range(count)]


Part = tuple[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray, Sequence[np.ndarray]]
"""What one call of a rule works on: param, grad, slots, out_param, out_slots."""


class UpdateRule(ABC):
    """How a gradient changes a parameter and its slots.

    Args:
        learning_rate: A number, or a schedule of the number of updates applied so far.
    """

    name: ClassVar[str]  # in configs, and of the optimizer by default
    arguments: ClassVar[tuple[str, ...]]  # of the constructor, each an attribute: the config
    temporaries: int  # scratch arrays that ``_update`` needs

    def __init__(self, learning_rate: float | Schedule) -> None:
        self.learning_rate = as_schedule(learning_rate)

    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the slots of a parameter, in the order ``apply`` takes them."""

    def initial_slot(self, name: str) -> float:
        """Return the value that all elements of slot ``name`` begin with."""
        return 0.0

    def to_config(self) -> Config:
        """Return a dict of msgpack types from which ``rule_from_config`` rebuilds the rule."""
        config: Config = {"rule": self.name}
        for name in self.arguments:
            value = getattr(self, name)
            config[name] = value.to_config() if isinstance(value, Schedule) else value
        return config

    @abstractmethod
    def _coefficients(self, step: int) -> tuple[float, ...]:
        """Return the numbers that an update needs and that are the same for all elements."""

    @abstractmethod
    def _update(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Sequence[np.ndarray],
        out_param: np.ndarray,
        out_slots: Sequence[np.ndarray],
        coefficients: tuple[float, ...],
        scratch: Sequence[np.ndarray],
    ) -> None:
        """Update one chunk. All arrays have one length and dtype; outputs may be the inputs."""

    def apply(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Sequence[np.ndarray],
        out_param: np.ndarray,
        out_slots: Sequence[np.ndarray],
        step: int,
        scratch: Scratch,
    ) -> None:
        """Compute the parameter and slots that follow from one gradient.

        Args:
            param: 1-D, contiguous, floating.
            grad: Gradient of the same length and dtype; not changed.
            slots: One array per name of ``slot_names()``, of dtype ``slot_dtype(param.dtype)``.
            out_param: Where the result goes: ``param`` itself or memory apart from it.
            out_slots: The same for each slot.
            step: Number of updates that this optimizer applied before this one.
            scratch: Work space; its contents mean nothing between calls.
        """
        self.apply_all(((param, grad, slots, out_param, out_slots),), step, scratch)

    def apply_all(self, parts: Iterable[Part], step: int, scratch: Scratch) -> None:
        """As ``apply`` for many parts: what is the same for all of them is done once.

        Args:
            parts: (param, grad, slots, out_param, out_slots), each as for ``apply``. The next
                one is asked for when the one before is done.
            step: As for ``apply``.
            scratch: As for ``apply``.
        """
        coefficients = self._coefficients(step)
        chunk = scratch.chunk
        # Overflow and NaN are results here, as in every framework; a warning that a test
        # runner turns into an error must not tear an update in two.
        with np.errstate(all="ignore"):
            for param, grad, slots, out_param, out_slots in parts:
                size = param.size
                if size <= chunk:  # most are small, and slicing costs as much as the maths
                    self._chunk(param, grad, slots, out_param, out_slots, coefficients, scratch)
                    continue
                for start in range(0, size, chunk):
                    part = slice(start, start + chunk)
                    self._chunk(
                        param[part],
                        grad[part],
                        [slot[part] for slot in slots],
                        out_param[part],
                        [slot[part] for slot in out_slots],
                        coefficients,
                        scratch,
                    )

    def _chunk(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Sequence[np.ndarray],
        out_param: np.ndarray,
        out_slots: Sequence[np.ndarray],
        coefficients: tuple[float, ...],
        scratch: Scratch,
    ) -> None:
        work = slot_dtype(param.dtype)
        if work is param.dtype or work == param.dtype:
            temps = scratch.arrays(work, self.temporaries, param.size)
            self._update(param, grad, slots, out_param, out_slots, coefficients, temps)
            return
        *temps, single, single_grad = scratch.arrays(work, self.temporaries + 2, param.size)
        np.copyto(single, param)
        np.copyto(single_grad, grad)
        self._update(single, single_grad, slots, single, out_slots, coefficients, temps)
        np.copyto(out_param, single, casting="unsafe")  # the only rounding


class SGD(UpdateRule):
    """Stochastic gradient descent, with momentum if asked for.

    Without momentum ``w -= lr * g``. With it ``v = momentum * v - lr * g`` and then
    ``w += v``, or ``w += momentum * v - lr * g`` if ``nesterov``.

    Args:
        learning_rate: A number or a schedule.
        momentum: In [0, 1]; 0 needs no slot.
        nesterov: Whether to look ahead along the velocity.

    Raises:
        ConfigurationError: If an argument is out of range.

    Source: ``keras.optimizers.SGD`` of Keras 3.
    """

    name = "sgd"
    arguments = ("learning_rate", "momentum", "nesterov")

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(learning_rate)
        self.momentum = _number("sgd", "momentum", momentum, 0, 1)
        self.nesterov = _flag("sgd", "nesterov", nesterov)
        self.temporaries = 2 if self.momentum and self.nesterov else 1

    def slot_names(self) -> tuple[str, ...]:
        """Return ("momentum",), or () without momentum."""
        return ("momentum",) if self.momentum else ()

    def _coefficients(self, step: int) -> tuple[float, ...]:
        return (self.learning_rate(step),)

    def _update(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Sequence[np.ndarray],
        out_param: np.ndarray,
        out_slots: Sequence[np.ndarray],
        coefficients: tuple[float, ...],
        scratch: Sequence[np.ndarray],
    ) -> None:
        (rate,) = coefficients
        scaled = scratch[0]
        np.multiply(grad, rate, out=scaled)
        if not slots:
            np.subtract(param, scaled, out=out_param)
            return
        velocity = out_slots[0]
        np.multiply(slots[0], self.momentum, out=velocity)
        np.subtract(velocity, scaled, out=velocity)
        if not self.nesterov:
            np.add(param, velocity, out=out_param)
            return
        ahead = scratch[1]
        np.multiply(velocity, self.momentum, out=ahead)
        np.subtract(ahead, scaled, out=ahead)
        np.add(param, ahead, out=out_param)


class Adam(UpdateRule):
    """Adaptive moments.

    ``m += (g - m) * (1 - beta_1)``, ``v += (g * g - v) * (1 - beta_2)``, with ``amsgrad``
    ``vhat = max(vhat, v)``, else ``vhat = v``; then ``w -= alpha * m / (sqrt(vhat) + epsilon)``
    where ``alpha = lr * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t)`` and ``t = step + 1``.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to the root of the uncorrected second moment ("epsilon hat" of the paper).
        amsgrad: Whether to divide by the largest second moment so far.

    Raises:
        ConfigurationError: If an argument is out of range.

    Source: Kingma and Ba, 2014, section 2; Reddi et al., 2018; ``keras.optimizers.Adam``.
    """

    name = "adam"
    arguments = ("learning_rate", "beta_1", "beta_2", "epsilon", "amsgrad")
    temporaries = 2

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(learning_rate)
        below_one = math.nextafter(1.0, 0.0)  # a beta of 1 divides by zero
        self.beta_1 = _number("adam", "beta_1", beta_1, 0, below_one)
        self.beta_2 = _number("adam", "beta_2", beta_2, 0, below_one)
        self.epsilon = _number("adam", "epsilon", epsilon, 0, math.inf)
        self.amsgrad = _flag("adam", "amsgrad", amsgrad)

    def slot_names(self) -> tuple[str, ...]:
        """Return ("m", "v"), and "vhat" with amsgrad."""
        return ("m", "v", "vhat") if self.amsgrad else ("m", "v")

    def _coefficients(self, step: int) -> tuple[float, ...]:
        t = step + 1
        correction = math.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        return (self.learning_rate(step) * correction,)

    def _update(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Sequence[np.ndarray],
        out_param: np.ndarray,
        out_slots: Sequence[np.ndarray],
        coefficients: tuple[float, ...],
        scratch: Sequence[np.ndarray],
    ) -> None:
        (alpha,) = coefficients
        a, b = scratch
        m, v = out_slots[:2]
        np.subtract(grad, slots[0], out=a)
        np.multiply(a, 1 - self.beta_1, out=a)
        np.add(slots[0], a, out=m)
        np.multiply(grad, grad, out=a)
        np.subtract(a, slots[1], out=a)
        np.multiply(a, 1 - self.beta_2, out=a)
        np.add(slots[1], a, out=v)
        if self.amsgrad:
            np.maximum(slots[2], v, out=out_slots[2])
            v = out_slots[2]
        np.sqrt(v, out=a)
        np.add(a, self.epsilon, out=a)
        np.multiply(m, alpha, out=b)
        np.divide(b, a, out=b)
        np.subtract(param, b, out=out_param)


_RULES: dict[str, type[UpdateRule]] = {cls.name: cls for cls in (SGD, Adam)}


def rule_from_config(config: object) -> UpdateRule:
    """Return the rule that ``to_config`` described.

    Args:
        config: Whatever came over the wire; nothing about it is trusted.

    Raises:
        ConfigurationError: If it is not the config of a rule.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("rule"), str):
        raise ConfigurationError(
            f"expected the config of an optimizer, got {type(config).__name__}"
        )
    name = config["rule"]
    cls = _RULES.get(name)
    if cls is None:
        raise ConfigurationError(
            f"unknown optimizer {name[:100]!r}", hint=f"use one of {', '.join(_RULES)}"
        )
    arguments = {key: value for key, value in config.items() if key != "rule"}
    if arguments.keys() != set(cls.arguments):
        raise ConfigurationError(
            f"{name}: expected the arguments {sorted(cls.arguments)}, "
            f"got {sorted(map(str, arguments))}"
        )
    arguments["learning_rate"] = schedules.from_config(arguments["learning_rate"])
    return cls(**arguments)


def _number(rule: str, name: str, value: object, minimum: float, maximum: float) -> float:
    number = schedules.as_number(f"{rule}: {name}", value)
    if not minimum <= number <= maximum:
        raise ConfigurationError(
            f"{rule}: expected {name} between {minimum} and {maximum}, got {number}"
        )
    return float(number)


def _flag(rule: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{rule}: expected {name} to be True or False, got {value!r}")
    return value
