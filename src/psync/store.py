"""What one ps holds: shards, their slots, and the state of optimizers.

Layer: L1. Imports: errors, specs, blocks, update_rules.

The store decides nothing about time and peers. It reads, assigns and applies, each on one
shard, and refuses before anything has changed whatever does not fit.

Reading is free of copies: ``read`` returns references to the shard's blocks, and these bytes
stay what they are for ever, because a block that somebody holds is replaced, not changed
(see ``blocks``). Memory is therefore bounded by values, slots and the blocks in flight.

Updating a large shard takes milliseconds, which would delay every peer of an event loop. So
``assign`` and ``apply`` return a generator that does one block per ``next()``; the caller
lets the loop run in between. From the call until its end the shard is busy: reading
or updating it raises BusyError (the caller queues such requests), so nobody sees a shard
half of which is new. The caller runs the generator to its end. It cannot be abandoned by
accident: closing it, or dropping it, does the remaining blocks at once. Only an exception inside
a block (no memory left) leaves the shard busy for good, as its value is torn: the task must end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from psync.blocks import BlockArray, BlockPool, PoolStatistics, bytes_of
from psync.errors import (
    BusyError,
    ConfigurationError,
    GradientError,
    PartitionError,
    PsyncError,
    UnknownVariableError,
    UsageError,
)
from psync.specs import ShardSpec, dtype_of
from psync.update_rules import Part, Scratch, UpdateRule, rule_from_config, slot_dtype

Key = tuple[int, int]
"""(variable id, shard index): see ``ShardSpec.key``."""

AssignOp = Literal["assign", "add", "sub"]

Work = Generator[None, None, None]
"""An update under way: one block per ``next()``; run it to its end."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store."""

    shards: int  # shards held
    bytes: int  # size of their values
    slot_bytes: int  # size of their slots
    applies: int  # finished applies, one per shard
    assigns: int  # finished assigns, one per shard
    copies: int  # blocks replaced instead of changed, because a reader held them
    versions: dict[str, int]  # finished updates per shard, by name: "w/part_0"
    pool: PoolStatistics


@dataclass(slots=True)
class _Shard:
    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)  # by optimizer, name
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


@dataclass(slots=True)
class _Optimizer:
    rule: UpdateRule
    step: int = 0  # the lowest step that the next push may have


class ShardStore:
    """Shards, slots and optimizers of one ps. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        self._task = task
        self._pool = BlockPool() if pool is None else pool
        self._shards: dict[Key, _Shard] = {}
        self._optimizers: dict[int, _Optimizer] = {}
        self._scratch = Scratch()
        self._applies = 0
        self._assigns = 0
        self._copies = 0

    # Shards

    def create(self, spec: ShardSpec, value: object = None, *, fill: float = 0) -> bool:
        """Take up a shard. Idempotent: the same spec again changes nothing, whatever the value.

        Args:
            spec: Of the shard.
            value: Initial value: a buffer of the shard's bytes (C order, little endian) or an
                array of its shape and dtype; copied at once. For values of many MiB create the
                shard first and ``assign`` to it, which lets the loop run in between.
            fill: Initial value of all elements if ``value`` is None; costs nothing until
                the shard is first used.

        Returns:
            Whether the shard is new.

        Raises:
            PartitionError: If there is another shard under the key.
            GradientError: If the value does not fit the spec.
        """
        known = self._shards.get(spec.key)
        if known is not None:
            if known.spec != spec:
                raise PartitionError(
                    f"{spec} on {self._task}: exists already as {_whole(known.spec)}, "
                    f"got {_whole(spec)}"
                )
            return False
        values = BlockArray(spec.size, dtype_of(spec.dtype), fill)
        shard = _Shard(spec, values, values.nbytes)
        if value is not None:
            shard.values = BlockArray.from_array(self._typed(shard, value), self._pool)
        self._shards[spec.key] = shard
        return True

    def copy(self, spec: ShardSpec, source: Key) -> Work:
        """Start to take up a shard that begins with the present value of another one.

        Idempotent like ``create``: the work on a shard that is there already is nothing. What
        happens to the other shard meanwhile changes nothing: its blocks are held.

        Args:
            spec: Of the new shard.
            source: Of the other one, which has its shape and dtype.

        Returns:
            The work, to be run to its end; the new shard is busy until then.

        Raises:
            UnknownVariableError: If there is no such other shard here.
            PartitionError: If its shape or dtype differ, or there is another shard under the key.
            BusyError: If an update of the other shard is under way.
        """
        if source not in self._shards:
            raise UnknownVariableError(
                f"{spec} on {self._task}: cannot begin as a copy of shard {source[1]} of variable "
                f"{source[0]}, which is not here"
            )
        if spec.key in self._shards:
            self.create(spec)  # raises if it is another one
            return _nothing()
        original = self._idle(source)
        if (original.spec.shape, original.spec.dtype) != (spec.shape, spec.dtype):
            raise PartitionError(
                f"{spec} on {self._task}: expected {_described(original.spec)}, as "
                f"{original.spec} has, got {_described(spec)}"
            )
        self.create(spec)
        shard = self._shards[spec.key]
        held = original.values.export()  # one view of each block
        values, dtype = shard.values, shard.values.dtype

        def one_block(i: int) -> None:
            np.copyto(values.block(i).array, bytes_of(held[i]).view(dtype))

        return _started(shard, one_block, held.clear)

    def keys(self) -> list[Key]:
        """Return the keys of all shards, in the order of their creation."""
        return list(self._shards)

    def spec(self, key: Key) -> ShardSpec:
        """Return the spec of a shard.

        Raises:
            UnknownVariableError: If it is not here.
        """
        return self._shard(key).spec

    def busy(self, key: Key) -> bool:
        """Return whether an update of the shard is under way.

        Raises:
            UnknownVariableError: If the shard is not here.
        """
        return self._shard(key).busy

    def version(self, key: Key) -> int:
        """Return how many updates of the shard have been finished.

        Raises:
            UnknownVariableError: If the shard is not here.
        """
        return self._shard(key).version

    def read(self, key: Key) -> list[memoryview]:
        """Return the shard's bytes as read-only views, without copying.

        They never change. While they live, updates replace the blocks instead of changing them.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If an update of it is under way.
        """
        return self._idle(key).values.export()

    def read_slot(self, key: Key, optimizer_id: int, slot: str) -> list[memoryview]:
        """Return a slot's bytes like ``read``; it has its initial value before the first apply.

        The dtype is ``update_rules.slot_dtype`` of the shard's: float32 for half precision.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If the optimizer is not defined or has no such slot.
            GradientError: If the shard's dtype cannot be optimized.
            BusyError: If an update of the shard is under way.
        """
        rule = self._optimizer(optimizer_id).rule
        if slot not in rule.slot_names():
            raise UsageError(
                f"optimizer {optimizer_id} ({rule.name}) on {self._task} has no slot {slot!r}",
                hint=f"its slots are {', '.join(rule.slot_names()) or 'none'}",
            )
        shard = self._idle(key)
        self._check_optimizable(shard)
        return self._slots(shard, optimizer_id)[rule.slot_names().index(slot)].export()

    # Updates

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

        return _started(shard, one_block, finished)

    def define_optimizer(self, optimizer_id: int, config: object) -> None:
        """Make an optimizer known. Idempotent for the same config.

        Args:
            optimizer_id: Its number in the strategy.
            config: ``UpdateRule.to_config()``, as it came over the wire.

        Raises:
            ConfigurationError: If the config is not one, or differs from the one known.
        """
        rule = rule_from_config(config)
        known = self._optimizers.get(optimizer_id)
        if known is None:
            self._optimizers[optimizer_id] = _Optimizer(rule)
        elif known.rule.to_config() != rule.to_config():
            raise ConfigurationError(
                f"optimizer {optimizer_id} on {self._task} is defined already as "
                f"{known.rule.to_config()}, got {rule.to_config()}"
            )

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

    def apply_checked(self, optimizer_id: int, key: Key, gradient: np.ndarray, step: int) -> Work:
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

        return _started(shard, one_block, finished)

    def apply_at_once(
        self, optimizer_id: int, keys: Sequence[Key], gradients: Sequence[np.ndarray], step: int
    ) -> None:
        """Do ``apply_checked`` on idle shards that are small, to the end.

        A third of the time that the same takes shard by shard.

        Raises:
            BusyError: If an update of one of them is under way; those before it are applied.
        """
        rule = self._optimizers[optimizer_id].rule
        rule.apply_all(self._parts(optimizer_id, keys, gradients), step, self._scratch)

    def _parts(
        self, optimizer_id: int, keys: Sequence[Key], gradients: Sequence[np.ndarray]
    ) -> Iterator[Part]:
        """Yield block after block; each is committed when the next one is asked for."""
        pool = self._pool
        for key, gradient in zip(keys, gradients, strict=True):
            shard = self._idle(key)
            values, slots = shard.values, self._slots(shard, optimizer_id)
            shard.busy = True  # for ever, if it fails half-way
            for i in range(values.num_blocks):
                part = gradient
                if values.num_blocks > 1:
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

    # Lookups and checks

    def _shard(self, key: Key) -> _Shard:
        shard = self._shards.get(key)
        if shard is None:
            variable_id, index = key
            names = {
                s.spec.variable for s in self._shards.values() if s.spec.variable_id == variable_id
            }
            named = "".join(f' ("{name}")' for name in names)
            raise UnknownVariableError(
                f"{self._task} holds no shard {index} of variable {variable_id}{named}"
            )
        return shard

    def _idle(self, key: Key) -> _Shard:
        shard = self._shard(key)
        if shard.busy:
            raise BusyError(f"{shard.spec} on {self._task}: an update is under way")
        return shard

    def _optimizer(self, optimizer_id: int) -> _Optimizer:
        optimizer = self._optimizers.get(optimizer_id)
        if optimizer is None:
            raise UsageError(f"optimizer {optimizer_id} is not defined on {self._task}")
        return optimizer

    def _slots(self, shard: _Shard, optimizer_id: int) -> list[BlockArray]:
        """Return the shard's slots in the rule's order, made when first asked for."""
        rule = self._optimizers[optimizer_id].rule
        slots = []
        for name in rule.slot_names():
            slot = shard.slots.get((optimizer_id, name))
            if slot is None:
                dtype = slot_dtype(shard.values.dtype)
                slot = BlockArray(shard.values.size, dtype, rule.initial_slot(name))
                shard.slots[optimizer_id, name] = slot
            slots.append(slot)
        return slots

    def _check_optimizable(self, shard: _Shard) -> None:
        try:
            slot_dtype(shard.values.dtype)
        except GradientError as exc:
            raise GradientError(
                f"{shard.spec} on {self._task}: {exc.message}", hint=exc.hint
            ) from None

    def _typed(self, shard: _Shard, data: object) -> np.ndarray:
        """Return ``data`` as a 1-D array of the shard's dtype, without copying if it can be."""
        spec, dtype = shard.spec, shard.values.dtype
        if isinstance(data, np.ndarray) and (data.dtype != dtype or data.shape != spec.shape):
            raise self._misfit(spec, f"shape {data.shape} {data.dtype}")
        data_bytes = bytes_of(data)
        if data_bytes.size != shard.nbytes:
            raise self._misfit(spec, f"{data_bytes.size} bytes")
        if spec.dtype == "bool" and data_bytes.size and data_bytes.max() > 1:
            raise self._misfit(spec, "bytes other than 0 and 1")
        return data_bytes.view(dtype)

    def _misfit(self, spec: ShardSpec, got: str) -> PsyncError:
        return GradientError(
            f"{spec} on {self._task}: expected {_described(spec)} ({spec.nbytes} bytes), got {got}"
        )


def _started(shard: _Shard, one_block: Callable[[int], None], finished: Callable[[], None]) -> Work:
    work = _work(shard, one_block, finished)
    next(work)  # a generator that has not begun could be dropped without a trace
    return work


def _work(shard: _Shard, one_block: Callable[[int], None], finished: Callable[[], None]) -> Work:
    count = shard.values.num_blocks
    done = 0
    shard.busy = True
    with suppress(GeneratorExit):  # closed or dropped early: the rest follows at once
        yield
        while done < count - 1:
            one_block(done)
            done += 1
            yield
    for i in range(done, count):
        one_block(i)
    shard.version += 1
    shard.busy = False
    finished()


def _nothing() -> Work:
    yield from ()


def _described(spec: ShardSpec) -> str:
    return f"shape {spec.shape} {spec.dtype}"


def _whole(spec: ShardSpec) -> str:
    return f"{spec} of {_described(spec)} at row {spec.offset} on ps {spec.ps}"
