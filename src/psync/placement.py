"""Which ps holds which shard.

A placement is an object with ``place(nbytes) -> ps index``, asked once per shard in the
order of declaration; all that it may use are the sizes so far, so that the same program places
its variables in the same way every time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol

from psync.cluster import device_name
from psync.errors import ConfigurationError

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
        if num_ps < 1:
            raise ConfigurationError(
                f"expected at least one ps task to place variables on, got {num_ps}"
            )
        self._num_ps = num_ps
        self._next = 0

    def place(self, nbytes: int) -> int:
        """Return the index of the ps for the next shard; its size does not matter."""
        index = self._next
        self._next = (index + 1) % self._num_ps
        return index


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
        """Count a shard that went beside another one: nobody was asked."""
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

    def _is_ps(self, ps: Any) -> bool:
        return isinstance(ps, Integral) and not isinstance(ps, bool) and 0 <= ps < self._num_ps  # type: ignore[operator]
