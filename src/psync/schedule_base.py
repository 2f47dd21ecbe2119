"""What all learning-rate schedules have in common: a number for each step, and plain data.

The schedules themselves are in ``schedules``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from numbers import Integral, Real

from psync.errors import ConfigurationError

Config = dict[str, object]
"""What travels: only str, bool, int, float, None, lists and dicts of these."""


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate as a function of the number of updates applied so far."""

    def __call__(self, step: float) -> float:
        """Return the learning rate of the update that follows ``step`` updates."""
        try:
            return float(self._rate(step))
        except OverflowError:  # a growing "decay": what the formula gives in float arithmetic
            return math.inf

    @abstractmethod
    def _rate(self, step: float) -> float: ...

    def to_config(self) -> Config:
        """Return a dict of msgpack types from which ``from_config`` rebuilds an equal schedule."""
        config: Config = {"kind": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Schedule):
                value = value.to_config()
            elif isinstance(value, tuple):
                value = list(value)
            config[field.name] = value
        return config

    def _number(
        self, name: str, *, minimum: float | None = None, above: float | None = None
    ) -> None:
        """Check that argument ``name`` is a finite number in range, and make it a plain one."""
        number = as_number(f"{type(self).__name__}: {name}", getattr(self, name))
        if minimum is not None and number < minimum:
            raise ConfigurationError(
                f"{type(self).__name__}: expected {name} >= {minimum}, got {number}"
            )
        if above is not None and number <= above:
            raise ConfigurationError(
                f"{type(self).__name__}: expected {name} > {above}, got {number}"
            )
        object.__setattr__(self, name, number)

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{type(self).__name__}: expected {name} to be True or False, got {value!r}"
            )


def as_number(what: str, value: object) -> float:
    """Return a finite real number as a Python int or float.

    Raises:
        ConfigurationError: If ``value`` is not one; the message begins with ``what``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigurationError(f"{what}: expected a number, got {shortened(value)}")
    try:
        number = int(value) if isinstance(value, Integral) else float(value)
        finite = math.isfinite(number)
    except OverflowError:  # an int or a fraction beyond the range of floats
        finite = False
    if not finite:
        raise ConfigurationError(f"{what}: expected a finite number, got {shortened(value)}")
    return number


def shortened(value: object) -> str:
    """Return ``repr(value)``, at most 200 characters of it, for messages."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
