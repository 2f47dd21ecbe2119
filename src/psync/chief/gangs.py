"""Closures as they are sent to workers, and gangs: ``strategy.run`` on all living workers at once.

Small arguments are sent with a closure, large ones are fetched by its worker. Gangs run one after
the other:

    coordinator → RunClosures to each worker, then CancelClosures if need be
    worker      → ReachCollective (a request, answered when all are there), ClosureResults

``ClosureQueue`` decides when a gang may begin, ``Gang`` how its replicas meet and how it ends; this
carries both out. The values of a collective, and its result, are pickled and pass through the
coordinator: gangs are for evaluation, initialization and small models. A replica that waits in a
collective is not reported to ps 0 as in flight, so a synchronous step does not wait for it. A
function that merges values may not call ``run``, ``schedule`` or ``join``: it would deadlock.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.chief.links import WorkerLinks
from psync.closures.closure import NO_DATA, Closure, Needs, Replica
from psync.closures.gang import Gang
from psync.closures.queue import Action, Barrier, ClosureQueue
from psync.errors import (
    ClosedError,
    ClosureCancelled,
    ClosureInputError,
    FencedError,
    LocalProtocolError,
    PsyncError,
    ReplicaValueError,
    UsageError,
)
from psync.net.connection import Answer, Request, fail
from psync.net.shielding import end_all
from psync.numerics.replicas import local_results, regroup
from psync.replicas.context import cross_replica, forbid_in_merge
from psync.serialization.functions import Function, FunctionTable
from psync.serialization.payloads import (
    EMPTY,
    Packing,
    Payload,
    describe_exception,
    text_of,
    unpack,
)
from psync.serialization.remote_value import RemoteValue
from psync.wire.messages import ClosureResults, ReachCollective, RunClosures

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 << 10
"""Larger arguments are fetched by the worker when it is about to run the closure: a worker
whose step computes on its loop does not read, and must not have more than 64 KiB unread."""

ITERATOR_BYTES = 4 << 20
"""Taken for what a dataset's iterator holds on the workers."""


@dataclass(slots=True, eq=False)
class ScheduledCall:
    """What the coordinator keeps of a closure until it is final: the closure's payload."""

    function: Function
    arguments: Payload  # keeps the RemoteValues and iterators among them alive
    may_repeat: bool = True  # whether ``reschedule`` runs it again if a rollback undoes it
    replica: tuple[int, int] | None = None  # which one of how many, if it is of a gang
    sent_at: float | None = None  # loop time; None: to nobody so far
    value: weakref.ref[RemoteValue[Any]] = field(init=False)  # the user may have dropped it

    @property
    def inline_bytes(self) -> int:
        """Most bytes that its arguments take in a message that starts it."""
        if self.arguments.remote_values:  # their sizes are not known yet
            return INLINE_BYTES
        nbytes = self.arguments.nbytes
        return nbytes if nbytes <= INLINE_BYTES else 0

    def needs(self) -> Needs:
        """Return the per-worker data that it takes."""
        kept = (*self.arguments.kept, *self.function.payload.kept)
        return NO_DATA.union(*(iterator._needs() for iterator in kept))

    def parts(self) -> list[tuple[Hashable, int]]:
        """Return the memory that keeping this call holds: (key of what may be shared, bytes).

        Iterators hold batches on every worker, whose sizes are unknown here.
        """
        found: list[tuple[Hashable, int]] = [(self.function.key, self.function.payload.nbytes)]
        if self.arguments is not EMPTY:
            found.append((id(self.arguments), self.arguments.nbytes))
        found += [
            (id(value), 0 if value._payload is None else value._payload.nbytes)
            for value in self.arguments.remote_values
        ]
        kept = (*self.arguments.kept, *self.function.payload.kept)
        return found + [(id(iterator), ITERATOR_BYTES) for iterator in kept]

    def segments(self) -> tuple[list[Any], list[int]]:
        """Return all segments of the arguments, and how many of them each RemoteValue has.

        Raises:
            LocalProtocolError: An input has no value yet.
        """
        segments: list[Any] = list(self.arguments.segments)
        counts = []
        for value in self.arguments.remote_values:
            payload = value._payload
            if payload is None:
                raise LocalProtocolError(f"{value!r} is the input of a closure, but has no value")
            segments += payload.segments
            counts.append(len(payload.segments))
        return segments, counts


def settle(closure: Closure, error: BaseException | None) -> None:
    """Let go of a closure that is final; its value has come before, if it has one."""
    if error is not None:
        value = closure.payload.value()
        if value is not None and not value.done():
            value._set_error(error)
    closure.payload = None


def starting(
    closures: Sequence[Closure], inline_bytes: float = INLINE_BYTES
) -> tuple[RunClosures, list[Any]]:
    """Return the message that starts closures, or one replica of a gang, and its segments.

    Args:
        closures: Are started.
        inline_bytes: A closure whose arguments are larger has to fetch them.

    Raises:
        LocalProtocolError: An input has no value yet.
    """
    items: list[tuple[int, bytes, int, list[int]]] = []
    numbers: list[tuple[int, int]] = []
    segments: list[Any] = []
    for closure in closures:
        call: ScheduledCall = closure.payload
        key = call.function.key
        if closure.identity is not None:
            numbers.append((closure.id, closure.number))
        if call.arguments is EMPTY:
            items.append((closure.id, key, 0, []))
            continue
        own, counts = call.segments()
        if sum(map(len, own)) > inline_bytes:
            items.append((closure.id, key, -1, []))
        else:
            items.append((closure.id, key, len(own) - sum(counts), counts))
            segments += own
    return RunClosures(items, numbers or None, closures[0].payload.replica), segments


# --- gangs ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class GangRun:
    """One call of ``run``."""

    strategy: Any  # whose ``run`` was called
    function: Function  # what each replica runs
    arguments: list[Payload]  # for each replica, or one for all
    barrier: Barrier  # its place in the queue
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the caller: merge functions run in it."""
    ended: asyncio.Future[None] = field(default_factory=asyncio.Future)
    # Once it has begun, then there are closures:
    gang: Gang = field(init=False)
    closures: list[Replica] = field(default_factory=list)
    values: list[RemoteValue[Any]] = field(default_factory=list)
    merges: dict[int, asyncio.Task[list[Answer]]] = field(default_factory=dict)

    def replica_of(self, closure_id: int) -> int | None:
        """Return which of its replicas a closure is; None: it is none of them."""
        first = self.closures[0].id if self.closures else 0
        return closure_id - first if 0 <= closure_id - first < len(self.closures) else None

    def tell(self, error: BaseException | None) -> None:
        """Let the caller go on, unless it was told before."""
        if error is not None:
            fail(self.ended, error)
        elif not self.ended.done():
            self.ended.set_result(None)

    def arguments_for(self, count: int) -> list[Payload]:
        """Return the arguments of each of so many replicas.

        Raises:
            ReplicaValueError: There are values for another number of replicas.
            ClosureInputError: A RemoteValue among them has no value, and never will.
        """
        for payload in self.arguments:
            for value in payload.remote_values:
                if value._payload is None:  # all closures before the gang are final
                    cause = value._closure.error
                    raise ClosureInputError(
                        f'run of "{self.function.name}": its input, {value._closure}, has no value'
                    ) from cause
        if len(self.arguments) == 1:
            return self.arguments * count
        if len(self.arguments) != count:
            raise ReplicaValueError(
                f'run of "{self.function.name}": there are arguments for {len(self.arguments)} '
                f"replicas, but {count} workers",
                hint="workers have joined or left since the values were created; create them again",
            )
        return self.arguments


async def merge(strategy: Any, brought: Sequence[Payload], packing: Packing) -> list[Answer]:
    """Call the function of a collective with the values of all replicas.

    Args:
        strategy: What the function gets, and in whose cross-replica context it runs.
        brought: By replica id, the pickled (function, value); the first one's function is called.
        packing: Says how the result is sent.

    Returns:
        What each replica is told: its part of the result, or the error, which all get.

    Cancellation: The function is cancelled.
    """
    count = len(brought)
    try:
        pairs = [unpack(payload.data, payload.buffers) for payload in brought]
        function = pairs[0][0]
        with cross_replica(strategy, num_replicas=count, merging=True):
            result = function(strategy, [value for _, value in pairs])
            result = await result if inspect.isawaitable(result) else result
        return _replies(result, count, packing)
    except Exception as exc:
        return [_reply(*describe_exception(exc, main_by_name=packing.main_by_name))] * count


def _replies(result: Any, count: int, packing: Packing) -> list[Answer]:
    """Return each replica's part of what a merge function returned.

    Raises:
        ReplicaValueError: It has parts for another number of replicas.
        SerializationError: It cannot be sent.
    """
    parts = local_results(result)
    if len(parts) not in (1, count):
        raise ReplicaValueError(
            f"the merge function returned values of {len(parts)} replicas, expected {count}"
        )
    subject = "what the merge function returned"
    replies = [_reply(packing.value(part, subject)) for part in parts]
    return replies * (count // len(parts))


def _reply(payload: Payload, error: tuple[str, str, str] | None = None) -> Answer:
    outcome, segments = "ok" if error is None else "error", payload.segments
    return ClosureResults([(-1, outcome, len(segments), error)], 0.0), segments


REPORT_EVERY_S = 10.0
"""A run that takes so long says on whom it waits."""


@dataclass(slots=True, eq=False)
class GangRunner:
    """The gangs of one coordinator. True while there is one."""

    queue: ClosureQueue  # in which they have their places
    functions: FunctionTable  # pickles what they run
    packing: Packing  # of what they are sent
    cancel: Callable[[int], None]  # cancels the closure with an id
    workers: WorkerLinks  # on which they run
    prepare: Callable[[], None]  # creates what is declared; the queue is paused meanwhile
    perform: Callable[[Sequence[Action]], None]  # does what the queue decided
    waits_for: Callable[[], str]  # says what runs where, and what else is waited for
    runs: deque[GangRun] = field(default_factory=deque, init=False)  # the first may run
    _looking: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    def __bool__(self) -> bool:
        return bool(self.runs)

    async def run(
        self,
        strategy: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``fn`` on all living workers at once; see ``ParameterServerStrategy.run``."""
        if self._closed:
            raise ClosedError("run on a closed coordinator")
        forbid_in_merge("run")
        function = self.functions.register(fn, stacklevel=4)
        # Those of each replica, or one payload if they are the same for all.
        arguments = [
            self.packing.arguments(function.name, *own) for own in local_results((args, kwargs))
        ]
        if self.queue.ending is not None:
            raise self._cancelled()
        self.prepare()
        run = GangRun(strategy, function, arguments, self.queue.add_barrier())
        self.runs.append(run)
        self.look(())
        try:
            while not run.ended.done():
                await asyncio.wait((run.ended,), timeout=REPORT_EVERY_S)
                if not run.ended.done():
                    logger.warning('run of "%s" waits: %s', function.name, self.waits_for())
        except asyncio.CancelledError:
            if not run.ended.done():
                self._abandon(run, ClosureCancelled(f'run of "{function.name}" was cancelled'))
            raise
        run.ended.result()
        return regroup([value.get_nowait() for value in run.values])

    def describe(self) -> list[str]:
        """Say what the first gang waits for."""
        for run in self.runs:
            if not run.closures:
                return [f'run of "{run.function.name}" waits for its turn']
            waiting = run.gang.describe()
            return [f'in run of "{run.function.name}" {waiting}'] if waiting else []
        return []

    def look(self, replicas: Sequence[Closure]) -> None:
        """Go on where the queue has changed. ``replicas``: those that have become final."""
        for closure in replicas:
            run, replica = self.runs[0], self.runs[0].replica_of(closure.id)
            assert replica is not None, f"{closure} is of another gang"
            if closure.error is None:
                run.gang.finished(replica)
            else:
                run.gang.failed(replica, closure.error)
            self._look_at(run)
        if self._looking:  # further down: the end of one run lets the next be looked at
            return
        self._looking = True
        try:
            while self.runs and not self.runs[0].closures:
                run = self.runs[0]
                if self.queue.ending is not None:
                    self._end(run, self._cancelled())
                elif self.queue.may_begin(run.barrier) and (workers := self.workers.ready()):
                    self._begin(run, workers)
                else:
                    break
        finally:
            self._looking = False

    def fail(self, error: Exception) -> None:
        """End all gangs with an error that is none of a replica: a ps is lost, say.

        The queue must know of it, so that nothing begins because they have ended.
        """
        for run in self.runs:
            if not run.closures:  # the end of one of them would cancel those behind it
                run.tell(error)
        while self.runs and not self.runs[-1].closures:
            self._end(self.runs[-1], error)
        if self.runs:
            self._abandon(self.runs[0], error)

    async def close(self) -> None:
        """End all gangs; nothing of them is left. Cancellation: merge functions are cancelled."""
        self._closed = True
        await end_all(task for run in self.runs for task in run.merges.values())
        for run in list(self.runs):
            error = run.gang.error if run.closures else None
            self._end(run, error or ClosedError("the coordinator was closed"))

    # Begin and end.

    def _begin(self, run: GangRun, workers: Sequence[str]) -> None:
        try:
            arguments = run.arguments_for(len(workers))
        except PsyncError as exc:
            self._end(run, exc)
            return

        def stop(replica: int) -> None:
            self.perform(self.queue.cancel(run.closures[replica].id))

        def stop_merging() -> None:
            for task in run.merges.values():
                task.cancel()

        run.gang = Gang(workers, stop, stop_merging)
        for replica_id, payload in enumerate(arguments):
            call = ScheduledCall(run.function, payload, replica=(replica_id, len(workers)))
            name = f"{run.function.name}, replica {replica_id}"
            closure = Replica(self.queue.next_id + replica_id, call, name=name)
            value: RemoteValue[Any] = RemoteValue(closure, self.cancel)
            call.value = weakref.ref(value)
            run.closures.append(closure)
            run.values.append(value)
        self.perform(self.queue.begin_gang(list(zip(workers, run.closures, strict=True))))

    def _end(self, run: GangRun, error: BaseException | None) -> None:
        """Nothing of a gang is left; ``error`` is what its caller is told."""
        self.runs.remove(run)
        run.tell(error)
        self.perform(self.queue.open_barrier(run.barrier))
        self.look(())

    def _abandon(self, run: GangRun, error: Exception) -> None:
        """The caller, or the coordinator, wants no more of it; replicas may take time to stop."""
        if not run.closures:
            self._end(run, error)
            return
        if not isinstance(error, PsyncError):
            error = ClosureCancelled(f"{type(error).__name__}: {text_of(error)}")
        run.gang.cancel(error)
        self._look_at(run)

    def _cancelled(self) -> ClosureCancelled:
        return ClosureCancelled(
            f"run was cancelled: {self.queue.ending}",
            hint="run it again after the next join",
        )

    # Collectives.

    def reached(self, request: Request[ReachCollective]) -> None:
        """A replica has come to a collective."""
        peer, message = request.peer, request.message
        run = self.runs[0] if self.runs else None
        replica = run.replica_of(message.closure) if run is not None else None
        if run is None or replica is None:
            raise UsageError(f"{message.what}: closure {message.closure} has ended")
        closure = run.closures[replica]
        if self.workers.current(peer) is None or closure.worker != peer.task or closure.is_final:
            raise FencedError(f"{message.what}: {peer.task} does not run {closure}")
        request.on_given_up = functools.partial(self._gave_up, run, replica)
        if (number := run.gang.arrive(replica, message.what, request)) is not None:
            requests = run.gang.requests(number)  # whose bodies are (function, value)
            brought = [Payload.from_segments(each.segments) for each in requests]
            task = asyncio.get_running_loop().create_task(
                merge(run.strategy, brought, self.packing), context=run.context.copy()
            )
            run.merges[number] = task
            task.add_done_callback(functools.partial(self._merged, run, number))
        self._look_at(run)

    def _gave_up(self, run: GangRun, replica: int, request: Request[Any]) -> None:
        if not request.peer.is_closed and not run.closures[replica].is_final:
            run.gang.gave_up(replica)
            self._look_at(run)

    def _look_at(self, run: GangRun) -> None:
        """Something has happened to a gang: tell of it, and end it when nothing of it is left."""
        gang, changed = run.gang, False
        for replica, closure in enumerate(run.closures):
            changed = changed or closure.in_collective is not gang.waits(replica)
            closure.in_collective = gang.waits(replica)
        if changed:
            self.perform(())  # ps 0 has to know who may still push
        if gang.has_ended and self.runs and self.runs[0] is run:
            self._end(run, gang.error)

    def _merged(self, run: GangRun, number: int, task: asyncio.Task[list[Answer]]) -> None:
        """The function of a collective has ended, was cancelled, or has cancelled itself."""
        del run.merges[number]
        if task.cancelled() or task.exception() is not None:
            run.gang.cancel(ClosureCancelled("a merge function was stopped"))
        if requests := run.gang.merged(number):
            for request, reply in zip(requests, task.result(), strict=True):
                request.answer(*reply)
        self._look_at(run)
