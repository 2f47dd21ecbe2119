"""The session of a worker with one coordinator: runs closures, one after the other.

    coordinator → RunClosures, GiveBack, CancelClosures, AskPosition
    worker      → ClosureResults, GiveBack, Fetch…, ReachCollective, LeaveCluster, EndSession

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
import contextvars
import functools
import inspect
import logging
import math
import queue
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import msgspec

from psync.client.context import ClosureContext, Runtime, here, setting
from psync.client.link import expect
from psync.client.sync import NEVER
from psync.errors import (
    ClosureCancelled,
    ClosureInputError,
    DeadlineExceeded,
    EndOfData,
    SerializationError,
    TransportError,
)
from psync.net.connection import Connection
from psync.net.platform import Platform
from psync.net.shielding import carried_out, most_are_cancelled
from psync.net.task_reports import stack_of_task
from psync.net.trace import SpanRecorder
from psync.replicas.context import GangMember
from psync.serialization.functions import is_coroutine_step, load_function
from psync.serialization.payloads import (
    EMPTY,
    Packing,
    Payload,
    check_size,
    describe_exception,
    pack,
    text_of,
    unpack,
)
from psync.wire import messages
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES
from psync.worker.data_sources import InputContext
from psync.worker.iterators import BATCHES_AHEAD, IteratorHandle, WorkerIterator, arriving

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


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

MAX_STEPS = 256
"""Loaded functions that a worker keeps; the one loaded longest ago goes first."""


class HeldClosure(msgspec.Struct, eq=False):
    """A closure that this worker holds."""

    id: int
    key: bytes  # of its function
    num_segments: int  # of its arguments; -1: they have to be fetched
    counts: Sequence[int]  # segments of each RemoteValue input
    segments: Sequence[memoryview]
    number: int  # under which ps tasks know it; -1: its id
    arrival: int  # see ``prefetch``; NEVER: of a gang, whose replicas meet
    replica: tuple[int, int] | None  # which one of how many, if it is of a gang
    context: ClosureContext | None = None  # once it runs
    began: float = 0.0  # loop time at which it did


@dataclass(slots=True, eq=False)
class LoadedStep:
    """A step function on this worker."""

    fn: Callable[..., Any]
    name: str
    result: str  # what messages call its result
    handles: Sequence[IteratorHandle[Any]]  # per-worker iterators that it captured
    is_coroutine: bool
    seconds: float = math.inf  # that its last run took; inf: it has never been run to its end


_Job = tuple[Callable[[], Any], contextvars.Context, asyncio.Future[Any]]


class StepThread:
    """Runs functions in a daemon thread, in order. Started with the first one.

    Not ``ThreadPoolExecutor``: its threads keep the process alive until their work ends, and a
    step that hangs must not keep a worker from exiting.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    async def call(
        self, function: Callable[[], Any], is_over: Callable[[], bool] = lambda: True
    ) -> Any:
        """Run ``function`` in the thread, in a copy of this context, and return its value.

        Args:
            function: A thread cannot be stopped: it goes on, whatever becomes of who waits.
            is_over: Whether nobody waits for it any more: then a cancellation is raised at once.

        Raises:
            BaseException: What it raises.

        Cancellation: Raised once the function has returned, unless ``is_over``.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="psync step", daemon=True)
            self._thread.start()
        work: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((function, contextvars.copy_context(), work))
        value, error = await carried_out(work, is_over)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread once its present function returns."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, context, future = job
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (context.run(function), None)
            except BaseException as exc:  # handed to whoever awaits the future
                outcome = (None, exc)
            del job, function, context
            try:
                self._loop.call_soon_threadsafe(future.set_result, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


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


@dataclass(eq=False, repr=False)
class Session:
    """The closures of one coordinator on this worker.

    Args:
        attach: What the coordinator said.
        control: Its control connection: closures come and results go here.
        bulk: Its bulk connection: large arguments and results.
        runtime: The way to the ps tasks.
        iterators: Per-worker iterators by uid; new ones are added, all are closed with the session.
        platform: Limits, and whether there are threads.
        main_by_name: Whether this process runs the coordinator's script.
    """

    attach: messages.AttachWorker
    control: Connection
    bulk: Connection
    runtime: Runtime
    iterators: dict[str, WorkerIterator]
    platform: Platform
    main_by_name: bool

    def __post_init__(self) -> None:
        threads = self.platform.threads
        self._ahead = BATCHES_AHEAD if threads else 0  # that datasets load in threads
        self._steps: dict[bytes, LoadedStep] = {}  # by key, as they were loaded
        self._thread = StepThread() if threads else None
        self._packing = Packing(self.platform.limits, self.main_by_name)
        self._queue: deque[HeldClosure] = deque()
        self.running: HeldClosure | None = None
        self._wake = asyncio.Event()
        # What the coordinator has not been told yet; it leaves with ``_flush``.
        self._results: list[tuple[int, str, int, tuple[str, str, str] | None]] = []
        self._segments: list[Any] = []
        self._nbytes = 0  # of the segments
        self._seconds: list[float] = []  # of the closures in ``_results`` that succeeded
        self._updates: list[tuple[int, int]] = []  # of these: (number, calls) where any
        self._stop: tuple[int, str] | None = None  # the closure that asks for the end, and why
        self._late = Counter[tuple[str, str]]()  # refused operations, by step and operation
        self._soon: asyncio.Handle | None = None  # flushes, while there is something
        self._loop = asyncio.get_running_loop()
        self._now = 0.0  # loop time when the last step ended
        self._last_turn = 0.0  # loop time when other callbacks had their turn
        self._ended = False
        self._leaving = False  # begins nothing but replicas, which nobody else can run
        self._told = False  # and the coordinator knows
        self._idle = asyncio.Event()  # set when nothing runs that leaving waits for
        self._recorder: SpanRecorder | None = None  # while somebody traces
        self.told: dict[type[Message], Callable[[Any, Sequence[memoryview]], None]] = {
            messages.RunClosures: self.run_closures,
            messages.GiveBack: self.give_back,
            messages.CancelClosures: self.cancel_closures,
        }
        self._runner = self._loop.create_task(self._run())

    # What the coordinator says.

    def run_closures(self, message: messages.RunClosures, segments: Sequence[memoryview]) -> None:
        """Queue closures."""
        at, numbers, replica = 0, dict(message.numbers or ()), message.replica
        arrival = self.runtime.ahead.arrivals = self.runtime.ahead.arrivals + 1
        if replica is not None:
            arrival = NEVER
        for closure_id, key, count, counts in message.closures:
            end = at + count + sum(counts) if count > 0 else at  # else none, or to be fetched
            number, own = numbers.get(closure_id, -1), segments[at:end]
            self._queue.append(
                HeldClosure(closure_id, key, count, counts, own, number, arrival, replica)
            )
            at = end
        self._wake.set()
        if self._told:  # and has not waited for its answer
            self._give_back_all()

    def give_back(self, message: messages.GiveBack, _: Sequence[memoryview] = ()) -> None:
        """Return closures that have not started; the answer comes in any case."""
        returned = [closure.id for closure in self._take_queued(message.closures)]
        self.control.notify(messages.GiveBack(returned))

    # Leaving.

    async def leave(self, reason: str, *, hint: str = "") -> None:
        """Give back what has not begun, end what runs, and tell the coordinator.

        LeaveCluster, after which nothing more is sent here; GiveBack; ClosureResults of what ran,
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
            await self.control.call(messages.LeaveCluster(reason), deadline=deadline)
        except DeadlineExceeded:
            logger.info("the coordinator is busy; leaving anyway")
        self._told = True
        self._give_back_all()
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._wait_idle()
        except TimeoutError:
            if (running := self.running) is not None:
                step = running.context.step if running.context is not None else ""
                logger.info(
                    "worker %d leaves when closure %d%s has ended%s",
                    self.attach.worker_index, running.id, f" ({step})" if step else "", hint,
                )  # fmt: skip
            await self._wait_idle()
        await self.runtime.ps.outgoing.drain()
        await self.bulk.wait_writable()  # what is said next would overtake large results
        for lane in (self.bulk, self.control):
            await lane.call(
                messages.EndSession(reason, True), deadline=self._loop.time() + ANSWER_S
            )

    def _give_back_all(self) -> None:
        """Return all closures that have not started, but replicas: nobody else can run them."""
        self.give_back(messages.GiveBack([each.id for each in self._queue if each.replica is None]))

    async def _wait_idle(self) -> None:
        """Wait until nothing runs, and all that ran is told. Cancellation: safe."""
        while not self._ended and (self.running is not None or self._queue):
            self._idle.clear()
            await self._idle.wait()
        self._flush()

    def cancel_closures(self, message: messages.CancelClosures, _: Sequence[memoryview]) -> None:
        """Stop closures; those that have not started end at once."""
        for closure in self._take_queued(message.closures):
            self._add(closure, CANCELLED)
        running = self.running
        if running is not None and running.id in message.closures:
            assert running.context is not None, "a running closure has a context"
            if not running.context.cancelled:
                running.context.cancel()
                self._runner.cancel()
        self._flush()

    def iterator_position(self, message: messages.AskPosition) -> Message:
        """Return how many batches steps have been handed; close the iterator if that is all."""
        iterator = self.iterators.get(message.uid)
        if iterator is None:
            return messages.Number(-1)
        if message.last:
            self.iterators.pop(message.uid).close()
        return messages.Number(iterator.position)

    def describe(self) -> list[str]:
        """Say what runs here, where it waits, and what waits for it; for reports."""
        attach, running = self.attach, self.running
        lines = [f"serves coordinator {attach.coordinator} as incarnation {attach.incarnation}"]
        if running is None or running.context is None:
            lines.append("runs nothing")
        else:
            asked = ", asked to stop" if running.context.cancelled else ""
            seconds = self._loop.time() - running.began
            name = running.context.step or "whose function or arguments are being fetched"
            lines.append(f"runs closure {running.id} ({name}) since {seconds:.1f} s{asked}, at")
            lines += [f"  {line}" for line in stack_of_task(self._runner)]
        lines.append(
            f"queue: {len(self._queue)} closures; results to be sent: {len(self._results)}"
        )
        links = self.runtime.ps.links
        return lines + [f"link to {link.task} at {link.address}: {link.state}" for link in links]

    def record(self, recorder: SpanRecorder | None) -> None:
        """Note closures and kinds of work in a recorder from now on; None: nobody traces."""
        self._recorder = recorder
        if recorder is None:
            self.runtime.ps.work.watch(None)
            return
        self.runtime.ps.work.watch(functools.partial(recorder.note, "work"))
        if self.running is not None:
            recorder.note("began", self.running.id)

    def stop(self, reason: str) -> None:
        """Say that this session cannot go on, and nothing more; ``close`` has yet to be called."""
        self._ended = True
        self.control.notify(messages.EndSession(reason, False))
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
        for iterator in self.iterators.values():
            iterator.close()
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
                if self._nbytes > SMALL_BODY_BYTES:
                    await self._turn()
                    self.runtime.ahead.begin_closure()  # none, but it may wait
                    await self.bulk.wait_writable()
                    self.runtime.ahead.end_closure()
                if self._now - self._last_turn > TURN_S:
                    await self._turn()
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

    async def _turn(self) -> None:
        """Let results leave, with refusals of tasks that a step has left; and requests arrive."""
        await asyncio.sleep(0)
        self._last_turn = self._loop.time()

    async def _run_one(self, closure: HeldClosure) -> None:
        # Without keywords, which cost as much again.
        context = closure.context = ClosureContext(
            self.attach.worker_index, closure.id, self.runtime, self._loop, closure.arrival,
            closure.number, self._refused,
        )  # fmt: skip
        if closure.replica is not None:
            context.gang = GangMember(*closure.replica, context, self.bulk.call, self._packing)
        closure.began = self._loop.time()
        if self._recorder is not None:
            self._recorder.note("began", closure.id)
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
        if self._recorder is not None:
            self._recorder.note("ended", closure.id, context.step, end.kind)
        if context.stop_reason:
            self._stop = closure.id, context.stop_reason
        calls = next(context.ordinals) - context.dropped  # its number: those before it
        self._add(closure, end, self._now - closure.began, calls)
        if context.stop_reason:
            self._flush()
            self._give_back_all()

    async def _end(self, closure: HeldClosure, context: ClosureContext) -> ClosureEnd:
        """Run a closure to its end; whatever user code raises is one."""
        ahead = self.runtime.ahead
        try:
            step = self._steps.get(closure.key)
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}
            may_wait = step is None or closure.num_segments or step.handles
            if may_wait:
                ahead.begin_closure()
            if step is None:
                step = await self._load_step(closure.key)
            context.step = step.name
            if may_wait:
                args, kwargs = await self._arguments(closure, step)
                ahead.end_closure()
            if step.seconds > SHORT_S:
                await self._turn()
                if step.seconds == math.inf:  # what is done once is no part of the pace
                    closure.began = self._loop.time()
            value = await self._call(step, args, kwargs, closure)
            if context.cancelled:  # it did not let itself be stopped
                return CANCELLED
            payload = pack(
                value,
                subject=step.result,
                receiver="the coordinator",
                main_by_name=self._packing.main_by_name,
            )
            if payload is not EMPTY and payload.nbytes > SMALL_BODY_BYTES:
                check_size(payload, step.result, self._packing.limits)
        except asyncio.CancelledError:
            if self._ended:
                raise
            if context.cancelled:
                return CANCELLED
            name = context.step or "the step"
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
            if isinstance(exc, KeyboardInterrupt):
                *_, (frame, _) = traceback.walk_tb(exc.__traceback__)
                if frame.f_globals.get("__name__") == "asyncio.runners":
                    raise  # a second Ctrl-C ends this process, the step only happened to compute
            return CANCELLED if context.cancelled else self._failed("error", exc)
        return ClosureEnd("ok", payload)

    async def _call(
        self, step: LoadedStep, args: Any, kwargs: dict[str, Any], closure: HeldClosure
    ) -> Any:
        self.runtime.ahead.begin_closure()
        token = here.set(closure.context)
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
        step.seconds = self._loop.time() - closure.began
        return value

    def _failed(self, kind: str, exc: BaseException) -> ClosureEnd:
        """Return the end, "error" or "end_of_data", of a closure that has raised."""
        if type(exc) is ValueError and "read-only" in text_of(exc):  # numpy's, which says no more
            if READ_ONLY_HINT not in getattr(exc, "__notes__", ()):
                exc.add_note(READ_ONLY_HINT)
        return ClosureEnd(kind, *describe_exception(exc, main_by_name=self._packing.main_by_name))

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

    # What a closure needs.

    async def _fetch(self, request: Message, expected: type[M]) -> tuple[M, Sequence[memoryview]]:
        """Return the coordinator's answer, and its segments."""
        try:
            received = await self.bulk.call(request)
        except TransportError as exc:
            raise _CoordinatorGone from exc
        answer = expect(received, expected, "the coordinator", type(request).__name__)
        return answer, received.segments

    async def _load(
        self, key: bytes, handles: list[IteratorHandle[Any]]
    ) -> tuple[Callable[..., Any], str]:
        """Return a function and its name; iterators that it captured are added to ``handles``."""
        name, (data, *buffers) = await self._fetch(messages.FetchFunction(key), messages.Text)
        with setting(arriving, handles):
            return load_function(data, buffers, name.value), name.value

    async def _load_step(self, key: bytes) -> LoadedStep:
        handles: list[IteratorHandle[Any]] = []
        fn, name = await self._load(key, handles)
        if len(self._steps) >= MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        result = f'the result of step "{name}"'
        self._steps[key] = LoadedStep(fn, name, result, handles, is_coroutine_step(fn))
        return self._steps[key]

    async def _arguments(
        self, closure: HeldClosure, step: LoadedStep
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs, with every per-worker iterator built and its next batch there."""
        handles: list[IteratorHandle[Any]] = list(step.handles)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if closure.num_segments:
            segments, counts, own = closure.segments, closure.counts, closure.num_segments
            if own < 0:
                request = messages.FetchArguments(closure.id)
                message, segments = await self._fetch(request, messages.RunClosures)
                ((_, _, own, counts),) = message.closures
            values, at = [], own
            for count in counts:
                values.append(Payload.from_segments(segments[at : at + count]))
                at += count
            token = arriving.set(handles)
            try:
                args, kwargs = unpack(segments[0], segments[1:own], values) or ((), {})
            finally:
                arriving.reset(token)
        for handle in handles:
            iterator = self.iterators.get(handle.uid) or await self._build(handle)
            await iterator.ready()
        return args, kwargs

    async def _build(self, handle: IteratorHandle[Any]) -> WorkerIterator:
        """Build a per-worker iterator, where it is first needed."""
        try:
            dataset_fn, _ = await self._load(handle.key, [])
        except SerializationError as exc:
            raise ClosureInputError(f"a dataset could not be built: {exc.message}") from exc
        # A worker that was added after the dataset was made reads the share of another one.
        share = self.attach.worker_index % handle.num_pipelines
        made = self.iterators[handle.uid] = WorkerIterator(
            dataset_fn,
            InputContext(handle.num_pipelines, share, 1),
            ahead=self._ahead,
            position=handle.starts.get(self.attach.worker_index, 0),
            worker_index=self.attach.worker_index,
            uid=handle.uid,
        )
        return made

    # What the coordinator is told.

    def _add(
        self, closure: HeldClosure, end: ClosureEnd, seconds: float = 0.0, calls: int = 0
    ) -> None:
        """Gather an end, with the updates that it has made; it leaves soon, see ``_flush``."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._flush)
        segments = end.payload.segments
        self._results.append((closure.id, end.kind, len(segments), end.error))
        if segments:
            self._segments += segments
            self._nbytes += end.payload.nbytes
        if end.kind == "ok":
            self._seconds.append(seconds)
            if calls:
                self._updates.append((closure.id if closure.number < 0 else closure.number, calls))
        if end.error is not None:  # texts add up in the header, whose size is limited
            self._flush()

    def _refused(self, context: ClosureContext, operation: str) -> None:
        """An operation is refused whose step had returned; perhaps in a thread."""
        with contextlib.suppress(RuntimeError):  # our loop is closed
            if asyncio._get_running_loop() is self._loop:
                self._add_refused(context.step, operation)
            else:
                self._loop.call_soon_threadsafe(self._add_refused, context.step, operation)

    def _add_refused(self, step: str, operation: str) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._flush)
        self._late[step, operation] += 1
        if len(self._late) >= MAX_LATE:
            self._flush()

    def _flush(self) -> None:
        """Send what has gathered; with the next turn of the loop at the latest."""
        if self._soon is None:
            return
        self._soon.cancel()
        self._soon = None
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        late = [(*what, times) for what, times in self._late.items()] if self._late else None
        lane = self.bulk if self._nbytes > SMALL_BODY_BYTES else self.control
        lane.notify(
            messages.ClosureResults(self._results, mean, self._updates or None, late, self._stop),
            self._segments,
        )
        self._results, self._segments, self._nbytes = [], [], 0
        self._seconds, self._updates, self._stop = [], [], None
        self._late.clear()
