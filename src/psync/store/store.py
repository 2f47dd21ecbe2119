"""The shard store of one ps: read, assign and apply, with slots and optimizer state.

The store decides nothing about time and peers. It reads, assigns and applies, each on one
shard, and refuses before anything has changed whatever does not fit.

Reading is free of copies: ``read`` returns references to the shard's blocks, and these bytes
stay what they are for ever, because a block that is referenced is replaced, not changed
(see ``numerics.memory``). Memory is therefore bounded by values, slots and the blocks in flight.

``assign``, ``apply`` and the like return work, to be done block by block: see ``shards``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from psync.errors import PartitionError, UsageError, ValueMismatchError
from psync.numerics.memory import Block, BlockArray, BlockPool, bytes_of
from psync.numerics.sums import move_average, sum_dtype
from psync.specs import dtype_of
from psync.store.gradients import GradientTable
from psync.store.shard import BlockWork, Prepared, Shard, Work, Workspace
from psync.store.shards import Key, described

__all__ = ["AssignOp", "Key", "ShardStore", "Work", "ones"]

AssignOp = Literal["assign", "add", "sub", "max"]

_ASSIGN_OPS = frozenset(get_args(AssignOp))

_UFUNCS = {"add": np.add, "sub": np.subtract, "max": np.maximum}


@functools.lru_cache(maxsize=64)
def ones(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return ones, not to be changed: what raises a counter with each update."""
    made = np.ones(shape, dtype_of(dtype))
    made.setflags(write=False)
    return made


class ShardStore(GradientTable):
    """A table of shards whose values can be changed. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._assigns = 0

    def check_assign(self, key: Key, op: str, data: object) -> np.ndarray:
        """Raise what ``assign`` would raise, except BusyError, and return ``data`` as it is used.

        For callers that take several updates whole or not at all.
        """
        shard = self._shard(key)
        spec = shard.spec
        if op not in _ASSIGN_OPS:
            raise UsageError(f"{spec} on {self.task}: unknown operation {op!r}")
        if spec.dtype == "bool" and op in ("add", "sub"):
            raise ValueMismatchError(
                f"{spec} on {self.task}: bool values cannot be added: not {op!r}"
            )
        return self._typed(shard, data)

    def assign(self, key: Key, op: AssignOp, data: object) -> Work:
        """Start to replace, increase, decrease or raise the shard's value. Integers wrap around.

        Args:
            key: Of the shard.
            op: "assign", "add", "sub", or "max": each element becomes the larger of the two.
            data: A buffer of the shard's bytes, or an array of its shape and dtype. Must
                not change until the work is done.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If there is no such operation.
            ValueMismatchError: If the data do not fit the shard.
            BusyError: If another update of the shard is under way.
        """
        return self.assign_checked(key, op, self.check_assign(key, op, data))

    def assign_checked(self, key: Key, op: AssignOp, operand: np.ndarray) -> Work:
        """As ``assign``, of what ``check_assign`` returned."""
        shard = self._idle(key)
        values, pool = shard.values, self._pool

        def prepared(i: int) -> Prepared:
            target = values.writable(i, pool)
            present, part = values.block(i).array, operand[slice(*values.bounds(i))]

            def compute(_: Workspace) -> None:
                if op == "assign":
                    np.copyto(target.array, part)
                    return
                with np.errstate(all="ignore"):  # an overflow is a result
                    _UFUNCS[op](present, part, out=target.array)

            return Prepared(compute, lambda: self._commit(values, i, target))

        return self._assigning(shard, prepared)

    def _commit(self, values: BlockArray, i: int, target: Block) -> None:
        self._copies += values.commit(i, target, self._pool)

    def _assigning(self, shard: Shard, prepared: Callable[[int], Prepared]) -> Work:
        def one_block(i: int) -> None:
            prepared(i).do(self._space)

        def finished() -> None:
            self._assigns += 1

        return BlockWork(shard, one_block, finished, prepared=prepared)

    def check_average(self, average_key: Key, key: Key) -> None:
        """Raise what ``average`` would raise, except BusyError.

        For callers that take several updates whole or not at all.
        """
        shard, other = self._shard(average_key), self._shard(key)
        if (shard.spec.shape, shard.spec.dtype) != (other.spec.shape, other.spec.dtype):
            raise PartitionError(
                f"{shard.spec} on {self.task}: expected {described(other.spec)}, as {other.spec} "
                f"has, whose moving average it is, got {described(shard.spec)}"
            )
        try:
            sum_dtype(shard.values.dtype)
        except ValueMismatchError:
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: only floating-point variables have moving "
                f"averages, got {shard.spec.dtype}"
            ) from None

    def average(self, average_key: Key, key: Key, decay: float) -> Work:
        """Start to move a shard towards the present value of another one.

        It becomes ``average - (1 - decay) * (average - value)``, as ``means.move_average`` says.
        What happens to the other shard meanwhile changes nothing: its blocks are held, each one
        until it was read.

        Args:
            average_key: Of the shard that changes.
            key: Of the other one, which has its shape and dtype.
            decay: In [0, 1].

        Returns:
            The work, to be run to its end; the shard that changes is busy until then.

        Raises:
            UnknownVariableError: If one of them is not here.
            PartitionError: If shapes or dtypes differ.
            ValueMismatchError: If they are not floating.
            BusyError: If an update of one of them is under way.
        """
        self.check_average(average_key, key)
        shard, other = self._idle(average_key), self._idle(key)
        averages, pool = shard.values, self._pool
        held = other.values.export()[::-1]  # one view of each block, the first at the end

        def prepared(i: int) -> Prepared:
            target = averages.writable(i, pool)
            average, value = averages.block(i).array, bytes_of(held.pop()).view(averages.dtype)
            return Prepared(
                lambda space: move_average(average, value, target.array, decay, space.sums),
                lambda: self._commit(averages, i, target),
            )

        return self._assigning(shard, prepared)

    def statistics(self) -> dict[str, Any]:
        """Return counters and sizes as of now.

        Counters are of finished work, one per shard: ``assigns`` includes moving averages, ``rows``
        were read or changed on their own, and ``row_blocks`` counts the blocks in which they lie
        anew for each update or reading. ``copies`` are blocks that were replaced instead of
        changed, because a reader held them. ``spare_bytes`` lie beside those in use, see
        ``numerics.memory``.
        """
        shards = self._shards.values()
        return {
            "shards": len(shards),
            "bytes": sum(shard.values.nbytes for shard in shards),
            "slot_bytes": sum(slot.nbytes for shard in shards for slot in shard.slots.values()),
            "spare_bytes": sum(shard.values.spare_bytes for shard in shards),
            "applies": self._applies,
            "assigns": self._assigns,
            "copies": self._copies + self._row_copies,
            "row_updates": self._row_updates,
            "rows": self._num_rows,
            "row_blocks": self._row_blocks,
            "row_bytes": self._row_bytes,
            "pool": dataclasses.asdict(self._pool.statistics()),
        }
