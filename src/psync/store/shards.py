"""The table of shards that one ps holds, and of the optimizers that it knows.

Creating, reading and looking up; ``store`` has what changes a shard's value. Large shards
are worked on piece by piece, see ``shard``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from traceback import format_exception

import numpy as np

from psync import schedules
from psync.errors import (
    BusyError,
    ConfigurationError,
    PartitionError,
    PsyncError,
    RuleError,
    UnknownVariableError,
    UsageError,
    ValueMismatchError,
    naming,
)
from psync.numerics.memory import (
    ABOVE_BYTES,
    ARENA_BYTES,
    Arena,
    ArenaArray,
    BlockArray,
    BlockPool,
    BlockRuns,
    bytes_of,
)
from psync.numerics.rules import (
    ACCUMULATOR,
    Lamb,
    RuleRaised,
    UpdateRule,
    rule_from_config,
    slot_dtype,
)
from psync.schedules import Config, Schedule
from psync.specs import ShardSpec, dtype_of
from psync.store.push_counts import CountState, PushCount, Row
from psync.store.work import DONE, Shard, ShardWork, Work, Workspace

Key = tuple[int, int]
"""(variable id, shard index): see ``ShardSpec.key``."""


@dataclass(eq=False)
class Optimizer:
    """One optimizer, as this ps knows it."""

    rule: UpdateRule
    config: Config  # with which it was defined
    count: PushCount = field(default_factory=PushCount)  # of its pushes

    @functools.cached_property
    def own_schedules(self) -> list[type[Schedule]]:
        """The schedules in its learning rate that plugins have registered."""
        return schedules.registered_in(self.rule.learning_rate)

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether it does the same to each element, whatever shard it is in."""
        rule = self.rule
        return not (
            isinstance(rule, Lamb)
            or rule.may_raise
            or rule.options.gradient_accumulation_steps is not None
            or rule.options.excludes_any
        )


class ShardTable:
    """Shards, slots and optimizers of one ps. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        self.task = task
        self._pool = BlockPool() if pool is None else pool
        self._space = Workspace()
        self._shards: dict[Key, Shard] = {}
        self._arenas: dict[np.dtype, Arena] = {}  # that small shards are added to, by dtype
        self.layout = 0  # raised when arrays of shards come to lie elsewhere
        self.optimizers: dict[int, Optimizer] = {}  # by number; not to be changed by others
        # By optimizer and step, the first error of what is being computed.
        self.failures: dict[tuple[int, int], RuleError] = {}

    def create(
        self, spec: ShardSpec, value: object = None, *, fill: float | np.ndarray = 0
    ) -> bool:
        """Take up a shard. Idempotent: the same spec again changes nothing, whatever the value.

        Args:
            spec: Of the shard.
            value: Initial value: a buffer of the shard's bytes (C order, little endian) or an
                array of its shape and dtype; copied at once. For values of many MiB create the
                shard first and ``assign`` to it, which lets the loop run in between.
            fill: Initial value of all elements if ``value`` is None: a number, or an array of
                one element; costs nothing until the shard is first used.

        Returns:
            Whether the shard is new.

        Raises:
            PartitionError: If there is another shard under the key.
            ValueMismatchError: If the value does not fit the spec.
        """
        known = self._shards.get(spec.key)
        if known is not None:
            if known.spec != spec:
                raise PartitionError(
                    f"{spec} on {self.task}: already exists as {_whole(known.spec)}, got "
                    f"{_whole(spec)}"
                )
            return False
        values = self._new_values(spec, fill)
        row_size = spec.size // max(1, spec.shape[0]) if spec.shape else -1
        shard = Shard(spec, values, values.nbytes, row_size)
        if value is not None:
            values.load(bytes_of(self._typed(shard, value)), self._pool)
        self._shards[spec.key] = shard
        return True

    def _new_values(self, spec: ShardSpec, fill: float | np.ndarray) -> BlockArray:
        dtype, nbytes, pool = dtype_of(spec.dtype), spec.nbytes, self._pool
        if nbytes > ABOVE_BYTES:  # side by side where tasks of its host would read them so
            offset = spec.offset * (nbytes // spec.shape[0]) if spec.shape else 0
            return BlockRuns(spec.size, dtype, fill, pool, offset)
        if not Arena.takes(spec.size, dtype):
            return BlockArray(spec.size, dtype, fill, pool)
        arena = self._arenas.get(dtype)
        if arena is None or arena.array.nbytes + nbytes > ARENA_BYTES:
            arena = self._arenas[dtype] = Arena(dtype)
        return arena.add(spec.size, fill, pool)

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
                f"{spec} on {self.task}: cannot begin as a copy of shard {source[1]} of variable "
                f"{source[0]}, which is not here"
            )
        if spec.key in self._shards:
            self.create(spec)  # raises if it is another one
            return DONE
        original = self._idle(source)
        self._check_alike(spec, original.spec)
        self.create(spec)
        shard = self._shards[spec.key]
        held = original.values.export()[::-1]  # one view of each block, the first at the end
        values, dtype = shard.values, shard.values.dtype

        def blocks() -> Iterator[None]:
            for i in range(values.num_blocks):
                np.copyto(values.block(i).array, bytes_of(held.pop()).view(dtype))
                yield

        return ShardWork(shard, blocks())

    def release(self) -> tuple[list[Shard], dict[int, Optimizer]]:
        """Give away all shards, none of which may be busy, and all optimizers; none are left."""
        shards, optimizers = list(self._shards.values()), self.optimizers
        self._shards, self.optimizers = {}, {}
        self._arenas.clear()
        self.layout += 1
        return shards, optimizers

    def take_up(self, shard: Shard) -> None:
        """Take a shard that another table has released, as it is; there is none under its key."""
        self._shards[shard.spec.key] = shard
        self.layout += 1

    def take_up_optimizer(self, optimizer_id: int, optimizer: Optimizer) -> None:
        """Take an optimizer that another table has released, as it is, under a number.

        What was told of its pushes under that number, before it came, is kept.
        """
        told = self.optimizers.get(optimizer_id)
        if told is not None:
            optimizer.count.absorb(told.count)
        self.optimizers[optimizer_id] = optimizer
        self.layout += 1  # shards get its slots as well

    def keys(self) -> list[Key]:
        """Return the keys of all shards, in the order of their creation."""
        return list(self._shards)

    def shards(self) -> Mapping[Key, Shard]:
        """Return all shards themselves, for those who keep snapshots of them."""
        return self._shards

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
        return (self._shards.get(key) or self._shard(key)).busy

    @property
    def num_updates(self) -> int:
        """The updates of all shards that have been finished."""
        return sum(shard.version for shard in self._shards.values())

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

        The dtype is ``update_rule.slot_dtype`` of the shard's: float32 for half precision.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If the optimizer is not defined or has no such slot.
            ValueMismatchError: If the shard's dtype cannot be optimized.
            BusyError: If an update of the shard is under way.
        """
        return self._slot(key, optimizer_id, slot).export()

    def define_optimizer(self, optimizer_id: int, config: object) -> None:
        """Make an optimizer known. Idempotent for the same config.

        Args:
            optimizer_id: Its number in the strategy.
            config: ``UpdateRule.to_config()``, as it came over the wire.

        Raises:
            ConfigurationError: If the config is not one, or differs from the one known.
        """
        known = self.optimizers.get(optimizer_id)
        if known is not None and known.config == config:  # as the first push of a worker says it
            return
        with naming(self.task):
            rule = rule_from_config(config)
        if known is None:
            self.optimizers[optimizer_id] = Optimizer(rule, rule.to_config())
        elif known.config != rule.to_config():
            raise ConfigurationError(
                f"optimizer {optimizer_id} on {self.task} is already defined as {known.config}, "
                f"got {rule.to_config()}"
            )

    def push_count(self, optimizer_id: int) -> PushCount:
        """Return the count of an optimizer's pushes, as far as it is known here.

        Raises:
            UsageError: If the optimizer is not defined.
        """
        return self._optimizer(optimizer_id).count

    @property
    def iterations(self) -> int:
        """The most updates that an optimizer has made, as far as it is known here."""
        return max(
            (each.rule.iteration(each.count.known) for each in self.optimizers.values()),
            default=0,
        )

    def restore_count(self, optimizer_id: int, state: CountState) -> None:
        """Let the count of an optimizer's pushes be what it was in a snapshot."""
        self._optimizer(optimizer_id).count = PushCount.of(state)

    def set_count(self, optimizer_id: int, base: int) -> None:
        """Begin to count an optimizer's pushes from a number that was set, marked."""
        self._optimizer(optimizer_id).count.set(base)

    def hear_count(self, optimizer_id: int, ps: int, base: int, row: Row, here: int) -> int:
        """Take in what another ps has counted; see ``PushCount.hear``."""
        return self._optimizer(optimizer_id).count.hear(ps, base, row, here)

    def set_learning_rate(self, optimizer_id: int, config: object) -> None:
        """Let an optimizer go on with another learning rate.

        Its configuration stays what it was defined with: that is what its other users know.

        Args:
            optimizer_id: Its number in the strategy.
            config: ``Schedule.to_config()``, as it came over the wire.

        Raises:
            UsageError: If the optimizer is not defined.
            ConfigurationError: If the config is not that of a schedule.
        """
        optimizer = self._optimizer(optimizer_id)
        optimizer.rule.learning_rate = schedules.from_config(config)
        vars(optimizer).pop("own_schedules", None)

    def check_rate(self, optimizer_id: int, step: int) -> None:
        """Check that a schedule of a user's has a rate for a step, before anything is changed.

        Raises:
            RuleError: It raises.
        """
        optimizer = self.optimizers[optimizer_id]
        for cls in optimizer.own_schedules[:1]:
            try:
                optimizer.rule.learning_rate(step)
            except Exception as exc:
                raise rule_error(self.task, f'schedule "{cls.__name__}"', exc) from None

    def take_failure(self, optimizer_id: int, step: int) -> RuleError | None:
        """Return what a rule of a user's raised in the updates of a step; None: nothing.

        To be asked when all of them are done; once.
        """
        return self.failures.pop((optimizer_id, step), None)

    def _note_failure(self, optimizer_id: int, step: int, shard: Shard, raised: RuleRaised) -> None:
        """A rule has raised, and the shard is as it was."""
        what = f'update rule "{self.optimizers[optimizer_id].rule.name}" for {shard.spec}'
        error = rule_error(self.task, what, raised.__cause__ or raised)
        self.failures.setdefault((optimizer_id, step), error)

    def load_slot(self, key: Key, optimizer_id: int, slot: str, data: object) -> Work:
        """Start to replace a slot's value, as when it comes from a checkpoint.

        An accumulator of gradients begins anew, with nothing in it, whatever the value.

        Args:
            key: Of the shard.
            optimizer_id: Of the optimizer.
            slot: Its name.
            data: A buffer of the slot's bytes, in ``update_rule.slot_dtype`` of the shard's. Must
                not change until the work is done.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            UsageError: If the optimizer is not defined or has no such slot.
            ValueMismatchError: If the data do not fit.
            BusyError: If an update of the shard is under way.
        """
        target = self._slot(key, optimizer_id, slot)
        raw = bytes_of(data)
        if raw.nbytes != target.nbytes:
            raise ValueMismatchError(
                f"{self.spec(key)} on {self.task}: expected {target.nbytes} bytes for slot "
                f"{slot!r}, got {raw.nbytes}"
            )
        shard, values = self._shards[key], raw.view(target.dtype)
        if slot == ACCUMULATOR:  # it is not known how many gradients are in the sum
            values = np.zeros_like(values)
            shard.pushes.pop(optimizer_id, None)

        def blocks() -> Iterator[None]:
            for i in range(target.num_blocks):
                block = target.writable(i, self._pool)
                np.copyto(block.array, values[slice(*target.bounds(i))])
                target.commit(i, block, self._pool)
                yield
            shard.version += 1

        return ShardWork(shard, blocks())

    # Lookups and checks

    def _shard(self, key: Key) -> Shard:
        shard = self._shards.get(key)
        if shard is None:
            variable_id, index = key
            names = {
                s.spec.variable for s in self._shards.values() if s.spec.variable_id == variable_id
            }
            named = "".join(f' ("{name}")' for name in names)
            raise UnknownVariableError(
                f"{self.task} holds no shard {index} of variable {variable_id}{named}"
            )
        return shard

    def _idle(self, key: Key) -> Shard:
        shard = self._shards.get(key) or self._shard(key)
        if shard.busy:
            raise BusyError(f"{shard.spec} on {self.task}: an update is in progress")
        return shard

    def _optimizer(self, optimizer_id: int) -> Optimizer:
        optimizer = self.optimizers.get(optimizer_id)
        if optimizer is None:
            raise UsageError(f"optimizer {optimizer_id} is not defined on {self.task}")
        return optimizer

    def check_slot(self, key: Key, optimizer_id: int, slot: str) -> None:
        """Raise what ``read_slot`` would raise, except BusyError."""
        rule = self._optimizer(optimizer_id).rule
        if slot not in rule.slot_names():
            raise UsageError(
                f"optimizer {optimizer_id} ({rule.name}) on {self.task} has no slot {slot!r}",
                hint=f"its slots are {', '.join(rule.slot_names()) or 'none'}",
            )
        self._check_optimizable(self._shard(key))

    def _slot(self, key: Key, optimizer_id: int, slot: str) -> BlockArray:
        """Return a slot of an idle shard."""
        self.check_slot(key, optimizer_id, slot)
        at = self.optimizers[optimizer_id].rule.slot_names().index(slot)
        return self._slots(self._idle(key), optimizer_id)[at]

    def _slots(self, shard: Shard, optimizer_id: int) -> list[BlockArray]:
        """Return the shard's slots in the rule's order, made when first asked for."""
        rule = self.optimizers[optimizer_id].rule
        slots = []
        for name in rule.slot_names():
            slot = shard.slots.get((optimizer_id, name))
            if slot is None:
                slot = self.make_slot(shard, optimizer_id, name, rule.initial_slot(name))
            slots.append(slot)
        return slots

    def make_slot(
        self, shard: Shard, optimizer_id: int, name: str, fill: float | np.ndarray
    ) -> BlockArray:
        """Return a new slot of a shard: where values lie in an arena, it does in another one."""
        values, dtype = shard.values, slot_dtype(shard.values.dtype)
        if isinstance(values, ArenaArray):
            of = self.optimizers[optimizer_id], name
            slot: BlockArray = values.arena.beside(values, of, dtype, fill)
        else:
            slot = BlockArray(values.size, dtype, fill)
        shard.slots[optimizer_id, name] = slot
        return slot

    def _check_alike(self, spec: ShardSpec, other: ShardSpec, relation: str = "") -> None:
        if (spec.shape, spec.dtype) != (other.shape, other.dtype):
            raise PartitionError(
                f"{spec} on {self.task}: expected {described(other)}, as {other} has{relation}, "
                f"got {described(spec)}"
            )

    def _check_optimizable(self, shard: Shard) -> None:
        try:
            slot_dtype(shard.values.dtype)
        except ValueMismatchError as exc:
            raise ValueMismatchError(
                f"{shard.spec} on {self.task}: {exc.message}", hint=exc.hint
            ) from None

    def _typed(self, shard: Shard, data: object) -> np.ndarray:
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
        return ValueMismatchError(
            f"{spec} on {self.task}: expected {described(spec)} ({spec.nbytes} bytes), got {got}"
        )


def rule_error(task: str, what: str, cause: BaseException) -> RuleError:
    """Return what is told of an error that code of a user's has raised on a ps."""
    try:
        text = str(cause)
    except Exception:
        text = "its text cannot be had"
    return RuleError(task, what, type(cause).__name__, text, "".join(format_exception(cause)))


def described(spec: ShardSpec) -> str:
    return f"shape {spec.shape} {spec.dtype}"


def _whole(spec: ShardSpec) -> str:
    return f"{spec} of {described(spec)} at row {spec.offset} on ps {spec.ps}"
