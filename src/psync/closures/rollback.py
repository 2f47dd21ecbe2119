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

from psync.store.snapshot_state import SnapshotState

PART_BITS = 16
"""As in ``ps_client``: a call's number and that of its message to one ps share an integer."""


class CutCalls:
    """Which calls of which closures the snapshots of one cut have.

    Args:
        snapshots: Of all ps tasks.

    Attributes:
        pending: Closures of which a synchronous push waits for its step: it is not in the cut.
    """

    def __init__(self, snapshots: Sequence[SnapshotState]) -> None:
        self._final_below = max((snapshot.ledger.final_below for snapshot in snapshots), default=0)
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
            closure: Its id.
            calls: How many calls it has made that update something.
        """
        if closure in self.pending:
            return False
        return closure < self._final_below or len(self._calls.get(closure, ())) >= calls


class EndedClosures:
    """The closures that have ended and updated something since the last checkpoint."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def ended(self, closure: int, calls: int) -> None:
        """Note a closure that has ended, and how many calls it has made."""
        self._calls[closure] = calls

    def saved(self, cut: CutCalls, is_open: Callable[[int], bool]) -> None:
        """Forget those that are in a checkpoint now.

        Args:
            cut: What is in it.
            is_open: Whether a closure has not ended yet. One that had before the first cut was
                begun was not noted, and may wait for its step in that.
        """
        self._calls = {closure: 0 for closure in cut.pending if not is_open(closure)} | {
            closure: calls
            for closure, calls in self._calls.items()
            if not cut.has_all(closure, calls)
        }

    def undone(self, cut: CutCalls) -> tuple[int, ...]:
        """Return, and forget, those that going back to a cut undoes; ascending."""
        undone = [number for number, calls in self._calls.items() if not cut.has_all(number, calls)]
        self._calls.clear()
        return tuple(sorted(undone))
