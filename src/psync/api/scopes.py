"""What is declared where: open ``strategy.scope()`` blocks, and the declarations of a strategy.

``Scope`` is the base class of ``ParameterServerStrategy``, which knows variables. Variables know
the scope in which they are declared.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from psync.chief.declarations import Declaration, beside, describe, split
from psync.client.context import Runtime, current_closure, forbid_in_dataset, forbid_in_step
from psync.cluster import ClusterSpec
from psync.errors import ClosedError, PartitionError, UsageError, other_loop
from psync.net.platform import PerProcess, random_hex
from psync.partitioners import Placement, Placer
from psync.replicas.context import open_scope
from psync.specs import VariableSpec

Partitioner = Callable[[tuple[int, ...], Any], Any]

OTHER_STRATEGY_HINT = (
    "a step reaches what its own strategy has declared in main(), on the coordinator; read "
    "anything else in the program, and pass its value as an argument"
)

_strategies: PerProcess[weakref.WeakSet[Scope]] = PerProcess(weakref.WeakSet)


class Scope:
    """The declarations of one strategy: names, numbers and places of its variables.

    Args:
        cluster: The training cluster.
        worker_index: Index of this process among the workers; None if it is not a worker.
        partitioner: See ``ParameterServerStrategy``.
        placement: See ``ParameterServerStrategy``.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        worker_index: int | None,
        partitioner: Partitioner | None,
        placement: str | Placement,
    ) -> None:
        num_ps = cluster.num_tasks("ps")
        self.cluster = cluster
        self.worker_index = worker_index
        self._origin = random_hex(8)
        self._runtime: Runtime | None = None  # the coordinator's; None while none runs
        self._training_over = asyncio.Event()  # set when a training session has ended for all
        self._created = False  # a coordinator has run: variables may exist on ps tasks
        self._uncreated: list[Declaration] = []  # not created yet
        self._partitioner = partitioner
        self._placer = Placer(num_ps, placement)
        self._accumulators: dict[str, Any] = {}
        self._turns_of_accumulators = itertools.cycle(range(num_ps))
        self._names: dict[str, int] = {}  # those taken, and how often each was asked for
        self._variables: list[Any] = []
        _strategies().add(self)

    def _trainable(self) -> list[Any]:
        return [variable for variable in self._variables if variable.trainable]

    def _declare(
        self,
        initial_value: Any,
        name: str,
        dtype: object,
        shape: tuple[int, ...] | None,
        trainable: bool,
        where: str,
        *,
        ps: int | None = None,
        partitioned: bool = True,
    ) -> VariableSpec:
        """Place a new variable; it is created before it is first needed.

        A variable with its own placement is not partitioned, and does not advance the strategy's.
        """
        self._check_open(name)
        initial, full_shape, dtype_name = describe(initial_value, name, dtype, shape, where)
        here, original = current_elsewhere.get(), None
        if ps is None and here is not None and here.strategy is self:
            ps, original = here.ps, here.beside
            if original is not None and (len(original.shards) == 1 or not partitioned):
                ps, original = original.shards[0].ps, None
        if original is not None:
            if full_shape != original.shape:
                raise PartitionError(
                    f'variable "{name}" declared at {where}: expected shape {original.shape}, as '
                    f'"{original.name}" has, with whose {len(original.shards)} shards it is '
                    f"colocated, got {full_shape}",
                    hint="to place it with one of the shards: "
                    f"colocate_vars_with({original.name}.variables[0])",
                )
            spec = self._beside(original, name, dtype_name, trainable, where)
        else:
            spec = split(
                self._unique(name), len(self._variables), full_shape, dtype_name,
                trainable=trainable, where=where,
                partitioner=self._partitioner if ps is None and partitioned else None,
                place=lambda nbytes: self._placer.place(name, nbytes, ps),
            )  # fmt: skip
        return self._declared(name, Declaration(spec, initial))

    def _declare_copy(self, original: VariableSpec, name: str, where: str) -> VariableSpec:
        """Place a new variable next to another one, whose value it begins with."""
        self._check_open(name)
        spec = self._beside(original, name, original.dtype, False, where)
        return self._declared(name, Declaration(spec, None, original))

    def _beside(
        self, original: VariableSpec, name: str, dtype: str, trainable: bool, where: str
    ) -> VariableSpec:
        """Place a variable beside another one, shard by shard."""
        spec = beside(
            original, self._unique(name), len(self._variables), trainable=trainable, where=where,
            dtype=dtype,
        )  # fmt: skip
        for shard in spec.shards:
            self._placer.note(shard.ps, shard.nbytes)
        return spec

    def _check_open(self, name: str) -> None:
        if self._created and self._runtime is None:
            raise ClosedError(
                f'variable "{name}": the coordinator of this strategy was closed',
                hint="create a new strategy, and declare the variable there",
            )

    def _unique(self, name: str) -> str:
        """Return a name that is not taken."""
        unique, count = name, self._names.get(name, 0)
        while unique in self._names:
            unique = f"{name}_{count}"
            count += 1
        return unique

    def _declared(self, name: str, declaration: Declaration) -> VariableSpec:
        """Note what was declared, under the name that was asked for or one made of it."""
        self._names[name] = self._names.get(name, 0) + 1
        self._names.setdefault(declaration.spec.name, 1)
        self._uncreated.append(declaration)
        return declaration.spec


def begin_process() -> None:
    """Forget the strategies of this process: what follows stands for one that has just begun."""
    _strategies().clear()


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
    scope: Scope | None = open_scope.get()
    return scope


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
    ps: int | None = None  # the strategy's placement is not asked
    beside: VariableSpec | None = None  # or beside each of the shards of this variable


current_elsewhere: ContextVar[Elsewhere | None] = ContextVar("psync_elsewhere", default=None)
"""The innermost that is in force."""


@contextmanager
def elsewhere(where: Elsewhere | None) -> Generator[None, None, None]:
    """Return a context manager in which ``where`` is in force; None: nothing is."""
    token = current_elsewhere.set(where)
    try:
        yield
    finally:
        current_elsewhere.reset(token)


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
            f"{operation}: the coordinator or session was closed, and its variables with it",
            hint=f"do it inside {_RUNNING}",
        )
    raise UsageError(
        f"{operation}: no connection to the ps tasks here",
        hint=f"do it inside {_RUNNING}, or in a step; forked processes have no connection",
    )
