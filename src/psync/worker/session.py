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
import math
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

from psync.client.context import ClosureContext, Runtime, here
from psync.client.sync import NEVER
from psync.errors import (
    ClosureCancelled,
    ClosureInputError,
    DeadlineExceeded,
    EndOfData,
    RemoteProtocolError,
    SerializationError,
    TransportError,
)
from psync.net.connection import Connection
from psync.net.platform import Platform
from psync.net.shielding import most_are_cancelled
from psync.net.task_reports import stack_of_task
from psync.net.trace import SpanRecorder
from psync.replicas.context import GangMember
from psync.serialization.failures import describe_exception, text_of
from psync.serialization.functions import is_coroutine_step, load_function
from psync.serialization.payloads import EMPTY, Payload, check_size, pack, unpack
from psync.wire import messages
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES, Frame
from psync.worker.input_contexts import InputContext
from psync.worker.iterators import (
    BATCHES_AHEAD,
    IteratorHandle,
    IteratorTable,
    WorkerIterator,
    arriving,
)
from psync.worker.step_thread import StepThread

logger = logging.getLogger(__name__)


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
    return ClosureEnd(kind, described.payload, described.texts)


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
        self, closure: HeldClosure, end: ClosureEnd, seconds: float = 0.0, calls: int = 0
    ) -> None:
        """Gather a result; it leaves with the next turn of the loop at the latest.

        Args:
            closure: The closure.
            end: How it ended.
            seconds: That it took, if it succeeded.
            calls: Updates that it has made then.
        """
        if self._soon is None:
            self._soon = self._loop.call_soon(self.flush)
        segments = end.payload.segments
        self._results.append((closure.id, end.kind, len(segments), end.error))
        if segments:
            self._segments += segments
            self.nbytes += end.payload.nbytes
        if end.kind == "ok":
            self._seconds.append(seconds)
            if calls:
                self._updates.append((closure.id if closure.number < 0 else closure.number, calls))
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
        message = messages.ClosureResults(
            self._results, mean, self._updates or None, late, self.stop
        )
        lane.notify(message, self._segments)
        self._results, self._segments, self.nbytes = [], [], 0
        self._seconds, self._updates, self.stop = [], [], None
        self._late.clear()


def is_signal(error: KeyboardInterrupt) -> bool:
    """Whether a second Ctrl-C ends this process, and the step only happened to be computing."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "asyncio.runners"


MAX_STEPS = 256
"""Loaded functions that a worker keeps; the one loaded longest ago goes first."""


@dataclass(slots=True, eq=False)
class HeldClosure:
    """A closure that this worker holds."""

    id: int
    key: bytes  # of its function
    num_segments: int  # of its arguments; -1: they have to be fetched
    counts: Sequence[int]  # segments of each RemoteValue input
    segments: Sequence[memoryview]
    number: int = -1  # under which ps tasks know it; -1: its id
    arrival: int = NEVER  # see ``prefetch``; NEVER: of a gang, whose replicas meet
    replica: tuple[int, int] | None = None  # which one of how many, if it is of a gang
    context: ClosureContext | None = None  # once it runs
    began: float = 0.0  # loop time at which it did
    name: str = ""  # of its step, once that is here


@dataclass(slots=True, eq=False)
class LoadedStep:
    """A step function on this worker."""

    fn: Callable[..., Any]
    name: str
    result: str  # what messages call its result
    handles: Sequence[IteratorHandle[Any]]  # per-worker iterators that it captured
    is_coroutine: bool
    seconds: float = math.inf  # that its last run took; inf: it has never been run to its end


@dataclass(slots=True, eq=False)
class ClosureInputs:
    """Fetches, unpickles and builds inputs for the closures of one session."""

    fetch: Callable[[Message], Awaitable[Frame]]  # a request to the coordinator
    iterators: IteratorTable  # this worker's; new ones are added
    worker_index: int
    ahead: int  # batches that datasets load ahead in threads
    steps: dict[bytes, LoadedStep] = field(default_factory=dict)  # by key, as they were loaded

    async def load(self, key: bytes) -> LoadedStep:
        """Fetch the step function of that key, which is not among ``steps``.

        Raises:
            SerializationError: It cannot be loaded here.

        Cancellation: Safe.
        """
        handles: list[IteratorHandle[Any]] = []
        fn, name = await self._load(key, handles)
        if len(self.steps) >= MAX_STEPS:
            del self.steps[next(iter(self.steps))]
        result = f'the result of step "{name}"'
        self.steps[key] = LoadedStep(fn, name, result, handles, is_coroutine_step(fn))
        return self.steps[key]

    async def arguments(
        self, closure: HeldClosure, step: LoadedStep
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs, with every per-worker iterator built and its next batch there.

        Raises:
            ClosureInputError: A dataset could not be built.
            Exception: What the arguments raise when they are unpickled.

        Cancellation: Safe; no batch is lost.
        """
        handles: Sequence[IteratorHandle[Any]] = step.handles
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if closure.num_segments:
            segments, counts, own = closure.segments, closure.counts, closure.num_segments
            if own < 0:
                segments, counts, own = await self._fetch_arguments(closure.id)
            values, at = [], own
            for count in counts:
                values.append(Payload.from_segments(segments[at : at + count]))
                at += count
            arrived: list[IteratorHandle[Any]] = []
            token = arriving.set(arrived)
            try:
                args, kwargs = unpack(segments[0], segments[1:own], values) or ((), {})
            finally:
                arriving.reset(token)
            if arrived:
                handles = (*handles, *arrived)
        for handle in handles:
            await self._prepare(handle)
        return args, kwargs

    async def _fetch_arguments(
        self, closure_id: int
    ) -> tuple[Sequence[memoryview], Sequence[int], int]:
        received = await self.fetch(messages.FetchArguments(closure_id))
        message = received.message
        if not isinstance(message, messages.Arguments):
            raise RemoteProtocolError(
                f"expected the arguments of closure {closure_id}, got {type(message).__name__}"
            )
        return received.segments, message.remote_values, message.segments

    async def _load(
        self, key: bytes, handles: list[IteratorHandle[Any]]
    ) -> tuple[Callable[..., Any], str]:
        """Return a function and its name; iterators that it captured are added to ``handles``."""
        received = await self.fetch(messages.FetchFunction(key))
        message = received.message
        if not isinstance(message, messages.Function) or not received.segments:
            raise RemoteProtocolError(f"expected a function, got {type(message).__name__}")
        token = arriving.set(handles)
        try:
            data, *buffers = received.segments
            return load_function(data, buffers, message.name), message.name
        finally:
            arriving.reset(token)

    async def _prepare(self, handle: IteratorHandle[Any]) -> None:
        """Build a per-worker iterator where it is first needed, and wait for its next batch."""
        iterator = self.iterators.get(handle.uid)
        if iterator is None:
            try:
                dataset_fn, _ = await self._load(handle.key, [])
            except SerializationError as exc:
                error = ClosureInputError(f"a dataset could not be built: {exc.message}")
                raise error from exc
            # A worker that was added after the dataset was made reads the share of another one.
            share = self.worker_index % handle.num_pipelines
            iterator = WorkerIterator(
                dataset_fn,
                InputContext(handle.num_pipelines, share, 1),
                ahead=self.ahead,
                position=handle.starts.get(self.worker_index, 0),
                worker_index=self.worker_index,
            )
            self.iterators.add(handle.uid, iterator)
        await iterator.ready()


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
        attach: messages.AttachWorker,
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

    def run_closures(self, message: messages.RunClosures, segments: Sequence[memoryview]) -> None:
        """Queue closures."""
        at, numbers = 0, dict(message.numbers or ())
        arrival = self.runtime.ahead.arrivals = self.runtime.ahead.arrivals + 1
        for closure_id, key, count, counts in message.closures:
            end = at + count + sum(counts) if count > 0 else at  # else none, or to be fetched
            number, own = numbers.get(closure_id, -1), segments[at:end]
            self._queue.append(HeldClosure(closure_id, key, count, counts, own, number, arrival))
            at = end
        self._wake.set()
        if self._told:  # and has not waited for its answer
            self._give_back_all()

    def run_replica(self, message: messages.RunReplica, segments: Sequence[memoryview]) -> None:
        """Queue a closure that is one of a gang."""
        replica = (message.replica_id, message.num_replicas)
        self._queue.append(HeldClosure(*message.closure, segments, replica=replica))
        self._wake.set()

    def give_back(self, message: messages.GiveBack, _: Sequence[memoryview] = ()) -> None:
        """Return closures that have not started; the answer comes in any case."""
        returned = [closure.id for closure in self._take_queued(message.closures)]
        self.control.notify(messages.GivenBack(returned))

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
            await self.control.call(messages.LeaveCluster(reason), deadline=deadline)
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
        self._results.flush()

    def cancel_closures(self, message: messages.CancelClosures, _: Sequence[memoryview]) -> None:
        """Stop closures; those that have not started end at once."""
        for closure in self._take_queued(message.closures):
            self._results.add(closure, CANCELLED)
        running = self.running
        if running is not None and running.id in message.closures:
            assert running.context is not None, "a running closure has a context"
            if not running.context.cancelled:
                running.context.cancel()
                self._runner.cancel()
        self._results.flush()

    def release_iterators(
        self, message: messages.ReleaseIterators, _: Sequence[memoryview]
    ) -> None:
        """Close iterators that nobody refers to any more."""
        for uid in message.uids:
            self._iterators.release(uid)

    def iterator_position(self, message: messages.AskPosition) -> Message:
        """Return how many batches of an iterator steps have been handed."""
        iterator = self._iterators.get(message.uid)
        return messages.IteratorPosition(-1 if iterator is None else iterator.position)

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
        # Without keywords, which cost as much again.
        context = closure.context = ClosureContext(
            self.attach.worker_index, closure.id, self.runtime, self._loop, closure.arrival,
            closure.number, self._late,
        )  # fmt: skip
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
        self._results.add(closure, end, self._now - closure.began, calls)
        if context.stop_reason:
            self._results.flush()
            self._give_back_all()

    async def _end(self, closure: HeldClosure, context: ClosureContext) -> ClosureEnd:
        """Run a closure to its end; whatever user code raises is one."""
        name, ahead = "the step", self.runtime.ahead
        try:
            step = self._inputs.steps.get(closure.key)
            args: tuple[Any, ...] = ()
            kwargs: dict[str, Any] = {}
            may_wait = step is None or closure.num_segments or step.handles
            if may_wait:
                ahead.begin_closure()
            if step is None:
                step = await self._inputs.load(closure.key)
            name = closure.name = context.step = step.name
            if may_wait:
                args, kwargs = await self._inputs.arguments(closure, step)
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
                main_by_name=self._main_by_name,
            )
            if payload is not EMPTY and payload.nbytes > SMALL_BODY_BYTES:
                check_size(payload, step.result, self._limits)
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
