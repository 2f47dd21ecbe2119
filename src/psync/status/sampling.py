"""Readings of a running cluster: what its coordinator knows, and what ps tasks answer.

Nothing happens here unless somebody asks. Of ps tasks the counters are asked for, all at once; one
that does not answer in time keeps the counters that it gave last. Nobody waits for workers: a step
may compute for minutes on the loop of its worker, and what the coordinator knows is enough. Only
for a dashboard or a run log they are asked what their time went to, and answer when they can.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from psync.closures.membership import TaskState
from psync.closures.queue import QueueStatistics
from psync.cluster import CHIEF
from psync.errors import ClosedError, PsyncError
from psync.net.connection import Connection
from psync.net.shielding import end_all
from psync.net.trace import SpanCollector
from psync.status.model import (
    EventStatus,
    History,
    PsStatus,
    RunningClosure,
    SeenError,
    ShardStatus,
    Status,
    WorkerStatus,
    WorkShares,
    placement_of,
    shares_of,
    status_of,
)
from psync.wire.messages import AskStatistics, Statistics

if TYPE_CHECKING:
    from psync.chief.links import ClusterLinks, WorkerRecord
    from psync.closures.closure import Closure
    from psync.coordinator import Coordinator
    from psync.specs import VariableSpec

PS_ANSWERS_WITHIN_S = 1.0
"""A ps runs no user code, and answers within milliseconds."""

WORKER_ANSWERS_WITHIN_S = 3.0
"""Else it computes on its loop, or is stopped."""

FRESH_S = 0.2
"""ps tasks are not asked again sooner than this: that bounds what it costs them, whoever asks."""

ASKED_AT_ONCE = 100
"""Of more workers, those whose answers are the oldest: many cost no more than so many."""

_GONE = {
    TaskState.CONNECTING: "connecting",
    TaskState.LOST: "lost",
    TaskState.LEFT: "left",
    TaskState.ALIVE: "connecting",  # connected, and about to take part
}


async def _counters_of(task: Connection, deadline: float | None = None) -> dict[str, Any] | None:
    """Ask a task over the connection that it has: nothing is sent again, or waits for it."""
    try:
        received = await task.call(AskStatistics(), deadline=deadline)
    except PsyncError:
        return None
    assert isinstance(received.message, Statistics), "its only answer"
    return received.message.counters


class ClusterSource(ABC):
    """The status of one cluster, whose ps tasks are asked.

    Args:
        links: To them.
        variables: Returns all that are declared.

    Attributes:
        asks_workers: For how many each status asks workers, too; answers are in a later one.
        reported: Values of the program's own, the newest by name.
        spans: What tasks have recorded, for a trace.
        loop: That of the connections.
        recorders: How those end that take statuses for reports.
    """

    def __init__(
        self, links: ClusterLinks, variables: Callable[[], Sequence[VariableSpec]]
    ) -> None:
        self._cluster, self._variables = links, variables
        self._placement: tuple[ShardStatus, ...] = ()
        self._time = 0.0  # of the newest; never back, where the clock is set: charts need that
        self.loop = asyncio.get_running_loop()
        self._began = self.loop.time()
        self._history = History(self._began)
        self._ps: dict[str, tuple[float, dict[str, Any]]] = {}  # loop time, counters
        self._asked: dict[str, tuple[float, asyncio.Task[None]]] = {}
        """Workers that have not answered yet: since when, loop time, and who waits for it."""
        self.spans = SpanCollector(
            links.endpoint.platform, CHIEF, self._facts, self._counters,
            peers=lambda: self._controls().values(),
        )  # fmt: skip
        self.spans.watch_endpoint(links.endpoint)
        self.asks_workers = 0
        self.recorders: dict[object, Callable[[], Awaitable[None]]] = {}
        self._reading = asyncio.Lock()
        self._fresh_until = self._asked_at = 0.0  # loop times: of ps tasks that were asked last
        self._asked_ps: Collection[str] = ()
        self._is_closed = False
        self.reported: dict[str, float] = {}
        self.program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"

    def begin(self) -> None:
        """Let reports take statuses from now on, until ``close``."""
        running.add(self)
        for begin_run in reports.values():
            begin_run(self)

    async def status(self) -> Status:
        """Return the status as of now; numbers of ps tasks may be 0.2 s old.

        Raises:
            ClosedError: The coordinator is closed meanwhile.

        Cancellation: Safe; others who ask get theirs.
        """
        async with self._reading:
            if self.loop.time() >= self._fresh_until:
                await self._read()
        if self._is_closed:
            raise ClosedError("status: the coordinator was closed")
        return self._status()

    async def close(self) -> None:
        """Let reports take a last status, and stop asking. Cancellation: safe."""
        running.discard(self)
        try:
            await asyncio.gather(*(end() for end in self.recorders.values()))
        finally:
            self._is_closed = True
            self.spans.close()
            await end_all([task for _, task in self._asked.values()])

    async def _read(self) -> None:
        controls, self._asked_at = self._controls(), self.loop.time()
        tasks = [link.task for link in self._cluster.ps.links]
        self._asked_ps = [task for task in tasks if task in controls]
        await asyncio.gather(*(self._ask(controls[task]) for task in self._asked_ps))
        if self.asks_workers and not self._is_closed:
            self._ask_workers()
        self._fresh_until = self.loop.time() + FRESH_S

    def _controls(self) -> dict[str, Connection]:
        """Return a connection to each task that there is."""
        return {peer.task: peer for peer in self._cluster.endpoint.peers if peer.lane == "control"}

    def _facts(self) -> dict[str, Any]:
        """Return what explains the chief's own part of a trace."""
        running = [(closure.id, closure.name) for closure in self._oldest().values()]
        names = {each.variable_id: each.name for each in self._variables()}
        return {"variables": names, "running": running}

    async def _ask(self, ps: Connection) -> None:
        counters = await _counters_of(ps, self.loop.time() + PS_ANSWERS_WITHIN_S)
        if counters is not None:  # else its link sees to it, and the age of its counters shows it
            self._ps[ps.task] = self.loop.time(), counters

    def _status(self) -> Status:
        now = self.loop.time()
        variables = self._variables()
        if sum(len(each.shards) for each in variables) != len(self._placement):
            self._placement = placement_of(variables)  # a longer one: they stay where they are
        self._time = max(self._time, time.time())
        tasks, counted = [], []
        for link in self._cluster.ps.links:
            at, counters = self._ps.get(link.task, (None, {}))
            answered = link.task not in self._asked_ps if at is None else at >= self._asked_at
            state = "silent" if link.state == "connected" and not answered else link.state
            age_s = None if at is None else now - at
            tasks.append(PsStatus(link.task, link.address, state, age_s))
            counted.append(counters)
        bare = Status(
            self._time, os.getpid(), self.program, now - self._began, 0.0, "", "",
            ps=tuple(tasks), placement=self._placement,
        )  # fmt: skip
        return self._completed(bare, now, counted)

    # What there is besides ps tasks.

    @abstractmethod
    def _completed(self, bare: Status, now: float, counted: list[dict[str, Any]]) -> Status:
        """Return a status with what there is besides; arguments as of ``status_of``."""

    def _ask_workers(self) -> None:  # noqa: B027  # a session has no connection to them
        """Ask workers for what their time went to."""

    def _oldest(self) -> Mapping[str, Closure]:
        return {}

    def _counters(self) -> dict[str, float]:
        return {}


running: weakref.WeakSet[ClusterSource] = weakref.WeakSet()
"""Sources of this process, from their beginning to ``close``."""

reports: dict[object, Callable[[ClusterSource], None]] = {}
"""Of reports that are open: what tells them of another source."""


class StatusSource(ClusterSource):
    """The status of one coordinator's cluster.

    Args:
        coordinator: Running, or starting.
        variables: As for ``ClusterSource``.
    """

    def __init__(
        self, coordinator: Coordinator, variables: Callable[[], Sequence[VariableSpec]]
    ) -> None:
        self._coordinator = coordinator
        self._worked: dict[str, tuple[float, Mapping[str, float], WorkShares | None]] = {}
        """By worker: loop time here, what ``WorkMeter.read`` gave, shares since the one before."""
        super().__init__(coordinator.links, variables)

    def _oldest(self) -> Mapping[str, Closure]:
        return self._coordinator.recovery.queue.dispatcher.oldest()

    def _counters(self) -> dict[str, float]:
        of = self._coordinator.recovery.queue.dispatcher
        return {"closures queued": of.num_queued, "closures in flight": of.num_in_flight}

    def _ask_workers(self) -> None:
        """Ask some workers what their time went to; forget those that are gone."""
        peers = {each.name: each.peers[0] for each in self._records() if each.peers is not None}
        self._worked = {name: each for name, each in self._worked.items() if name in peers}
        due = [name for name in peers if name not in self._asked]
        due.sort(key=lambda name: self._worked[name][0] if name in self._worked else 0.0)
        for name in due[:ASKED_AT_ONCE]:  # those first whose answer is the oldest
            task = self.loop.create_task(self._ask_worker(name, peers[name]))
            self._asked[name] = self.loop.time(), task

    async def _ask_worker(self, name: str, control: Connection) -> None:
        try:
            counters = await _counters_of(control)
        finally:
            del self._asked[name]
        if work := (counters or {}).get("work"):
            known = self._worked.get(name)
            shares = None if known is None else shares_of(known[1], work)
            self._worked[name] = self.loop.time(), work, shares

    def _completed(self, bare: Status, now: float, counted: list[dict[str, Any]]) -> Status:
        coordinator = self._coordinator
        queue, links = coordinator.recovery.queue, coordinator.links
        oldest = queue.dispatcher.oldest()
        bare = replace(
            bare,
            state=self._state(),
            waits_for=coordinator.waits_for(),
            workers=(
                *(self._worker(each, oldest.get(each.name), now) for each in self._records()),
                *(WorkerStatus(task, "", "given up", last_error=SeenError(why, 0.0))
                  for task, why in links.workers.given_up.items()),
            ),
            reported=dict(self.reported),
            notes=(*coordinator.recovery.describe(), *links.workers.describe()),
            events=tuple(
                EventStatus(note.kind, note.text, now - note.at)
                for note in reversed(links.events.notes)
            ),
        )  # fmt: skip
        return status_of(
            bare, now, queue.statistics(), counted, self._history,
            has_backups=coordinator.recovery.has_backups, attached=coordinator.attached,
        )  # fmt: skip

    def _records(self) -> list[WorkerRecord]:
        return sorted(self._coordinator.links.workers.records.values(), key=lambda each: each.place)

    def _state(self) -> str:
        coordinator = self._coordinator
        if not coordinator.links.is_up:
            return "starting"
        if coordinator.recovery.is_recovering:
            return "recovering"
        if coordinator.recovery.queue.pending_errors:
            return "failed"
        return "idle" if coordinator.done() else "running"

    def _worker(self, worker: WorkerRecord, closure: Closure | None, now: float) -> WorkerStatus:
        workers, membership = self._coordinator.links.workers, self._coordinator.links.membership
        if worker.peers is not None:
            state = "leaving" if worker.leaving else "idle"
        elif workers.flapping.remaining(worker.name, now) > 0:
            state = "set aside"
        else:
            state = _GONE[membership.state(worker.name)]
        running, error = None, None
        if closure is not None:
            sent_at = getattr(closure.payload, "sent_at", None)
            since = max(now if sent_at is None else sent_at, worker.heard_at)
            running = RunningClosure(closure.id, closure.name, now - since)
        if worker.last_error is not None:
            at, text = worker.last_error
            error = SeenError(text, now - at)
        at, _, work = self._worked.get(worker.name, (now, {}, None))
        # What one did before it was stopped is not what it does now.
        since, _ = self._asked.get(worker.name, (now, None))
        answers = now - since < WORKER_ANSWERS_WITHIN_S
        work = replace(work, age_s=now - at) if answers and work is not None else None
        return WorkerStatus(
            worker.name, worker.address, state, running, losses=worker.losses,
            failed=worker.failed, last_error=error, work=work,
        )  # fmt: skip


class SessionSource(ClusterSource):
    """The status of a training session without a coordinator, as its chief knows it.

    Args:
        links: Of the chief.
        variables: As for ``ClusterSource``.
        workers: Addresses by name: of workers, and of a chief that trains.
        progress: Returns whether training has begun, and why it has ended.
        waits_for: What training goes on to, in words.
    """

    def __init__(
        self,
        links: ClusterLinks,
        variables: Callable[[], Sequence[VariableSpec]],
        workers: Mapping[str, str],
        progress: Callable[[], tuple[bool, tuple[str, bool] | None]],
        waits_for: str,
    ) -> None:
        self._workers = workers
        self._progress, self._waits_for = progress, waits_for
        super().__init__(links, variables)

    def _completed(self, bare: Status, now: float, counted: list[dict[str, Any]]) -> Status:
        has_begun, over = self._progress()
        membership = self._cluster.membership
        states = {**_GONE, TaskState.ALIVE: "busy"}
        chief = {CHIEF: "busy" if has_begun else "connecting"}
        bare = replace(
            bare,
            state="ended" if over else "running" if has_begun else "starting",
            waits_for=self._waits_for if has_begun else "the workers of the training session",
            workers=tuple(
                WorkerStatus(task, address, chief.get(task) or states[membership.state(task)])
                for task, address in self._workers.items()
            ),
            notes=(
                "a training session: there is no coordinator, and no closures",
                *([f"training ends: {over[0]}"] if over else []),
            ),
        )
        closures = QueueStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, ())
        return status_of(bare, now, closures, counted, self._history)
