"""Optimizer state on the ps tasks, for users: slots, iterations, learning rate, push results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from psync.api.variables import ShardedVariable, Variable
from psync.client.optimizer_client import num_pushes, set_optimizer, set_slot
from psync.numerics.casting import fitting
from psync.numerics.update_rule import slot_dtype
from psync.specs import STEP_BITS, Outcome, VariableSpec, checked_integer, count_of
from psync.wire.messages import Pushed

if TYPE_CHECKING:
    from psync.api.optimizers.handles import Optimizer

MAX_ITERATIONS = 1 << 32
"""Of an optimizer whose number is set."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of a push.

    Attributes:
        outcome: ACCEPTED, or DUPLICATE if another run of the closure was first. A synchronous push
            may also be STALE: it was older than the step and not applied.
        step: Pushes of the optimizer including this one, as known to the ps tasks that applied it.
            Synchronous: the token, which is the step from which the replica continues.
        staleness: Updates by others since this task's previous push, a bound on the age of the
            pulled values. Synchronous: steps completed since the values were pulled.
        partial: Synchronous: whether its step was completed with fewer pushes than the target.
        count: Synchronous: pushes in its step. 0: the push is in no step, or in one that was not
            yet complete when the token arrived.
    """

    outcome: Outcome
    step: int
    staleness: int
    partial: bool = False
    count: int = 0


def result_of(answers: Sequence[Pushed], known: int) -> PushResult:
    """Return what became of a push.

    Args:
        answers: Of the ps tasks.
        known: The number of pushes that was known before, marked: what others have done since is
            the staleness, unless the number was set meanwhile.
    """
    step = max(known, *(answer.step for answer in answers))  # a duplicate's is 0
    refused = [answer.outcome for answer in answers if answer.outcome != "accepted"]
    outcome = Outcome(refused[0]) if refused else Outcome.ACCEPTED
    others = step - known - 1 if step >> STEP_BITS == known >> STEP_BITS else 0
    return PushResult(outcome, count_of(step), max(0, others))


@dataclass(frozen=True, slots=True)
class Slot:
    """An optimizer's companion array of a variable, such as a momentum."""

    variable: Variable | ShardedVariable
    optimizer: Optimizer
    name: str

    @property
    def dtype(self) -> str:
        """Name of its dtype: the variable's, or float32 if the variable has half precision."""
        return slot_dtype(self.variable.dtype).name

    @property
    def first_element(self) -> float:
        """Value of all its elements before the first push."""
        return self.optimizer._rule.initial_slot(self.name)

    async def read(self) -> np.ndarray:
        """Return the slot's value, which has the variable's shape.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ValueMismatchError: The variable's dtype cannot be optimized.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        operation = f'read of slot "{self.name}" of "{self.variable.name}"'
        optimizer, runtime = self.optimizer, await self.optimizer._runtime(operation, self.variable)
        await runtime.ps.define_optimizer(optimizer.number, optimizer._config)
        plan = runtime.ps.plan((self._spec(),))
        (array,) = await runtime.ps.pull(plan, optimizer=optimizer.number, slot=self.name)
        return array

    async def assign(self, value: Any) -> Self:
        """Set the slot's value, for example from a checkpoint.

        Do not call it while steps push to the variable: the last write wins.

        Args:
            value: Array of the variable's shape, or a value that numpy converts to one. Not copied.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running.
            ValueMismatchError: Shape or dtype do not fit.
            ParameterServerLost: A ps is lost.

        Cancellation: Some shards are set, others are not.
        """
        spec = self._spec()
        operation = f'assign to slot "{self.name}" of "{spec.name}"'
        array = fitting(value, spec, operation, casting="same_kind")
        optimizer, runtime = self.optimizer, await self.optimizer._runtime(operation, self.variable)
        await set_slot(
            runtime.ps, spec, array,
            optimizer=optimizer.number, config=optimizer._config, slot=self.name,
        )  # fmt: skip
        return self

    def _spec(self) -> VariableSpec:
        """Return what the variable would be if it were the slot."""
        spec, dtype = self.variable.spec, self.dtype
        if dtype == spec.dtype:
            return spec
        shards = tuple(dataclasses.replace(shard, dtype=dtype) for shard in spec.shards)
        return dataclasses.replace(spec, dtype=dtype, shards=shards)


@dataclass(frozen=True, slots=True)
class Iterations:
    """The number of updates that an optimizer has made.

    An update is one push, or ``gradient_accumulation_steps`` pushes. Each push counts once,
    regardless of how many ps tasks hold its variables and how often it was sent. Pushes that have
    returned are counted; those in flight may be.

    Schedules follow the same number as the ps that applies an update knows it. Pushes in flight may
    be missing, and so may pushes of the last 50 ms that went to other ps tasks only.
    """

    optimizer: Optimizer

    async def read(self) -> int:
        """Return the number.

        Raises:
            UsageError: The call is outside a step, and no coordinator is running; or there
                is no variable.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.
        """
        optimizer = self.optimizer
        runtime = await optimizer._runtime("read of iterations")
        pushes = await num_pushes(runtime.ps, optimizer.number, optimizer._config)
        return optimizer._rule.iteration(pushes)

    async def assign(self, step: int) -> None:
        """Set the number on all ps tasks, for example from a checkpoint.

        Raises:
            UsageError: See ``read``; or the value is not a number of updates.
            ParameterServerLost: A ps is lost.

        Cancellation: Some ps tasks have the new number, others do not.
        """
        optimizer = self.optimizer
        pushes = pushes_of(optimizer, step)
        runtime = await optimizer._runtime("assign to iterations")
        await set_optimizer(runtime.ps, optimizer.number, optimizer._config, step=pushes)


def pushes_of(optimizer: Optimizer, step: object) -> int:
    """Return of how many pushes an optimizer makes so many updates.

    Raises:
        ConfigurationError: It is no number of updates.
    """
    each = optimizer._rule.options.gradient_accumulation_steps or 1
    highest = min(MAX_ITERATIONS, (1 << STEP_BITS - 1) // each)
    expected = f"iterations: expected a whole number from 0 to {highest}"
    return checked_integer(expected, step, 0, highest) * each


def updates_of(optimizer: Optimizer, pushes: int) -> int:
    """Return how many updates an optimizer makes of so many pushes."""
    return optimizer._rule.iteration(pushes)
