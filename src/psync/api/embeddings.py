"""Embedding lookups: rows of variables by ids of any shape, and combined rows of several ids.

An id that is requested many times travels once, in one request to each ps that holds some of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psync.api.scopes import runtime_of
from psync.api.variables import Handle, OnReadVariable
from psync.client.link import all_of
from psync.errors import IndexTypeError, PartitionError, UsageError, ValueMismatchError
from psync.numerics.embedding import SparseIds, check_choice, check_sizes, shared_out, with_max_norm
from psync.numerics.indexing import row_numbers
from psync.specs import checked_kind


async def embedding_lookup(
    params: Any, ids: Any, partition_strategy: str = "div", max_norm: float | None = None
) -> np.ndarray:
    """Return the rows of the given ids.

    Args:
        params: A variable, sharded or not, or a list of variables over which the ids are spread.
        ids: Integers of any shape, from 0 to the number of rows minus 1.
        partition_strategy: How ids are spread over a list of n variables, which must have rows
            accordingly. "div": consecutive ids, the first variables taking one more if the division
            has a remainder. "mod": id i is in variable i mod n. It is independent of how a sharded
            variable is cut.
        max_norm: Rows with a larger Euclidean norm are scaled down to it.

    Returns:
        A new array of shape ``ids.shape`` + the shape of a row. To push a gradient for these rows,
        use ``IndexedSlices(gradient.reshape(ids.size, …), ids.reshape(-1), v.shape)``.

    Raises:
        VariableIndexError: An id is out of range, or not a row of its variable.
        IndexTypeError: The ids are not integers.
        UsageError: Neither in a step nor within a running coordinator; the strategy is unknown; or
            params are not variables.
        ParameterServerLost: A ps is lost.

    Cancellation: Safe.

    Source: ``tf.nn.embedding_lookup``, and ``tf.compat.v1.nn.embedding_lookup`` for lists, whose
        default is "mod".
    """
    table = _Table("embedding_lookup", params, partition_strategy)
    numbers = table.checked(ids)
    rows = await table.rows(numbers.reshape(-1), max_norm)
    return rows.reshape(numbers.shape + rows.shape[1:])


async def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    partition_strategy: str = "div",
) -> np.ndarray:
    """Return one row for each row of a sparse matrix of ids: the rows of its ids, combined.

    Args:
        params: See ``embedding_lookup``.
        sp_ids: A triple (indices, values, dense_shape), or an object with these attributes, such as
            ``tf.SparseTensor``: ``indices`` of shape (n, 2), in any order, and an id in ``values``
            for each. Every row has at least one id.
        sp_weights: Weights in the same form, at the same indices; None: 1 each.
        combiner: "sum": rows times weights, summed. "mean", the default: the sum divided by the sum
            of the weights. "sqrtn": the sum divided by the root of the sum of squared weights.
        max_norm: See ``embedding_lookup``; applied before rows are combined.
        partition_strategy: See ``embedding_lookup``.

    Returns:
        Shape (``dense_shape[0]``,) + the shape of a row.

    Raises:
        ValueMismatchError: Indices, values and weights do not match, or a row has no id.
        UsageError, VariableIndexError, ParameterServerLost: See ``embedding_lookup``; or the
            combiner is unknown.

    Cancellation: Safe.

    Source: ``tf.nn.embedding_lookup_sparse``.
    """
    combiner = "mean" if combiner is None else combiner
    table = _Table("embedding_lookup_sparse", params, partition_strategy)
    sparse = SparseIds.of(sp_ids, sp_weights, table.what)
    empty = sparse.empty_rows()
    if len(empty):
        raise ValueMismatchError(
            f"{table.what}: row {empty[0]} of sp_ids has no id, expected at least one in each of "
            f"the {sparse.num_rows} rows",
            hint="safe_embedding_lookup_sparse returns zeros for such rows",
        )
    return await _combined(table, sparse, combiner, max_norm)


async def safe_embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    partition_strategy: str = "div",
) -> np.ndarray:
    """Combine rows like ``embedding_lookup_sparse``, where rows may have no ids or invalid ones.

    Ids below 0 are left out, as are ids whose weight is not above 0. A row with no ids left becomes
    zeros, or the row of ``default_id``.

    Args:
        params, partition_strategy: See ``embedding_lookup``.
        sp_ids, sp_weights, combiner, max_norm: See ``embedding_lookup_sparse``; ``dense_shape``
            gives the number of rows.
        default_id: Id whose row empty rows get; None: zeros.

    Returns:
        Shape (``dense_shape[0]``,) + the shape of a row.

    Raises:
        ValueMismatchError, UsageError, VariableIndexError, ParameterServerLost: See
            ``embedding_lookup_sparse``.

    Cancellation: Safe.

    Source: ``tf.nn.safe_embedding_lookup_sparse``, as documented; its code keeps weights below 0 if
        the combiner is "sum".
    """
    table = _Table("safe_embedding_lookup_sparse", params, partition_strategy)
    sparse = SparseIds.of(sp_ids, sp_weights, table.what).pruned()
    if default_id is not None:
        sparse = sparse.filled(table.default(default_id))
    return await _combined(table, sparse, combiner, max_norm)


async def _combined(
    table: _Table, sparse: SparseIds, combiner: str, max_norm: float | None
) -> np.ndarray:
    check_choice(table.what, "combiner", combiner)
    each, which = np.unique(table.checked(sparse.ids), return_inverse=True)
    rows = await table.rows(each, max_norm)
    return sparse.combined(rows, which.reshape(-1), combiner, table.what)


class _Table:
    """The rows of one variable, or of several that stand for one.

    Args:
        what: For messages.
        params, strategy: See ``embedding_lookup``.
    """

    def __init__(self, what: str, params: Any, strategy: str) -> None:
        variables = list(params) if isinstance(params, list | tuple) else [params]
        for variable in variables:
            expected = f"{what}: expected a variable or a list of variables as params"
            checked_kind(expected, variable, Handle, error=UsageError)
            if isinstance(variable, OnReadVariable):
                raise UsageError(
                    f'{what}: variable "{variable.name}" is synchronized on read',
                    hint="await variable.sparse_read(ids) returns rows of this worker's value",
                )
        if not variables:
            raise PartitionError(f"{what}: params is an empty list")
        check_choice(what, "partition_strategy", strategy)
        names = ", ".join([f'"{variable.name}"' for variable in variables])
        self.what = f"{what} of {names}"
        self._variables = variables
        self._strategy = strategy
        first = variables[0]
        for each in variables:
            if not each.shape:
                raise PartitionError(f'{self.what}: "{each.name}" is a scalar and has no rows')
            if (each.shape[1:], each.dtype) != (first.shape[1:], first.dtype):
                raise PartitionError(
                    f"{self.what}: expected rows of shape {first.shape[1:]} {first.dtype}, as "
                    f'"{first.name}" has, got {each.shape[1:]} {each.dtype} in "{each.name}"'
                )
        self._sizes = [each.shape[0] for each in variables]
        if len(variables) > 1:
            check_sizes(self._sizes, [variable.name for variable in variables], what)

    def checked(self, ids: Any) -> np.ndarray:
        """Return ids as numbers of rows."""
        return row_numbers(ids, sum(self._sizes), self.what)

    def default(self, default_id: Any) -> int:
        """Return the id that rows without one get, which is a number of a row."""
        number = self.checked(default_id)
        if number.ndim:
            raise IndexTypeError(
                f"{self.what}: expected an integer as default_id, got shape {number.shape}"
            )
        return int(number)

    async def rows(self, ids: np.ndarray, max_norm: float | None) -> np.ndarray:
        """Return the rows of ids, which are a list of int64, in their order, none too long."""
        runtime, first = await runtime_of(self.what, *self._variables), self._variables[0]
        if len(self._variables) == 1:
            rows = await runtime.ps.read_rows(first.spec, ids, seen=runtime.pulled)
        else:
            rows = np.empty((len(ids), *first.shape[1:]), first.dtype)
            owners, local = shared_out(ids, self._sizes, self._strategy)
            wanted = [np.flatnonzero(owners == number) for number in range(len(self._variables))]
            read, pulled = runtime.ps.read_rows, runtime.pulled
            reads = zip(self._variables, wanted, strict=True)
            parts = await all_of([read(each.spec, local[at], seen=pulled) for each, at in reads])
            for at, part in zip(wanted, parts, strict=True):
                rows[at] = part
        return rows if max_norm is None else with_max_norm(rows, max_norm, self.what)
