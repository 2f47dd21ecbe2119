"""The base class of optimizer update rules, and gradient descent.

An update rule is the mathematics of an optimizer, applied to one piece of a parameter at a time.
The other rules are in ``moment_rules``, ``adaptive_rules`` and ``layerwise_rules``;
``rule_configs`` lists them all.

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

User-defined rules are subclasses of ``psync.rules.UpdateRule``, a subclass of this one. A new
built-in rule is one subclass with hyper-parameters, slots, ``_coefficients`` and ``_update``; one
name in ``rule_configs``; and its public handle in ``psync.optimizers``. The tests need a line in
``helpers/rule_table``, and the values of Keras by ``helpers/golden_optimizers``.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from psync.errors import ValueMismatchError
from psync.numerics.rule_options import RuleOptions, flag, number
from psync.numerics.sums import sum_dtype
from psync.schedules import Config, Schedule, as_schedule

CHUNK = 1 << 18
"""Elements per chunk: 1 MiB of float32. Measured for chunks of 16 to 256 Ki elements on a CPU with
1 MiB of L2 and 32 MiB of L3: each doubling makes SGD (6 to 12 GB/s) and Adam (1.8 to 2.4 GB/s)
faster, with two such processes at once too."""

ACCUMULATOR = "gradient_accumulator"
"""Slot of optimizers that accumulate gradients: their sum since the last update."""


@functools.cache  # dtype.name costs microseconds
def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a parameter of ``dtype`` is computed and its slots are kept.

    Raises:
        ValueMismatchError: ``dtype`` is not a floating one.
    """
    try:
        return sum_dtype(dtype)
    except ValueMismatchError:
        raise ValueMismatchError(
            f"only floating-point variables can be optimized, got {dtype.name}",
            hint="declare the variable with trainable=False and use assign_add, or make it float32",
        ) from None


class Scratch:
    """Work space shared by rules: a few chunk-long arrays per dtype, created on first use.

    Only one ``apply`` at a time may use it.

    Args:
        chunk: Elements per chunk; the results do not depend on it.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._arrays: dict[np.dtype, list[np.ndarray]] = {}

    def arrays(self, dtype: np.dtype, count: int, size: int) -> list[np.ndarray]:
        """Return ``count`` distinct, uninitialized arrays of ``size`` elements."""
        made = self._arrays.setdefault(dtype, [])
        if made and made[0].size < size:  # longer than a chunk
            made.clear()
        while len(made) < count:
            made.append(np.empty(max(self.chunk, size), dtype))
        return [made[i][:size] for i in range(count)]


class RuleRaised(Exception):
    """User code raised in a rule; ``__cause__`` is the original error."""


Arrays = Sequence[np.ndarray]

Coefficients = tuple[float, ...]
"""Inputs of a rule that are the same for all elements."""

Part = tuple[np.ndarray, np.ndarray, Arrays, np.ndarray, Arrays]
"""Arrays of one call of a rule: param, grad, slots, out_param, out_slots."""


class Rate:
    """Descriptor of a learning rate: set as a number or a schedule, read as a schedule."""

    def __init__(self, default: float) -> None:
        self.default = as_schedule(default)

    def __get__(self, rule: UpdateRule | None, cls: type[UpdateRule]) -> Schedule:
        rate: Schedule = self.default if rule is None else rule.__dict__["learning_rate"]
        return rate

    def __set__(self, rule: UpdateRule, value: float | Schedule) -> None:
        rule.__dict__["learning_rate"] = as_schedule(value)


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
    takes_norms: ClassVar[bool] = False  # of whole variables, see ``layerwise_rules``
    may_raise: ClassVar[bool] = False  # RuleRaised, from ``apply``: then nothing must have changed
    slots: ClassVar[tuple[str, ...]] = ()  # see ``own_slots``
    temporaries = 2  # scratch arrays that ``_update`` needs, at least 1
    options = RuleOptions()
    learning_rate: Rate = Rate(0.001)

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
        value: float = getattr(self, f"initial_{name}_value", 0.0)  # an argument of some rules
        return value

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
        self,
        param: np.ndarray,
        grad: np.ndarray,
        slots: Arrays,
        out_param: np.ndarray,
        out_slots: Arrays,
        step: int,
        scratch: Scratch,
        ratio: float | None = None,
    ) -> None:
        """Compute the parameter and slots that follow from one gradient.

        Args:
            param: Array, 1-D, contiguous, floating.
            grad: Gradient of the same length, and of the parameter's dtype or that of its slots;
                not changed.
            slots: Arrays of dtype ``slot_dtype(param.dtype)``, one per name of ``own_slots()``.
            out_param: Array for the result: ``param`` itself or separate memory.
            out_slots: Arrays for the new slots: the slots themselves or separate memory.
            step: Number of pushes that this optimizer had before this one.
            scratch: Work space; its contents do not matter between calls.
            ratio: Result of ``trust_ratio`` for the whole variable; layerwise rules only.
        """
        self.apply_all(((param, grad, slots, out_param, out_slots),), step, scratch, ratio)

    def apply_all(
        self, parts: Iterable[Part], step: int, scratch: Scratch, ratio: float | None = None
    ) -> None:
        """Call ``apply`` for many parts, with the common work done once.

        Args:
            parts: Tuples (param, grad, slots, out_param, out_slots); see ``apply``. Each one is
                requested when the previous one is done.
            step: See ``apply``.
            scratch: See ``apply``.
            ratio: See ``apply``.
        """
        rate = self.learning_rate(step)
        decay = rate * (self.options.weight_decay or 0.0)
        scaled_rate = rate if ratio is None else rate * ratio
        coefficients = self._coefficients(scaled_rate, self.iteration(step) + 1)
        chunk = scratch.chunk
        # Overflow and NaN are results here, as in every framework; a warning that a test
        # runner turns into an error must not tear an update in two.
        with np.errstate(all="ignore"):
            for part in parts:
                size = part[0].size
                if size <= chunk:  # most are small, and slicing costs as much as the maths
                    self._chunk(part, decay, coefficients, scratch)
                else:
                    for start in range(0, size, chunk):
                        piece = _cut(part, slice(start, start + chunk))
                        self._chunk(piece, decay, coefficients, scratch)
                        del piece
                del part  # who makes the next one looks who else sees this memory

    def _chunk(
        self, part: Part, decay: float, coefficients: Coefficients, scratch: Scratch
    ) -> None:
        param, grad, slots, out_param, out_slots = part
        work, options = slot_dtype(param.dtype), decay or self.options.clipvalue is not None
        if not options and (work is param.dtype or work == param.dtype):
            temps = scratch.arrays(work, self.temporaries, param.size)
            self._update(part, coefficients, temps)
            return
        temps = scratch.arrays(work, self.temporaries + 2, param.size)
        target = out_param
        if work is not param.dtype and work != param.dtype:
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
        np.maximum(grad, -limit, out=out)
        np.minimum(out, limit, out=out)
        return out


def _cut(part: Part, chunk: slice) -> Part:
    param, grad, slots, out_param, out_slots = part
    return (
        param[chunk], grad[chunk], [slot[chunk] for slot in slots],
        out_param[chunk], [slot[chunk] for slot in out_slots],
    )  # fmt: skip


@dataclass(eq=False)
class SGD(UpdateRule):
    """Stochastic gradient descent, optionally with momentum.

    Without momentum, ``w -= lr * g``. With momentum, ``v = momentum * v - lr * g`` and then
    ``w += v``, or ``w += momentum * v - lr * g`` if ``nesterov``.

    Args:
        learning_rate: A number or a schedule.
        momentum: Number in [0, 1]; 0 needs no slot.
        nesterov: Whether to look ahead along the velocity.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: ``keras.optimizers.SGD`` of Keras 3.
    """

    name = "sgd"
    learning_rate: Rate = Rate(0.01)
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
        np.multiply(slots[0], self.momentum, out=velocity)
        np.subtract(velocity, scaled, out=velocity)
        if not self.nesterov:
            np.add(param, velocity, out=out_param)
            return
        ahead = scratch[1]
        np.multiply(velocity, self.momentum, out=ahead)
        np.subtract(ahead, scaled, out=ahead)
        np.add(param, ahead, out=out_param)
