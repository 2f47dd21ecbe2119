"""The session of a worker with one coordinator: runs closures, one after the other.

    coordinator → RunClosures, RunReplica, GiveBack, CancelClosures, ReleaseIterators, AskPosition
    worker      → ClosureResults, GivenBack, Fetch…, ReachCollective, LeaveCluster, EndSession

A closure is queued here until its turn; from its turn on it is running, and its end is
reported, whatever it is, once the updates that it began have ended too. A session ends with its
connections: what runs is cancelled, what is queued is dropped, and updates of what cannot be
cancelled are refused by the ps tasks, which have fenced this incarnation.

All steps run in one task: a task for each would double what an empty closure costs. So every
step has to leave that task as it found it: uncancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from psync.client.context import ClosureContext, here
from psync.client.runtime import Runtime
from psync.errors import ClosureCancelled, DeadlineExceeded, EndOfData, TransportError
from psync.net.connection import Connection
from psync.net.platform import Platform
from psync.net.shielding import most_are_cancelled
from psync.net.task_reports import stack_of_task
from psync.replicas.gang_member import GangMember
from psync.serialization.payloads import check_size, pack
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES, Frame
from psync.wire.messages import (
    AskPosition,
    AttachWorker,
    CancelClosures,
    EndSession,
    GiveBack,
    GivenBack,
    IteratorPosition,
    LeaveCluster,
    ReleaseIterators,
    RunClosures,
    RunReplica,
)
from psync.worker.inputs import ClosureInputs, HeldClosure, LoadedStep
from psync.worker.iterators import BATCHES_AHEAD, IteratorTable
from psync.worker.results import CANCELLED, ClosureEnd, ResultsToSend, failed, is_signal
from psync.worker.step_thread import StepThread

logger = logging.getLogger(__name__)

SHORT_S = 200e-6
"""After a step that took longer the loop gets a turn: the next one may compute for minutes."""

TURN_S = 0.002
"""Short steps that never await give the loop a turn after this long."""

ANSWER_S = 5.0
"""How long a coordinator may take for each answer while we leave: it may be merging for a gang."""

SILENCE_S = 1.0
"""A closure that runs on for longer than this while we leave is named in the log."""

CLOSE_TIMEOUT_S = 3.0
"""How long the end of a session waits for a step that does not stop when it is cancelled."""


class _CoordinatorGone(Exception):
    """A connection of the session is gone, and so the session is over."""


class Session:
    """The closures of one coordinator on this worker.

    Args:
        attach: What the coordinator said.
        control: Its control connection: closures come and results go here.
        bulk: Its bulk connection: large arguments and results.
        runtime: The way to the ps tasks.
        iterators: Per-worker iterators; closed with the session.
        platform: Limits, and whether there are threads.
        main_by_name: Whether this process runs the coordinator's script.
    """

    def __init__(
        self,
        attach: AttachWorker,
        control: Connection,
        bulk: Connection,
        runtime: Runtime,
        iterators: IteratorTable,
        platform: Platform,
        main_by_name: bool,
    ) -> None:
        self.attach = attach
        self.control = control
        self.runtime = runtime
        self.bulk = bulk
        self._iterators = iterators
        self._inputs = ClosureInputs(
            self._fetch, iterators, attach.worker_index, BATCHES_AHEAD if platform.threads else 0
        )
        self._thread = StepThread() if platform.threads else None
        self._limits = platform.limits
        self._main_by_name = main_by_name
        self._queue: deque[HeldClosure] = deque()
        self.running: HeldClosure | None = None
        self._wake = asyncio.Event()
        self._results = ResultsToSend(control, bulk)
        self._failed = functools.partial(failed, main_by_name=main_by_name)
        self._loop = asyncio.get_running_loop()
        self._now = 0.0  # loop time when the last step ended
        self._last_turn = 0.0  # loop time when other callbacks had their turn
        self._ended = False
        self._leaving = False  # begins nothing but replicas, which nobody else can run
        self._told = False  # and the coordinator knows
        self._idle = asyncio.Event()  # set when nothing runs that leaving waits for
        # Told of each closure that begins, and with its end, while somebody traces.
        self.watch: Callable[[HeldClosure, str], None] | None = None
        self._runner = self._loop.create_task(self._run())

    # What the coordinator says.

    def run_closures(self, message: RunClosures, segments: Sequence[memoryview]) -> None:
        """Queue closures."""
        at, numbers = 0, dict(message.numbers or ())
        arrival = self.runtime.ahead.arrivals = self.runtime.ahead.arrivals + 1
        for closure_id, key, count, counts in message.closures:
            end = at
            if count > 0:  # else they are none, or to be fetched
                end += count + sum(counts)
            number, own = numbers.get(closure_id, -1), segments[at:end]
            self._queue.append(HeldClosure(closure_id, key, count, counts, own, number, arrival))
            at = end
        self._wake.set()
        if self._told:  # and has not waited for its answer
            self._give_back_all()

    def run_replica(self, message: RunReplica, segments: Sequence[memoryview]) -> None:
        """Queue a closure that is one of a gang."""
        replica = (message.replica_id, message.num_replicas)
        self._queue.append(HeldClosure(*message.closure, segments, replica=replica))
        self._wake.set()

    def give_back(self, message: GiveBack, _: Sequence[memoryview] = ()) -> None:
        """Return closures that have not started; the answer comes in any case."""
        returned = [closure.id for closure in self._take_queued(message.closures)]
        self.control.notify(GivenBack(returned))

    # Leaving.

    async def leave(self, reason: str, *, hint: str = "") -> None:
        """Give back what has not begun, end what runs, and tell the coordinator.

        LeaveCluster, after which nothing more is sent here; GivenBack; ClosureResults of what ran,
        whose updates are all answered; EndSession on both connections, by which we have left. So
        no closure that has finished here runs again.

        Args:
            reason: Why, for its log.
            hint: How it can be had sooner, for our own.

        Raises:
            TransportError: The session ended before: the coordinator knows that, too.

        Cancellation: Safe; the coordinator goes on waiting for what runs.
        """
        self._leaving = True
        try:
            deadline = self._loop.time() + ANSWER_S
            await self.control.call(LeaveCluster(reason), deadline=deadline)
        except DeadlineExceeded:
            logger.info("the coordinator is busy; leaving anyway")
        self._told = True
        self._give_back_all()
        waiting = asyncio.ensure_future(self._wait_idle())
        try:
            await asyncio.wait((waiting,), timeout=SILENCE_S)
            running = self.running
            if not waiting.done() and running is not None:
                name = f" ({running.name})" if running.name else ""
                logger.info(
                    "worker %d leaves when closure %d%s has ended%s",
                    self.attach.worker_index, running.id, name, hint,
                )  # fmt: skip
            await waiting
        finally:
            waiting.cancel()
        await self.runtime.ps.outgoing.drain()
        await self.bulk.wait_writable()  # what is said next would overtake large results
        for lane in (self.bulk, self.control):
            await lane.call(EndSession(reason, True), deadline=self._loop.time() + ANSWER_S)

    def _give_back_all(self) -> None:
        """Return all closures that have not started, but replicas: nobody else can run them."""
        self.give_back(GiveBack([each.id for each in self._queue if each.replica is None]))

    async def _wait_idle(self) -> None:
        """Wait until nothing runs, and all that ran is told. Cancellation: safe."""
        while not self._ended and (self.running is not None or self._queue):
            self._idle.clear()
            await self._idle.wait()
        self._results.flush()

    def cancel_closures(self, message: CancelClosures, _: Sequence[memoryview]) -> None:
        """Stop closures; those that have not started end at once."""
        for closure in self._take_queued(message.closures):
            self._results.add(closure.id, CANCELLED)
        running = self.running
        if running is not None and running.id in message.closures:
            assert running.context is not None, "a running closure has a context"
            if not running.context.cancelled:
                running.context.cancel()
                self._runner.cancel()
        self._results.flush()

    def release_iterators(self, message: ReleaseIterators, _: Sequence[memoryview]) -> None:
        """Close iterators that nobody refers to any more."""
        for uid in message.uids:
            self._iterators.release(uid)

    def iterator_position(self, message: AskPosition) -> Message:
        """Return how many batches of an iterator steps have been handed."""
        iterator = self._iterators.get(message.uid)
        return IteratorPosition(-1 if iterator is None else iterator.position)

    def describe(self) -> list[str]:
        """Say what runs here, where it waits, and what waits for it; for reports."""
        attach, running = self.attach, self.running
        lines = [f"serves coordinator {attach.coordinator} as incarnation {attach.incarnation}"]
        if running is None or running.context is None:
            lines.append("runs nothing")
        else:
            asked = ", asked to stop" if running.context.cancelled else ""
            seconds = self._loop.time() - running.began
            name = running.name or "whose function or arguments are being fetched"
            lines.append(f"runs closure {running.id} ({name}) since {seconds:.1f} s{asked}, at")
            lines += [f"  {line}" for line in stack_of_task(self._runner)]
        queued, results = len(self._queue), len(self._results)
        lines.append(f"queue: {queued} closures; results to be sent: {results}")
        links = self.runtime.ps.links
        return lines + [f"link to {link.task} at {link.address}: {link.state}" for link in links]

    def stop(self, reason: str) -> None:
        """Say that this session cannot go on, and nothing more; ``close`` has yet to be called."""
        self._ended = True
        self.control.notify(EndSession(reason, False))
        self.control.close()  # the coordinator takes that for the end of both

    async def close(self) -> None:
        """Stop what runs. Waits a few seconds for it, and says so if it goes on.

        Cancellation: Safe; everything is told to stop.
        """
        self._ended = True
        self._idle.set()
        self._queue.clear()
        running = self.running
        if running is not None and running.context is not None:
            running.context.cancel()
        self._runner.cancel()
        if self._thread is not None:
            self._thread.close()
        self._iterators.close()
        await asyncio.wait((self._runner,), timeout=CLOSE_TIMEOUT_S)
        if not self._runner.done():
            logger.warning(
                "worker %d: closure %s does not stop although it was cancelled; its updates are "
                "rejected", self.attach.worker_index, running.id if running is not None else "?",
            )  # fmt: skip

    def _take_queued(self, ids: Sequence[int]) -> list[HeldClosure]:
        wanted = set(ids)
        taken = [closure for closure in self._queue if closure.id in wanted]
        self._queue = deque(c for c in self._queue if c.id not in wanted)
        return taken

    # Running.

    async def _run(self) -> None:
        before = WeakSet(asyncio.all_tasks())
        while not self._ended:
            try:
                await self._run_queued()
            except asyncio.CancelledError:
                if self._ended or most_are_cancelled(before):
                    raise
                self._uncancel()  # by what a step has left running
            except _CoordinatorGone as exc:
                self.control.abort(exc.__cause__ if isinstance(exc.__cause__, Exception) else None)
                return
            except Exception as exc:  # of psync itself: the closures run again elsewhere
                logger.exception("worker %d cannot continue", self.attach.worker_index)
                self.control.abort(exc)
                return

    async def _run_queued(self) -> None:
        while not self._ended:
            if not self._queue or (self._leaving and self._queue[0].replica is None):
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                self._last_turn = self._loop.time()
                continue
            self.running = self._queue.popleft()
            try:
                await self._run_one(self.running)
            finally:
                self.running = None
            if self._results.nbytes > SMALL_BODY_BYTES:
                await self._turn()
                self.runtime.ahead.begin_closure()  # none, but it may wait
                await self.bulk.wait_writable()
                self.runtime.ahead.end_closure()
            if self._now - self._last_turn > TURN_S:
                await self._turn()

    async def _turn(self) -> None:
        """Let results leave, with refusals of tasks that a step has left; and requests arrive."""
        await asyncio.sleep(0)
        self._last_turn = self._loop.time()

    async def _run_one(self, closure: HeldClosure) -> None:
        context = closure.context = ClosureContext(
            worker_index=self.attach.worker_index,
            closure_id=closure.id,
            runtime=self.runtime,
            loop=self._loop,
            arrival=closure.arrival,
            number=closure.number,
            late=self._late,
        )
        if closure.replica is not None:
            context.gang = GangMember(
                *closure.replica, context, self.bulk.call, self._limits, self._main_by_name
            )  # fmt: skip
        closure.began = self._loop.time()
        if self.watch is not None:
            self.watch(closure, "")
        try:
            with self.runtime.ps.work.compute:
                end = await self._end(closure, context)
        finally:
            context.closed = True
        if end.kind != "ok":  # a join raises that, or it was stopped
            context.late = None
        if self.runtime.ps.outgoing.begun or self._runner.cancelling():
            await self._drain_pushes()
        if self._runner.cancelling():
            self._uncancel()
        self.running = None  # from here on there is nothing to cancel
        self._now = self._loop.time()
        if self.watch is not None:
            self.watch(closure, end.kind)
        if context.stop_reason and self._results.stop is None:
            self._results.stop = closure.id, context.stop_reason
        calls = next(context.ordinals) - context.dropped  # its number: those before it
        self._results.add(closure.id, end, self._now - closure.began, calls, closure.number)
        if context.stop_reason:
            self._results.flush()
            self._give_back_all()

    async def _end(self, closure: HeldClosure, context: ClosureContext) -> ClosureEnd:
        """Run a closure to its end; whatever user code raises is one."""
        name, ahead = "the step", self.runtime.ahead
        try:
            ahead.begin_closure()  # what it is given may be waited for
            step = self._inputs.steps.get(closure.key)
            if step is None:
                step = await self._inputs.load(closure.key)
            name = closure.name = context.step = step.name
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}
            if closure.num_segments or step.handles:
                args, kwargs = await self._inputs.arguments(closure, step)
            ahead.end_closure()
            if step.seconds > SHORT_S:
                await self._turn()
                if step.is_new:  # what is done once for a function is no part of the pace
                    closure.began = self._loop.time()
            value = await self._call(step, args, kwargs, context)
            if context.cancelled:  # it did not let itself be stopped
                return CANCELLED
            payload = pack(
                value,
                subject=f'the result of step "{name}"',
                receiver="the coordinator",
                main_by_name=self._main_by_name,
            )
            if payload.nbytes > SMALL_BODY_BYTES:
                check_size(payload, f'the result of step "{name}"', self._limits)
        except asyncio.CancelledError:
            if self._ended:
                raise
            if context.cancelled:
                return CANCELLED
            return self._failed("error", ClosureCancelled(f'step "{name}" cancelled itself'))
        except _CoordinatorGone:
            raise
        except GeneratorExit as exc:
            if asyncio.current_task(self._loop) is not self._runner:
                raise  # this coroutine itself is thrown away
            return self._failed("error", exc)
        except EndOfData as exc:
            exc.updates = next(context.ordinals)  # its number: those before it
            return CANCELLED if context.cancelled else self._failed("end_of_data", exc)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt) and is_signal(exc):
                raise
            return CANCELLED if context.cancelled else self._failed("error", exc)
        return ClosureEnd("ok", payload)

    async def _call(
        self, step: LoadedStep, args: Any, kwargs: dict[str, Any], context: ClosureContext
    ) -> Any:
        began = self._loop.time()
        self.runtime.ahead.begin_closure()
        token = here.set(context)
        try:
            if step.is_coroutine:
                value = await step.fn(*args, **kwargs)
            else:
                function = functools.partial(step.fn, *args, **kwargs)
                if self._thread is None:
                    value = function()
                else:
                    value = await self._thread.call(function, lambda: self._ended)
                if inspect.isawaitable(value):
                    value = await value
        finally:
            here.reset(token)
        self.runtime.ahead.end_closure()
        step.seconds = self._loop.time() - began
        return value

    def _late(self, context: ClosureContext, operation: str) -> None:
        """An operation is refused whose step had returned; perhaps in a thread."""
        with contextlib.suppress(RuntimeError):  # there is no loop here, or ours is closed
            if asyncio.get_running_loop() is self._loop:
                self._results.add_late(context.step, operation)
                return
        with contextlib.suppress(RuntimeError):
            add = self._results.add_late
            self._loop.call_soon_threadsafe(add, context.step, operation)

    async def _drain_pushes(self) -> None:
        """Wait for updates that the step has begun and not waited for, as when it is cancelled."""
        while True:
            try:
                if self._runner.cancelling():
                    await asyncio.sleep(0)  # uncancel leaves, before 3.13, what is not yet raised
                return await self.runtime.ps.outgoing.drain()
            except asyncio.CancelledError:
                if self._ended:
                    raise

    def _uncancel(self) -> None:
        while self._runner.uncancel() > 0:
            pass

    async def _fetch(self, message: Message) -> Frame:
        try:
            return await self.bulk.call(message)
        except TransportError as exc:
            raise _CoordinatorGone from exc
