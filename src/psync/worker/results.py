"""Closure results on a worker, batched on their way to the coordinator.

Many short steps end in one turn of the loop: their results leave in one message.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from psync.net.peer import Peer
from psync.serialization.failures import describe_exception
from psync.serialization.payloads import EMPTY, Payload
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.worker_messages import ClosureResults


class ClosureEnd(NamedTuple):
    """How a closure ended, as it is reported."""

    kind: str  # "ok", "error", "end_of_data" or "cancelled"
    payload: Payload = EMPTY  # of the value, or of the exception
    error: tuple[str, str, str] | None = None  # type name, message, traceback


CANCELLED = ClosureEnd("cancelled")


def failed(kind: str, exc: BaseException, *, main_by_name: bool) -> ClosureEnd:
    """Return the end of a closure that has raised.

    Args:
        kind: "error" or "end_of_data".
        exc: What it has raised.
        main_by_name: Whether this process runs the coordinator's script.
    """
    described = describe_exception(exc, main_by_name=main_by_name)
    return ClosureEnd(
        kind,
        described.payload or EMPTY,
        (described.type_name, described.message, described.traceback_text),
    )


class ResultsToSend:
    """Results that the coordinator has not been sent yet.

    Args:
        control: The connection on which small results leave.
        bulk: The one on which large ones do.
    """

    def __init__(self, control: Peer, bulk: Peer) -> None:
        self._control = control
        self._bulk = bulk
        self._loop = asyncio.get_running_loop()
        self._results: list[tuple[int, str, int, tuple[str, str, str] | None]] = []
        self._segments: list[Any] = []
        self._nbytes = 0  # of the segments
        self._seconds: list[float] = []  # of the closures in ``_results`` that succeeded
        self._updates: list[tuple[int, int]] = []  # of these: (id, calls) where there are any

    def __len__(self) -> int:
        return len(self._results)

    @property
    def is_large(self) -> bool:
        """Whether what has gathered leaves by the bulk connection."""
        return self._nbytes > SMALL_BODY_BYTES

    def note_success(self, closure_id: int, seconds: float, calls: int) -> None:
        """The closure whose end is added next has succeeded.

        Args:
            closure_id: Its id.
            seconds: That it took.
            calls: Updates that it has made.
        """
        self._seconds.append(seconds)
        if calls:
            self._updates.append((closure_id, calls))

    def add(self, closure_id: int, end: ClosureEnd) -> None:
        """Gather a result; it leaves with the next turn of the loop at the latest."""
        if not self._results:
            self._loop.call_soon(self.flush)
        segments = end.payload.segments
        self._results.append((closure_id, end.kind, len(segments), end.error))
        if segments:
            self._segments += segments
            self._nbytes += end.payload.nbytes
        if end.error is not None:  # texts add up in the header, whose size is limited
            self.flush()

    def flush(self) -> None:
        """Send the results that have gathered."""
        if not self._results:
            return
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        lane = self._bulk if self.is_large else self._control
        lane.notify(ClosureResults(self._results, mean, self._updates or None), self._segments)
        self._results, self._segments, self._nbytes = [], [], 0
        self._seconds, self._updates = [], []
