"""What follows from what workers report, and what they may fetch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from asked import Asked, Reply
from psync import RemoteValue
from psync.chief.closure_service import ClosureService, EndedCall
from psync.closures.closure import Closure
from psync.closures.queue import Action, ClosureQueue
from psync.closures.schedule_report import ScheduleReports
from psync.errors import RemoteProtocolError, UsageError
from psync.replicas.closure_messages import ScheduledCall
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import pack_arguments
from psync.wire.codec import Message
from psync.wire.messages import ClosureResults, FetchArguments, FetchFunction, GivenBack

WORKER, GIVEN_UP = "/job:worker/task:0", "/job:worker/task:1"


def step(*args: object) -> None: ...


class World:
    """The service, with a worker that holds all closures and one that was given up."""

    def __init__(self, num_closures: int) -> None:
        self.queue = ClosureQueue()
        self.functions = FunctionTable()
        self.function = self.functions.register(step)
        self.closures: dict[int, Closure] = {}
        self.values: list[RemoteValue] = []
        self.performed: list[Action] = []
        self.done_when_performing: list[list[bool]] = []
        self.num_reports = 0
        self.errors: list[str] = []
        self.late: list[tuple[str, str, str, int]] = []
        reports = ScheduleReports([WORKER], self.queue)
        reports.worker_joined(WORKER, 1)
        self._handlers = ClosureService(
            self.queue, self.closures, self.functions, reports, self, perform=self.perform,
            will_recover=lambda error: False,
            note_late=lambda *what: self.late.append(what), results_came=self.results_came,
        ).handlers()  # fmt: skip
        for closure_id in range(num_closures):
            call = ScheduledCall(self.function, pack_arguments("step", (closure_id,), {}))
            closure = Closure(closure_id, call, name="step")
            self.values.append(RemoteValue(closure, lambda closure_id: None))
            call.value = weakref.ref(self.values[-1])
            self.closures[closure_id] = closure
            self.queue.schedule(closure)
        self.queue.worker_joined(WORKER)  # and gets the first of them, and some ahead

    def said(self, message: Message, segments: Sequence[Any] = (), *, by: str = WORKER) -> Any:
        peer: Any = SimpleNamespace(task=by)
        asked = Asked(peer, message, [memoryview(segment) for segment in segments])
        self._handlers[type(message)].serve(asked)
        return asked.outcome

    def states(self) -> list[str]:
        return [value._closure.state.value for value in self.values]

    # As of AttachedWorkers, and of the coordinator.

    def is_current(self, peer: Any) -> bool:
        return peer.task == WORKER

    heard = is_current

    def note_error(self, worker: str, text: str) -> None:
        self.errors.append(text)

    def perform(self, actions: Sequence[Action]) -> None:
        self.performed += actions
        self.done_when_performing.append([value.done() for value in self.values])

    def results_came(self, ended: Sequence[EndedCall]) -> None:
        self.num_reports += 1


def test_operations_that_a_worker_refused_are_told_unless_it_was_given_up():
    world = World(1)
    late = [("step", 'assign to "w"', 2), ("other", 'pull ("w")', 1)]
    world.said(ClosureResults([(0, "ok", 0, None)], 0.1, late=late))
    world.said(ClosureResults([], 0.0, late=late[1:]))
    world.said(ClosureResults([], 0.0, late=late), by=GIVEN_UP)
    assert world.late == [(WORKER, *what) for what in (*late, late[1])]


@pytest.mark.parametrize("outcome", ["error", "end_of_data", "vanished"])
def test_an_outcome_that_does_not_exist_or_lacks_its_error_is_refused(outcome):
    world = World(1)
    with pytest.raises(RemoteProtocolError, match=f"closure 0 ended as '{outcome}'"):
        world.said(ClosureResults([(0, outcome, 0, None)], 0.0))
    assert world.states() == ["held"]


def test_what_a_worker_that_was_given_up_says_changes_nothing():
    world = World(1)
    world.said(ClosureResults([(0, "ok", 0, None)], 0.0), by=GIVEN_UP)
    world.said(GivenBack([0]), by=GIVEN_UP)
    assert world.states() == ["held"]
    assert world.performed == []
    assert world.num_reports == 0


def test_functions_and_arguments_are_fetched_while_somebody_needs_them():
    world = World(1)
    reply = world.said(FetchFunction(world.function.key))
    assert isinstance(reply, Reply)
    assert reply.segments == world.function.payload.segments
    assert world.said(FetchArguments(0)).segments
    with pytest.raises(UsageError, match="a function that is no longer needed"):
        world.said(FetchFunction(b"unknown"))
    with pytest.raises(UsageError, match="closure 7, which has ended"):
        world.said(FetchArguments(7))
