"""Row access to the shards of one ps: lookup, scatter, and sparse (lazy) optimizer updates.

What is done to rows costs what these rows are, whatever the size of the shard: parameter rows and
those of the slots are gathered, changed as if they were all there is, and scattered back. So an
optimizer is *lazy*: rows that are not named, and what is kept beside them, stay as they are. A
dense gradient with zeros in these rows would let momenta decay and weights too.

The first time that rows of a shard are asked for, its blocks are laid side by side (see
``numerics.rows``), once. All work is offered in pieces, as in ``shard``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from psync.errors import ValueMismatchError
from psync.numerics.memory import BLOCK_BYTES, BlockArray, BlockPool, bytes_of, roomy
from psync.numerics.rows import RowBlocks, ascending, check_scatter, combine
from psync.numerics.rules import RuleRaised
from psync.numerics.sums import (
    INDEX_COST,
    SQUARES_PIECE,
    Pieces,
    Reduction,
    SparseSum,
    cuts,
    scaled,
    sum_of_squares,
)
from psync.store.shards import Key, ShardTable
from psync.store.work import DONE, Shard, ShardWork, Work

PIECE_BYTES = 1 << 19
"""Of parameter rows, about, between two pauses: gathering, computing and scattering take 1 ms."""


class RowValues(NamedTuple):
    """Rows of a shard, and a value for each."""

    rows: np.ndarray  # int64, ascending, each once
    values: np.ndarray  # shape (number of rows, elements of a row), of the shard's dtype


class RowMean(NamedTuple):
    """The weighted mean, or sum, of several pushes' rows of a shard."""

    gradients: Sequence[RowValues]  # of each push, in order: what ``check_rows`` returned, and rows
    weights: Sequence[float]  # of each push, checked; ``sums.SparseSum`` says what is computed
    reduction: Reduction
    per_index: bool  # divide a row by the weights of the pushes that have it, not of all
    scale: float = 1.0  # what limits the norm of the mean of the whole variable


class RowTable(ShardTable):
    """A table of shards of which rows are read and changed. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._num_rows = self._row_bytes = 0  # read or changed on their own; of their values
        self._row_updates = 0  # finished, one per shard
        self._row_copies = 0  # blocks that were copied before rows in them could be changed

    # Checks, before memory is taken or anything changes.

    def row_bytes(self, key: Key) -> int:
        """Return the bytes of one row of a shard.

        Raises:
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If it is a scalar, which has no rows.
        """
        shard = self._shard(key)
        if shard.row_size < 0:
            raise ValueMismatchError(f"{shard.spec} on {self.task}: a scalar has no rows")
        return shard.row_size * shard.values.dtype.itemsize

    def check_row_numbers(self, key: Key, rows: np.ndarray, *, each_once: bool = False) -> int:
        """Check that rows exist; return the bytes of one.

        Args:
            key: Of the shard.
            rows: int64.
            each_once: Whether they must ascend, too.

        Raises:
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If one of them is not a row of the shard, or they do not ascend.
        """
        row_bytes, shard = self.row_bytes(key), self._shards[key]
        if not len(rows):
            return row_bytes
        count = shard.spec.shape[0]
        if each_once and not ascending(rows):
            at = int(np.flatnonzero(rows[1:] <= rows[:-1])[0])
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: expected each row once and in ascending order, "
                f"got row {rows[at + 1]} after row {rows[at]}"
            )
        if each_once:
            exist = 0 <= rows[0] and rows[-1] < count
        else:  # without a sign, numbers below 0 are the largest ones
            exist = rows.view(np.uint64).max() < count
        if not exist:
            lowest, highest = rows.min(), rows.max()
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: row {lowest if lowest < 0 else highest} of the "
                f"shard does not exist, it has {count}"
            )
        return row_bytes

    def check_rows(self, key: Key, rows: np.ndarray, values: object) -> np.ndarray:
        """Return the values of rows as they are used: one row each, of the shard's dtype.

        For callers that take several updates whole or not at all.

        Args:
            key: Of the shard.
            rows: int64.
            values: A buffer.

        Raises:
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If rows or values do not fit the shard.
        """
        row_bytes = self.check_row_numbers(key, rows, each_once=True)
        shard, data = self._shards[key], bytes_of(values)
        if data.size != len(rows) * row_bytes:
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: expected {len(rows)} rows of {row_bytes} bytes, "
                f"got {data.size} bytes"
            )
        if shard.spec.dtype == "bool" and data.size and data.max() > 1:
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: expected bool values, got bytes other than 0 and 1"
            )
        return data.view(shard.values.dtype).reshape(len(rows), shard.row_size)

    def check_apply_rows(self, optimizer_id: int, key: Key) -> None:
        """Check that an optimizer can be applied to rows of a shard.

        Raises:
            UsageError: If the optimizer is not defined.
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If it needs the gradient of all rows, or the shard has no gradient.
        """
        rule = self._optimizer(optimizer_id).rule
        shard = self._shard(key)
        self._check_optimizable(shard)
        rule.check_rows(f"{shard.spec} on {self.task}")

    def check_scatter(self, key: Key, op: str) -> None:
        """Check that rows of a shard can be changed by an operation.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If there is no such operation.
            ValueMismatchError: If there is none for the shard's dtype.
        """
        spec = self._shard(key).spec
        check_scatter(op, spec.dtype, f"{spec} on {self.task}")

    def rows_cost(self, key: Key, rows: np.ndarray | range) -> int:
        """Return what reading or changing these rows costs, expressed in bytes."""
        row_bytes, shard = self.row_bytes(key), self._shards[key]
        if not len(rows):
            return 0
        arrays = [shard.values, *shard.slots.values()]
        cost = len(rows) * (row_bytes + INDEX_COST)
        for array in arrays:
            if not isinstance(array, RowBlocks):
                cost += array.num_made * BLOCK_BYTES
            elif isinstance(rows, np.ndarray) and array.seen:
                in_order = rows if ascending(rows) else np.sort(rows)
                cost += len(array.held_among(array.blocks_of(in_order))) * BLOCK_BYTES
        return cost

    # What is done.

    def read_range(self, key: Key, start: int, stop: int) -> list[memoryview]:
        """Return consecutive rows of a shard, as ``read`` returns the whole.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If an update of it is under way.
        """
        shard = self._idle(key)
        self.row_bytes(key)  # it has some
        self._count(shard, range(start, stop))
        return shard.values.export(start * shard.row_size, stop * shard.row_size)

    def read_rows(self, key: Key, rows: np.ndarray, out: np.ndarray) -> Work:
        """Start to copy rows of a shard, all of one version.

        Args:
            key: Of the shard.
            rows: Checked; in any order.
            out: 1-D uint8, as long as they are.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If an update of it is under way.
        """
        shard = self._idle(key)
        made = out.view(shard.values.dtype).reshape(len(rows), shard.row_size)
        if len(out) <= PIECE_BYTES and isinstance(shard.values, RowBlocks):
            shard.values.gather(rows, made, self._pool)
            self._count(shard, rows)
            return DONE

        def steps() -> Iterator[None]:
            if not len(rows):
                return
            if not isinstance(shard.values, RowBlocks):
                yield from self._lay_out(shard)
            laid_out = self._rows(shard.values)
            for part in _pieces(laid_out, len(rows)):
                laid_out.gather(rows[part], made[part], self._pool)
                yield
            self._count(shard, rows)

        return ShardWork(shard, steps())

    def scatter(self, key: Key, op: str, rows: np.ndarray, values: np.ndarray) -> Work:
        """Start to change rows of a shard: ``row = row op value``. Integers wrap around.

        Args:
            key: Of the shard.
            op: One of ``scatter.SCATTER_OPS``, checked.
            rows: Checked; each once, ascending.
            values: What ``check_rows`` returned. Must not change until the work is done.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If another update of it is under way.
        """
        shard = self._idle(key)

        def steps() -> Iterator[None]:
            if not len(rows):
                return
            yield from self._lay_out(shard)
            array = self._rows(shard.values)
            yield from self._free(array, rows)
            for part in _pieces(array, len(rows)):
                current = values[part]
                if op != "assign":
                    current = self._gathered(array, rows[part])
                    combine(op, current, values[part])
                array.scatter(rows[part], current)
                yield
            self._updated(shard, rows)

        return ShardWork(shard, steps())

    def apply_rows(
        self, optimizer_id: int, key: Key, rows: np.ndarray, grads: np.ndarray, step: int
    ) -> Work:
        """Start to apply gradients of rows to these rows, and to what is kept beside them.

        Args:
            optimizer_id: Of the optimizer, checked.
            key: Of the shard.
            rows: Checked; each once, ascending.
            grads: What ``check_rows`` returned. Must not change until the work is done.
            step: What ``begin_push`` returned for the push.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If another update of it is under way.
        """
        shard = self._idle(key)
        return ShardWork(shard, self._applied(shard, optimizer_id, rows, grads, step))

    def apply_row_mean(self, optimizer_id: int, key: Key, given: RowMean, step: int) -> Work:
        """Start to apply a mean of several pushes' rows, like ``apply_rows``.

        Args:
            optimizer_id: Of the optimizer, checked.
            key: Of the shard.
            given: The mean; its gradients must not change until the work is done.
            step: As for ``apply_rows``.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If another update of it is under way.
        """
        shard = self._idle(key)

        def steps() -> Iterator[None]:
            rows, mean = yield from self._row_mean(shard, given)
            if given.scale != 1.0:
                for part in cuts(len(mean), mean.itemsize * shard.row_size):
                    mean[part] = scaled(mean[part], given.scale)
                    yield
            yield from self._applied(shard, optimizer_id, rows, mean, step)

        return ShardWork(shard, steps())

    def square_row_mean(
        self, key: Key, given: RowMean, into: list[tuple[float, float]]
    ) -> Pieces[None]:
        """Start to add up the squares of a mean of rows, before it is scaled; changes nothing.

        Nothing of the shard is read, so it may be busy. ``into`` gets the sum at the end, and 0.
        """
        _, mean = yield from self._row_mean(self._shard(key), given)
        flat, total = mean.reshape(-1), 0.0
        for part in cuts(-(-flat.size // SQUARES_PIECE), SQUARES_PIECE * flat.itemsize):
            total = sum_of_squares(
                flat[part.start * SQUARES_PIECE : part.stop * SQUARES_PIECE], total
            )
            yield
        into.append((total, 0.0))

    # How.

    def _row_mean(self, shard: Shard, given: RowMean) -> Pieces[tuple[np.ndarray, np.ndarray]]:
        total = SparseSum((shard.row_size,), shard.values.dtype)
        for (rows, values), weight in zip(given.gradients, given.weights, strict=True):
            yield from total.adding(rows, values, weight)
        mean = yield from total.making(given.reduction, per_index=given.per_index)
        return total.indices, mean

    def _rows(self, array: BlockArray) -> RowBlocks:
        assert isinstance(array, RowBlocks), "laid out before rows are touched"
        return array

    def _lay_out(self, shard: Shard) -> Generator[None, None, None]:
        """Lay the blocks of a shard and of its slots side by side."""
        count, size = shard.spec.shape[0], shard.row_size
        if not isinstance(shard.values, RowBlocks):
            shard.values = yield from self._laid_out(shard.values, count, size)
            self.layout += 1
        for slot, array in shard.slots.items():
            if not isinstance(array, RowBlocks):
                shard.slots[slot] = yield from self._laid_out(array, count, size)
                self.layout += 1

    def _laid_out(
        self, array: BlockArray, count: int, size: int
    ) -> Generator[None, None, RowBlocks]:
        dense = 2 * array.num_made > array.num_blocks
        made = RowBlocks(count, size, array.dtype, array.fill, dense=dense)
        for i in range(array.num_blocks):
            block = array.release(i)
            if block is not None:
                made.take_over(i, block)
                array.retire(block)
                yield
        made.taken_over()
        return made

    def _applied(
        self, shard: Shard, optimizer_id: int, rows: np.ndarray, grads: np.ndarray, step: int
    ) -> Iterator[None]:
        if not len(rows):
            return
        rule = self._optimizer(optimizer_id).rule.for_variable(shard.spec.variable)
        self._slots(shard, optimizer_id)
        yield from self._lay_out(shard)
        arrays = [*map(self._rows, (shard.values, *self._slots(shard, optimizer_id)))]
        for array in arrays:
            yield from self._free(array, rows)
        apart: list[tuple[np.ndarray, list[np.ndarray]]] = []
        for part in _pieces(arrays[0], len(rows)):
            touched = rows[part]
            gathered = [self._gathered(array, touched) for array in arrays]
            param, *slots = [array.reshape(-1) for array in gathered]
            grad = np.ascontiguousarray(grads[part]).reshape(-1)
            try:
                rule.apply([(param, grad, slots, param, slots)], step, self._space.rules)
            except RuleRaised as exc:
                self._note_failure(optimizer_id, step, shard, exc)
                return
            apart.append((touched, gathered))
            if not rule.may_raise:  # else all of it at the end
                _scatter(arrays, apart)
            yield
        _scatter(arrays, apart)
        self._updated(shard, rows)

    def _free(self, array: RowBlocks, rows: np.ndarray) -> Iterator[None]:
        if array.seen:
            for i in array.held_among(array.blocks_of(rows)):
                if array.free(i, self._pool):
                    self._row_copies += 1
                    yield

    def _gathered(self, array: RowBlocks, rows: np.ndarray) -> np.ndarray:
        """Return rows in memory that is used again once nobody sees it."""
        nbytes = len(rows) * array.row_size * array.dtype.itemsize
        root = self._pool.lend(roomy(nbytes))
        made: np.ndarray = np.ndarray((len(rows), array.row_size), array.dtype, root)
        array.gather(rows, made, self._pool)
        return made

    def _updated(self, shard: Shard, rows: np.ndarray) -> None:
        shard.version += 1
        self._row_updates += 1
        self._count(shard, rows)

    def _count(self, shard: Shard, rows: np.ndarray | range) -> None:
        self._num_rows += len(rows)
        self._row_bytes += len(rows) * shard.row_size * shard.values.dtype.itemsize


def _scatter(arrays: Sequence[RowBlocks], apart: list[tuple[np.ndarray, list[np.ndarray]]]) -> None:
    """Write rows to where they belong, and hold them no more."""
    for rows, values in apart:
        for array, new in zip(arrays, values, strict=True):
            array.scatter(rows, new)
    apart.clear()


def _pieces(array: RowBlocks, count: int) -> list[slice]:
    most = max(1, PIECE_BYTES // max(1, array.row_size * array.dtype.itemsize))
    step = -(-count // max(1, round(count / most)))  # so that no small rest is left
    return [slice(start, start + step) for start in range(0, count, step)]
