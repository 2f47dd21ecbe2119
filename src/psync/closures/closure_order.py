"""The queued closures, in the order in which they were scheduled.

Ids grow in the order of ``schedule``. A closure that comes back, or whose inputs were late, has
kept its place. Almost all come in order, so those that do take no heap.
"""

from __future__ import annotations

import heapq
from collections import deque

from psync.closures.closure import Closure


class ClosureOrder:
    """Closures that wait for nothing but a worker."""

    def __init__(self) -> None:
        self._queued: dict[int, Closure] = {}  # by id, in no order
        # The order. An id that is not queued any more is dropped when it comes to the head.
        self._fresh: deque[int] = deque()  # of closures that were queued when scheduled
        self._late: list[int] = []  # a heap: of those queued again, or late because of an input

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, closure: Closure) -> None:
        """Queue a closure whose id is above all that were added before."""
        self._queued[closure.id] = closure
        self._fresh.append(closure.id)

    def add_late(self, closure: Closure) -> None:
        """Queue a closure at its place, before those with higher ids."""
        self._queued[closure.id] = closure
        heapq.heappush(self._late, closure.id)

    def discard(self, closure: Closure) -> None:
        """Take a queued closure out, wherever it stands."""
        del self._queued[closure.id]
        if not self._queued:
            self._queued.clear()  # of its table, too, which is as large as the longest queue was
            self._fresh.clear()
            self._late.clear()

    def first(self) -> Closure:
        """Return the queued closure with the lowest id; there is one."""
        queued, fresh, late = self._queued, self._fresh, self._late
        while fresh and fresh[0] not in queued:
            fresh.popleft()
        while late and late[0] not in queued:
            heapq.heappop(late)
        if late and (not fresh or late[0] < fresh[0]):
            return queued[late[0]]
        return queued[fresh[0]]
