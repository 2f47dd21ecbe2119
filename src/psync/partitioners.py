"""Partitioners: the number of shards of a variable, the rows of each, and their placement.

A partitioner is any callable ``(shape, dtype) -> list[int]`` that returns the number of partitions
per axis. As in TensorFlow only axis 0 may be cut; the three classes here are TensorFlow's.
``div_split`` is the one layout that psync has, called "div": shards of consecutive rows whose
numbers differ by at most one, the larger ones first.

The placement at the end of the module chooses a ps for each shard: in turns, or by bytes.
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
from psync.errors import ConfigurationError, PartitionError
from psync.specs import as_integer, checked_integer, dtype_name, dtype_of

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Base of rules for the number of shards; a rule of your own defines ``__call__``.

    Source: ``tf.distribute.experimental.partitioners.Partitioner``; there, ``__call__`` has a third
    parameter ``axis``, which is always 0.
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any) -> Sequence[int]:
        """Return the number of partitions per axis: all 1 but the first.

        Args:
            shape: Of the variable, at least one axis.
            dtype: A numpy dtype.
        """


class _ByRows(Partitioner):
    """A rule that says how many shards it wants, and gets no more than there are rows."""

    def __call__(self, shape: Sequence[int], dtype: object) -> list[int]:
        """Return the number of partitions per axis: all 1 but the first.

        Args:
            shape: Of the variable, at least one axis.
            dtype: Anything that stands for a dtype of psync, or a string dtype.

        Raises:
            PartitionError: If the shape has no axis or is not wholly known, or there is no
                such dtype.
        """
        plain = _checked_shape(type(self).__name__, shape)
        first = self._num_shards(plain, dtype)
        return [max(1, min(first, plain[0])), *[1] * (len(plain) - 1)]

    @abstractmethod
    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        """Return the wanted number of shards."""


class FixedShardsPartitioner(_ByRows):
    """The same number of shards for every variable, or one per row if it has fewer rows.

    Args:
        num_shards: At least 1.

    Raises:
        ConfigurationError: If it is less.

    Source: ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.
    """

    def __init__(self, num_shards: int) -> None:
        self._shards = _positive("FixedShardsPartitioner: num_shards", num_shards)

    def _num_shards(self, shape: tuple[int, ...], dtype: object) -> int:
        return self._shards


class MinSizePartitioner(_ByRows):
    """As many shards as ``min_shard_bytes`` goes into the variable, rounded up.

    Rounding up is TensorFlow's: a shard may be smaller than the "minimum", but not by more than
    half: 300 KiB with a minimum of 256 KiB become two shards of 150 KiB.

    Args:
        min_shard_bytes: At least 1.
        max_shards: Most shards of a variable, at least 1.
        bytes_per_string: Size counted for an element of a string dtype.

    Raises:
        ConfigurationError: If an argument is less than 1.

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
    """As few shards as possible of at most ``max_shard_bytes`` each.

    A row is never cut, so a shard of one row may be larger; nor may there be more than
    ``max_shards``, which then are larger too.

    Args:
        max_shard_bytes: At least 1.
        max_shards: Most shards of a variable, at least 1; None: no limit. (TensorFlow takes 0
            for no limit; here it is an error.)
        bytes_per_string: Size counted for an element of a string dtype.

    Raises:
        ConfigurationError: If an argument is less than 1.

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
    """Return the number of shards that a partitioner's answer means.

    Args:
        partitions: What ``variable_partitioner`` returned: anything.
        shape: Of the variable, at least one axis.
        name: Of the variable, for the message.

    Returns:
        The first entry, but no more than there are rows and at least 1.

    Raises:
        PartitionError: If it is not a list with one positive number per axis, all but the first 1.
    """
    if (
        not isinstance(partitions, (list, tuple))
        or len(partitions) != len(shape)
        or not partitions
        or not all(isinstance(p, Integral) and not isinstance(p, bool) for p in partitions)
        or partitions[0] < 1
        or any(p != 1 for p in partitions[1:])
    ):
        raise PartitionError(
            f'variable "{name}" of shape {tuple(shape)}: expected variable_partitioner to return '
            f"a list of {len(shape)} whole numbers, the first at least 1 and all others 1, "
            f"got {partitions!r}"
        )
    return max(1, min(int(partitions[0]), shape[0]))


def div_split(dim0: int, num_shards: int) -> list[tuple[int, int]]:
    """Return (offset, rows) of each shard of ``dim0`` rows, in order.

    The first ``dim0 % num_shards`` shards have one row more than the others.

    Raises:
        PartitionError: If a shard would be empty (one empty shard of an empty variable is legal).
    """
    if not 1 <= num_shards <= max(1, dim0):
        raise PartitionError(
            f"{dim0} rows cannot be split into {num_shards} shards: expected 1 to {max(1, dim0)}"
        )
    base, extra = divmod(dim0, num_shards)
    return [(i * base + min(i, extra), base + 1 if i < extra else base) for i in range(num_shards)]


def _checked_shape(what: str, shape: Sequence[int]) -> tuple[int, ...]:
    axes = tuple(shape)
    if not all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in axes):
        raise PartitionError(f"{what}: expected a fully known shape, got {axes}")
    if not axes:
        raise PartitionError(f"{what}: a scalar has no axis 0 to split")
    return tuple(int(n) for n in axes)


def _itemsize(dtype: object, bytes_per_string: int) -> int:
    if dtype is str or dtype is bytes or (isinstance(dtype, np.dtype) and dtype.kind in "SUTO"):
        return bytes_per_string
    return dtype_of(dtype_name(dtype)).itemsize


def _positive(what: str, value: int) -> int:
    return checked_integer(f"{what}: expected a whole number above 0", value, 1)


_DEVICE = re.compile(r"/job:ps(?:/replica:0)?/task:([0-9]{1,7})(?:/device:CPU:0)?")


class Placement(Protocol):
    """The rule that spreads shards over the ps tasks."""

    def place(self, nbytes: int) -> int:
        """Return the index of the ps for the next shard, which is ``nbytes`` large."""
        ...


class Pinned:
    """Everything on one ps; no place of any other placement is taken.

    Args:
        ps: Its index.
    """

    def __init__(self, ps: int) -> None:
        self._ps = ps

    def place(self, nbytes: int) -> int:
        """Return the index of that ps."""
        return self._ps


class RoundRobin:
    """One shard after the other, whatever its size.

    Each shard of a variable takes a place of its own, so a variable of two shards uses both
    of two ps tasks.

    Args:
        num_ps: Number of ps tasks, at least 1.

    Raises:
        ConfigurationError: If there is none.

    Source: the round-robin placement of ``tf.distribute.ParameterServerStrategy`` (v2).
    """

    def __init__(self, num_ps: int) -> None:
        self._turns = itertools.cycle(range(num_ps))

    def place(self, nbytes: int) -> int:
        """Return the index of the ps for the next shard; its size does not matter."""
        return next(self._turns)


class LeastBytes:
    """Each shard on the ps that holds the fewest bytes of variables so far; of equals, the first.

    What is pinned, or lies beside another variable, counts. Slots of optimizers do not: they come
    into being later, beside their variables, and are as large as these, so they even out too.

    Args:
        loads: Bytes of variables on each ps, kept by the caller: ``Placer`` does.

    Source: ``tf.contrib.training.GreedyLoadBalancingStrategy`` with ``byte_size_load_fn``.
    """

    def __init__(self, loads: Sequence[int]) -> None:
        self._loads = loads

    def place(self, nbytes: int) -> int:
        """Return the index of the ps for the next shard."""
        return self._loads.index(min(self._loads))


class Placer:
    """Places the shards of one strategy, and knows how much lies where.

    Args:
        num_ps: Number of ps tasks, at least 1.
        placement: "round_robin", "least_bytes", or an object with ``place(nbytes) -> ps index``.

    Raises:
        ConfigurationError: If it is none of these, or there is no ps.
    """

    def __init__(self, num_ps: int, placement: str | Placement = "round_robin") -> None:
        self._num_ps = num_ps
        self._loads = [0] * num_ps  # bytes of variables
        self._placement = self._made(placement)

    def place(self, variable: str, nbytes: int, placement: Placement | None = None) -> int:
        """Return the ps of the next shard.

        Args:
            variable: Its name, for messages.
            nbytes: Of the shard.
            placement: That is asked instead of the strategy's, which then counts no turn.

        Raises:
            ConfigurationError: The answer is not the index of a ps.
        """
        ps = (placement or self._placement).place(nbytes)
        if not self._is_ps(ps):
            raise ConfigurationError(
                f'variable "{variable}": expected the placement to return the index of a ps, '
                f"0 to {self._num_ps - 1}, got {ps!r}"
            )
        self._loads[ps] += nbytes
        return int(ps)

    def note(self, ps: int, nbytes: int) -> None:
        """Count a shard that lies beside another one, without a placement of its own."""
        self._loads[ps] += nbytes

    def pinned(self, where: int | str) -> Pinned:
        """Return the placement that puts everything on one ps.

        Args:
            where: Its index or device, ``/job:ps/replica:0/task:1/device:CPU:0`` or, for short,
                ``/job:ps/task:1``.

        Raises:
            ConfigurationError: There is no such ps.
        """
        match = _DEVICE.fullmatch(where) if isinstance(where, str) else None
        ps: Any = int(match[1]) if match else where
        if not self._is_ps(ps):
            raise ConfigurationError(
                f"pinned: expected a ps, 0 to {self._num_ps - 1}, or its device, such as "
                f"{device_name('ps', 0)!r} or '/job:ps/task:0', got {where!r}"
            )
        return Pinned(int(ps))

    def _made(self, placement: str | Placement) -> Placement:
        if placement == "round_robin":
            return RoundRobin(self._num_ps)
        if placement == "least_bytes":
            return LeastBytes(self._loads)
        if isinstance(placement, str) or not callable(getattr(placement, "place", None)):
            raise ConfigurationError(
                "placement: expected 'round_robin', 'least_bytes' or an object with "
                f"place(nbytes) -> ps index, got {placement!r}"
            )
        return placement

    def _is_ps(self, ps: object) -> bool:
        index = as_integer(ps)
        return index is not None and 0 <= index < self._num_ps
