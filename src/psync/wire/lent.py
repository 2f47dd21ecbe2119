"""Bodies that are lent: they lie in memory of the sender's that the receiver can read.

Instead of its bytes, a frame has the extents of such a body. They are found by the connection's
``Borrow``, and copied here to where an ordinary body would have been read, unless the receiver
keeps them as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

EXTENT = struct.Struct("<QQQ")
EXTENT_BYTES = EXTENT.size

MAX_EXTENTS = 0xFFFF
"""Of one body: the prefix has two bytes for their number."""

LENT_ABOVE_BYTES = 64 << 10
"""A smaller body is on the wire: a system call costs more than its bytes."""

COPY_BYTES = 4 << 20
"""Copied in one turn of the loop: less than a millisecond."""


class Extent(NamedTuple):
    """A part of a body that is lent."""

    region: int  # of the sender's memory
    offset: int
    nbytes: int


class Borrowed(Protocol):
    """A body that the peer has lent.

    Attributes:
        views: Its extents, read-only.
        is_kept: Whether somebody reads them where they are.
    """

    views: Sequence[memoryview]
    is_kept: bool

    @property
    def may_keep(self) -> bool:
        """Whether it may be kept for as long as somebody likes: not too much is."""

    def keep(self) -> list[memoryview]:
        """Return ``views``; the body is given back when nobody sees any of them any more."""

    def give_back(self) -> None:
        """It is not needed any more."""


Borrow = Callable[[Sequence[Extent]], Borrowed]
"""Finds a body that is lent. Raises RemoteProtocolError if there is no such memory."""


def copies(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> Iterator[int]:
    """Copy ``sources`` to ``targets``, which have as many bytes; yield after each COPY_BYTES."""
    done, at_once = 0, COPY_BYTES
    onto = iter(targets)
    target, at = memoryview(b""), 0
    for source in sources:
        begin, size = 0, len(source)
        while begin < size:
            while at == len(target):
                target, at = next(onto), 0
            count = min(size - begin, len(target) - at, at_once - done)
            # Of small sources there are many, and to cut them takes as long as to copy them.
            part = source if count == size else source[begin : begin + count]
            target[at : at + count] = part
            begin, at, done = begin + count, at + count, done + count
            if done == at_once:
                yield done
                done = 0
