"""One shard: its blocks, and work on it in pieces that an event loop can interleave.

Work on a large shard takes milliseconds, which would delay every peer of an event loop. So
it is a generator that does one block per ``next()``; the caller lets the loop run in
between. From the call until its end the shard is busy: reading or updating it raises BusyError
(the caller queues such requests), so no reader sees a shard half of which is new. The caller
runs the generator to its end. It cannot be abandoned by accident: closing it, or dropping
it, does the remaining blocks at once. Only an exception inside a block (no memory left)
leaves the shard busy for good, as its value is torn: the task must end.

A push does up to three things to a shard, block by block: accumulate gradients of several pushes
until their mean makes one update, measure norms, apply the rule.

A rule that may raise (of a user's) never writes where the shard is: all its results go apart, and
are swapped in when the last block is done. If it raises they are dropped, and the shard is as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from psync.numerics.blocks import Block, BlockArray, BlockPool
from psync.numerics.layerwise_rules import LayerwiseRule, Measurement
from psync.numerics.means import MeanGradient
from psync.numerics.update_rule import RuleRaised, Scratch, UpdateRule
from psync.specs import ShardSpec

Work = Generator[None, None, None]
"""Work under way on one shard: one block per ``next()``; run it to its end."""


@dataclass(slots=True)
class Shard:
    """One shard, and what optimizers keep beside it."""

    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)  # by optimizer, name
    pushes: dict[int, int] = field(default_factory=dict)  # by optimizer, if it accumulates them
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


def started(
    shard: Shard,
    one_piece: Callable[[int], None],
    finished: Callable[[], None],
    count: int | None = None,
    *,
    changes: bool = True,
) -> Work:
    """Begin work on a shard in ``count`` pieces; default: one for each block."""
    work = _work(
        shard, one_piece, finished, shard.values.num_blocks if count is None else count, changes
    )
    next(work)  # a generator that has not begun could be dropped without a trace
    return work


def _work(
    shard: Shard,
    one_piece: Callable[[int], None],
    finished: Callable[[], None],
    count: int,
    changes: bool,
) -> Work:
    done = 0
    shard.busy = True
    with suppress(GeneratorExit):  # closed or dropped early: the rest follows at once
        yield
        while done < count - 1:
            one_piece(done)
            done += 1
            yield
    for i in range(done, count):
        one_piece(i)
    shard.version += changes
    shard.busy = False
    finished()


def nothing() -> Work:
    """Return work that is done."""
    yield from ()


class GradientAccumulator:
    """What one push does to the accumulator of a shard, block by block.

    Args:
        sums: The slot; its blocks hold the same elements as those of the shard's values.
        steps: Gradients that make one update.
        due: Whether this one completes them.
        pool: Where replaced blocks go and fresh ones come from.
        scratch: Memory for the mean of a block, apart from what its gradient may lie in.
    """

    __slots__ = ("_pool", "_scratch", "_steps", "_sums", "copies", "due")

    def __init__(
        self, sums: BlockArray, steps: int, due: bool, pool: BlockPool, scratch: Scratch
    ) -> None:
        self.copies = 0  # blocks that were replaced, because a reader held them
        self._sums = sums
        self._steps = steps
        self.due = due
        self._pool = pool
        self._scratch = scratch

    def peek(self, i: int, gradient: np.ndarray) -> np.ndarray:
        """Return the mean that block ``i`` would have with this gradient; changes nothing.

        It is of the slot's dtype, and valid until the scratch memory is used again.
        """
        (mean,) = self._scratch.arrays(self._sums.dtype, 1, gradient.size)
        with np.errstate(all="ignore"):  # an overflow is a result
            np.add(self._sums.block(i).array, gradient, out=mean, dtype=mean.dtype)
            np.divide(mean, self._steps, out=mean)
        return mean

    def take(self, i: int, gradient: np.ndarray) -> np.ndarray | None:
        """Add a gradient to block ``i``.

        Returns:
            The mean, as ``peek``, after which the block is 0 again; None if it is not due.
        """
        if self.due:
            mean = self.peek(i, gradient)
            self.empty(i)
            return mean
        target = self._sums.writable(i, self._pool)
        with np.errstate(all="ignore"):
            np.add(self._sums.block(i).array, gradient, out=target.array, dtype=self._sums.dtype)
        self.copies += self._sums.commit(i, target, self._pool)
        return None

    def empty(self, i: int) -> None:
        """Let block ``i`` be 0."""
        target = self._sums.writable(i, self._pool)
        target.array.fill(0)
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
        scratch: The rule's work space.
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
        scratch: Scratch,
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
        self._scratch = scratch
        self._accumulator = accumulator
        self._ratio = ratio
        self.raised: RuleRaised | None = None  # by the rule; the shard is as it was
        self._apart: list[tuple[Block, list[Block]]] = []  # new contents, not swapped in yet
        # Blocks to be measured before the first one changes.
        self._to_measure = 0
        if isinstance(rule, LayerwiseRule) and ratio is None:
            self._to_measure = values.num_blocks
            self._measurement = rule.measurement(step, scratch)
        self.pieces = self._to_measure + values.num_blocks

    def piece(self, i: int) -> None:
        """Do piece ``i`` of ``pieces``: all of them, each once, in order."""
        if i < self._to_measure:
            self.measure(i, self._measurement)
            return
        if i == self._to_measure > 0:
            self._ratio = LayerwiseRule.trust_ratio([self._measurement.sums()])
        if self._rule.may_raise and (self._accumulator is None or self._accumulator.due):
            self._apply_apart(i)
        else:
            self._apply(i - self._to_measure)

    def measure(self, i: int, measurement: Measurement) -> None:
        """Measure block ``i``, which changes nothing."""
        start, stop = self._values.bounds(i)
        gradient = self._gradient[start:stop]
        if self._accumulator is not None:
            gradient = self._accumulator.peek(i, gradient)
        slots = [slot.block(i).array for slot in self._slots]
        measurement.add(self._values.block(i).array, gradient, slots)

    def _apply(self, i: int) -> None:
        values, pool = self._values, self._pool
        start, stop = values.bounds(i)
        gradient = self._gradient[start:stop]
        if self._accumulator is not None:
            mean = self._accumulator.take(i, gradient)
            if mean is None:
                return
            gradient = mean
        targets = [slot.writable(i, pool) for slot in self._slots]
        target = values.writable(i, pool)
        self._rule.apply(
            values.block(i).array,
            gradient,
            [slot.block(i).array for slot in self._slots],
            target.array,
            [slot_target.array for slot_target in targets],
            self._step,
            self._scratch,
            self._ratio,
        )
        self.copies += values.commit(i, target, pool)
        for slot, slot_target in zip(self._slots, targets, strict=True):
            self.copies += slot.commit(i, slot_target, pool)

    def _apply_apart(self, i: int) -> None:
        """As ``_apply`` of block ``i``, and with the last one of all: nothing changes before."""
        if self.raised is not None:
            return
        values, pool, accumulator = self._values, self._pool, self._accumulator
        start, stop = values.bounds(i)
        gradient = self._gradient[start:stop]
        if accumulator is not None:
            gradient = accumulator.peek(i, gradient)
        target, targets = values.apart(i, pool), [slot.apart(i, pool) for slot in self._slots]
        try:
            self._rule.apply(
                values.block(i).array,
                gradient,
                [slot.block(i).array for slot in self._slots],
                target.array,
                [slot_target.array for slot_target in targets],
                self._step,
                self._scratch,
            )
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
