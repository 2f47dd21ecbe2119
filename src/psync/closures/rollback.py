"""Effects of a rollback: finished closures whose updates are not wholly in the checkpoint.

A cut has all or none of the parts of an update. But if a client is lost in between, the closure
runs again and sends what is missing: perhaps after the cut, which then has a part of the call. So
parts count, and each ledger knows of how many its own is one. The ledgers forget the calls of
closures below the low-water mark; these were final when the cut was taken, so all that they did is
in it. Synchronous pushes are known to ps 0, once their step has been applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psync.closures.identities import Identities, Identity
from psync.store.snapshot_state import SnapshotState
from psync.wire.closure_numbers import first_of

PART_BITS = 16
"""As in ``ps_client``: a call's number and that of its message to one ps share an integer."""


class CutCalls:
    """Which calls of which closures the snapshots of one cut have.

    Args:
        snapshots: Of all ps tasks.

    Attributes:
        pending: Closures of which a synchronous push waits for its step: it is not in the cut.

    Closures are named by the ids of their first runs.
    """

    def __init__(self, snapshots: Sequence[SnapshotState]) -> None:
        self._finals = [snapshot.ledger.final for snapshot in snapshots]
        self._calls: dict[int, set[int]] = {}  # those that are whole
        missing: Counter[tuple[int, int]] = Counter()  # parts of calls
        for snapshot in snapshots:
            for closure, ordinal, count in snapshot.ledger.parts:
                missing[closure, ordinal >> PART_BITS] = count
        for snapshot in snapshots:
            for closure, ordinal, *_ in snapshot.ledger.calls:
                call = ordinal >> PART_BITS
                missing[closure, call] -= 1
                if missing[closure, call] <= 0:
                    self._calls.setdefault(closure, set()).add(call)
            for _, closure, ordinal, _ in snapshot.counted:
                self._calls.setdefault(closure, set()).add(ordinal)
        self.pending = frozenset(number for snapshot in snapshots for number in snapshot.pending)

    def has_all(self, closure: int, calls: int) -> bool:
        """Return whether all updates of a closure that has ended are in the cut.

        Args:
            closure: The id of its first run.
            calls: How many calls it has made that update something.
        """
        if closure in self.pending:
            return False
        if any(final.is_over(closure) for final in self._finals):
            return True
        return len(self._calls.get(closure, ())) >= calls


class _Ended(NamedTuple):
    """The last run of a closure that has ended."""

    id: int
    calls: int  # that it has made
    identity: Identity | None  # if the closure may come again


class EndedClosures:
    """The closures that have ended and updated something since the last checkpoint.

    Args:
        identities: Of those that may come again.
    """

    def __init__(self, identities: Identities | None = None) -> None:
        self._identities = Identities() if identities is None else identities
        self._ended: dict[int, _Ended] = {}  # by the id of the first run

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, number: int, calls: int) -> None:
        """Note a closure that has just ended, by its number on ps tasks, and the calls it made."""
        self._note(first_of(number), calls)

    def _note(self, first: int, calls: int) -> None:
        identity = self._identities.get(first)
        last = first if identity is None else identity.newest
        self._ended[first] = _Ended(last, calls, identity)

    def saved(self, cut: CutCalls, is_open: Callable[[int], bool]) -> None:
        """Forget those that are in a checkpoint now.

        Args:
            cut: What is in it.
            is_open: Whether a closure has not ended yet. One that had before the first cut was
                begun was not noted, and may wait for its step in that.
        """
        noted = self._ended.items()
        self._ended = {first: one for first, one in noted if not cut.has_all(first, one.calls)}
        for first in cut.pending - self._ended.keys():
            identity = self._identities.get(first)
            if not (is_open(first) if identity is None else identity.is_open):
                self._note(first, 0)

    def undone(self, cut: CutCalls) -> tuple[int, ...]:
        """Forget all, and return the ids of those that going back to a cut undoes; ascending.

        What may come again is done no more.
        """
        undone = []
        for first, one in self._ended.items():
            if not cut.has_all(first, one.calls):
                undone.append(one.id)
                if one.identity is not None:
                    self._identities.undo(one.identity)
        self._ended.clear()
        return tuple(sorted(undone))
