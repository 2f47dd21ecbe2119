"""Back-off of flapping workers: one that is lost too often is set aside for a while.

A worker whose machine has no memory left, say, is lost with each closure that it gets, and connects
again at once: it is of no use, and each closure that it had runs late. So one that is lost more
often than ``limit`` times within a minute is set aside for half a minute, and each time that this
is not enough for twice as long, up to five minutes. Its count is reset when it comes back; the
time aside does, once it has not been lost for as long as it was set aside last and a minute.

The last worker is never set aside: while no worker takes part, those that are set aside may come
back, each a second after it was lost. Otherwise workers that die alternately would be set aside all
at once, and training would stand still although some of them live.

A worker that leaves in order is not lost, nor is one whose session the coordinator ends.

Source: Kubernetes' CrashLoopBackOff, whose pauses double up to five minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from psync.errors import ConfigurationError

LIMIT = 3
WINDOW_S = 60.0
FIRST_S = 30.0
LONGEST_S = 300.0
ALONE_S = 1.0
"""Pause after a loss while no worker takes part: less would be a busy loop if each attach fails."""


@dataclass(slots=True)
class _Record:
    """What is known of one worker."""

    losses: deque[float] = field(default_factory=deque)  # those within the window, oldest first
    last_lost: float = 0.0
    pause_s: float = 0.0  # how long it was set aside last; 0: it never was, or is forgiven
    until: float = 0.0  # time until which it is set aside


class Flapping:
    """Counts losses. Times are seconds on one clock.

    Args:
        limit: Losses within the window that are borne; the next one sets the worker aside. None:
            none is ever set aside.

    Raises:
        ConfigurationError: If the limit is below 0.

    Attributes:
        is_anyone_there: Returns whether a worker takes part; nobody is set aside for long if not.
    """

    def __init__(self, limit: int | None = LIMIT) -> None:
        if limit is not None and limit < 0:
            raise ConfigurationError(f"max_flaps: expected at least 0 or None, got {limit}")
        self._limit = limit
        self.is_anyone_there: Callable[[], bool] = lambda: True
        self._records: dict[str, _Record] = {}

    def lost(self, worker: str, now: float) -> float:
        """Count a loss; return for how many seconds the worker is set aside, mostly 0."""
        if self._limit is None:
            return 0.0
        record = self._records.setdefault(worker, _Record())
        well_since = max(record.until, record.last_lost)
        if now - well_since >= record.pause_s + WINDOW_S:
            record.pause_s = 0.0
        record.last_lost = now
        losses = record.losses
        losses.append(now)
        while now - losses[0] >= WINDOW_S:
            losses.popleft()
        if len(losses) <= self._limit:
            return 0.0
        losses.clear()
        record.pause_s = min(2 * record.pause_s or FIRST_S, LONGEST_S)
        record.until = now + record.pause_s
        return record.pause_s

    def remaining(self, worker: str, now: float) -> float:
        """Return for how many seconds more a worker is set aside; 0 if it is not."""
        record = self._records.get(worker)
        if record is None:
            return 0.0
        until = record.until
        if not self.is_anyone_there():
            until = min(until, record.last_lost + ALONE_S)
        return max(0.0, until - now)

    def joined(self, worker: str, now: float) -> None:
        """A worker takes part, perhaps before its time is over."""
        if (record := self._records.get(worker)) is not None:
            record.until = min(record.until, now)

    def set_aside(self, now: float) -> list[tuple[str, float]]:
        """Return (worker, seconds left) of all that are set aside, whose time ends first first."""
        left = [(worker, self.remaining(worker, now)) for worker in self._records]
        return sorted([pair for pair in left if pair[1] > 0], key=lambda pair: pair[1])

    def forget(self, worker: str) -> None:
        """Another one may bear this name next."""
        self._records.pop(worker, None)
