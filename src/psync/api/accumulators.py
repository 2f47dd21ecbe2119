"""ConditionalAccumulator and its sparse form: gradients are added by hand, their mean is taken.

With them a program builds a synchronous optimizer of its own, or studies staleness: they do by
hand what ``SyncReplicasOptimizer`` does by itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import numpy as np

from psync.accumulators import ConditionalAccumulator as DenseRule
from psync.accumulators import (
    Slices,
    other_parameters,
    rule_of,
)
from psync.accumulators import SparseConditionalAccumulator as SparseRule
from psync.api.scopes import H, Scope, handle_of, runtime_of, scope_for
from psync.client.context import Runtime
from psync.client.ps import Place
from psync.cluster import device_name
from psync.errors import RemoteProtocolError, check_fits
from psync.numerics.memory import bytes_of
from psync.numerics.rows import IndexedSlices
from psync.specs import Outcome, dtype_of
from psync.wire.messages import AccumulatorState
from psync.wire.tensors import to_bytes_view

AnyRule = DenseRule | SparseRule


@dataclass(frozen=True, slots=True)
class GradientResult:
    """The outcome of applying a gradient to an accumulator.

    Attributes:
        outcome: ``STALE``: it was not added. ``DUPLICATE``: another run of the closure added it.
        count: Number of gradients in the accumulator; 0 if this one completed a take.
        step: Present step of the accumulator.
    """

    outcome: Outcome
    count: int
    step: int


class AccumulatorHandle:
    """The members that both kinds of accumulators share."""

    origin: str
    place: Place
    _rule: AnyRule  # holds nothing: it knows what fits
    _scope: weakref.ref[Scope] | None  # its strategy's; None where that is not, on workers

    @classmethod
    def _declared(
        cls, rule: Callable[..., AnyRule], shared_name: object, name: object, **parameters: Any
    ) -> Self:
        """Return the handle of an accumulator, which is the first of its name or equal to that.

        Args:
            rule: Class of its rule.
            shared_name: Name of the accumulator; None: ``name``, with a suffix if that is taken.
            name: See ``shared_name``.
            parameters: Other arguments of the rule.
        """
        shared = name if shared_name is None else shared_name
        for argument, given in (("name", name), ("shared_name", shared)):
            fits = isinstance(given, str) and given != ""
            check_fits(fits, f"{cls.__name__}: expected a text as {argument}", given)
        scope = scope_for(f'declaring accumulator "{shared_name or name}"')
        names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1)))
        free = (each for each in names if each not in scope._accumulators)
        definition = rule(name=shared_name or next(free), **parameters).definition
        known: Self | None = scope._accumulators.get(definition.name)
        if known is not None:
            if known.place.definition != definition:
                raise other_parameters(known.place.definition, definition)
            return known
        place = Place(definition, next(scope._turns_of_accumulators))
        handle = scope._accumulators[definition.name] = intern(cls, scope._origin, place)
        handle._scope = weakref.ref(scope)
        return handle

    def __psync_handle__(self) -> None:
        """Say on what its pickle depends: on nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (intern, (type(self), self.origin, self.place))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"on ps {self.place.ps}>"
        )

    @property
    def name(self) -> str:
        """Name, unique among the accumulators of the strategy; ``shared_name`` if one was given."""
        return self.place.definition.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of gradients and results."""
        return dtype_of(self.place.definition.dtype)

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The declared shape; None for an unknown dimension, or for an unknown shape."""
        shape = self.place.definition.shape
        return None if shape is None else tuple(shape)

    @property
    def device(self) -> str:
        """The ps that holds it, in TensorFlow's long form."""
        return device_name("ps", self.place.ps)

    async def num_accumulated(self) -> int:
        """Return the number of gradients that the next take would get.

        Raises:
            UsageError: Neither in a step nor within a running coordinator.
            ParameterServerLost: The ps is lost.

        Cancellation: Safe.
        """
        runtime = await self._runtime("num_accumulated")
        return (await runtime.accumulators.state(self.place)).count

    async def step(self) -> int:
        """Return the step: the number of takes so far, unless ``set_global_step`` has set another.

        Errors and cancellation: see ``num_accumulated``.
        """
        runtime = await self._runtime("step")
        return (await runtime.accumulators.state(self.place)).step

    async def set_global_step(self, new_global_step: int) -> None:
        """Set the step, which may become smaller; held gradients and waiting takes stay.

        Args:
            new_global_step: Step before which gradients are stale from now on.

        Raises:
            ConfigurationError: It is not an integer.
            UsageError, ParameterServerLost: See ``num_accumulated``.

        Cancellation: Once begun, it ends in the background.

        Source: ``tf.compat.v1.ConditionalAccumulatorBase.set_global_step``.
        """
        step = self._rule.as_step(new_global_step)
        runtime = await self._runtime("set_global_step")
        call = runtime.begin_update(self._named("set_global_step"))
        await runtime.accumulators.update(self.place, [step], call)

    async def _apply(
        self,
        arrays: Sequence[np.ndarray],
        dense_shape: Sequence[int] | None,
        local_step: object,
        weight: object,
    ) -> GradientResult:
        """Send a gradient: values, or indices and values."""
        step, factor = self._rule.as_call(local_step, weight)
        runtime = await self._runtime("apply_grad")
        call = runtime.begin_update(self._named("apply_grad"))
        shapes = list(arrays[-1].shape), None if dense_shape is None else list(dense_shape)
        answer = await runtime.accumulators.update(
            self.place, [step, *shapes, factor], call, [to_bytes_view(array) for array in arrays]
        )
        return GradientResult(Outcome(answer.outcome), answer.count, answer.step)

    async def _take(self, num_required: object) -> tuple[AccumulatorState, list[np.ndarray]]:
        """Return what was taken, its last array as values."""
        required = self._rule.as_required(num_required)
        runtime = await self._runtime("take_grad")
        received = await runtime.accumulators.take(self.place, required)
        message = cast(AccumulatorState, received.message)
        dtypes = [self.dtype] if message.dense_shape is None else [dtype_of("int64"), self.dtype]
        segments: Sequence[Any] = received.segments or [b""] * len(dtypes)
        try:
            arrays = [
                bytes_of(segment).view(dtype)
                for segment, dtype in zip(segments, dtypes, strict=True)
            ]
            arrays[-1] = arrays[-1].reshape(message.shape)
        except ValueError as exc:
            raise RemoteProtocolError(f"ps {self.place.ps} sent no gradient: {exc}") from exc
        return message, arrays

    async def _runtime(self, method: str) -> Runtime:
        return await runtime_of(self._named(method), self)

    def _what_it_is(self) -> tuple[str, str]:
        """Return the name for messages, and what to do in place of what is refused."""
        return f'accumulator "{self.name}"', "await one of its methods"

    def _named(self, method: str) -> str:
        return f'{method} of accumulator "{self.name}"'


def intern(cls: type[H], origin: str, place: Place) -> H:
    """Return this process's handle of an accumulator: one object, however often it arrives."""
    definition = place.definition
    key, rule = (origin, definition.name), rule_of(definition)
    return handle_of(cls, key, origin=origin, place=place, _rule=rule)


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
        return cls._declared(
            DenseRule, shared_name, name, dtype=dtype, shape=shape, reduction_type=reduction_type,
            forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip

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
                with a shape); the step is not an integer; the weight is not from 1e-30 to
                1e30; or a gradient that is not stale has forbidden infinities or NaN.
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
        return cls._declared(
            SparseRule, shared_name, name, dtype=dtype, shape=shape, reduction_type=reduction_type,
            divisor=divisor, forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip

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

    async def take_indexed_slices_grad(self, num_required: int) -> IndexedSlices:
        """Wait until there are enough gradients, and take the mean or sum of all of them.

        Returns:
            ``indices`` (int64, ascending, without duplicates), ``values``, and ``dense_shape``,
            which has -1 for an unknown number of rows.

        See ``ConditionalAccumulator.take_grad`` for arguments, errors and cancellation.
        """
        message, (indices, values) = await self._take(num_required)
        return IndexedSlices(values, indices, message.dense_shape)

    async def take_grad(self, num_required: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Call ``take_indexed_slices_grad``, and return (indices, values, dense_shape)."""
        taken = await self.take_indexed_slices_grad(num_required)
        return taken.indices, taken.values, taken.dense_shape or ()
