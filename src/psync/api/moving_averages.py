"""Moving averages of variables, kept on the ps tasks beside the variables themselves.

An averaged model is often the better one to evaluate. Each average is a variable (the
*shadow*) that lies beside its original, shard by shard, and begins with its value there; so
neither creating nor updating one moves values over the network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from psync.api.pulls import mapped
from psync.api.scopes import Scope, place_of, runtime_of, scope_for, scope_of
from psync.api.variables import (
    Handle,
    OnReadVariable,
    ShardedVariable,
    Variable,
    check_step,
    declared_in,
    global_step_of,
)
from psync.client.context import forbid_in_step
from psync.errors import UsageError, ValueMismatchError, check_fits
from psync.numerics.sums import growing_decay
from psync.replicas.context import open_scope
from psync.specs import checked_kind

AnyVariable = Variable | ShardedVariable


class ExponentialMovingAverage:
    """Averages in which the influence of a value decays: ``s -= (1 - decay) * (s - v)``.

    In synchronous training, pass it to ``SyncReplicasOptimizer(variable_averages=…)``; the ps tasks
    then update the averages in each step. In asynchronous training, a step or the program calls
    ``await ema.update()``.

    Args:
        decay: Number in [0, 1), close to 1: 0.999 averages about the last thousand values.
        num_updates: True, or the global step (an integer variable): the decay begins low and grows
            with the step n, min(decay, (1 + n) / (10 + n)), so that the first values decay quickly.
            True means the global step of the strategy or of the synchronous optimizer.
        zero_debias: No effect, as in TensorFlow for averages of variables: they begin with the
            variable's value, so there is no zero to correct for.
        name: Part of the names of the averages: "w/ExponentialMovingAverage".

    Attributes:
        name: The given name.
        decay: The given decay; with ``num_updates`` its limit.
        num_updates: True or a variable: the decay follows the step; False: it is constant.

    Raises:
        ConfigurationError: ``decay``, ``num_updates`` or ``name`` is invalid.
        UsageError: ``num_updates`` is a variable but not an integer scalar.

    Source: ``tf.train.ExponentialMovingAverage``; Polyak and Juditsky 1992. There ``apply`` returns
        an operation that updates the averages; here ``apply`` declares them and ``update`` updates
        them.

    Example:
        ema = psync.ExponentialMovingAverage(0.999)
        ema.apply([w, b])
        ...
        weights, bias = await psync.pull(ema.averages((w, b)))
    """

    def __init__(
        self,
        decay: float,
        num_updates: bool | Variable | None = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        fits = isinstance(decay, int | float | np.floating) and 0 <= decay < 1
        hint = "0.999 averages about the last thousand values"
        check_fits(fits, "moving average: expected decay in [0, 1)", decay, hint)
        if isinstance(num_updates, Handle):
            check_step(num_updates, "num_updates of a moving average")
        else:
            expected = "moving average: expected num_updates to be True or the global step"
            hint = "a constant number n means the decay min(decay, (1 + n) / (10 + n))"
            check_fits(isinstance(num_updates, bool | None), expected, num_updates, hint)
        check_fits(isinstance(name, str) and name != "", "moving average: expected a name", name)
        self.decay = float(decay)
        self.num_updates: Variable | bool = False if num_updates is None else num_updates
        self.name = name
        self._shadows: dict[AnyVariable, AnyVariable] = {}

    def __repr__(self) -> str:
        return f"<ExponentialMovingAverage decay={self.decay:g} of {len(self._shadows)} variables>"

    def __getstate__(self) -> dict[str, Any]:
        # On a worker there is no strategy in which the global step could be looked up.
        step = self._step_variable()
        return vars(self) if step is None else {**vars(self), "num_updates": step}

    def apply(self, var_list: Iterable[AnyVariable] | None = None) -> None:
        """Declare averages of variables; variables that have one keep it.

        An average begins with the variable's value: its initial value before training, otherwise
        its value when the average is created. Averages are not trainable.

        Args:
            var_list: Variables of a float dtype. Default: the trainable variables of the strategy
                whose scope is open.

        Raises:
            ValueMismatchError: A variable has another dtype. Nothing was declared.
            UsageError: Inside a step; an element is not a variable, or is a single shard; or no
                ``var_list`` outside a scope.
            ClosedError: The strategy's coordinator was closed.
        """
        forbid_in_step(
            "declaring moving averages",
            instead="call apply in main(), on the coordinator, before the step is scheduled",
        )
        if var_list is None:
            var_list = scope_for("moving average: apply without var_list", "call it")._trainable()
        elif isinstance(var_list, Handle):
            raise UsageError(
                f'moving average: expected a list of variables, got variable "{var_list.name}"',
                hint="apply([variable])",
            )
        scopes = {variable: _checked_scope(variable) for variable in var_list}
        where = place_of(sys._getframe(1))
        for variable, scope in scopes.items():
            if variable not in self._shadows:
                spec, name = variable.spec, f"{variable.name}/{self.name}"
                described = None, spec.shape, spec.dtype
                copy = scope._declare(name, described, where, copied=spec)
                self._shadows[variable] = declared_in(scope, copy)

    async def update(self) -> None:
        """Move all averages towards the present values of their variables.

        Each ps updates its own shards; no value travels. In a step that runs again after the loss
        of a worker, the update happens once. Averages of different shards follow different
        versions, as in a pull.

        In synchronous training the ps tasks do this after each step, without this call.

        Raises:
            UsageError: Nothing is averaged; ``num_updates=True`` and the strategy has no global
                step; or neither in a step nor within a running coordinator.
            ClosureCancelled: The step was cancelled.
            ParameterServerLost: A ps is lost.

        Cancellation: Once begun, it ends in the background.
        """
        operation = "update of moving averages"
        if not self._shadows:
            raise UsageError(
                f"{operation}: no variable is averaged",
                hint="call ema.apply([w, b]) on the coordinator, before the step is scheduled",
            )
        shadows, step = self._shadows.values(), self._step_variable()
        if step is None and self.num_updates is not False:
            raise UsageError(
                f"{operation}: num_updates=True, but there is no global step",
                hint="call psync.get_or_create_global_step() in the strategy's scope before the "
                "step is scheduled, and increment it: apply_gradients(…, global_step=step)",
            )
        runtime = await runtime_of(operation, *shadows, *([] if step is None else [step]))
        ps, decay = runtime.ps, self.decay
        if step is not None:
            (count,) = await ps.pull(ps.plan((step.spec,)))
            decay = growing_decay(decay, int(count))
        call = runtime.begin_update(operation)
        originals = {shadow: original for original, shadow in self._pairs()}
        plan = ps.plan(tuple(shadow.spec for shadow in shadows))
        await ps.average(plan, originals, decay=decay, call=call)

    def average(self, var: AnyVariable) -> AnyVariable | None:
        """Return the variable that holds the average of ``var``, or None if it has no average."""
        return self._shadows.get(var)

    def averages(self, tree: Any) -> Any:
        """Return ``tree`` with each variable replaced by its average.

        Args:
            tree: A variable, or any nesting of variables that ``psync.pull`` takes.

        Raises:
            UsageError: A variable has no average.
        """
        return mapped(tree, self._shadow)

    def items(self) -> list[tuple[AnyVariable, AnyVariable]]:
        """Return pairs (variable, variable that holds its average), in the order of ``apply``."""
        return list(self._shadows.items())

    def average_name(self, var: AnyVariable) -> str:
        """Return the name of the average of ``var``, or the name it would have."""
        shadow = self._shadows.get(var)
        return f"{var.name}/{self.name}" if shadow is None else shadow.name

    def variables_to_restore(
        self, moving_avg_variables: Iterable[AnyVariable] | None = None
    ) -> dict[str, AnyVariable]:
        """Return the variables to restore, by name in a checkpoint, to evaluate the averaged model.

        Args:
            moving_avg_variables: Variables to restore from their averages. Default: the trainable
                variables of the strategy, and all that have an average.

        Returns:
            A dict from name to variable. Variables that have no average, and are none, have their
            own names.

        Raises:
            UsageError: Outside a scope, before anything is averaged.

        Source: ``tf.train.ExponentialMovingAverage.variables_to_restore``.
        """
        scope = open_scope.get() or self._scope()
        if scope is None:
            scope = scope_for("moving average: variables_to_restore before apply", "call it")
        if moving_avg_variables is None:
            moving_avg_variables = (*scope._trainable(), *self._shadows)
        averaged = dict.fromkeys(moving_avg_variables)
        names = {self.average_name(variable): variable for variable in averaged}
        for variable in scope._variables:
            if variable not in averaged:
                names.setdefault(variable.name, variable)
        return names

    def _pairs(self, variables: Iterable[AnyVariable] | None = None) -> tuple[tuple[int, int], ...]:
        """Return pairs (variable id, id of its average); default: of all averaged variables.

        Raises:
            UsageError: A variable has no average.
        """
        chosen = self._shadows if variables is None else variables
        pairs = [(variable.spec, self._shadow(variable).spec) for variable in chosen]
        return tuple((original.variable_id, shadow.variable_id) for original, shadow in pairs)

    def _shadow(self, variable: Handle) -> Any:
        shadow = self._shadows.get(variable)  # type: ignore[call-overload]  # handles are one of two
        if shadow is None:
            raise UsageError(
                f'variable "{variable.name}" has no moving average',
                hint="call ema.apply([variable]) on the coordinator, before the step is scheduled",
            )
        return shadow

    def _scope(self) -> Scope | None:
        """Return the strategy of the averaged variables, where it is known."""
        variable = next(iter(self._shadows), None)
        return None if variable is None else scope_of(variable)

    def _step_variable(self) -> Variable | None:
        """Return the variable whose value the decay follows, if it is known here."""
        if isinstance(self.num_updates, Variable):
            return self.num_updates
        scope = self._scope() if self.num_updates else None
        return None if scope is None else global_step_of(scope)


def _checked_scope(variable: Any) -> Scope:
    """Return the strategy of a variable that can be averaged."""
    expected = "moving average: expected a variable"
    variable = checked_kind(expected, variable, Handle, error=UsageError)
    spec, scope = variable.spec, scope_of(variable)
    whole, error, hint = spec.shards[0].variable, UsageError, None
    if isinstance(variable, OnReadVariable):
        wrong = "it is synchronized on read: each worker has a different value"
    elif "float" not in spec.dtype:
        wrong, error = f"expected a float variable, got {spec.dtype}", ValueMismatchError
    elif whole != spec.name:
        wrong, hint = f'it is a shard of "{whole}"', "average the whole variable"
    elif scope is None:
        wrong = "its strategy is not in this process"
        hint = "declare averages in the program that declares the variables"
    else:
        return scope
    raise error(f'moving average of "{spec.name}": {wrong}', hint=hint)
