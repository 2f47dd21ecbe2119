"""Gradients of several pushes summed on the ps, until their mean makes one update.

The sum is a slot like any other. How many gradients are in it is counted for each shard, since
pushes may carry different variables.
"""

from __future__ import annotations

import numpy as np

from psync.numerics.blocks import BlockArray, BlockPool
from psync.numerics.update_rule import Scratch


class GradientAccumulator:
    """What one push does to the accumulator of a shard, block by block.

    Args:
        sums: The slot; its blocks hold the same elements as those of the shard's values.
        steps: Gradients that make one update.
        due: Whether this one completes them.
        pool: Where replaced blocks go and fresh ones come from.
        scratch: Memory for the mean of a block, apart from what its gradient may lie in.
    """

    __slots__ = ("_due", "_pool", "_scratch", "_steps", "_sums", "copies")

    def __init__(
        self, sums: BlockArray, steps: int, due: bool, pool: BlockPool, scratch: Scratch
    ) -> None:
        self.copies = 0  # blocks that were replaced, because a reader held them
        self._sums = sums
        self._steps = steps
        self._due = due
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
        mean = self.peek(i, gradient) if self._due else None
        target = self._sums.writable(i, self._pool)
        if mean is None:
            with np.errstate(all="ignore"):
                np.add(
                    self._sums.block(i).array, gradient, out=target.array, dtype=self._sums.dtype
                )
        else:
            target.array.fill(0)
        self.copies += self._sums.commit(i, target, self._pool)
        return mean
