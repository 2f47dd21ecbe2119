"""The global step: the number of updates of the model, as a variable that all tasks share.

It is known by its name. It lies on ps 0, which closes synchronous steps, and takes no turn
in the round of the other variables: a program places them alike with and without it.
"""

from __future__ import annotations

import sys
from typing import cast

import numpy as np

from psync.api.scopes import Scope, place_of, scope_for
from psync.api.variables import OnReadVariable, Variable, declared_in
from psync.errors import UsageError
from psync.specs import checked_kind

NAME = "global_step"


def get_or_create_global_step() -> Variable:
    """Return the global step of the strategy whose scope is open; declare it if there is none.

    It is a scalar int64 variable named "global_step" on ps 0, initially 0 and not trainable. To
    have an optimizer increment it, call ``apply_gradients(…, global_step=step)``.

    Raises:
        UsageError: Outside a scope, inside a step, or a variable of that name is not an integer
            scalar.
        ClosedError: The strategy's coordinator was closed.

    Source: ``tf.compat.v1.train.get_or_create_global_step``.
    """
    scope = _scope("get_or_create_global_step")
    known = global_step_of(scope)
    if known is not None:
        return known
    where = place_of(sys._getframe(1))
    spec = scope._declare(np.zeros((), np.int64), NAME, None, None, False, where, ps=0)
    step: Variable = declared_in(scope, spec)
    return step


def get_global_step() -> Variable | None:
    """Return the global step of the strategy whose scope is open, or None if there is none.

    Raises:
        UsageError: Outside a scope, inside a step, or a variable named "global_step" is not an
            integer scalar.

    Source: ``tf.compat.v1.train.get_global_step``.
    """
    return global_step_of(_scope("get_global_step"))


def global_step_of(scope: Scope) -> Variable | None:
    """Return the variable called "global_step" of a strategy, or None if it was not declared.

    Raises:
        UsageError: It is no integer scalar.
    """
    for variable in scope._variables:
        if variable.name == NAME:
            check_step(variable, "the global step")
            return cast(Variable, variable)
    return None


def check_step(variable: object, purpose: str) -> None:
    """Refuse what cannot count steps.

    Raises:
        UsageError: It is no variable, or no integer scalar.
    """
    variable = checked_kind(f"{purpose}: expected a variable", variable, Variable, error=UsageError)
    if isinstance(variable, OnReadVariable):
        raise UsageError(
            f'{purpose}: variable "{variable.name}" is synchronized on read: each worker has a '
            "different value"
        )
    if variable.shape != () or variable.dtype.kind not in "iu":
        raise UsageError(
            f'{purpose}: expected an integer scalar, variable "{variable.name}" declared at '
            f"{variable.spec.declared_at} has shape {variable.shape} {variable.spec.dtype}",
            hint="psync.get_or_create_global_step() creates one",
        )


def _scope(operation: str) -> Scope:
    return scope_for(
        operation,
        instead="get it on the coordinator, in `with strategy.scope():`, and use it in the step",
        hint="call it in `with strategy.scope():`",
    )
