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
    """An accumulator of gradients of one variable, on a ps.

    Declared in ``strategy.scope()``, which spreads accumulators over the ps tasks one after the
    other, apart from variables. A step, or the program, applies gradients; a take waits
    until enough are there, and returns their mean, with which the accumulator begins its next step.
    Gradients that were computed before that are stale, and dropped.

    Args:
        dtype: float16, bfloat16, float32 or float64: of gradients and results.
        shape: Of the gradients; None where a dimension, or all of it, is not known. What is open
            the first gradient of each step decides for that step.
        shared_name: Two declarations with the same one stand for one accumulator.
        name: Used where there is no ``shared_name``; made unique with a suffix.
        reduction_type: "MEAN" or "SUM".
        forbid_nonfinite: Refuse gradients that hold infinities or NaN.
        max_staleness: How many steps a gradient may be behind and still count.

    Raises:
        ConfigurationError: An argument is not what is stated above; or the shared name is that of
            an accumulator with other parameters, which TensorFlow does not find out.
        UsageError: Outside a scope, or inside a step.

    Source: ``tf.compat.v1.ConditionalAccumulator``. Different here: what became of a gradient is
        answered; one that is applied again, after a worker's loss, counts once.

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
        """Add a gradient, unless it is stale. Never waits for others.

        Args:
            grad: Any shape that fits; of the accumulator's dtype, or numbers of Python. Not
                copied: do not change it before this returns.
            local_step: The step that it was computed against. One ahead of the accumulator's
                counts.
            weight: What it counts in the mean, and what it is multiplied with. The number of
                gradients that a take waits for does not know weights.

        Raises:
            ValueMismatchError: The dtype does not fit, or cannot hold a number; the shape does not
                fit, which is found out here where the accumulator was declared with one; the step
                is no integer, the weight not within ``sums.WEIGHTS``; or it is not stale and holds
                infinities or NaN where these are forbidden. Nothing was added.
            UsageError: Neither in a step nor within a running coordinator.
            ClosureCancelled: In a step that was cancelled.
            ParameterServerLost: The ps is gone.

        Cancellation: Once begun, it ends in the background; the gradient must not change
            until then.

        Source: ``tf.compat.v1.ConditionalAccumulator.apply_grad``.
        """
        gradient = self._rule.as_gradient(grad)
        return await self._apply([gradient], None, local_step, weight)

    async def take_grad(self, num_required: int) -> np.ndarray:
        """Wait until enough gradients are there, and take what all of them amount to.

        Takes are served in the order of arrival, so a small one waits behind a large one. It
        waits as long as it takes, also for gradients that no replica will apply: put a time
        limit around it (``asyncio.timeout``) where that may be.

        Args:
            num_required: Gradients that must be there; more may be, and all are taken.

        Returns:
            Their weighted mean, or their sum: a new array.

        Raises:
            ConfigurationError: ``num_required`` is not an integer above 0.
            UsageError: Neither in a step nor within a running coordinator.
            ClosureCancelled: In a step that was cancelled.
            ParameterServerLost: The ps is gone.

        Cancellation: A take that waits consumes nothing. If its value is already on the way, that
            is lost.

        Source: ``tf.compat.v1.ConditionalAccumulatorBase.take_grad``.
        """
        _, (values,) = await self._take(num_required)
        return values


class SparseConditionalAccumulator(AccumulatorHandle):
    """An accumulator of sparse gradients of one variable, on a ps: rows, each with its index.

    The mean of a row is over the gradients that contained it, unless ``divisor="total"``; rows
    that no gradient contained are not in the result.

    Args:
        dtype: See ``ConditionalAccumulator``, also for all that is not named here.
        shape: Of the variable; values may have more dimensions.
        shared_name: See there.
        name: See there.
        reduction_type: "MEAN" or "SUM".
        divisor: Of the mean of a row: "per_index", the weights of the gradients that contained the
            row, or "total", those of all.
        forbid_nonfinite: See there.
        max_staleness: See there.

    Raises:
        ConfigurationError, UsageError: As there.

    Source: ``tf.compat.v1.SparseConditionalAccumulator``. Different here: indices may come in any
        order and more than once, and negative ones are refused.
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
        """Add a gradient, unless it is stale. One without any rows counts too.

        Args:
            grad_indices: Integers, shape (n,), of the rows; in any order, those that come more
                than once are summed. In ascending order they need not be sorted here.
            grad_values: Shape (n, …), of the accumulator's dtype, or numbers of Python.
            grad_shape: Of the dense array, -1 where it is not known; compared with the
                accumulator's shape, and not used otherwise. None: unknown.
            local_step, weight: See ``ConditionalAccumulator.apply_grad``.

        Raises, cancellation: As there.
        """
        indices, values, dense_shape = self._rule.as_gradient(grad_indices, grad_values, grad_shape)
        if (indices[1:] < indices[:-1]).any():
            order = np.argsort(indices, kind="stable")  # on many workers rather than on one ps
            indices, values = indices[order], values[order]
        return await self._apply([indices, values], dense_shape, local_step, weight)

    async def apply_indexed_slices_grad(
        self, grad: Slices, local_step: int = 0, weight: float = 1.0
    ) -> GradientResult:
        """Do ``apply_grad`` with what has ``indices``, ``values`` and ``dense_shape``."""
        return await self.apply_grad(
            grad.indices, grad.values, grad.dense_shape, local_step, weight
        )

    async def take_indexed_slices_grad(self, num_required: int) -> SparseGradient:
        """Wait until enough gradients are there, and take what all of them amount to.

        Returns:
            ``indices`` (int64, ascending, each once), ``values``, and ``dense_shape``, in which -1
            stands for a number of rows that is not known.

        See ``ConditionalAccumulator.take_grad`` for the rest.
        """
        message, (indices, values) = await self._take(num_required)
        return SparseGradient(indices, values, tuple(message.dense_shape or ()))

    async def take_grad(self, num_required: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Do ``take_indexed_slices_grad``, and return (indices, values, dense_shape)."""
        taken = await self.take_indexed_slices_grad(num_required)
        return taken.indices, taken.values, taken.dense_shape
