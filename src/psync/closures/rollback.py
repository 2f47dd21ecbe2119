"""Effects of a rollback: finished closures whose updates are not wholly in the checkpoint.

A cut has all or none of the parts of an update. But if a client is lost in between, the closure
runs again and sends what is missing: perhaps after the cut, which then has a part of the call. So
parts count, and each ledger knows of how many its own is one. The ledgers forget the calls of
closures below the low-water mark; these were final when the cut was taken, so all that they did is
in it. Synchronous pushes are known to ps 0, once their step has been applied.

The calls of these closures are kept, function and arguments, so that a program can schedule them
again. Arguments may be large: ``KeptCalls`` drops the oldest when it holds too many bytes. A
program need not schedule them again: the next rollback, or the second checkpoint, drops them, too.
"""

from __future__ import annotations

from collections import ChainMap, Counter, deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from psync.closures.closure import Identities, Identity
from psync.store.snapshot_state import SnapshotState
from psync.wire.closure_numbers import call_of, first_of

KEPT_BYTES = 256 << 20
"""Most memory of calls that are kept for ``reschedule``."""

KEPT_SAVES = 2
"""Checkpoints after a rollback until undone calls are dropped. A program that saves in a loop may
save once before it hears of the rollback."""

NOTED_EARLY = 1 << 16
"""Number of ids that are remembered of closures that may be repeated and ended before the first
cut. All older closures count as ones that may be repeated."""

CALL_BYTES = 512
"""Taken for a call without its parts, so that many small ones are limited, too."""


class CutCalls:
    """Which calls of which closures the snapshots of one cut have.

    Args:
        snapshots: Of all ps tasks.

    Attributes:
        pending: Closures of which a synchronous push waits for its step: it is not in the cut.

    Closures are named by the ids of their first runs.
    """

    def __init__(self, snapshots: Sequence[SnapshotState]) -> None:
        self._finals = [snapshot.final for snapshot in snapshots]
        self._calls: dict[int, set[int]] = {}  # those that are whole
        missing: Counter[tuple[int, int]] = Counter()  # parts of calls
        for snapshot in snapshots:
            for closure, ordinal, count in snapshot.parts:
                missing[closure, call_of(ordinal)] = count
        for snapshot in snapshots:
            for closure, ordinal, *_ in snapshot.calls:
                call = call_of(ordinal)
                missing[closure, call] -= 1
                if missing[closure, call] <= 0:
                    self._calls.setdefault(closure, set()).add(call)
            for _, closure, ordinal, _ in snapshot.counted:
                self._calls.setdefault(closure, set()).add(ordinal)
        self.pending = frozenset(number for snapshot in snapshots for number in snapshot.pending)

    def num_missing(self, closure: int, calls: int) -> int:
        """Return how many updates of a closure that has ended are not in the cut.

        Args:
            closure: The id of its first run.
            calls: How many calls it has made that update something.
        """
        missing = max(0, calls - len(self._calls.get(closure, ())))
        if closure in self.pending:
            return max(1, missing)
        return 0 if any(final.is_over(closure) for final in self._finals) else missing


class Undone(NamedTuple):
    """The effect of a rollback on closures that had ended."""

    closures: tuple[int, ...] = ()  # ascending
    updates: int = 0  # of these, that are not in the checkpoint


class _Ended(NamedTuple):
    """The last run of a closure that has ended."""

    id: int
    calls: int  # that it has made
    identity: Identity | None  # if the closure may come again


class KeptCalls:
    """The calls of closures that a rollback may undo, or has undone; the oldest are dropped first.

    Args:
        most_bytes: Memory that they may hold.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.nbytes = 0
        self._most = most_bytes
        # By closure, the oldest first: its call, and what that holds.
        self._calls: dict[int, tuple[Any, Sequence[tuple[Hashable, int]]]] = {}
        self._users: Counter[Hashable] = Counter()  # how many calls hold a part
        self._dropped: set[int] = set()

    def keep(self, closure: int, call: Any, parts: Sequence[tuple[Hashable, int]]) -> None:
        """Keep a call.

        Args:
            closure: Id of the closure.
            call: The call.
            parts: What it holds: a key, the same for all calls that share the part, and its bytes.
        """
        self._calls[closure] = call, parts
        self.nbytes += CALL_BYTES
        for key, nbytes in parts:
            self.nbytes += 0 if self._users[key] else nbytes
            self._users[key] += 1
        while self.nbytes > self._most:
            self.drop(next(iter(self._calls)))

    def drop(self, closure: int) -> None:
        """Note that the call of this closure is not kept, though it should be."""
        self.forget((closure,))
        self._dropped.add(closure)

    def expire(self, closures: Iterable[int]) -> None:
        """Drop the calls of these closures that are kept."""
        for closure in closures:
            if closure in self._calls:
                self.drop(closure)

    def forget(self, closures: Iterable[int]) -> None:
        """Keep the calls of these closures no longer."""
        for closure in closures:
            self._dropped.discard(closure)
            if closure not in self._calls:
                continue
            self.nbytes -= CALL_BYTES
            for key, nbytes in self._calls.pop(closure)[1]:
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    self.nbytes -= nbytes

    def dropped(self, closures: Iterable[int]) -> list[int]:
        """Return those of these closures whose calls were dropped."""
        return [closure for closure in closures if closure in self._dropped]

    def take(self, closures: Sequence[int]) -> list[Any]:
        """Return, and forget, the calls of these closures, in order, without those not kept."""
        calls = [self._calls[closure][0] for closure in closures if closure in self._calls]
        self.forget(closures)
        return calls


class EndedClosures:
    """The closures that have ended and updated what the oldest checkpoint of a rollback lacks.

    The last ones may turn out to be damaged, so a rollback may go further back.

    Args:
        identities: Of those that may come again.

    Attributes:
        kept: The calls of these closures, and of those that the last rollback has undone.
    """

    def __init__(self, identities: Identities | None = None) -> None:
        self._identities = Identities() if identities is None else identities
        # By the id of the first run. At the end those that no checkpoint has; before them those
        # that the last one has, and not the one before; and so on.
        self._ended = deque[dict[int, _Ended]]([{}])
        self._early: deque[int] = deque(maxlen=NOTED_EARLY)
        self._undone: Sequence[int] = ()  # by the last rollback; their calls are kept
        self._saves = 0  # since then
        self.kept = KeptCalls()

    def __contains__(self, closure: int) -> bool:
        return any(closure in each for each in self._ended)

    def ended(self, number: int, calls: int) -> None:
        """Note a closure that has just ended, by its number on ps tasks, and the calls it made."""
        first = first_of(number)
        identity = self._identities.get(first)
        last = first if identity is None else identity.newest
        self._ended[-1][first] = _Ended(last, calls, identity)

    def ended_early(self, closure: int) -> None:
        """Note a closure that has ended before the first cut, and that may be repeated."""
        self._early.append(closure)

    def saved(self, cut: CutCalls, still_open: Container[int], num_checkpoints: int) -> None:
        """Note what is in a new checkpoint, and forget what is in all to which a rollback may go.

        Args:
            cut: What is in it.
            num_checkpoints: To which a rollback may go, the new one is the last of them.
            still_open: Closures that have not ended yet. One that had before the first cut was
                begun was not noted, and may wait for its step in that. Its call was not kept: to
                schedule it again fails, if it is one that may be repeated.
        """
        self._saves += 1
        if self._saves == KEPT_SAVES:
            self.kept.expire(self._undone)
        early = set(self._early)
        older = min(early) if len(early) == NOTED_EARLY else 0  # of these nothing is known
        self._early.clear()
        noted = self._ended[-1]
        lacking = {first: one for first, one in noted.items() if cut.num_missing(first, one.calls)}
        for first in lacking:
            del noted[first]
        self._ended.append(lacking)
        while len(self._ended) > num_checkpoints:
            forgotten = self._ended.popleft().items()
            self.kept.forget(one.id for first, one in forgotten if first not in self)
        for first in cut.pending - lacking.keys():
            identity = self._identities.get(first)
            if first in still_open if identity is None else identity.is_open:
                continue
            self.ended(first, 0)
            if identity is None and (first in early or first < older):
                self.kept.drop(first)

    def undone(self, cut: CutCalls) -> Undone:
        """Return, and forget, those that going back to a cut undoes.

        Their calls stay kept until the next rollback, or the second checkpoint from now.

        What may come again is done no more.
        """
        self.kept.expire(self._undone)
        undone, updates, saved = [], 0, dict[int, _Ended]()
        for first, one in ChainMap(*reversed(self._ended)).items():
            missing = cut.num_missing(first, one.calls)
            updates += missing
            if not missing:
                saved[first] = one
                continue
            undone.append(one.id)
            if one.identity is not None:
                self._identities.undo(one.identity)
        self._ended = deque((saved, {}))
        self._undone, self._saves = tuple(sorted(undone)), 0
        return Undone(self._undone, updates)
