"""The caller's context: a step, dataset code, or the program itself; and its way to ps tasks.

The answer lies in a context variable, so two workers in one process do not see each other's
steps, and a task or thread that a step starts with its context counts as that step. There is
one variable for both kinds of user code, because code is never in a step and in a dataset at
once.

A plain (non-async) step runs in a thread. It reaches the worker's loop through `wait`, which
carries the calling thread's context to the loop; ``asyncio.run_coroutine_threadsafe`` would
not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import itertools
import os
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from psync.client.counters import PulledSteps
from psync.client.extras import ErrorFeedback
from psync.client.plan import Plan
from psync.client.ps import AccumulatorClient, PsClient
from psync.client.sync import PulledAhead, SyncClient
from psync.errors import ClosureCancelled, ContextError, UsageError, other_loop
from psync.net.platform import PerProcess
from psync.specs import STEP_BITS, count_of
from psync.store.push_counts import HOME
from psync.wire.messages import Pushed

T = TypeVar("T")

MAX_REASON = 1000
"""Characters of a reason to stop."""
MAX_NAMED = 5
"""Variables in a message: a model may have hundreds."""

LATE_HINT = "await, inside the step, every task and thread that it starts"


class ClosureContext(msgspec.Struct, eq=False):
    """One run of one closure on this worker.

    Invariant: `closed` and `cancelled` are set on the worker's loop, and never unset.
    """

    worker_index: int
    closure_id: int
    runtime: Any = None  # through which variables talk to ps tasks; opaque here
    loop: asyncio.AbstractEventLoop | None = None  # None where no plain step can call `wait`
    arrival: int = 0  # when it came to this worker, see ``prefetch``
    number: int = -1  # under which ps tasks know it; -1: its id
    late: Callable[[ClosureContext, str], None] | None = None
    """Told of each operation that comes after the step has returned; None: it has failed."""
    gang: Any = None  # through which a replica meets the others; opaque here, None: no gang
    step: str = ""  # name of its step function, once that is loaded
    closed: bool = False  # the step has returned or raised: its pushes are refused
    cancelled: bool = False  # another closure failed, or this one was cancelled
    stop_reason: str = ""  # why the step asks for the end of training
    dropped: int = 0  # numbers that no update bears, or one that changes nothing, says its ps
    ordinals: Iterator[int] = msgspec.field(default_factory=itertools.count)
    """Numbers of the calls of this run. Counting is atomic: threads of a step may share it."""
    _pulled: PulledSteps | None = None
    _waiting: tuple[asyncio.Task[Any], ...] = ()
    """What threads of this step wait for."""

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "closed" if self.closed else "open"
        return f"<closure {self.closure_id} on worker {self.worker_index}, {state}>"

    @property
    def number_on_ps(self) -> int:
        """Under which number ps tasks know it."""
        return self.closure_id if self.number < 0 else self.number

    @property
    def pulled(self) -> PulledSteps:
        """What its pulls have seen of synchronous groups."""
        if self._pulled is None:
            self._pulled = PulledSteps()
        return self._pulled

    def check_open(self, operation: str = "push", variables: Sequence[Any] = ()) -> None:
        """Refuse ``operation`` unless the step is still running.

        Args:
            operation: For messages.
            variables: Variables that it concerns, for messages; none if it names them.

        Raises:
            ClosureCancelled: If the closure was cancelled.
            UsageError: If the step has returned: whatever it left running is too late; or this is
                another event loop than the worker's.
        """
        if (self.cancelled or self.closed) and variables and '"' not in operation:
            names = [f'"{variable.name}"' for variable in variables[:MAX_NAMED]]
            more = ["…"] if len(variables) > MAX_NAMED else []
            operation = f"{operation} ({', '.join([*names, *more])})"
        if self.cancelled:
            raise ClosureCancelled(f"{operation} in closure {self.closure_id}: it was cancelled")
        if self.closed:
            if self.late is not None:
                self.late(self, operation)
            raise UsageError(
                f"{operation} after the step has returned (closure {self.closure_id})",
                hint=LATE_HINT,
            )
        if self.loop is not None and asyncio._get_running_loop() not in (None, self.loop):
            raise other_loop(operation)

    def cancel(self) -> None:
        """Cancel the closure, and wake its threads that are in `wait`.

        A coroutine step is cancelled by whoever owns its task.
        """
        self.cancelled = True
        for task in self._waiting:
            task.cancel()

    def start_waiting(
        self,
        awaitable: Awaitable[T],
        context: contextvars.Context,
        outcome: concurrent.futures.Future[T],
    ) -> None:
        """Await ``awaitable`` on this loop in ``context``; ``outcome`` gets what comes of it."""
        task = asyncio.get_running_loop().create_task(
            # A coroutine itself, so that a task cancelled before it starts closes it.
            awaitable if inspect.iscoroutine(awaitable) else result_of(awaitable),
            name=f"psync wait of closure {self.closure_id}",
            context=context,
        )
        self._waiting += (task,)

        def ended(task: asyncio.Task[T]) -> None:
            self._waiting = tuple(other for other in self._waiting if other is not task)
            error = None if task.cancelled() else task.exception()
            if self.cancelled or task.cancelled():
                error = ClosureCancelled(f"closure {self.closure_id} was cancelled while it waited")
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        task.add_done_callback(ended)
        if self.cancelled:  # between the thread's check and now
            task.cancel()


@dataclass(frozen=True, slots=True)
class DatasetContext:
    """Dataset code of one worker is running."""

    worker_index: int


Running: TypeAlias = ClosureContext | DatasetContext | None
"""Who is running: a step, dataset code, or, as None, the program itself."""

here: contextvars.ContextVar[Running] = contextvars.ContextVar("psync_here", default=None)
"""Who is running."""


@contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Generator[None, None, None]:
    """Return a context manager inside which a context variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


inside = functools.partial(setting, here)
"""Returns a context manager inside which a step, or dataset code, is running."""


def current_closure() -> ClosureContext | None:
    """Return the closure whose step is running here, or None: the program, or dataset code."""
    who = here.get()
    return who if type(who) is ClosureContext else None


def request_stop(reason: str) -> None:
    """Ask for the end of training from within a step, when its loss is NaN or good enough.

    When the step has ended, closures that no worker has started are cancelled, and so are closures
    scheduled before ``join`` returns; running closures continue to their ends. Then ``join``
    returns, ``coordinator.stop_reason`` is ``reason``, and new closures run again. ``Trainer.fit``
    ends with the current epoch. Of several reasons the first one counts.

    Args:
        reason: Text for the log, ``coordinator.stop_reason`` and the history of ``fit``; at most
            1,000 characters are kept.

    Raises:
        ContextError: Outside a step, or when the step has ended.
        UsageError: ``reason`` is not a text, or is empty.

    Example:
        async def step():
            loss = ...
            if not math.isfinite(loss):
                psync.request_stop(f"loss is {loss}")

    Source: ``tf.train.Coordinator.request_stop``; ``keras.callbacks.TerminateOnNaN``.
    """
    closure = current_closure()
    if closure is None:
        raise ContextError(
            "request_stop: expected a step that runs on a worker",
            hint="outside steps: leave the program's loop, set trainer.stop_training in a callback "
            "of fit, or call session.request_stop() in a training session",
        )
    closure.check_open("request_stop")
    if not isinstance(reason, str) or not reason:
        raise UsageError(f"request_stop: expected a reason as text, got {reason!r}")
    closure.stop_reason = closure.stop_reason or reason[:MAX_REASON]


def get_worker_index() -> int:
    """Return the index of the worker that runs this step or dataset function.

    Returns:
        A number from 0 to the number of workers minus 1.

    Raises:
        ContextError: Outside a step and outside dataset code: the program does not run on a worker.

    Source: ``tf.distribute.coordinator.experimental_get_current_worker_index``.
    """
    who = here.get()
    if who is None:
        raise ContextError(
            "get_worker_index outside a step: this code does not run on a worker",
            hint="call it in a step function, or in a dataset function",
        )
    return who.worker_index


def forbid_in_dataset(operation: str) -> None:
    """Refuse ``operation`` in dataset code.

    Dataset code runs ahead of the steps in a thread of its own: what it would read belongs to
    no step, and what it would wait for may be waiting for it.

    Raises:
        UsageError: If dataset code is running here.
    """
    if type(here.get()) is DatasetContext:
        raise UsageError(
            f"{operation} in dataset code, which must not call psync",
            hint="do this in the step that receives the batch",
        )


def forbid_in_step(
    operation: str,
    *,
    instead: str = "do it on the coordinator before schedule, and use the result in the step",
) -> None:
    """Refuse ``operation`` inside a step, and in dataset code.

    Args:
        operation: What the caller is about to do: "declaring a variable".
        instead: The hint of the error.

    Raises:
        UsageError: If a step or dataset code is running here.
    """
    forbid_in_dataset(operation)
    closure = current_closure()
    if closure is not None:
        raise UsageError(f"{operation} inside a step (closure {closure.closure_id})", hint=instead)


program_waits: PerProcess[list[Callable[[Awaitable[Any]], Any]]] = PerProcess(list)
"""How the program waits, where it is not on its event loop: see ``psync.blocking``."""


def _begin_child() -> None:
    """Leave the loop to the process from which this was forked.

    It does not turn here: whoever waited for it would wait for ever.
    """
    program_waits().clear()
    if (closure := current_closure()) is not None:
        closure.runtime = closure.loop = None


os.register_at_fork(after_in_child=_begin_child)


def wait(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable in a plain step, where a coroutine step would ``await`` it.

    A step that is a plain function runs in a thread. ``wait`` passes ``awaitable`` to the worker's
    event loop, as part of the same closure, and blocks the thread until the result is there. In a
    program of ``psync.blocking``, it waits the same way.

    Args:
        awaitable: Result of a psync function, or any awaitable of the worker's loop.

    Returns:
        The result of the awaitable; its exception is raised here.

    Raises:
        UsageError: Called on an event loop, which it would block for ever (use ``await``); outside
            a step; or in dataset code. Operations of psync raise it after the step has returned.
        ClosureCancelled: The closure is cancelled, before or meanwhile.

    Example:
        def step(batches):
            x, y = next(batches)
            w, b = psync.wait(psync.pull((w_var, b_var)))
            ...
    """
    try:
        if current_closure() is None and program_waits():
            forbid_in_dataset("wait")
            return cast(T, program_waits()[-1](awaitable))
        closure, loop = _waiting_closure(awaitable)
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        here_and_now = contextvars.copy_context()
        try:
            loop.call_soon_threadsafe(closure.start_waiting, awaitable, here_and_now, outcome)
        except RuntimeError as exc:  # the loop is closed: the worker has stopped meanwhile
            raise ClosureCancelled(f"closure {closure.closure_id}: its worker has stopped") from exc
    except BaseException:
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # one clear error, not also "was never awaited"
        raise
    return outcome.result()


def _waiting_closure(awaitable: object) -> tuple[ClosureContext, asyncio.AbstractEventLoop]:
    """Return the closure that may wait here, and its loop; say why not otherwise."""
    forbid_in_dataset("wait")
    if asyncio._get_running_loop() is not None:
        raise UsageError(
            "wait on an event loop would block the loop forever",
            hint="in a coroutine use `await …` instead of `psync.wait(…)`",
        )
    closure = current_closure()
    if closure is None:
        raise UsageError(
            "wait outside a step",
            hint="call it in a plain step function or in a program of psync.blocking, not in a "
            "process that these fork; a thread that a step starts needs the step's context: "
            "contextvars.copy_context().run(…)",
        )
    if closure.cancelled:  # after the step has returned, what is awaited says what is refused
        closure.check_open("wait")
    if closure.loop is None:
        raise UsageError(
            f"wait in closure {closure.closure_id}, which has no event loop",
            hint="a process forked by a step has no event loop: return results to the step, and "
            "wait there",
        )
    if not inspect.isawaitable(awaitable):
        raise UsageError(f"wait expected an awaitable, got {type(awaitable).__name__}")
    return closure, closure.loop


async def result_of(awaitable: Awaitable[T]) -> T:
    """Await anything awaitable: tasks are made of coroutines only."""
    return await awaitable


# The way to the ps tasks.


class KnownPushes:
    """What one client knows of the number of an optimizer's pushes, on one timeline.

    Attributes:
        timeline: That one; ps tasks have undone what was on others.
        number: The highest number that a ps has named, marked.
        elsewhere: By ps, the pushes without a part there, marked; see ``store.push_counts``.
    """

    __slots__ = ("elsewhere", "number", "timeline")

    def __init__(self, timeline: int) -> None:
        self.timeline = timeline
        self.number = 0
        self.elsewhere: dict[int, int] = {}

    def before(self, plan: Plan, num_ps: int) -> dict[int, int]:
        """Return what is known, before a push, of the ps tasks that get no part of it."""
        apart = (ps for ps in range(num_ps) if ps not in plan.first)
        return {ps: self.elsewhere.get(ps, 0) for ps in apart}

    def learn(self, plan: Plan, before: Mapping[int, int], answers: Sequence[Pushed]) -> None:
        """Take in the answers to a push.

        Args:
            plan: Of the push.
            before: What was known before, of the ps tasks that have got no part of it.
            answers: Of the others.
        """
        for request, answer in zip(plan.requests, answers, strict=True):
            self.number = max(self.number, answer.step)
            if answer.elsewhere and count_of(answer.elsewhere):
                self._raise(request.ps, answer.elsewhere)
            if before and request.place == HOME and answer.outcome == "accepted":
                epoch = answer.step >> STEP_BITS
                for ps, known in before.items():
                    if known >> STEP_BITS <= epoch:
                        self._raise(ps, max(known, epoch << STEP_BITS) + 1)

    def _raise(self, ps: int, elsewhere: int) -> None:
        self.elsewhere[ps] = max(elsewhere, self.elsewhere.get(ps, 0))


@dataclass(eq=False)
class Runtime:
    """One task's way to the ps tasks: the worker's in a step, else the coordinator's."""

    ps: PsClient
    origin: str  # token of the strategy whose variables it serves
    program: str = ""  # token of the process whose optimizers it serves
    ensure_created: Callable[[], Awaitable[None]] | None = None
    """Creates what has been declared meanwhile; None: there is nothing to create."""
    find_iterator: Callable[[str], Iterator[Any] | None] | None = None
    """Returns a worker's per-worker iterator by its uid; None on the coordinator."""
    in_session: bool = field(default=False, kw_only=True)
    """Whether the program itself trains, outside of closures: a worker in a training session."""
    rounds: dict[int, int] = field(default_factory=dict, init=False)
    """Done through each optimizer that has a staleness bound."""
    _pushes: dict[int, KnownPushes] = field(default_factory=dict, init=False)
    _pulled: PulledSteps = field(default_factory=PulledSteps, init=False)
    """By code outside of closures."""
    _ordinals: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def pushes(self, optimizer: int) -> KnownPushes:
        """Return what is known of an optimizer's pushes; none that ps tasks have undone."""
        timeline = self.ps.outgoing.timeline
        known = self._pushes.get(optimizer)
        if known is None or known.timeline != timeline:
            known = self._pushes[optimizer] = KnownPushes(timeline)
        return known

    @functools.cached_property
    def sync(self) -> SyncClient:
        """The way to the synchronous groups."""
        return self.ps.parts.of(SyncClient)(self.ps)

    @functools.cached_property
    def ahead(self) -> PulledAhead:
        """Values that came with the answer to a push."""
        return PulledAhead(self.ps)

    @functools.cached_property
    def feedback(self) -> ErrorFeedback:
        """What compressed pushes have left."""
        return ErrorFeedback(self.ps)

    @functools.cached_property
    def accumulators(self) -> AccumulatorClient:
        """The way to the accumulators."""
        return AccumulatorClient(self.ps)

    @property
    def pulled(self) -> PulledSteps:
        """What the pulls of the step that runs here, or of the program, have seen."""
        closure = here.get()
        if type(closure) is not ClosureContext:
            return self._pulled
        return closure._pulled or closure.pulled

    def begin_update(self, operation: str) -> tuple[int, int]:
        """Return the identity of a new push or assign: (number of the closure or -1, ordinal).

        Raises:
            UsageError, ClosureCancelled: As ``ClosureContext.check_open``.
        """
        closure = here.get()
        if type(closure) is ClosureContext:
            if closure.cancelled or closure.closed:
                closure.check_open(operation)
            number = closure.closure_id if closure.number < 0 else closure.number
            return number, next(closure.ordinals)
        return -1, next(self._ordinals)


def current_runtime() -> Runtime | None:
    """Return the runtime of the step that runs here, or None outside a step."""
    closure = here.get()
    if type(closure) is ClosureContext and isinstance(closure.runtime, Runtime):
        return closure.runtime
    return None
