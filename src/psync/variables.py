"""Variables: handles on arrays that live on ps tasks.

Layer: L4. Imports: errors, specs, cluster, context, runtime, scopes.

A handle holds no value. It is declared in ``strategy.scope()``, travels to workers as
(origin, spec), and is one object per process there. Inside a step it talks to ps tasks
through the worker it runs on, elsewhere through its strategy's coordinator.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Literal, Self, cast

import numpy as np

from psync.cluster import device_name
from psync.context import forbid_in_dataset, forbid_in_step
from psync.errors import GradientError, UsageError
from psync.runtime import Runtime
from psync.scopes import Scope, current_scope, runtime_here
from psync.specs import ShardSpec, VariableSpec, dtype_of


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized."""

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """How values of several replicas become one."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Handle:
    """What ``Variable`` and ``ShardedVariable`` share."""

    spec: VariableSpec
    origin: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    _scope: weakref.ref[Scope] | None  # its strategy's; None where that is not, on workers

    def __reduce__(self) -> tuple[Any, ...]:
        return (_intern, (self.origin, self.spec, self.synchronization, self.aggregation))

    @property
    def name(self) -> str:
        """Name, unique in the strategy."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return dtype_of(self.spec.dtype)

    @property
    def trainable(self) -> bool:
        """Whether it is one of ``strategy.trainable_variables``."""
        return self.spec.trainable

    def __repr__(self) -> str:
        shards = f", {len(self.spec.shards)} shards" if len(self.spec.shards) > 1 else ""
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} "
            f"dtype={self.spec.dtype}{shards}>"
        )

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        raise UsageError(
            f'variable "{self.name}" is not an array here: its value lives on ps tasks',
            hint="await its value first: `value = await v.read()`, or `await psync.pull((v, w))`",
        )

    def __bool__(self) -> bool:
        raise UsageError(
            f'the truth of variable "{self.name}" is not known here',
            hint="await its value first: `await v.read()`",
        )

    async def read(self, *, copy: bool = False, out: np.ndarray | None = None) -> np.ndarray:
        """Return the value; all else as in ``psync.pull``, which reads many at once."""
        target = None if out is None else [checked_target(out, self.spec)]
        operation = f'read of "{self.name}"'
        runtime = await runtime_of(operation, self)
        runtime.check_open(operation)
        plan = runtime.ps.plan((self.spec,))
        pulled = await runtime.ps.pull(plan, writable=copy, out=target, seen=runtime.pulled)
        return pulled[0]

    async def assign(self, value: Any) -> Self:
        """Set the value.

        Each shard changes at once; shards on different ps tasks change one after the other.

        Args:
            value: An array of the variable's shape, or what numpy makes one of. It is cast to the
                variable's dtype within a kind (float64 to float32, integers to floats). Not
                copied: do not change it before this returns.

        Returns:
            The variable.

        Raises:
            GradientError: If shape or dtype do not fit.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: If a ps is gone.
            ClosureCancelled: In a step that was cancelled.

        Cancellation: An assign once begun ends in the background.

        Source: ``tf.Variable.assign``; there, the dtype must be the variable's.
        """
        return await self._assign("assign", "assign", value)

    async def assign_add(self, delta: Any) -> Self:
        """Add ``delta`` to the value; else as ``assign``."""
        return await self._assign("assign_add", "add", delta)

    async def assign_sub(self, delta: Any) -> Self:
        """Subtract ``delta`` from the value; else as ``assign``."""
        return await self._assign("assign_sub", "sub", delta)

    async def _assign(self, method: str, op: str, value: Any) -> Self:
        operation = f'{method} to "{self.name}"'
        array = fitting(value, self.spec, operation, casting="same_kind")
        runtime = await runtime_of(operation, self)
        closure, ordinal = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        await runtime.ps.assign(plan, [array], op=op, closure=closure, ordinal=ordinal)
        return self


class Variable(Handle):
    """A variable on one ps.

    ``Variable(...)`` declares one in the enclosing ``strategy.scope()``; the strategy's
    partitioner may make it a ``ShardedVariable``, which then is what the call returns.

    Args:
        initial_value: Array, number, nested list, or a callable that returns one; a callable
            that takes (shape, offset) is called for each shard alone.
        name: Made unique with a suffix if it is taken. Default "Variable".
        dtype: Default: that of the initial value (Python floats: float32, integers: int64).
        shape: Needed with ``dtype`` to keep a callable from being called early.
        trainable: Whether it is one of ``strategy.trainable_variables``.
        synchronization: AUTO or ON_WRITE; see the documentation of replicas.
        aggregation: How the values of several replicas become one.

    Raises:
        UsageError: Outside a scope, or inside a step.
        PartitionError: The initial value, dtype or partitions do not fit.

    Source: ``tf.Variable`` under ``tf.distribute.ParameterServerStrategy``.
    """

    def __new__(
        cls,
        initial_value: Any = None,
        *,
        name: str | None = None,
        dtype: object = None,
        shape: Sequence[int] | None = None,
        trainable: bool = True,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Any:
        forbid_in_step(
            f'declaring variable "{name or "Variable"}"',
            instead="declare it in `with strategy.scope():` on the coordinator, "
            "and use it in the step",
        )
        forbid_in_dataset("declaring a variable")
        if synchronization is VariableSynchronization.NONE:
            raise UsageError(
                f'variable "{name or "Variable"}": synchronization NONE is not possible',
                hint="use AUTO, ON_WRITE or ON_READ",
            )
        scope = current_scope()
        if scope is None:
            raise UsageError(
                f'variable "{name or "Variable"}" is declared outside a strategy\'s scope',
                hint="declare it in `with strategy.scope():`",
            )
        frame = sys._getframe(1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        spec = scope.declare(
            initial_value, name or "Variable", dtype,
            tuple(shape) if shape is not None else None, trainable, where,
        )  # fmt: skip
        return declared_in(scope, spec, synchronization, aggregation)

    @property
    def device(self) -> str:
        """The ps that holds it, in TensorFlow's long form."""
        return device_name("ps", self.spec.shards[0].ps)


class ShardedVariable(Handle):
    """A variable cut along axis 0 into shards on several ps tasks.

    Made by ``Variable(...)`` under a partitioner, never directly.
    """

    @property
    def variables(self) -> list[Variable]:
        """The shards, each as a variable of its own, in order."""
        return [_component(self, shard) for shard in self.spec.shards]

    @property
    def device(self) -> tuple[str, ...]:
        """The ps of each shard, in TensorFlow's long form."""
        return tuple(device_name("ps", shard.ps) for shard in self.spec.shards)


def declared_in(
    scope: Scope,
    spec: VariableSpec,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> Any:
    """Return the handle of a variable that ``scope`` has just declared, which takes note of it."""
    handle = _intern(scope.origin, spec, synchronization, aggregation)
    handle._scope = weakref.ref(scope)
    scope.add(handle)
    return handle


_interned: weakref.WeakValueDictionary[tuple[str, str, int], Any] = weakref.WeakValueDictionary()


def _intern(
    origin: str,
    spec: VariableSpec,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> Any:
    """Return this process's handle of a variable: one object, however often it arrives."""
    key = (origin, spec.name, spec.variable_id)
    handle = _interned.get(key)
    if handle is None:
        handle = object.__new__(Variable if len(spec.shards) == 1 else ShardedVariable)
        handle.spec, handle.origin = spec, origin
        handle.synchronization, handle.aggregation = synchronization, aggregation
        handle._scope = None
        _interned[key] = handle
    return handle


def _component(whole: ShardedVariable, shard: ShardSpec) -> Variable:
    spec = whole.spec
    name = f"{spec.name}/part_{shard.index}"
    alone = ShardSpec(
        spec.name, shard.variable_id, shard.index, 0, shard.shape, shard.dtype, shard.ps
    )
    part = VariableSpec(
        name, spec.variable_id, shard.shape, spec.dtype, spec.trainable, (alone,),
        spec.declared_at,
    )  # fmt: skip
    handle = cast(Variable, _intern(whole.origin, part, whole.synchronization, whole.aggregation))
    handle._scope = whole._scope
    return handle


async def runtime_of(operation: str, *variables: Handle) -> Runtime:
    """Return what carries ``operation`` on ``variables``, one at least, to the ps tasks.

    Raises:
        UsageError: There is none here, outside a step and without a running coordinator; or the
            variables are not all of the strategy that it serves.
        ClosedError: The coordinator was closed.
        PartitionError: A variable that is declared cannot be created.
        ParameterServerLost: A ps is gone.

    Cancellation: Safe.
    """
    runtime = runtime_here(operation, scope_of(variables[0]))
    for variable in variables:
        if variable.origin != runtime.origin:
            raise UsageError(
                f'{operation}: variable "{variable.name}" belongs to another program or strategy',
                hint="declare it in main(), on the coordinator, and let the step capture it; "
                "variables of two strategies need a call for each",
            )
    await runtime.ensure_created()
    return runtime


def scope_of(variable: Handle) -> Scope | None:
    """Return the strategy that declared a variable, or None: it is elsewhere, or gone."""
    return variable._scope() if variable._scope is not None else None


def fitting(
    value: Any, spec: VariableSpec, operation: str, *, casting: Literal["no", "same_kind"]
) -> np.ndarray:
    """Return ``value`` as a C-contiguous array of a variable's shape and dtype.

    Args:
        value: An array, or what numpy makes one of. Python numbers, and lists of them, have no
            dtype: they get the variable's, unless it is of a lower kind.
        spec: Of the variable.
        operation: For messages.
        casting: Which other dtypes of arrays are converted.

    Raises:
        GradientError: If it does not fit.
    """
    dtype = dtype_of(spec.dtype)
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == spec.shape:
        return value if value.flags.c_contiguous else np.asarray(value, order="C")
    try:
        array = np.asarray(value)
    except ValueError as exc:
        raise GradientError(f"{operation}: the value is not an array: {exc}") from exc
    if array.shape != spec.shape:
        raise GradientError(f"{operation}: expected shape {spec.shape}, got {array.shape}")
    typed = hasattr(value, "dtype")
    if not np.can_cast(array.dtype, dtype, casting if typed else "same_kind") and (
        typed or (array.dtype.kind, dtype.kind) != ("i", "u")
    ):
        raise GradientError(
            f"{operation}: expected dtype {spec.dtype}, got {array.dtype}",
            hint=f"convert it: np.asarray(value, {spec.dtype!r})",
        )
    try:
        return np.asarray(array if typed else value, dtype, order="C")
    except OverflowError as exc:
        raise GradientError(f"{operation}: expected {spec.dtype}: {exc}") from exc


def checked_target(array: Any, spec: VariableSpec) -> np.ndarray:
    """Return ``array`` if the value of a variable can be read into it.

    Raises:
        GradientError: If it cannot.
    """
    if (
        isinstance(array, np.ndarray)
        and array.shape == spec.shape
        and array.dtype == dtype_of(spec.dtype)
        and array.flags.c_contiguous
        and array.flags.writeable
    ):
        return array
    expected = f"expected a writable C-contiguous array of shape {spec.shape} {spec.dtype}"
    if not isinstance(array, np.ndarray):
        raise GradientError(f'out for "{spec.name}": {expected}, got {type(array).__name__}')
    flaws = "" if array.flags.c_contiguous else ", not C-contiguous"
    flaws += "" if array.flags.writeable else ", read-only"
    got = f"shape {array.shape} {array.dtype}{flaws}"
    raise GradientError(f'out for "{spec.name}": {expected}, got {got}')
