"""The coordinator: takes closures, sends them, settles them, and knows who is there.

``ClosureQueue`` decides, this performs. What was scheduled within one turn of the loop is
sent at its end, in one message per worker. What workers answer comes in by ``closure_service``;
``joins`` knows who waits for what, ``cluster_recovery`` what becomes of ps tasks that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from psync.chief import closure_timeout, watchdog
from psync.chief.closure_service import ClosureService
from psync.chief.cluster_links import ClusterLinks
from psync.chief.consistent_cut import Cuts
from psync.chief.creation import Creation
from psync.chief.declarations import Declaration
from psync.chief.events import Events
from psync.chief.joins import Joins, describe_waiting
from psync.chief.reattachment import OwnOptimizers, reattach
from psync.chief.recovery import ClusterRecovery
from psync.chief.schedule_reporter import ScheduleReporter
from psync.client.runtime import Runtime
from psync.closures.closure import Closure
from psync.closures.dispatcher import Dispatch, GiveBack
from psync.closures.flapping import LIMIT
from psync.closures.open import Cancel, Settle
from psync.closures.queue import MAX_LOSSES, ClosureQueue
from psync.closures.queue import Action as QueueAction
from psync.closures.schedule_report import ScheduleReports
from psync.cluster import ClusterSpec, parse_task_name, task_name
from psync.errors import (
    ClosedError,
    DeadlineExceeded,
    FencedError,
    ParameterServerLost,
    TransportError,
    UsageError,
)
from psync.net.peer import Handler, Peer, Reply
from psync.net.platform import Platform
from psync.replicas.closure_messages import ScheduledCall, run_closures, run_replica
from psync.replicas.context import forbid_in_merge
from psync.replicas.gang_runner import GangRunner
from psync.serialization.failures import text_of
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, check_size, pack_arguments
from psync.serialization.remote_value import RemoteValue
from psync.wire import worker_messages
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.recovery_messages import EndSession, LeaveCluster
from psync.wire.sync_messages import FinishSteps
from psync.wire.worker_messages import CancelClosures, ReachCollective

logger = logging.getLogger(__name__)

FINAL_EVERY = 1024
"""ps tasks are told that closures are final whenever this many more are."""


class Coordinator:
    """Schedules closures onto workers.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        declared: Declarations of variables that are to be created; taken from here.
        origin: Token of the strategy.
        program: Token of this process.
        main_by_name: Whether workers run the script of this process, so that classes of its
            ``__main__`` are found there by name.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
        closure_timeout_s: A worker that runs one closure for longer is given up; None: never.
        watchdog_timeout_s: Where no closure ends for so long though there is work, a report is
            written; None: never.
        on_stall: Is called with that report.
        max_losses: A closure that was lost with its worker this often is reported as an error.
        max_flaps: A worker that is lost more often than this within a minute is set aside.
        workers_wait: Says whether the program has declared a synchronous group or a staleness
            bound. ps 0 hears of the schedule from then on.
        attach: The program goes on with what another one has left on the ps tasks, and these are
            its optimizers; None: it begins anew.
        replicate: Whether each ps has a backup.
    """

    def __init__(
        self,
        platform: Platform,
        cluster: ClusterSpec,
        declared: list[Declaration],
        *,
        origin: str,
        program: str,
        main_by_name: bool,
        ps_timeout_s: float,
        workers_wait: Callable[[], bool],
        closure_timeout_s: float | None = None,
        watchdog_timeout_s: float | None = None,
        on_stall: Callable[[str], object] | None = None,
        max_losses: int = MAX_LOSSES,
        max_flaps: int | None = LIMIT,
        attach: OwnOptimizers | None = None,
        replicate: bool = False,
    ) -> None:
        self._attach = attach
        self.attached = False  # whether there was something to go on with
        self.parts = platform.parts
        self._limits = platform.limits
        self._main_by_name = main_by_name
        self._queue = ClosureQueue(max_losses=max_losses)
        self._closures: dict[int, Closure] = {}  # not final
        self._peers: dict[str, tuple[Peer, Peer]] = {}  # control and bulk, of each worker
        self._retiring: set[str] = set()  # of these, who is about to leave
        self._joins = Joins(self._queue, self.waits_for)
        self.functions = FunctionTable(main_by_name=main_by_name)
        self.gangs = GangRunner(
            self._queue, self.functions, self, platform.limits, main_by_name=main_by_name
        )
        workers = [task_name("worker", index) for index in cluster.task_indices("worker")]
        self._reports = ScheduleReports(workers, self._queue)
        service = self.parts.of(ClosureService)(
            self._queue, self._closures, self.functions, self._reports, self
        )
        handlers = {
            **service.handlers(),
            ReachCollective: Handler(self.gangs.reached),
            LeaveCluster: Handler(self._worker_leaves),
            EndSession: Handler(self._session_ends),
        }
        self.links = ClusterLinks(
            platform, cluster, self, handlers,
            origin=origin, program=program, ps_timeout_s=ps_timeout_s, max_flaps=max_flaps,
            keep=attach is not None, may_move=replicate,
        )  # fmt: skip
        self._creation = Creation(declared, self.links.ps)
        self.events = Events()
        self.cuts = Cuts(self.links.ps, functools.partial(self._creation.ensure, last=True))
        self.recovery = ClusterRecovery(
            self.links, self._queue, self.gangs, self._reports, self._creation, self.events, self,
            ps_timeout_s=ps_timeout_s, replicate=replicate,
        )  # fmt: skip
        self.runtime = Runtime(self.links.ps, origin, program, self._creation.ensure)
        self._reporter = ScheduleReporter(self.links.ps.links[0], self._reports, workers_wait)
        self._told_final = 0
        self._dispatch_due = False
        self._refused = False  # ps tasks refuse all that was scheduled before an error
        self._creating: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._closure_timeout_s = closure_timeout_s
        self._watch: asyncio.Task[None] | None = None  # over steps that take too long
        self._watchdog_timeout_s = watchdog_timeout_s
        self._on_stall = on_stall
        self._watchdog: asyncio.Task[None] | None = None
        self._closed = False
        self._ps_timeout_s = ps_timeout_s
        self._loop = asyncio.get_running_loop()

    async def start(self, min_workers: int, timeout_s: float) -> None:
        """Connect to the cluster; see ``ClusterLinks.start``."""
        await self.links.start(min_workers, timeout_s)
        self.recovery.links_started()
        if self._attach is not None:
            self._creation.reattachment = await reattach(
                self.links.ps, self.links.incarnation, self._attach
            )
            self.attached = self._creation.reattachment is not None
            await self._creation.ensure()  # what does not fit is told here, as far as it is known
        await self.recovery.first_backups(timeout_s, attached=self.attached)
        self._reporting = self._reporter.start()
        if self._closure_timeout_s is not None:
            self._watch = self._loop.create_task(
                closure_timeout.watch(self._queue, self._closure_timeout_s, self._give_up)
            )
        if self._watchdog_timeout_s is not None:
            self._watchdog = self._loop.create_task(
                watchdog.watch(self._watchdog_timeout_s, self._progress, self._stalled)
            )

    async def close(self) -> None:
        """Cancel what is not final and close all connections.

        Cancellation: Connections may still be closing.
        """
        self._closed = True
        self.recovery.stop()
        error = ClosedError("the coordinator was closed")
        self._joins.fail(error)
        actions = self._queue.stop()
        self.gangs.fail(error)
        self.perform(actions)
        try:
            tasks = (self._watch, self._watchdog, self._creating, self._reporting)
            helpers = [task for task in tasks if task is not None]
            for task in helpers:
                task.cancel()
            if helpers:
                await asyncio.wait(helpers)
            await self.gangs.close()
            await self.recovery.close()
            await self.cuts.close()
            self.events.close()
            # A ps without a backup keeps an update until there is one, and nobody orders it now.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ps_timeout_s):
                    await self.links.ps.drain()
        finally:
            try:
                await self.links.close()
            finally:
                for closure in list(self._closures.values()):  # nobody will report them
                    self._settle(closure, closure.error or error)

    def warn_of_leftovers(self) -> None:
        """Say what closing now throws away: who forgets ``join`` would take it for done."""
        counts = self._queue.statistics()
        if left := counts.waiting + counts.queued + counts.in_flight:
            logger.warning("closing cancels what is not done (%d), and join was not awaited", left)
        if self._queue.ready_to_raise and (collected := self._queue.collect_error()):
            name, text = type(collected[0]).__name__, text_of(collected[0])
            logger.warning("closing without join, which would have raised %s: %s", name, text)

    # What the user does.

    def schedule(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RemoteValue:
        """Queue a closure; see ``ClusterCoordinator.schedule``."""
        if self._closed:
            raise ClosedError("schedule on a closed coordinator")
        forbid_in_merge("schedule")
        function = self.functions.register(fn, stacklevel=4)
        arguments = EMPTY
        if args or kwargs:
            arguments = pack_arguments(function.name, args, kwargs, main_by_name=self._main_by_name)
            check_size(arguments, f'the arguments of step "{function.name}"', self._limits)
        inputs = arguments.remote_values
        call = ScheduledCall(function, arguments)
        closure = Closure(
            self._queue.next_id,
            call,
            name=function.name,
            inline_bytes=call.inline_bytes if arguments is not EMPTY else 0,
            dependencies=self._dependencies(inputs) if inputs else (),
        )
        value = RemoteValue(closure, self._cancel)
        call.value = weakref.ref(value)
        self._closures[closure.id] = closure
        if self._creation.pending and self._creating is None:
            self._start_creating()
        actions = self._queue.schedule(closure)
        if actions:
            self.perform(actions)
        if not self._dispatch_due:
            self._dispatch_due = True
            self._loop.call_soon(self._dispatch)
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
        """
        if self._closed:
            raise ClosedError("join on a closed coordinator")
        forbid_in_merge("join")
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        cutoff = self._queue.next_id
        self._fail_if_gone()
        self.prepare()
        if self._creating is not None:
            await self._joins.wait(self._creating, deadline, timeout_s)
        future = self._joins.add(cutoff)
        self._joins.settle()
        try:
            await self._joins.wait(future, deadline, timeout_s)
        finally:
            self._joins.discard(future)
        future.result()
        if finish_steps and self.done():
            await self._finish_steps(deadline, timeout_s)

    async def collect_into(self, error: Exception) -> None:
        """Collect the error that a join would raise, where ``error`` is raised instead.

        If that is another one it becomes the cause of ``error``, or a note.

        Cancellation: Safe; a join still raises it.
        """
        if self._closed or not self._queue.has_failed:
            return
        future = self._joins.add(self._queue.next_id)
        self._joins.settle()
        try:
            await self._joins.wait(future, None, None)
            collected = future.exception()
        finally:
            self._joins.discard(future)
        if collected is None or collected is error or isinstance(collected, ClosedError):
            return
        if error.__cause__ is None:
            error.__cause__ = collected
        else:
            error.add_note(f"also failed: {type(collected).__name__}: {text_of(collected)}")

    async def _finish_steps(self, deadline: float | None, timeout_s: float | None) -> None:
        async def finish() -> None:
            await self.links.ps.links[0].call(lambda _: FinishSteps())

        finishing = self._loop.create_task(finish())
        try:
            await self._joins.wait(finishing, deadline, timeout_s)
        finally:
            if not finishing.done():
                finishing.cancel()
                await asyncio.wait((finishing,))
        finishing.result()

    def waits_for(self) -> str:
        """Say what a join waits for."""
        others = ["variables are being created"] if self._creating is not None else []
        others += self.gangs.describe()
        others += self.links.workers.describe()
        membership, given_up = self.links.membership, self.links.workers.given_up
        left = [worker for worker in membership.gone() if worker not in given_up]
        return describe_waiting(self._queue, membership.missing(), others, left)

    def describe(self) -> list[str]:
        """Say what runs where, what waits and for whom; for reports."""
        missing = self.links.membership.missing()
        return [
            f"coordinator, incarnation {self.links.incarnation}",
            *watchdog.describe_closures(self._queue, self._closures.values(), self._loop.time()),
            *watchdog.describe_missing(missing),
            *self.recovery.describe(),
            f"everybody waits for: {self.waits_for()}",
        ]

    def _progress(self) -> int | None:
        """Return how many closures have ended; None while there is nothing to do."""
        if self.done() and self._creating is None and not self.gangs:
            return None
        return watchdog.count_of_ended(self._queue.statistics())

    def _stalled(self, seconds: float) -> None:
        watchdog.log_stall(seconds, self.describe, self._on_stall)

    def statistics(self) -> dict[str, Any]:
        """Return counters of closures and connections."""
        return {"closures": self._queue.statistics(), "network": self.links.statistics()}

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the coordinator's loop; may be called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback)

    def broadcast(self, message: Message) -> None:
        """Notify all workers."""
        for control, _ in self._peers.values():
            control.notify(message)

    async def ask_workers(self, message: Message) -> dict[str, Message]:
        """Return what each worker that is there answers, by the worker's name.

        One that is lost meanwhile is left out. A worker answers when its step leaves the loop.

        Cancellation: Safe.
        """

        async def ask(control: Peer) -> Message | None:
            try:
                return (await control.call(message)).message
            except (TransportError, UsageError):  # lost, or no worker of ours any more
                return None

        asked = {worker: control for worker, (control, _) in self._peers.items()}
        answers = await asyncio.gather(*map(ask, asked.values()))
        pairs = zip(asked, answers, strict=True)
        return {worker: answer for worker, answer in pairs if answer is not None}

    def _cancel(self, closure_id: int) -> None:
        self.perform(self._queue.cancel(closure_id))

    def _dependencies(self, inputs: Sequence[RemoteValue]) -> list[Closure]:
        for value in inputs:
            if value.owner is not self:
                raise UsageError(
                    f"{value!r} belongs to another coordinator",
                    hint="fetch its value there and pass that",
                )
        return [value.closure for value in inputs]

    # Variables first.

    def _start_creating(self) -> None:
        self._queue.pause()
        self._creating = self._loop.create_task(self._create())

    async def _create(self) -> None:
        try:
            await self._creation.ensure(last=True)
        except Exception as exc:
            self.fail(exc)
        finally:
            self._creating = None
            self.perform(self._queue.resume())

    # cluster_links.LinksOwner.

    def worker_joined(self, worker: str, control: Peer, bulk: Peer) -> None:
        """A worker is ready for closures."""
        self._peers[worker] = (control, bulk)
        self._reports.worker_joined(worker, self.links.membership.incarnation(worker))
        self.perform(self._queue.worker_joined(worker))

    def worker_lost(self, worker: str, *, blame: bool) -> None:
        """Put back what it held."""
        del self._peers[worker]
        self._retiring.discard(worker)
        self._reports.worker_lost(worker)
        self.perform(self._queue.worker_lost(worker, blame=blame))

    def worker_given_up(self) -> None:
        """A worker will not come again: end what is scheduled, if it was the last."""
        self._fail_if_gone()

    def _fail_if_gone(self) -> None:
        """End what is scheduled where nobody is left who could do it."""
        self.recovery.fail_if_gone()
        error = self.links.workers.all_given_up()
        if error is not None and not self._queue.has_failed and (self.gangs or not self.done()):
            self.fail(error)

    def ps_lost(self, error: ParameterServerLost) -> None:
        """Recover it, or end everything."""
        self.recovery.ps_lost(error)

    def replaced(self, error: FencedError) -> None:
        """End everything, now and at every join."""
        self.recovery.replaced(error)

    def _give_up(self, worker: str, closure: Closure) -> None:
        error = DeadlineExceeded(f"{closure} took longer than {self._closure_timeout_s:g} s")
        self.links.workers.end_session(worker, error, blame=True)

    # Workers that come and leave.

    def _worker_leaves(self, peer: Peer, message: LeaveCluster, _: list[memoryview]) -> Reply:
        if self.links.workers.leaves(peer, message):
            self._retiring.add(peer.task)
            self.perform(self._queue.worker_leaves(peer.task))
        return Reply(Done())

    def _session_ends(self, peer: Peer, message: EndSession, _: list[memoryview]) -> Reply:
        self.links.workers.session_ends(peer, message)
        return Reply(Done())

    # cluster_recovery.ClusterRecoveryOwner, besides ``perform``.

    def fail(self, error: Exception) -> None:
        """End all that is scheduled or runs with an error that is no closure's own."""
        actions = self._queue.fail(error)
        self.gangs.fail(error)
        self.perform(actions)

    def tell_again(self) -> None:
        """ps tasks know nothing of what they were told: tell them how far closures are."""
        self._reporter.look()
        self.links.final_below(self._told_final)

    # gang_runner.GangOwner.

    def workers(self) -> list[str]:
        """Return the workers that are ready for closures, by index."""
        ready = self._peers.keys() - self._retiring
        return sorted(ready, key=lambda worker: parse_task_name(worker)[1])

    def prepare(self) -> None:
        """Create what is declared; the queue is paused meanwhile."""
        if self.links.workers.all_given_up():
            self._loop.call_soon(self._dispatch)  # where it is said
        if self._creation.pending and self._creating is None:
            self._start_creating()

    def adopt(self, closure: Closure) -> RemoteValue:
        """Take a closure of a gang among those that are not final; return its value to be."""
        value = RemoteValue(closure, self._cancel)
        closure.payload.value = weakref.ref(value)
        self._closures[closure.id] = closure
        return value

    # closure_service.ClosureServiceOwner, of which gang_runner.GangOwner needs the first two.

    def is_current(self, peer: Peer) -> bool:
        """Return whether this is a connection of a worker that was not given up."""
        return peer in self._peers.get(peer.task, ())

    def perform(self, actions: Sequence[QueueAction]) -> None:
        """Do what the queue decided."""
        replicas: list[Closure] = []
        for action in actions:
            if isinstance(action, Settle):
                self._joins.note_final(action.closures)
                for closure in action.closures:
                    self._settle(closure, closure.error)
                    if closure.is_replica:
                        replicas.append(closure)
            elif isinstance(action, Dispatch):
                self._send(action)
            elif isinstance(action, Cancel):
                self._peers[action.worker][0].notify(CancelClosures(list(action.ids)))
            elif isinstance(action, GiveBack):
                self._peers[action.worker][0].notify(worker_messages.GiveBack(list(action.ids)))
        if self._queue.has_failed != self._refused:
            self._refused = not self._refused
            if self._refused:  # steps that compute on their loop have not heard of it yet
                self.links.final_below(self._queue.next_id)
        if self._joins:
            self._joins.settle()
            if self._queue.low_water() > self._told_final:
                self._tell_final()
        self._reporter.look()
        if self.gangs:
            self.gangs.look(replicas)

    def will_recover(self, error: ParameterServerLost) -> bool:
        """A ps is lost, says ps 0, before it was noticed here; return whether it is recovered."""
        return self.recovery.will_recover(error)

    def has_updated(self, closure_id: int, calls: int) -> None:
        """A closure that has ended has made so many calls that update something.

        What ends after a cut was begun may have to be named, though nobody keeps that cut yet.
        """
        recovery = self.recovery.from_checkpoint
        if self.cuts.taken or recovery.source is not None:
            recovery.ended.ended(closure_id, calls)

    def results_came(self) -> None:
        """A worker is alive; and where many closures have become final, ps tasks hear of it."""
        self._joins.heard_at = self._loop.time()
        if self._queue.low_water() - self._told_final > FINAL_EVERY:
            self._tell_final()

    def _dispatch(self) -> None:
        self._dispatch_due = False
        self._fail_if_gone()
        self.perform(self._queue.dispatch())

    def _send(self, action: Dispatch) -> None:
        now = self._loop.time()
        for closure in action.closures:
            closure.payload.sent_at = now
        message: Message
        if action.closures[0].is_replica:
            message, segments = run_replica(action.closures[0])
        else:
            message, segments = run_closures(action.closures)
        self._peers[action.worker][0].notify(message, segments)

    def _settle(self, closure: Closure, error: BaseException | None) -> None:
        self._closures.pop(closure.id, None)
        if not self._closures:
            self._closures.clear()  # of its table, too, which is as large as it has ever been
        if error is not None:
            value = closure.payload.value()
            if value is not None and not value.done():
                value.set_error(error)
        closure.payload = None

    def _tell_final(self) -> None:
        """Tell ps tasks what is final."""
        self._told_final = self._queue.low_water()
        self.links.final_below(self._told_final)
