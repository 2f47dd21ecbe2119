"""What going back to a checkpoint undoes: which closures that have ended are not wholly in it.

Layer: L1. Imports: image_state.

A cut has each update wholly or not at all, so a call of a closure is in it if any ps knows it. The
ledgers forget the calls of closures below the low-water mark; these were final when the cut was
taken, so all that they did is in it. Synchronous pushes are known to ps 0, once their step has been
applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from psync.image_state import ImageState

PART_BITS = 16
"""As in ``ps_client``: a call's number and that of its message to one ps share an integer."""


class CutCalls:
    """Which calls of which closures the images of one cut have.

    Args:
        images: Of all ps tasks.
    """

    def __init__(self, images: Sequence[ImageState]) -> None:
        self._final_below = max((image.ledger.final_below for image in images), default=0)
        self._calls: dict[int, set[int]] = {}
        for image in images:
            for closure, ordinal, *_ in image.ledger.calls:
                self._calls.setdefault(closure, set()).add(ordinal >> PART_BITS)
            for _, closure, ordinal, _ in image.counted:
                self._calls.setdefault(closure, set()).add(ordinal)
        self._pending = frozenset(number for image in images for number in image.pending)

    def has_all(self, closure: int, calls: int) -> bool:
        """Return whether all updates of a closure that has ended are in the cut.

        Args:
            closure: Its id.
            calls: How many calls it has made that update something.
        """
        if closure in self._pending:
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

    def saved(self, cut: CutCalls) -> None:
        """Forget those that are in a checkpoint now."""
        self._calls = {
            closure: calls
            for closure, calls in self._calls.items()
            if not cut.has_all(closure, calls)
        }

    def undone(self, cut: CutCalls) -> tuple[int, ...]:
        """Return, and forget, those that going back to a cut undoes; ascending."""
        undone = [number for number, calls in self._calls.items() if not cut.has_all(number, calls)]
        self._calls.clear()
        return tuple(sorted(undone))
