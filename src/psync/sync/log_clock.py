"""The clock of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LogClock:
    """The clock of a log, and the one timer that is set by it.

    Times in a log are written into its entries by the ps that serves, and judging reads no other.
    They do not run backwards when a backup serves, whose own clock begins at another zero: it goes
    on from the last time that the log has.

    Args:
        expired: Called at the deadline.
    """

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired = expired
        self._latest = 0.0  # no entry has an earlier one
        self._ahead = 0.0  # this process's clock is by so much
        self.deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the time for an entry, in seconds."""
        return max(self._latest, asyncio.get_running_loop().time() - self._ahead)

    def note(self, now: float) -> None:
        """An entry is executed that came at this time."""
        self._latest = max(self._latest, now)

    def go_on(self) -> None:
        """This was a backup, and serves: from now on the time is its own, from the latest on."""
        self._ahead = asyncio.get_running_loop().time() - self._latest

    def set_deadline(self, deadline: float | None) -> None:
        """Call at this time, and no other; None: at none."""
        self.cancel()
        self.deadline = deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline + self._ahead, self._ring)

    def _ring(self) -> None:
        # A timer may ring early, by its clock's resolution and by what sums of floats lose. An
        # entry of that time would change nothing, and the timer ring at once, again and again.
        assert self.deadline is not None, "it is cancelled with its timer"
        self._latest = max(self._latest, self.deadline)
        self.deadline = self._timer = None
        self._expired()

    def cancel(self) -> None:
        """Call at no time."""
        self.deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
