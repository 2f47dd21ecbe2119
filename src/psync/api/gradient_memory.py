"""Arrays for gradients in memory that the ps tasks of this host can read: pushed without a copy."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np

from psync.api.pulls import NamedFields, leaves, mapped
from psync.api.reads import scope_of
from psync.api.variables import Handle
from psync.client.scopes import runtime_here
from psync.specs import dtype_of

V = TypeVar("V", bound=Handle)
K = TypeVar("K")


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
    """Return arrays of the shapes and dtypes of variables, for gradients that are computed into.

    A ps task of this host computes from such an array where it lies, so that a push copies
    nothing. It is an array as any other: of ordinary memory where it has at most 64 KiB, where no
    ps is on this host, or where there is no more memory to share. Its contents are arbitrary.

    Make them where they are needed, in each step: the memory of those that are gone is used again.
    Views of them, and what other libraries make of them without a copy, count as well.

    Args:
        tree: As ``psync.pull`` takes it.

    Returns:
        The same nesting with a numpy array for each variable, the same one wherever a variable
        stands.

    Raises:
        UsageError: Neither in a step nor within a running coordinator.
        ClosedError: The coordinator was closed.
        ClosureCancelled: In a step that was cancelled.

    Once a push has returned, or failed, its arrays may be written to again. **A push that was
    cancelled may still be read**: an asynchronous one until it has ended in the background, a
    synchronous one until its step has. So do not go on with arrays that a cancelled step has
    pushed, but make others.

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
            spec = variable.value_spec
            arrays[variable] = runtime.ps.memory.empty(spec.shape, dtype_of(spec.dtype))
    return mapped(tree, arrays.__getitem__)
