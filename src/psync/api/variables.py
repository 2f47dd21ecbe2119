"""Variables: handles on arrays that live on ps tasks.

A handle holds no value. It is declared in ``strategy.scope()``, travels to workers as
(origin, spec), and is one object per process there. Inside a step it talks to ps tasks
through the worker it runs on, elsewhere through its strategy's coordinator.

``variable_creator_scope`` hooks see each ``Variable(...)`` before it is declared, the innermost
first, and may change it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any, Self, cast

import numpy as np

from psync.api.on_read import CopyAccess, declare_copies
from psync.api.scopes import (
    Scope,
    current_elsewhere,
    current_scope,
    elsewhere,
    place_of,
    scope_for,
)
from psync.api.value_access import ValueAccess
from psync.client.context import forbid_in_step
from psync.cluster import device_name
from psync.errors import ConfigurationError, UsageError
from psync.net.platform import PerProcess
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.specs import VariableAggregation as VariableAggregation
from psync.specs import VariableSynchronization as VariableSynchronization
from psync.status.html_tables import table

Creator = Callable[..., Any]

# Those in force here, the oldest first, each with whether a strategy's scope was open by then.
_creators: ContextVar[tuple[tuple[Creator, bool], ...]] = ContextVar("psync_creators", default=())


@contextmanager
def variable_creator_scope(variable_creator: Creator) -> Generator[None, None, None]:
    """Return a context manager in which ``variable_creator`` makes the result of ``Variable(...)``.

    The hook is called with ``next_creator`` and all arguments of ``Variable`` by name, and returns
    a variable: usually ``next_creator(**kwargs)``, possibly with changed arguments. Of several
    hooks the innermost is called first, and its ``next_creator`` calls the one around it.

    A hook sees a variable once, before it is split into shards. It does not see variables that
    psync declares itself (global step, moving averages, optimizer slots).

    The strategy places a variable after the hooks inside ``strategy.scope()`` and before those
    around it. So ``strategy.pinned`` or ``colocate_vars_with`` in a hook around the scope wins over
    the strategy, and does not advance its placement. In a hook inside the scope, the placement in
    force at the call of ``Variable(...)`` wins.

    Args:
        variable_creator: Function ``creator(next_creator, **kwargs) -> variable``.

    Raises:
        UsageError: ``variable_creator`` is not callable; or inside a step.

    Example:
        def frozen(next_creator, **kwargs):
            return next_creator(**{**kwargs, "trainable": False})

        with strategy.scope(), psync.variable_creator_scope(frozen):
            table = psync.Variable(pretrained)

    Source: ``tf.variable_creator_scope``; there a hook sees each shard, and ``tf.device`` sets the
        place. Precedence is the same as in TensorFlow's parameter-server strategy.
    """
    forbid_in_step("entering a variable creator scope")
    if not callable(variable_creator):
        raise UsageError(
            "variable_creator_scope: expected a callable (next_creator, **kwargs), got "
            f"{variable_creator!r}"
        )
    entered = (variable_creator, current_scope() is not None)
    token = _creators.set((*_creators.get(), entered))
    try:
        yield
    finally:
        _creators.reset(token)


def through_creators(make: Creator, **kwargs: Any) -> Any:
    """Return what ``make(**kwargs)`` does, or what the hooks in force here make of it."""
    where = current_elsewhere()

    def around(make: Creator, *, inside: bool) -> Creator:
        creators = [
            creator for creator, entered_inside in _creators.get() if entered_inside is inside
        ]
        return reduce(lambda make, creator: partial(creator, make), creators, make)

    def placed(**kwargs: Any) -> Any:
        with elsewhere(where):
            return around(make, inside=False)(**kwargs)

    return around(placed, inside=True)(**kwargs)


class Handle(ValueAccess):
    """The members that ``Variable`` and ``ShardedVariable`` share."""

    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __psync_handle__(self) -> None:
        """Say on what its pickle depends: on nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_intern, (self.origin, self.spec, self.synchronization, self.aggregation))

    @property
    def name(self) -> str:
        """Name, unique in the strategy."""
        return self.spec.name

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

    def _repr_html_(self) -> str:
        rows = [
            (shard.index, shard.shape, shard.offset, shard.nbytes, f"ps {shard.ps}")
            for shard in self.spec.shards
        ]
        title = f"{type(self).__name__} {self.name!r}, {self.spec.dtype} of shape {self.shape}"
        return table(title, ("shard", "shape", "first row", "bytes", "ps"), rows)


class Variable(Handle):
    """A variable on one ps.

    ``Variable(...)`` declares one in the enclosing ``strategy.scope()``. If the strategy's
    partitioner splits it, the call returns a ``ShardedVariable``.

    Args:
        initial_value: Array (including torch and jax arrays and ``nn.Parameter``), number, nested
            list, or a callable that returns one. A callable that takes (shape, offset) is called
            for each shard separately.
        name: Name, made unique with a suffix if it is taken. Default "Variable".
        dtype: Dtype of the elements. Default: that of the initial value (Python floats: float32,
            integers: int64).
        shape: Shape. If it is given with ``dtype``, a callable is not called early.
        trainable: Whether the variable is one of ``strategy.trainable_variables``. Default: yes,
            unless it is synchronized on read.
        synchronization: AUTO is ON_WRITE. ON_READ: each worker has a copy, which begins with the
            initial value. Steps read and write their worker's copy, and the program reads the
            aggregate of all copies. See ``OnReadVariable``.
        aggregation: How the values of several replicas become one.

    Raises:
        UsageError: Outside a scope, or inside a step.
        PartitionError: The initial value, dtype or partitions do not match.

    Source: ``tf.Variable`` under ``tf.distribute.ParameterServerStrategy``.
    """

    def __new__(
        cls,
        initial_value: Any = None,
        *,
        name: str | None = None,
        dtype: object = None,
        shape: Sequence[int] | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Variable:  # to type checkers; it may be a ShardedVariable
        called = f'variable "{name or "Variable"}"'
        scope = scope_for(
            f"declaring {called}",
            instead="declare it in `with strategy.scope():` on the coordinator, "
            "and use it in the step",
            hint="declare it in `with strategy.scope():`",
            outside=f"{called} is declared",
        )
        where = place_of(sys._getframe(1))
        made = through_creators(
            partial(_declare, scope, where), initial_value=initial_value, name=name, dtype=dtype,
            shape=shape, trainable=trainable, synchronization=synchronization,
            aggregation=aggregation,
        )  # fmt: skip
        if not isinstance(made, Handle):
            raise UsageError(
                f"{called}: expected a variable creator to return a variable, got {made!r}",
                hint="return next_creator(**kwargs)",
            )
        return cast(Variable, made)

    @property
    def device(self) -> str:
        """The ps that holds it, in TensorFlow's long form."""
        return device_name("ps", self.spec.shards[0].ps)


class ShardedVariable(Handle):
    """A variable split along axis 0 into shards on several ps tasks.

    ``Variable(...)`` makes it under a partitioner; it cannot be made directly. Optimizers and
    synchronous steps treat the shards as one variable.

    Source: TensorFlow ``ShardedVariable``, which can be made of a list of variables; there, rows of
        unevenly split shards are looked up wrongly or not at all.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        raise UsageError(
            "ShardedVariable: created only by psync.Variable(…), not from existing variables",
            hint="to shard variables: psync.ParameterServerStrategy(…, "
            "psync.FixedShardsPartitioner(2)), or another of psync.partitioners",
        )

    @property
    def variables(self) -> list[Variable]:
        """The shards in order, each as a variable."""
        return [_component(self, shard) for shard in self.spec.shards]

    @property
    def device(self) -> tuple[str, ...]:
        """The ps of each shard, in TensorFlow's long form."""
        return tuple(device_name("ps", shard.ps) for shard in self.spec.shards)


class OnReadVariable(CopyAccess, Variable):
    """A variable with one copy per worker, on a ps: for sums and means over workers.

    Made by ``Variable(…, synchronization=psync.VariableSynchronization.ON_READ)``.

    - In a step, ``read``, ``assign``, ``assign_add`` and ``assign_sub`` use the worker's own copy.
    - In the program, ``read`` returns the aggregate, and ``assign`` sets all copies so that the
      aggregate is the value. ``assign_add`` and ``assign_sub`` change each copy; for a sum, they
      change the program's own contribution, and are refused in cross-replica context.
    - In a training session, each worker's program counts as a step, outside of
      ``strategy.scope()``.

    A worker's copy survives the worker. The variable is never partitioned, trained, or scattered
    to.

    Source: ``SyncOnReadVariable`` of TensorFlow's ``distribute/values.py``.
    """


def _declare(
    scope: Scope,
    where: str,
    *,
    initial_value: Any,
    name: str | None,
    dtype: object,
    shape: Sequence[int] | None,
    trainable: bool | None,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> Any:
    """Declare what ``Variable(...)`` stands for, once all hooks have had their say."""
    name = name or "Variable"
    on_read = synchronization is VariableSynchronization.ON_READ
    _check_kind(name, synchronization, aggregation, trained_on_read=on_read and bool(trainable))
    extents = tuple(shape) if shape is not None else None
    trainable = not on_read if trainable is None else trainable
    if on_read:
        spec = declare_copies(
            scope, initial_value, name, dtype, extents, trainable, where, aggregation
        )
    else:
        spec = scope._declare(initial_value, name, dtype, extents, trainable, where)
    return declared_in(scope, spec, synchronization, aggregation)


def _check_kind(
    name: str, synchronization: object, aggregation: object, *, trained_on_read: bool
) -> None:
    kinds = (VariableSynchronization, synchronization), (VariableAggregation, aggregation)
    for kind, given in kinds:
        if not isinstance(given, kind):
            raise ConfigurationError(
                f'variable "{name}": expected a psync.{kind.__name__}, got {given!r}',
                hint=f"one of {', '.join(f'psync.{member}' for member in kind)}",
            )
    if synchronization is VariableSynchronization.NONE:
        raise ConfigurationError(
            f'variable "{name}": synchronization NONE is not supported',
            hint="use AUTO, ON_WRITE or ON_READ",
        )
    if trained_on_read:
        raise ConfigurationError(
            f'variable "{name}": cannot be trainable when synchronized on read: each worker has a '
            "different value",
            hint="trainable=False, or synchronization=psync.VariableSynchronization.ON_WRITE",
        )


def declared_in(
    scope: Scope,
    spec: VariableSpec,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> Any:
    """Return the handle of a variable that ``scope`` has just declared, which takes note of it."""
    handle = _intern(scope._origin, spec, synchronization, aggregation)
    handle._scope = weakref.ref(scope)
    scope._add(handle)
    return handle


_interned: PerProcess[weakref.WeakValueDictionary[tuple[str, str, int], Any]] = PerProcess(
    weakref.WeakValueDictionary
)


def _intern(
    origin: str,
    spec: VariableSpec,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> Any:
    """Return this process's handle of a variable: one object, however often it arrives."""
    key = (origin, spec.name, spec.variable_id)
    handles = _interned()
    handle = handles.get(key)
    if handle is None:
        handle = object.__new__(_class_of(spec, synchronization))
        handle.spec, handle.origin = spec, origin
        handle.synchronization, handle.aggregation = synchronization, aggregation
        handle._scope = None
        handles[key] = handle
    return handle


def _class_of(spec: VariableSpec, synchronization: VariableSynchronization) -> type[Handle]:
    if synchronization is VariableSynchronization.ON_READ:
        return OnReadVariable
    return Variable if len(spec.shards) == 1 else ShardedVariable


def _component(whole: ShardedVariable, shard: ShardSpec) -> Variable:
    spec = whole.spec
    name = f"{spec.name}/part_{shard.index}"
    alone = dataclasses.replace(shard, offset=0)
    part = dataclasses.replace(spec, name=name, shape=shard.shape, shards=(alone,))
    handle = cast(Variable, _intern(whole.origin, part, whole.synchronization, whole.aggregation))
    handle._scope = whole._scope
    return handle
