"""Arguments of a synchronous optimizer, validated, and its configuration for ps tasks.

The configuration is complete once the global step of the group is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from psync.api.gradient_arguments import AnyVariable
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers.handles import Optimizer
from psync.api.variables import Handle, OnReadVariable, Variable
from psync.errors import ConfigurationError, ValueMismatchError
from psync.numerics.sums import check_weight
from psync.specs import as_number, checked_kind
from psync.store.sync_config import SyncConfig

STEP_DTYPE = "int64"
"""Of the global step."""

NOWHERE = (0, -1, 0)
"""Stands for the global step in a configuration until the first push names it."""


def check_wrapped(name: object, opt: object) -> None:
    """Refuse what cannot be wrapped, and a name that is none.

    Raises:
        ConfigurationError: It is no optimizer, or one that waits for others itself.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a synchronous optimizer: expected a name, got {name!r}")
    opt = checked_kind(f"{name}: expected one of psync.optimizers as opt", opt, Optimizer)
    if opt._synchronous:
        raise ConfigurationError(
            f"{name}: opt {opt.get_name()!r} is synchronous already",
            hint="wrap one of psync.optimizers",
        )
    if opt._staleness_bound is not None:
        raise ConfigurationError(
            f"{name}: opt {opt.get_name()!r} has a staleness bound, which is of no use here: "
            "gradients of an earlier step are never applied",
            hint="leave out staleness_bound",
        )


def checked_weight(weight: object) -> float:
    """Return the weight of a push.

    Raises:
        ConfigurationError, ValueMismatchError: It is not a valid weight.
    """
    if weight == 1.0 and type(weight) is float:
        return weight
    number = as_number("apply_gradients: weight", weight)
    try:
        return check_weight(number)
    except ValueMismatchError as exc:
        raise ValueMismatchError(f"apply_gradients: {exc.message}") from None


def checked_step(operation: str, variable: object) -> Variable:
    """Return the global step that was given to ``operation``.

    Raises:
        ConfigurationError: It is not a variable, or not an int64 scalar.
    """
    hint = "global_step=psync.get_or_create_global_step(), made in `with strategy.scope():`"
    if variable is None:
        raise ConfigurationError(
            f"{operation}: global_step is None, and without it nobody knows which gradients are "
            "stale",
            hint=hint,
        )
    expected = f"{operation}: expected a variable as global_step"
    variable = checked_kind(expected, variable, Variable, hint=hint)
    if isinstance(variable, OnReadVariable):
        raise ConfigurationError(
            f'{operation}: global_step "{variable.name}" is synchronized on read: each worker has '
            "another value",
            hint=hint,
        )
    if variable.shape != () or variable.spec.dtype != STEP_DTYPE:
        raise ConfigurationError(
            f'{operation}: expected an {STEP_DTYPE} scalar as global_step, got "{variable.name}" '
            f"of shape {variable.shape} {variable.spec.dtype}",
            hint=hint,
        )
    return variable


class GroupConfig:
    """The configuration of one synchronous optimizer.

    Args:
        sync: As its arguments make it, without a global step.
        averaged_by: The variable whose value the decay of its moving averages follows.
        averaged: A variable that has one of these; the others are of its strategy.
    """

    def __init__(
        self,
        sync: SyncConfig,
        averaged_by: Variable | None = None,
        averaged: AnyVariable | None = None,
    ) -> None:
        self.sync = sync
        self.averaged_by = averaged_by
        self.averaged = averaged
        self.global_step: Variable | None = None  # that of the last push; None before the first
        self._told: dict[str, Any] = {}  # what ps tasks are told, once it is known

    def __reduce__(self) -> tuple[Any, ...]:
        # The global step is that of pushes from there.
        return GroupConfig, (self.sync, self.averaged_by, self.averaged)

    def add_averages(self, averages: object, variables: Iterable[AnyVariable] | None) -> None:
        """Add moving averages that follow each step; see the options of ``SyncReplicasOptimizer``.

        Raises:
            ConfigurationError: There are variables and no averages, these are none, or the
                variables are of several strategies.
            UsageError: The variables are one variable.
            ValueMismatchError: One of them is of no float dtype.
        """
        name = self.sync.name
        if averages is None:
            if variables is not None:
                raise ConfigurationError(
                    f"{name}: variables_to_average without variable_averages",
                    hint="variable_averages=psync.ExponentialMovingAverage(0.999)",
                )
            return
        expected = f"{name}: expected an ExponentialMovingAverage as variable_averages"
        averages = checked_kind(expected, averages, ExponentialMovingAverage)
        single = isinstance(variables, Handle)  # apply says what is wrong with that
        chosen = variables if variables is None or single else list(variables)
        averages.apply(chosen)
        follows = averages.num_updates
        self.averaged_by = follows if isinstance(follows, Variable) else None
        averaged = [each for each, _ in averages.items() if chosen is None or each in chosen]
        self.averaged = averaged[0] if averaged else None
        for other in averaged:
            self._check_averaged(other)
        self.sync = dataclasses.replace(
            self.sync,
            decay=averages.decay,
            num_updates=follows is not False,
            averages=averages._pairs(chosen),
        )

    def of_step(self, global_step: Variable) -> dict[str, Any]:
        """Return what ps tasks are told; the global step becomes part of it with the first push.

        Raises:
            ConfigurationError: It is another one than before, or than the averages follow, or of
                another strategy than these.
        """
        if global_step is self.global_step:
            return self._told
        name, before = self.sync.name, self.global_step
        if before is not None and before.origin == global_step.origin:
            raise ConfigurationError(
                f'{name}: expected the global step "{before.name}", as before, got '
                f'"{global_step.name}"'
            )
        self._check_averaged(global_step)
        follows = self.averaged_by
        if follows is not None and follows is not global_step:
            raise ConfigurationError(
                f'{name}: the decay of its moving averages follows "{follows.name}", and not '
                f'the global step "{global_step.name}"',
                hint="ExponentialMovingAverage(…, num_updates=True)",
            )
        (shard,) = global_step.spec.shards
        sync = dataclasses.replace(self.sync, global_step=(shard.ps, *shard.key))
        self._told, self.global_step = sync.to_config(), global_step
        return self._told

    def _check_averaged(self, other: AnyVariable) -> None:
        if self.averaged is not None and self.averaged.origin != other.origin:
            raise ConfigurationError(
                f'{self.sync.name}: averages of "{self.averaged.name}", and variable '
                f'"{other.name}", which belongs to another program or strategy',
                hint="make an optimizer, and an ExponentialMovingAverage, for each strategy",
            )
