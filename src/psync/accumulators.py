"""Accumulators: the mean of the gradients of several replicas, with stale ones refused.

An accumulator holds the gradients of one step. To *take* their mean raises the step
by one, leaves nothing behind, and what was computed against the step before is stale from then
on. A take waits until enough gradients are there; takes are served in the order in which they
came, so a small one waits behind a large one. Nothing here blocks: a take is entered, and the call
that completes it returns it.

To decide and to compute are two things. ``offer``, ``enter``, ``withdraw`` and ``complete`` decide,
at once: which gradients count, and which take gets them. What follows for arrays is returned as
``Pieces`` (``Applied.work``, ``Take.making``), to be done in the order of the decisions; more of
these may be made meanwhile.

Source: ``ConditionalAccumulator`` of TensorFlow. Different here: the outcome of a gradient is
returned, half precision is not summed in itself. Added: weights, bfloat16, ``max_staleness``,
``forbid_nonfinite``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from psync.errors import ConfigurationError, PartitionError, UsageError, ValueMismatchError
from psync.numerics.casting import overflow
from psync.numerics.sums import DenseSum, Pieces, Reduction, SparseSum, check_weight
from psync.specs import HiddenValues, Outcome, as_integer, dtype_name, dtype_of, plain_array

GradientT = TypeVar("GradientT")
ResultT = TypeVar("ResultT")

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class TakeState(enum.Enum):
    """Where a take stands; READY and CANCELLED are final."""

    WAITING = "waiting"  # for gradients, or for the takes before it
    COMPLETE = "complete"  # its gradients are known, and nobody else's; its result is to be made
    READY = "ready"  # it has its result
    CANCELLED = "cancelled"  # it got nothing


class Take(Generic[ResultT]):
    """A pending or completed request for the gradients of one step, reduced to one."""

    __slots__ = ("_making", "_result", "count", "num_required", "state", "step")

    def __init__(self, num_required: int) -> None:
        self.num_required = num_required  # gradients that must be there
        self.state = TakeState.WAITING
        self.count = 0  # gradients in the result: num_required or more; 0 while it waits
        self.step = -1  # of the accumulator after this take; -1 while it waits
        self._making: Pieces[ResultT]  # set when it is COMPLETE
        self._result: ResultT  # set when it is READY

    def result(self) -> ResultT:
        """Return what was taken; it belongs to the caller.

        Raises:
            UsageError: If there is no result, yet or at all.
        """
        if self.state is not TakeState.READY:
            raise UsageError(f"the take is {self.state.value}: it has no result")
        return self._result

    def making(self) -> Pieces[None]:
        """Make the result of a take that is COMPLETE, once its gradients were added."""
        self._result = yield from self._making
        self.state = TakeState.READY


@dataclass(frozen=True, slots=True)
class Applied(Generic[ResultT]):
    """The answer to a gradient."""

    outcome: Outcome  # ACCEPTED or STALE
    count: int  # gradients held now: 0 if this one completed a take
    step: int  # of the accumulator now
    completed: Take[ResultT] | None = None  # the take that this gradient completed
    adding: Pieces[None] | None = field(default=None, compare=False)  # None: it is STALE

    def work(self) -> Pieces[None]:
        """Do to arrays what follows from it."""
        if self.adding is not None:
            yield from self.adding
        if self.completed is not None:
            yield from self.completed.making()


@dataclass(frozen=True, slots=True)
class Held:
    """The gradients that an accumulator holds, as a sum that another one can go on with."""

    count: int  # gradients in it, at least 1
    weight: float  # sum of their weights
    shape: tuple[int, ...]  # of the sum; of a sparse one: of a row
    rows: int  # of a sparse one; 0 of a dense one
    arrays: list[np.ndarray]  # its memory: not to be kept beyond the next call


class Accumulator(ABC, Generic[GradientT, ResultT]):
    """The gradients of one step, dense or some rows of a variable, and who waits for them.

    Single owner. A subclass defines how gradients are added, and what is made of them.

    Attributes:
        nbytes: Size of the sum that it holds.

    Args:
        dtype: float16, bfloat16, float32 or float64: of gradients and results.
        shape: Of the variable; None where a dimension, or all of it, is not known.
        name: For messages.
        reduction_type: "MEAN" or "SUM".
        forbid_nonfinite: Refuse gradients that hold infinities or NaN.
        max_staleness: How many steps a gradient may be behind and still count.

    Raises:
        ConfigurationError: If one of these is not what is stated above.
    """

    def __init__(
        self,
        dtype: object,
        shape: Sequence[int | None] | None = None,
        *,
        name: str,
        reduction_type: str = "MEAN",
        forbid_nonfinite: bool = False,
        max_staleness: int = 0,
    ) -> None:
        self.name = name
        staleness = as_integer(max_staleness)
        if staleness is None or staleness < 0:
            raise self._misused(f"expected max_staleness of 0 or more, got {max_staleness!r}")
        try:
            chosen = dtype_name(dtype)
        except PartitionError:
            chosen = ""
        if chosen not in _DTYPES:
            raise self._misused(f"expected one of {', '.join(_DTYPES)} as dtype, got {dtype!r}")
        if reduction_type not in ("MEAN", "SUM"):
            raise self._misused(f"expected reduction_type 'MEAN' or 'SUM', got {reduction_type!r}")
        self.dtype = dtype_of(chosen)
        self.shape = None if shape is None else tuple(self._dimension(dim) for dim in shape)
        self.reduction: Reduction = "mean" if reduction_type == "MEAN" else "sum"
        self.forbid_nonfinite = forbid_nonfinite
        # Of this step; None before its first gradient.
        self._sum: DenseSum | SparseSum | None = None
        self.max_staleness = staleness
        self._step = 0
        self._count = 0
        self._takes: dict[Take[ResultT], None] = {}  # that wait, in the order of their coming

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes

    @property
    def step(self) -> int:
        """Number of results taken, unless ``set_global_step`` said otherwise."""
        return self._step

    def num_accumulated(self) -> int:
        """Return the number of gradients that the next take would get."""
        return self._count

    def set_global_step(self, step: int) -> str | None:
        """Set the step, to a smaller one too. Gradients held and takes that wait stay.

        Returns:
            A warning to be logged if the step went back, else None.

        Raises:
            ConfigurationError: If ``step`` is not an integer.
        """
        new = self.as_step(step)
        before, self._step = self._step, new
        if new < before:
            return f"{self}: the step went back from {before} to {new}"
        return None

    def enter(self, num_required: int) -> Take[ResultT]:
        """Ask for what at least ``num_required`` gradients amount to.

        Returns:
            A take, WAITING even if enough gradients are there: ``complete`` completes it.

        Raises:
            ConfigurationError: If ``num_required`` is not an integer above 0.
        """
        take: Take[ResultT] = Take(self.as_required(num_required))
        self._takes[take] = None
        return take

    def withdraw(self, take: Take[ResultT]) -> bool:
        """Cancel a waiting take; it consumes nothing. One that has ended stays as it is.

        Returns:
            Whether it was waiting. ``complete`` then completes the one behind it, if it can be.

        Raises:
            UsageError: If the take waits in another accumulator.
        """
        if take.state is not TakeState.WAITING:
            return False
        if take not in self._takes:
            raise UsageError(f"{self}: expected a take of this accumulator")
        del self._takes[take]
        take.state = TakeState.CANCELLED
        return True

    def offer(
        self, given: Any, local_step: int, weight: float, nonfinite: int | None = None
    ) -> Applied[ResultT]:
        """Judge a gradient, and count it unless it is stale.

        The order is TensorFlow's: a stale gradient is dropped whatever its shape, one from the
        future counts.

        Args:
            given: The gradient, kept until it is added; of a sparse one (indices, values,
                dense_shape).
            local_step: Step it was computed against.
            weight: What it counts in the mean; above 0.
            nonfinite: How many of its values are infinite or NaN; None: that is looked for.

        Returns:
            STALE; or ACCEPTED, with what is to be done to arrays, and the take that it completed.

        Raises:
            ValueMismatchError: If anything about it is wrong; nothing has changed.
        """
        computed_at, weight = self.as_call(local_step, weight)
        gradient = self._convert(given)
        if computed_at < self._step - self.max_staleness:
            return Applied(Outcome.STALE, self._count, self._step)
        self._check(gradient, nonfinite)
        adding = self._add(gradient, weight)
        self._count += 1
        take = self.complete()
        return Applied(Outcome.ACCEPTED, self._count, self._step, take, adding)

    def complete(self) -> Take[ResultT] | None:
        """Complete the first take, if there are enough gradients for it: it gets all of them.

        Returns:
            The take, COMPLETE; None: there are too few gradients, or no take waits.
        """
        take = next(iter(self._takes), None)
        if take is None or self._count < take.num_required:
            return None
        take._making = self._reduce()
        del self._takes[take]
        self._step += 1
        take.count, take.step, take.state = self._count, self._step, TakeState.COMPLETE
        self._count = 0
        self._clear()
        return take

    def as_call(self, local_step: object, weight: object) -> tuple[int, float]:
        """Return what comes with a gradient, or raise ValueMismatchError."""
        step = as_integer(local_step)
        if step is None:
            raise self._refused(f"expected an integer scalar as local_step, got {local_step!r}")
        try:
            return step, check_weight(weight)
        except ValueMismatchError as exc:
            raise self._refused(exc.message) from None

    def as_required(self, num_required: object) -> int:
        """Return a number of gradients to wait for, or raise ConfigurationError."""
        required = as_integer(num_required)
        if required is None or required <= 0:
            raise self._misused(f"expected a number of gradients above 0, got {num_required!r}")
        return required

    def as_step(self, step: object) -> int:
        """Return a step to be set, or raise ConfigurationError."""
        new = as_integer(step)
        if new is None:
            raise self._misused(f"expected an integer as step, got {step!r}")
        return new

    @abstractmethod
    def _convert(self, given: Any) -> GradientT:
        """Return the gradient as it is added, or raise ValueMismatchError for its dtype."""

    @abstractmethod
    def _check(self, gradient: GradientT, nonfinite: int | None) -> None:
        """Raise ValueMismatchError if the gradient does not fit; ``nonfinite`` as for ``offer``."""

    @abstractmethod
    def _add(self, gradient: GradientT, weight: float) -> Pieces[None]:
        """Return what adds the gradient to those held, and cannot be refused."""

    @abstractmethod
    def _reduce(self) -> Pieces[ResultT]:
        """Return what makes of the gradients held what they amount to."""

    @abstractmethod
    def held(self) -> Held | None:
        """Return the contents, when all was added; None: the accumulator is empty."""

    @abstractmethod
    def hold(self, count: int, weight: float, shape: Sequence[int], rows: int) -> list[np.ndarray]:
        """Hold what another one holds, instead of what is there; arguments as of ``Held``.

        Returns:
            Arrays to which what is in those of the other one is to be written.
        """

    def _clear(self) -> None:
        self._sum = None

    def _dimension(self, dim: object) -> int | None:
        size = as_integer(dim)
        if dim is not None and (size is None or size < 0):
            raise self._misused(f"expected dimensions of 0 or more, or None, got {dim!r}")
        return size

    def _as_array(self, given: object) -> np.ndarray:
        """Return the values of a gradient; numbers of Python have no dtype, so they take ours."""
        try:
            array = plain_array(given)
        except (TypeError, ValueError, RuntimeError) as exc:
            # Rows of unequal length; a tensor on a device, or one that records its gradient.
            got = exc if isinstance(exc, HiddenValues) else f"{given!r:.80}"
            raise self._refused(f"expected an array as gradient, got {got}") from exc
        if not hasattr(given, "dtype") and array.dtype.kind in "iuf":
            with np.errstate(over="ignore"):  # it is found below
                made = array.astype(self.dtype)
            if (beyond := overflow(array, made)) is not None:
                raise self._refused(f"expected values in the range of {self.dtype}, got {beyond}")
            array = made
        if array.dtype.newbyteorder("=") != self.dtype:
            raise self._refused(f"expected a gradient of {self.dtype}, got {array.dtype}")
        return array

    def _check_finite(self, values: np.ndarray, nonfinite: int | None) -> None:
        if not self.forbid_nonfinite:
            return
        bad = count_nonfinite(values) if nonfinite is None else nonfinite
        if bad:
            raise self._refused(f"expected finite values, got {bad} of {values.size} that are not")

    def _refused(self, message: str) -> ValueMismatchError:
        return ValueMismatchError(f"{self}: {message}")

    def _misused(self, message: str) -> ConfigurationError:
        return ConfigurationError(f"{self}: {message}")

    def __str__(self) -> str:
        return f'accumulator "{self.name}"'


def count_nonfinite(values: np.ndarray) -> int:
    """Return how many values are infinite or NaN."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))
