"""The coordinator: dispatches closures, settles their results, owns links and recovery.

``ClosureQueue`` decides, this performs. What was scheduled within one turn of the loop is
sent at its end, in one message per worker. What workers answer comes in by ``closure_service``;
``joins`` knows who waits for what, ``recovery`` what becomes of ps tasks that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from psync.checkpoints.ownership import Owner
from psync.chief import watchdog
from psync.chief.closure_service import ClosureService, EndedCall
from psync.chief.cluster_links import ClusterLinks
from psync.chief.consistent_cut import Cuts
from psync.chief.creation import Creation
from psync.chief.declarations import Declaration
from psync.chief.events import RollbackEvent
from psync.chief.joins import Joins, describe_waiting
from psync.chief.reattachment import OwnOptimizers, Reattachment, reattach
from psync.chief.recovery import ClusterRecovery
from psync.chief.schedule_reporter import FinalClosures, ScheduleReporter
from psync.client.runtime import Runtime
from psync.closures.closure import Closure, Needs
from psync.closures.dispatcher import Dispatch, GiveBack
from psync.closures.identities import Identity
from psync.closures.membership import TaskState
from psync.closures.open import Cancel, Settle
from psync.closures.queue import Action as QueueAction
from psync.closures.queue import ClosureQueue
from psync.closures.schedule_report import ScheduleReports
from psync.cluster import ClusterSpec
from psync.errors import ClosedError, DeadlineExceeded
from psync.net.connection import Handler, Request
from psync.net.platform import Platform
from psync.replicas.closure_messages import ScheduledCall, ScheduledClosures, starting
from psync.replicas.context import forbid_in_merge
from psync.replicas.gang_runner import GangRunner
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, check_size, pack_arguments
from psync.serialization.remote_value import RemoteValue
from psync.wire import messages
from psync.wire.messages import (
    CancelClosures,
    Done,
    EndSession,
    FinishSteps,
    LeaveCluster,
    ReachCollective,
    ReleaseIterators,
)

logger = logging.getLogger(__name__)

SETTLE_S = 0.1
"""Nothing is sent for this long after a loss. Workers that died at the same time are noticed first:
what the first of them ran is not sent to the next, and not blamed for its death."""

SETTLE_EVERY_S = 0.5
"""Not more often than this: where workers are lost all the time, the others go on."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """As the arguments of ``ClusterCoordinator``, which explains them."""

    min_workers: int
    connect_timeout_s: float
    ps_timeout_s: float
    closure_timeout_s: float | None  # None: a step may take as long as it likes
    max_losses: int
    max_flaps: int | None  # None: as often as it likes
    watchdog_timeout_s: float | None  # None: there is no watchdog
    on_stall: Callable[[str], object] | None
    insecure: bool
    attach: bool


class Coordinator:
    """Schedules closures onto workers.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        declared: Declarations of variables that are to be created; taken from here.
        options: What the user has said.
        origin: Token of the strategy.
        program: Token of this process.
        main_by_name: Whether workers run the script of this process, so that classes of its
            ``__main__`` are found there by name.
        own: This program's optimizers, which go on with what was left, and after rollbacks.
        has_backups: Whether each ps has a backup.

    Attributes:
        links, workers, joins, gangs, cuts, events, functions, recovery, runtime: Its parts, as
            ``api`` and ``training`` use them.
        left: What an earlier program has left, with which this one goes on; None: nothing.
        partial_updates: Updates of the earlier program that some of their ps tasks lack.

    Invariant: All is on its loop. After ``close``, ``schedule`` and ``join`` raise ClosedError.
    """

    def __init__(
        self,
        platform: Platform,
        cluster: ClusterSpec,
        declared: list[Declaration],
        options: CoordinatorOptions,
        *,
        origin: str,
        program: str,
        main_by_name: bool,
        own: OwnOptimizers,
        has_backups: bool,
    ) -> None:
        self._options = options
        self._own = own
        self.left: Reattachment | None = None
        self.partial_updates = 0
        self.parts = platform.parts
        self._limits = platform.limits
        self._main_by_name = main_by_name
        self._queue = ClosureQueue(max_losses=options.max_losses)
        self._closures = ScheduledClosures(self._cancel)
        self.joins = Joins(self._queue, self.waits_for)
        self.functions = FunctionTable(main_by_name=main_by_name)
        self.links = ClusterLinks(
            platform, cluster,
            origin=origin, program=program, ps_timeout_s=options.ps_timeout_s,
            max_flaps=options.max_flaps, keep=options.attach, may_move=has_backups,
        )  # fmt: skip
        self.links.workers.on_joined = self._worker_joined
        self.links.workers.on_lost = self._worker_lost
        self.links.workers.on_forgotten = self._worker_forgotten
        self.workers = self.links.workers.attached
        self.gangs = GangRunner(
            self._queue, self.functions, self._closures, platform.limits,
            main_by_name=main_by_name, ready=self.workers.ready,
            is_current=self.workers.is_current, prepare=self._prepare, perform=self.perform,
            waits_for=self.waits_for,
        )  # fmt: skip
        self._reports = ScheduleReports(self.links.workers.names(), self._queue)
        self._creation = Creation(declared, self.links.ps)
        self.events = self.links.events
        self.cuts = Cuts(self.links.ps, functools.partial(self._creation.ensure, last=True))
        self.recovery = ClusterRecovery(
            self.links, self._queue, self.gangs, self._reports, self._creation, self.events, own,
            perform=self.perform, tell_again=self._tell_again,
            ps_timeout_s=options.ps_timeout_s, has_backups=has_backups,
        )  # fmt: skip
        service = self.parts.of(ClosureService)(
            self._queue, self._closures, self.functions, self._reports, self.workers,
            perform=self.perform, will_recover=self.recovery.will_recover,
            note_late=self.joins.note_late, results_came=self._results_came,
        )  # fmt: skip
        self.links.endpoint.handlers.update({
            **service.handlers(),
            ReachCollective: Handler(self.gangs.reached),
            LeaveCluster: Handler(self._worker_leaves),
            EndSession: Handler(self._session_ends),
        })  # fmt: skip
        self.runtime = Runtime(self.links.ps, origin, program, self._ensure_created)
        self._reporter = ScheduleReporter(self.links.ps.links[0], self._reports)
        self._final = FinalClosures(self._queue, self.links.final_below)
        self._dispatch_due = False  # ``_dispatch`` comes in this turn of the loop
        self._creating: asyncio.Task[None] | None = None  # meanwhile the queue is paused
        self._tasks: set[asyncio.Task[None]] = set()  # that end with the coordinator
        self._may_settle_at = 0.0  # loop time
        self._waits: dict[str, asyncio.TimerHandle] = {}  # for lost workers that may have data left
        self._closed = False
        self.owned: set[Owner | None] = set()  # where the program saves, until it ends
        self.loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Connect to the cluster; see ``ClusterLinks.start``.

        Cancellation: Half connected: call ``close``.
        """
        options = self._options
        await self.links.start(options.min_workers, options.connect_timeout_s)
        if options.attach:
            self._creation.reattachment = self.left = await reattach(
                self.links.ps, self.links.endpoint.incarnation, self._own
            )
            self.partial_updates = 0 if self.left is None else self.left.partial_updates
        if self.left is None:
            self._creation.repeatable = []
        if options.attach:
            await self._creation.ensure()  # what does not fit is told here, as far as it is known
        await self.recovery.first_backups(options.connect_timeout_s, attached=self.left is not None)
        self.recovery.started()
        self._begin(self._reporter.run(), "the schedule is no longer reported")
        if options.closure_timeout_s is not None:
            limit_s = options.closure_timeout_s
            watch = watchdog.watch_closures(self._queue, limit_s, self.workers.waits, self._give_up)
            self._begin(watch, "the closure timeout is off")
        if options.watchdog_timeout_s is not None:
            stalled = functools.partial(watchdog.log_stall, self.describe, options.on_stall)
            watch = watchdog.watch(options.watchdog_timeout_s, self._progress, stalled)
            self._begin(watch, "the watchdog is off")

    def _begin(self, work: Coroutine[Any, Any, None], if_it_fails: str) -> asyncio.Task[None]:
        """Do something until ``close``, that nothing awaits."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s", if_it_fails, exc_info=error)

        self._tasks.add(task := self.loop.create_task(work))
        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """Cancel what is not final and close all connections.

        Cancellation: Connections may still be closing.
        """
        self._closed = True
        self.recovery.stop()
        error = ClosedError("the coordinator was closed")
        self.joins.fail(error)
        for worker in list(self._waits):
            self._cancel_wait(worker)
        actions = self._queue.stop()
        self.gangs.fail(error)
        self.perform(actions)
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks))
            await self.gangs.close()
            await self.recovery.close()
            await self.cuts.close()
            self.events.close()
            # A ps without a backup keeps an update until there is one, and nobody orders it now.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.ps_timeout_s):
                    await self.links.ps.outgoing.drain()
        finally:
            try:
                await self.links.close()
            finally:
                self.owned.clear()
                for closure in list(self._closures.values()):  # nobody will report them
                    self._closures.settle(closure, closure.error or error)

    # What the user does.

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        identity: Identity | None = None,
        *,
        may_repeat: bool = True,
        needs: Needs | None = None,
    ) -> RemoteValue[Any]:
        """Queue a closure; see ``ClusterCoordinator.schedule``.

        It may come again if it has an identity; ``reschedule`` repeats it if it may be repeated.
        ``needs`` are the data that it takes, if these are others than its iterators say.
        """
        if self._closed:
            raise ClosedError("schedule on a closed coordinator")
        forbid_in_merge("schedule")
        function = self.functions.register(fn, stacklevel=4)
        arguments = EMPTY
        if args or kwargs:
            arguments = pack_arguments(function.name, args, kwargs, main_by_name=self._main_by_name)
            check_size(arguments, f'the arguments of step "{function.name}"', self._limits)
        call = ScheduledCall(function, arguments, may_repeat=may_repeat)
        return self._queue_call(call, identity, needs)

    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]:
        """Queue again what a rollback has undone; see ``ClusterCoordinator.reschedule``."""
        forbid_in_merge("reschedule")
        calls = self.recovery.calls_undone_by(event)
        return [self._queue_call(ScheduledCall(each.function, each.arguments)) for each in calls]

    def _queue_call(
        self, call: ScheduledCall, identity: Identity | None = None, needs: Needs | None = None
    ) -> RemoteValue[Any]:
        closure = self._closures.make(self._queue.next_id, call, self, identity, needs)
        value = self._closures.adopt(closure)
        if self._creation.pending and self._creating is None:
            self._create_if_declared()
        if actions := self._queue.schedule(closure):
            self.perform(actions)
        if not self._dispatch_due:
            self._dispatch_due = True
            self.loop.call_soon(self._dispatch)
        return value

    def done(self) -> bool:
        """Return whether nothing is queued or in flight."""
        return not self._closures

    async def join(self, timeout_s: float | None, *, finish_steps: bool = False) -> None:
        """Wait for all that was scheduled; see ``ClusterCoordinator.join``.

        Args:
            timeout_s: Seconds, or None.
            finish_steps: Whether gradients that were counted in a synchronous step are to be
                applied if nothing is left that might complete it.

        Cancellation: Safe; closures go on.
        """
        if self._closed:
            raise ClosedError("join on a closed coordinator")
        forbid_in_merge("join")
        deadline = None if timeout_s is None else self.loop.time() + timeout_s
        cutoff = self._queue.next_id
        self.recovery.fail_if_gone()
        self._prepare()
        if self._creating is not None:
            await self.joins.wait(deadline, timeout_s, self._creating)
        settled = await self.joins.below(cutoff, deadline, timeout_s)
        self._final.look(1)  # who joins is done with them, so nothing of theirs may come any more
        error = settled.exception()
        if error is None and finish_steps and self.done():
            await self._finish_steps(deadline, timeout_s)
        if (late := self.joins.take_late()) is not None:
            if error is None:
                raise late
            error.add_note(f"also failed: {late.message}")
        settled.result()

    @property
    def stop_reason(self) -> str | None:
        """Why a step has asked for the end of training; see ``ClusterCoordinator.stop_reason``."""
        return self._queue.requested_stop or self.joins.stop_reason

    async def collect_into(self, error: Exception) -> None:
        """Collect the error that a join would raise; see ``Joins.collect_into``.

        Cancellation: Safe; closures go on.
        """
        if not self._closed and self._queue.has_failed:
            await self.joins.collect_into(error, self._queue.next_id)

    async def _finish_steps(self, deadline: float | None, timeout_s: float | None) -> None:
        finish = self.links.ps.links[0].call(lambda _: FinishSteps())
        await self.joins.run(finish, deadline, timeout_s)

    def waits_for(self) -> str:
        """Say what a join waits for."""
        others = ["variables are being created"] if self._creating is not None else []
        others += self.gangs.describe()
        others += self.links.workers.describe()
        others += [
            f"{name}, which is lost, has data left" for name in self._queue.dispatcher.awaited()
        ]
        membership, given_up = self.links.membership, self.links.workers.given_up
        left = [worker for worker in membership.gone() if worker not in given_up]
        return describe_waiting(self._queue, membership.missing(), others, left)

    def describe(self) -> list[str]:
        """Say what runs where, what waits and for whom; for reports."""
        return [
            f"coordinator, incarnation {self.links.endpoint.incarnation}",
            *watchdog.describe_closures(self._queue, self._closures.values(), self.loop.time()),
            *(f"not connected: {task} at {at}" for task, at in self.links.membership.missing()),
            *self.recovery.describe(),
            f"everybody waits for: {self.waits_for()}",
        ]

    def _progress(self) -> int | None:
        """Return how many closures have ended; None while there is nothing to do."""
        if self.done() and self._creating is None and not self.gangs:
            return None
        counts = self._queue.statistics()
        return counts.finished + counts.failed + counts.exhausted + counts.cancelled

    def statistics(self) -> dict[str, Any]:
        """Return counters of closures and connections."""
        return {
            "closures": self._queue.statistics(),
            "network": dict(self.links.endpoint.statistics()),
        }

    def release_iterators(self, uid: str) -> None:
        """Let workers drop an iterator that nothing here refers to any more."""
        self.workers.notify_all(ReleaseIterators([uid]))
        self._queue.dispatcher.forget(uid)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the coordinator's loop; may be called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self.loop.call_soon_threadsafe(callback)

    def _cancel(self, closure_id: int) -> None:
        self.perform(self._queue.cancel(closure_id))

    # Variables first.

    def _prepare(self) -> None:
        """Create what is declared; the queue is paused meanwhile."""
        if self.recovery.is_gone:
            self.loop.call_soon(self._dispatch)  # it fails the gang that is prepared now
        self._create_if_declared()

    async def _ensure_created(self) -> None:
        """Create what is declared, for a request of the program itself."""
        await self._creation.ensure()
        await self.recovery.begin()

    def _create_if_declared(self) -> None:
        if self._creation.pending and self._creating is None:
            self._queue.pause()
            self._creating = self._begin(self._create(), "variables cannot be created")

    async def _create(self) -> None:
        try:
            await self._creation.ensure(last=True)
        except Exception as exc:
            self.recovery.fail(exc)
        finally:
            self._creating = None
            self.perform(self._queue.resume())

    # Workers that come and leave.

    def _worker_joined(self, worker: str) -> None:
        self._cancel_wait(worker)
        self._reports.worker_joined(worker, self.links.membership.incarnation(worker))
        self.perform(self._queue.worker_joined(worker))

    def _worker_lost(self, worker: str, blame: bool) -> None:
        self._reports.worker_lost(worker)
        if blame and self.loop.time() >= self._may_settle_at:
            self._may_settle_at = self.loop.time() + SETTLE_EVERY_S
            self._queue.pause()
            self.loop.call_later(SETTLE_S, self._loss_has_settled)
        returns = self.links.membership.state(worker) is not TaskState.LEFT
        if returns:
            wait_s = self._options.connect_timeout_s
            self._waits[worker] = self.loop.call_later(wait_s, self._worker_forgotten, worker)
        self.perform(self._queue.worker_lost(worker, blame=blame, returns=returns))

    def _cancel_wait(self, worker: str) -> None:
        if worker in self._waits:
            self._waits.pop(worker).cancel()

    def _worker_forgotten(self, worker: str) -> None:
        self._cancel_wait(worker)
        self.perform(self._queue.worker_will_not_return(worker))

    def _loss_has_settled(self) -> None:
        if not self._closed:
            self.perform(self._queue.resume())

    def _give_up(self, worker: str, closure: Closure) -> None:
        limit_s = self._options.closure_timeout_s
        error = DeadlineExceeded(
            f"{closure} took longer than {limit_s:g} s, not counting waits for other workers"
        )
        self.links.workers.end_session(worker, error, blame=True)

    def _worker_leaves(self, request: Request[LeaveCluster]) -> None:
        peer, message = request.peer, request.message
        if self.links.workers.leaves(peer, message):
            self.perform(self._queue.worker_leaves(peer.task))
        request.answer(Done())

    def _session_ends(self, request: Request[EndSession]) -> None:
        peer, message = request.peer, request.message
        self.links.workers.session_ends(peer, message)
        request.answer(Done())

    # What closures come to.

    def perform(self, actions: Sequence[QueueAction]) -> None:
        """Do what the queue decided."""
        replicas: list[Closure] = []
        for action in actions:
            if isinstance(action, Settle):
                self.joins.note_final(action.closures)
                for closure in action.closures:
                    self._closures.settle(closure, closure.error)
                    if closure.is_replica:
                        replicas.append(closure)
            elif isinstance(action, Dispatch):
                self._send(action)
            elif isinstance(action, Cancel):
                self.workers.notify(action.worker, CancelClosures(list(action.ids)))
            elif isinstance(action, GiveBack):
                self.workers.notify(action.worker, messages.GiveBack(list(action.ids)))
        if self._queue.has_failed is not self._final.refused:
            self._final.look_for_errors()
        if self.joins.waiting:
            self.joins.settle()
        self._reporter.look()
        if self.gangs.runs:
            self.gangs.look(replicas)

    def _results_came(self, ended: Sequence[EndedCall]) -> None:
        """A worker is alive; and where many closures have become final, ps tasks hear of it.

        What ends after a cut was begun may have to be named, though nobody keeps that cut yet.
        """
        if self.cuts.taken or self.recovery.source is not None:
            self.recovery.note_ended(ended)
        else:
            self.recovery.note_ended_early(ended)
        self.joins.heard_at = self.loop.time()
        self._final.look()

    def _dispatch(self) -> None:
        self._dispatch_due = False
        self.recovery.fail_if_gone()
        self.perform(self._queue.dispatch())

    def _send(self, action: Dispatch) -> None:
        self._creation.repeatable = None  # the program begins to compute
        now = self.loop.time()
        for closure in action.closures:
            closure.payload.sent_at = now
        message, segments = starting(action.closures)
        self.workers.notify(action.worker, message, segments)

    def _tell_again(self) -> None:
        """ps tasks know nothing of what they were told: tell them how far closures are."""
        self._reporter.look()
        self._final.tell_again()
