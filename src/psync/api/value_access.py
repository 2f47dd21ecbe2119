"""Operations on the value of a variable, and on its rows: read, assign, index, gather, scatter.

Of rows only those that are needed travel, from and to the ps tasks that hold them.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Generator
from typing import Any, NoReturn, Self

import numpy as np

from psync.api.reads import runtime_of, values_of
from psync.api.scopes import Scope
from psync.client.shard_locks import assign_at_once
from psync.errors import IndexValueError, UsageError, ValueMismatchError
from psync.numerics.casting import checked_target, fitting
from psync.numerics.indexing import Selection, index_array, row_numbers, select
from psync.replicas import gang_updates
from psync.replicas.context import current_gang
from psync.serialization.remote_value import AwaitFirst, RemoteValue
from psync.specs import VariableSpec


class ValueAccess(AwaitFirst):
    """Access to a variable's value and rows: a base of ``Variable`` and ``ShardedVariable``."""

    spec: VariableSpec
    origin: str
    _scope: weakref.ref[Scope] | None  # its strategy's; None where that is not, on workers

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
        """Return the value; TensorFlow's name of ``read``."""
        return await self.read()

    async def value(self) -> np.ndarray:
        """Return the value; TensorFlow's other name of ``read``."""
        return await self.read()

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
        closure, ordinal = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        assign = functools.partial(assign_at_once, runtime.ps) if at_once else runtime.ps.assign
        await assign(plan, [array], op=op, closure=closure, ordinal=ordinal)
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
        elsewhere = (AwaitFirst, RemoteValue)
        return PartRead(self, select(index, self.shape, self.spec.name, elsewhere))

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
        if isinstance(rows, range):
            bounds = rows.start, rows.stop, rows.step
            return await runtime.ps.read_range(spec, *bounds, seen=runtime.pulled)
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
        if not 1 <= depth <= len(self.shape):
            raise IndexValueError(
                f"{operation}: expected indices of shape (…, k) with k from 1 to "
                f"{len(self.shape)}, got {array.shape}"
            )
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
        closure, ordinal = runtime.begin_update(operation)
        await runtime.ps.scatter(self.spec, rows, values, op=op, closure=closure, ordinal=ordinal)
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

    def __init__(self, variable: ValueAccess, selection: Selection) -> None:
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
