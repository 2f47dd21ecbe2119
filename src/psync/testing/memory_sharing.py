"""The side channels of connections in memory: what ``SideChannel`` is between processes."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from psync.net.shared.doors import SideChannel
from psync.net.shared.regions import Make, Region, address_of

REFUSED = 0.02
"""How often a region cannot be given, as if a queue were full."""


class HeapRegion(Region):
    """A region that is in this process only.

    Attributes:
        heap: Its memory.
    """

    heap: bytearray


class Heap(np.ndarray):
    """A region as its owner sees it; no other process can.

    Others see the same memory, which is there for as long as somebody does; the region is gone with
    its owner's view of it, as between processes.
    """

    region: HeapRegion


def make_heap(number: int, nbytes: int) -> Heap:
    """Make a region for tasks of one process."""
    memory = bytearray(nbytes)
    heap = np.frombuffer(memory, np.uint8).view(Heap)
    heap.region = HeapRegion(number, nbytes)
    heap.region.heap = memory
    heap.region.address = address_of(heap.data)
    return heap


class MemoryChannel(SideChannel):
    """One end of a side channel; see ``SideChannel``.

    Args:
        random: Draws which regions cannot be given.
        seen: Counts what has happened.
    """

    peer: MemoryChannel  # the other end

    def __init__(self, random: random.Random, seen: Counter[str]) -> None:
        self._seen = seen
        self.make: Make = make_heap
        self._random = random
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._ended = False
        self._then: Callable[[], object] | None = None

    def give(self, region: Region) -> bool:
        """Let the peer see a region."""
        heap = region.heap if isinstance(region, HeapRegion) else None
        if heap is None or self.peer._ended or self._random.random() < REFUSED:
            self._seen["memory cannot be lent"] += 1
            return False
        self._seen["memory is lent"] += 1
        self.peer._queue.append((region.number, memoryview(heap).toreadonly()))
        return True

    def take(self) -> Iterator[tuple[int, memoryview]]:
        """Return the regions that the peer has given."""
        while self._queue:
            yield self._queue.popleft()

    def end(self) -> None:
        """This side reads nothing of the peer's any more; also called when it was killed."""
        if not self._ended:
            self._ended = True
            self._queue.clear()
            self.peer._look()

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the other side reads nothing any more."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        self._then = lambda: loop.call_soon(then, context=context)
        self._seen["a connection is lost over which something is lent"] += 1
        if not self.peer._ended:
            self._seen["what was lent is read after the connection has been lost"] += 1
        self._look()

    def look_no_more(self) -> None:
        """See ``SideChannel``."""
        self._then = None

    def close(self) -> None:
        """Close this end."""
        self._then = None
        self.end()

    def _look(self) -> None:
        then = self._then
        if self.peer._ended and then is not None:
            self._then = None
            then()


def channels(random: random.Random, seen: Counter[str]) -> tuple[MemoryChannel, MemoryChannel]:
    """Return both ends of a side channel."""
    ends = MemoryChannel(random, seen), MemoryChannel(random, seen)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends
