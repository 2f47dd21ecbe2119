"""Reports of a live process: task state, asyncio tasks and thread stacks, on SIGUSR1 or request.

A task registers a description (``add_description``); a report is that, then the stacks of all
asyncio tasks and threads, then an end marker. No error of any part leaves it.

    why a worker waits                    whose report says so   written by
    the token of a synchronous step       ps 0                   ``ps_task``
    a staleness bound                     ps 0                   ``sync.staleness_service``
    a lock, the gate of a cut, a backup   the ps                 ``ps.admission``,
                                                                 ``backups.primary``
    a ps that is away, or is recovered    worker, coordinator    ``worker.session``, ``recovery``
    closures are held back, or none left  coordinator            ``coordinator``, ``watchdog``
    its own step                          the worker             ``worker.session``

**SIGUSR1** is answered twice. ``faulthandler`` writes the bare stacks of all threads from C, at
once, also while a step is inside numpy or a lock and never returns to Python. Then a handler of
``signal.signal`` writes the report as soon as the main thread runs Python code again: between two
lines of a step that computes on the loop, too, for which a handler of the loop would wait. It
runs in the middle of anything, so it only reads, takes no lock, and writes to the descriptor and
not to ``sys.stderr``, whose buffer may be half written.

**SIGSEGV** and the like end a task after ``faulthandler`` has written where its code was: the line
of a step that wrote to what it had pulled.

A launcher starts its tasks with SIGUSR1 blocked, so that one that comes before their handler is
installed is kept and does not end them.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import linecache
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from psync.net.platform import PerProcess

MAX_FRAMES = 40
MAX_STACKS = 50
"""Different stacks of tasks in a report: there may be a task for each of a thousand peers."""

MAX_NAMES = 5


def stack_of_task(task: asyncio.Task[Any]) -> list[str]:
    """Return where a task waits, the outermost call first; of one that runs, where it began."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(lines) < MAX_FRAMES:
        for prefix in ("cr", "gi", "ag"):  # coroutine, generator, asynchronous generator
            frame = getattr(awaited, f"{prefix}_frame", None)
            if frame is not None:
                lines.append(_line(frame, frame.f_lineno))
                inner = "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await"
                awaited = getattr(awaited, inner, None)
                break
        else:
            break
    waits_for = getattr(task, "_fut_waiter", None)
    if isinstance(waits_for, asyncio.Task):
        lines.append(f"waits for the task {waits_for.get_name()}")
    return lines or ["(no Python code)"]


def describe_tasks() -> list[str]:
    """Return all tasks of the loop with their stacks; those that wait at one place, together."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return ["no event loop runs"]
    alike: dict[tuple[str, ...], list[str]] = {}
    running = asyncio.current_task(loop)
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in sorted(tasks, key=lambda task: task.get_name()):
        if task is running:
            stack = ["runs just now: see the stack of its thread", *stack_of_task(task)[:1]]
        else:
            stack = stack_of_task(task)
        alike.setdefault(tuple(stack), []).append(task.get_name())
    lines = [f"asyncio tasks: {len(tasks)}"]
    for stack_lines, names in list(alike.items())[:MAX_STACKS]:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        lines.append(f"  {', '.join(names[:MAX_NAMES])}{more}:")
        lines += [f"    {line}" for line in stack_lines]
    if len(alike) > MAX_STACKS:
        lines.append(f"  and {len(alike) - MAX_STACKS} other stacks")
    return lines


def describe_threads() -> list[str]:
    """Return all threads with their stacks, the outermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    lines = [f"threads: {len(frames)}"]
    for ident, frame in frames.items():
        lines.append(f"  {names.get(ident, f'thread {ident}')}:")
        # The innermost calls, without those of the report itself.
        inwards = traceback.walk_stack(frame)
        others = (each for each in inwards if each[0].f_code.co_filename != __file__)
        stack = [_line(*each) for each in itertools.islice(others, MAX_FRAMES)]
        lines += [f"    {line}" for line in reversed(stack)]
    return lines


def _line(frame: FrameType, number: int | None) -> str:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    source = linecache.getline(path, number or 0, frame.f_globals).strip()
    return f"{path}:{number}, in {name}{f': {source}' if source else ''}"


logger = logging.getLogger(__name__)

REPORT_SIGNAL = signal.SIGUSR1

STDERR = 2

Description = Callable[[], Iterable[str]]

_descriptions: PerProcess[dict[object, Description]] = PerProcess(dict)
"""Of what runs in this process: one task; more in a cluster in memory."""


def add_description(describe: Description) -> Callable[[], None]:
    """Let reports contain the lines that ``describe()`` returns; return what ends that."""
    key, known = object(), _descriptions()
    known[key] = describe
    return lambda: known.pop(key, None) and None


def report_text(why: str, descriptions: Iterable[Description] | None = None) -> str:
    """Return a report in full, several lines.

    Args:
        why: Follows "report of process …".
        descriptions: What it begins with; None: all that were added.
    """
    known = list(_descriptions().values()) if descriptions is None else descriptions
    lines = [f"psync: report of process {os.getpid()}, {why}"]
    for part in [*known, describe_tasks, describe_threads]:
        try:
            lines += part()
        except Exception as exc:  # what is described may be half-way through a change
            lines.append(f"(this part of the report failed: {type(exc).__name__}: {exc})")
    lines.append(f"psync: end of the report of process {os.getpid()}")
    return "\n".join(lines)


def report_on_signal() -> None:
    """From now on, answer SIGUSR1 with a report on stderr, and a crash with the stack behind it.

    Nothing happens where the program has a handler of its own, and in other threads than the main
    one. A launcher starts its tasks with the signal blocked, so that one which comes while they
    still import is not their end; here it is let in.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    answers = signal.getsignal(REPORT_SIGNAL) is signal.SIG_DFL
    if answers:
        signal.signal(REPORT_SIGNAL, _on_signal)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr is closed
        os.fstat(STDERR)
        if answers:
            faulthandler.register(REPORT_SIGNAL, file=STDERR, all_threads=True, chain=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=STDERR, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {REPORT_SIGNAL})


def _on_signal(signum: int, frame: object) -> None:
    data = (report_text("asked for by SIGUSR1") + "\n").encode("utf-8", "replace")
    with contextlib.suppress(OSError):  # nobody reads it; the disk is full
        while data:
            data = data[os.write(STDERR, data) :]
