"""Which ps holds which shard.

Layer: L1. Imports: errors.

A placement is an object with ``place(nbytes) -> ps index``, asked once per shard in the
order of declaration; all that it may use are the sizes so far, so that the same program places
its variables in the same way every time.
"""

from __future__ import annotations

from typing import Protocol

from psync.errors import ConfigurationError


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
