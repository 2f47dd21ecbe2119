"""Simulated processes: groups of callbacks on one event loop that die, stop and go on together.

A process is a mark in the context of everything that runs for it: asyncio copies the context into
each task, timer and callback, so the loop knows whose turn it is. A killed process has no turn any
more, at whatever ``await`` it was: no ``finally`` runs, no last word is sent. A stopped one has its
turns later, in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from psync.testing.clock import VirtualClockLoop, is_step

_T = TypeVar("_T")

THREAD_S = (0.0, 0.0, 0.002, 0.02, 0.3)
"""Upper bounds, one of which is drawn, of how long work in a thread takes to begin, and to end."""

current_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "psync_simulated_process", default=None
)


class Process:
    """One life of one simulated process.

    Attributes:
        name: Of its host, as in ``"ps-0"``.
        is_dead: It was killed, or its program has ended.
        is_stopped: As by SIGSTOP.
        drag_s: How long each of its turns takes; 0: no time.
        turns: How many it had.
        due: After how many the loop tells of it.
    """

    def __init__(self, name: str, loop: ProcessLoop) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.drag_s = 0.0
        self.turns = 0
        self.due = math.inf
        self._is_busy = False  # its turn takes time
        self._loop = loop
        self._held: list[asyncio.Handle] = []  # turns it missed while it was stopped
        self._tasks: list[asyncio.Task[Any]] = []
        self._forgets_at = 64  # tasks

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "stopped" if self.is_stopped else "running"
        return f"<process {self.name}, {state}>"

    def start(self, program: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a program as this process."""
        context = contextvars.copy_context()
        context.run(current_process.set, self)
        context.run(self._loop.create_task, program(), name=self.name)

    def kill(self) -> None:
        """Let nothing of it run any more."""
        self.is_dead = True
        self._held.clear()

    def stop(self) -> None:
        """Let nothing of it run until ``go_on``."""
        self.is_stopped = True

    def go_on(self) -> None:
        """End ``stop``: what it missed comes first."""
        self.is_stopped = False
        if not self._is_busy:
            self._catch_up()

    def takes_turn(self, handle: asyncio.Handle) -> bool:
        """Return whether a turn can be taken now; if not, it comes later, or never."""
        if self.is_dead:
            return False
        if self.is_stopped or self._is_busy:
            self._held.append(handle)
            return False
        self.turns += 1
        if self.drag_s:
            self._is_busy = True
            nobody = contextvars.Context()
            self._loop.call_later(self.drag_s, self._end_turn, context=nobody)
        return True

    def _end_turn(self) -> None:
        self._is_busy = False
        if not self.is_stopped:
            self._catch_up()

    def _catch_up(self) -> None:
        held, self._held = self._held, []
        self._loop.add_first([handle for handle in held if not handle.cancelled()])

    def note_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task, so that it is not collected, with its ``finally`` run, when this is dead."""
        if len(self._tasks) >= self._forgets_at:
            self.forget_done()
        self._tasks.append(task)

    def forget_done(self) -> None:
        """Keep pending tasks only; others whose error nobody has seen, nor will, speak up."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._forgets_at = max(64, 2 * len(self._tasks))

    def reach(self, kind: str, name: str) -> str | None:
        """It serves a message or reaches a place; return how the message is lost."""
        return self._loop.on_reach(kind, name, self.name)

    def pending(self) -> list[str]:
        """Return what of its own it has not ended; what faults let it do does not count."""
        names = [task.get_coro().__qualname__ for task in self._tasks if not task.done()]  # type: ignore[union-attr]
        return [name for name in names if not name.startswith("Injector.")]

    def bury(self) -> None:
        """Close what the dead has left, when nothing can come of it any more."""
        for task in self._tasks:
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._tasks.clear()


def reached(kind: str, name: str) -> str | None:
    """The present process serves a message or reaches a place; return how the message is lost."""
    process = current_process.get()
    return None if process is None else process.reach(kind, name)


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number: sets of tasks have the same order in each run."""

    number = 0
    process: Process | None = None

    def __hash__(self) -> int:
        if not self.number:
            loop: ProcessLoop = self.get_loop()  # type: ignore[assignment]
            self.number = loop.hashed = loop.hashed + 1
        return self.number


class ProcessLoop(VirtualClockLoop):
    """A loop with a virtual clock, on which processes live and die.

    Work that is given to threads begins and ends at drawn times, so that it overlaps with what the
    loop does meanwhile; what it does in between is one step.

    Args:
        seed: Of the order of tasks, and of the times of threads.
        time_limit_s: As for ``VirtualClockLoop``.
    """

    def __init__(self, seed: int, *, time_limit_s: float = 86_400.0) -> None:
        super().__init__(seed, time_limit_s=time_limit_s)
        self._thread_times = random.Random(f"{seed}:threads")
        self.hashed = 0  # tasks that have a number
        self.turns = 0  # callbacks that had their turn
        self.due = math.inf  # turns after which ``on_due`` is told; processes have their own
        self.on_due: Callable[[Process], None] = lambda process: None
        self.on_reach: Callable[[str, str, str], str | None] = lambda *_: None  # see ``reached``
        self.on_turn: Callable[[str, str], None] | None = None  # told of each of them
        self.on_threads: Callable[[], None] | None = None  # told when several compute at once
        self._computing = 0  # functions that were given to threads of a task's own
        self.is_over = False  # nothing that is scheduled from now on runs

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Start a task, which belongs to the process that starts it."""
        self._check_open()
        task = _Task(coro, loop=self, **kwargs)
        task.process = process = current_process.get()
        if process is not None:
            process.note_task(task)
        return task

    def run_in_executor(  # type: ignore[override]  # typeshed declares it async; it is not
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Call ``func(*args)`` at a drawn time, and tell of its end at another one."""
        draw = self._thread_times
        begins, ends = (draw.random() * draw.choice(THREAD_S) for _ in range(2))
        future: asyncio.Future[_T] = self.create_future()
        if executor is not None:
            self._computes(future)
        self.call_later(begins, self._work, future, func, args, ends)
        return future

    def _computes(self, future: asyncio.Future[Any]) -> None:
        def ended(_: object) -> None:
            self._computing -= 1

        self._computing += 1
        future.add_done_callback(ended)
        if self._computing > 1 and self.on_threads is not None:
            self.on_threads()

    def _work(
        self, future: asyncio.Future[_T], func: Callable[..., _T], args: Any, ends: float
    ) -> None:
        try:
            result = func(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.call_later(ends, _settle, future, None, exc)
        else:
            self.call_later(ends, _settle, future, result, None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that nobody awaits, unless it was of the dead, or all is over."""
        process = _whose(context)
        if not self.is_over and (process is None or not process.is_dead):
            super().call_exception_handler(context)

    def last_draw(self) -> float:
        """Return one more draw: two runs that drew differently differ here."""
        assert self._random is not None
        return self._random.random() + self._thread_times.random()

    def _add(self, handle: asyncio.Handle) -> None:
        if not self.is_over:
            (self._steps if is_step(handle) else self._ready).append(handle)

    def _next(self) -> asyncio.Handle:
        handle = super()._next()
        process = handle._context.get(current_process)  # type: ignore[attr-defined]
        if process is not None:
            if process.turns >= process.due or self.turns >= self.due:
                self.on_due(process)
            if not process.takes_turn(handle):
                return _NOTHING
        self.turns += 1
        if self.on_turn is not None:
            self.on_turn("" if process is None else process.name, _said(handle))
        return handle

    def add_first(self, handles: Sequence[asyncio.Handle]) -> None:
        """Let turns that were missed come before all that became ready since."""
        if self.is_over:
            return
        later = self._ready.copy()
        self._ready.clear()
        for handle in handles:
            self._add(handle)
        self._ready.extend(later)


def _settle(future: asyncio.Future[_T], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _whose(context: dict[str, Any]) -> Process | None:
    """Return the process that an error report is of, if it is of one."""
    task = context.get("task", context.get("future"))
    if isinstance(task, _Task):
        return task.process
    handle = context.get("handle")
    return current_process.get() if handle is None else handle._context.get(current_process)


def _said(handle: asyncio.Handle) -> str:
    """Return what has its turn, without numbers that count what the Python process has done."""
    callback = handle._callback  # type: ignore[attr-defined]
    of = getattr(callback, "__self__", None)
    if isinstance(of, asyncio.Task):
        coroutine = of.get_coro()
        return getattr(coroutine, "__qualname__", "")
    return getattr(callback, "__qualname__", type(callback).__name__)


class _Nothing(asyncio.Handle):
    """The turn of one that has none: it counts as cancelled."""

    def __init__(self) -> None:
        self._cancelled = True


_NOTHING = _Nothing()
