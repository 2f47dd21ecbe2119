"""What a push does to one shard, block by block: see ``shard`` for how that is carried out.

It does up to three things: accumulate gradients of several pushes until their mean makes one
update, measure norms, apply the rule.

A rule that may raise (of a user's) never writes where the shard is: all its results go apart, and
are swapped in when the last block is done. If it raises they are dropped, and the shard is as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from psync.numerics.memory import Block, BlockArray, BlockPool
from psync.numerics.rules import Lamb, Measurement, RuleRaised, UpdateRule
from psync.numerics.sums import MeanGradient
from psync.store.shard import Prepared, Workspace

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
            self._ratio = Lamb.trust_ratio([self._measurement.sums()])
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
        target, targets = values.apart(i, pool), [slot.apart(i, pool) for slot in self._slots]
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
