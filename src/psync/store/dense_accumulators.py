"""Dense accumulators: the mean or the sum of gradients of one shape.

The sparse kind, of some rows, is in ``sparse_accumulators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.accumulators import Accumulator, Held
from psync.numerics.sums import DenseSum, Pieces


class ConditionalAccumulator(Accumulator[np.ndarray, np.ndarray]):
    """Collects arrays of one shape, and gives their mean or their sum.

    Arguments as of ``Accumulator``. Where ``shape`` leaves something open, the first gradient
    of each step decides it for that step.
    """

    _sum: DenseSum | None = None  # of this step; None before its first gradient

    def as_gradient(self, given: object) -> np.ndarray:
        """Return a gradient as an array, checked as far as it can be without those held.

        Raises:
            ValueMismatchError: Its dtype is another, or its shape does not fit the accumulator's.
        """
        gradient = self._as_array(given)
        self._check_shape(gradient, self.shape)
        return gradient

    def held(self) -> Held | None:
        """Return what is held; None: nothing."""
        total = self._sum
        if total is None:
            return None
        return Held(total.count, total.weight, total.shape, 0, total.arrays())

    def hold(self, count: int, weight: float, shape: Sequence[int], rows: int) -> list[np.ndarray]:
        """Hold what another one holds; see ``Accumulator``."""
        self._sum = DenseSum(shape, self.dtype)
        self._sum.restore(count, weight)
        self._count = count
        return self._sum.arrays()

    def _convert(self, given: Any) -> np.ndarray:
        return self._as_array(given)

    def _check(self, gradient: np.ndarray, nonfinite: int | None) -> None:
        self._check_shape(gradient, self.shape if self._sum is None else self._sum.shape)
        self._check_finite(gradient, nonfinite)

    def _check_shape(self, gradient: np.ndarray, expected: Sequence[int | None] | None) -> None:
        if expected is not None and not fits(gradient.shape, expected):
            raise self._refused(f"shape mismatch: expected {expected}, got {gradient.shape}")

    def _add(self, gradient: np.ndarray, weight: float) -> Pieces[None]:
        if self._sum is None:
            self._sum = DenseSum(gradient.shape, self.dtype)
        return self._sum.adding(gradient, weight)

    def _reduce(self) -> Pieces[np.ndarray]:
        assert self._sum is not None, "a take needs one gradient at least"
        return self._sum.making(self.reduction)


def fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Say whether a shape is as expected where that is known."""
    return len(shape) == len(expected) and all(
        dim is None or dim == size for size, dim in zip(shape, expected, strict=True)
    )
