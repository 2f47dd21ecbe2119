"""Optimizers: what a step pushes gradients through. The mathematics runs on the ps tasks.

Layer: L4. Imports: errors, specs, context, pulls, runtime, schedules, scopes, update_rules,
variables, wire.

An optimizer is a handle: a number and a configuration. A ps gets the configuration with the
first push on a connection, keeps the slots beside their shards, and applies each push at
once (asynchronous training). The averaged, synchronous form is ``SyncReplicasOptimizer``.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from psync import update_rules
from psync.context import forbid_in_dataset, forbid_in_step
from psync.errors import ConfigurationError, GradientError, UsageError
from psync.pulls import pull
from psync.runtime import Runtime, current_runtime
from psync.schedules import Schedule
from psync.scopes import running_scopes
from psync.specs import Outcome, VariableSpec
from psync.staleness_bound import StalenessBound
from psync.variables import ShardedVariable, Variable, fitting, runtime_of
from psync.wire.messages import Pushed

AnyVariable = Variable | ShardedVariable
GradsAndVars = Iterable[tuple[Any, AnyVariable]]
ValueAndGrad = Callable[..., tuple[Any, Any]]

PROCESS = os.urandom(8).hex()
"""Tells optimizers of this process from those that a worker made for itself."""
_numbers = itertools.count(1)
_interned: weakref.WeakValueDictionary[tuple[str, int], Optimizer] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push.

    Attributes:
        outcome: ACCEPTED, or DUPLICATE where another run of the closure was first. Synchronous
            ones also STALE: older than the step, and so not applied.
        step: Of the optimizer, after the push: the highest that a ps named. Synchronous: the
            token, which is the step at which the replica may go on.
        staleness: Updates of others since this task's last push: at most so old were the values.
            Synchronous: steps that were closed since the values were pulled.
        partial: Synchronous: whether its step was closed with fewer pushes than the target.
        count: Synchronous: pushes in its step. 0: it counts in none, or in one that was not
            closed yet when the token was there.
    """

    outcome: Outcome
    step: int
    staleness: int
    partial: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """An optimizer's companion array of a variable, such as a momentum."""

    variable: AnyVariable
    optimizer: Optimizer
    name: str

    async def read(self) -> np.ndarray:
        """Return the slot's value; it is of the variable's shape.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        operation = f'read of slot "{self.name}" of "{self.variable.name}"'
        runtime = await runtime_of(operation, self.variable)
        runtime.check_open(operation)
        await self.optimizer._define(runtime)
        plan = runtime.ps.plan((self.variable.spec,))
        arrays = await runtime.ps.pull(plan, optimizer=self.optimizer.number, slot=self.name)
        return arrays[0]


class Optimizer:
    """Base of all optimizers.

    ``synchronous``: whether its pushes are counted in steps, which somebody has to complete.

    Args:
        rule: What is applied to each shard.
        name: For messages; default: the class's name.
        forbid_nonfinite: Whether a gradient with NaN or infinity is an error.
        staleness_bound: How far a worker may run ahead of the others; None: as far as it likes.
    """

    synchronous: ClassVar[bool] = False

    def __init__(
        self,
        rule: update_rules.UpdateRule,
        *,
        name: str | None = None,
        forbid_nonfinite: bool = False,
        staleness_bound: StalenessBound | None = None,
    ) -> None:
        forbid_in_step(
            f"making an optimizer ({type(self).__name__})",
            instead="make it once in main(), on the coordinator; the step may capture it. "
            "Its slots live as long as it does",
        )
        forbid_in_dataset("making an optimizer")
        if not isinstance(staleness_bound, StalenessBound | None):
            raise ConfigurationError(
                f"expected a StalenessBound or None as staleness_bound, got {staleness_bound!r}",
                hint="staleness_bound=psync.StalenessBound(2)",
            )
        self.number = next(_numbers)
        self.origin = PROCESS
        self._rule = rule
        self._config = rule.to_config()
        self._name = name or type(self).__name__
        self._forbid_nonfinite = forbid_nonfinite
        self._staleness_bound = staleness_bound
        self._arrived: tuple[AnyVariable, ...] = ()
        _interned[(self.origin, self.number)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        variables = [v for scope in running_scopes() for v in scope.trainable_variables]
        return (
            _restore,
            (
                type(self),
                self.origin,
                self.number,
                self._state(),
                tuple(variables or self._arrived),
            ),
        )

    def _state(self) -> dict[str, Any]:
        """Return what this handle is made from in another process."""
        return {
            "config": self._config, "name": self._name, "forbid_nonfinite": self._forbid_nonfinite,
            "staleness_bound": self._staleness_bound,
        }  # fmt: skip

    def _set_state(self, state: dict[str, Any]) -> None:
        self._config, self._name = state["config"], state["name"]
        self._forbid_nonfinite = state["forbid_nonfinite"]
        self._staleness_bound = state["staleness_bound"]
        self._rule = update_rules.rule_from_config(self._config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} {self._config}>"

    def get_name(self) -> str:
        """Return the name."""
        return self._name

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots."""
        return list(self._rule.slot_names())

    def get_slot(self, var: AnyVariable, name: str) -> Slot | None:
        """Return the slot ``name`` of ``var``, or None if this optimizer has no such slot."""
        return Slot(var, self, name) if name in self._rule.slot_names() else None

    def variables(self) -> list[Slot]:
        """Return its slots of all trainable variables.

        Raises:
            UsageError: It has slots, and it is not known here of which variables; see
                ``compute_gradients``.

        Source: ``tf.compat.v1.train.Optimizer.variables``.
        """
        names = self._rule.slot_names()
        if not names:
            return []
        variables = self._trainable_variables("variables")
        return [Slot(variable, self, name) for variable in variables for name in names]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return dict(self._config)

    async def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: AnyVariable | None = None
    ) -> PushResult:
        """Push gradients; each ps applies them to its shards at once.

        With a ``staleness_bound`` a step then waits until the others are not too far behind.

        Args:
            grads_and_vars: Pairs of gradient and variable. A gradient is an array (or anything
                that numpy makes one of without a copy, such as a torch or jax array on the
                CPU) of the variable's shape and dtype; None is passed over. It is not copied:
                do not change it before this returns.
            global_step: A variable that is raised by one once all are applied.

        Returns:
            The outcome, the optimizer's step, and the staleness.

        Raises:
            GradientError: No gradient at all, a variable twice, a wrong shape or dtype, or NaN
                or infinity where this optimizer forbids them. Nothing was pushed.
            UsageError: Outside a step without a running coordinator, or after the step ended.
            ClosureCancelled: In a step that was cancelled.
            ParameterServerLost: A ps is gone.

        Cancellation: A push once begun ends in the background; gradients must not change
            until then.

        Source: ``tf.compat.v1.train.Optimizer.apply_gradients``. Unlike there, gradients that
            are pushed again after a worker's loss are applied at most once on each shard.
        """
        forbid_in_dataset("apply_gradients")
        pairs = self._checked(grads_and_vars)
        runtime = await runtime_of("apply_gradients", *(variable for _, variable in pairs))
        self._check_origin(runtime)
        closure, ordinal = runtime.begin_update("push")
        plan = runtime.ps.plan(tuple(variable.spec for _, variable in pairs))
        known = runtime.steps.get(self.number, 0)
        answers = await runtime.ps.push(
            plan,
            [gradient for gradient, _ in pairs],
            optimizer=self.number,
            config=self._config,
            step=known,
            closure=closure,
            ordinal=ordinal,
        )
        result = self._result(runtime, known, answers)
        if global_step is not None:
            await global_step.assign_add(1)
        bound = self._staleness_bound
        if bound is not None and result.outcome is Outcome.ACCEPTED:
            if closure >= 0 or runtime.in_session:  # else the program itself, which has no clock
                await bound.end_round(runtime, self.number)
        return result

    async def compute_gradients(
        self, value_and_grad: ValueAndGrad, var_list: Iterable[AnyVariable] | None = None
    ) -> list[tuple[Any, AnyVariable]]:
        """Pull the variables and return pairs of gradient and variable.

        Args:
            value_and_grad: Called with the values (one argument each); returns the loss and
                the gradients in the same order.
            var_list: The variables. Default: all trainable variables of the strategy. Where
                steps run in other processes than the program, those that were declared before
                the step was first scheduled.

        Raises:
            GradientError: If the function returns another number of gradients, or something in
                ``var_list`` is no variable.
            UsageError: Without ``var_list``: there is no trainable variable; or, outside a step,
                two strategies are running.

        Cancellation: Safe.
        """
        _, grads = await self._value_and_gradients(value_and_grad, var_list)
        return grads

    async def minimize(
        self,
        value_and_grad: ValueAndGrad,
        var_list: Iterable[AnyVariable] | None = None,
        global_step: AnyVariable | None = None,
    ) -> Any:
        """Pull, compute and push: ``compute_gradients``, then ``apply_gradients``.

        Returns:
            The loss.
        """
        loss, grads = await self._value_and_gradients(value_and_grad, var_list)
        await self.apply_gradients(grads, global_step)
        return loss

    async def _value_and_gradients(
        self, value_and_grad: ValueAndGrad, var_list: Iterable[AnyVariable] | None
    ) -> tuple[Any, list[tuple[Any, AnyVariable]]]:
        variables = self._listed(var_list)
        loss, grads = value_and_grad(*await pull(variables))
        grads = list(grads)
        if len(grads) != len(variables):
            raise GradientError(
                f"value_and_grad: expected {len(variables)} gradients, got {len(grads)}"
            )
        return loss, list(zip(grads, variables, strict=True))

    def _listed(self, var_list: Iterable[AnyVariable] | None) -> list[AnyVariable]:
        if var_list is None:
            return self._trainable_variables("compute_gradients without var_list")
        variables = [var_list] if isinstance(var_list, Variable | ShardedVariable) else var_list
        for variable in (listed := list(variables)):
            if not isinstance(variable, Variable | ShardedVariable):
                raise GradientError(f"var_list: expected variables, got {type(variable).__name__}")
        return listed

    def _trainable_variables(self, operation: str) -> list[AnyVariable]:
        """Return the trainable variables of the strategy that is served here."""
        runtime, scopes = current_runtime(), running_scopes()
        if runtime is not None:
            scopes = [scope for scope in scopes if scope.origin == runtime.origin]
        elif len(scopes) > 1:
            raise UsageError(
                f"{operation}: {len(scopes)} strategies are running", hint="say which variables"
            )
        if scopes:
            variables = list(scopes[0].trainable_variables)
        else:  # another process than the program's
            origin = runtime.origin if runtime is not None else None
            variables = [variable for variable in self._arrived if variable.origin == origin]
        if not variables:
            raise UsageError(
                f"{operation}: no trainable variable is known here",
                hint="declare variables before the step that captures this optimizer is first "
                "scheduled, or say which variables",
            )
        return variables

    def _checked(self, grads_and_vars: GradsAndVars) -> list[tuple[np.ndarray, AnyVariable]]:
        pairs: list[tuple[np.ndarray, AnyVariable]] = []
        without: list[str] = []  # names of variables whose gradient is None
        seen: dict[int, set[int]] = {}  # of each variable, the shards
        for pair in grads_and_vars:
            gradient, variable = _pair(pair)
            if gradient is None:
                without.append(variable.name)
                continue
            spec = variable.spec
            shards = seen.setdefault(spec.variable_id, set())
            for shard in spec.shards:
                if shard.index in shards:
                    raise GradientError(f'apply_gradients: variable "{spec.name}" occurs twice')
                shards.add(shard.index)
            pairs.append((self._checked_gradient(gradient, spec), variable))
        if not pairs:
            raise GradientError(
                f"apply_gradients: all gradients are None ({', '.join(without)})"
                if without
                else "apply_gradients: no gradients given"
            )
        return pairs

    def _checked_gradient(self, gradient: Any, spec: VariableSpec) -> np.ndarray:
        array = fitting(gradient, spec, f'gradient for "{spec.name}"', casting="no")
        if self._forbid_nonfinite:
            bad = array.size - int(np.count_nonzero(np.isfinite(array)))
            if bad:
                raise GradientError(
                    f'gradient for "{spec.name}": {bad} of {array.size} elements are NaN or '
                    "infinite",
                    hint=f"{self._name} was made with forbid_nonfinite=True",
                )
        return array

    def _check_origin(self, runtime: Runtime) -> None:
        if runtime.program and runtime.program != self.origin:
            raise UsageError(
                f"optimizer {self._name!r} was made on this worker, where nobody shares its slots",
                hint="make it in main(), on the coordinator, and let the step capture it",
            )

    async def _define(self, runtime: Runtime) -> None:
        self._check_origin(runtime)
        await runtime.ps.define_optimizer(self.number, self._config)

    def _result(self, runtime: Runtime, known: int, answers: Sequence[Pushed]) -> PushResult:
        step = max(known, *(answer.step for answer in answers))  # a duplicate's is 0
        runtime.steps[self.number] = max(step, runtime.steps.get(self.number, 0))
        refused = [answer.outcome for answer in answers if answer.outcome != "accepted"]
        outcome = Outcome(refused[0]) if refused else Outcome.ACCEPTED
        return PushResult(outcome, step, max(0, step - known - 1))


def any_synchronous() -> bool:
    """Return whether this process has an optimizer whose pushes are counted in steps."""
    return any(optimizer.synchronous for optimizer in _interned.values())


def _pair(pair: Any) -> tuple[Any, AnyVariable]:
    """Return (gradient, variable)."""
    try:
        gradient, variable = pair
    except (TypeError, ValueError):
        raise GradientError(
            f"apply_gradients: expected (gradient, variable) pairs, got {type(pair).__name__}",
            hint="apply_gradients(zip(gradients, variables))",
        ) from None
    if not isinstance(variable, Variable | ShardedVariable):
        raise GradientError(
            "apply_gradients: expected (gradient, variable) pairs, got "
            f"{type(variable).__name__} for the variable"
        )
    return gradient, variable


def _restore(
    cls: type[Optimizer],
    origin: str,
    number: int,
    state: dict[str, Any],
    variables: tuple[AnyVariable, ...],
) -> Optimizer:
    """Return this process's handle of an optimizer: one object, however often it arrives."""
    optimizer = _interned.get((origin, number))
    if optimizer is None:
        optimizer = cls.__new__(cls)
        optimizer.number, optimizer.origin = number, origin
        optimizer._arrived = ()
        optimizer._set_state(state)
        _interned[(origin, number)] = optimizer
    if len(variables) > len(optimizer._arrived):  # more may have been declared since
        optimizer._arrived = variables
    return optimizer


class SGD(Optimizer):
    """Gradient descent, with momentum on request.

    ``w -= learning_rate * g``; with momentum ``velocity = momentum * velocity - learning_rate * g``
    and ``w += velocity``, or with Nesterov ``w += momentum * velocity - learning_rate * g``.

    Args:
        learning_rate: A number or a schedule, which each ps evaluates at
            max(its own step, the step that the push carries).
        momentum: 0 for none.
        nesterov: Look ahead along the velocity.
        name: For messages.
        forbid_nonfinite: Whether a gradient with NaN or infinity is an error.
        staleness_bound: How far a worker may run ahead of the others; None: as far as it likes.

    Slots: "momentum", if there is one.

    Source: ``keras.optimizers.SGD`` (Keras 3).
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        name: str | None = None,
        forbid_nonfinite: bool = False,
        staleness_bound: StalenessBound | None = None,
    ) -> None:
        super().__init__(
            update_rules.SGD(learning_rate, momentum, nesterov),
            name=name,
            forbid_nonfinite=forbid_nonfinite,
            staleness_bound=staleness_bound,
        )


class Adam(Optimizer):
    """Adam.

    Args:
        learning_rate: A number or a schedule, see ``SGD``.
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the square root of the second moment.
        amsgrad: Divide by the largest second moment so far.
        name: For messages.
        forbid_nonfinite: Whether a gradient with NaN or infinity is an error.
        staleness_bound: How far a worker may run ahead of the others; None: as far as it likes.

    The step in the bias correction is the ps's count of this optimizer's pushes.

    Source: Kingma and Ba 2015; ``keras.optimizers.Adam`` (Keras 3) for formula and epsilon.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *,
        name: str | None = None,
        forbid_nonfinite: bool = False,
        staleness_bound: StalenessBound | None = None,
    ) -> None:
        super().__init__(
            update_rules.Adam(learning_rate, beta_1, beta_2, epsilon, amsgrad),
            name=name,
            forbid_nonfinite=forbid_nonfinite,
            staleness_bound=staleness_bound,
        )
