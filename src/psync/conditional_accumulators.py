"""Accumulators on ps tasks as users see them: gradients go in, their mean comes out.

Layer: L4. Imports: errors, specs, blocks, cluster, accumulators, sparse_accumulators, context,
accumulator_client, hosted_accumulators, runtime, scopes, wire.

Who writes a synchronous optimizer of their own, or studies staleness, says here by hand what
``SyncReplicasOptimizer`` does by itself. A handle holds no gradient: it travels to workers, and
stands for one accumulator on one ps everywhere.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import numpy as np

from psync.accumulator_client import Place
from psync.blocks import bytes_of
from psync.cluster import device_name
from psync.context import forbid_in_dataset, forbid_in_step
from psync.dense_accumulators import ConditionalAccumulator as DenseRule
from psync.errors import ConfigurationError, RemoteProtocolError, UsageError
from psync.hosted_accumulators import definition_of, other_parameters, rule_of
from psync.rpc import Received
from psync.runtime import Runtime
from psync.scopes import Scope, current_scope, runtime_here
from psync.sparse_accumulators import Slices, SparseGradient
from psync.sparse_accumulators import SparseConditionalAccumulator as SparseRule
from psync.specs import Outcome, dtype_of
from psync.wire.accumulator_messages import DefineAccumulator, GradientApplied, GradientTaken
from psync.wire.tensors import to_bytes_view

Shape = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class GradientResult:
    """What became of a gradient."""

    outcome: Outcome  # STALE: not added. DUPLICATE: another run of the closure has added it
    count: int  # gradients that the accumulator holds now: 0 if this one completed a take
    step: int  # of the accumulator now


class _Handle:
    """What both kinds share."""

    origin: str
    place: Place
    _rule: DenseRule | SparseRule  # holds nothing: it knows what fits
    _scope: weakref.ref[Scope] | None  # its strategy's; None where that is not, on workers

    def __reduce__(self) -> tuple[Any, ...]:
        return (_intern, (type(self), self.origin, self.place))

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
        """As it was declared: None where a dimension, or all of it, is not known."""
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
            ParameterServerLost: Its ps is gone.

        Cancellation: Safe.
        """
        runtime = self._runtime("num_accumulated")
        return (await runtime.accumulators.state(self.place)).count

    async def step(self) -> int:
        """Return the step: the takes so far, unless ``set_global_step`` said otherwise.

        Raises and cancellation as ``num_accumulated``.
        """
        runtime = self._runtime("step")
        return (await runtime.accumulators.state(self.place)).step

    async def set_global_step(self, new_global_step: int) -> None:
        """Set the step, to a smaller one too; gradients held and takes that wait stay.

        Args:
            new_global_step: Gradients of earlier local steps are stale from now on.

        Raises:
            ConfigurationError: It is no integer.
            UsageError, ParameterServerLost: As ``num_accumulated``.

        Cancellation: Once begun, it ends in the background.

        Source: ``tf.compat.v1.ConditionalAccumulatorBase.set_global_step``.
        """
        step = self._rule.as_step(new_global_step)
        runtime = self._runtime("set_global_step")
        closure, ordinal = runtime.begin_update(self._named("set_global_step"))
        await runtime.accumulators.set_step(self.place, step, closure=closure, ordinal=ordinal)

    async def _apply(
        self,
        arrays: Sequence[np.ndarray],
        dense_shape: Sequence[int] | None,
        local_step: object,
        weight: object,
    ) -> GradientResult:
        """Send a gradient: values, or indices and values."""
        step, factor = self._rule.as_call(local_step, weight)
        runtime = self._runtime("apply_grad")
        closure, ordinal = runtime.begin_update(self._named("apply_grad"))
        answer: GradientApplied = await runtime.accumulators.apply(
            self.place, [to_bytes_view(array) for array in arrays], arrays[-1].shape, dense_shape,
            local_step=step, weight=factor, closure=closure, ordinal=ordinal,
        )  # fmt: skip
        return GradientResult(Outcome(answer.outcome), answer.count, answer.step)

    async def _take(self, num_required: object) -> tuple[GradientTaken, list[np.ndarray]]:
        """Return what was taken, its last array as values."""
        required = self._rule.as_required(num_required)
        runtime = self._runtime("take_grad")
        runtime.check_open(self._named("take_grad"))
        return self._arrays(await runtime.accumulators.take(self.place, required))

    def _arrays(self, received: Received) -> tuple[GradientTaken, list[np.ndarray]]:
        message = cast(GradientTaken, received.message)
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

    def _runtime(self, method: str) -> Runtime:
        operation = self._named(method)
        runtime = runtime_here(operation, None if self._scope is None else self._scope())
        if runtime.origin != self.origin:
            raise UsageError(
                f"{operation}: the accumulator belongs to another program or strategy",
                hint="declare it in main(), on the coordinator, and let the step capture it",
            )
        return runtime

    def _named(self, method: str) -> str:
        return f'{method} of accumulator "{self.name}"'


class ConditionalAccumulator(_Handle):
    """An accumulator of gradients of one variable, on a ps.

    Declared in ``strategy.scope()``, which spreads accumulators over the ps tasks one after the
    other, apart from variables. A step, or the program, applies gradients; whoever takes waits
    until enough are there, and gets their mean, with which the accumulator begins its next step.
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
        scope = _open_scope(cls, shared_name, name)
        chosen = shared_name or _unique(scope, name)
        rule = DenseRule(
            dtype, shape, name=chosen, reduction_type=reduction_type,
            forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip
        return cast(Self, _declared(cls, scope, definition_of(rule)))

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
            GradientError: Shape or dtype do not fit, which is found out here where the accumulator
                was declared with a shape; the step is no integer, the weight not within
                ``sums.WEIGHTS``; or it is not stale and holds infinities or NaN where these are
                forbidden. Nothing was added.
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

        Takes are served in the order of their coming, so a small one waits behind a large one. It
        waits as long as it takes, also for gradients that nobody will bring: put a time limit
        around it (``asyncio.timeout``) where that may be.

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


class SparseConditionalAccumulator(_Handle):
    """An accumulator of sparse gradients of one variable, on a ps: rows, each with its index.

    The mean of a row is over the gradients that contained it, unless ``divisor="total"``; rows
    that no gradient contained are not in the result.

    Args:
        dtype: As of ``ConditionalAccumulator``, as is all that is not named here.
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
        scope = _open_scope(cls, shared_name, name)
        chosen = shared_name or _unique(scope, name)
        rule = SparseRule(
            dtype, shape, name=chosen, reduction_type=reduction_type, divisor=divisor,
            forbid_nonfinite=forbid_nonfinite, max_staleness=max_staleness,
        )  # fmt: skip
        return cast(Self, _declared(cls, scope, definition_of(rule)))

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
                accumulator's shape, and not used otherwise. None: not known.
            local_step: As of ``ConditionalAccumulator.apply_grad``.
            weight: Likewise.

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

        Else as ``ConditionalAccumulator.take_grad``.
        """
        message, (indices, values) = await self._take(num_required)
        return SparseGradient(indices, values, tuple(message.dense_shape or ()))

    async def take_grad(self, num_required: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Do ``take_indexed_slices_grad``, and return (indices, values, dense_shape)."""
        taken = await self.take_indexed_slices_grad(num_required)
        return taken.indices, taken.values, taken.dense_shape


_interned: weakref.WeakValueDictionary[tuple[str, str], _Handle] = weakref.WeakValueDictionary()


def _intern(cls: type[_Handle], origin: str, place: Place) -> _Handle:
    """Return this process's handle of an accumulator: one object, however often it arrives."""
    key = (origin, place.definition.name)
    handle = _interned.get(key)
    if handle is None:
        handle = object.__new__(cls)
        handle.origin, handle.place = origin, place
        handle._rule = cast(DenseRule | SparseRule, rule_of(place.definition))
        handle._scope = None
        _interned[key] = handle
    return handle


def _open_scope(cls: type[_Handle], shared_name: object, name: object) -> Scope:
    """Return where an accumulator is being declared."""
    for argument, given in (("shared_name", shared_name), ("name", name)):
        if not (isinstance(given, str) and given) and (argument == "name" or given is not None):
            raise ConfigurationError(
                f"{cls.__name__}: expected a text as {argument}, got {given!r}"
            )
    operation = f'declaring accumulator "{shared_name or name}"'
    forbid_in_step(
        operation,
        instead="declare it in `with strategy.scope():` on the coordinator, and use it in the step",
    )
    forbid_in_dataset(operation)
    scope = current_scope()
    if scope is None:
        raise UsageError(
            f"{operation} outside a strategy's scope",
            hint="declare it in `with strategy.scope():`",
        )
    return scope


def _unique(scope: Scope, name: str) -> str:
    """Return a name that is not taken."""
    names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1)))
    return next(each for each in names if each not in scope.accumulators)


def _declared(cls: type[_Handle], scope: Scope, definition: DefineAccumulator) -> _Handle:
    """Return the handle of an accumulator, which is the first of its name or equal to that."""
    known: _Handle | None = scope.accumulators.get(definition.name)
    if known is not None:
        if known.place.definition != definition:
            raise other_parameters(known.place.definition, definition)
        return known
    place = Place(definition, scope.accumulator_placement.place(0))
    handle = scope.accumulators[definition.name] = _intern(cls, scope.origin, place)
    handle._scope = weakref.ref(scope)
    return handle
