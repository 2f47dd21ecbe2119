"""What ps tasks are told of a synchronous optimizer: complete once its global step is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from psync.api.gradient_arguments import AnyVariable
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.variables import Handle, Variable
from psync.errors import ConfigurationError
from psync.store.sync_config import SyncConfig


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

    def add_averages(self, averages: object, variables: Iterable[AnyVariable] | None) -> None:
        """Let moving averages follow each step; as the arguments of ``SyncReplicasOptimizer`` say.

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
