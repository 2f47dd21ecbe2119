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

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

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


class Prepared(NamedTuple):
    """A block of which it is settled where its new contents go.

    Args:
        compute: Writes them. Needs nothing but arrays, and so may run in any thread.
        commit: Makes them the block; by the owner of the shard.
    """

    compute: Callable[[Workspace], None]
    commit: Callable[[], None]


@dataclass(slots=True)
class Shard:
    """One shard, and what optimizers keep beside it."""

    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    row_size: int  # elements of a row; -1: a scalar, which has no rows
    # By optimizer, below 0 if nobody has adopted it (see ``reattach``), and name.
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)
    pushes: dict[int, int] = field(default_factory=dict)  # by optimizer, if it accumulates them
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


class ShardWork:
    """Work on one shard, of which one piece is done per ``next()``.

    Args:
        shard: Is busy from now on until the end.
        pieces: Does a piece, or prepares a block, each time it is asked for the next one.
        finished: Called at the end.
        space: For blocks that are computed here.
        alone: How many pieces come before the first block that can be handed out.
        apart: How many such blocks come then, up to the end.
    """

    __slots__ = ("_alone", "_apart", "_at_once", "_finished", "_out", "_pieces", "_shard", "_space")

    def __init__(
        self,
        shard: Shard,
        pieces: Iterator[Prepared | None],
        finished: Callable[[], object] = lambda: None,
        space: Workspace | None = None,
        alone: int = 0,
        apart: int = 0,
    ) -> None:
        self._shard = shard
        self._pieces: Iterator[Prepared | None] | None = pieces  # None: it has ended, or failed
        self._finished = finished
        self._space = space
        self._alone = alone  # pieces left
        self._apart = apart  # blocks left
        self._at_once = 0  # blocks handed out at once; 0: none was yet
        self._out = 0  # of what was handed out, how many are not taken back
        shard.busy = True

    def __iter__(self) -> ShardWork:
        return self

    def __next__(self) -> None:
        if self._pieces is None:
            raise StopIteration
        try:
            for block in self._pieces:
                if block is not None:
                    assert self._space is not None, "blocks need space"
                    block.compute(self._space)
                    block.commit()
                if self._alone:
                    self._alone -= 1
                else:
                    self._apart -= 1
                return
        except BaseException:
            self.fail()
            raise
        if not self._out:
            self._pieces = None
            self._shard.busy = False
            self._finished()
            raise StopIteration

    def hand_out(self, threads: int) -> list[Prepared]:
        """Return the next blocks, to be computed elsewhere, and taken back before the work ends.

        Args:
            threads: Among how many the blocks are to be divided.

        Returns:
            Nothing: what comes next is to be done by ``next()``. That does nothing while all that
            is left is handed out.
        """
        if self._pieces is None or self._alone or self._apart <= 0:
            return []
        if not self._at_once:
            if self._apart < 2 * MIN_HANDED_OUT:
                return []
            rounds = -(-self._apart // (threads * MAX_HANDED_OUT))
            self._at_once = max(MIN_HANDED_OUT, -(-self._apart // (threads * rounds)))
        blocks = cast(list[Prepared], list(itertools.islice(self._pieces, self._at_once)))
        self._apart -= len(blocks)
        self._out += 1
        return blocks

    def take_back(self, blocks: list[Prepared]) -> None:
        """Commit blocks that were handed out and are computed; they refer to nothing any more.

        Otherwise the thread might have the last reference to what was lent, and return it.
        """
        for block in blocks:
            block.commit()
        blocks.clear()
        self._out -= 1

    def fail(self) -> None:
        """A block could not be computed: nothing more is done, and the shard stays busy."""
        self._pieces = None

    def close(self) -> None:
        """Do what is left. What was handed out has been taken back."""
        assert self._pieces is None or not self._out, "blocks of a closed work are being computed"
        for _ in self:
            pass

    def __del__(self) -> None:
        self.close()


Work = ShardWork | Pieces[None]
"""Work under way on one shard: one piece per ``next()``; run it to its end."""


DONE: Work = (None for _ in ())
"""Work that is done."""


@dataclass(slots=True, eq=False)
class ShardUpdate:
    """One application of a rule to a shard and its slots.

    A layerwise rule that was given no ratio takes the shard for a whole variable: all blocks are
    measured before the first one changes. A rule that accumulates gradients is applied to the mean
    of those of several pushes, when the last of them comes.

    Args:
        rule: As it is for this variable.
        arrays: Values of the shard, and the rule's slots, in its order.
        gradient: Of the shard; must not change until the last block is done.
        step: Of the push.
        pool: Where replaced blocks go and fresh ones come from.
        space: For what is computed here.
        ratio: As for ``UpdateRule.apply``.
        sums: Slot of accumulated gradients, with blocks like those of the values; None: each
            gradient is applied.
        due: Whether this gradient completes those of one update.
    """

    rule: UpdateRule
    arrays: Sequence[BlockArray]
    gradient: np.ndarray | MeanGradient
    step: int
    pool: BlockPool
    space: Workspace
    ratio: float | None = None
    sums: BlockArray | None = None
    due: bool = True
    copies: int = 0  # blocks replaced instead of changed, because a reader held them
    raised: RuleRaised | None = None  # by the rule; the shard is as it was

    @property
    def num_measured(self) -> int:
        """How many pieces come before the first block changes."""
        takes_norms = isinstance(self.rule, Lamb) and self.ratio is None and self.due
        return self.arrays[0].num_blocks if takes_norms else 0

    def pieces(self) -> Iterator[Prepared | None]:
        """Do everything, block by block."""
        if self.num_measured:
            measurement = cast(Lamb, self.rule).measurement(self.step, self.space.rules)
            yield from self.measuring(measurement)
            self.ratio = Lamb.trust_ratio([measurement.sums])
        if self.rule.may_raise and self.due:
            yield from self._applying_apart()
            return
        for i in range(self.arrays[0].num_blocks):
            if self.sums is not None and not self.due:
                yield self._added(self.sums, i)
            else:
                yield self._applied(i)

    def measuring(self, measurement: Measurement) -> Iterator[None]:
        """Measure block by block, which changes nothing."""
        for i in range(self.arrays[0].num_blocks):
            param, *slots = [array.block(i).array for array in self.arrays]
            measurement.add(param, self._gradient_of(i)(self.space), slots)
            yield

    def _gradient_of(self, i: int) -> Callable[[Workspace], np.ndarray]:
        """Return what computes the gradient of a block; it is valid until the space is used again.

        With accumulated ones it is their mean, of the slot's dtype.
        """
        if self.sums is None:
            return functools.partial(self._given, i)
        total, steps = self.sums.block(i).array, self.rule.options.gradient_accumulation_steps

        def mean(space: Workspace) -> np.ndarray:
            given = self._given(i, space)
            (made,) = space.accumulated.arrays(total.dtype, 1, given.size)
            with np.errstate(all="ignore"):  # an overflow is a result
                np.add(total, given, out=made, dtype=made.dtype)
                np.divide(made, cast(int, steps), out=made)
            return made

        return mean

    def _given(self, i: int, space: Workspace) -> np.ndarray:
        part = slice(*self.arrays[0].bounds(i))
        if isinstance(self.gradient, MeanGradient):
            return self.gradient.cut(part, space.sums)
        return self.gradient[part]

    def _added(self, sums: BlockArray, i: int) -> Prepared:
        """Prepare to add the gradient of a block to the sum."""
        target, total = sums.writable(i, self.pool), sums.block(i).array

        def compute(space: Workspace) -> None:
            with np.errstate(all="ignore"):
                np.add(total, self._given(i, space), out=target.array, dtype=total.dtype)

        return Prepared(compute, lambda: self._commit([sums], i, [target]))

    def _applied(self, i: int, *, apart: bool = False) -> Prepared:
        """Prepare to apply the rule to a block; its sum is 0 then."""
        changed = self.arrays if self.sums is None else [*self.arrays, self.sums]
        targets = [array.writable(i, self.pool, apart=apart) for array in changed]
        param, *slots = [array.block(i).array for array in self.arrays]
        gradient_of, ratio = self._gradient_of(i), self.ratio

        def compute(space: Workspace) -> None:
            gradient = gradient_of(space)
            target, *outs = [each.array for each in targets]
            if self.sums is not None:
                outs.pop().fill(0)
            part = param, gradient, slots, target, outs
            self.rule.apply([part], self.step, space.rules, ratio)

        return Prepared(compute, lambda: self._commit(changed, i, targets))

    def _applying_apart(self) -> Iterator[None]:
        """Apply the rule to all blocks, and then change them: nothing is changed if it raises."""
        blocks = []
        for i in range(self.arrays[0].num_blocks):
            block = self._applied(i, apart=True)
            try:
                block.compute(self.space)
            except RuleRaised as exc:
                self.raised = exc
                return
            blocks.append(block)
            yield
        for block in blocks:
            block.commit()

    def _commit(self, arrays: Sequence[BlockArray], i: int, targets: Sequence[Block]) -> None:
        for array, target in zip(arrays, targets, strict=True):
            self.copies += array.commit(i, target, self.pool)
