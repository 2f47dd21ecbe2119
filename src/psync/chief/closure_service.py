"""Requests of workers about closures: results, closures given back, functions, arguments.

``ClosureQueue`` decides what follows from a report; the coordinator performs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from psync.chief.attached_workers import AttachedWorkers
from psync.closures.closure import Closure, State
from psync.closures.queue import Action, ClosureQueue
from psync.closures.schedule_report import ScheduleReports
from psync.errors import ParameterServerLost, RemoteProtocolError, UsageError
from psync.net.connection import Handler, Request
from psync.replicas.closure_messages import ScheduledCall, arguments_reply, function_reply
from psync.serialization.failures import rebuild_exception
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, Payload
from psync.wire.codec import Message
from psync.wire.messages import ClosureResults, FetchArguments, FetchFunction, GivenBack

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 300
"""Of an error that the status of the cluster shows; ``join`` raises all of it."""


class EndedCall(NamedTuple):
    """A closure that came to its end on a worker."""

    number: int  # on ps tasks
    updates: int  # that it has made
    closure: Closure | None  # None: of a later run of a data shard
    call: ScheduledCall | None


@dataclass(eq=False)
class ClosureService:
    """Serves the workers of one coordinator."""

    queue: ClosureQueue  # is told how closures end
    closures: Mapping[int, Closure]  # all that are not final, by id
    functions: FunctionTable  # that workers fetch
    reports: ScheduleReports  # is told whose data has ended, and whose has not
    workers: AttachedWorkers  # what others say is not heard
    _: KW_ONLY
    perform: Callable[[Sequence[Action]], None]  # does what the queue decided
    will_recover: Callable[[ParameterServerLost], bool]
    """A worker was told, by ps 0, that a ps is lost; returns whether its closure runs again."""
    note_late: Callable[[str, str, str, int], None]
    """Called with worker, step, operation and how often it was refused: the step had returned."""
    results_came: Callable[[Sequence[EndedCall]], None]
    """Called when a worker has reported, and what followed was performed, with each closure that
    has ended and has updated something."""

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            ClosureResults: Handler(self._results),
            GivenBack: Handler(self._given_back),
            FetchFunction: Handler(self._fetch_function),
            FetchArguments: Handler(self._fetch_arguments),
        }

    def _results(self, request: Request[ClosureResults]) -> None:
        peer, message, segments = request.peer, request.message, request.segments
        if not self.workers.heard(peer):
            return  # of a worker that was given up: its closures run elsewhere
        ended = []
        for number, updates in message.updates or ():
            closure = self.closures.get(number)
            call = None if closure is None else closure.payload
            ended.append(EndedCall(number, updates, closure, call))
        if message.stop is not None:  # before the ends that a join waits for
            closure_id, reason = message.stop
            closure = self.closures.get(closure_id)
            if self.queue.ending is None:
                logger.info("training stops: %s (%s on %s)", reason, closure, peer.task)
            self.perform(self.queue.request_stop(reason))
        finished: list[tuple[int, Payload]] = []
        at = 0
        for closure_id, outcome, count, error in message.results:
            payload = Payload.from_segments(segments[at : at + count]) if count else EMPTY
            at += count
            if outcome == "ok":
                finished.append((closure_id, payload))
                continue
            self._finished(peer.task, finished, message.mean_seconds)
            finished = []
            self._ended(peer.task, closure_id, outcome, error, payload if count else None)
        for step, operation, times in message.late or ():
            self.note_late(peer.task, step, operation, times)
        self._finished(peer.task, finished, message.mean_seconds)
        self.results_came(ended)

    def _finished(
        self, worker: str, results: Sequence[tuple[int, Payload]], mean_seconds: float
    ) -> None:
        """Closures ended with values, which are there before anything that needs them is sent."""
        if not results:
            return
        ids = [closure_id for closure_id, _ in results]
        actions = self.queue.finished(worker, ids, mean_seconds)  # raises if one is not its own
        self.reports.has_data(worker)
        for closure_id, payload in results:
            closure = self.closures[closure_id]
            value = closure.payload.value()
            if value is not None and closure.state is State.FINISHED:
                value._set_payload(payload)
        self.perform(actions)

    def _ended(
        self,
        worker: str,
        closure_id: int,
        outcome: str,
        error: Sequence[str] | None,
        payload: Payload | None,
    ) -> None:
        if outcome == "cancelled":
            self.perform(self.queue.cancelled(worker, closure_id))
            return
        if error is None or outcome not in ("error", "end_of_data"):
            raise RemoteProtocolError(f"{worker}: closure {closure_id} ended as {outcome!r}")
        type_name, text, traceback_text = error
        exc = rebuild_exception(worker, type_name, text, traceback_text, payload)
        if outcome == "end_of_data":
            closure = self.closures.get(closure_id)
            actions = self.queue.end_of_data(worker, closure_id, exc)  # raises if it is not its own
            if closure is not None and closure.is_final:
                self.reports.out_of_data(worker)
            self.perform(actions)
        elif not (isinstance(exc, ParameterServerLost) and self.will_recover(exc)):
            closure = self.closures.get(closure_id)
            actions = self.queue.failed(worker, closure_id, exc)  # raises if it is not its own
            self.workers.note_error(worker, f"{closure}: {type_name}: {text}"[:MAX_ERROR_CHARS])
            self.perform(actions)

    def _given_back(self, request: Request[GivenBack]) -> None:
        peer, message = request.peer, request.message
        if self.workers.is_current(peer):
            self.perform(self.queue.given_back(peer.task, message.closures))

    def _fetch_function(self, request: Request[FetchFunction]) -> None:
        peer, message = request.peer, request.message
        function = self.functions.lookup(message.key)
        if function is None:
            raise UsageError(f"{peer.task} asked for a function that is no longer needed")
        request.answer(*function_reply(function))

    def _fetch_arguments(self, request: Request[FetchArguments]) -> None:
        peer, message = request.peer, request.message
        closure = self.closures.get(message.closure)
        if closure is None:
            raise UsageError(f"{peer.task} asked for closure {message.closure}, which has ended")
        request.answer(*arguments_reply(closure.payload))
