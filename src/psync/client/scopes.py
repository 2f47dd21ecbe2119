"""Open ``strategy.scope()`` blocks, and the strategies that are running.

Apart from ``api.strategy`` so that variables can find the scope they are declared in without
importing the strategy, which knows variables.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from psync.client.context import current_closure, forbid_in_dataset, forbid_in_step
from psync.client.runtime import Runtime
from psync.errors import ClosedError, UsageError, other_loop
from psync.net.process_state import PerProcess
from psync.partitioners import Placement
from psync.specs import VariableSpec

if TYPE_CHECKING:
    from psync.api.strategy import ParameterServerStrategy


Scope: TypeAlias = "ParameterServerStrategy"
"""That in whose scope something is declared; by this name where it cannot be imported."""

OTHER_STRATEGY_HINT = (
    "a step reaches what its own strategy has declared in main(), on the coordinator; read "
    "anything else in the program, and pass its value as an argument"
)

open_scope: ContextVar[Scope | None] = ContextVar("psync_scope", default=None)


_strategies: PerProcess[weakref.WeakSet[Any]] = PerProcess(weakref.WeakSet)


def begin_process() -> None:
    """Forget the strategies of this process: what follows stands for one that has just begun."""
    _strategies().clear()


def add_strategy(scope: Scope) -> None:
    """Note a new strategy."""
    _strategies().add(scope)


def _begin_child() -> None:
    """Leave connections and shared memory to the process from which this was forked."""
    for scope in _strategies():
        scope._runtime, scope._created = None, False


os.register_at_fork(after_in_child=_begin_child)


def running_scopes() -> list[Scope]:
    """Return the strategies of this process whose variables can be reached: one, as a rule."""
    return [scope for scope in _strategies() if scope._runtime is not None]


def current_scope() -> Scope | None:
    """Return the strategy whose scope is open here, or None."""
    return open_scope.get()


def scope_for(operation: str, *, instead: str, hint: str, outside: str | None = None) -> Scope:
    """Return the strategy whose scope is open, for something that is declared in it.

    Args:
        operation: For messages.
        instead: What to do where it is inside a step.
        hint: What to do where no scope is open.
        outside: What messages say that is outside of a scope; None: the operation.

    Raises:
        UsageError: No scope is open; or a step or dataset code is running here.
    """
    forbid_in_step(operation, instead=instead)
    scope = current_scope()
    if scope is None:
        raise UsageError(f"{outside or operation} outside a strategy's scope", hint=hint)
    return scope


def place_of(frame: FrameType) -> str:
    """Return where something is declared, for messages."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where the variables of a strategy go that are declared here, instead of taking a turn."""

    strategy: Scope
    placement: Placement | None = None  # that is asked instead of the strategy's
    beside: VariableSpec | None = None  # or this variable of several shards: beside each of them


_elsewhere: ContextVar[Elsewhere | None] = ContextVar("psync_elsewhere", default=None)


def current_elsewhere() -> Elsewhere | None:
    """Return what is in force here: the innermost."""
    return _elsewhere.get()


@contextmanager
def elsewhere(where: Elsewhere | None) -> Generator[None, None, None]:
    """Return a context manager in which ``where`` is in force; None: nothing is."""
    token = _elsewhere.set(where)
    try:
        yield
    finally:
        _elsewhere.reset(token)


_RUNNING = (
    "`async with psync.ClusterCoordinator(strategy):`, or psync.MonitoredTrainingSession(strategy)"
)


def runtime_here(operation: str, scope: Scope | None, variables: Sequence[Any] = ()) -> Runtime:
    """Return what carries ``operation`` to the ps tasks.

    Args:
        operation: For messages.
        variables: As for ``ClosureContext.check_open``.
        scope: The strategy to which what is operated on belongs; None: it is not in this process.

    Returns:
        That of the step that runs here, else that of the strategy's coordinator or session.

    Raises:
        UsageError: There is neither; or dataset code is running here, or a step that has returned;
            or this is another event loop than the connections'.
        ClosureCancelled: In a step that was cancelled.
        ClosedError: The coordinator or session was closed.
    """
    closure = current_closure()
    if closure is None:
        forbid_in_dataset(operation)
    else:
        closure.check_open(operation, variables)
        if isinstance(closure.runtime, Runtime):
            return closure.runtime
    if scope is not None and scope._runtime is not None:
        if asyncio._get_running_loop() not in (None, scope._runtime.ps.loop):
            raise other_loop(operation)
        return scope._runtime
    if scope is not None and scope._created:
        raise ClosedError(
            f"{operation}: the coordinator or session was closed, its variables are gone",
            hint=f"do it inside {_RUNNING}",
        )
    raise UsageError(
        f"{operation}: no connection to the ps tasks here",
        hint=f"do it inside {_RUNNING}, or in a step; a process that these fork has none",
    )
