"""Validation of row operations on the shards of one ps, before anything changes."""

from __future__ import annotations

import numpy as np

from psync.errors import ValueMismatchError
from psync.numerics.memory import BLOCK_BYTES, bytes_of
from psync.numerics.rows import RowBlocks, ascending, check_scatter
from psync.numerics.rules import slot_dtype
from psync.numerics.sums import INDEX_COST
from psync.store.shard import Shard
from psync.store.shards import Key, ShardTable


class RowChecks(ShardTable):
    """A table of shards that knows which rows and values fit them. Single owner; never blocks."""

    @property
    def task(self) -> str:
        """Name of the ps."""
        return self._task

    def row_bytes(self, key: Key, optimizer_id: int = -1) -> int:
        """Return the bytes of one row of a shard, or of a slot that an optimizer has for it.

        Raises:
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If it is a scalar, which has no rows; or has no slots.
        """
        shard = self._shard(key)
        dtype = shard.values.dtype
        if optimizer_id >= 0:
            self._check_optimizable(shard)
            dtype = slot_dtype(dtype)
        return self._row_size(shard) * dtype.itemsize

    def check_row_numbers(self, key: Key, rows: np.ndarray, *, each_once: bool = False) -> None:
        """Check that rows exist.

        Args:
            key: Of the shard.
            rows: int64.
            each_once: Whether they must ascend, too.

        Raises:
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If one of them is not a row of the shard, or they do not ascend.
        """
        shard = self._shard(key)
        self._row_size(shard)
        if not len(rows):
            return
        count = shard.spec.shape[0]
        if each_once and not ascending(rows):
            at = int(np.flatnonzero(rows[1:] <= rows[:-1])[0])
            raise ValueMismatchError(
                f"{shard.spec} on {self._task}: expected each row once and in ascending order, "
                f"got row {rows[at + 1]} after row {rows[at]}"
            )
        if each_once:
            exist = 0 <= rows[0] and rows[-1] < count
        else:  # without a sign, numbers below 0 are the largest ones
            exist = rows.view(np.uint64).max() < count
        if not exist:
            lowest, highest = rows.min(), rows.max()
            raise ValueMismatchError(
                f"{shard.spec} on {self._task}: row {lowest if lowest < 0 else highest} of the "
                f"shard does not exist, it has {count}"
            )

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
        self.check_row_numbers(key, rows, each_once=True)
        shard = self._shard(key)
        data, row_bytes = bytes_of(values), self.row_bytes(key)
        if data.size != len(rows) * row_bytes:
            raise ValueMismatchError(
                f"{shard.spec} on {self._task}: expected {len(rows)} rows of {row_bytes} bytes, "
                f"got {data.size} bytes"
            )
        if shard.spec.dtype == "bool" and data.size and data.max() > 1:
            raise ValueMismatchError(
                f"{shard.spec} on {self._task}: expected bool values, got bytes other than 0 and 1"
            )
        return data.view(shard.values.dtype).reshape(len(rows), self._row_size(shard))

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
        rule.check_rows(f"{shard.spec} on {self._task}")

    def check_scatter(self, key: Key, op: str) -> None:
        """Check that rows of a shard can be changed by an operation.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If there is no such operation.
            ValueMismatchError: If there is none for the shard's dtype.
        """
        spec = self._shard(key).spec
        check_scatter(op, spec.dtype, f"{spec} on {self._task}")

    def rows_cost(self, key: Key, rows: np.ndarray | range) -> int:
        """Return what reading or changing these rows costs, expressed in bytes."""
        shard = self._shard(key)
        if not len(rows):
            return 0
        arrays = [shard.values, *shard.slots.values()]
        cost = len(rows) * (self.row_bytes(key) + INDEX_COST)
        for array in arrays:
            if not isinstance(array, RowBlocks):
                cost += array.num_made * BLOCK_BYTES
            elif isinstance(rows, np.ndarray) and array.seen:
                in_order = rows if ascending(rows) else np.sort(rows)
                cost += len(array.held_among(array.blocks_of(in_order))) * BLOCK_BYTES
        return cost

    def _row_size(self, shard: Shard) -> int:
        shape = shard.spec.shape
        if not shape:
            raise ValueMismatchError(f"{shard.spec} on {self._task}: a scalar has no rows")
        return shard.spec.size // shape[0] if shape[0] else 0
