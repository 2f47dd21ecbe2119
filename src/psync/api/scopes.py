"""What is declared where, and how it is reached: scopes, declarations, and reads of variables.

``Scope`` is the base class of ``ParameterServerStrategy``, which knows variables. Variables know
the scope in which they are declared. Reads are plain, cached in a scope, or consistent.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from psync.chief.declarations import Declaration, check_name, check_sizes, split
from psync.client.context import (
    ClosureContext,
    Runtime,
    current_closure,
    forbid_in_dataset,
    forbid_in_step,
    here,
    setting,
)
from psync.client.extras import pull_at_once, pull_compressed
from psync.cluster import ClusterSpec
from psync.errors import ClosedError, ContextError, PartitionError, UsageError, other_loop
from psync.net.platform import PerProcess, random_hex
from psync.numerics.compression import Compression
from psync.partitioners import Placement, Placer
from psync.replicas.context import open_scope
from psync.specs import VariableSpec
from psync.wire.frames import SMALL_BODY_BYTES

if TYPE_CHECKING:
    from psync.api.variables import Handle

H = TypeVar("H")

Partitioner = Callable[[tuple[int, ...], Any], Any]
Described = tuple[Any, tuple[int, ...], str]
"""Initial value of a variable, or what makes it; shape, and name of the dtype."""

_RUNNING = (
    "`async with psync.ClusterCoordinator(strategy):`, or psync.MonitoredTrainingSession(strategy)"
)
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
        name: str,
        described: Described,
        where: str,
        *,
        trainable: bool = False,
        copied: VariableSpec | None = None,
        ps: int | None = None,
        partitioned: bool = True,
    ) -> VariableSpec:
        """Place a new variable; it is created before it is first needed.

        A variable with its own placement is not partitioned, and does not advance the strategy's.

        Args:
            name: Name that is asked for; if it is taken, the variable gets another one.
            described: Initial value, shape and dtype, as ``describe`` returns them.
            where: Place of the declaration.
            trainable: Whether optimizers train it by default.
            copied: Variable next to which it is placed, and with whose value it begins.
            ps: Index of its ps.
            partitioned: Whether the strategy's partitioner may split it.
        """
        self._check_not_closed(f'declaring variable "{name}"')
        initial, shape, dtype = described
        asked = count = self._names.get(name, 0)
        unique = name
        while unique in self._names:
            unique = f"{name}_{count}"
            count += 1
        whole = VariableSpec(unique, len(self._variables), shape, dtype, trainable, (), where)
        here, beside = current_elsewhere.get(), copied
        if copied is None and ps is None and here is not None and here.strategy is self:
            ps, beside = here.ps, here.beside
            if beside is not None and (len(beside.shards) == 1 or not partitioned):
                ps, beside = beside.shards[0].ps, None
        if beside is None:
            partitioner = self._partitioner if ps is None and partitioned else None
            spec = split(whole, partitioner, lambda nbytes: self._placer.place(name, nbytes, ps))
        elif shape == beside.shape:
            spec = self._beside(beside, whole)
        else:
            raise PartitionError(
                f'variable "{name}" declared at {where}: expected shape {beside.shape}, as '
                f'"{beside.name}" has, with whose {len(beside.shards)} shards it is colocated, got '
                f"{shape}",
                hint="to place it with one of the shards: "
                f"colocate_vars_with({beside.name}.variables[0])",
            )
        self._names |= {unique: 1, name: asked + 1}
        self._uncreated.append(Declaration(spec, initial, copied))
        return spec

    def _beside(self, original: VariableSpec, whole: VariableSpec) -> VariableSpec:
        """Place a variable beside another one, whose shape it has: each shard on the same ps.

        No partitioner is asked, and no place is taken.

        Source: ``colocate_with_primary`` of TensorFlow's ``slot_creator.create_slot``.
        """
        name, number, dtype = whole.name, whole.variable_id, whole.dtype
        check_name(name, whole.declared_at)
        shards = tuple(
            replace(shard, variable=name, variable_id=number, dtype=dtype)
            for shard in original.shards
        )
        check_sizes(shards, whole.declared_at)
        for shard in shards:
            self._placer.note(shard.ps, shard.nbytes)
        return replace(whole, shards=shards)

    def _check_not_closed(self, operation: str) -> None:
        """Raise ``ClosedError`` if a coordinator or session of this strategy has ended."""
        if self._created and self._runtime is None:
            raise ClosedError(
                f"{operation}: the coordinator or session was closed, and its variables with it",
                hint=f"create a new strategy, and do it inside {_RUNNING}",
            )


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


def scope_for(operation: str, do: str = "declare it") -> Scope:
    """Return the strategy whose scope is open, for something that is declared in it.

    Args:
        operation: For messages.
        do: What hints say that is to be done in a scope.

    Raises:
        UsageError: No scope is open; or a step or dataset code is running here.
    """
    hint = f"{do} in `with strategy.scope():`"
    forbid_in_step(operation, instead=f"{hint} on the coordinator, and use it in the step")
    scope: Scope | None = open_scope.get()
    if scope is None:
        raise UsageError(f"{operation} outside a strategy's scope", hint=hint)
    return scope


_handles: PerProcess[weakref.WeakValueDictionary[tuple[Any, ...], Any]] = PerProcess(
    weakref.WeakValueDictionary
)


def handle_of(cls: type[H], key: tuple[Any, ...], **attributes: Any) -> H:
    """Return this process's handle of what was declared: one object, however often it arrives."""
    handle: H | None = _handles().get(key)
    if handle is None:
        handle = _handles()[key] = object.__new__(cls)
        vars(handle).update(attributes, _scope=None)
    return handle


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
"""The innermost that is in force; None: nothing is."""


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
    if scope is not None:
        scope._check_not_closed(operation)
    raise UsageError(
        f"{operation}: no connection to the ps tasks here",
        hint=f"do it inside {_RUNNING}, or in a step; forked processes have no connection",
    )


# --- what carries reads, and how ----------------------------------------------------------------

_ORIGIN = operator.attrgetter("origin")


def scope_of(variable: Any) -> Scope | None:
    """Return the strategy that declared a variable; None: it is in another process, or gone."""
    return variable._scope() if variable._scope is not None else None


async def runtime_of(operation: str, *variables: Any) -> Runtime:
    """Return what carries ``operation`` on ``variables``, or an accumulator, to the ps tasks.

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
        runtime, loop = closure.runtime, asyncio._get_running_loop()
        if closure.cancelled or closure.closed or loop is not closure.loop:
            closure.check_open(operation, variables)
    else:
        runtime = runtime_here(operation, scope_of(variables[0]), variables)
    if {*map(_ORIGIN, variables)} != {runtime.origin}:
        other, _ = next(each for each in variables if each.origin != runtime.origin)._what_it_is()
        raise UsageError(
            f"{operation}: {other} belongs to another program or strategy",
            hint=OTHER_STRATEGY_HINT
            if current_closure() is not None
            else "make a separate call for the variables of each strategy",
        )
    if runtime.ensure_created is not None:
        await runtime.ensure_created()
    return runtime


_open: ContextVar[tuple[ClosureContext | None, dict[Handle, np.ndarray]] | None] = ContextVar(
    "psync_kept_reads", default=None
)
"""The step that opened a scope, None: the program; and the values that are kept in it."""


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
    with setting(_open, (current_closure(), {})):
        yield


def kept_here() -> dict[Handle, np.ndarray] | None:
    """Return the values of the open ``cache_variable_reads``; not of who started a step here."""
    kept = _open.get()
    return kept[1] if kept is not None and kept[0] is current_closure() else None


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
        if missing := tuple([variable for variable in variables if variable not in kept]):
            arrays = await runtime.ps.pull(runtime.ps.plan_of(missing), seen=runtime.pulled)
            for variable, array in zip(missing, arrays, strict=True):
                kept.setdefault(variable, array)  # the first of two at once is it
        return [
            kept[variable].copy() if copy and target is None else _placed(kept[variable], target)
            for variable, target in zip(variables, out or [None] * len(variables), strict=True)
        ]
    ps, seen, closure = runtime.ps, runtime.pulled, here.get()
    plan = ps.plan_of(variables)
    if consistent:
        return await pull_at_once(ps, plan, writable=copy, out=out, seen=seen)
    if compression is not None and plan.nbytes > SMALL_BODY_BYTES:
        return await pull_compressed(ps, plan, compression, writable=copy, out=out, seen=seen)
    arrival = closure.arrival if type(closure) is ClosureContext else 0
    if (ahead := runtime.ahead.take(plan, arrival)) is None or ahead.arrays is None:
        return await ps.pull(plan, writable=copy, out=out, seen=seen)
    seen.note(ahead.steps)
    for array in ahead.arrays:
        array.setflags(write=copy)
    return ahead.arrays if out is None else list(map(_placed, ahead.arrays, out))


def _placed(value: np.ndarray, target: np.ndarray | None) -> np.ndarray:
    """Return a value where the caller wants it; None: where it is."""
    if target is None:
        return value
    np.copyto(target, value)
    return target
