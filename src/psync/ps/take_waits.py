"""Requests that wait for takes of accumulators, and the connections over which they came.

Several requests may wait for one take: a client repeats it after a lost connection, and the ps may
not have noticed the loss. A take that no request waits for any more is reported, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from psync.errors import ConnectionLost
from psync.net.peer import Peer, Reply
from psync.ps.hosted_accumulators import TakeName
from psync.store.ledger import Client

_TAKES = "takes"  # in a peer's state: the takes that are waited for on its connection


class TakeWaits:
    """Who waits for takes on one ps.

    Args:
        task: Name of the ps, for messages.
        left: Told of takes of one client for which no request waits any more, though they have
            not been settled.
    """

    def __init__(self, task: str, left: Callable[[Client, list[TakeName]], None]) -> None:
        self._task = task
        self._left = left
        self._waiting: dict[TakeName, dict[asyncio.Future[Reply], Peer]] = {}

    def add(self, name: TakeName, peer: Peer) -> asyncio.Future[Reply]:
        """Let a request wait; return what gets its answer."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, {})[future] = peer
        if _TAKES not in peer.state:
            peer.state[_TAKES] = set()
            peer.on_closed.append(self._note_closed)
        peer.state[_TAKES].add(name)
        return future

    async def answer(self, name: TakeName, future: asyncio.Future[Reply]) -> Reply:
        """Return the answer when it is there.

        Cancellation: The request waits no longer.
        """
        try:
            return await future
        finally:
            self.end(name, future)

    def end(self, name: TakeName, future: asyncio.Future[Reply]) -> None:
        """Let a request wait no longer; one that has its answer does not."""
        self._end([(name, future)])

    def settle(self, name: TakeName, outcome: Reply | Exception) -> None:
        """Answer all requests that wait for a take."""
        for future, peer in self._waiting.pop(name, {}).items():
            peer.state[_TAKES].discard(name)
            settle(future, outcome)

    def settle_all(self, error: Exception) -> None:
        """Let nobody wait."""
        for name in list(self._waiting):
            self.settle(name, error)

    def _note_closed(self, peer: Peer) -> None:
        waits = [
            (name, future)
            for name in peer.state[_TAKES]
            for future, other in self._waiting[name].items()
            if other is peer
        ]
        error = ConnectionLost(f"{self._task}: {peer.task} has gone")
        for _, future in waits:
            settle(future, error)
        self._end(waits)

    def _end(self, waits: Iterable[tuple[TakeName, asyncio.Future[Reply]]]) -> None:
        left: dict[Client, list[TakeName]] = {}
        for name, future in waits:
            futures = self._waiting.get(name, {})
            peer = futures.pop(future, None)
            if peer is None:  # it has ended before
                continue
            if peer not in futures.values():
                peer.state[_TAKES].discard(name)
            if not futures:
                del self._waiting[name]
                left.setdefault(name.client, []).append(name)
        for client, names in left.items():  # together: those that leave get nothing
            self._left(client, names)


def settle(future: asyncio.Future[Reply], outcome: Reply | Exception) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if future.done():
        return
    if isinstance(outcome, Reply):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
        future.exception()
