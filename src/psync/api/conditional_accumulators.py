"""ConditionalAccumulator and its sparse form: gradients are added by hand, their mean is taken.

With them a program builds a synchronous optimizer of its own, or studies staleness: they do by
hand what ``SyncReplicasOptimizer`` does by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np

from psync.api.accumulators import AccumulatorHandle, GradientResult, declared
from psync.store.dense_accumulators import ConditionalAccumulator as DenseRule
from psync.store.sparse_accumulators import Slices, SparseGradient
from psync.store.sparse_accumulators import SparseConditionalAccumulator as SparseRule

Shape = Sequence[int | None]


class ConditionalAccumulator(AccumulatorHandle):
    """An accumulator on a ps for the gradients of one variable.

    Steps, or the program, apply gradients. A take waits until there are enough gradients, and
    returns their mean; then the accumulator begins its next step. Gradients computed before that
    are stale, and are dropped. Declare accumulators in ``strategy.scope()``, which spreads them
    over the ps tasks round-robin, independently of variables.

    Args:
        dtype: Dtype of gradients and results: float16, bfloat16, float32 or float64.
        shape: Shape of the gradients; None for an unknown dimension, or for an unknown shape. The
            first gradient of each step fixes unknown dimensions for that step.
        shared_name: Name under which several declarations stand for one accumulator.
        name: Name if there is no ``shared_name``; made unique with a suffix.
        reduction_type: "MEAN" or "SUM".
        forbid_nonfinite: Whether to refuse gradients with infinities or NaN.
        max_staleness: Number of steps that a gradient may be behind and still count.

    Raises:
        ConfigurationError: An argument does not match its description; or an accumulator with this
            shared name has other parameters (TensorFlow does not check this).
        UsageError: Outside a scope, or inside a step.

    Source: ``tf.compat.v1.ConditionalAccumulator``. Different here: ``apply_grad`` returns the
        outcome of the gradient, and a gradient that is applied again after the loss of a worker
        counts once.

    Example:
        with strategy.scope():
            held = psync.ConditionalAccumulator(np.float32, shape=w.shape)
        ...
        await held.apply_grad(gradient, local_step=step)   # in steps
        mean = await held.take_grad(4)                     # in the program
    """

    _rule: DenseRule

    def __new__(
        cls,
        dtype: object,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        forbid_nonfinite: bool = False,
        max_staleness: int = 0,
    ) -> Self:
        rule_named = functools.partial(
            DenseRule, dtype, shape, reduction_type=reduction_type,
            forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip
        return declared(cls, shared_name, name, rule_named)

    async def apply_grad(
        self, grad: Any, local_step: int = 0, weight: float = 1.0
    ) -> GradientResult:
        """Add a gradient, unless it is stale. Never waits for other tasks.

        Args:
            grad: Array of a matching shape and of the accumulator's dtype, or Python numbers. Not
                copied: do not change it before this returns.
            local_step: Step that the gradient was computed against. A step ahead of the
                accumulator's counts.
            weight: Weight of the gradient, which is multiplied by it, in a mean. A take counts
                gradients without their weights.

        Raises:
            ValueMismatchError: The gradient was not added. Its dtype does not match, or cannot hold
                a number; its shape does not match (checked here if the accumulator was declared
                with a shape); the step is not an integer; the weight is not within
                ``sums.WEIGHTS``; or a gradient that is not stale has forbidden infinities or NaN.
            UsageError: Neither in a step nor within a running coordinator.
            ClosureCancelled: The step was cancelled.
            ParameterServerLost: The ps is lost.

        Cancellation: Once begun, it ends in the background; the gradient must not change until
            then.

        Source: ``tf.compat.v1.ConditionalAccumulator.apply_grad``.
        """
        gradient = self._rule.as_gradient(grad)
        return await self._apply([gradient], None, local_step, weight)

    async def take_grad(self, num_required: int) -> np.ndarray:
        """Wait until there are enough gradients, and take the mean or sum of all of them.

        Takes are served in the order of arrival, so a small one waits behind a large one. There is
        no time limit, even if no replica will apply the missing gradients: use ``asyncio.timeout``
        where that can happen.

        Args:
            num_required: Minimum number of gradients; a take gets all that are there.

        Returns:
            A new array with their weighted mean, or their sum.

        Raises:
            ConfigurationError: ``num_required`` is not an integer above 0.
            UsageError: Neither in a step nor within a running coordinator.
            ClosureCancelled: The step was cancelled.
            ParameterServerLost: The ps is lost.

        Cancellation: A waiting take consumes nothing. A value that is already on its way is lost.

        Source: ``tf.compat.v1.ConditionalAccumulatorBase.take_grad``.
        """
        _, (values,) = await self._take(num_required)
        return values


class SparseConditionalAccumulator(AccumulatorHandle):
    """An accumulator on a ps for the sparse gradients of one variable: rows, each with its index.

    The mean of a row is over the gradients that contain it, unless ``divisor="total"``. The result
    has only rows that some gradient contains.

    Args:
        dtype: See ``ConditionalAccumulator``, which also describes all that is not explained here.
        shape: Shape of the variable; values may have more dimensions.
        shared_name: See ``ConditionalAccumulator``.
        name: See ``ConditionalAccumulator``.
        reduction_type: "MEAN" or "SUM".
        divisor: Divisor of the mean of a row: "per_index", the weights of the gradients that
            contain the row; "total", the weights of all gradients.
        forbid_nonfinite: See ``ConditionalAccumulator``.
        max_staleness: See ``ConditionalAccumulator``.

    Raises:
        ConfigurationError, UsageError: See ``ConditionalAccumulator``.

    Source: ``tf.compat.v1.SparseConditionalAccumulator``. Different here: indices may come in any
        order and repeatedly, and negative ones are refused.
    """

    _rule: SparseRule

    def __new__(
        cls,
        dtype: object,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        divisor: Literal["per_index", "total"] = "per_index",
        forbid_nonfinite: bool = False,
        max_staleness: int = 0,
    ) -> Self:
        rule_named = functools.partial(
            SparseRule, dtype, shape, reduction_type=reduction_type, divisor=divisor,
            forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip
        return declared(cls, shared_name, name, rule_named)

    async def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Any = None,
        local_step: int = 0,
        weight: float = 1.0,
    ) -> GradientResult:
        """Add a gradient, unless it is stale. A gradient without rows counts as well.

        Args:
            grad_indices: Row numbers, integers of shape (n,), in any order; duplicates are summed.
            grad_values: Array of shape (n, …) and of the accumulator's dtype, or Python numbers.
            grad_shape: Shape of the dense array, -1 where it is unknown. It is only compared with
                the accumulator's shape. None: unknown.
            local_step, weight: See ``ConditionalAccumulator.apply_grad``.

        Errors and cancellation: see ``ConditionalAccumulator.apply_grad``.
        """
        indices, values, dense_shape = self._rule.as_gradient(grad_indices, grad_values, grad_shape)
        if (indices[1:] < indices[:-1]).any():
            order = np.argsort(indices, kind="stable")  # on many workers rather than on one ps
            indices, values = indices[order], values[order]
        return await self._apply([indices, values], dense_shape, local_step, weight)

    async def apply_indexed_slices_grad(
        self, grad: Slices, local_step: int = 0, weight: float = 1.0
    ) -> GradientResult:
        """Do ``apply_grad`` with an object's ``indices``, ``values`` and ``dense_shape``."""
        return await self.apply_grad(
            grad.indices, grad.values, grad.dense_shape, local_step, weight
        )

    async def take_indexed_slices_grad(self, num_required: int) -> SparseGradient:
        """Wait until there are enough gradients, and take the mean or sum of all of them.

        Returns:
            ``indices`` (int64, ascending, without duplicates), ``values``, and ``dense_shape``,
            which has -1 for an unknown number of rows.

        See ``ConditionalAccumulator.take_grad`` for arguments, errors and cancellation.
        """
        message, (indices, values) = await self._take(num_required)
        return SparseGradient(indices, values, tuple(message.dense_shape or ()))

    async def take_grad(self, num_required: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Call ``take_indexed_slices_grad``, and return (indices, values, dense_shape)."""
        taken = await self.take_indexed_slices_grad(num_required)
        return taken.indices, taken.values, taken.dense_shape
