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

There are two kinds: dense accumulators of arrays of one shape, and sparse ones of some rows of an
array, each row with its index. The mean of a row is over the gradients that contained it, not over
all, unless ``divisor="total"``; rows that no gradient contained do not exist in the result.

Source: ``ConditionalAccumulator`` and ``SparseConditionalAccumulator`` of TensorFlow. Different
here: the outcome of a gradient is returned, half precision is not summed in itself, indices may
come in any order and more than once, and negative ones are refused. Added: weights, bfloat16,
``max_staleness``, ``forbid_nonfinite``, ``divisor``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from psync.errors import (
    ConfigurationError,
    PartitionError,
    RemoteProtocolError,
    ValueMismatchError,
    check_fits,
)
from psync.numerics.casting import overflow
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import DenseSum, Pieces, Reduction, SparseSum, check_weight
from psync.specs import (
    LARGEST,
    HiddenValues,
    Outcome,
    as_integer,
    checked_integer,
    dtype_name,
    dtype_of,
    plain_array,
)
from psync.wire.messages import DefineAccumulator

GradientT = TypeVar("GradientT")
ResultT = TypeVar("ResultT")

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(slots=True, eq=False)
class Take(Generic[ResultT]):
    """A pending or completed request for the gradients of one step, reduced to one."""

    num_required: int  # gradients that must be there
    owner: Any = None  # whoever has asked for it; opaque
    count: int = 0  # gradients in the result: num_required or more; 0 until it is complete
    step: int = -1  # of the accumulator after this take; -1 until it is complete
    result: Any = None  # what was taken, once it is made; it belongs to the caller
    reduction: Pieces[ResultT] | None = None  # makes it; set when it is complete

    def making(self) -> Pieces[None]:
        """Make the result of a take that is complete, once its gradients were added."""
        assert self.reduction is not None, "it is complete"
        self.result = yield from self.reduction


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


class Accumulator(ABC, Generic[GradientT, ResultT]):
    """The gradients of one step, dense or some rows of a variable, and who waits for them.

    Single owner. A subclass defines how gradients are added, and what is made of them.

    Attributes:
        nbytes: Size of the sum that it holds.
        waiting: Takes that wait.
        definition: Describes accumulators like this one.

    Args:
        dtype: float16, bfloat16, float32 or float64: of gradients and results.
        shape: Of the variable; None where a dimension, or all of it, is not known.
        name: For messages.
        reduction_type: "MEAN" or "SUM".
        divisor: Of the mean of a row, see ``SparseConditionalAccumulator``.
        forbid_nonfinite: Refuse gradients that hold infinities or NaN.
        max_staleness: How many steps a gradient may be behind and still count.

    Raises:
        ConfigurationError: If one of these is not what is stated above.
    """

    kind: ClassVar[str]
    _sum_kind: ClassVar[type[DenseSum] | type[SparseSum]]
    _divisors: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self,
        dtype: object,
        shape: Sequence[int | None] | None = None,
        *,
        name: str,
        reduction_type: str = "MEAN",
        divisor: Any = ...,  # the first that there is
        forbid_nonfinite: bool = False,
        max_staleness: int = 0,
    ) -> None:
        self.name = name
        expected = f"{self}: expected max_staleness of 0 or more"
        staleness = checked_integer(expected, max_staleness, 0)
        try:
            chosen = dtype_name(dtype)
        except PartitionError:
            chosen = ""
        is_one = chosen in _DTYPES
        check_fits(is_one, f"{self}: expected one of {', '.join(_DTYPES)} as dtype", dtype)
        is_one = reduction_type in ("MEAN", "SUM")
        check_fits(is_one, f"{self}: expected reduction_type 'MEAN' or 'SUM'", reduction_type)
        self.dtype = dtype_of(chosen)
        dims = None if shape is None else [self._dimension(dim) for dim in shape]
        self.shape = None if dims is None else tuple(dims)
        self.divisor: str = self._divisors[0] if divisor is ... else divisor
        is_one = self.divisor in self._divisors
        check_fits(is_one, f"{self}: expected divisor 'per_index' or 'total'", divisor)
        self.definition = DefineAccumulator(
            name, self.kind, chosen, dims, reduction_type, self.divisor, forbid_nonfinite, staleness
        )
        self.reduction: Reduction = "mean" if reduction_type == "MEAN" else "sum"
        self.forbid_nonfinite = forbid_nonfinite
        self._sum: Any = None  # of this step, a ``_sum_kind``; None before its first gradient
        self.step = 0  # results taken, unless ``set_global_step`` said otherwise
        self._count = 0
        self.waiting: dict[Take[ResultT], None] = {}  # in the order of their coming

    @property
    def nbytes(self) -> int:
        return 0 if self._sum is None else self._sum.nbytes

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
        before, self.step = self.step, new
        if new < before:
            return f"{self}: the step went back from {before} to {new}"
        return None

    def enter(self, num_required: int, owner: Any = None) -> Take[ResultT]:
        """Ask for what at least ``num_required`` gradients amount to, for an owner.

        Returns:
            A take, which waits even if enough gradients are there: ``complete`` completes it.

        Raises:
            ConfigurationError: If ``num_required`` is not an integer above 0.
        """
        take: Take[ResultT] = Take(self.as_required(num_required), owner)
        self.waiting[take] = None
        return take

    def withdraw(self, take: Take[ResultT]) -> None:
        """Cancel a take of this accumulator that waits; it consumes nothing.

        ``complete`` then completes the one behind it, if it can be.
        """
        del self.waiting[take]

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
        if computed_at < self.step - self.definition.max_staleness:
            return Applied(Outcome.STALE, self._count, self.step)
        self._check(gradient, nonfinite)
        adding = self._add(gradient, weight)
        self._count += 1
        take = self.complete()
        return Applied(Outcome.ACCEPTED, self._count, self.step, take, adding)

    def complete(self) -> Take[ResultT] | None:
        """Complete the first take, if there are enough gradients for it: it gets all of them.

        Returns:
            The take; None: there are too few gradients, or no take waits.
        """
        take = next(iter(self.waiting), None)
        if take is None or self._count < take.num_required:
            return None
        del self.waiting[take]
        self.step += 1
        take.reduction = self._reduce(self._sum)
        take.count, take.step = self._count, self.step
        self._count, self._sum = 0, None
        return take

    def as_call(self, local_step: object, weight: object) -> tuple[int, float]:
        """Return what comes with a gradient, or raise ValueMismatchError."""
        step = as_integer(local_step)
        if step is None:
            raise self._refused(f"expected an integer scalar as local_step, got {local_step!r}")
        return step, check_weight(weight, self)

    def as_required(self, num_required: object) -> int:
        """Return a number of gradients to wait for, or raise ConfigurationError."""
        return checked_integer(f"{self}: expected a number of gradients above 0", num_required, 1)

    def as_step(self, step: object) -> int:
        """Return a step to be set, or raise ConfigurationError."""
        return checked_integer(f"{self}: expected an integer as step", step, -LARGEST - 1)

    def _convert(self, given: Any) -> Any:
        """Return the gradient as it is added, or raise ValueMismatchError for its dtype."""
        return self._as_array(given)

    @abstractmethod
    def _check(self, gradient: GradientT, nonfinite: int | None) -> None:
        """Raise ValueMismatchError if the gradient does not fit; ``nonfinite`` as for ``offer``."""

    @abstractmethod
    def _add(self, gradient: GradientT, weight: float) -> Pieces[None]:
        """Return what adds the gradient to those held, and cannot be refused."""

    @abstractmethod
    def _reduce(self, total: Any) -> Pieces[ResultT]:
        """Return what makes of the gradients held what they amount to."""

    def held(self) -> tuple[tuple[int, float, list[int], int], list[np.ndarray]] | None:
        """Return the contents, when all was added, for ``hold``; None: the accumulator is empty.

        The arrays are its memory: not to be kept beyond the next call.
        """
        if (total := self._sum) is None:
            return None
        return (self._count, total.weight, list(total.shape), total.rows), total.arrays()

    def hold(self, count: int, weight: float, shape: Sequence[int], rows: int) -> list[np.ndarray]:
        """Hold what another one holds, instead of what is there.

        Args:
            count: Of gradients.
            weight: Sum of theirs.
            shape: Of the sum; of a sparse one that of a row.
            rows: Of a sparse one; of a dense one 0.

        Returns:
            Arrays to which what is in those of the other one is to be written.
        """
        self._sum = self._sum_kind(shape, self.dtype)
        self._sum.restore(weight, rows)
        self._count = count
        arrays: list[np.ndarray] = self._sum.arrays()
        return arrays

    def _dimension(self, dim: object) -> int | None:
        expected = f"{self}: expected dimensions of 0 or more, or None"
        return None if dim is None else checked_integer(expected, dim, 0)

    def _as_array(self, given: object) -> np.ndarray:
        """Return the values of a gradient; numbers of Python have no dtype, so they take ours."""
        array = self._plain(given, "an array as gradient")
        if not hasattr(given, "dtype") and array.dtype.kind in "iuf":
            with np.errstate(over="ignore"):  # it is found below
                made = array.astype(self.dtype)
            if (beyond := overflow(array, made)) is not None:
                raise self._refused(f"expected values in the range of {self.dtype}, got {beyond}")
            array = made
        if array.dtype.newbyteorder("=") != self.dtype:
            raise self._refused(f"expected a gradient of {self.dtype}, got {array.dtype}")
        return array

    def _plain(self, given: object, expected: str) -> np.ndarray:
        try:
            return plain_array(given)
        except (TypeError, ValueError, RuntimeError) as exc:
            # Rows of unequal length; a tensor on a device, or one that records its gradient.
            got = exc if isinstance(exc, HiddenValues) else f"{given!r:.80}"
            raise self._refused(f"expected {expected}, got {got}") from exc

    def _check_finite(self, values: np.ndarray, nonfinite: int | None) -> None:
        if not self.forbid_nonfinite:
            return
        bad = count_nonfinite(values) if nonfinite is None else nonfinite
        if bad:
            raise self._refused(f"expected finite values, got {bad} of {values.size} that are not")

    def _refused(self, message: str) -> ValueMismatchError:
        return ValueMismatchError(f"{self}: {message}")

    def __str__(self) -> str:
        return f'accumulator "{self.name}"'


class ConditionalAccumulator(Accumulator[np.ndarray, np.ndarray]):
    """Collects arrays of one shape, and gives their mean or their sum.

    Arguments as of ``Accumulator``. Where ``shape`` leaves something open, the first gradient
    of each step decides it for that step.
    """

    kind, _sum_kind = "dense", DenseSum

    def as_gradient(self, given: object) -> np.ndarray:
        """Return a gradient as an array, checked as far as it can be without those held.

        Raises:
            ValueMismatchError: Its dtype is another, or its shape does not fit the accumulator's.
        """
        gradient = self._as_array(given)
        self._check_shape(gradient, self.shape)
        return gradient

    def _check(self, gradient: np.ndarray, nonfinite: int | None) -> None:
        self._check_shape(gradient, self.shape if self._sum is None else self._sum.shape)
        self._check_finite(gradient, nonfinite)

    def _check_shape(self, gradient: np.ndarray, expected: Sequence[int | None] | None) -> None:
        if expected is not None and not fits(gradient.shape, expected):
            raise self._refused(f"shape mismatch: expected {expected}, got {gradient.shape}")

    def _add(self, gradient: np.ndarray, weight: float) -> Pieces[None]:
        self._sum = total = self._sum or DenseSum(gradient.shape, self.dtype)
        return total.adding(gradient, weight)

    def _reduce(self, total: DenseSum) -> Pieces[np.ndarray]:
        return total.making(self.reduction)


class Slices(Protocol):
    """A sparse gradient of any library."""

    @property
    def indices(self) -> Any: ...
    @property
    def values(self) -> Any: ...
    @property
    def dense_shape(self) -> Any: ...


class GivenSlices(NamedTuple):
    """A gradient as it came, its dtypes checked."""

    indices: np.ndarray  # int64
    values: np.ndarray
    dense_shape: tuple[int, ...] | None


class SparseConditionalAccumulator(Accumulator[GivenSlices, IndexedSlices]):
    """Collects rows of an array, and gives their means or their sums.

    Arguments as of ``Accumulator``; values may have more dimensions than ``shape``.

    Args:
        divisor: Of the mean of a row: "per_index", the weights of the gradients that contained the
            row, or "total", those of all.
    """

    kind, _sum_kind = "sparse", SparseSum
    _divisors = ("per_index", "total")

    def as_gradient(self, indices: Any, values: Any, dense_shape: Any = None) -> GivenSlices:
        """Return a gradient as arrays, checked as far as it can be without those held.

        Raises:
            ValueMismatchError: A dtype is another, the shapes do not fit each other or the
                accumulator's, or an index is out of range.
        """
        gradient = self._convert((indices, values, dense_shape))
        self._check_shapes(gradient, None)
        return gradient

    def _convert(self, given: Any) -> GivenSlices:
        indices, values, dense_shape = given
        return GivenSlices(
            self._as_indices(indices), self._as_array(values), self._as_dense_shape(dense_shape)
        )

    def _as_indices(self, given: object) -> np.ndarray:
        array = self._plain(given, "integers as indices")
        empty = not hasattr(given, "dtype") and array.size == 0  # no numbers: no dtype either
        if array.dtype.kind not in "iu" and not empty:
            raise self._refused(f"expected integers as indices, got {array.dtype}")
        return array.astype(np.int64)

    def _as_dense_shape(self, given: Any) -> tuple[int, ...] | None:
        if given is None:
            return None
        try:
            dims = [as_integer(dim) for dim in given]
        except TypeError:  # a scalar
            dims = [None]
        known = tuple(dim for dim in dims if dim is not None)
        if len(known) < len(dims):
            raise self._refused(f"expected integers as dense_shape, got {given!r:.80}")
        return known

    def _check(self, gradient: GivenSlices, nonfinite: int | None) -> None:
        self._check_shapes(gradient, None if self._sum is None else self._sum.shape)
        self._check_finite(gradient.values, nonfinite)

    def _check_shapes(self, gradient: GivenSlices, row_shape: tuple[int, ...] | None) -> None:
        indices, values, dense_shape = gradient
        if indices.ndim != 1:
            raise self._refused(f"expected a vector of indices, got shape {indices.shape}")
        if values.ndim == 0:
            raise self._refused("expected one row of values for each index, got a scalar")
        if len(values) != len(indices):
            raise self._refused(
                f"expected {len(indices)} rows of values, one for each index, got {len(values)}"
            )
        declared = self.shape or ()
        if dense_shape is not None:
            self._check_dimensions("dense_shape", dense_shape, declared, 0, " or more")
        self._check_range(indices)
        if row_shape is None:
            self._check_dimensions("values", values.shape, declared, 1, " or more")
        else:
            self._check_dimensions("values", values.shape, (None, *row_shape), 1)

    def _check_dimensions(
        self, what: str, shape: Sequence[int], expected: Sequence[int | None], first: int,
        more: str = "",
    ) -> None:  # fmt: skip
        """Compare dimensions from ``first`` on; ``more`` says that there may be others behind."""
        if len(shape) < len(expected) or (not more and len(shape) > len(expected)):
            raise self._refused(f"expected {what} of rank {len(expected)}{more}, got {len(shape)}")
        for i in range(first, len(expected)):
            if expected[i] is not None and shape[i] not in (expected[i], -1):
                raise self._refused(
                    f"expected dimension {i} of {what} to be {expected[i]}, got {shape[i]}"
                )

    def _check_range(self, indices: np.ndarray) -> None:
        rows = self._num_rows()
        outside = indices < 0 if rows is None else (indices < 0) | (indices >= rows)
        if outside.any():
            place = int(outside.argmax())
            limit = "" if rows is None else f" and below {rows}"
            raise self._refused(
                f"expected indices of 0 or more{limit}, got {indices[place]} at position {place}"
            )

    def _num_rows(self) -> int | None:
        return self.shape[0] if self.shape else None

    def _add(self, gradient: GivenSlices, weight: float) -> Pieces[None]:
        self._sum = total = self._sum or SparseSum(gradient.values.shape[1:], self.dtype)
        return total.adding(gradient.indices, gradient.values, weight)

    def _reduce(self, total: SparseSum) -> Pieces[IndexedSlices]:
        values = yield from total.making(self.reduction, per_index=self.divisor == "per_index")
        rows = self._num_rows()
        # The sum belongs to this take alone, and so do its indices.
        return IndexedSlices(values, total.indices, (-1 if rows is None else rows, *total.shape))


# What is said of an accumulator.


def other_parameters(first: DefineAccumulator, second: DefineAccumulator) -> ConfigurationError:
    """Return the error for two accumulators of one name."""
    names = [n for n in first.__struct_fields__ if getattr(first, n) != getattr(second, n)]
    expected, got = (
        ", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (first, second)
    )
    return ConfigurationError(
        f'accumulator "{first.name}": other parameters than at first: expected {expected}, '
        f"got {got}",
        hint="use another shared_name, or the same parameters",
    )


def rule_of(definition: DefineAccumulator) -> Accumulator[Any, Any]:
    """Return a rule of that kind, empty.

    Raises:
        ConfigurationError, RemoteProtocolError: It describes none.
    """
    kinds: dict[str, Any] = {
        cls.kind: cls for cls in (ConditionalAccumulator, SparseConditionalAccumulator)
    }
    if definition.kind not in kinds:
        raise RemoteProtocolError(
            f'accumulator "{definition.name}": expected kind "dense" or "sparse", got '
            f"{definition.kind!r}"
        )
    rule: Accumulator[Any, Any] = kinds[definition.kind](
        definition.dtype, definition.shape, name=definition.name,
        reduction_type=definition.reduction, divisor=definition.divisor,
        forbid_nonfinite=definition.forbid_nonfinite, max_staleness=definition.max_staleness,
    )  # fmt: skip
    return rule


def fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Say whether a shape is as expected where that is known."""
    return len(shape) == len(expected) and all(
        dim is None or dim == size for size, dim in zip(shape, expected, strict=True)
    )


def count_nonfinite(values: np.ndarray) -> int:
    """Return how many values are infinite or NaN."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))
