"""Shard locks on a ps: granted in order of arrival, ended by release, lost connection or lease.

One object serves one coordinator, with its store; a newer one gets another.

    message       then
    LockShards    answered when no update of the shards is under way and no other lock is in the
                  way; from then on updates of these shards wait, except the holder's
    RenewLock     its lease starts again
    UnlockShards  it ends; the next claim is granted
    connection    every lock that was asked for over it ends when it is lost
    lease         a lock that is not renewed ends

A request under a lock that has ended fails with LockLost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from psync.errors import ClosedError, LockLost, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.store.ledger import Client
from psync.store.locks import Claim, LockTable
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message
from psync.wire.messages import Done, LockShards, RenewLock, UnlockShards

logger = logging.getLogger(__name__)

MAX_LEASE_S = 60.0
"""Longer leases are refused: so long everybody might wait for a holder that is stuck."""

Holder = tuple[str, int, int]
"""Task, incarnation, number of the lock."""


@dataclass(slots=True, eq=False)
class _Lock:
    """One that is held or asked for."""

    peer: Connection  # with whose connection it ends
    claim: Claim
    lease_s: float
    timer: asyncio.TimerHandle | None = None  # once it is held


class PsLocks:
    """The locks on one ps under one coordinator.

    Args:
        task: Name of the ps.
        store: Its shards.
    """

    def __init__(self, task: str, store: ShardStore) -> None:
        self.taken = self.expired = 0
        self._task = task
        self._store = store
        self.table = LockTable()
        self._locks: dict[Holder, _Lock] = {}
        self._turns: dict[Claim, asyncio.Future[None]] = {}  # of those who wait
        self._peers: set[Connection] = set()  # whose end is heard of
        self._closed = False

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            LockShards: Handler(self._lock),
            UnlockShards: Handler(self._unlock),
            RenewLock: Handler(self._renew),
        }

    def statistics(self) -> dict[str, int]:
        """Return counters."""
        return {"held": len(self._locks), "taken": self.taken, "expired": self.expired}

    def describe(self) -> list[str]:
        """Say who holds which lock, and who waits; for reports."""
        lines = [
            f"lock {number} of {task} ({incarnation}): "
            f"{'held' if lock.claim.held else 'waits for its turn'}, {len(lock.claim.keys)} shards"
            for (task, incarnation, number), lock in self._locks.items()
        ]
        if self._turns:
            lines.append(f"{len(self._turns)} locks and updates wait for a lock to end")
        return lines

    def close(self) -> None:
        """End all locks; there are no new ones."""
        self._closed = True
        for holder in list(self._locks):
            self._drop(holder)
        for peer in self._peers:  # connections may outlive this, and what it holds
            peer.on_closed.remove(self._connection_lost)
        self._peers.clear()

    # For updates, and for who speaks under a lock.

    def claim(self, keys: Iterable[Key]) -> Claim:
        """Queue for the turn of an update; give it back with ``end``, whatever happens."""
        return self.table.claim(keys, exclusive=False)

    async def turn(self, claim: Claim) -> None:
        """Wait until a claim is held.

        Raises:
            LockLost: A lock that is waited for was given up.

        Cancellation: Safe; the claim is still to be ended.
        """
        if not claim.held:
            turn = self._turns[claim] = asyncio.get_running_loop().create_future()
            try:
                await turn
            finally:
                self._turns.pop(claim, None)

    def end(self, claim: Claim) -> None:
        """Give up a claim, held or not, and let others have their turn."""
        turn = self._turns.pop(claim, None)
        if turn is not None and not turn.done():
            turn.set_exception(LockLost(f"{self._task}: a lock was cancelled while it waited"))
        for granted in self.table.end(claim):
            turn = self._turns.get(granted)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def check(self, client: Client, number: int, keys: Iterable[Key]) -> None:
        """Check that a client holds the lock under which it speaks.

        Raises:
            LockLost: It does not.
        """
        lock = self._locks.get((*client, number))
        if lock is None or not lock.claim.held or not lock.claim.keys.issuperset(keys):
            raise self._lost(number)

    # Messages.

    def _lock(self, request: Request[LockShards]) -> None:
        peer, message = request.peer, request.message
        if self._closed:
            raise ClosedError(f"{self._task} is ending and accepts no more locks")
        if not 0 < message.lease_s <= MAX_LEASE_S:
            raise UsageError(
                f"{self._task}: expected a lease above 0 and up to {MAX_LEASE_S:g} s, got "
                f"{message.lease_s}"
            )
        keys = [(variable, index) for variable, index in message.members]
        for key in keys:
            self._store.spec(key)  # raises for one that is not here
        holder = (*peer.client, message.lock)
        self._drop(holder)  # asked for again: the connection of the first time has gone
        if peer not in self._peers:
            self._peers.add(peer)
            peer.on_closed.append(self._connection_lost)
        lock = _Lock(peer, self.table.claim(keys, exclusive=True), message.lease_s)
        self._locks[holder] = lock
        if lock.claim.held:
            self._start_lease(holder, lock)
            request.answer(Done())
        else:
            request.start(self._lock_later(request, holder, lock))

    async def _lock_later(self, request: Request[LockShards], holder: Holder, lock: _Lock) -> None:
        try:
            await self.turn(lock.claim)
        except BaseException:
            if self._locks.get(holder) is lock:
                self._drop(holder)
            raise
        if self._locks.get(holder) is not lock:  # its turn came, and its end before it was told
            raise self._lost(holder[2])
        self._start_lease(holder, lock)
        request.answer(Done())

    def _renew(self, request: Request[RenewLock]) -> None:
        peer, message = request.peer, request.message
        holder = (*peer.client, message.lock)
        lock = self._locks.get(holder)
        if lock is None or lock.timer is None:
            raise self._lost(message.lock)
        lock.timer.cancel()
        self._start_lease(holder, lock)
        request.answer(Done())

    def _unlock(self, request: Request[UnlockShards]) -> None:
        peer, message = request.peer, request.message
        self._drop((*peer.client, message.lock))
        request.answer(Done())

    # Ends.

    def _start_lease(self, holder: Holder, lock: _Lock) -> None:
        self.taken += lock.timer is None
        loop = asyncio.get_running_loop()
        lock.timer = loop.call_later(lock.lease_s, self._expire, holder)

    def _expire(self, holder: Holder) -> None:
        task, _, number = holder
        lease_s = self._locks[holder].lease_s
        logger.warning(
            "%s: lock %d of %s expired: it was not renewed for %g s",
            self._task, number, task, lease_s,
        )  # fmt: skip
        self.expired += 1
        self._drop(holder)

    def _connection_lost(self, peer: Connection) -> None:
        self._peers.discard(peer)
        for holder in [holder for holder, lock in self._locks.items() if lock.peer is peer]:
            self._drop(holder)

    def _drop(self, holder: Holder) -> None:
        lock = self._locks.pop(holder, None)
        if lock is not None:
            if lock.timer is not None:
                lock.timer.cancel()
            self.end(lock.claim)

    def _lost(self, number: int) -> LockLost:
        return LockLost(
            f"{self._task}: lock {number} has ended: its connection was lost, or its holder was "
            "silent for longer than its lease"
        )
