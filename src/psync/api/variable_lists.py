"""Which variables are meant: those that a call names, or all that can be trained here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psync.api.gradient_arguments import AnyVariable
from psync.api.pulls import is_flat, leaves
from psync.api.variables import Handle
from psync.client.runtime import current_runtime
from psync.client.scopes import running_scopes
from psync.errors import GradientError, UsageError


def listed(var_list: Any) -> Any:
    """Return the variables that a call was given: a list of them, or as they are nested.

    Args:
        var_list: One variable, several, or a nesting as ``pull`` takes it.

    Raises:
        GradientError: Something else is among them, or there is none in a nesting.
    """
    if isinstance(var_list, dict):
        variables: Any = var_list
    elif isinstance(var_list, Handle):
        variables = [var_list]
    else:
        variables = var_list if isinstance(var_list, list | tuple) else list(var_list)
        for item in variables:
            if not isinstance(item, Handle | dict | list | tuple):
                raise GradientError(f"var_list: expected variables, got {type(item).__name__}")
    if is_flat(variables):
        return list(variables)
    if not any(True for _ in leaves(variables)):
        raise GradientError("var_list: expected variables, got none")
    return variables


def trainable_here(operation: str, arrived: Sequence[AnyVariable]) -> list[AnyVariable]:
    """Return the trainable variables of the strategy that is served here.

    Args:
        operation: For messages.
        arrived: Those that came with an optimizer from another process.

    Raises:
        UsageError: There is none, or nobody can tell of which strategy.
    """
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
        variables = [variable for variable in arrived if variable.origin == origin]
    if not variables:
        raise UsageError(
            f"{operation}: no trainable variable is known here",
            hint="declare variables before the step that captures this optimizer is first "
            "scheduled, or say which variables",
        )
    return variables
