"""Numbers of closures on ps tasks, and which of them are final.

A closure that may come again after it has ended, that of a data shard, keeps the number of its
first run, so that ps tasks know its calls again. The upper bits of the number count its runs: what
a run that has ended still sends is refused, and its next run is not::

    number = run << RUN_SHIFT | id of the first run's closure

The number of every other closure is its id.

A call of a closure has an ordinal, from 0. If a call updates many shards, one ps may receive
several messages, so the ordinal of a message also holds its number among these::

    ordinal of the message = ordinal of the call << PART_BITS | number of the message
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from psync.errors import RemoteProtocolError
from psync.wire.tensors import array_from_bytes, to_bytes_view

Kept = list[tuple[int, int]]
"""Closures that may come again: (id of the first run, the lowest run that is not final)."""

RUN_SHIFT = 48
"""At 100 000 closures a second their ids fill 48 bits in 89 years."""

FIRST = (1 << RUN_SHIFT) - 1
"""``number & FIRST`` is ``first_of(number)``, where each call counts."""

MAX_RUN = (1 << 15) - 1
"""Later runs have this number, too: then late updates of the run before are not refused."""

PART_BITS = 16
"""One ps receives fewer messages of a call than these bits can number."""


def numbered(first: int, run: int) -> int:
    """Return the number of a run, counted from 0; ``first`` is the id of the first one."""
    return min(run, MAX_RUN) << RUN_SHIFT | first


def first_of(number: int) -> int:
    """Return the id of the first run, under which calls are remembered."""
    return number & FIRST


def call_of(ordinal: int) -> int:
    """Return the ordinal of the call that a message belongs to."""
    return ordinal >> PART_BITS


def pack_kept(kept: Kept) -> list[memoryview]:
    """Return the segments of a message that tells which closures are kept: one, or none."""
    return [to_bytes_view(np.array(kept, np.int64))] if kept else []


def unpack_kept(segments: Sequence[memoryview]) -> Kept:
    """Return what ``pack_kept`` packed.

    Raises:
        RemoteProtocolError: It did not pack this.
    """
    data = b"".join(segments)
    if len(data) % 16:
        raise RemoteProtocolError(
            f"closures that are kept: expected 16 bytes for each, got {len(data)} bytes"
        )
    return list(map(tuple, array_from_bytes(data, (len(data) // 16, 2), "int64").tolist()))


class Finality:
    """Which closures are final, as the coordinator has said last.

    Attributes:
        below: Closures whose first run has a smaller id are final, unless they are kept.
        kept: Of those that may come again, by first run: the lowest run that is not final.
    """

    __slots__ = ("below", "kept")

    def __init__(self, below: int = 0, kept: Iterable[tuple[int, int]] = ()) -> None:
        self.below = below
        self.kept = dict(kept)

    def update(self, below: int, kept: Iterable[tuple[int, int]]) -> bool:
        """Take note of news; return False if they are older than what is known."""
        if below < self.below:
            return False
        self.below, self.kept = below, dict(kept)
        return True

    def is_final(self, number: int) -> bool:
        """Return whether updates of this run come too late."""
        if number < self.below:  # of a first run, as most are
            return number not in self.kept or self.kept[number] > 0
        first = number & FIRST
        return first < self.below and number >> RUN_SHIFT < self.kept.get(first, MAX_RUN + 1)

    def is_over(self, first: int) -> bool:
        """Return whether no run will come any more, so that its calls need not be remembered."""
        return first < self.below and first not in self.kept

    def listed(self) -> list[tuple[int, int]]:
        """Return what is kept, in order."""
        return sorted(self.kept.items())
