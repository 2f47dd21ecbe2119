"""Block-wise means of gradients and moving averages, as a synchronous step applies them.

Both work on one block of a shard at a time, so that the terms are read once, and their result is
still in the CPU's cache when the optimizer's rule reads it. All of it is elementwise: the blocks
do not show in the result, not in a single bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from psync.errors import UsageError
from psync.numerics.sums import Reduction, sum_dtype, sum_into
from psync.numerics.update_rule import Scratch


@dataclass(slots=True, eq=False)
class MeanGradient:
    """The mean, or sum, of the gradients that several pushes have for one shard.

    It is cut like an array, ``mean[start:stop]``, and computed when it is cut: what is cut off
    is valid until the next cut of anything that shares the scratch memory. ``cut`` does it with
    other scratch memory, in whatever thread.

    The result is ``((g0 * w0 + g1 * w1) + …) / (w0 + w1 + …)``, in the order given, computed in
    ``sum_dtype`` and rounded once to the dtype of the gradients. A weight of 1 multiplies nothing.
    With a scale that result is multiplied by it, as ``clipping.scaled`` says.

    Args:
        gradients: Of each push: 1-D, all of one length and floating dtype. They must not change
            until the last cut.
        weights: Of each push, above 0.
        reduction: "mean" or "sum".
        scratch: Memory for the sum; its chunk is the longest possible cut.
        scale: What limits the norm of the mean of the whole variable.

    Raises:
        UsageError: There is no gradient, or not one weight for each.
    """

    gradients: Sequence[np.ndarray]
    weights: Sequence[float]
    reduction: Reduction
    scratch: Scratch
    scale: float = 1.0
    _weight_sum: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.gradients or len(self.gradients) != len(self.weights):
            raise UsageError(
                "expected gradients, and a weight for each, got "
                f"{len(self.gradients)} and {len(self.weights)}"
            )
        self._weight_sum = sum(self.weights)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return these elements, in the dtype of the gradients; not to be changed."""
        return self.cut(part, self.scratch)

    def cut(self, part: slice, scratch: Scratch) -> np.ndarray:
        """As ``mean[part]``, with other memory for the sum."""
        mean = self._mean(part, scratch)
        return mean if self.scale == 1.0 else self._scaled(mean, scratch)

    def _scaled(self, mean: np.ndarray, scratch: Scratch) -> np.ndarray:
        work = sum_dtype(mean.dtype)
        product = scratch.arrays(work, 2, mean.size)[1]  # the mean may lie in the first
        with np.errstate(all="ignore"):  # infinity times 0 is a result
            np.multiply(mean, self.scale, out=product, dtype=work)
            if work == mean.dtype:
                return product
            rounded = scratch.arrays(mean.dtype, 2, mean.size)[1]
            np.copyto(rounded, product, casting="same_kind")
        return rounded

    def _mean(self, part: slice, scratch: Scratch) -> np.ndarray:
        first = self.gradients[0][part]
        if len(self.gradients) == 1 and self.weights[0] == 1:
            return first
        work = sum_dtype(first.dtype)
        (total,) = scratch.arrays(work, 1, first.size)
        rounded: np.ndarray | None = None
        if work != first.dtype:
            (rounded,) = scratch.arrays(first.dtype, 1, first.size)
        parts = map(itemgetter(part), self.gradients)
        sum_into(total, parts, self.weights, self._weight_sum, self.reduction, rounded)
        return total if rounded is None else rounded


def growing_decay(limit: float, step: int) -> float:
    """Return the decay of moving averages that follow the step, ``limit`` at most.

    Args:
        limit: In [0, 1).
        step: Number of updates that the variables have had.

    Source: ``num_updates`` of ``tf.train.ExponentialMovingAverage``.
    """
    return min(limit, (1 + step) / (10 + step))


def move_average(
    average: np.ndarray, value: np.ndarray, out: np.ndarray, decay: float, scratch: Scratch
) -> None:
    """Compute ``average - (1 - decay) * (average - value)``, in ``sum_dtype``, rounded once.

    Args:
        average: 1-D, floating, not longer than the scratch's chunk.
        value: Of the same length and dtype.
        out: Where the result goes: ``average`` itself or memory apart from it.
        decay: In [0, 1].
        scratch: Work space.

    Source: ``tf.train.ExponentialMovingAverage``.
    """
    work = sum_dtype(average.dtype)
    (difference,) = scratch.arrays(work, 1, average.size)
    with np.errstate(all="ignore"):  # infinities and NaN are results
        np.subtract(average, value, out=difference, dtype=work)
        np.multiply(difference, 1 - decay, out=difference)
        np.subtract(average, difference, out=out, dtype=work)
