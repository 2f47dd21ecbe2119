"""Admission on a ps: what has to wait before it is an entry of the log, and for whom.

Locks are granted in order of arrival, and end by release, lost connection or lease. The gate pauses
updates while a cut is taken, except admitted ones. One object of each serves one coordinator and
timeline; a newer one gets others. What waits here has no number in the log. Where the large
bodies that wait are many, nothing more is read from their connections: so requests about locks and
cuts, and what is said under a lock, go over "control", which is read all the same: that of a
worker as long as it has locks, or asks for some.

    message       then
    LockShards    answered when no update of the shards is under way and no other lock is in the
                  way; from then on updates of these shards wait, except the holder's. Without
                  shards: its lease starts again
    UnlockShards  it ends; the next claim is granted
    Gate          no update begins any more; answered when those under way have ended, with the
                  messages to other ps tasks that belong to them
    Freeze        the messages that it names may begin, and are waited for until they are settled,
                  or one of them waits for a lock whose holder may be waiting here
                  (``ps.snapshots``)
    OpenGate      paused updates go on
    connection    every lock that was asked for over it ends when it is lost, and the gate opens
                  that was shut over it
    lease         a lock that is not renewed ends; a gate opens that has been shut for too long

A request under a lock that has ended fails with LockLost.

A claim on shards is exclusive (a lock) or shared (an update): updates go on side by side, a lock
waits for those that are under way, and later claims wait for a lock. A waiting claim blocks later
ones for the same shards, so none starves. A claim gets all its shards at once or none, so claims
cannot wait for each other in a circle.

While the gate is shut no update begins that no ps has begun: what comes waits, unjudged. Parts of
an update that has begun on another ps are *admitted*: the cut is to have all of them. A message
that has arrived whole is applied in the end, even if its client is replaced while it waits. One
outside of closures is the exception: it is refused then (``Ledger.judge``).

Source: docs/design.md, "A save".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from psync.errors import ClosedError, CutLost, LockLost, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.ps.cooperative_work import Changing
from psync.store.ledger import Client, Ledger
from psync.store.shards import Key
from psync.store.store import ShardStore
from psync.store.untrusted_json import to_json
from psync.wire.codec import Message
from psync.wire.messages import (
    Done,
    Gate,
    LockShards,
    UnlockShards,
)

logger = logging.getLogger(__name__)

MAX_LEASE_S = 60.0
"""Longer leases are refused: so long everybody might wait for a holder that is stuck."""

MAX_SHUT_S = 60.0
"""A coordinator that is stuck holds nobody up for longer."""

LOCK_PATIENCE_S = 1.0
"""So long an admitted update may wait for a lock, whose holder may be waiting at the gate."""

LOOKS = 4
"""How often it is looked whether it still does, within that time."""


# Locks.


@dataclass(slots=True, eq=False)
class Claim:
    """Some shards, wanted or held."""

    keys: frozenset[Key]
    exclusive: bool
    held: bool = False


Holder = tuple[str, int, int]
"""Task, incarnation, number of the lock."""


@dataclass(slots=True, eq=False)
class _Lease:
    """What a peer has until its connection is lost, or until it is silent for too long.

    Args:
        peer: That.
        seconds: So long it may be silent.
        lost: Called when the connection is lost.
        expired: Called when it has been silent.
    """

    peer: Connection
    seconds: float
    lost: Callable[[Connection], None]
    expired: Callable[[], None]
    _timer: asyncio.TimerHandle | None = None  # once it has begun

    def __post_init__(self) -> None:
        self.peer.on_closed.append(self.lost)

    def begin(self) -> None:
        """Let it begin, again if it has."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self.expired)

    def end(self) -> None:
        """End it: nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.peer.is_closed:  # it may outlive its owner
            self.peer.on_closed.remove(self.lost)


@dataclass(slots=True, eq=False)
class _Lock:
    """One that is held or asked for."""

    claim: Claim
    lease: _Lease  # begins when it is held


class PsLocks(Changing):
    """The locks on one ps under one coordinator.

    Args:
        task: Name of the ps.
        store: Its shards.
    """

    def __init__(self, task: str, store: ShardStore) -> None:
        super().__init__()
        self.taken = self.expired = 0
        self._task = task
        self._store = store
        self._held: dict[Claim, None] = {}
        self._waiting: dict[Claim, None] = {}  # in order
        self.num_exclusive = 0  # of both
        self._locks: dict[Holder, _Lock] = {}
        self._closed = False

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {LockShards: Handler(self._lock), UnlockShards: Handler(self._unlock)}

    @property
    def num_waiting(self) -> int:
        """How many locks and updates wait for a lock to end."""
        return len(self._waiting)

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
        if self._waiting:
            lines.append(f"{self.num_waiting} locks and updates wait for a lock to end")
        return lines

    def close(self) -> None:
        """End all locks; there are no new ones."""
        self._closed = True
        for holder in list(self._locks):
            self._drop(holder)

    # For updates, and for who speaks under a lock.

    def blocks(self, keys: Iterable[Key]) -> bool:
        """Return whether an update of these shards must wait."""
        return bool(self.num_exclusive) and self._in_the_way(frozenset(keys), exclusive=False)

    def claim(self, keys: Iterable[Key], *, exclusive: bool = False) -> Claim:
        """Claim shards; it is held at once if nothing is in its way. ``end`` it, in any case."""
        claim = Claim(frozenset(keys), exclusive)
        claim.held = not self._in_the_way(claim.keys, exclusive)
        (self._held if claim.held else self._waiting)[claim] = None
        self.num_exclusive += exclusive
        return claim

    def begin(self, keys: Iterable[Key]) -> Claim:
        """Note an update that begins now: nothing blocks it, or it belongs to a claim held."""
        claim = Claim(frozenset(keys), exclusive=False, held=True)
        self._held[claim] = None
        return claim

    async def turn(self, claim: Claim) -> None:
        """Wait until a claim is held.

        Raises:
            LockLost: A lock that is waited for was given up.

        Cancellation: Safe; the claim is still to be ended.
        """
        while claim in self._waiting:
            await self.changed()
        if not claim.held:
            raise LockLost(f"{self._task}: a lock was cancelled while it waited")

    def end(self, claim: Claim) -> None:
        """Give up a claim, held or not, and let others have their turn; again: changes nothing."""
        if claim not in self._held and claim not in self._waiting:
            return
        self._held.pop(claim, None)
        self._waiting.pop(claim, None)
        claim.held = False
        self.num_exclusive -= claim.exclusive
        if self._waiting:
            self._grant()
        self.wake()

    def _in_the_way(self, keys: frozenset[Key], exclusive: bool) -> bool:
        """Return whether one who comes now must wait, be it for others who wait."""
        claims = (claim for claims in (self._held, self._waiting) for claim in claims)
        return any(
            (exclusive or claim.exclusive) and not keys.isdisjoint(claim.keys) for claim in claims
        )

    def _grant(self) -> None:
        """Let those who wait have their shards, unless someone before them is in the way."""
        locked: set[Key] = set()
        used: set[Key] = set()
        for claim in self._held:
            (locked if claim.exclusive else used).update(claim.keys)
        for claim in list(self._waiting):
            if locked.isdisjoint(claim.keys) and not (
                claim.exclusive and not used.isdisjoint(claim.keys)
            ):
                del self._waiting[claim]
                self._held[claim] = None
                claim.held = True
            (locked if claim.exclusive else used).update(claim.keys)

    def check(self, client: Client, number: int, keys: Iterable[Key]) -> None:
        """Check that a client holds the lock under which it speaks.

        Raises:
            LockLost: It does not.
        """
        lock = self._locks.get((*client, number))
        if lock is None or not lock.claim.held or not lock.claim.keys.issuperset(keys):
            raise self._ended(number)

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
        holder = (*peer.client, message.lock)
        if not message.members:
            known = self._locks.get(holder)
            if known is None or not known.claim.held:
                raise self._ended(message.lock)
            known.lease.begin()
            request.answer(Done())
            return
        keys = [(variable, index) for variable, index in message.members]
        for key in keys:
            self._store.spec(key)  # raises for one that is not here
        self._drop(holder)  # asked for again: the connection of the first time has gone
        lease = _Lease(
            peer, message.lease_s, lambda _: self._drop(holder), partial(self._expire, holder)
        )
        lock = self._locks[holder] = _Lock(self.claim(keys, exclusive=True), lease)
        peer.holds += 1
        if lock.claim.held:
            self._granted(request, lock)
        else:
            request.start(self._lock_later(request, holder, lock))

    async def _lock_later(self, request: Request[LockShards], holder: Holder, lock: _Lock) -> None:
        try:
            await self.turn(lock.claim)
        except BaseException:
            if self._locks.get(holder) is lock:
                self._drop(holder)
            raise
        self._granted(request, lock)

    def _granted(self, request: Request[LockShards], lock: _Lock) -> None:
        self.taken += 1
        lock.lease.begin()
        request.answer(Done())

    def _unlock(self, request: Request[UnlockShards]) -> None:
        self._drop((*request.peer.client, request.message.lock))
        request.answer(Done())

    # Ends.

    def _expire(self, holder: Holder) -> None:
        task, _, number = holder
        logger.warning(
            "%s: lock %d of %s expired: it was not renewed for %g s",
            self._task, number, task, self._locks[holder].lease.seconds,
        )  # fmt: skip
        self.expired += 1
        self._drop(holder)

    def _drop(self, holder: Holder) -> None:
        lock = self._locks.pop(holder, None)
        if lock is not None:
            lock.lease.end()
            lock.lease.peer.holds -= 1
            self.end(lock.claim)

    def _ended(self, number: int) -> LockLost:
        return LockLost(
            f"{self._task}: lock {number} has ended: its connection was lost, or its holder was "
            "silent for longer than its lease"
        )


# The gate.


@dataclass(eq=False)
class UpdateGate(Changing):
    """Serves one coordinator's cuts on one ps.

    Args:
        task: Name of the ps, for the log.
        ledger: Knows what has begun.
        exempt: A task whose updates always pass: that of ps 0, which the coordinator lets finish
            its steps before anything is frozen.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        pause_steps: Returns when no synchronous step is being closed, and lets none begin.
        resume_steps: Lets them go on.
        cuts: For how many it was shut.
        cut: For which it is shut; 0: it is open.
        held_back: Messages (client, sequence) that have arrived whole and wait, at this gate or for
            a lock; some more than once, since they were sent again.
    """

    task: str
    ledger: Ledger
    exempt: str
    check_coordinator: Callable[[Connection], None]
    pause_steps: Callable[[], Awaitable[None]]
    resume_steps: Callable[[], None]
    cuts: int = 0
    cut: int = 0
    held_back: Counter[tuple[Client, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lease: _Lease | None = None  # of the cut for which it is shut
        self._over = 0  # the highest cut for which it was opened
        self._admitted: set[tuple[Client, int]] = set()
        self._under_way = 0  # updates that take longer than a turn
        self._locked_out: set[tuple[Client, int]] = set()  # messages that wait for a lock

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {Gate: Handler(self._shut)}

    @property
    def num_waiting(self) -> int:
        """How many messages wait here, and not for a lock."""
        return sum(
            count for message, count in self.held_back.items() if message not in self._locked_out
        )

    def describe(self) -> list[str]:
        """Say which cut is being taken, and who waits for it; for reports."""
        if not self.cut:
            return []
        return [
            f"the gate is shut for cut {self.cut}: {self._under_way} updates are under way, "
            f"{self.held_back.total()} wait"
        ]

    def check(self, cut: int) -> None:
        """Check that the gate is shut for a cut: it opens with the connection.

        Raises:
            CutLost: It is not.
        """
        if self.cut != cut:
            raise CutLost(f"{self.task} lets updates through again: cut {cut} is over")

    def close(self) -> None:
        """Open for good: whoever waits goes on."""
        self.open(self.cut)

    # The rule.

    def shut(self, cut: int) -> bool:
        """Hold updates back for a cut; a later one takes the place of an earlier one.

        Returns:
            Whether they are held back for this one; not if it is over, for then nobody opens.
        """
        if cut > max(self.cut, self._over):
            self.cut = cut
            self._admitted.clear()
        return self.cut == cut

    def open(self, cut: int) -> bool:
        """Let all updates through, if it is shut for this cut; return whether it was."""
        self._over = max(self._over, cut)
        if cut != self.cut or not cut:
            return False
        self.cut = 0
        self._admitted.clear()
        self._end_lease()
        self.resume_steps()
        self.wake()
        return True

    def admit(self, cut: int, updates: Iterable[tuple[Client, int]]) -> None:
        """Let these messages (client, sequence) through.

        Raises:
            CutLost: It is not shut for this cut.
        """
        self.check(cut)
        self._admitted.update(updates)
        self.wake()

    def holds(self, client: Client, sequence: int) -> bool:
        """Return whether a message has to wait. What has begun here goes on."""
        return (
            self.cut > 0
            and client[0] != self.exempt
            and (client, sequence) not in self._admitted
            and not self.ledger.knows(client, sequence)
        )

    def unsettled(self, updates: Iterable[tuple[Client, int]]) -> list[tuple[Client, int]]:
        """Return those messages that may still change something here."""
        return [
            (client, sequence)
            for client, sequence in updates
            if (client, sequence) in self.held_back or not self.ledger.is_settled(client, sequence)
        ]

    # For updates.

    async def turn(self, client: Client, sequence: int) -> None:
        """Wait until a message may begin. Cancellation: safe."""
        while self.holds(client, sequence):
            await self.changed()

    def began(self) -> None:
        """An update has begun that takes longer than a turn of the loop."""
        self._under_way += 1

    def ended(self) -> None:
        """It has ended."""
        self._under_way -= 1
        self.wake()

    def arrived(self, client: Client, sequence: int) -> None:
        """Note a message that has arrived whole and has to wait, here or for a lock."""
        self.held_back[client, sequence] += 1

    def passed(self, client: Client, sequence: int) -> None:
        """Note that it waits no longer."""
        waiting = self.held_back
        waiting[client, sequence] -= 1
        if not waiting[client, sequence]:
            del waiting[client, sequence]
        self.wake()

    async def all_passed(self) -> None:
        """Wait until no message waits, here or for a lock. Cancellation: safe."""
        while self.held_back:
            await self.changed()

    def waits_for_lock(self, client: Client, sequence: int, *, waits: bool) -> None:
        """Note that a message waits for a lock, or does so no more."""
        (self._locked_out.add if waits else self._locked_out.discard)((client, sequence))

    # Messages.

    async def _shut(self, request: Request[Gate]) -> None:
        peer, message = request.peer, request.message
        self.check_coordinator(peer)
        if not self.shut(message.cut):  # what said that it is over was faster
            raise CutLost(f"{self.task}: cut {message.cut} is over")
        self.cuts += 1
        self._end_lease()
        self._lease = _Lease(peer, MAX_SHUT_S, self._connection_lost, self._expired)
        self._lease.begin()
        await self.pause_steps()
        while self._under_way:
            await self.changed()
        request.answer(Done(), [to_json(self.ledger.others())])

    async def let_through(self, cut: int, updates: Sequence[tuple[Client, int]]) -> None:
        """Let these messages (client, sequence) through, and wait until all are settled.

        Raises:
            CutLost: One waits for a lock; or the gate is not shut for this cut.

        Cancellation: Safe.
        """
        self.admit(cut, updates)
        looks_left = LOOKS
        while self.cut == cut and (left := self.unsettled(updates)):
            if self._locked_out.isdisjoint(left):
                looks_left = LOOKS
            elif not looks_left:
                raise CutLost(
                    f"{self.task}: {left[0][0][0]} waits for a lock, whose holder may be waiting "
                    f"for the end of cut {cut}"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOCK_PATIENCE_S / LOOKS):
                    await self.changed()
                    continue
            looks_left -= 1
        self.check(cut)

    # Opening.

    def _connection_lost(self, _: Connection) -> None:
        self.open(self.cut)

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def _expired(self) -> None:
        logger.warning(
            "%s: a cut has delayed updates for %.0f s and is cancelled", self.task, MAX_SHUT_S
        )
        self.open(self.cut)
