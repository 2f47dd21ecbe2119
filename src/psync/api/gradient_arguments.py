"""Gradient arguments: memory for them, validation, the variables meant, gradients of a function.

``value_and_gradients`` pulls variables, calls a function of their values and checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from psync.api.pulls import NamedFields, is_flat, leaves, mapped, pairs, pull
from psync.api.reads import scope_of
from psync.api.scopes import running_scopes, runtime_here
from psync.api.variables import Handle, OnReadVariable, ShardedVariable, Variable
from psync.client.runtime import current_runtime
from psync.errors import UsageError, ValueMismatchError
from psync.numerics.casting import fits, fitting
from psync.numerics.scatter import IndexedSlices
from psync.numerics.update_rule import slot_dtype
from psync.specs import VariableSpec, dtype_of

AnyVariable = Variable | ShardedVariable
GradsAndVars = Iterable[tuple[Any, AnyVariable]]
Gradient = np.ndarray | IndexedSlices
Pairs = list[tuple[Gradient, AnyVariable]]

V = TypeVar("V", bound=Handle)
K = TypeVar("K")


def checked_pairs(grads_and_vars: GradsAndVars, finite: str | None) -> Pairs:
    """Return pairs of gradient, as an array or rows that fit, and variable; None is passed over.

    Args:
        grads_and_vars: See ``apply_gradients``.
        finite: Name of an optimizer that forbids NaN and infinity; None: they are gradients.

    Raises:
        ValueMismatchError: No gradient at all, no pairs, a variable twice, one that is not
            floating, a wrong shape or dtype, a row that the variable does not have, or what the
            optimizer forbids.
    """
    pairs: Pairs = []
    without: list[str] = []  # names of variables whose gradient is None
    seen: dict[tuple[str, int], set[int]] = {}  # variables, and the shards of each
    if isinstance(grads_and_vars, dict):
        raise _no_pairs(grads_and_vars)
    try:
        given = iter(grads_and_vars)
    except TypeError:
        raise _no_pairs(grads_and_vars) from None
    for pair in given:
        gradient, variable = _pair(pair)
        if gradient is None:
            without.append(variable.name)
            continue
        if isinstance(variable, OnReadVariable):
            raise ValueMismatchError(
                f'apply_gradients: variable "{variable.name}" is synchronized on read: each worker '
                "has a different value, and optimizers do not train it"
            )
        spec = variable.spec
        shards = [shard.index for shard in spec.shards]
        key = variable.origin, spec.variable_id
        others = seen.get(key)
        if others is None:
            seen[key] = set(shards)
        elif others.isdisjoint(shards):
            others.update(shards)
        else:
            raise ValueMismatchError(f'apply_gradients: variable "{spec.name}" appears twice')
        pairs.append((_checked(gradient, spec, finite), variable))
    if not pairs:
        raise ValueMismatchError(
            f"apply_gradients: all gradients are None ({', '.join(without)})"
            if without
            else "apply_gradients: no gradients given"
        )
    return pairs


def _checked(gradient: Any, spec: VariableSpec, finite: str | None) -> Gradient:
    checked: Gradient
    if finite is None and type(gradient) is np.ndarray and fits(gradient, spec):
        return gradient
    if "float" not in spec.dtype:  # here, before the ps tasks of other variables have theirs
        try:
            slot_dtype(dtype_of(spec.dtype))
        except ValueMismatchError as exc:
            message = f'gradient for "{spec.name}": {exc.message}'
            raise ValueMismatchError(message, hint=exc.hint) from None
    if _has_rows(gradient):
        checked = _checked_rows(gradient, spec)
        array = checked.values
    else:
        checked = array = fitting(gradient, spec, f'gradient for "{spec.name}"', casting="no")
    if finite is not None:
        bad = array.size - int(np.count_nonzero(np.isfinite(array)))
        if bad:
            raise ValueMismatchError(
                f'gradient for "{spec.name}": {bad} of {array.size} elements are NaN or infinite',
                hint=f"{finite} was made with forbid_nonfinite=True",
            )
    return checked


def _has_rows(gradient: Any) -> bool:
    """Return whether a gradient is of some rows: IndexedSlices, TensorFlow's or of our own."""
    if isinstance(gradient, np.ndarray):
        return False
    indices = getattr(gradient, "indices", None)
    return indices is not None and hasattr(gradient, "values") and not callable(indices)


def _checked_rows(gradient: Any, spec: VariableSpec) -> IndexedSlices:
    what = f'gradient for "{spec.name}"'
    if not spec.shape:
        raise ValueMismatchError(f"{what}: a scalar has no rows, got IndexedSlices")
    try:
        slices = IndexedSlices(
            gradient.values, gradient.indices, getattr(gradient, "dense_shape", None)
        )
    except ValueMismatchError as exc:
        raise ValueMismatchError(f"{what}: {exc.message}", hint=exc.hint) from None
    if slices.dense_shape is not None and slices.dense_shape != spec.shape:
        raise ValueMismatchError(
            f"{what}: expected rows of an array of shape {spec.shape}, got dense_shape "
            f"{slices.dense_shape}"
        )
    indices, count = slices.indices, spec.shape[0]
    if len(indices):
        lowest, highest = int(indices.min()), int(indices.max())  # uint64 may not fit into int64
        if lowest < 0 or highest >= count:
            raise ValueMismatchError(
                f"{what}: row {lowest if lowest < 0 else highest} does not exist, the variable "
                f"has {count}"
            )
    shape = len(indices), *spec.shape[1:]
    values = fitting(slices.values, spec, what, casting="no", shape=shape)
    return IndexedSlices(values, indices.astype(np.int64, copy=False), slices.dense_shape)


def _pair(pair: Any) -> tuple[Any, AnyVariable]:
    """Return (gradient, variable)."""
    try:
        gradient, variable = pair
    except (TypeError, ValueError):
        raise _no_pairs(pair) from None
    if not isinstance(variable, (Variable, ShardedVariable)):  # a union is made at each call
        raise ValueMismatchError(
            "apply_gradients: expected (gradient, variable) pairs, got "
            f"{type(variable).__name__} for the variable"
        )
    return gradient, variable


def _no_pairs(given: object) -> ValueMismatchError:
    return ValueMismatchError(
        f"apply_gradients: expected (gradient, variable) pairs, got {type(given).__name__}",
        hint="apply_gradients(zip(gradients, variables))",
    )


def listed(var_list: Any) -> Any:
    """Return the variables that a call was given: a list of them, or as they are nested.

    Args:
        var_list: One variable, several, or a nesting as ``pull`` takes it.

    Raises:
        ValueMismatchError: Something else is among them, or there is none in a nesting.
    """
    if isinstance(var_list, dict):
        variables: Any = var_list
    elif isinstance(var_list, Handle):
        variables = [var_list]
    else:
        variables = var_list if isinstance(var_list, list | tuple) else list(var_list)
        for item in variables:
            if not isinstance(item, Handle | dict | list | tuple):
                raise ValueMismatchError(f"var_list: expected variables, got {type(item).__name__}")
    if is_flat(variables):
        return list(variables)
    if not leaves(variables):
        raise ValueMismatchError("var_list: expected variables, got none")
    return variables


def trainable_here(operation: str, arrived: Sequence[AnyVariable]) -> list[AnyVariable]:
    """Return the trainable variables of the strategy that is served here.

    Args:
        operation: For messages.
        arrived: Those that came with an optimizer from another process.

    Raises:
        UsageError: There is none, or it is not clear of which strategy.
    """
    runtime, scopes = current_runtime(), running_scopes()
    if runtime is not None:
        scopes = [scope for scope in scopes if scope._origin == runtime.origin]
    elif len(scopes) > 1:
        raise UsageError(
            f"{operation}: {len(scopes)} strategies are running", hint="say which variables"
        )
    if scopes:
        variables = scopes[0]._trainable()
    else:  # another process than the program's
        origin = runtime.origin if runtime is not None else None
        variables = [variable for variable in arrived if variable.origin == origin]
    if not variables:
        raise UsageError(
            f"{operation}: no trainable variable is declared here",
            hint="declare variables before the step that captures this optimizer is first "
            "scheduled, or say which variables",
        )
    return variables


ValueAndGrad = Callable[..., Any]
"""Called with the values of a list of variables, one argument each, or with another nesting of
values as one argument. Returns the loss and the gradients in that order, or nested so; and
predictions, if it has any."""


async def value_and_gradients(
    value_and_grad: ValueAndGrad, variables: Any
) -> tuple[Any, list[tuple[Any, AnyVariable]]]:
    """Pull variables; return the loss at their values, and pairs of gradient and variable.

    Args:
        value_and_grad: Of the values.
        variables: As ``listed`` returns them.

    Raises:
        ValueMismatchError: The function returns something else, another number of gradients, or
            gradients that are nested otherwise.
        PsyncError: As ``pull``.

    Cancellation: Safe.
    """
    flat, values = is_flat(variables), await pull(variables)
    answer = value_and_grad(*values) if flat else value_and_grad(values)
    try:
        loss, grads, *predictions = answer
        grads = list(grads) if flat else grads
        if len(predictions) > 1:
            raise ValueError("too many values")
    except (TypeError, ValueError):
        raise ValueMismatchError(
            f"value_and_grad: expected it to return (loss, gradients), got {type(answer).__name__}",
            hint="return loss, [gradient_of_w, gradient_of_b]",
        ) from None
    if flat and len(grads) != len(variables):
        raise ValueMismatchError(
            f"value_and_grad: expected {len(variables)} gradients, got {len(grads)}"
        )
    return loss, [
        (gradient, variable) for variable, gradient in pairs(variables, grads, "gradients")
    ]


@overload
def empty_like(tree: V) -> np.ndarray: ...
@overload
def empty_like(tree: NamedFields) -> Any: ...
@overload
def empty_like(tree: tuple[V, ...]) -> tuple[np.ndarray, ...]: ...
@overload
def empty_like(tree: list[V]) -> list[np.ndarray]: ...
@overload
def empty_like(tree: dict[K, V]) -> dict[K, np.ndarray]: ...
@overload
def empty_like(tree: Any) -> Any: ...
def empty_like(tree: Any) -> Any:
    """Return uninitialized arrays for gradients, with the shapes and dtypes of variables.

    A ps task on this host reads such an array in place, so a push copies nothing. An array is in
    ordinary memory if it has at most 64 KiB, if no ps is on this host, or if there is no more
    memory to share.

    Make the arrays in each step: the memory of dropped arrays is reused. Views count as references,
    and so do objects of other libraries that share the memory.

    Args:
        tree: Any nesting of variables that ``psync.pull`` takes.

    Returns:
        The same nesting with a numpy array for each variable; a variable that occurs repeatedly has
        the same array everywhere.

    Raises:
        UsageError: Neither in a step nor within a running coordinator.
        ClosedError: The coordinator was closed.
        ClosureCancelled: The step was cancelled.

    Once a push has returned, its arrays may be written to again. **Do not reuse the arrays of a
    push that was cancelled, or that failed because a ps is lost or this task was replaced: they may
    still be read.** An asynchronous push reads them until it has ended in the background, a
    synchronous one until its step has ended. Make new arrays instead.

    Example:
        async def step(w):
            value = await psync.pull(w)
            gradient = psync.empty_like(w)
            np.subtract(value, 1, out=gradient)
            await optimizer.apply_gradients([(gradient, w)])
    """
    arrays: dict[Any, np.ndarray] = {}
    for variable in leaves(tree):
        if variable not in arrays:
            runtime = runtime_here("empty_like", scope_of(variable))
            spec = variable._value_spec
            arrays[variable] = runtime.ps.memory.empty(spec.shape, dtype_of(spec.dtype))
    return mapped(tree, arrays.__getitem__)
