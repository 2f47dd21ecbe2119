"""Partitioners: the number of shards of a variable, the rows of each, and their placement.

A partitioner is any callable ``(shape, dtype) -> list[int]`` that returns the number of partitions
per axis. As in TensorFlow, only axis 0 may be split. The three classes here are TensorFlow's.
``div_split`` is psync's only layout, called "div": shards hold consecutive rows, their row counts
differ by at most one, and the larger shards come first.

The placement classes at the end of the module choose a ps for each shard: alternately or by bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from psync.cluster import device_name
from psync.errors import PartitionError, check_fits
from psync.specs import as_integer, checked_integer, dtype_name, dtype_of

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Base class of partitioners; a subclass defines ``__call__``.

    Source: ``tf.distribute.experimental.partitioners.Partitioner``, whose ``__call__`` has a third
    parameter ``axis``, which is always 0.
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any) -> Sequence[int]:
        """Return the number of partitions per axis: all 1 except the first.

        Args:
            shape: Shape of the variable, with at least one axis.
            dtype: A numpy dtype.
        """


class _ByRows(Partitioner):
    """A rule that wants a number of shards, limited to the number of rows."""

    def __call__(self, shape: Sequence[int], dtype: object) -> list[int]:
        """Return the number of partitions per axis: all 1 except the first.

        Args:
            shape: Shape of the variable, with at least one axis.
            dtype: Any description of a dtype of psync, or a string dtype.

        Raises:
            PartitionError: The shape has no axis or is not fully known, or the dtype is unknown.
        """
        what, axes = type(self).__name__, tuple(shape)
        if not all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in axes):
            raise PartitionError(f"{what}: expected a fully known shape, got {axes}")
        if not axes:
            raise PartitionError(f"{what}: a scalar has no axis 0 to split")
        plain = tuple(int(n) for n in axes)
        first = self._num_shards(plain, dtype)
        return [max(1, min(first, plain[0])), *[1] * (len(plain) - 1)]

    @abstractmethod
    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        """Return the wanted number of shards."""


class FixedShardsPartitioner(_ByRows):
    """The same number of shards for every variable, or one per row if it has fewer rows.

    Args:
        num_shards: Number of shards, at least 1.

    Raises:
        ConfigurationError: ``num_shards`` is less than 1.

    Source: ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.
    """

    def __init__(self, num_shards: int) -> None:
        self._shards = _positive("FixedShardsPartitioner: num_shards", num_shards)

    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        return self._shards


class MinSizePartitioner(_ByRows):
    """One shard per ``min_shard_bytes`` of the variable, rounded up.

    Because the number is rounded up, as in TensorFlow, a shard may be up to half smaller than the
    "minimum". For example, 300 KiB with a minimum of 256 KiB become two shards of 150 KiB.

    Args:
        min_shard_bytes: Number of at least 1.
        max_shards: Largest number of shards of a variable, at least 1.
        bytes_per_string: Bytes counted for an element of a string dtype.

    Raises:
        ConfigurationError: An argument is less than 1.

    Source: ``tf.distribute.experimental.partitioners.MinSizePartitioner``.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("MinSizePartitioner: min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("MinSizePartitioner: max_shards", max_shards)
        self._bytes_per_string = _positive("MinSizePartitioner: bytes_per_string", bytes_per_string)

    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        nbytes = math.prod(shape) * _itemsize(dtype, self._bytes_per_string)
        return min(self._max_shards, -(-nbytes // self._min_shard_bytes))


class MaxSizePartitioner(_ByRows):
    """The smallest number of shards of at most ``max_shard_bytes`` each.

    A shard may be larger in two cases: when it is a single row, because rows are never split, and
    when ``max_shards`` limits the number of shards.

    Args:
        max_shard_bytes: Largest size of a shard, at least 1 byte.
        max_shards: Largest number of shards of a variable, at least 1; None: no limit. (TensorFlow
            uses 0 for no limit, which is an error here.)
        bytes_per_string: Bytes counted for an element of a string dtype.

    Raises:
        ConfigurationError: An argument is less than 1.

    Source: ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("MaxSizePartitioner: max_shard_bytes", max_shard_bytes)
        self._max_shards = (
            None if max_shards is None else _positive("MaxSizePartitioner: max_shards", max_shards)
        )
        self._bytes_per_string = _positive("MaxSizePartitioner: bytes_per_string", bytes_per_string)

    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        row_bytes = math.prod(shape[1:]) * _itemsize(dtype, self._bytes_per_string)
        if row_bytes == 0:
            return 1
        rows = max(1, self._max_shard_bytes // row_bytes)
        shards = -(-shape[0] // rows)
        return shards if self._max_shards is None else min(shards, self._max_shards)


def check_partitions(partitions: object, shape: Sequence[int], name: str) -> int:
    """Return the number of shards in the result of a partitioner.

    Args:
        partitions: Result of ``variable_partitioner``, unchecked.
        shape: Shape of the variable, with at least one axis.
        name: Name of the variable, for the message.

    Returns:
        The first entry, at least 1 and at most the number of rows.

    Raises:
        PartitionError: It is not a list with one positive number per axis, all 1 except the first.
    """
    counts: Any = partitions if isinstance(partitions, list | tuple) else ()
    fits = len(counts) == len(shape) > 0
    fits = fits and all(isinstance(p, Integral) and not isinstance(p, bool) for p in counts)
    check_fits(
        fits and counts[0] >= 1 and all(p == 1 for p in counts[1:]),
        f'variable "{name}" of shape {tuple(shape)}: expected variable_partitioner to return a '
        f"list of {len(shape)} whole numbers, the first at least 1 and all others 1",
        partitions, error=PartitionError,
    )  # fmt: skip
    return max(1, min(int(counts[0]), shape[0]))


def div_split(dim0: int, num_shards: int) -> list[tuple[int, int]]:
    """Return (offset, rows) of each shard of ``dim0`` rows, in order.

    The first ``dim0 % num_shards`` shards have one row more than the others. No shard is empty,
    since ``num_shards`` is a result of ``check_partitions``.
    """
    base, extra = divmod(dim0, num_shards)
    return [(i * base + min(i, extra), base + 1 if i < extra else base) for i in range(num_shards)]


def _itemsize(dtype: object, bytes_per_string: int) -> int:
    if dtype is str or dtype is bytes or (isinstance(dtype, np.dtype) and dtype.kind in "SUTO"):
        return bytes_per_string
    return dtype_of(dtype_name(dtype)).itemsize


def _positive(what: str, value: int) -> int:
    return checked_integer(f"{what}: expected a whole number above 0", value, 1)


_DEVICE = re.compile(r"/job:ps(?:/replica:0)?/task:([0-9]{1,7})(?:/device:CPU:0)?")


PACKED_BYTES = 1 << 20
"""So much is placed on ps 0 together: a step over it takes one message to the ps, and one back."""


class Placement(Protocol):
    """The rule that spreads shards over the ps tasks."""

    def place(self, nbytes: int) -> int:
        """Return the index of the ps for the next shard, which is ``nbytes`` large."""
        ...


class Placer:
    """Places the shards of one strategy and records the load of each ps.

    "round_robin" takes the next ps for each shard, regardless of size, so a variable of two shards
    uses both of two ps tasks. "packed" takes ps 0 as long as its shards are at most
    ``PACKED_BYTES`` together, then the one with the fewest bytes; ties go to the last.
    "least_bytes" takes the ps with the fewest bytes of variables; ties
    go to the first. Pinned and colocated variables count. Slots of optimizers do not, but they are
    created beside their variables with the same size, so they even out as well.

    Args:
        num_ps: Number of ps tasks, at least 1.
        placement: "round_robin", "least_bytes", "packed", or an object with ``place(nbytes) -> ps
            index``.

    Raises:
        ConfigurationError: The placement is none of these.

    Source: the round-robin placement of ``tf.distribute.ParameterServerStrategy`` (v2);
        ``tf.contrib.training.GreedyLoadBalancingStrategy`` with ``byte_size_load_fn``.
    """

    def __init__(self, num_ps: int, placement: str | Placement = "round_robin") -> None:
        self._num_ps = num_ps
        self._loads = loads = [0] * num_ps  # bytes of variables
        self._choose: Any  # the ps of the next shard, by its size
        if placement == "round_robin":
            turns = itertools.cycle(range(num_ps))
            self._choose = lambda nbytes: next(turns)
        elif placement == "least_bytes":
            self._choose = lambda nbytes: loads.index(min(loads))
        elif placement == "packed":
            self._choose = lambda nbytes: (
                0
                if loads[0] + nbytes <= PACKED_BYTES
                else min(range(num_ps), key=lambda ps: (loads[ps], -ps))
            )
        else:
            self._choose = getattr(placement, "place", None)
            what = "'round_robin', 'least_bytes', 'packed' or an object with place(nbytes)"
            what += " -> ps index"
            fits = callable(self._choose) and not isinstance(placement, str)
            check_fits(fits, f"placement: expected {what}", placement)

    def place(self, variable: str, nbytes: int, ps: int | None = None) -> int:
        """Return the ps of the next shard.

        Args:
            variable: Name of the variable, for messages.
            nbytes: Size of the shard.
            ps: The ps, if it is given: then the placement does not advance.

        Raises:
            ConfigurationError: The placement did not return the index of a ps.
        """
        ps = self._choose(nbytes) if ps is None else ps
        expected = f"expected the placement to return the index of a ps, 0 to {self._num_ps - 1}"
        check_fits(self._is_ps(ps), f'variable "{variable}": {expected}', ps)
        self._loads[ps] += nbytes
        return int(ps)

    def note(self, ps: int, nbytes: int) -> None:
        """Count a shard that is colocated with another one and not placed separately."""
        self._loads[ps] += nbytes

    def pinned(self, where: int | str) -> int:
        """Return the index of a ps.

        Args:
            where: Index or device of the ps: ``/job:ps/replica:0/task:1/device:CPU:0`` or, for
                short, ``/job:ps/task:1``.

        Raises:
            ConfigurationError: There is no such ps.
        """
        match = _DEVICE.fullmatch(where) if isinstance(where, str) else None
        ps: Any = int(match[1]) if match else where
        such_as = f"{device_name('ps', 0)!r} or '/job:ps/task:0'"
        expected = f"pinned: expected a ps, 0 to {self._num_ps - 1}, or its device, such as"
        check_fits(self._is_ps(ps), f"{expected} {such_as}", where)
        return int(ps)

    def _is_ps(self, ps: object) -> bool:
        index = as_integer(ps)
        return index is not None and 0 <= index < self._num_ps
