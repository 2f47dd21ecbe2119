"""Variables synchronized on read: a copy for each worker, aggregated when it is read.

The copies lie on one ps, as the rows of one hidden variable: a row for each worker, by its index,
and one for the program. So what a worker has added outlives it. A checkpoint keeps the aggregate.

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
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, Self

import numpy as np

from psync.api.reads import runtime_of, scope_of
from psync.api.scopes import Scope
from psync.api.value_access import ValueAccess
from psync.chief.declarations import describe, initial_array
from psync.client.context import current_closure
from psync.client.runtime import Runtime
from psync.errors import (
    ReplicaValueError,
    UnsupportedError,
    UsageError,
    ValueMismatchError,
)
from psync.numerics.casting import checked_target, fitting
from psync.numerics.replicas import ReduceOp, reducing_arrays
from psync.numerics.sums import Pieces
from psync.replicas.chunks import in_turns
from psync.replicas.context import get_replica_context, in_cross_replica_context
from psync.specs import VariableAggregation, VariableSpec

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
    if aggregation is SUM:
        return np.asarray((yield from reducing_arrays(ReduceOp.SUM, list(copies), None)))
    return np.asarray((yield from reducing_arrays(ReduceOp.MEAN, list(copies[:-1]), None)))


class CopyAccess(ValueAccess):
    """Reads and writes of a variable with copies: a base of ``OnReadVariable``."""

    aggregation: VariableAggregation

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
        closure, ordinal = runtime.begin_update(operation)
        await runtime.ps.scatter(
            self.spec, np.array([row]), array[np.newaxis], op=op, closure=closure, ordinal=ordinal
        )
        return self

    async def _write_all(
        self, runtime: Runtime, op: str, array: np.ndarray, operation: str
    ) -> None:
        copies_of = spread if op == "assign" else repeated
        copies = copies_of(array, self._num_workers, self.aggregation)
        closure, ordinal = runtime.begin_update(operation)
        plan = runtime.ps.plan((self.spec,))
        await runtime.ps.assign(plan, [copies], op=op, closure=closure, ordinal=ordinal)

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


def declare_copies(
    scope: Scope,
    initial_value: Any,
    name: str,
    dtype: object,
    shape: tuple[int, ...] | None,
    trainable: bool,
    where: str,
    aggregation: VariableAggregation,
) -> VariableSpec:
    """Declare the hidden variable of all copies, each of which begins with ``initial_value``.

    Raises:
        UsageError: Sums of bools.
        PartitionError: The initial value, dtype or shape do not fit.
    """
    initial, extents, kind = describe(initial_value, name, dtype, shape, where)
    subject = f'variable "{name}" declared at {where}'
    if aggregation is SUM and kind == "bool":
        raise UsageError(
            f"{subject}: bools cannot be summed", hint="declare it with an integer dtype"
        )
    num_workers = scope.cluster.num_tasks("worker")

    def copies() -> np.ndarray:
        value = initial
        if callable(initial):
            value = initial_array(initial, extents, (0,) * len(extents), kind, subject)
        return repeated(value, num_workers, aggregation)

    return scope._declare(
        copies, name, kind, (num_workers + 1, *extents), trainable, where, partitioned=False
    )
