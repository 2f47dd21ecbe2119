"""An event loop with a virtual clock, which jumps to the next timer and reports hangs as errors.

Time moves only when nothing is ready, so a test of a five-minute timeout takes no time and always
has the same outcome. When nothing is ready and no timer is set, the loop raises ``Deadlock`` with
the place where each task waits, instead of hanging. With a seed, ready tasks run in a random order,
which is the same for the same seed.

The loop implements ``AbstractEventLoop``, because ``asyncio.BaseEventLoop`` depends on a selector.
Real resources (sockets, processes, signals, other threads) are refused, because they do not follow
a virtual clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import linecache
import logging
import math
import random
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple


class Deadlock(AssertionError):
    """Nothing can happen any more on a loop with a virtual clock.

    The message lists every pending task with the line where each of its coroutines waits.

    Attributes:
        tasks: Names of the pending tasks.
    """

    def __init__(self, message: str, tasks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.tasks))


def describe_tasks(loop: asyncio.AbstractEventLoop) -> tuple[tuple[str, ...], str]:
    """Return the names of the pending tasks of ``loop``, and where they wait as text."""
    # Names that count up ("Task-9", "Task-10") come in the order in which they were given.
    tasks = sorted(
        asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())
    )
    if not tasks:
        return (), "no task is pending: only stop() could have ended this run"
    lines = [f"{len(tasks)} pending task{'s' if len(tasks) > 1 else ''}:"]
    for task in tasks:
        coroutine = task.get_coro()
        name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
        lines.append(f"  {task.get_name()} ({name}){_waits_for(task)}")
        for frame in _frames(coroutine):
            code, line = frame.f_code, frame.f_lineno
            source = linecache.getline(code.co_filename, line).strip()
            lines.append(f"    {code.co_filename}:{line} in {code.co_qualname}: {source}")
    return tuple(task.get_name() for task in tasks), "\n".join(lines)


def _waits_for(task: asyncio.Task[Any]) -> str:
    waiter = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.Task):
        return f" waits for {waiter.get_name()}"
    return "" if waiter is None else f" waits for a {type(waiter).__name__.lstrip('_')}"


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the suspended frames of a coroutine, outermost first."""
    while awaited is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                awaited = getattr(awaited, inner)
                break
        else:
            return


_T = TypeVar("_T")
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

_log = logging.getLogger("asyncio")  # where the other loops report too


class RealWorldError(RuntimeError):
    """Code under a virtual clock tried to use a socket, a process, a signal or a thread."""


class _Fenced:
    """A method that raises; it learns its own name from the class body."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: object, owner: type) -> Callable[..., Any]:
        name = self._name

        def fenced(*args: Any, **kwargs: Any) -> Any:
            raise RealWorldError(
                f"{name}() reaches out of a loop with a virtual clock: sockets, processes, pipes "
                "and signals follow another clock; give the code a MemoryNetwork, or run this "
                "test on a real loop"
            )

        return fenced


class Fence(asyncio.AbstractEventLoop):
    """The part of ``AbstractEventLoop`` that uses real resources; all of it raises."""

    getaddrinfo: Any = _Fenced()
    getnameinfo: Any = _Fenced()
    create_connection: Any = _Fenced()
    create_server: Any = _Fenced()
    create_unix_connection: Any = _Fenced()
    create_unix_server: Any = _Fenced()
    create_datagram_endpoint: Any = _Fenced()
    connect_accepted_socket: Any = _Fenced()
    start_tls: Any = _Fenced()
    sendfile: Any = _Fenced()
    connect_read_pipe: Any = _Fenced()
    connect_write_pipe: Any = _Fenced()
    subprocess_shell: Any = _Fenced()
    subprocess_exec: Any = _Fenced()
    add_reader: Any = _Fenced()
    remove_reader: Any = _Fenced()
    add_writer: Any = _Fenced()
    remove_writer: Any = _Fenced()
    sock_recv: Any = _Fenced()
    sock_recv_into: Any = _Fenced()
    sock_recvfrom: Any = _Fenced()
    sock_recvfrom_into: Any = _Fenced()
    sock_sendall: Any = _Fenced()
    sock_sendto: Any = _Fenced()
    sock_connect: Any = _Fenced()
    sock_accept: Any = _Fenced()
    sock_sendfile: Any = _Fenced()
    add_signal_handler: Any = _Fenced()
    remove_signal_handler: Any = _Fenced()


class LoopBase(Fence):
    """Futures and tasks, asynchronous generators, error reports and the debug flag."""

    def __init__(self) -> None:
        self._closed = False
        self._debug = False
        self._task_factory: Any = None
        self._exception_handler: ExceptionHandler | None = None
        # By number, since the order of a WeakSet differs from run to run.
        self._asyncgens: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = (
            weakref.WeakValueDictionary()
        )
        self._asyncgen_numbers = itertools.count()

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that belongs to this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        **kwargs: Any,
    ) -> asyncio.Task[_T]:
        """Start a task."""
        self._check_open()
        task: asyncio.Task[_T]
        if self._task_factory is not None:
            task = self._task_factory(self, coro, **kwargs)
        else:
            task = asyncio.Task(coro, loop=self, **kwargs)
        return task

    def set_task_factory(self, factory: Any) -> None:
        """Set the factory of tasks; None: ``asyncio.Task``."""
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        """Return the factory of tasks."""
        return self._task_factory

    # Errors and debugging.

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Set the handler of errors that no task awaits; None: they are logged."""
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        """Return the handler of errors that no task awaits."""
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an error under the logger ``asyncio``."""
        lines = [str(context.get("message") or "unhandled exception in the event loop")]
        lines += [
            f"{key}: {value!r}"
            for key, value in sorted(context.items())
            if key not in ("message", "exception")
        ]
        _log.error("\n".join(lines), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that no task awaits."""
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as exc:
            self.default_exception_handler(
                {"message": "the exception handler failed", "exception": exc, "context": context}
            )

    def get_debug(self) -> bool:
        """Whether handles and futures record the place of their creation."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """Set whether handles and futures record the place of their creation."""
        self._debug = enabled

    # Being closed.

    def is_closed(self) -> bool:
        """Whether the loop is closed."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that are still open. Cancellation: Safe."""
        generators = list(self._asyncgens.values())
        self._asyncgens.clear()
        results = await asyncio.gather(*(g.aclose() for g in generators), return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                self.call_exception_handler(
                    {
                        "message": f"an error occurred while closing {generator!r}",
                        "exception": result,
                        "asyncgen": generator,
                    }
                )

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing, because there are no threads."""

    def _asyncgen_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[next(self._asyncgen_numbers)] = generator

    def _asyncgen_collected(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())


_Ts = TypeVarTuple("_Ts")

SPIN_PASSES = 1_000_000
"""Number of passes at one virtual time after which the loop counts as busy-waiting."""

SETTLE_ROUNDS = 100
"""Rounds that ``settle`` runs on a loop that cannot report when nothing is ready."""


class VirtualClockLoop(LoopBase):
    """An asyncio event loop with a virtual clock.

    ``time()`` starts at 0.0 and jumps to the next timer when nothing is ready, so that tests do not
    wait. ``asyncio.Runner(loop_factory=VirtualClockLoop)`` and ``run_virtual`` use it.

    ``run_in_executor`` (and therefore ``asyncio.to_thread``) calls the function on the loop, as one
    step, regardless of the executor, because a thread would not follow the clock. Such a function
    must not wait for the loop. A plain step that calls ``psync.wait`` therefore needs a real loop.

    Args:
        seed: Seed of the order in which ready tasks run; None: the order in which they became
            ready, as on other loops. Callbacks that are not steps of a task always keep their
            order, because asyncio guarantees it; asyncio does not guarantee the order of tasks.
        time_limit_s: Virtual seconds after which the run counts as hanging; ends tests in which
            only heartbeats remain.

    Raises:
        Deadlock: ``run_until_complete`` and ``run_forever`` raise it when nothing can happen any
            more, the time limit has passed, or a task spins without letting the clock move.
        RealWorldError: A call would open a socket, start a process, or use another real resource.
    """

    def __init__(self, seed: int | None = None, *, time_limit_s: float = 86_400.0) -> None:
        super().__init__()
        self.seed = seed
        self.time_limit_s = time_limit_s
        self._random = None if seed is None else random.Random(f"{seed}:order")
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._steps: list[asyncio.Handle] = []  # ready steps of tasks; used with a seed only
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap
        self._timer_numbers = itertools.count()
        self._prune_at = 1024  # number of timers at which the cancelled ones are thrown out
        self._settling: list[asyncio.Future[None]] = []
        self._passes = 0  # since the clock last moved
        self._stopping = False
        self._thread: int | None = None  # which runs the loop

    def __repr__(self) -> str:
        return f"<VirtualClockLoop seed={self.seed} time={self._now:g}>"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"unclosed event loop {self!r}", ResourceWarning, stacklevel=2, source=self
            )

    # Scheduling.

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_soon(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Call ``callback(*args)`` in the next pass of the loop."""
        if self._closed:
            self._check_open()
        if self._thread is not None and self._thread != threading.get_ident():
            raise RealWorldError(
                "another thread called into a loop with a virtual clock: threads run at their own "
                "pace, so nothing that follows could be repeated; use a real loop for this test"
            )
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    # Safe, as it refuses every thread but the loop's own (where a signal handler may call it).
    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call ``callback(*args)`` after ``delay`` virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call ``callback(*args)`` at the virtual time ``when``; ``math.inf`` means never."""
        if self._closed:
            self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if len(self._timers) >= self._prune_at:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._prune_at = max(1024, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by ``TimerHandle.cancel``; cancelled timers are thrown out where they are met."""

    def run_in_executor(  # type: ignore[override]  # typeshed declares it async; it is not
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Call ``func(*args)`` on the loop, as one step; see the class."""
        future: asyncio.Future[_T] = self.create_future()
        self.call_soon(_run_inline, future, func, args)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """Accept an executor, which is never used; see the class."""

    # Running.

    def run_forever(self) -> None:
        """Run until ``stop`` is called.

        Raises:
            Deadlock: See the class.
        """
        self._check_open()
        if self.is_running():
            raise RuntimeError("this event loop is running already")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("another event loop is running in this thread")
        hooks = sys.get_asyncgen_hooks()
        self._thread = threading.get_ident()
        self._passes = 0
        try:
            asyncio._set_running_loop(self)
            sys.set_asyncgen_hooks(self._asyncgen_started, self._asyncgen_collected)
            while True:
                self._pass()
                if self._stopping:
                    break
        finally:
            self._stopping = False
            self._thread = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Awaitable[_T] | Generator[Any, None, _T]) -> _T:
        """Run until ``future`` is done; return its result.

        Raises:
            Deadlock: See the class. Its tasks stay pending.
        """
        self._check_open()
        if self.is_running():
            raise RuntimeError("this event loop is running already")
        is_new = not asyncio.isfuture(future)
        task: asyncio.Future[_T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        task.add_done_callback(self._stop_when_done)
        try:
            self.run_forever()
        except BaseException:
            if is_new and task.done() and not task.cancelled():
                task.exception()  # it was seen: the error that ended the run tells of it
            raise
        finally:
            task.remove_done_callback(self._stop_when_done)
        if not task.done():
            raise RuntimeError("the event loop was stopped before the future was done")
        return task.result()

    def _stop_when_done(self, future: asyncio.Future[Any]) -> None:
        self.stop()

    def stop(self) -> None:
        """End ``run_forever`` after the current pass."""
        self._stopping = True

    def is_running(self) -> bool:
        """Whether the loop is running."""
        return self._thread is not None

    def close(self) -> None:
        """Drop everything that is scheduled; the loop cannot be used afterwards."""
        if self.is_running():
            raise RuntimeError("cannot close a running event loop")
        self._closed = True
        self._ready.clear()
        self._steps.clear()
        self._timers.clear()

    async def settled(self) -> None:
        """Wait until nothing is ready at the current virtual time; see ``settle``.

        Cancellation: Safe.
        """
        future = self.create_future()
        self._settling.append(future)
        await future

    def _pass(self) -> None:
        """Run what is ready; if nothing is, make the next thing ready."""
        if self._timers and self._timers[0][0] <= self._now:
            self._take_due_timers()
        if not self._ready and not self._steps and not self._stopping:
            self._move_on()
        self._passes += 1
        if self._passes > SPIN_PASSES:
            raise self._deadlock(f"{SPIN_PASSES} passes of the loop did not let the clock move")
        for _ in range(len(self._ready) + len(self._steps)):
            handle = self._next()
            if not handle._cancelled:
                handle._run()

    def _move_on(self) -> None:
        """Wake who waits for a settled loop, else jump to the next timer."""
        if self._settling:
            settling, self._settling = self._settling, []
            for future in settling:
                if not future.done():
                    future.set_result(None)
            return
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        when = self._timers[0][0] if self._timers else math.inf
        if when == math.inf:
            raise self._deadlock("nothing is ready and no timer is set")
        if when > self.time_limit_s:
            raise self._deadlock(f"no end within {self.time_limit_s:g} virtual seconds")
        self._now = when
        self._passes = 0
        self._take_due_timers()

    def _take_due_timers(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._add(handle)

    def _add(self, handle: asyncio.Handle) -> None:
        if self._random is not None and is_step(handle):
            self._steps.append(handle)
        else:
            self._ready.append(handle)

    def _next(self) -> asyncio.Handle:
        if not self._steps:
            return self._ready.popleft()
        assert self._random is not None  # for the type checker: without a seed there are no _steps
        steps, draw = self._steps, self._random.getrandbits
        count = len(steps) + bool(self._ready)
        bits = count.bit_length()
        drawn = draw(bits)  # as randrange does, which takes twice as long
        while drawn >= count:
            drawn = draw(bits)
        if drawn == len(steps):
            return self._ready.popleft()
        steps[drawn], steps[-1] = steps[-1], steps[drawn]
        return steps.pop()

    def _deadlock(self, reason: str) -> Deadlock:
        names, text = describe_tasks(self)
        return Deadlock(f"{reason}, at virtual time {self._now:g} s; {text}", names)


def is_step(handle: asyncio.Handle) -> bool:
    """Whether a handle lets a task go on (asyncio's own debug output tells them this way)."""
    callback = handle._callback  # type: ignore[attr-defined]  # None once it is cancelled
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def _run_inline(future: asyncio.Future[_T], func: Callable[..., _T], args: tuple[Any, ...]) -> None:
    """Settle ``future`` with what ``func`` does, as an executor would."""
    if future.cancelled():
        return
    try:
        result = func(*args)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        if not future.cancelled():
            future.set_exception(exc)
    else:
        if not future.cancelled():
            future.set_result(result)


def run_virtual(
    main: Callable[..., Coroutine[Any, Any, _T]], *args: Any, seed: int | None = None
) -> _T:
    """Run ``main(*args)`` on a ``VirtualClockLoop`` and return its result.

    Args:
        main: A coroutine function.
        args: Arguments of ``main``.
        seed: Seed of the order in which tasks run; None: first come, first served.

    Raises:
        Deadlock: See ``VirtualClockLoop``.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(seed)) as runner:
        return runner.run(main(*args))


async def settle() -> None:
    """Run everything that is ready, without time passing.

    On a ``VirtualClockLoop`` it returns exactly when nothing else is ready. Other loops cannot
    report that, so it runs a fixed number of rounds there. Data from a socket may come later; wait
    for an event instead.

    Cancellation: Safe.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualClockLoop):
        await loop.settled()
        return
    for _ in range(SETTLE_ROUNDS):
        await asyncio.sleep(0)
