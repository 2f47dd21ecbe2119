"""Accumulators: the mean of the gradients of several replicas, with stale ones refused.

An accumulator holds the gradients of one step. To *take* their mean raises the step
by one, leaves nothing behind, and what was computed against the step before is stale from then
on. A take waits until enough gradients are there; takes are served in the order in which they
came, so a small one waits behind a large one. Nothing here blocks: a take is entered, and the call
that completes it returns it.

Arrays are worked on in pieces, for an event loop: ``offer_pieces`` and ``complete_pieces``.
Between two pieces no other call is allowed, but for ``enter``, ``withdraw`` and what only reads.

Source: ``ConditionalAccumulator`` of TensorFlow. Different here: the outcome of a gradient is
returned, half precision is not summed in itself, a take that fails changes nothing. Added:
weights, bfloat16, ``max_staleness``, ``forbid_nonfinite``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from psync.errors import BusyError, ConfigurationError, GradientError, PartitionError, UsageError
from psync.numerics.casting import overflow
from psync.numerics.sums import DenseSum, Pieces, Reduction, SparseSum, check_weight, cuts
from psync.specs import Outcome, as_integer, dtype_name, dtype_of

GradientT = TypeVar("GradientT")
ResultT = TypeVar("ResultT")

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class TakeState(enum.Enum):
    """Where a take stands; all but WAITING are final."""

    WAITING = "waiting"  # for gradients, or for the takes before it
    READY = "ready"  # it has its result
    FAILED = "failed"  # its result could not be made; the accumulator is as it was before
    CANCELLED = "cancelled"  # it got nothing


class Take(Generic[ResultT]):
    """A pending or completed request for the gradients of one step, reduced to one."""

    __slots__ = ("_result", "count", "error", "num_required", "state", "step")

    def __init__(self, num_required: int) -> None:
        self.num_required = num_required  # gradients that must be there
        self.state = TakeState.WAITING
        self.count = 0  # gradients in the result: num_required or more; 0 while there is none
        self.step = -1  # of the accumulator after this take; -1 while there is no result
        self.error: Exception | None = None  # why it failed
        self._result: ResultT  # set when it is READY

    def result(self) -> ResultT:
        """Return what was taken; it belongs to the caller.

        Raises:
            UsageError: If the take waits, or was cancelled.
            Exception: What made it fail.
        """
        if self.error is not None:
            raise self.error
        if self.state is not TakeState.READY:
            raise UsageError(f"the take is {self.state.value}: it has no result")
        return self._result

    def _ready(self, result: ResultT, count: int, step: int) -> None:
        assert self.state is TakeState.WAITING, "it is among those that wait"
        self._result, self.count, self.step = result, count, step
        self.state = TakeState.READY

    def _failed(self, error: Exception) -> None:
        assert self.state is TakeState.WAITING, "it is among those that wait"
        self.error = error
        self.state = TakeState.FAILED


@dataclass(frozen=True, slots=True)
class Applied(Generic[ResultT]):
    """The answer to a gradient."""

    outcome: Outcome  # ACCEPTED or STALE
    count: int  # gradients held now: 0 if this one completed a take
    step: int  # of the accumulator now
    completed: tuple[Take[ResultT], ...] = ()  # takes that this gradient ended, READY or FAILED


class Accumulator(ABC, Generic[GradientT, ResultT]):
    """The gradients of one step, and who waits for them. Single owner.

    A kind of accumulator is a subclass: what it takes for a gradient, how it adds them, what it
    makes of them.

    Args:
        name: For messages.
        max_staleness: How many steps a gradient may be behind and still count.

    Raises:
        ConfigurationError: If ``max_staleness`` is not an integer of at least 0.
    """

    def __init__(self, *, name: str, max_staleness: int = 0) -> None:
        self.name = name
        staleness = as_integer(max_staleness)
        if staleness is None or staleness < 0:
            raise self._misused(f"expected max_staleness of 0 or more, got {max_staleness!r}")
        self.max_staleness = staleness
        self._step = 0
        self._count = 0
        self._is_offered = False  # a gradient is between two pieces
        self._takes: dict[Take[ResultT], None] = {}  # that wait, in the order of their coming

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
            A take, WAITING even if enough gradients are there: ``complete_pieces`` completes it.

        Raises:
            ConfigurationError: If ``num_required`` is not an integer above 0.
        """
        take: Take[ResultT] = Take(self.as_required(num_required))
        self._takes[take] = None
        return take

    def withdraw(self, take: Take[ResultT]) -> bool:
        """Cancel a waiting take; it consumes nothing. One that has ended stays as it is.

        Returns:
            Whether it was waiting. ``complete_pieces`` then completes those behind it that can be.

        Raises:
            UsageError: If the take waits in another accumulator.
        """
        if take.state is not TakeState.WAITING:
            return False
        if take not in self._takes:
            raise UsageError(f"{self}: expected one of its own takes")
        del self._takes[take]
        take.state = TakeState.CANCELLED
        return True

    def offer_pieces(self, given: Any, local_step: int, weight: float) -> Pieces[Applied[ResultT]]:
        """Judge a gradient, and add it unless it is stale.

        The order is TensorFlow's: a stale gradient is dropped whatever its shape, one from the
        future counts.

        Args:
            given: The gradient; of a sparse one (indices, values, dense_shape).
            local_step: Step it was computed against.
            weight: What it counts in the mean; above 0.

        Returns:
            STALE; or ACCEPTED, with the takes that it completed.

        Raises:
            GradientError: If anything about it is wrong; nothing has changed.
            BusyError: If another one is between two of its pieces; nothing has changed.
        """
        if self._is_offered:
            raise BusyError(f"{self}: another gradient is being added")
        self._is_offered = True
        try:
            return (yield from self._offer(given, local_step, weight))
        finally:
            self._is_offered = False

    def _offer(self, given: Any, local_step: int, weight: float) -> Pieces[Applied[ResultT]]:
        computed_at, weight = self.as_call(local_step, weight)
        gradient = self._convert(given)
        if computed_at < self._step - self.max_staleness:
            return Applied(Outcome.STALE, self._count, self._step)
        yield from self._check(gradient)
        yield from self._add(gradient, weight)
        self._count += 1
        completed = yield from self.complete_pieces()
        return Applied(Outcome.ACCEPTED, self._count, self._step, completed)

    def complete_pieces(self) -> Pieces[tuple[Take[ResultT], ...]]:
        """Complete takes from the first on, as long as there are enough gradients for it.

        Returns:
            Those that were completed.
        """
        completed = []
        while self._takes:
            take = next(iter(self._takes))
            if self._count < take.num_required:
                break
            error: Exception | None = None
            try:
                result = yield from self._reduce()
            except Exception as exc:  # for whoever takes, not for whoever applied; nothing changed
                error = exc
            if take not in self._takes:  # it was withdrawn meanwhile
                continue
            del self._takes[take]
            completed.append(take)
            if error is not None:
                take._failed(error)
                continue
            self._step += 1
            take._ready(result, self._count, self._step)
            self._count = 0
            self._clear()
        return tuple(completed)

    def as_call(self, local_step: object, weight: object) -> tuple[int, float]:
        """Return what comes with a gradient, or raise GradientError."""
        step = as_integer(local_step)
        if step is None:
            raise self._refused(f"expected an integer scalar as local_step, got {local_step!r}")
        try:
            return step, check_weight(weight)
        except GradientError as exc:
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
        """Return the gradient as it is added, or raise GradientError for its dtype."""

    @abstractmethod
    def _check(self, gradient: GradientT) -> Pieces[None]:
        """Raise GradientError if the gradient does not fit."""

    @abstractmethod
    def _add(self, gradient: GradientT, weight: float) -> Pieces[None]:
        """Add the gradient, or raise and change nothing; ``num_accumulated`` is 0 for the first."""

    @abstractmethod
    def _reduce(self) -> Pieces[ResultT]:
        """Return what the gradients held amount to, or raise; change nothing."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget the gradients held."""

    def _refused(self, message: str) -> GradientError:
        return GradientError(f"{self}: {message}")

    def _misused(self, message: str) -> ConfigurationError:
        return ConfigurationError(f"{self}: {message}")

    def __str__(self) -> str:
        return f'accumulator "{self.name}"'


@dataclass(frozen=True, slots=True)
class Held:
    """The gradients that an accumulator holds, as a sum that another one can go on with."""

    count: int  # gradients in it, at least 1
    weight: float  # sum of their weights
    shape: tuple[int, ...]  # of the sum; of a sparse one: of a row
    rows: int  # of a sparse one; 0 of a dense one
    arrays: list[np.ndarray]  # its memory: not to be kept beyond the next call


class ArrayAccumulator(Accumulator[GradientT, ResultT]):
    """An accumulator of gradients made of one array of numbers, dense or some rows of it.

    Attributes:
        nbytes: Size of the sum that it holds.
        is_torn: An addition to that sum has begun and not ended. If it ended with an error, the
            accumulator is of no use any more.

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
        super().__init__(name=name, max_staleness=max_staleness)
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

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes

    @property
    def is_torn(self) -> bool:
        return self._sum is not None and self._sum.is_torn

    @abstractmethod
    def held(self) -> Held | None:
        """Return the contents; None: the accumulator is empty."""

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
            array = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as exc:
            # Rows of unequal length; a tensor on a device, or one that records its gradient.
            raise self._refused(f"expected an array as gradient, got {given!r:.80}") from exc
        if not hasattr(given, "dtype") and array.dtype.kind in "iuf":
            with np.errstate(over="ignore"):  # it is found below
                made = array.astype(self.dtype)
            if (beyond := overflow(array, made)) is not None:
                raise self._refused(f"expected values that {self.dtype} can hold, got {beyond}")
            array = made
        if array.dtype.newbyteorder("=") != self.dtype:
            raise self._refused(f"expected a gradient of {self.dtype}, got {array.dtype}")
        return array

    def _check_finite(self, values: np.ndarray) -> Pieces[None]:
        if not self.forbid_nonfinite:
            return
        flat, finite = values.reshape(-1), 0
        for part in cuts(flat.size, flat.itemsize):
            finite += int(np.count_nonzero(np.isfinite(flat[part])))
            yield
        if bad := flat.size - finite:
            raise self._refused(f"expected finite values, got {bad} of {flat.size} that are not")
