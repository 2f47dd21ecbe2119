"""The shard store of one ps: read, assign and apply, with slots and optimizer state.

The store decides nothing about time and peers. It reads, assigns and applies, each on one
shard, and refuses before anything has changed whatever does not fit.

Reading is free of copies: ``read`` returns references to the shard's blocks, and these bytes
stay what they are for ever, because a block that is referenced is replaced, not changed
(see ``numerics.memory``). Memory is therefore bounded by values, slots and the blocks in flight.

``assign``, ``apply`` and the like return work, to be done block by block: see ``work``. What is
small is read and updated at once, as a ``Plan`` of the shards says: those that lie side by side in
an arena are one view, or one call of the rule.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, overload

import msgspec
import numpy as np

from psync.errors import UsageError, ValueMismatchError
from psync.numerics.memory import (
    Arena,
    ArenaArray,
    Block,
    BlockArray,
    BlockPool,
    Scratch,
    bytes_of,
)
from psync.numerics.rules import Lamb, Part, Sums, UpdateRule
from psync.numerics.sums import (
    MeanGradient,
    Pieces,
    Reduction,
    move_average,
    reduced,
    sum_dtype,
    sum_of_squares,
)
from psync.specs import dtype_of
from psync.store.push_counts import HOME
from psync.store.rows import RowTable
from psync.store.shards import Key
from psync.store.work import (
    DONE,
    Prepared,
    Shard,
    ShardUpdate,
    ShardWork,
    Work,
)

__all__ = ["AssignOp", "Key", "ShardStore", "Work", "ones"]

AssignOp = Literal["assign", "add", "sub", "max"]

_ASSIGNING: dict[str, Callable[..., object]] = {
    "assign": lambda _, operand, out: np.copyto(out, operand),
    "add": np.add, "sub": np.subtract, "max": np.maximum,
}  # fmt: skip
"""What makes new elements of the present ones and the operand; an overflow is a result."""


@functools.lru_cache(maxsize=64)
def ones(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return ones, not to be changed: what raises a counter with each update."""
    made = np.ones(shape, dtype_of(dtype))
    made.setflags(write=False)
    return made


class Adjacent(msgspec.Struct, frozen=True, eq=False):
    """Arrays that lie side by side in one.

    Args:
        whole: 1-D.
        parts: Where each one lies, in order and without gaps.
    """

    whole: np.ndarray
    parts: Sequence[slice]

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, position: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, position: slice) -> Adjacent: ...
    def __getitem__(self, position: int | slice) -> np.ndarray | Adjacent:
        """Return one, or those of a slice, which are adjacent, too."""
        if isinstance(position, slice):
            return Adjacent(self.whole, self.parts[position])
        return self.whole[self.parts[position]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.whole.__getitem__, self.parts)

    def between(self, first: int, end: int) -> np.ndarray:
        """Return those from the ``first`` to the one before ``end`` as one array."""
        return self.whole[self.parts[first].start : self.parts[end - 1].stop]


Gradients = Sequence[np.ndarray] | Adjacent
"""One for each of several shards."""


class Means(msgspec.Struct, frozen=True, eq=False):
    """The means of several pushes' gradients, one for each shard, or one for several at once."""

    pushes: Sequence[Gradients]  # of each, one for each shard
    weights: Sequence[float]
    reduction: Reduction = "mean"

    def of_shard(self, position: int, scratch: Scratch) -> MeanGradient:
        """Return that of one shard."""
        gradients = [push[position] for push in self.pushes]
        return MeanGradient(gradients, self.weights, self.reduction, scratch)

    def of_run(self, run: Run, first: int, end: int, scratch: Scratch) -> np.ndarray:
        """Return that of a run's shards, from the ``first`` on, as one array."""
        wholes = []
        for push in self.pushes:
            if type(push) is Adjacent:
                wholes.append(push.whole[push.parts[first].start : push.parts[end - 1].stop])
            else:
                wholes.append(_side_by_side(push, run, first, end))
        mean: np.ndarray = scratch.quietly(reduced, wholes, self.weights, self.reduction, scratch)
        return mean


@dataclass(slots=True, eq=False)
class Run:
    """Shards of a plan that lie side by side in an arena, in its order; or one that is in none."""

    shards: list[Shard]
    arena: Arena | None
    start: int = 0  # in the arena, in elements
    stop: int = 0
    is_further: bool = False  # whether a run before it lies in the same arena


@dataclass(slots=True, eq=False)
class Plan:
    """Shards that are read and updated together, and what is settled of them until it changes."""

    keys: Sequence[Key]
    layout: int = -1  # of the store when it was settled
    runs: list[Run] = field(default_factory=list)
    repeats: bool = False  # whether a shard is among them twice
    # By optimizer, of each run: arenas of values and slots, where all lie at the same places.
    slots: dict[int, list[tuple[Arena, ...] | None]] = field(default_factory=dict)


class ShardStore(RowTable):
    """A table of shards whose values can be changed. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._applies = self._assigns = self._copies = 0

    def begin_push(
        self,
        optimizer_id: int,
        carried: int = 0,
        place: int = HOME,
        others: tuple[int, ...] = (),
    ) -> int:
        """Return the step with which all shards of a push are applied; see ``PushCount.push``.

        Args:
            optimizer_id: Number of the optimizer.
            carried: Pushes without a part here that its client knows of, marked.
            place: Which of its messages this is.
            others: The other ps tasks that have a part of it.

        Raises:
            UsageError: If the optimizer is not defined.
            RuleError: As ``check_rate``; the push is not counted.
        """
        optimizer = self.optimizers.get(optimizer_id) or self._optimizer(optimizer_id)
        if optimizer.own_schedules:
            self.check_rate(optimizer_id, optimizer.count.next_step(carried, place))
        return optimizer.count.push(carried, place, others)

    def begin_step(self, optimizer_id: int, step: int) -> int:
        """Return the step with which a synchronous step is applied, which its group counts.

        Raises:
            UsageError: If the optimizer is not defined.
        """
        optimizer = self.optimizers.get(optimizer_id) or self._optimizer(optimizer_id)
        return optimizer.count.reach(step)

    def check_apply(self, optimizer_id: int, key: Key, grad: object) -> np.ndarray:
        """Check a gradient, for callers that take several updates whole or not at all.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            grad: A buffer of as many bytes as the shard has, or an array of its shape and dtype.

        Returns:
            The gradient, as ``apply_checked`` takes it.

        Raises:
            UsageError: If the optimizer is not defined.
            UnknownVariableError: If the shard is not here.
            ValueMismatchError: If the gradient does not fit the shard.
        """
        return self._typed(self.check_optimizable(optimizer_id, key), grad)

    def check_optimizable(self, optimizer_id: int, key: Key) -> Shard:
        """Raise what ``check_apply`` would raise whatever the gradient."""
        self._optimizer(optimizer_id)
        shard = self._shard(key)
        self._check_optimizable(shard)
        return shard

    def apply_checked(
        self,
        optimizer_id: int,
        key: Key,
        gradient: np.ndarray | MeanGradient,
        step: int,
        ratio: float | None = None,
    ) -> Work:
        """Start to apply a gradient to the shard and its slots.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            gradient: What ``check_apply`` returned. Must not change until the work is done.
            step: What ``begin_push`` returned for the push that the gradient is part of.
            ratio: As for ``UpdateRule.apply``.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UnknownVariableError: If the shard is not here.
            BusyError: If another update of the shard is under way.
        """
        shard = self._idle(key)
        update = self._update_of(shard, optimizer_id, gradient, step, ratio)

        def finished() -> None:
            if update.raised is not None:
                self._note_failure(optimizer_id, step, shard, update.raised)
                return
            shard.version += 1
            self._applies += 1
            self._copies += update.copies
            if update.sums is not None:
                shard.pushes[optimizer_id] = shard.pushes.get(optimizer_id, 0) + 1

        # No code of users in other threads.
        is_own = update.rule.may_raise or self.optimizers[optimizer_id].own_schedules
        apart = 0 if is_own else shard.values.num_blocks
        return ShardWork(shard, update.pieces(), finished, self._space, update.num_measured, apart)

    def _update_of(
        self,
        shard: Shard,
        optimizer_id: int,
        gradient: np.ndarray | MeanGradient,
        step: int,
        ratio: float | None,
    ) -> ShardUpdate:
        rule = self.optimizers[optimizer_id].rule.for_variable(shard.spec.variable)
        arrays = [shard.values, *self._slots(shard, optimizer_id)]
        update = ShardUpdate(rule, arrays, gradient, step, self._pool, self._space, ratio)
        steps = rule.options.gradient_accumulation_steps
        if steps is not None:
            update.sums = arrays.pop()
            update.due = (shard.pushes.get(optimizer_id, 0) + 1) % steps == 0
        return update

    def rule(self, optimizer_id: int) -> UpdateRule:
        """Return the rule of an optimizer; not to be changed.

        Raises:
            UsageError: If it is not defined.
        """
        return self._optimizer(optimizer_id).rule

    def measure(
        self,
        optimizer_id: int,
        key: Key,
        gradient: np.ndarray | MeanGradient,
        step: int,
        into: list[Sums],
    ) -> Work:
        """Start to measure what a layerwise optimizer would do to the shard; changes nothing.

        Args:
            optimizer_id: Of the optimizer.
            key: Of the shard.
            gradient: What ``check_apply`` returned. Must not change until the work is done.
            step: With which it would be applied.
            into: Gets the sums of squares at the end.

        Returns:
            The work, to be run to its end; the shard is busy until then.

        Raises:
            UsageError: If the optimizer is no layerwise one.
            BusyError: If an update of the shard is under way.
        """
        shard, rule = self._idle(key), self._optimizer(optimizer_id).rule
        if not isinstance(rule, Lamb):
            raise UsageError(
                f"optimizer {optimizer_id} ({rule.name}) on {self.task} has nothing to measure"
            )
        update = self._update_of(shard, optimizer_id, gradient, step, None)
        measurement = rule.for_variable(shard.spec.variable).measurement(step, self._space.rules)
        return ShardWork(
            shard, update.measuring(measurement), lambda: into.append(measurement.sums)
        )

    def mean_of(
        self,
        gradients: Sequence[np.ndarray],
        weights: Sequence[float],
        reduction: Reduction = "mean",
        scale: float = 1.0,
    ) -> MeanGradient:
        """Return the weighted mean, or sum, of several pushes' gradients of a shard.

        Args:
            gradients: Of each push, in the order in which they are summed: what ``check_apply``
                returned. They must not change until the work that uses the mean is done.
            weights: Of each push, above 0. ``MeanGradient`` says what is computed.
            reduction: "mean" or "sum".
            scale: What limits the norm of the mean of the whole variable.

        Raises:
            UsageError: If there are no gradients, or not as many weights.
        """
        return MeanGradient(gradients, weights, reduction, self._space.sums, scale)

    def square_mean(self, key: Key, mean: MeanGradient, into: list[Sums]) -> Pieces[None]:
        """Start to add up the squares of a mean for a shard; changes nothing.

        Nothing of the shard is read, so it may be busy. ``into`` gets the sum at the end, and 0.
        """
        values, total = self._shard(key).values, 0.0
        for i in range(values.num_blocks):
            start, stop = values.bounds(i)
            total = sum_of_squares(mean[start:stop], total)
            yield
        into.append((total, 0.0))

    # Several shards at once, if they are small.

    def check_idle(self, keys: Sequence[Key]) -> None:
        """Raise BusyError if an update of one of these shards is under way."""
        for key in keys:
            shard = self._shards.get(key)
            if shard is None or shard.busy:
                self._idle(key)  # says so

    def read_together(self, plan: Plan) -> list[memoryview]:
        """Return the bytes of shards as ``read`` does, in order, in as few views as can be.

        Raises:
            UnknownVariableError: If a shard is not here.
            BusyError: If an update of one of them is under way.
        """
        if plan.layout != self.layout:
            self._settle(plan)
        views: list[memoryview] = []
        for run in plan.runs:
            for shard in run.shards:
                if shard.busy:
                    self._idle(shard.spec.key)  # says so
            arena = run.arena
            if arena is None:
                views += run.shards[0].values.export()
            else:
                size = arena.array.itemsize
                views.append(arena.export(run.start * size, run.stop * size))
        return views

    def apply_at_once(
        self,
        optimizer_id: int,
        plan: Plan,
        gradients: Gradients | Means,
        step: int,
    ) -> None:
        """Do ``apply_checked`` on idle shards that are small, to the end.

        Where both shards and gradients (``Adjacent``) lie side by side, those of many shards take
        as long as that of one.

        Raises:
            BusyError: If an update of one of them is under way; none is applied then.
        """
        if plan.layout != self.layout:
            self._settle(plan)
        for run in plan.runs:
            for shard in run.shards:
                if shard.busy:
                    self._idle(shard.spec.key)  # says so
        optimizer = self.optimizers[optimizer_id]
        if not optimizer.is_elementwise or plan.repeats:
            for position, key in enumerate(plan.keys):
                gradient = self._of_shard(gradients, position)
                for _ in self.apply_checked(optimizer_id, key, gradient, step):
                    pass
            return
        slots = plan.slots.get(optimizer_id)
        if slots is None:
            slots = self._settle_slots(plan, optimizer_id)
        parts = self._parts(optimizer_id, plan.runs, slots, gradients)
        try:
            optimizer.rule.apply(parts, step, self._space.rules)
        except BaseException:
            for run in plan.runs:
                for shard in run.shards:
                    shard.busy = True  # for ever: it may be torn
            raise
        for run in plan.runs:
            for shard in run.shards:
                shard.version += 1
        self._applies += len(plan.keys)

    def _parts(
        self,
        optimizer_id: int,
        runs: Sequence[Run],
        slots: Sequence[tuple[Arena, ...] | None],
        gradients: Gradients | Means,
    ) -> Iterator[Part]:
        """Yield part after part: means lie in the same memory, one after the other."""
        position = 0
        for run, arenas in zip(runs, slots, strict=True):
            end, start, stop = position + len(run.shards), run.start, run.stop
            if arenas is None:
                for shard in run.shards:
                    of_shard = self._of_shard(gradients, position)
                    yield from self._blocks(shard, optimizer_id, of_shard)
                    position += 1
                continue
            if type(gradients) is Adjacent and gradients.whole.size == stop - start:
                gradient = gradients.whole
            elif isinstance(gradients, Means):
                gradient = gradients.of_run(run, position, end, self._space.sums)
            else:
                gradient = _side_by_side(gradients, run, position, end)
            olds: list[np.ndarray] = []
            news: list[np.ndarray] = []
            for arena in arenas:
                if run.is_further:
                    old = new = arena.array[start:stop]
                else:
                    old, new, is_copy = arena.begin(start, stop, self._pool)
                    self._copies += is_copy
                olds += [old]
                news += [new]
            yield olds[0], gradient, olds[1:], news[0], news[1:]
            position = end

    def _of_shard(self, gradients: Gradients | Means, position: int) -> np.ndarray | MeanGradient:
        if isinstance(gradients, Means):
            return gradients.of_shard(position, self._space.sums)
        return gradients[position]

    def _blocks(
        self, shard: Shard, optimizer_id: int, gradient: np.ndarray | MeanGradient
    ) -> Iterator[Part]:
        """Yield a shard's blocks; each is committed when the next one is asked for."""
        values, pool = shard.values, self._pool
        arrays = [values, *self._slots(shard, optimizer_id)]
        for i in range(values.num_blocks):
            part = cast(np.ndarray, gradient)
            if values.num_blocks > 1 or not isinstance(gradient, np.ndarray):
                part = gradient[slice(*values.bounds(i))]
            targets = [array.writable(i, pool) for array in arrays]
            now = [array.block(i).array for array in arrays]
            yield now[0], part, now[1:], targets[0].array, [each.array for each in targets[1:]]
            for array, target in zip(arrays, targets, strict=True):
                self._copies += array.commit(i, target, pool)

    def _settle(self, plan: Plan) -> None:
        plan.runs, plan.slots = [], {}
        begun: set[Arena] = set()
        for key in plan.keys:
            shard = self._shard(key)
            values = shard.values
            if not isinstance(values, ArenaArray):
                plan.runs.append(Run([shard], None))
                continue
            arena, start = values.arena, values.start
            last = plan.runs[-1] if plan.runs else None
            if last is None or last.arena is not arena or last.stop != start:
                last = Run([], arena, start, is_further=arena in begun)
                plan.runs.append(last)
                begun.add(arena)
            last.shards.append(shard)
            last.stop = start + values.size
        plan.repeats = len({*plan.keys}) < len(plan.keys)
        plan.layout = self.layout

    def _settle_slots(self, plan: Plan, optimizer_id: int) -> list[tuple[Arena, ...] | None]:
        """Return the arenas of each run's values and slots, which are written from now on."""
        beside: defaultdict[Arena | None, set[tuple[Arena, ...]]] = defaultdict(set)
        for run in plan.runs:
            for shard in run.shards if run.arena is not None else ():
                arrays = [shard.values, *self._slots(shard, optimizer_id)]
                in_arenas = cast(list[ArenaArray], arrays)  # slots lie as values do
                for array in in_arenas:
                    array.block(0)
                beside[run.arena].add(tuple(array.arena for array in in_arenas))
        # Those that several programs have made, of what is one optimizer now, may lie apart.
        alike = {arena: arenas.pop() for arena, arenas in beside.items() if len(arenas) == 1}
        plan.slots[optimizer_id] = found = [alike.get(run.arena) for run in plan.runs]
        return found

    def check_assign(self, key: Key, op: str, data: object) -> np.ndarray:
        """Raise what ``assign`` would raise, except BusyError, and return ``data`` as it is used.

        For callers that take several updates whole or not at all.
        """
        shard = self._shard(key)
        spec = shard.spec
        if op not in _ASSIGNING:
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
        """As ``assign``, of what ``check_assign`` returned; a small shard has it at once."""
        shard = self._idle(key)
        values, pool = shard.values, self._pool
        if isinstance(values, ArenaArray):
            present, target, is_replaced = values.begin(pool)
            self._space.rules.quietly(_ASSIGNING[op], present, operand, out=target)
            self._copies += is_replaced
            shard.version += 1
            self._assigns += 1
            return DONE

        def prepared(i: int, target: Block) -> Prepared:
            present, part = values.block(i).array, operand[slice(*values.bounds(i))]
            return Prepared(
                lambda space: space.rules.quietly(_ASSIGNING[op], present, part, out=target.array),
                lambda: self._commit(values, i, target),
            )

        return self._assigning(shard, prepared)

    def _commit(self, values: BlockArray, i: int, target: Block) -> None:
        self._copies += values.commit(i, target, self._pool)

    def _assigning(self, shard: Shard, prepared: Callable[[int, Block], Prepared]) -> Work:
        values, count = shard.values, shard.values.num_blocks
        blocks = (prepared(i, values.writable(i, self._pool)) for i in range(count))

        def finished() -> None:
            shard.version += 1
            self._assigns += 1

        return ShardWork(shard, blocks, finished, self._space, apart=count)

    def check_average(self, average_key: Key, key: Key) -> None:
        """Raise what ``average`` would raise, except BusyError.

        For callers that take several updates whole or not at all.
        """
        shard, other = self._shard(average_key), self._shard(key)
        self._check_alike(shard.spec, other.spec, ", whose moving average it is")
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
        averages = shard.values
        # One view of each block, the first at the end. What is done in one turn holds nothing: the
        # other one may lie in the same arena.
        held = other.values.export()[::-1] if other.values.num_blocks > 1 else []

        def prepared(i: int, target: Block) -> Prepared:
            average, value = averages.block(i).array, other.values.block(i).array
            if held:
                value = bytes_of(held.pop()).view(averages.dtype)
            return Prepared(
                lambda space: move_average(average, value, target.array, decay, space.sums),
                lambda: self._commit(averages, i, target),
            )

        return self._assigning(shard, prepared)

    def statistics(self) -> dict[str, Any]:
        """Return counters and sizes as of now.

        Counters are of finished work, one per shard: ``assigns`` includes moving averages, and
        ``rows`` were read or changed on their own. ``copies`` are blocks that were replaced instead
        of changed, because a reader held them. ``spare_bytes`` lie beside those in use, see
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
            "row_bytes": self._row_bytes,
            "pool": self._pool.statistics(),
        }


def _side_by_side(gradients: Gradients, run: Run, first: int, end: int) -> np.ndarray:
    """Return the gradients of a run's shards, from the ``first`` on, as one array."""
    if isinstance(gradients, Adjacent):
        return gradients.between(first, end)
    given = zip(run.shards, gradients[first:end], strict=True)  # what is narrow is widened so
    return np.concatenate([each[0 : shard.values.size] for shard, each in given])
