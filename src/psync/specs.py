"""Specs of variables and their shards: names, shapes, dtypes, offsets.

Frozen values that travel between tasks; no behaviour beyond validation.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from psync.errors import ConfigurationError, PartitionError, PsyncError

T = TypeVar("T")

DTYPE_NAMES = (
    "float16", "float32", "float64", "bfloat16",
    "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
    "bool",
)  # fmt: skip
"""The dtypes of variables, by name: what the wire and checkpoints carry."""


STEP_BITS = 44
"""The number of an optimizer's pushes is marked, above these bits, with its epoch: how often the
number was set, as from a checkpoint. A number of an older epoch says less, however large it is."""


def count_of(step: int) -> int:
    """Return a number without its mark."""
    return step & (1 << STEP_BITS) - 1


def marked_after(step: int, count: int) -> int:
    """Return a number that was set when ``step`` was the newest one, marked."""
    return ((step >> STEP_BITS) + 1 << STEP_BITS) + count


LARGEST = (1 << 63) - 1
"""What an int64 holds."""


def as_integer(value: object) -> int | None:
    """Return the value of an int64 scalar of Python, numpy or the like; None for all else."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # any object: it decides
    except TypeError:
        return None
    return number if -LARGEST - 1 <= number <= LARGEST else None


def checked_integer(
    expected: str, value: object, lowest: int, highest: int = LARGEST, *, hint: str | None = None
) -> int:
    """Return a whole number within bounds, both included.

    Raises:
        ConfigurationError: It is not one; the message is ``expected``, then the actual value.
    """
    number = as_integer(value)
    if number is None or not lowest <= number <= highest:
        raise ConfigurationError(f"{expected}, got {value!r}", hint=hint)
    return number


def checked_kind(
    expected: str,
    value: object,
    kind: type[T],
    *,
    hint: str | None = None,
    error: type[PsyncError] = ConfigurationError,
) -> T:
    """Return a value of one class.

    Raises:
        PsyncError: The value is of another class; ``error`` is raised with ``expected`` and the
            name of that class.
    """
    if not isinstance(value, kind):
        raise error(f"{expected}, got {type(value).__name__}", hint=hint)
    return value


def as_number(what: str, value: object) -> float:
    """Return a finite real number as a Python int or float.

    Raises:
        ConfigurationError: ``value`` is not one; the message begins with ``what``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigurationError(f"{what}: expected a number, got {shortened(value)}")
    try:
        number = int(value) if isinstance(value, Integral) else float(value)
        finite = math.isfinite(number)
    except OverflowError:  # an int or a fraction beyond the range of floats
        finite = False
    if not finite:
        raise ConfigurationError(f"{what}: expected a finite number, got {shortened(value)}")
    return number


def shortened(value: object) -> str:
    """Return ``repr(value)``, at most 200 characters of it, for messages."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def some_of(names: Sequence[str], most: int) -> list[str]:
    """Return the first few names, and how many more there are."""
    more = len(names) - most
    return [*names[:most], f"and {more} more"] if more > 0 else list(names)


class HiddenValues(TypeError):
    """A masked array has hidden values."""


def plain_array(value: Any) -> np.ndarray:
    """Return ``np.asarray(value)``; masked arrays with hidden values are refused.

    Raises:
        HiddenValues: A mask hides some values.
        TypeError, ValueError: numpy refuses the value.
    """
    check_not_masked(value)
    return np.asarray(value)


def check_not_masked(value: object) -> None:
    """Refuse an array whose mask hides values; a mask that hides none is accepted.

    Raises:
        HiddenValues: A mask hides values, in the array or in one of a list or dict.
    """
    if "numpy.ma" not in sys.modules:  # there are none
        return
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            if not isinstance(each, int | float):
                check_not_masked(each)
    elif isinstance(value, np.ma.MaskedArray) and (hidden := np.count_nonzero(value.mask)):
        raise HiddenValues(
            f"a masked array, whose mask hides {hidden} of {value.size} values: decide what they "
            "are, as by value.filled(0), or leave them out, as by value.compressed()"
        )


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype called ``name``, little endian.

    Raises:
        PartitionError: If psync has no variables of that dtype.
    """
    if name not in DTYPE_NAMES:
        raise PartitionError(
            f"dtype {name!r} is not supported", hint=f"use one of {', '.join(DTYPE_NAMES)}"
        )
    if name == "bfloat16":
        import ml_dtypes  # here: most programs need none of it

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def dtype_name(dtype: object) -> str:
    """Return the supported name of ``dtype`` (anything that ``numpy.dtype`` takes, or a name).

    Raises:
        PartitionError: If psync has no variables of that dtype.
    """
    if isinstance(dtype, str) and dtype in DTYPE_NAMES:
        return dtype
    try:
        name = np.dtype(dtype).name  # type: ignore[call-overload]  # any object: numpy decides
    except TypeError as exc:
        raise PartitionError(
            f"expected a dtype, got {dtype!r}", hint=f"use one of {', '.join(DTYPE_NAMES)}"
        ) from exc
    dtype_of(name)  # is it supported?
    return str(name)


class Outcome(enum.Enum):
    """The outcome of a push."""

    ACCEPTED = "accepted"  # applied
    STALE = "stale"  # older than the step: not applied
    DUPLICATE = "duplicate"  # applied before, by another run of the same closure
    ROLLED_BACK = "rolled_back"  # undone: the cluster went back to a checkpoint


class VariableSynchronization(enum.Enum):
    """The time at which the copies of a variable are synchronized."""

    AUTO = "auto"  # ON_WRITE
    NONE = "none"  # not possible
    ON_WRITE = "on_write"  # there is one copy, on ps tasks
    ON_READ = "on_read"  # each worker has its own; a read by the program makes one of them


class VariableAggregation(enum.Enum):
    """The way in which values of several replicas are combined."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One piece of a variable, living on one ps.

    Rows ``offset`` to ``offset + shape[0]`` of the variable; a variable that is not
    partitioned has one shard with offset 0 and the variable's own shape.
    """

    variable: str  # name of the variable, unique in its strategy
    variable_id: int  # number of the variable in its strategy, from 0
    index: int  # number of the shard in the variable, from 0
    offset: int  # first row (axis 0) of the variable that this shard holds
    shape: tuple[int, ...]  # of the shard
    dtype: str  # one of DTYPE_NAMES
    ps: int  # index of the ps task that holds it

    @property
    def key(self) -> tuple[int, int]:
        """What the wire and the store call this shard: (variable id, shard index)."""
        return (self.variable_id, self.index)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        return f'"{self.variable}/part_{self.index}"'


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A logical array of the user and where its shards live.

    Invariant: ``shards`` are in order of their offset and cover axis 0 exactly once.
    """

    name: str
    variable_id: int
    shape: tuple[int, ...]
    dtype: str  # one of DTYPE_NAMES
    trainable: bool
    shards: tuple[ShardSpec, ...]
    declared_at: str  # "file:line" of the declaration, for messages
    key: tuple[int, int, int, str] = field(init=False, repr=False, compare=False)
    """Its id, for which of the variable's shards it stands, first and how many, and the dtype."""

    def __post_init__(self) -> None:
        # A shard that is asked for as a variable of its own bears the whole variable's id.
        first = self.shards[0].index if self.shards else 0
        key = self.variable_id, first, len(self.shards), self.dtype
        object.__setattr__(self, "key", key)

    @property
    def nbytes(self) -> int:
        """Size of the whole variable in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def with_dtype(self, dtype: str) -> VariableSpec:
        """Return the same variable with another dtype."""
        if dtype == self.dtype:
            return self
        shards = tuple(replace(shard, dtype=dtype) for shard in self.shards)
        return replace(self, dtype=dtype, shards=shards)
