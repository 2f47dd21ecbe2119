"""Options common to all update rules: weight decay, clipping, gradient accumulation.

Data, and the checks that rules share. An update needs more than its elements:

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psync.errors import ConfigurationError
from psync.specs import as_number

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
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise ConfigurationError(
                f"optimizer: expected a whole number as gradient_accumulation_steps, got {steps!r}"
            )
        if steps is not None and not 2 <= steps < 1 << 31:
            raise ConfigurationError(
                f"optimizer: expected gradient_accumulation_steps between 2 and {(1 << 31) - 1}, "
                f"got {steps}",
                hint="leave it out to apply each gradient at once",
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
    if not minimum <= plain <= maximum:
        raise ConfigurationError(
            f"{rule}: expected {name} between {minimum} and {maximum}, got {plain}"
        )
    return float(plain)


def flag(rule: str, name: str, value: object) -> bool:
    """Return a bool. Raises ConfigurationError if ``value`` is not one."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{rule}: expected {name} to be True or False, got {value!r}")
    return value


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
