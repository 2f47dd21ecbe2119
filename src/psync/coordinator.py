"""The coordinator: dispatches closures, settles their results, owns links and recovery.

``ClosureQueue`` decides, this performs. What was scheduled within one turn of the loop is sent at
its end, in one message per worker. ``Joins`` knows which calls of join wait for what,
``chief.recovery`` what becomes of ps tasks that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psync.checkpoints.ownership import Owner
from psync.chief.consistent_cut import Cuts
from psync.chief.declarations import Creation, Declaration, OwnOptimizers
from psync.chief.gangs import GangRunner, ScheduledCall, settle, starting
from psync.chief.links import ClusterLinks, CoordinatorOptions
from psync.chief.recovery import ClusterRecovery
from psync.chief.watch import RollbackEvent, describe_closures, watch, watch_closures
from psync.client.context import LATE_HINT, Runtime
from psync.client.ps import PsClient
from psync.closures.closure import NO_DATA, Closure, Identity, Needs, State
from psync.closures.dispatcher import Dispatch, GiveBack
from psync.closures.membership import ScheduleReports, TaskState
from psync.closures.queue import Action as QueueAction
from psync.closures.queue import Cancel, ClosureQueue, Settle
from psync.cluster import ClusterSpec
from psync.errors import (
    ClosedError,
    DeadlineExceeded,
    FencedError,
    ParameterServerLost,
    PsyncError,
    RemoteProtocolError,
    UsageError,
)
from psync.net.connection import Handler, Request
from psync.net.platform import Platform
from psync.net.shielding import at_most, end_all
from psync.replicas.context import forbid_in_merge
from psync.serialization.functions import FunctionTable
from psync.serialization.payloads import EMPTY, Packing, Payload, rebuild_exception, text_of
from psync.serialization.remote_value import RemoteValue
from psync.specs import some_of
from psync.wire import messages
from psync.wire.closure_numbers import pack_kept

logger = logging.getLogger(__name__)


NEVER = 1 << 62
"""The cut-off of a join that ends with an error alone."""

Limit = tuple[float, float]
"""When a join gives up, in loop time, and the seconds that it was given."""

REPORT_EVERY_S = 10.0
"""A join that has heard of nothing for so long says on whom it waits."""

PS_ANSWERS_WITHIN_S = 0.5
"""Else a join says that it does not answer."""


class Joins:
    """All joins of one coordinator.

    A join waits for the closures that were scheduled before it (ids below its cut-off). An error
    ends all joins that wait, at once: it has ended everything that they wait for. The end of a
    worker's data ends none early: each join that waits for the closure that met it raises it when
    all else that it waits for is done.

    Args:
        queue: Says which closures are final, and holds the errors.
        waits_for: Says on whom everybody waits.
    """

    def __init__(self, queue: ClosureQueue, waits_for: Callable[[], Awaitable[str]]) -> None:
        self._queue = queue
        self._waits_for = waits_for
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()  # when a worker last reported
        self.waiting: dict[asyncio.Future[None], int] = {}  # and the ids below which each waits for
        self._ends_of_data: dict[asyncio.Future[None], BaseException | None] = {}  # to be raised
        self._late = Counter[tuple[str, str]]()  # refused operations, by step and operation

        self.stop_reason: str | None = None
        """Why a step asked for the end of training that the latest join met; None if none did."""

    def add(self, cutoff: int) -> asyncio.Future[None]:
        """Return a future that ends when all closures with ids below ``cutoff`` are final.

        Whoever waits for it gives it back with ``discard``.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self.waiting[future] = cutoff
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Nobody waits any more."""
        self.waiting.pop(future, None)
        self._ends_of_data.pop(future, None)
        if future.done():
            future.exception()  # seen, also where whoever waited was cancelled just now

    @contextlib.contextmanager
    def _joining(self, cutoff: int) -> Iterator[asyncio.Future[None]]:
        future = self.add(cutoff)
        self.settle()
        try:
            yield future
        finally:
            self.discard(future)

    async def wait(self, limit: Limit | None, *futures: asyncio.Future[Any]) -> None:
        """Wait until one of the futures is done; say on whom, if it is long.

        Args:
            futures: Are not looked at further, nor cancelled.
            limit: When to give up; None: never.

        Raises:
            DeadlineExceeded: It is not done by then.

        Cancellation: Safe.
        """
        quiet_since = self._loop.time()
        while not any(future.done() for future in futures):
            until = max(quiet_since, self.heard_at) + REPORT_EVERY_S
            if limit is not None:
                deadline, timeout_s = limit
                until = min(until, deadline)
                if self._loop.time() >= deadline:
                    raise DeadlineExceeded(
                        f"join did not end within {timeout_s:g} s: {await self._waits_for()}",
                        hint="scheduled closures continue; join again, or cancel their "
                        "RemoteValues",
                    )
            done, _ = await asyncio.wait(
                futures, timeout=until - self._loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            now = self._loop.time()
            if not done and now >= max(quiet_since, self.heard_at) + REPORT_EVERY_S:
                quiet_since = now
                logger.warning("join waits: %s", await self._waits_for())

    async def below(self, cutoff: int, limit: Limit | None = None) -> asyncio.Future[None]:
        """Wait until all closures with ids below ``cutoff`` are final.

        Returns:
            Done; has the error that a join raises.

        Raises:
            DeadlineExceeded: As for ``wait``, which explains ``limit``.

        Cancellation: Safe; the next one that waits has the error.
        """
        with self._joining(cutoff) as future:
            await self.wait(limit, future)
        return future

    async def run(self, work: Coroutine[Any, Any, Any], limit: Limit | None) -> None:
        """Do something that a join waits for, too; see ``wait``. Cancellation: of both.

        Raises:
            Exception: The error of a closure, or of all of them, that came meanwhile: a ps may be
                lost for good without which ``work`` has no end.
        """
        task = self._loop.create_task(work)
        try:
            with self._joining(NEVER) as failed:
                await self.wait(limit, task, failed)
        finally:
            await end_all((task,))
        if failed.done():
            failed.result()
        task.result()

    async def collect_into(self, error: Exception) -> None:
        """Collect the error that a join would raise, where ``error`` is raised instead.

        If that is another one it becomes the cause of ``error``, or a note.

        Cancellation: Safe; a join still raises it.
        """
        if not self._queue.pending_errors:
            return
        collected = (await self.below(self._queue.next_id)).exception()
        if collected is None or collected is error or isinstance(collected, ClosedError):
            return
        if error.__cause__ is None:
            error.__cause__ = collected
        else:
            error.add_note(f"also failed: {type(collected).__name__}: {text_of(collected)}")

    def note_late(self, worker: str, step: str, operation: str, times: int) -> None:
        """A worker has refused an operation whose step had returned; a join will raise that."""
        if (step, operation) not in self._late:
            logger.warning(
                '%s: %s in step "%s" was refused, because the step had returned; join raises it\n'
                "hint: %s", worker, operation, step, LATE_HINT,
            )  # fmt: skip
        self._late[step, operation] += times

    def take_late(self) -> UsageError | None:
        """Return the error of operations that were refused since this was asked last."""
        if not self._late:
            return None
        texts = [
            f'{operation} in step "{step}"{f" ({times} times)" if times > 1 else ""}'
            for (step, operation), times in self._late.items()
        ]
        self._late.clear()
        return UsageError(
            f"refused, because the step had returned: {'; '.join(some_of(texts, MAX_NAMED))}",
            hint=LATE_HINT,
        )

    def settle(self) -> None:
        """End the joins that are over."""
        ready = {f: cutoff for f, cutoff in self.waiting.items() if self._queue.is_settled(cutoff)}
        if ready:
            self.stop_reason = self._queue.requested_stop
        if ready and self._queue.pending_errors:
            self.fail(self._collect())
            return
        exhausted = self._queue.exhausted_at
        if any(cutoff > exhausted for cutoff in ready.values()):
            error = self._collect()
            concerned = [f for f, cutoff in self.waiting.items() if cutoff > exhausted]
            self._ends_of_data |= dict.fromkeys(concerned, error)
        for future in ready:
            self._end(future, self._ends_of_data.pop(future, None))
        if ready and self.stop_reason is not None:
            self._collect()  # what is scheduled now runs

    def fail(self, error: BaseException | None) -> None:
        """End all joins with an error."""
        for future in list(self.waiting):
            self._end(future, error)

    def warn_of_leftovers(self) -> None:
        """Say what closing now throws away: who forgets ``join`` would take it for done."""
        counts = self._queue.statistics()
        if left := counts.waiting + counts.queued + counts.in_flight:
            logger.warning("closing cancels %d unfinished closures; join was not awaited", left)
        if self._queue.ready_to_raise and (collected := self._queue.collect_error()):
            name, text = type(collected[0]).__name__, text_of(collected[0]).partition("\nhint:")[0]
            logger.warning("closing without join; join would have raised %s: %s", name, text)

    def _collect(self) -> BaseException | None:
        if (collected := self._queue.collect_error()) is None:
            return None
        first, others = collected
        # When a ps is lost, all steps that run fail with the same error.
        texts = Counter(_line(other) for other in others)
        if alike := texts.pop(_line(first), 0):
            first.add_note(f"{alike} more failed likewise")
        for text, count in texts.items():
            times = f" ({count} times)" if count > 1 else ""
            first.add_note(f"also failed{times}: {text}")
        return first

    def _end(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        del self.waiting[future]
        if future.done():  # whoever waited was cancelled
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


MAX_NAMED = 5
"""Closures or tasks in a description: it is repeated in the log, and there may be hundreds."""


def describe_waiting(
    queue: ClosureQueue,
    missing: Sequence[tuple[str, str]],
    others: Sequence[str],
    gone: Sequence[str] = (),
) -> str:
    """Say what runs where, and what else is not done; of what is many, a few are named.

    Args:
        queue: Of the coordinator.
        missing: (name, address) of the tasks that are waited for.
        others: What else is waited for.
        gone: Workers that have left.
    """
    counts, running = queue.statistics(), queue.dispatcher.oldest()
    parts = some_of([f"{closure} on {at}" for at, closure in running.items()], MAX_NAMED)
    behind = counts.waiting + counts.queued + counts.in_flight - len(running)
    if behind:
        parts.append(f"{behind} more wait for their turn")
    if not counts.workers:
        names = ", ".join(some_of([f"{task} at {at}" for task, at in missing], MAX_NAMED))
        left = f"{', '.join(some_of(gone, MAX_NAMED))} left" if gone else ""
        awaited = f"waiting for {names}" if names else "waiting for one to come"
        parts.append(f"no worker is connected ({'; '.join(filter(None, (left, awaited)))})")
    text = "; ".join([*parts, *others]) or "nothing"
    if queue.pending_errors:
        return f"there is an error, raised as soon as these steps have stopped: {text}"
    return text


MAX_ERROR_CHARS = 300
"""Of an error that the status of the cluster shows; ``join`` raises all of it."""


FINAL_EVERY = 1024
"""ps tasks are told that closures are final whenever this many more are, or a quarter of those that
are kept: these are listed each time, and a rollback may have undone a million data shards."""


@dataclass(eq=False)
class FinalClosures:
    """Tells ps tasks which closures are final: late updates of these are refused.

    A ps ignores a number that is lower than one it knows, with what is kept. So ``told`` never goes
    down, not even after an error, when it is above the low-water mark for a while.
    """

    queue: ClosureQueue
    ps: PsClient
    told: int = 0
    refused: bool = False  # whether ps tasks refuse all that was scheduled before an error
    every: int = FINAL_EVERY  # they are told when so many more are final

    def look(self, at_least: int | None = None) -> None:
        """Tell them if so many more closures are final than they know; see ``FINAL_EVERY``."""
        if self.queue.low_water() - self.told >= (at_least or self.every):
            self.told = self.queue.low_water()
            self.tell_again()

    def errors_changed(self) -> None:
        """Let steps be refused that compute on their loop and have not heard of an error yet."""
        self.refused = not self.refused
        if self.refused:
            self.told = self.queue.next_id
            self.tell_again()

    def tell_again(self) -> None:
        """Tell them what they were told last: they may know nothing of it."""
        kept = self.queue.kept(self.told)
        self.every = max(FINAL_EVERY, len(kept) // 4)
        message, segments = messages.FinalBelow(self.told, self.ps.timeline), pack_kept(kept)
        for link in self.ps.links:  # one that is not connected hears of the next, higher number
            link.notify(message, segments)


SETTLE_S = 0.1
"""Nothing is sent for this long after a loss. Workers that died at the same time are noticed first:
what the first of them ran is not sent to the next, and not blamed for its death."""

SETTLE_EVERY_S = 0.5
"""Not more often than this: where workers are lost all the time, the others go on."""


class Coordinator:
    """Schedules closures onto workers.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        declared: Declarations of variables that are to be created; taken from here.
        options: What the user has said.
        program: Token of this process.
        main_by_name: Whether workers run the script of this process, so that classes of its
            ``__main__`` are found there by name.
        own: This program's optimizers, which go on with what was left, and after rollbacks.

    Attributes:
        links, workers, joins, gangs, cuts, events, functions, creation, recovery, runtime: Its
            parts, as ``api`` and ``training`` use them.
        attached: Whether this program goes on with what an earlier one has left.

    Invariant: All is on its loop. After ``close``, ``schedule`` and ``join`` raise ClosedError.
    """

    def __init__(
        self,
        platform: Platform,
        cluster: ClusterSpec,
        declared: list[Declaration],
        options: CoordinatorOptions,
        *,
        program: str,
        main_by_name: bool,
        own: OwnOptimizers,
    ) -> None:
        self._options = options
        self.attached = False
        self.parts = platform.parts
        self._queue = ClosureQueue(max_losses=options.max_losses)
        self._packing = Packing(platform.limits, main_by_name)
        self.joins = Joins(self._queue, self._all_wait_for)
        self.functions = FunctionTable(self._packing)
        self.links = ClusterLinks(platform, cluster, options, program)
        self.workers = self.links.workers
        self.workers.on_joined = self._worker_joined
        self.workers.on_lost = self._worker_lost
        self.workers.on_forgotten = self._worker_forgotten
        self.gangs = GangRunner(
            self._queue, self.functions, self._packing, self._cancel, self.workers,
            prepare=self._prepare, perform=self.perform, waits_for=self.waits_for,
        )  # fmt: skip
        self._reports = ScheduleReports(self.workers.names(), self._queue)
        self.creation = Creation(declared, self.links.ps, own)
        self.events = self.links.events
        self.cuts = Cuts(self.links.ps, functools.partial(self.creation.ensure, last=True))
        self._final = FinalClosures(self._queue, self.links.ps)
        self.recovery = ClusterRecovery(
            self.links, self._queue, self.gangs, self._reports, self.creation,
            perform=self.perform, tell_again=self._final.tell_again,
        )  # fmt: skip
        self.links.endpoint.handlers.update({
            messages.ClosureResults: Handler(self._results),
            messages.GiveBack: Handler(self._given_back),
            messages.FetchFunction: Handler(self._fetch_function),
            messages.FetchArguments: Handler(self._fetch_arguments),
            messages.ReachCollective: Handler(self.gangs.reached),
            messages.LeaveCluster: Handler(self._worker_leaves),
            messages.EndSession: Handler(self.workers.session_ends),
        })  # fmt: skip
        self.runtime = Runtime(self.links.ps, options.origin, program, self._ensure_created)
        self._report_due = asyncio.Event()  # set when the schedule has changed
        self._dispatch_due = False  # ``_dispatch`` comes in this turn of the loop
        self._creating: asyncio.Task[None] | None = None  # meanwhile the queue is paused
        self._tasks: set[asyncio.Task[Any]] = set()  # that end with the coordinator
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
            await self.creation.reattach(self.links.endpoint.incarnation)
        self.attached = self.creation.left is not None
        if not self.attached:
            self.creation.repeatable = []
        if options.attach:
            await self.creation.ensure()  # what does not fit is told here, as far as it is known
        await self.recovery.first_backups(options.connect_timeout_s, attached=self.attached)
        self.recovery.started()
        self._begin(self._report_schedule(), "the schedule is no longer reported")
        if options.closure_timeout_s is not None:
            limit_s = options.closure_timeout_s
            watching = watch_closures(self._queue, limit_s, self.workers.waits, self._give_up)
            self._begin(watching, "the closure timeout is off")
        if options.watchdog_timeout_s is not None:
            limit_s, on_stall = options.watchdog_timeout_s, options.on_stall
            watching = watch(limit_s, self._progress, self.describe, on_stall)
            self._begin(watching, "the watchdog is off")

    def _begin(self, work: Coroutine[Any, Any, object], if_it_fails: str) -> asyncio.Task[Any]:
        """Do something until ``close``, that nothing awaits."""

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s", if_it_fails, exc_info=error)

        self._tasks.add(task := self.loop.create_task(work))
        task.add_done_callback(ended)
        return task

    async def _report_schedule(self) -> None:
        """Report the schedule to ps 0 once a worker waits for others, and then each change.

        One report at a time, so of the states that follow one another meanwhile only the last.
        """
        link = self.links.ps.links[0]
        self._report_due.set()
        try:
            await link.call(messages.AwaitWaiters())
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._reports.next_deadline()):
                        await self._report_due.wait()
                self._report_due.clear()
                if (report := self._reports.decide(self.loop.time())) is not None:
                    await link.call(report)
        except (ParameterServerLost, FencedError, ClosedError) as exc:
            logger.debug("the schedule is no longer reported: %s", exc)  # others say why
        except PsyncError as exc:
            logger.error("the schedule is no longer reported: %s", exc)

    async def close(self) -> None:
        """Cancel what is not final and close all connections.

        Cancellation: Connections may still be closing.
        """
        self._closed = True
        self.recovery.rule.close()  # what is lost from now on is at most noted
        error = ClosedError("the coordinator was closed")
        self.joins.fail(error)
        for worker in list(self._waits):
            self._cancel_wait(worker)
        actions = self._queue.stop()
        self.gangs.fail(error)
        self.perform(actions)
        try:
            await end_all(self._tasks)
            await self.gangs.close()
            await self.recovery.close()
            await self.cuts.close()
            self.events.close()
            # A ps without a backup keeps an update until there is one, and nobody orders it now.
            await at_most(self._options.ps_timeout_s, self.links.ps.outgoing.drain())
        finally:
            try:
                await self.links.close()
            finally:
                self.owned.clear()
                for closure in self._queue.open.values():  # nobody will report them
                    settle(closure, error)

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
            arguments = self._packing.arguments(function.name, args, kwargs)
        return self._queue_call(ScheduledCall(function, arguments, may_repeat), identity, needs)

    def reschedule(self, event: RollbackEvent) -> list[RemoteValue[Any]]:
        """Queue again what a rollback has undone; see ``ClusterCoordinator.reschedule``."""
        forbid_in_merge("reschedule")
        calls = self.recovery.calls_undone_by(event)
        return [self._queue_call(ScheduledCall(each.function, each.arguments)) for each in calls]

    def _queue_call(
        self, call: ScheduledCall, identity: Identity | None = None, needs: Needs | None = None
    ) -> RemoteValue[Any]:
        arguments, inputs = call.arguments, call.arguments.remote_values
        for each in inputs:
            if each._owner is not self:
                raise UsageError(
                    f"{each!r} belongs to another coordinator",
                    hint="fetch its value there and pass the value",
                )
        if needs is None:
            needs = call.needs() if arguments.kept or call.function.payload.kept else NO_DATA
        # Without keywords, which cost as much again.
        closure = Closure(
            self._queue.next_id, call, call.function.name, needs,
            call.inline_bytes if arguments is not EMPTY else 0,
            [value._closure for value in inputs] if inputs else (), identity,
        )  # fmt: skip
        value: RemoteValue[Any] = RemoteValue(closure, self._cancel)
        call.value = weakref.ref(value)
        if self.creation.pending and self._creating is None:
            self._create_if_declared()
        if actions := self._queue.schedule(closure):
            self.perform(actions)
        if not self._dispatch_due:
            self._dispatch_due = True
            self.loop.call_soon(self._dispatch)
        return value

    def done(self) -> bool:
        """Return whether nothing is queued or in flight."""
        return not self._queue.open

    async def join(self, timeout_s: float | None, *, finish_steps: bool = False) -> None:
        """Wait for all that was scheduled; see ``ClusterCoordinator.join``.

        Args:
            timeout_s: Seconds, or None.
            finish_steps: Whether gradients that were counted in a synchronous step are to be
                applied if nothing is left that might complete it.

        Cancellation: Safe; closures go on.
        """
        forbid_in_merge("join")
        limit = None if timeout_s is None else (self.loop.time() + timeout_s, timeout_s)
        cutoff = self._queue.next_id
        self.recovery.fail_if_gone()
        self._prepare()
        if self._creating is not None:
            await self.joins.wait(limit, self._creating)
        settled = await self.joins.below(cutoff, limit)
        self._final.look(1)  # who joins is done with them, so nothing of theirs may come any more
        error = settled.exception()
        if error is None and finish_steps and self.done():
            await self._finish_steps(limit)
        if (late := self.joins.take_late()) is not None:
            if error is None:
                raise late
            error.add_note(f"also failed: {late.message}")
        settled.result()

    @property
    def stop_reason(self) -> str | None:
        """Why a step has asked for the end of training; see ``ClusterCoordinator.stop_reason``."""
        return self._queue.requested_stop or self.joins.stop_reason

    async def _finish_steps(self, limit: Limit | None) -> None:
        finish = self.links.ps.links[0].call(messages.FinishSteps())
        await self.joins.run(finish, limit)

    def waits_for(self) -> str:
        """Say what a join waits for."""
        others = ["variables are being created"] if self._creating is not None else []
        others += self.gangs.describe()
        others += self.workers.describe()
        others += [
            f"{name}, which is lost, has data left" for name in self._queue.dispatcher.awaited()
        ]
        given_up = self.workers.given_up
        left = [worker for worker in self.links.membership.gone() if worker not in given_up]
        return describe_waiting(self._queue, self.links.missing(), others, left)

    async def _all_wait_for(self) -> str:
        """Say what a join waits for, which ps tasks are silent, and what open steps lack."""
        found, running = [self.waits_for()], self._queue.dispatcher.oldest()
        counted = await self.links.ps_counters(PS_ANSWERS_WITHIN_S)
        found += [
            f"{link.task} does not answer"
            for link, counters in zip(self.links.ps.links, counted, strict=True)
            if counters is None
        ]
        for name, group in (counted[0] or {"sync": {}})["sync"].items():
            lacks = group["lacks"] or [task for task in running if task not in group["waits"]]
            if lacks and (group["waits"] or group["lacks"]):
                found.append(
                    f"step {group['step']} of {name} has {group['counted']} of {group['target']} "
                    f"gradients and waits for {', '.join(some_of(lacks, MAX_NAMED))}"
                )
        return "; ".join(found)

    def describe(self) -> list[str]:
        """Say what runs where, what waits and for whom; for reports."""
        return [
            f"coordinator, incarnation {self.links.endpoint.incarnation}",
            *describe_closures(self._queue, self.loop.time()),
            *(f"not connected: {task} at {at}" for task, at in self.links.missing()),
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
        work = self.workers.ask(messages.AskPosition(uid, last=True))
        self._begin(work, f"iterator {uid} stays on workers")
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
        await self.creation.ensure()
        await self.recovery.begin()

    def _create_if_declared(self) -> None:
        if self.creation.pending and self._creating is None:
            self._queue.pause()
            self._creating = self._begin(self._create(), "variables cannot be created")

    async def _create(self) -> None:
        try:
            await self.creation.ensure(last=True)
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
        self.workers.end_session(worker, error, blame=True)

    def _worker_leaves(self, request: Request[messages.LeaveCluster]) -> None:
        if self.workers.leaves(request.peer, request.message):
            self.perform(self._queue.worker_leaves(request.peer.task))
        request.answer(messages.Done())

    # What workers say of closures.

    def _results(self, request: Request[messages.ClosureResults]) -> None:
        peer, message, segments = request.peer, request.message, request.segments
        if (worker := self.workers.current(peer)) is None:
            return  # of a worker that was given up: its closures run elsewhere
        worker.heard_at = self.loop.time()
        ended = []
        for number, updates in message.updates or ():
            closure = self._queue.open.get(number)
            call = None if closure is None else closure.payload
            ended.append((number, updates, closure, call))
        if message.stop is not None:  # before the ends that a join waits for
            closure_id, reason = message.stop
            closure = self._queue.open.get(closure_id)
            if self._queue.ending is None:
                logger.info("training stops: %s (%s on %s)", reason, closure, peer.task)
            self.perform(self._queue.request_stop(reason))
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
            self._ended(peer.task, closure_id, outcome, error, payload)
        for step, operation, times in message.late or ():
            self.joins.note_late(peer.task, step, operation, times)
        self._finished(peer.task, finished, message.mean_seconds)
        # What ends after a cut was begun may have to be named, though nobody keeps that cut yet.
        early = not self.cuts.taken and not self.recovery.checkpoints.paths
        for each in ended:
            self.recovery.note_ended(*each, early=early)
        self.joins.heard_at = self.loop.time()
        self._final.look()

    def _finished(
        self, worker: str, results: Sequence[tuple[int, Payload]], mean_seconds: float
    ) -> None:
        """Closures ended with values, which are there before anything that needs them is sent."""
        if not results:
            return
        ids, _ = zip(*results, strict=True)
        actions = self._queue.finished(worker, ids, mean_seconds)  # raises if one is not its own
        self._reports.has_data(worker)
        settled = actions[0]
        assert isinstance(settled, Settle), "which begins with these closures"
        for closure, (_, payload) in zip(settled.closures, results, strict=False):
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
        payload: Payload,
    ) -> None:
        if outcome == "cancelled":
            self.perform(self._queue.cancelled(worker, closure_id))
            return
        if error is None or outcome not in ("error", "end_of_data"):
            raise RemoteProtocolError(f"{worker}: closure {closure_id} ended as {outcome!r}")
        type_name, text, traceback_text = error
        exc = rebuild_exception(worker, type_name, text, traceback_text, payload)
        closure = self._queue.open.get(closure_id)
        if outcome == "end_of_data":
            actions = self._queue.end_of_data(worker, closure_id, exc)  # raises if not its own
            if closure is not None and closure.is_final:
                self._reports.out_of_data(worker)
            self.perform(actions)
        elif not (isinstance(exc, ParameterServerLost) and self.recovery.will_recover(exc)):
            actions = self._queue.failed(worker, closure_id, exc)  # raises if not its own
            self.workers.note_error(worker, f"{closure}: {type_name}: {text}"[:MAX_ERROR_CHARS])
            self.perform(actions)

    def _given_back(self, request: Request[messages.GiveBack]) -> None:
        if self.workers.current(request.peer) is not None:
            self.perform(self._queue.given_back(request.peer.task, request.message.closures))

    def _fetch_function(self, request: Request[messages.FetchFunction]) -> None:
        function = self.functions.lookup(request.message.key)
        if function is None:
            raise UsageError(f"{request.peer.task} asked for a function that is no longer needed")
        request.answer(messages.Text(function.name), function.payload.segments)

    def _fetch_arguments(self, request: Request[messages.FetchArguments]) -> None:
        number = request.message.closure
        closure = self._queue.open.get(number)
        if closure is None:
            raise UsageError(f"{request.peer.task} asked for closure {number}, which has ended")
        request.answer(*starting([closure], math.inf))

    # What closures come to.

    def perform(self, actions: Sequence[QueueAction]) -> None:
        """Do what the queue decided."""
        replicas, controls = list[Closure](), self.workers.controls
        for action in actions:
            if isinstance(action, Settle):
                for closure in action.closures:
                    settle(closure, closure.error)
                    if closure.is_replica:
                        replicas.append(closure)
            elif isinstance(action, Dispatch):
                self._send(action)
            elif isinstance(action, Cancel):
                controls[action.worker].notify(messages.CancelClosures(list(action.ids)))
            elif isinstance(action, GiveBack):
                controls[action.worker].notify(messages.GiveBack(list(action.ids)))
        if bool(self._queue.pending_errors) is not self._final.refused:
            self._final.errors_changed()
        if self.joins.waiting:
            self.joins.settle()
        if self._reports.look():
            self._report_due.set()
        if self.gangs.runs:
            self.gangs.look(replicas)

    def _dispatch(self) -> None:
        self._dispatch_due = False
        if self.recovery.is_gone:
            self.recovery.fail_if_gone()
        self.perform(self._queue.dispatch())

    def _send(self, action: Dispatch) -> None:
        self.creation.repeatable = None  # the program begins to compute
        now = self.loop.time()
        for closure in action.closures:
            closure.payload.sent_at = now
        self.workers.controls[action.worker].notify(*starting(action.closures))
