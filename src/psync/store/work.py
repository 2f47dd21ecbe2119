"""One shard: its blocks, and work on it in pieces that an event loop can interleave.

Work on a large shard takes milliseconds, which would delay every peer of an event loop. So
it does one block per ``next()``, as a generator does; the caller lets the loop run in
between. From the call until its end the shard is busy: reading or updating it raises BusyError
(the caller queues such requests), so no reader sees a shard half of which is new. The caller
runs the work to its end. It cannot be abandoned by accident: closing it, or dropping
it, does the remaining blocks at once. Only an exception inside a block (no memory left)
leaves the shard busy for good, as its value is torn: the task must end.

Several blocks can be *handed out* instead, and computed in another thread. Only arithmetic on
arrays is done there. Which memory the new values go to, and what counts as the block afterwards, is
decided by the owner of the shard, before and after.

What a push does to a shard has up to three parts: gradients of several pushes are accumulated until
their mean makes one update, norms are measured, the rule is applied. A rule that may raise (of a
user's) never writes where the shard is: all its results go apart, and are swapped in when the last
block is done. If it raises they are dropped, and the shard is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from psync.numerics.memory import BLOCK_ELEMENTS, Block, BlockArray, BlockPool, Scratch
from psync.numerics.rules import Lamb, Measurement, RuleRaised, UpdateRule
from psync.numerics.sums import MeanGradient, Pieces
from psync.specs import ShardSpec

MIN_HANDED_OUT = 4
"""Blocks. The way to a thread and back takes a tenth of a millisecond, as long as SGD takes for
half a block, and the loop's caches. With two at a time, shards of 4 MiB that two workers push to
were 6 % slower than on the loop."""

MAX_HANDED_OUT = 16
"""Blocks: 4 ms of SGD, 20 of Adam. So long may it take to close work of which they are part."""


@dataclass(slots=True, eq=False)
class Workspace:
    """Memory for what is computed of one block. Single owner: one block at a time uses it."""

    rules: Scratch = field(default_factory=Scratch)
    # Apart from that of the rules, which read what is in these.
    sums: Scratch = field(default_factory=lambda: Scratch(BLOCK_ELEMENTS))
    accumulated: Scratch = field(default_factory=lambda: Scratch(BLOCK_ELEMENTS))


@dataclass(slots=True, eq=False)
class Prepared:
    """A block of which it is settled where its new contents go.

    Args:
        compute: Writes them. Needs nothing but arrays, and so may run in any thread.
        commit: Makes them the block; by the owner of the shard.
    """

    compute: Callable[[Workspace], None]
    commit: Callable[[], None]

    def do(self, space: Workspace) -> None:
        """Do both."""
        self.compute(space)
        self.commit()


class HandedOut:
    """Several prepared blocks of one shard."""

    __slots__ = ("_blocks", "_returned")

    def __init__(self, blocks: list[Prepared], returned: Callable[[], None]) -> None:
        self._blocks = blocks
        self._returned: Callable[[], None] | None = returned

    def compute(self, space: Workspace) -> None:
        """Compute the blocks, in whatever thread."""
        for block in self._blocks:
            block.compute(space)

    def commit(self) -> None:
        """Commit them, by the owner of the shard, once; nothing is referred to any more.

        Else the thread might have the last reference to what was lent, and return it.
        """
        assert self._returned is not None, "blocks are committed once"
        for block in self._blocks:
            block.commit()
        self._blocks.clear()
        self._returned()
        self._returned = None


@dataclass(slots=True)
class Shard:
    """One shard, and what optimizers keep beside it."""

    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    row_size: int  # elements of a row; -1: a scalar, which has no rows
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)  # by optimizer, name
    pushes: dict[int, int] = field(default_factory=dict)  # by optimizer, if it accumulates them
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


class BlockWork:
    """Work on one shard, of which one piece is done per ``next()``, and with the last one its end.

    Args:
        shard: Is busy from now on until the end.
        one_piece: Does one of the pieces, by its number.
        finished: Called at the end.
        count: Number of pieces; None: one for each block.
        changes: Whether the shard has another version at the end.
        prepared: Of a piece, what can be handed out; None: it has to be done by ``one_piece``. Once
            one can be handed out, so can all after it.
    """

    __slots__ = (
        "_at_once", "_changes", "_count", "_finished", "_next", "_one_piece", "_out", "_over",
        "_prepared", "_shard",
    )  # fmt: skip

    def __init__(
        self,
        shard: Shard,
        one_piece: Callable[[int], None],
        finished: Callable[[], None],
        count: int | None = None,
        *,
        changes: bool = True,
        prepared: Callable[[int], Prepared | None] | None = None,
    ) -> None:
        self._shard = shard
        self._one_piece = one_piece
        self._finished = finished
        self._count = shard.values.num_blocks if count is None else count
        self._changes = changes
        self._prepared = prepared
        self._next = 0  # piece
        self._out = 0  # of what was handed out, how many are not committed
        self._at_once = 0  # blocks handed out at once; 0: none was yet
        self._over = False  # it has ended, or failed
        shard.busy = True

    def __iter__(self) -> BlockWork:
        return self

    def __next__(self) -> None:
        if self._over:
            raise StopIteration
        if self._next < self._count:
            self._next += 1
            try:
                self._one_piece(self._next - 1)
            except BaseException:
                self.fail()
                raise
        if self._next < self._count or self._out:
            return
        self._over = True
        self._shard.version += self._changes
        self._shard.busy = False
        self._finished()
        raise StopIteration

    def hand_out(self, threads: int) -> HandedOut | None:
        """Return the next blocks, to be computed elsewhere, and committed before the work ends.

        Args:
            threads: Among how many the blocks are to be divided.

        Returns:
            None: what comes next is to be done by ``next()``. That does nothing while all that is
            left is handed out.
        """
        left = self._count - self._next
        if self._over or self._prepared is None or not left:
            return None
        if not self._at_once:
            if left < 2 * MIN_HANDED_OUT:
                return None
            rounds = -(-left // (threads * MAX_HANDED_OUT))
            self._at_once = max(MIN_HANDED_OUT, -(-left // (threads * rounds)))
        blocks: list[Prepared] = []
        for i in range(self._next, min(self._next + self._at_once, self._count)):
            block = self._prepared(i)
            if block is None:
                self._at_once = 0
                return None
            blocks.append(block)
        self._next += len(blocks)
        self._out += 1
        return HandedOut(blocks, self._returned)

    def _returned(self) -> None:
        self._out -= 1

    def fail(self) -> None:
        """A block could not be computed: nothing more is done, and the shard stays busy."""
        self._over = True

    def close(self) -> None:
        """Do what is left. What is handed out has been committed."""
        assert self._over or not self._out, "blocks of a closed work are being computed"
        for _ in self:
            pass

    def __del__(self) -> None:
        self.close()


Work = BlockWork | Pieces[None]
"""Work under way on one shard: one piece per ``next()``; run it to its end."""


DONE: Work = (None for _ in ())
"""Work that is done."""


Gradient = Callable[[Workspace], np.ndarray]
"""Computes the gradient of one block; it is valid until the work space is used again."""


class GradientAccumulator:
    """What one push does to the accumulator of a shard, block by block.

    Args:
        sums: The slot; its blocks hold the same elements as those of the shard's values.
        steps: Gradients that make one update.
        due: Whether this one completes them.
        pool: Where replaced blocks go and fresh ones come from.
    """

    __slots__ = ("_pool", "_steps", "_sums", "copies", "due")

    def __init__(self, sums: BlockArray, steps: int, due: bool, pool: BlockPool) -> None:
        self.copies = 0  # blocks that were replaced, because a reader held them
        self._sums = sums
        self._steps = steps
        self.due = due
        self._pool = pool

    def sum(self, i: int) -> np.ndarray:
        """Return the sum of block ``i`` so far; for ``mean`` and ``add``, and nobody else."""
        return self._sums.block(i).array

    def mean(self, total: np.ndarray, gradient: np.ndarray, space: Workspace) -> np.ndarray:
        """Return the mean that a block would have with this gradient; changes nothing.

        It is of the slot's dtype, and valid until the work space is used again.
        """
        (mean,) = space.accumulated.arrays(total.dtype, 1, gradient.size)
        with np.errstate(all="ignore"):  # an overflow is a result
            np.add(total, gradient, out=mean, dtype=mean.dtype)
            np.divide(mean, self._steps, out=mean)
        return mean

    def adding(self, i: int, gradient: Gradient) -> Prepared:
        """Prepare to add a gradient to block ``i``."""
        target, total = self._target(i), self.sum(i)

        def compute(space: Workspace) -> None:
            with np.errstate(all="ignore"):
                np.add(total, gradient(space), out=target.array, dtype=total.dtype)

        return Prepared(compute, lambda: self._commit(i, target))

    def taking(self, i: int, gradient: Gradient) -> tuple[Gradient, Callable[[], None]]:
        """Prepare to take the mean of block ``i`` with a gradient, and to let the block be 0.

        Returns:
            What does that and returns the mean, and what commits it, as of ``Prepared``.
        """
        target, total = self._target(i), self.sum(i)

        def take(space: Workspace) -> np.ndarray:
            mean = self.mean(total, gradient(space), space)
            target.array.fill(0)
            return mean

        return take, lambda: self._commit(i, target)

    def empty(self, i: int) -> None:
        """Let block ``i`` be 0."""
        target = self._target(i)
        target.array.fill(0)
        self._commit(i, target)

    def _target(self, i: int) -> Block:
        return self._sums.writable(i, self._pool)

    def _commit(self, i: int, target: Block) -> None:
        self.copies += self._sums.commit(i, target, self._pool)


class ShardUpdate:
    """One application of a rule to a shard and its slots.

    A layerwise rule that was given no ratio takes the shard for a whole variable: all blocks are
    measured before the first one changes.

    Args:
        rule: As it is for this variable.
        values: Of the shard.
        slots: The rule's own, in its order.
        gradient: Of the shard; must not change until the last block is done.
        step: Of the push.
        pool: Where replaced blocks go and fresh ones come from.
        space: For what is computed here.
        accumulator: What sums gradients until they are applied; None: each one is.
        ratio: As for ``UpdateRule.apply``.
    """

    def __init__(
        self,
        rule: UpdateRule,
        values: BlockArray,
        slots: Sequence[BlockArray],
        gradient: np.ndarray | MeanGradient,
        step: int,
        pool: BlockPool,
        space: Workspace,
        accumulator: GradientAccumulator | None = None,
        ratio: float | None = None,
    ) -> None:
        self.copies = 0  # blocks replaced instead of changed, because a reader held them
        self._rule = rule
        self._values = values
        self._slots = slots
        self._gradient = gradient
        self._step = step
        self._pool = pool
        self._space = space
        self._accumulator = accumulator
        self._ratio = ratio
        self._writes_apart = rule.may_raise and (accumulator is None or accumulator.due)
        self.raised: RuleRaised | None = None  # by the rule; the shard is as it was
        self._apart: list[tuple[Block, list[Block]]] = []  # new contents, not swapped in yet
        # Blocks to be measured before the first one changes.
        self._to_measure = 0
        if isinstance(rule, Lamb) and ratio is None:
            self._to_measure = values.num_blocks
            self._measurement = rule.measurement(step, space.rules)
        self.pieces = self._to_measure + values.num_blocks

    def piece(self, i: int) -> None:
        """Do piece ``i`` of ``pieces``: all of them, each once, in order."""
        if i < self._to_measure:
            self.measure(i, self._measurement)
        elif self._writes_apart:
            self._apply_apart(i)
        else:
            self._prepare(i).do(self._space)

    def prepared(self, i: int) -> Prepared | None:
        """Return piece ``i`` as what can be handed out; None: it has to be done by ``piece``."""
        if i < self._to_measure or self._rule.may_raise:  # no code of users in other threads
            return None
        return self._prepare(i)

    def measure(self, i: int, measurement: Measurement) -> None:
        """Measure block ``i``, which changes nothing."""
        gradient = self._gradient_of(i, self._space)
        if self._accumulator is not None:
            gradient = self._accumulator.mean(self._accumulator.sum(i), gradient, self._space)
        slots = [slot.block(i).array for slot in self._slots]
        measurement.add(self._values.block(i).array, gradient, slots)

    def _gradient_of(self, i: int, space: Workspace) -> np.ndarray:
        part = slice(*self._values.bounds(i))
        if isinstance(self._gradient, MeanGradient):
            return self._gradient.cut(part, space.sums)
        return self._gradient[part]

    def _prepare(self, i: int) -> Prepared:
        if i == self._to_measure > 0:
            self._ratio = Lamb.trust_ratio([self._measurement.sums])
        i -= self._to_measure
        accumulator = self._accumulator
        if accumulator is None:
            return self._applying(i, lambda space: self._gradient_of(i, space))
        if not accumulator.due:
            return accumulator.adding(i, lambda space: self._gradient_of(i, space))
        take, taken = accumulator.taking(i, lambda space: self._gradient_of(i, space))
        applying = self._applying(i, take)

        def commit() -> None:
            applying.commit()
            taken()

        return Prepared(applying.compute, commit)

    def _applying(self, i: int, gradient: Gradient) -> Prepared:
        values, pool, step, ratio = self._values, self._pool, self._step, self._ratio
        targets = [slot.writable(i, pool) for slot in self._slots]
        target = values.writable(i, pool)
        param, slots = values.block(i).array, [slot.block(i).array for slot in self._slots]

        def compute(space: Workspace) -> None:
            outs = [slot_target.array for slot_target in targets]
            part = param, gradient(space), slots, target.array, outs
            self._rule.apply([part], step, space.rules, ratio)

        def commit() -> None:
            self.copies += values.commit(i, target, pool)
            for slot, slot_target in zip(self._slots, targets, strict=True):
                self.copies += slot.commit(i, slot_target, pool)

        return Prepared(compute, commit)

    def _apply_apart(self, i: int) -> None:
        """As ``_applying`` of block ``i``, and with the last one of all: nothing changes before."""
        if self.raised is not None:
            return
        values, pool, accumulator = self._values, self._pool, self._accumulator
        gradient = self._gradient_of(i, self._space)
        if accumulator is not None:
            gradient = accumulator.mean(accumulator.sum(i), gradient, self._space)
        target = values.writable(i, pool, apart=True)
        targets = [slot.writable(i, pool, apart=True) for slot in self._slots]
        slots = [slot.block(i).array for slot in self._slots]
        outs = [slot_target.array for slot_target in targets]
        part = values.block(i).array, gradient, slots, target.array, outs
        try:
            self._rule.apply([part], self._step, self._space.rules)
        except RuleRaised as exc:
            self.raised = exc
            self._apart.clear()
            return
        self._apart.append((target, targets))
        if i + 1 < self.pieces:
            return
        for at, (target, targets) in enumerate(self._apart):
            values.commit(at, target, pool)
            for slot, slot_target in zip(self._slots, targets, strict=True):
                slot.commit(at, slot_target, pool)
            if accumulator is not None:
                accumulator.empty(at)
        self._apart.clear()
