"""What a session tells a trace: its closures, and what the worker's time goes to in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from psync.net.trace import SpanRecorder

if TYPE_CHECKING:
    from psync.worker.inputs import HeldClosure
    from psync.worker.session import Session


def watch_session(recorder: SpanRecorder, session: Session) -> Callable[[], None]:
    """Let a session tell a recorder, whenever that records. Returns what ends that."""

    def told(closure: HeldClosure, end: str) -> None:
        if end:
            recorder.note("ended", closure.id, closure.name, end)
        else:
            recorder.note("began", closure.id)

    def record(recorder: SpanRecorder | None) -> None:
        session.watch = None if recorder is None else told
        meter = session.runtime.ps.work
        meter.watch(None if recorder is None else lambda kind: recorder.note("work", kind))
        if recorder is not None and (running := session.running) is not None:
            recorder.note("began", running.id)

    return recorder.watch(record)
