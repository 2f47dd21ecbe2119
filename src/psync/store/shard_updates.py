"""What one push does to one shard, block by block: accumulate, measure, apply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psync.numerics.blocks import BlockArray, BlockPool
from psync.numerics.layerwise_rules import LayerwiseRule, Measurement
from psync.numerics.means import MeanGradient
from psync.numerics.update_rule import Scratch, UpdateRule
from psync.store.gradient_accumulation import GradientAccumulator


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
        param = values.block(i).array
        targets = [slot.writable(i, pool) for slot in self._slots]
        target = values.writable(i, pool)
        self._rule.apply(
            param,
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
