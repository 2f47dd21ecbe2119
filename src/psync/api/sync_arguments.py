"""Arguments of a synchronous optimizer, validated, and its configuration for ps tasks.

The configuration is complete once the global step of the group is known.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from psync.api.gradient_arguments import AnyVariable
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers.handles import Optimizer
from psync.api.variables import Handle, OnReadVariable, Variable
from psync.errors import ConfigurationError, GradientError
from psync.numerics.sums import check_weight
from psync.schedules import as_number
from psync.store.sync_config import SyncConfig

STEP_DTYPE = "int64"
"""Of the global step."""

NOWHERE = (0, -1, 0)
"""Stands for the global step in a configuration until the first push names it."""


def check_wrapped(name: object, opt: object) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        ConfigurationError: It is no optimizer, or one that waits for others itself.
    """
    if not isinstance(opt, Optimizer):
        raise ConfigurationError(
            f"{name}: expected one of psync.optimizers as opt, got {type(opt).__name__}"
        )
    if opt.synchronous:
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


def checked_config(
    name: object,
    optimizer: dict[str, Any],
    *,
    replicas_to_aggregate: object,
    total_num_replicas: object,
    strict: object,
    deterministic: object,
    tensorflow_compat: object,
    min_replicas: object,
    patience_s: object,
    reduction: Any,
    sparse_divisor: Any = "per_index",
) -> SyncConfig:
    """Return the configuration of a synchronous optimizer, as yet without its global step.

    Args:
        name: Of the optimizer.
        optimizer: Configuration of the wrapped one.
        replicas_to_aggregate: See ``SyncReplicasOptimizer``, also for all that follow.
        total_num_replicas: None: as many.
        strict: Implied by ``deterministic``.
        deterministic: A bool.
        tensorflow_compat: A bool.
        min_replicas: A whole number.
        patience_s: Seconds.
        reduction: "mean" or "sum".
        sparse_divisor: "per_index" or "total".

    Raises:
        ConfigurationError: One is wrong, or two contradict each other.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a synchronous optimizer: expected a name, got {name!r}")
    total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
    in_order = checked_flag(name, "deterministic", deterministic)
    return SyncConfig(
        name=name,
        optimizer=optimizer,
        replicas_to_aggregate=checked_count(name, "replicas_to_aggregate", replicas_to_aggregate),
        total_num_replicas=checked_count(name, "total_num_replicas", total),
        min_replicas=checked_count(name, "min_replicas", min_replicas),
        patience_s=float(as_number(f"{name}: patience_s", patience_s)),
        strict=checked_flag(name, "strict", strict) or in_order,
        deterministic=in_order,
        tensorflow_compat=checked_flag(name, "tensorflow_compat", tensorflow_compat),
        reduction=reduction,
        sparse_divisor=sparse_divisor,
        global_step=NOWHERE,
    )


def checked_count(name: str, argument: str, value: object) -> int:
    """Return a whole number as an int. Raises ConfigurationError if ``value`` is none."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # anything: it decides
    except TypeError:
        raise ConfigurationError(
            f"{name}: expected a whole number as {argument}, got {value!r}"
        ) from None


def checked_flag(name: str, argument: str, value: object) -> bool:
    """Return a bool. Raises ConfigurationError if ``value`` is none."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}: expected {argument} to be True or False, got {value!r}")
    return value


def checked_weight(weight: object) -> float:
    """Return the weight of a push. Raises ConfigurationError or GradientError if it is none."""
    if weight == 1.0 and type(weight) is float:
        return weight
    number = as_number("apply_gradients: weight", weight)
    try:
        return check_weight(number)
    except GradientError as exc:
        raise GradientError(f"apply_gradients: {exc.message}") from None


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
    if not isinstance(variable, Variable):
        raise ConfigurationError(
            f"{operation}: expected a variable as global_step, got {type(variable).__name__}",
            hint=hint,
        )
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
    """

    def __init__(self, sync: SyncConfig, averaged_by: Variable | None = None) -> None:
        self.sync = sync
        self.averaged_by = averaged_by
        self.global_step: Variable | None = None  # that of the last push; None before the first
        self._told: dict[str, Any] = {}  # what ps tasks are told, once it is known

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupConfig, (self.sync, self.averaged_by)  # the step is that of pushes from there

    def add_averages(self, averages: object, variables: Iterable[AnyVariable] | None) -> None:
        """Add moving averages that follow each step; see the options of ``SyncReplicasOptimizer``.

        Raises:
            ConfigurationError: There are variables and no averages, or these are none.
            UsageError: The variables are one variable.
            GradientError: One of them is of no float dtype.
        """
        name = self.sync.name
        if averages is None:
            if variables is not None:
                raise ConfigurationError(
                    f"{name}: variables_to_average without variable_averages",
                    hint="variable_averages=psync.ExponentialMovingAverage(0.999)",
                )
            return
        if not isinstance(averages, ExponentialMovingAverage):
            raise ConfigurationError(
                f"{name}: expected an ExponentialMovingAverage as variable_averages, got "
                f"{type(averages).__name__}"
            )
        single = isinstance(variables, Handle)  # apply says what is wrong with that
        chosen = variables if variables is None or single else list(variables)
        averages.apply(chosen)
        follows = averages.num_updates
        self.averaged_by = follows if isinstance(follows, Variable) else None
        self.sync = dataclasses.replace(
            self.sync,
            decay=averages.decay,
            num_updates=follows is not False,
            averages=averages.pairs(chosen),
        )

    def of_step(self, global_step: Variable) -> dict[str, Any]:
        """Return what ps tasks are told; the global step becomes part of it with the first push.

        Raises:
            ConfigurationError: It is another one than before, or than the averages follow.
        """
        if global_step is self.global_step:
            return self._told
        name, before = self.sync.name, self.global_step
        if before is not None and before.origin == global_step.origin:
            raise ConfigurationError(
                f'{name}: expected the global step "{before.name}", as before, got '
                f'"{global_step.name}"'
            )
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
