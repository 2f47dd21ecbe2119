"""Variables: handles on arrays that live on ps tasks.

A handle holds no value. It is declared in ``strategy.scope()``, travels to workers as
(origin, spec), and is one object per process there. Inside a step it talks to ps tasks
through the worker it runs on, elsewhere through its strategy's coordinator.

``variable_creator_scope`` hooks see each ``Variable(...)`` before it is declared, the innermost
first, and may change it.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, Self, cast

import numpy as np

from psync.api.scopes import (
    Scope,
    current_elsewhere,
    handle_of,
    place_of,
    runtime_of,
    scope_for,
    scope_of,
    values_of,
)
from psync.chief.declarations import describe, initial_array
from psync.client.context import Runtime, current_closure, forbid_in_step, setting
from psync.client.extras import assign_at_once
from psync.cluster import device_name
from psync.errors import (
    ConfigurationError,
    IndexValueError,
    PsyncError,
    ReplicaValueError,
    UnsupportedError,
    UsageError,
    ValueMismatchError,
    check_fits,
)
from psync.numerics.casting import checked_target, fitting
from psync.numerics.indexing import Selection, index_array, row_numbers, select
from psync.numerics.replicas import ReduceOp, reducing_arrays
from psync.numerics.sums import Pieces
from psync.replicas import gang_updates
from psync.replicas.context import (
    current_gang,
    get_replica_context,
    in_cross_replica_context,
    in_turns,
    open_scope,
)
from psync.serialization.remote_value import AwaitFirst, RemoteValue
from psync.specs import VariableAggregation as VariableAggregation
from psync.specs import VariableSpec, dtype_of
from psync.specs import VariableSynchronization as VariableSynchronization
from psync.status.html_tables import table


class Handle(AwaitFirst):
    """The members that ``Variable`` and ``ShardedVariable`` share."""

    spec: VariableSpec
    origin: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    _scope: weakref.ref[Scope] | None  # its strategy's; None where that is not, on workers

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
        shards = self.spec.shards
        rows = [(s.index, s.shape, s.offset, s.nbytes, f"ps {s.ps}") for s in shards]
        title = f"{type(self).__name__} {self.name!r}, {self.spec.dtype} of shape {self.shape}"
        return table(title, ("shard", "shape", "first row", "bytes", "ps"), rows)

    @property
    def _value_spec(self) -> VariableSpec:
        """The spec of the value that users read and write: the variable's, unless it has copies."""
        return self.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return self._value_spec.shape

    def _what_it_is(self) -> tuple[str, str]:
        """Return the name for messages, and the expression to await instead."""
        return (
            f'variable "{self.spec.name}"',
            "`value = await v.read()`, or `await psync.pull((v, w))`",
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f'len() of variable "{self.spec.name}", which has no axis')
        return self.shape[0]

    async def read(
        self, *, copy: bool = False, out: np.ndarray | None = None, consistent: bool = False
    ) -> np.ndarray:
        """Return the value; for the arguments see ``psync.pull``, which reads many at once."""
        target = None if out is None else [checked_target(out, self.spec)]
        operation = f'read of "{self.spec.name}"'
        runtime = await runtime_of(operation, self)
        (value,) = await values_of(runtime, (self,), copy=copy, out=target, consistent=consistent)
        return value

    async def read_value(self) -> np.ndarray:
        """Return the value; TensorFlow's name of ``read``, as is ``value``."""
        return await self.read()

    value = read_value

    async def assign(self, value: Any, *, atomic: bool = False) -> Self:
        """Set the value.

        Each shard changes at once; shards on different ps tasks change one after the other. In a
        replica of ``strategy.run``, the aggregate (``aggregation``) of all replicas' values is
        written once.

        Args:
            value: An array of the variable's shape, or something that numpy converts to one. It is
                cast to the variable's dtype within a kind (float64 to float32, integers to floats)
                if that can hold all its numbers: floats may be rounded, but none may become
                infinite. Not copied: do not change it before this returns.
            atomic: Whether all shards change as one. A read with ``consistent=True``, and another
                atomic assign, then finds the old value in all of them, or the new one in all. Other
                updates wait meanwhile; an update on several ps tasks may come before the assign on
                one ps and after it on another. It costs two more messages to each ps. If this task
                or a ps dies meanwhile, some shards may have the new value and others the old one.

        Returns:
            The variable.

        Raises:
            ValueMismatchError: Shape or dtype do not match, or the dtype cannot hold a number.
            ReplicaValueError: The variable has no aggregation, in a replica of ``strategy.run``.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.
            LockLost: ``atomic`` is True, and before all shards had the value, a connection was
                lost, or this task's loop was blocked for longer than 10 s. Assign the value again.
            ClosureCancelled: The step was cancelled.

        Cancellation: Once begun, it ends in the background.

        Source: ``tf.Variable.assign``; there, the dtype must be the variable's.
        """
        return await self._assign("assign", "assign", value, atomic)

    async def assign_add(self, delta: Any) -> Self:
        """Add ``delta`` to the value; see ``assign``.

        A ``delta`` that the dtype cannot hold is refused. The sum is numpy's in-place sum: integers
        wrap around, and floats that become too large become infinite.
        """
        return await self._assign("assign_add", "add", delta)

    async def assign_sub(self, delta: Any) -> Self:
        """Subtract ``delta`` from the value; see ``assign_add``."""
        return await self._assign("assign_sub", "sub", delta)

    async def _assign(self, method: str, op: str, value: Any, atomic: bool = False) -> Self:
        operation = f'{method} to "{self.spec.name}"'
        array = fitting(value, self.spec, operation, casting="same_kind")
        at_once = atomic and len(self.spec.shards) > 1
        member = current_gang()
        if member is not None:
            if at_once:
                raise UsageError(
                    f"{operation}: an atomic update is not possible in one of several replicas",
                    hint="write it in a merge_call",
                )
            await gang_updates.assign(member, self, method, array)
            return self
        runtime = await runtime_of(operation, self)
        call = runtime.begin_update(operation)
        plan = runtime.ps.plan_of((self,))
        assign = partial(assign_at_once, runtime.ps) if at_once else runtime.ps.assign
        await assign(plan, [array], op=op, call=call)
        return self

    def __getitem__(self, index: Any) -> PartRead:
        """Return an awaitable of ``value[index]``; only the rows it needs travel.

        Args:
            index: Any index of numpy: integers, slices with any step, ``...``, None, masks, arrays
                and lists of integers, and tuples of these.

        Returns:
            An awaitable of numpy's ``value[index]``. Each shard is one version of itself; different
            shards may be of different versions.

        Raises:
            VariableIndexError: Out of range (including where numpy does not check, because the
                result is empty), too many items, or a mask of another shape; also an IndexError.
            IndexTypeError: Not an index, or an index whose value is not here; also a TypeError.
            IndexValueError: A step of 0; also a ValueError.

        Example:
            rows = await v[2:7]
            column = await v[..., 0]

        Source: ``ShardedVariable.__getitem__``; there, slices with a start beyond either end give
            other rows than numpy.
        """
        awaited = (AwaitFirst, RemoteValue)
        return PartRead(self, select(index, self.shape, self.spec.name, awaited))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise UsageError(
            f'item assignment to variable "{self.spec.name}": its value lives on ps tasks',
            hint="await v.scatter_update((rows, values)) changes rows, await v.assign(value) the "
            "whole variable",
        )

    async def sparse_read(self, indices: Any) -> np.ndarray:
        """Return rows in the order of ``indices``; duplicates travel once.

        Args:
            indices: Row numbers, shape (n,), not negative.

        Returns:
            Shape (n, …).

        Raises:
            VariableIndexError: A row is out of range.
            IndexTypeError, IndexValueError: The indices are not integers, or not of shape (n,).
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.

        Cancellation: Safe.

        Source: ``tf.Variable.sparse_read``; that of a ``ShardedVariable`` returns rows grouped by
            shard.
        """
        operation = f'sparse_read of "{self.spec.name}"'
        return await self._rows(operation, self._row_numbers(indices, operation))

    async def _rows(self, operation: str, rows: range | np.ndarray | None) -> np.ndarray:
        """Return rows of the value; None: the value, which has no axis."""
        runtime, spec = await runtime_of(operation, self), self.spec
        if rows is None:
            (value,) = await runtime.ps.pull(runtime.ps.plan((spec,)), seen=runtime.pulled)
            return value
        return await runtime.ps.read_rows(spec, rows, seen=runtime.pulled)

    async def gather_nd(self, indices: Any) -> np.ndarray:
        """Return slices of the value, each given by its indices on the leading axes.

        Args:
            indices: Shape (…, k) with 1 <= k <= the number of axes, not negative.

        Returns:
            Shape ``indices.shape[:-1] + shape[k:]``.

        Raises:
            VariableIndexError, IndexTypeError, IndexValueError: See ``sparse_read``.
            UsageError, ParameterServerLost: See ``sparse_read``.

        Cancellation: Safe.

        Source: ``tf.Variable.gather_nd``.
        """
        operation = f'gather_nd of "{self.spec.name}"'
        array = index_array(indices, operation)
        depth = array.shape[-1] if array.ndim else 0
        expected = (
            f"{operation}: expected indices of shape (…, k) with k from 1 to {len(self.shape)}"
        )
        check_fits(1 <= depth <= len(self.shape), expected, array.shape, error=IndexValueError)
        named = tuple(
            row_numbers(array[..., axis], self.shape[axis], f"{operation}, axis {axis}")
            for axis in range(depth)
        )
        # Of one element numpy makes a number; here it is an array without axes.
        return np.asarray(await self[named])

    async def scatter_update(self, sparse_delta: Any) -> Self:
        """Set rows.

        The rows of each shard change at once; shards on different ps tasks change one after the
        other. Other rows are not touched.

        Args:
            sparse_delta: ``IndexedSlices``, or a pair (indices, values): row numbers of shape (n,),
                not negative, in any order; and values of shape (n, …), or one number for all.
                Values are cast as in ``assign``. If a row is named repeatedly, the last value wins.

        Returns:
            The variable.

        Raises:
            VariableIndexError: A row is out of range.
            IndexTypeError, IndexValueError: The indices are not integers, or not of shape (n,).
            ValueMismatchError: Shape or dtype of the values do not match, or the dtype cannot hold
                one.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.

        Cancellation: Once begun, it ends in the background.

        Source: ``tf.Variable.scatter_update``.
        """
        return await self._scatter("scatter_update", "assign", sparse_delta)

    async def batch_scatter_update(self, sparse_delta: Any) -> Self:
        """Set rows; the same as ``scatter_update``.

        TensorFlow's method takes indices with several axes. All axes but the last stand for leading
        axes of the variable. Here indices have one axis, as in TensorFlow's ``ShardedVariable``;
        for these the two methods are the same.

        Source: ``tf.Variable.batch_scatter_update``.
        """
        return await self._scatter("batch_scatter_update", "assign", sparse_delta)

    async def scatter_add(self, sparse_delta: Any) -> Self:
        """Add to rows; values of a row that is named repeatedly are summed.

        See ``scatter_update`` for arguments and errors. Values that the dtype cannot hold are
        refused. Results of this and the other methods are numpy's in-place results: integers wrap
        around, and floats that become too large become infinite.
        """
        return await self._scatter("scatter_add", "add", sparse_delta)

    async def scatter_sub(self, sparse_delta: Any) -> Self:
        """Subtract from rows; see ``scatter_add``."""
        return await self._scatter("scatter_sub", "sub", sparse_delta)

    async def scatter_mul(self, sparse_delta: Any) -> Self:
        """Multiply rows; a row that is named repeatedly by each value. See ``scatter_update``."""
        return await self._scatter("scatter_mul", "mul", sparse_delta)

    async def scatter_div(self, sparse_delta: Any) -> Self:
        """Divide rows; see ``scatter_mul``."""
        return await self._scatter("scatter_div", "div", sparse_delta)

    async def scatter_min(self, sparse_delta: Any) -> Self:
        """Set rows to the minimum of their elements and the given ones; see ``scatter_update``."""
        return await self._scatter("scatter_min", "min", sparse_delta)

    async def scatter_max(self, sparse_delta: Any) -> Self:
        """Set rows to the maximum of their elements and the given ones; see ``scatter_update``."""
        return await self._scatter("scatter_max", "max", sparse_delta)

    async def _scatter(self, method: str, op: str, sparse_delta: Any) -> Self:
        operation = f'{method} to "{self.spec.name}"'
        rows, values = self._rows_and_values(sparse_delta, operation)
        member = current_gang()
        if member is not None:
            await gang_updates.scatter(member, self, method, rows, values)
            return self
        runtime = await runtime_of(operation, self)
        call = runtime.begin_update(operation)
        await runtime.ps.scatter(self.spec, rows, values, op=op, call=call)
        return self

    def _rows_and_values(self, delta: Any, operation: str) -> tuple[np.ndarray, np.ndarray]:
        if hasattr(delta, "indices") and hasattr(delta, "values"):
            indices, values = delta.indices, delta.values
        elif isinstance(delta, tuple | list) and len(delta) == 2:
            indices, values = delta
        else:
            raise ValueMismatchError(
                f"{operation}: expected IndexedSlices or a pair (indices, values), got "
                f"{type(delta).__name__}"
            )
        rows = self._row_numbers(indices, operation)
        shape = len(rows), *self.shape[1:]
        if isinstance(values, numbers.Number) or (hasattr(values, "dtype") and not np.ndim(values)):
            number = fitting(values, self.spec, operation, casting="same_kind", shape=())
            return rows, np.full(shape, number)
        return rows, fitting(values, self.spec, operation, casting="same_kind", shape=shape)

    def _row_numbers(self, indices: Any, operation: str) -> np.ndarray:
        if not self.shape:
            raise IndexValueError(f"{operation}: the variable is a scalar and has no rows")
        return row_numbers(indices, self.shape[0], operation, ndim=1)


class PartRead(AwaitFirst):
    """An awaitable part of a variable, returned by ``v[index]``.

    Each ``await`` reads the present value.
    """

    __slots__ = ("_selection", "_variable")

    def __init__(self, variable: Handle, selection: Selection) -> None:
        self._variable = variable
        self._selection = selection

    def __repr__(self) -> str:
        return f'<part of "{self._variable.spec.name}", to be awaited>'

    def __await__(self) -> Generator[Any, None, Any]:
        return self._read().__await__()

    def _what_it_is(self) -> tuple[str, str]:
        """Return the name for messages, and the expression to await instead."""
        return f'part of variable "{self._variable.spec.name}"', "`part = await v[…]`"

    async def _read(self) -> Any:
        operation = f'read of rows of "{self._variable.spec.name}"'
        return self._selection.of(await self._variable._rows(operation, self._selection.rows))


NONE, SUM, MEAN, FIRST = VariableAggregation


def repeated(value: np.ndarray, num_workers: int, aggregation: VariableAggregation) -> np.ndarray:
    """Return copies each of which has ``value``; that of the program has it if nothing is summed.

    Args:
        value: Of one copy.
        num_workers: How many copies there are, apart from the program's.
        aggregation: Of the variable.
    """
    copies = np.empty((num_workers + 1, *value.shape), value.dtype)
    copies[:] = value
    if aggregation is SUM:
        copies[num_workers] = 0
    return copies


def spread(value: np.ndarray, num_workers: int, aggregation: VariableAggregation) -> np.ndarray:
    """Return copies of which ``aggregating`` makes ``value``.

    For a sum each worker's copy is its share, value / num_workers, as in TensorFlow. Integers are
    shared out exactly: of 7, two workers have 4 and 3. (TensorFlow's have 3 and 3.)

    Args:
        value: Of the variable's dtype.
        num_workers: How many copies there are, apart from the program's.
        aggregation: Of the variable.
    """
    if aggregation is not SUM:
        return repeated(value, num_workers, aggregation)
    if value.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            share = np.asarray(value / np.asarray(num_workers, value.dtype), value.dtype)
        return repeated(share, num_workers, aggregation)
    wide = np.dtype(np.uint64 if value.dtype.kind == "u" else np.int64)
    share, rest = np.divmod(value.astype(wide), wide.type(num_workers))
    copies = repeated(share.astype(value.dtype), num_workers, aggregation)
    for worker in range(num_workers):
        copies[worker] += worker < rest
    return copies


def aggregating(
    copies: np.ndarray, aggregation: VariableAggregation, what: str
) -> Pieces[np.ndarray]:
    """Make the one value of all copies, a new array, in pieces, for event loops.

    SUM adds the copies of all workers and of the program, MEAN is that of the workers' (of
    integers: float64), ONLY_FIRST_REPLICA is worker 0's. Half precision is summed in float32.

    Args:
        copies: As ``repeated`` returns them.
        aggregation: Of the variable.
        what: Names the read, for messages.

    Raises:
        ReplicaValueError: The aggregation is NONE.
    """
    if aggregation is NONE:
        raise ReplicaValueError(
            f"{what}: each worker has its own value, and no aggregation is declared to combine "
            "them",
            hint="declare it with aggregation=psync.VariableAggregation.SUM (or MEAN, "
            "ONLY_FIRST_REPLICA), or read it in a step",
        )
    if aggregation is FIRST:
        return np.array(copies[0])
    op, counted = (ReduceOp.SUM, copies) if aggregation is SUM else (ReduceOp.MEAN, copies[:-1])
    return np.asarray((yield from reducing_arrays(op, list(counted), None)))


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
    expected = "variable_creator_scope: expected a callable (next_creator, **kwargs)"
    check_fits(callable(variable_creator), expected, variable_creator, error=UsageError)
    entered = (variable_creator, open_scope.get() is not None)
    with setting(_creators, (*_creators.get(), entered)):
        yield


def through_creators(make: Creator, **kwargs: Any) -> Any:
    """Return what ``make(**kwargs)`` does, or what the hooks in force here make of it."""
    where = current_elsewhere.get()

    def around(make: Creator, *, inside: bool) -> Creator:
        for creator, entered_inside in _creators.get():
            if entered_inside is inside:
                make = partial(creator, make)
        return make

    def placed(**kwargs: Any) -> Any:
        with setting(current_elsewhere, where):
            return around(make, inside=False)(**kwargs)

    return around(placed, inside=True)(**kwargs)


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
        scope = scope_for(f"declaring {called}")
        where = place_of(sys._getframe(1))
        made = through_creators(
            partial(_declare, scope, where), initial_value=initial_value, name=name, dtype=dtype,
            shape=shape, trainable=trainable, synchronization=synchronization,
            aggregation=aggregation,
        )  # fmt: skip
        expected = f"{called}: expected a variable creator to return a variable"
        hint = "return next_creator(**kwargs)"
        check_fits(isinstance(made, Handle), expected, made, hint, error=UsageError)
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
        parts = []
        for shard in self.spec.shards:
            name, alone = f"{self.name}/part_{shard.index}", dataclasses.replace(shard, offset=0)
            spec = dataclasses.replace(self.spec, name=name, shape=shard.shape, shards=(alone,))
            part: Variable = _intern(self.origin, spec, self.synchronization, self.aggregation)
            part._scope = self._scope
            parts.append(part)
        return parts

    @property
    def device(self) -> tuple[str, ...]:
        """The ps of each shard, in TensorFlow's long form."""
        return tuple(device_name("ps", shard.ps) for shard in self.spec.shards)


class OnReadVariable(Variable):
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

    The copies lie on one ps, as the rows of one hidden variable: a row for each worker, by its
    index, and one for the program. So what a worker has added outlives it. A checkpoint keeps the
    aggregate.

    code                              reads         assign           assign_add, assign_sub
    step, replica of a gang           its worker's  sets it          changes it
                                      copy
    program in ``strategy.scope()``,  aggregate     each worker's    SUM: an error; else all copies
    merge function                                  (*)
    program outside of scopes, or     aggregate     the same         SUM: the program's own row;
    in ``update``                                                    else all copies

    aggregate: SUM of all rows, MEAN of the workers', the first worker's, or (NONE) an error
    (*) SUM: value / workers, the program's row 0; else the value

    All workers of the cluster count, alive or not; one that was added later shares a copy.

    Source: ``SyncOnReadVariable`` of TensorFlow's ``distribute/values.py``.
    """

    @property
    def _value_spec(self) -> VariableSpec:
        """Describes one copy, which is what users read and write; ``spec`` describes all."""
        return dataclasses.replace(self.spec, shape=self.spec.shape[1:])

    async def read(
        self, *, copy: bool = False, out: np.ndarray | None = None, consistent: bool = False
    ) -> np.ndarray:
        """Return the worker's own copy in a step; otherwise the aggregate of all copies.

        SUM adds the copies of all workers and the program's contribution. MEAN is the mean of the
        workers' copies, in float64 for integers. ONLY_FIRST_REPLICA is the first worker's copy.

        Args:
            copy: Whether the caller may change the array.
            out: A writable C-contiguous array with the variable's shape and dtype; it is filled and
                returned.
            consistent: No effect: all copies are always from one instant.

        Raises:
            ReplicaValueError: Outside a step: the aggregation is NONE.
            ValueMismatchError: ``out`` does not match.
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: A ps is lost.
            ClosureCancelled: The step was cancelled.

        Cancellation: Safe.
        """
        target = None if out is None else checked_target(out, self._value_spec)
        operation = f'read of "{self.spec.name}"'
        runtime = await runtime_of(operation, self)
        row = self._own_row(runtime)
        if row is None:
            (copies,) = await runtime.ps.pull(runtime.ps.plan((self.spec,)))
            value = await in_turns(aggregating(copies, self.aggregation, operation))
        else:
            rows = await runtime.ps.read_rows(self.spec, np.array([row]), seen=runtime.pulled)
            value = rows.reshape(self.shape)
        if target is None:
            value.setflags(write=copy)
            return value
        if value.dtype != target.dtype:
            raise ValueMismatchError(
                f"{operation}: the mean of {target.dtype} is {value.dtype}",
                hint="read it without out",
            )
        np.copyto(target, value)
        return target

    async def checkpoint_value(self) -> np.ndarray:
        """Return what a checkpoint keeps: the aggregate of all copies.

        Raises:
            ReplicaValueError: The aggregation is NONE.
            UsageError, ParameterServerLost: As ``read``.

        Cancellation: Safe.

        Source: ``SyncOnReadVariable`` in TensorFlow's ``distribute/values.py``.
        """
        operation = f'checkpoint of "{self.spec.name}"'
        runtime = await runtime_of(operation, self)
        (copies,) = await runtime.ps.pull(runtime.ps.plan((self.spec,)))
        return await self.checkpoint_value_of(copies)

    async def checkpoint_value_of(self, copies: np.ndarray) -> np.ndarray:
        """Return what a checkpoint keeps of all copies: their aggregate, in the variable's dtype.

        A mean of integers is rounded: what is restored are integers.

        Args:
            copies: One for each worker, and the program's.

        Raises:
            ReplicaValueError: The aggregation is NONE.

        Cancellation: Safe.
        """
        operation = f'checkpoint of "{self.spec.name}"'
        value = await in_turns(aggregating(copies, self.aggregation, operation))
        rounded: np.ndarray = np.rint(value) if value.dtype != copies.dtype else value
        return rounded.astype(copies.dtype, copy=False)

    async def restore_value(self, value: Any) -> None:
        """Set all copies so that ``checkpoint_value`` is ``value``, whatever the number of workers.

        Raises:
            ValueMismatchError: Shape or dtype do not fit.
            UsageError, ParameterServerLost: As ``read``.

        Cancellation: Once begun, it ends in the background.
        """
        operation = f'restoring of "{self.spec.name}"'
        array = fitting(value, self._value_spec, operation, casting="same_kind")
        await self._write_all(await runtime_of(operation, self), "assign", array, operation)

    async def _rows(self, operation: str, rows: range | np.ndarray | None) -> np.ndarray:
        value = await self.read()  # the whole copy travels
        return value if rows is None else value[np.asarray(rows, np.intp)]

    async def _scatter(self, method: str, op: str, sparse_delta: Any) -> NoReturn:
        raise UnsupportedError(
            f'{method} to "{self.spec.name}": a variable that is synchronized on read does not '
            "support scatter updates",
            hint="in a step: read it, change the rows, assign it; or declare it with "
            "synchronization=psync.VariableSynchronization.ON_WRITE",
        )

    async def _assign(self, method: str, op: str, value: Any, atomic: bool = False) -> Self:
        operation = f'{method} to "{self.spec.name}"'
        array = fitting(value, self._value_spec, operation, casting="same_kind")
        runtime = await runtime_of(operation, self)
        row = self._own_row(runtime)
        if row is None and op != "assign" and self.aggregation is SUM:
            if in_cross_replica_context():
                raise ReplicaValueError(
                    f"{operation} in cross-replica context: the variable is the sum of one value "
                    "per worker, so it is unclear which to change",
                    hint="add in a step; or outside `with strategy.scope():`, to the program's own "
                    "part; or assign the sum",
                )
            row = self._num_workers
        if row is None:
            await self._write_all(runtime, op, array, operation)
            return self
        call = runtime.begin_update(operation)
        await runtime.ps.scatter(self.spec, np.array([row]), array[np.newaxis], op=op, call=call)
        return self

    async def _write_all(
        self, runtime: Runtime, op: str, array: np.ndarray, operation: str
    ) -> None:
        copies_of = spread if op == "assign" else repeated
        copies = copies_of(array, self._num_workers, self.aggregation)
        call = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        await runtime.ps.assign(plan, [copies], op=op, call=call)

    @property
    def _num_workers(self) -> int:
        return self.spec.shape[0] - 1  # one more is the program's

    def _own_row(self, runtime: Runtime) -> int | None:
        """Return which copy code here reads and writes; None: all of them."""
        if get_replica_context() is None:
            return None
        closure = current_closure()
        if closure is not None:
            # A worker that was added later shares a copy; what it adds is part of the sum.
            return closure.worker_index % self._num_workers
        if not runtime.in_session:
            return None
        scope = scope_of(self)
        worker = None if scope is None else scope.worker_index
        return self._num_workers if worker is None else worker


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
    kinds = (VariableSynchronization, synchronization), (VariableAggregation, aggregation)
    for kind, given in kinds:
        hint = f"one of {', '.join(f'psync.{member}' for member in kind)}"
        expected = f'variable "{name}": expected a psync.{kind.__name__}'
        check_fits(isinstance(given, kind), expected, given, hint)
    if synchronization is VariableSynchronization.NONE:
        raise ConfigurationError(
            f'variable "{name}": synchronization NONE is not supported',
            hint="use AUTO, ON_WRITE or ON_READ",
        )
    if on_read and trainable:
        raise ConfigurationError(
            f'variable "{name}": cannot be trainable when synchronized on read: each worker has a '
            "different value",
            hint="trainable=False, or synchronization=psync.VariableSynchronization.ON_WRITE",
        )
    extents = tuple(shape) if shape is not None else None
    described = initial, own, kept = describe(initial_value, name, dtype, extents, where)
    if on_read:  # a hidden variable of all copies, each of which begins with the value
        subject = f'variable "{name}" declared at {where}'
        if aggregation is SUM and kept == "bool":
            raise UsageError(
                f"{subject}: bools cannot be summed", hint="declare it with an integer dtype"
            )
        num_workers = scope.cluster.num_tasks("worker")

        def copies() -> np.ndarray:
            value = initial
            if callable(initial):
                value = initial_array(initial, own, (0,) * len(own), kept, subject)
            return repeated(value, num_workers, aggregation)

        described = copies, (num_workers + 1, *own), kept
    trains = not on_read if trainable is None else trainable
    spec = scope._declare(name, described, where, trainable=trains, partitioned=not on_read)
    return declared_in(scope, spec, synchronization, aggregation)


def declared_in(
    scope: Scope,
    spec: VariableSpec,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> Any:
    """Return the handle of a variable that ``scope`` has just declared, which takes note of it."""
    handle = _intern(scope._origin, spec, synchronization, aggregation)
    handle._scope = weakref.ref(scope)
    scope._variables.append(handle)
    return handle


def _intern(
    origin: str,
    spec: VariableSpec,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> Any:
    """Return this process's handle of a variable: one object, however often it arrives."""
    cls: type[Handle] = Variable if len(spec.shards) == 1 else ShardedVariable
    on_read = synchronization is VariableSynchronization.ON_READ
    return handle_of(
        OnReadVariable if on_read else cls, (origin, spec.name, spec.variable_id),
        origin=origin, spec=spec, synchronization=synchronization, aggregation=aggregation,
    )  # fmt: skip


GLOBAL_STEP = "global_step"
"""The name by which the global step is known. It lies on ps 0, which closes synchronous steps, and
takes no turn in the round of the other variables: a program places them alike without it."""


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
    scope = scope_for("get_or_create_global_step", "call it")
    known = global_step_of(scope)
    if known is not None:
        return known
    where = place_of(sys._getframe(1))
    spec = scope._declare(GLOBAL_STEP, (np.zeros((), np.int64), (), "int64"), where, ps=0)
    return cast(Variable, declared_in(scope, spec))


def get_global_step() -> Variable | None:
    """Return the global step of the strategy whose scope is open, or None if there is none.

    Raises:
        UsageError: Outside a scope, inside a step, or a variable named "global_step" is not an
            integer scalar.

    Source: ``tf.compat.v1.train.get_global_step``.
    """
    return global_step_of(scope_for("get_global_step", "call it"))


def global_step_of(scope: Scope) -> Variable | None:
    """Return the variable called "global_step" of a strategy, or None if it was not declared.

    Raises:
        UsageError: It is no integer scalar.
    """
    for variable in scope._variables:
        if variable.name == GLOBAL_STEP:
            return check_step(variable, "the global step")
    return None


def check_step(
    variable: object, purpose: str, *, dtype: str = "", error: type[PsyncError] = UsageError
) -> Variable:
    """Return a variable that can count steps.

    Args:
        variable: What was given.
        purpose: For messages.
        dtype: Name of its dtype; "": any of integers.
        error: Raised if it is no variable, or no scalar of that dtype.
    """
    kind = variable.spec.dtype if isinstance(variable, Variable) else ""
    if variable is None:
        wrong = "global_step is None, and stale gradients are detected by it"
    elif not isinstance(variable, Variable):
        wrong = f"expected a variable as global_step, got {type(variable).__name__}"
    elif isinstance(variable, OnReadVariable):
        wrong = (
            f'variable "{variable.name}" is synchronized on read: each worker has a different value'
        )
    elif variable.shape or variable.dtype.kind not in "iu" or (dtype or kind) != kind:
        wrong = (
            f'expected an {dtype or "integer"} scalar, variable "{variable.name}" declared at '
            f"{variable.spec.declared_at} has shape {variable.shape} {kind}"
        )
    else:
        return variable
    hint = "psync.get_or_create_global_step() creates one, in `with strategy.scope():`"
    raise error(f"{purpose}: {wrong}", hint=hint)


# --- modules ------------------------------------------------------------------------------------

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # before one in CamelCase


class Module:
    """Base class of objects that hold variables: layers, models.

    A module's variables are those in its attributes, at any depth of lists, tuples, dicts and other
    modules. They are ordered by attribute name; those of other modules come last. Each variable is
    listed once; a sharded variable is listed as its shards. Attributes that are set later count.

    A module is pickled to workers like any object, and its variables are handles there.
    ``__init__`` of a subclass need not call this one.

    Args:
        name: A Python identifier. Default: the name of the class, as in ``my_layer``.

    Raises:
        UsageError: The name is not an identifier.

    Example:
        class Dense(psync.Module):
            def __init__(self, rows, columns):
                self.w = psync.Variable(np.zeros((rows, columns), np.float32), name="w")
                self.b = psync.Variable(np.zeros(columns, np.float32), name="b")

            async def __call__(self, x):
                w, b = await psync.pull((self.w, self.b))
                return x @ w + b

    Source: ``tf.Module``, without ``name_scope``: variable names are made unique instead.
    """

    _name: str | None = None  # None: after the class

    def __init__(self, name: str | None = None) -> None:
        fits = name is None or (isinstance(name, str) and name.isidentifier())
        check_fits(fits, "name of a module: expected a Python identifier", name, error=UsageError)
        self._name = name

    @property
    def name(self) -> str:
        """The given name, or the name of the class in lower case."""
        return self._name or _WORD.sub("_", type(self).__name__).lower()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables of the module; of sharded ones, the shards."""
        found: dict[int, Variable] = {}  # by id: variables have no other equality
        for module in (self, *self.submodules):
            for leaf in _leaves(vars(module), set()):
                if isinstance(leaf, ShardedVariable):
                    found.update((id(part), part) for part in leaf.variables)
                elif isinstance(leaf, Variable):
                    found[id(leaf)] = leaf
        return tuple(found.values())

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that were declared trainable."""
        return tuple(variable for variable in self.variables if variable.trainable)

    def _checkpoint_items(self) -> Mapping[str, Any]:
        """Return the module's attributes by name, for a checkpoint.

        The checkpoint does not save settings and functions.
        """
        return dict(sorted(vars(self).items()))

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules in this one, at any depth; each module comes before those that it holds."""
        found: dict[int, Module] = {id(self): self}
        _add_submodules(self, found)
        return tuple(found.values())[1:]


def _add_submodules(module: Module, found: dict[int, Module]) -> None:
    for leaf in _leaves(vars(module), set()):
        if isinstance(leaf, Module) and id(leaf) not in found:
            found[id(leaf)] = leaf
            _add_submodules(leaf, found)


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what lists, tuples and mappings hold at any depth, mappings in the order of their keys.

    Keys that cannot be compared stay in the order in which they were added.
    """
    if isinstance(value, Mapping):
        try:
            inner = [value[key] for key in sorted(value)]
        except TypeError:
            inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        yield value
        return
    if id(value) not in seen:  # one that holds itself would have no end
        seen.add(id(value))
        for item in inner:
            yield from _leaves(item, seen)
