"""Closure results on a worker, batched on their way to the coordinator.

Many short steps end in one turn of the loop: their results leave in one message.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from typing import Any, NamedTuple

from psync.net.connection import Connection
from psync.serialization.failures import describe_exception, text_of
from psync.serialization.payloads import EMPTY, Payload
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import ClosureResults


class ClosureEnd(NamedTuple):
    """How a closure ended, as it is reported."""

    kind: str  # "ok", "error", "end_of_data" or "cancelled"
    payload: Payload = EMPTY  # of the value, or of the exception
    error: tuple[str, str, str] | None = None  # type name, message, traceback


CANCELLED = ClosureEnd("cancelled")

MAX_LATE = 100
"""Kinds of refused operations in one message: their texts go into the header, which is limited."""

READ_ONLY_HINT = (
    "hint: values that psync.pull, Variable.read and push_pull return are read-only; for an array "
    "of your own use copy=True, out=, or value.copy()"
)


def failed(kind: str, exc: BaseException, *, main_by_name: bool) -> ClosureEnd:
    """Return the end of a closure that has raised.

    Args:
        kind: "error" or "end_of_data".
        exc: What it has raised.
        main_by_name: Whether this process runs the coordinator's script.
    """
    if type(exc) is ValueError and "read-only" in text_of(exc):  # numpy's, which says no more
        if READ_ONLY_HINT not in getattr(exc, "__notes__", ()):
            exc.add_note(READ_ONLY_HINT)
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

    def __init__(self, control: Connection, bulk: Connection) -> None:
        self._control = control
        self._bulk = bulk
        self._loop = asyncio.get_running_loop()
        self._results: list[tuple[int, str, int, tuple[str, str, str] | None]] = []
        self._segments: list[Any] = []
        self.nbytes = 0  # of the segments
        self._seconds: list[float] = []  # of the closures in ``_results`` that succeeded
        self._updates: list[tuple[int, int]] = []  # of these: (number, calls) where any
        self.stop: tuple[int, str] | None = None  # the closure that asks for the end, and why
        self._late = Counter[tuple[str, str]]()  # by step and operation, see ``add_late``
        self._soon: asyncio.Handle | None = None  # flushes, while there are results

    def __len__(self) -> int:
        return len(self._results)

    def add(
        self,
        closure_id: int,
        end: ClosureEnd,
        seconds: float = 0.0,
        calls: int = 0,
        number: int = -1,
    ) -> None:
        """Gather a result; it leaves with the next turn of the loop at the latest.

        Args:
            closure_id: Of the closure.
            end: How it ended.
            seconds: That it took, if it succeeded.
            calls: Updates that it has made then.
            number: Under which ps tasks know it; -1: its id.
        """
        if self._soon is None:
            self._soon = self._loop.call_soon(self.flush)
        segments = end.payload.segments
        self._results.append((closure_id, end.kind, len(segments), end.error))
        if segments:
            self._segments += segments
            self.nbytes += end.payload.nbytes
        if end.kind == "ok":
            self._seconds.append(seconds)
            if calls:
                self._updates.append((closure_id if number < 0 else number, calls))
        if end.error is not None:  # texts add up in the header, whose size is limited
            self.flush()

    def add_late(self, step: str, operation: str) -> None:
        """Gather an operation that was refused, because its step had returned."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self.flush)
        self._late[step, operation] += 1
        if len(self._late) >= MAX_LATE:
            self.flush()

    def flush(self) -> None:
        """Send the results that have gathered."""
        if self._soon is None:
            return
        self._soon.cancel()
        self._soon = None
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        lane = self._bulk if self.nbytes > SMALL_BODY_BYTES else self._control
        late = [(*what, times) for what, times in self._late.items()] if self._late else None
        message = ClosureResults(self._results, mean, self._updates or None, late, self.stop)
        lane.notify(message, self._segments)
        self._results, self._segments, self.nbytes = [], [], 0
        self._seconds, self._updates, self.stop = [], [], None
        self._late.clear()


def is_signal(error: KeyboardInterrupt) -> bool:
    """Whether a second Ctrl-C ends this process, and the step only happened to be computing."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "asyncio.runners"
