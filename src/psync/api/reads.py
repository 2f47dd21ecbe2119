"""Reads of variables: their link to the ps tasks; plain, cached in a scope, or consistent."""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from psync.api.scopes import OTHER_STRATEGY_HINT, Scope, runtime_here
from psync.client.context import ClosureContext, Runtime, current_closure, here
from psync.client.extras import pull_at_once, pull_compressed
from psync.errors import ContextError, UsageError
from psync.numerics.compression import Compression
from psync.wire.frames import SMALL_BODY_BYTES

if TYPE_CHECKING:
    from psync.api.variables import Handle


_ORIGIN = operator.attrgetter("origin")


def scope_of(variable: Handle) -> Scope | None:
    """Return the strategy that declared a variable; None: it is in another process, or gone."""
    return variable._scope() if variable._scope is not None else None


async def runtime_of(operation: str, *variables: Handle) -> Runtime:
    """Return what carries ``operation`` on ``variables``, one at least, to the ps tasks.

    Raises:
        UsageError: There is none here, outside a step and without a running coordinator; or the
            step has returned; or the variables are not all of the strategy that it serves.
        ClosureCancelled: In a step that was cancelled.
        ClosedError: The coordinator was closed.
        PartitionError: A variable that is declared cannot be created.
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    closure = here.get()
    if type(closure) is ClosureContext and isinstance(closure.runtime, Runtime):
        closure.check_open(operation, variables)
        runtime = closure.runtime
    else:
        runtime = runtime_here(operation, scope_of(variables[0]), variables)
    if {*map(_ORIGIN, variables)} != {runtime.origin}:
        other = next(each.spec.name for each in variables if each.origin != runtime.origin)
        raise UsageError(
            f'{operation}: variable "{other}" belongs to another program or strategy',
            hint=OTHER_STRATEGY_HINT
            if current_closure() is not None
            else "make a separate call for the variables of each strategy",
        )
    if runtime.ensure_created is not None:
        await runtime.ensure_created()
    return runtime


class _Kept:
    """The values of one open scope."""

    def __init__(self, closure: ClosureContext | None) -> None:
        self.closure = closure  # the step that opened it; None: the program
        self.values: dict[Handle, np.ndarray] = {}


_open: ContextVar[_Kept | None] = ContextVar("psync_kept_reads", default=None)


@contextmanager
def cache_variable_reads() -> Generator[None, None, None]:
    """Return a context manager that caches the first read of each variable.

    Inside, ``read`` and ``pull`` of a variable that was read before return the earlier value, even
    after an assign, and send nothing.

    - Rows (``v[…]``, ``sparse_read``, ``embedding_lookup``) and reads with ``consistent=True`` are
      neither cached nor answered from the cache.
    - The cache belongs to the step, or to the task of the program, that opens it, and to the tasks
      started inside.
    - Steps scheduled inside do not use it: open a cache in the step.

    Raises:
        ContextError: Inside another such context manager.

    Example:
        with psync.cache_variable_reads():
            loss = await forward(batch)        # many layers read the same variables
            penalty = await regularization()   # these are not pulled again

    Source: TensorFlow's ``cache_variable_reads`` of parameter-server variables; there, a scope that
        is open where a function is first traced becomes part of the function.
    """
    if kept_here() is not None:
        raise ContextError(
            "cache_variable_reads: scopes cannot be nested",
            hint="a scope is already open here and caches these reads",
        )
    token = _open.set(_Kept(current_closure()))
    try:
        yield
    finally:
        _open.reset(token)


def kept_here() -> _Kept | None:
    """Return the open ``cache_variable_reads``; not of whoever started a step in this process."""
    kept = _open.get()
    return kept if kept is not None and kept.closure is current_closure() else None


async def values_of(
    runtime: Runtime,
    variables: tuple[Handle, ...],
    *,
    copy: bool = False,
    out: Sequence[np.ndarray | None] | None = None,
    consistent: bool = False,
    compression: Compression | None = None,
) -> list[np.ndarray]:
    """Return the values of variables, each of which is there once.

    Args:
        runtime: Carries it to the ps tasks.
        variables: Their handles.
        copy: Whether the caller may change the arrays.
        out: See ``PsClient.pull``.
        consistent: Whether all are read at one instant.
        compression: How float32 travels, where that is worth it and nothing else is asked for.

    Raises:
        ParameterServerLost: A ps is gone.
        LockLost: As ``pull_at_once``.

    Cancellation: Safe; ``out`` then holds anything.
    """
    kept = None if consistent else kept_here()
    if kept is not None:
        values = await _through(kept, runtime, variables)
        return [
            value.copy() if copy and target is None else _placed(value, target)
            for value, target in zip(values, out or [None] * len(values), strict=True)
        ]
    plan = runtime.ps.plan_of(variables)
    if consistent:
        return await pull_at_once(runtime.ps, plan, writable=copy, out=out, seen=runtime.pulled)
    if compression is not None and plan.nbytes > SMALL_BODY_BYTES:
        return await pull_compressed(
            runtime.ps, plan, compression, writable=copy, out=out, seen=runtime.pulled
        )
    if (arrays := runtime.take_ahead(plan)) is not None:
        for array in arrays:
            array.setflags(write=copy)
        return arrays if out is None else list(map(_placed, arrays, out))
    return await runtime.ps.pull(plan, writable=copy, out=out, seen=runtime.pulled)


async def _through(
    kept: _Kept, runtime: Runtime, variables: tuple[Handle, ...]
) -> list[np.ndarray]:
    """Return what is kept, and pull and keep the rest."""
    missing = tuple([variable for variable in variables if variable not in kept.values])
    if missing:
        plan = runtime.ps.plan_of(missing)
        arrays = await runtime.ps.pull(plan, seen=runtime.pulled)
        for variable, array in zip(missing, arrays, strict=True):
            kept.values.setdefault(variable, array)  # the first of two at once is it
    return [kept.values[variable] for variable in variables]


def _placed(value: np.ndarray, target: np.ndarray | None) -> np.ndarray:
    """Return a value where the caller wants it; None: where it is."""
    if target is None:
        return value
    np.copyto(target, value)
    return target
