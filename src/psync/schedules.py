"""Learning-rate schedules as plain data, evaluated on the ps tasks.

Each ps evaluates the learning rate itself, because only the ps knows how many updates it has
applied. A schedule is one of the classes below, or a class registered by a plugin. It travels as a
few numbers in msgpack. ``from_config`` accepts exactly the output of ``to_config`` and nothing
else.

Names, arguments and formulas are those of Keras 3 (``keras.optimizers.schedules``), computed in
double precision. There are two differences. ``Warmup`` can precede any schedule; Keras has a
warm-up only in CosineDecay. Arguments for which a formula is undefined somewhere, such as a
negative decay rate or power, are refused immediately instead of giving NaN in training.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from psync.errors import ConfigurationError, check_fits
from psync.specs import as_number, shortened

_WITHIN = {">": operator.gt, ">=": operator.ge, "<=": operator.le}

_NOT_NEGATIVE = {">=": 0}
"""A rate below 0 would climb, and decay weights away from 0; ascent is a negative gradient."""

Config = dict[str, object]
"""Data that travels: only str, bool, int, float, None, lists and dicts of these."""


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate as a function of the number of updates applied so far.

    To write a schedule, subclass this class, define ``rate`` and decorate it with ``@register``.
    The module must be loaded by all tasks as a plugin (``docs/howto/rules.md``). Annotated fields
    are the arguments: numbers, bools or None.

    Example:
        @psync.schedules.register
        class Halving(psync.schedules.Schedule):
            initial_learning_rate: float
            every: float = 1000

            def rate(self, step):
                return self.initial_learning_rate * 0.5 ** (step // self.every)
    """

    version: ClassVar[int] = 1  # raise it when rates change: tasks with others are refused

    def __call__(self, step: float) -> float:
        """Return the learning rate of the update that follows ``step`` updates.

        Raises:
            ValueError: The rate is negative or NaN, which only a user's schedule can return.
        """
        try:
            rate = float(self.rate(step))
        except OverflowError:  # a growing "decay": what the formula gives in float arithmetic
            return math.inf
        if not rate >= 0:  # NaN is not, either
            raise ValueError(f"expected a learning rate from 0, got {rate} at step {step}")
        return rate

    @abstractmethod
    def rate(self, step: float) -> float:
        """Return the rate of the update that follows ``step``; depends on ``step`` alone."""

    def to_config(self) -> Config:
        """Return a dict of msgpack types from which ``from_config`` rebuilds an equal schedule."""
        config: Config = {"kind": type(self).__name__}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Schedule):
                value = value.to_config()
            elif isinstance(value, tuple):
                value = list(value)
            config[each.name] = value
        return config

    def __post_init__(self) -> None:
        """Check the arguments, and make numbers plain ones; a field's metadata are its bounds."""
        for each in fields(self):
            value, what = getattr(self, each.name), type(self).__name__
            kind = getattr(each.type, "__name__", str(each.type))  # as it is written, or the type
            fits = kind != "bool" or isinstance(value, bool)
            check_fits(fits, f"{what}: expected {each.name} to be True or False", value)
            if kind == "float" or (kind == "float | None" and value is not None):
                number = as_number(f"{what}: {each.name}", value)
                for sign, bound in each.metadata.items():
                    expected = f"{what}: expected {each.name} {sign} {bound}"
                    check_fits(_WITHIN[sign](number, bound), expected, number)
                object.__setattr__(self, each.name, number)


_MAX_DEPTH = 8  # of schedules in schedules; a config from the wire must not exhaust the stack


@dataclass(frozen=True)
class Constant(Schedule):
    """A rate that never changes; a plain number stands for it."""

    value: float = field(metadata=_NOT_NEGATIVE)

    def rate(self, step: float) -> float:
        return self.value

    def __call__(self, step: float) -> float:
        """Return the rate, which was checked when it was made."""
        return float(self.value)


@dataclass(frozen=True)
class _Decay(Schedule):
    initial_learning_rate: float = field(metadata=_NOT_NEGATIVE)
    decay_steps: float = field(metadata={">": 0})
    decay_rate: float = field(metadata={">=": 0})
    staircase: bool = False

    def _time(self, step: float) -> float:
        time = step / self.decay_steps
        return math.floor(time) if self.staircase else time


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Updates after which the rate has been multiplied by ``decay_rate``.
        decay_rate: Factor, at least 0.
        staircase: Whether the exponent is rounded down to a whole number.
    """

    def rate(self, step: float) -> float:
        return self.initial_learning_rate * math.pow(self.decay_rate, self._time(step))


@dataclass(frozen=True)
class InverseTimeDecay(_Decay):
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``.

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Unit of the time axis, in updates.
        decay_rate: Number of at least 0.
        staircase: Whether ``step / decay_steps`` is rounded down to a whole number.
    """

    def rate(self, step: float) -> float:
        return self.initial_learning_rate / (1 + self.decay_rate * self._time(step))


@dataclass(frozen=True)
class PolynomialDecay(Schedule):
    """Decay from the initial to the end rate along ``(1 - step / decay_steps) ** power``.

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Updates until the end rate is reached.
        end_learning_rate: Rate from then on.
        power: Number of at least 0; 1 is a straight line.
        cycle: Whether ``decay_steps`` grows to its next multiple each time ``step`` passes it.
    """

    initial_learning_rate: float = field(metadata=_NOT_NEGATIVE)
    decay_steps: float = field(metadata={">": 0})
    end_learning_rate: float = field(default=0.0001, metadata=_NOT_NEGATIVE)
    power: float = field(default=1.0, metadata={">=": 0})
    cycle: bool = False

    def rate(self, step: float) -> float:
        decay_steps = self.decay_steps
        if self.cycle:
            decay_steps *= max(1, math.ceil(step / decay_steps))
        remaining = 1 - min(step, decay_steps) / decay_steps
        span = self.initial_learning_rate - self.end_learning_rate
        return span * math.pow(remaining, self.power) + self.end_learning_rate


@dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from the initial rate to ``alpha`` times it, optionally after a warm-up.

    ``initial * ((1 - alpha) * (1 + cos(pi * step / decay_steps)) / 2 + alpha)``. With a
    ``warmup_target``, the rate first rises to it linearly and decays from there.

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Updates of the decay, without the warm-up.
        alpha: Final rate as a fraction of the rate from which the decay starts.
        warmup_target: Rate at the end of the warm-up, or None for no warm-up.
        warmup_steps: Updates of the warm-up.
    """

    initial_learning_rate: float = field(metadata=_NOT_NEGATIVE)
    decay_steps: float = field(metadata={">": 0})
    alpha: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    warmup_target: float | None = field(default=None, metadata=_NOT_NEGATIVE)
    warmup_steps: float = field(default=0, metadata={">=": 0})

    def rate(self, step: float) -> float:
        start = self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return start + (self.warmup_target - start) * (step / self.warmup_steps)
            step_of_decay = step - self.warmup_steps
            start = self.warmup_target
        else:
            step_of_decay = step
        completed = min(step_of_decay, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * completed))
        return start * ((1 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts(Schedule):
    """Repeated half cosines, each from a new start ("warm restarts").

    Period ``i`` takes ``first_decay_steps * t_mul ** i`` updates. Within it, with ``x`` the elapsed
    fraction, the rate is
    ``initial * ((1 - alpha) * m_mul ** i * (1 + cos(pi * x)) / 2 + alpha)``.

    Args:
        initial_learning_rate: Rate at step 0.
        first_decay_steps: Updates of the first period.
        t_mul: Factor from the length of one period to the next, at least 1.
        m_mul: Factor from the height of one period to the next, at least 0.
        alpha: Lowest rate as a fraction of the initial one.

    Source: Loshchilov and Hutter, 2016; Keras, where rounding may put a restart one step late.
    """

    initial_learning_rate: float = field(metadata=_NOT_NEGATIVE)
    first_decay_steps: float = field(metadata={">": 0})
    t_mul: float = field(default=2.0, metadata={">=": 1})
    m_mul: float = field(default=1.0, metadata={">=": 0})
    alpha: float = field(default=0.0, metadata={">=": 0, "<=": 1})

    def rate(self, step: float) -> float:
        period, completed = self._period(step / self.first_decay_steps)
        cosine = 0.5 * math.pow(self.m_mul, period) * (1 + math.cos(math.pi * completed))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)

    def _period(self, time: float) -> tuple[int, float]:
        """Return the number of the period and the part of it that is over."""
        ratio = self.t_mul
        if ratio == 1:
            return math.floor(time), time - math.floor(time)
        period = math.floor(math.log1p(time * (ratio - 1)) / math.log(ratio))
        if (math.pow(ratio, period + 1) - 1) / (ratio - 1) <= time:  # the logarithm was too low
            period += 1
        begins = (math.pow(ratio, period) - 1) / (ratio - 1)
        return period, (time - begins) / math.pow(ratio, period)


@dataclass(frozen=True)
class PiecewiseConstantDecay(Schedule):
    """``values[i]`` while ``boundaries[i - 1] < step <= boundaries[i]``.

    Args:
        boundaries: Steps in strictly increasing order, at least one.
        values: Rates, one more than there are boundaries.
    """

    boundaries: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("boundaries", "values"):
            numbers = getattr(self, name)
            expected = f"PiecewiseConstantDecay: expected a list of numbers as {name}"
            check_fits(isinstance(numbers, list | tuple), expected, numbers)
            plain = tuple(as_number(f"PiecewiseConstantDecay: {name}", n) for n in numbers)
            object.__setattr__(self, name, plain)
        least = min(self.values, default=0)
        check_fits(least >= 0, "PiecewiseConstantDecay: expected values >= 0", least)
        if not self.boundaries or len(self.values) != len(self.boundaries) + 1:
            raise ConfigurationError(
                "PiecewiseConstantDecay: expected at least one boundary and one value more than "
                f"boundaries, got {len(self.boundaries)} boundaries and {len(self.values)} values"
            )
        grow = all(a < b for a, b in itertools.pairwise(self.boundaries))
        expected = "PiecewiseConstantDecay: expected boundaries in strictly increasing order"
        check_fits(grow, expected, list(self.boundaries))

    def rate(self, step: float) -> float:
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class Warmup(Schedule):
    """A linear rise to another schedule, which then starts from its own step 0.

    ``CosineDecay(a, n, warmup_target=b, warmup_steps=w)`` equals
    ``Warmup(CosineDecay(b, n), w, a)``.

    Args:
        schedule: A schedule or a number that follows the warm-up.
        warmup_steps: Updates of the warm-up.
        initial_learning_rate: Rate at step 0.
    """

    schedule: Schedule
    warmup_steps: float = field(metadata={">=": 0})
    initial_learning_rate: float = field(default=0.0, metadata=_NOT_NEGATIVE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        super().__post_init__()

    def rate(self, step: float) -> float:
        if step >= self.warmup_steps:
            return self.schedule(step - self.warmup_steps)
        start = self.initial_learning_rate
        return start + (self.schedule(0) - start) * (step / self.warmup_steps)


_SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls
    for cls in (
        Constant, CosineDecay, CosineDecayRestarts, ExponentialDecay, InverseTimeDecay,
        PiecewiseConstantDecay, PolynomialDecay, Warmup,
    )
}  # fmt: skip

OR_OWN = "or load the plugin that registers it: --plugin MODULE, or PSYNC_PLUGINS=MODULE"
"""Remedy in hints for an unknown name."""

_S = TypeVar("_S", bound=Schedule)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(made: type[_S]) -> type[_S]:
    """Register a user's schedule in this process under its class name; a class decorator.

    The class becomes a frozen dataclass.

    Raises:
        ConfigurationError: The class is not a schedule, or another one has its name.
    """
    name = made.__name__
    is_one = issubclass(made, Schedule)
    check_fits(is_one, "expected a subclass of psync.schedules.Schedule", made)
    cls = made if "__dataclass_fields__" in vars(made) else dataclass(frozen=True)(made)
    add_to(_SCHEDULES, name, cls, f"schedule {name!r}", "give the class a unique name")
    return cls


def add_to(known: dict[str, Any], name: str, cls: type, what: str, hint: str) -> None:
    """Make a class of a plugin known by a name; the same one again replaces itself.

    Raises:
        ConfigurationError: There is another one of its name.
    """
    other, own = known.get(name, cls), (cls.__module__, cls.__qualname__)
    if (other.__module__, other.__qualname__) != own:
        text = f"{what} of {cls.__module__}: the name is already used by {other.__module__}"
        raise ConfigurationError(text, hint=hint)
    known[name] = cls


def of_plugins(known: Mapping[str, Any], home: str) -> list[tuple[str, int]]:
    """Return (name, version) of each class from elsewhere than psync's ``home``, in order."""
    return sorted((name, cls.version) for name, cls in known.items() if cls.__module__ != home)


def registered() -> list[tuple[str, int]]:
    """Return (name, version) of each registered schedule, in order of the names."""
    return of_plugins(_SCHEDULES, __name__)


def registered_in(schedule: Schedule) -> list[type[Schedule]]:
    """Return the registered classes in a schedule: its own class and those of nested schedules."""
    parts = [getattr(schedule, each.name) for each in fields(schedule)]
    inner = [cls for part in parts if isinstance(part, Schedule) for cls in registered_in(part)]
    return inner if type(schedule).__module__ == __name__ else [type(schedule), *inner]


def unknown_in(config: object) -> str:
    """Return the first unknown name in the config of a schedule, or "" if all are known."""
    while isinstance(config, Mapping):
        if isinstance(kind := config.get("kind"), str) and kind not in _SCHEDULES:
            return kind
        config = config.get("schedule")
    return ""


def as_schedule(value: object) -> Schedule:
    """Return ``value`` if it is a schedule, or a constant schedule if it is a number.

    Raises:
        ConfigurationError: It is anything else, such as a function: no ps runs user code.
    """
    if isinstance(value, Schedule):
        return value
    if callable(value):
        raise ConfigurationError(
            f"expected a number or a schedule as learning rate, got the callable {value!r}",
            hint="a ps evaluates the learning rate and runs no user code except plugins; use one "
            f"of {', '.join(sorted(_SCHEDULES))} of psync.schedules, or register your own",
        )
    rate = as_number("learning rate", value)
    hint = "to maximize, push the negative gradient"
    check_fits(rate >= 0, "learning rate: expected a number from 0", rate, hint)
    return Constant(rate)


def described_by(
    config: object, key: str, known: Mapping[str, Any], what: str, options: Iterable[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return the class that a config names, and arguments for all of its fields.

    Args:
        config: Untrusted data from the wire.
        key: Key of the name in it.
        known: Classes by name.
        what: "a schedule", for messages.
        options: Further arguments.

    Raises:
        ConfigurationError: It is no config, names another class, or has other arguments.
    """
    if not isinstance(config, Mapping) or not isinstance(name := config.get(key), str):
        raise ConfigurationError(f"expected the config of {what}, got {shortened(config)}")
    if name not in known:
        raise ConfigurationError(
            f"unknown {what.partition(' ')[2]} {shortened(name)}",
            hint=f"use one of {', '.join(known)}, {OR_OWN}",
        )
    arguments = {key_: value for key_, value in config.items() if key_ != key}
    expected = sorted([*(field.name for field in fields(known[name])), *options])
    if arguments.keys() != set(expected):
        got = shortened(sorted(map(str, arguments)))
        raise ConfigurationError(f"{name}: expected the arguments {expected}, got {got}")
    return known[name], arguments


def from_config(config: object, depth: int = 0) -> Schedule:
    """Return the schedule that ``to_config`` described.

    Args:
        config: Untrusted data from the wire.
        depth: Number of schedules around it.

    Raises:
        ConfigurationError: It is not the config of a schedule.
    """
    if depth == _MAX_DEPTH:
        raise ConfigurationError(f"a schedule is nested more than {_MAX_DEPTH} deep")
    cls, arguments = described_by(config, "kind", dict(sorted(_SCHEDULES.items())), "a schedule")
    if cls is Warmup:
        arguments["schedule"] = from_config(arguments["schedule"], depth + 1)
    schedule: Schedule = cls(**arguments)
    return schedule
