"""What one ps holds and how it changes: shards, their slots, and the state of optimizers.

Layer: L1. Imports: errors, specs, blocks, sums, update_rules, means, shards.

The store decides nothing about time and peers. It reads, assigns and applies, each on one
shard, and refuses before anything has changed whatever does not fit.

Reading is free of copies: ``read`` returns references to the shard's blocks, and these bytes
stay what they are for ever, because a block that somebody holds is replaced, not changed
(see ``blocks``). Memory is therefore bounded by values, slots and the blocks in flight.

``assign``, ``apply`` and the like return work, to be done block by block: see ``shards``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from psync.blocks import BLOCK_ELEMENTS, BlockPool, PoolStatistics, bytes_of
from psync.errors import GradientError, PartitionError, UsageError
from psync.means import MeanGradient, move_average
from psync.shards import Key, ShardTable, Work, described, started
from psync.sums import Reduction, sum_dtype
from psync.update_rules import Part, Scratch

__all__ = ["AssignOp", "Key", "ShardStore", "StoreStatistics", "Work"]

AssignOp = Literal["assign", "add", "sub"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store."""

    shards: int  # shards held
    bytes: int  # size of their values
    slot_bytes: int  # size of their slots
    applies: int  # finished applies, one per shard
    assigns: int  # finished assigns and moving averages, one per shard
    copies: int  # blocks replaced instead of changed, because a reader held them
    versions: dict[str, int]  # finished updates per shard, by name: "w/part_0"
    pool: PoolStatistics


class ShardStore(ShardTable):
    """A table of shards whose values can be changed. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._scratch = Scratch()
        self._sums = Scratch(BLOCK_ELEMENTS)  # apart from the rules', which read what is in it
        self._applies = 0
        self._assigns = 0
        self._copies = 0

    def check_assign(self, key: Key, op: str, data: object) -> np.ndarray:
        """Raise what ``assign`` would raise, except BusyError, and return ``data`` as it is used.

        For callers that take several updates whole or not at all.
        """
        shard = self._shard(key)
        spec = shard.spec
        if op not in ("assign", "add", "sub"):
            raise UsageError(f"{spec} on {self._task}: unknown operation {op!r}")
        if spec.dtype == "bool" and op != "assign":
            raise GradientError(
                f"{spec} on {self._task}: bool values can only be assigned, not {op!r}"
            )
        return self._typed(shard, data)

    def assign(self, key: Key, op: AssignOp, data: object) -> Work:
        """Start to replace, increase or decrease the shard's value. Integers wrap around.

        Args:
            key: Of the shard.
            op: "assign", "add" or "sub".
            data: A buffer of the shard's bytes, or an array of its shape and dtype. Must
                not change until the work is done.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If there is no such operation.
            GradientError: If the data do not fit the shard.
            BusyError: If another update of the shard is under way.
        """
        return self.assign_checked(key, op, self.check_assign(key, op, data))

    def assign_checked(self, key: Key, op: AssignOp, operand: np.ndarray) -> Work:
        """As ``assign``, of what ``check_assign`` returned."""
        shard = self._idle(key)
        values, pool = shard.values, self._pool

        def one_block(i: int) -> None:
            start, stop = values.bounds(i)
            target = values.writable(i, pool)
            if op == "assign":
                np.copyto(target.array, operand[start:stop])
            else:
                with np.errstate(all="ignore"):  # an overflow is a result, see update_rules
                    (np.add if op == "add" else np.subtract)(
                        values.block(i).array, operand[start:stop], out=target.array
                    )
            self._copies += values.commit(i, target, pool)

        def finished() -> None:
            self._assigns += 1

        return started(shard, one_block, finished)

    def begin_push(self, optimizer_id: int, carried_step: int) -> int:
        """Count one push and return its step, with which all its shards are applied.

        The step is that of this ps or the one that the push carries, whichever is later: a
        ps that sees few pushes evaluates schedules with the others all the same.

        Raises:
            UsageError: If the optimizer is not defined.
        """
        optimizer = self._optimizer(optimizer_id)
        step = max(optimizer.step, carried_step)
        optimizer.step = step + 1
        return step

    def check_apply(self, optimizer_id: int, key: Key, grad: object) -> np.ndarray:
        """Raise what ``apply`` would raise, except BusyError, and return ``grad`` as it is used.

        For callers that take several updates whole or not at all.
        """
        self._optimizer(optimizer_id)
        shard = self._shard(key)
        self._check_optimizable(shard)
        return self._typed(shard, grad)

    def apply(self, optimizer_id: int, key: Key, grad: object, step: int) -> Work:
        """Start to apply a gradient to the shard and its slots.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            grad: A buffer of as many bytes as the shard has, or an array of its shape and
                dtype. Must not change until the work is done.
            step: What ``begin_push`` returned for the push that the gradient is part of.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UsageError: If the optimizer is not defined.
            UnknownVariableError: If the shard is not here.
            GradientError: If the gradient does not fit the shard.
            BusyError: If another update of the shard is under way.
        """
        return self.apply_checked(
            optimizer_id, key, self.check_apply(optimizer_id, key, grad), step
        )

    def apply_checked(
        self, optimizer_id: int, key: Key, gradient: np.ndarray | MeanGradient, step: int
    ) -> Work:
        """As ``apply``, of what ``check_apply`` returned."""
        shard = self._idle(key)
        rule, pool, scratch = self._optimizers[optimizer_id].rule, self._pool, self._scratch
        values, slots = shard.values, self._slots(shard, optimizer_id)

        def one_block(i: int) -> None:
            start, stop = values.bounds(i)
            param = values.block(i).array
            targets = [slot.writable(i, pool) for slot in slots]
            target = values.writable(i, pool)
            rule.apply(
                param,
                gradient[start:stop],
                [slot.block(i).array for slot in slots],
                target.array,
                [slot_target.array for slot_target in targets],
                step,
                scratch,
            )
            self._copies += values.commit(i, target, pool)
            for slot, slot_target in zip(slots, targets, strict=True):
                self._copies += slot.commit(i, slot_target, pool)

        def finished() -> None:
            self._applies += 1

        return started(shard, one_block, finished)

    def apply_at_once(
        self, optimizer_id: int, keys: Sequence[Key], gradients: Sequence[np.ndarray], step: int
    ) -> None:
        """Do ``apply_checked`` on idle shards that are small, to the end.

        A third of the time that the same takes shard by shard.

        Raises:
            BusyError: If an update of one of them is under way; those before it are applied.
        """
        self._apply_parts(optimizer_id, keys, gradients, step)

    def apply_mean(
        self,
        optimizer_id: int,
        key: Key,
        gradients: Sequence[np.ndarray],
        weights: Sequence[float],
        step: int,
        *,
        reduction: Reduction = "mean",
    ) -> Work:
        """Start to apply the weighted mean, or sum, of several pushes' gradients to the shard.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            gradients: Of each push, in the order in which they are summed: what ``check_apply``
                returned. They must not change until the work is done.
            weights: Of each push, above 0. ``means.MeanGradient`` says what is computed.
            step: As for ``apply``.
            reduction: "mean" or "sum".

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UsageError: If there are no gradients, or not as many weights.
            UnknownVariableError: If the shard is not here.
            BusyError: If another update of the shard is under way.
        """
        mean = MeanGradient(gradients, weights, reduction, self._sums)
        return self.apply_checked(optimizer_id, key, mean, step)

    def apply_mean_at_once(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients_by_push: Sequence[Sequence[np.ndarray]],
        weights: Sequence[float],
        step: int,
        reduction: Reduction = "mean",
    ) -> None:
        """Do ``apply_mean`` on idle shards that are small, to the end.

        Args:
            optimizer_id: Of the optimizer.
            keys: Of the shards.
            gradients_by_push: Of each push the gradients, one per key.
            weights: Of each push.
            step: As for ``apply``.
            reduction: "mean" or "sum".

        Raises:
            UsageError: If there are no pushes, or not as many weights, or gradients as keys.
            BusyError: If an update of one of them is under way; those before it are applied.
        """
        if any(len(gradients) != len(keys) for gradients in gradients_by_push):
            raise UsageError(f"expected {len(keys)} gradients of each push")
        means = [
            MeanGradient([push[i] for push in gradients_by_push], weights, reduction, self._sums)
            for i in range(len(keys))
        ]
        self._apply_parts(optimizer_id, keys, means, step)

    def _apply_parts(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients: Sequence[np.ndarray | MeanGradient],
        step: int,
    ) -> None:
        rule = self._optimizers[optimizer_id].rule
        rule.apply_all(self._parts(optimizer_id, keys, gradients), step, self._scratch)

    def _parts(
        self,
        optimizer_id: int,
        keys: Sequence[Key],
        gradients: Sequence[np.ndarray | MeanGradient],
    ) -> Iterator[Part]:
        """Yield block after block; each is committed when the next one is asked for."""
        pool = self._pool
        for key, gradient in zip(keys, gradients, strict=True):
            shard = self._idle(key)
            values, slots = shard.values, self._slots(shard, optimizer_id)
            shard.busy = True  # for ever, if it fails half-way
            for i in range(values.num_blocks):
                if values.num_blocks == 1 and isinstance(gradient, np.ndarray):
                    part = gradient
                else:
                    start, stop = values.bounds(i)
                    part = gradient[start:stop]
                target = values.writable(i, pool)
                if not slots:
                    yield values.block(i).array, part, (), target.array, ()
                else:
                    targets = [slot.writable(i, pool) for slot in slots]
                    yield (
                        values.block(i).array, part, [slot.block(i).array for slot in slots],
                        target.array, [slot_target.array for slot_target in targets],
                    )  # fmt: skip
                    for slot, slot_target in zip(slots, targets, strict=True):
                        self._copies += slot.commit(i, slot_target, pool)
                self._copies += values.commit(i, target, pool)
            shard.busy = False
            shard.version += 1
            self._applies += 1

    def check_average(self, average_key: Key, key: Key) -> None:
        """Raise what ``average`` would raise, except BusyError.

        For callers that take several updates whole or not at all.
        """
        shard, other = self._shard(average_key), self._shard(key)
        if (shard.spec.shape, shard.spec.dtype) != (other.spec.shape, other.spec.dtype):
            raise PartitionError(
                f"{shard.spec} on {self._task}: expected {described(other.spec)}, as {other.spec} "
                f"has, whose moving average it is, got {described(shard.spec)}"
            )
        try:
            sum_dtype(shard.values.dtype)
        except GradientError:
            raise GradientError(
                f"{shard.spec} on {self._task}: only floating-point variables have moving "
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
            GradientError: If they are not floating.
            BusyError: If an update of one of them is under way.
        """
        self.check_average(average_key, key)
        shard, other = self._idle(average_key), self._idle(key)
        averages, pool, scratch = shard.values, self._pool, self._sums
        held = other.values.export()[::-1]  # one view of each block, the first at the end

        def one_block(i: int) -> None:
            target = averages.writable(i, pool)
            value = bytes_of(held.pop()).view(averages.dtype)
            move_average(averages.block(i).array, value, target.array, decay, scratch)
            self._copies += averages.commit(i, target, pool)

        def finished() -> None:
            self._assigns += 1

        return started(shard, one_block, finished)

    def statistics(self) -> StoreStatistics:
        """Return sizes and counters as of now."""
        shards = self._shards.values()
        return StoreStatistics(
            shards=len(shards),
            bytes=sum(shard.values.nbytes for shard in shards),
            slot_bytes=sum(slot.nbytes for shard in shards for slot in shard.slots.values()),
            applies=self._applies,
            assigns=self._assigns,
            copies=self._copies,
            versions={str(shard.spec).strip('"'): shard.version for shard in shards},
            pool=self._pool.statistics(),
        )
