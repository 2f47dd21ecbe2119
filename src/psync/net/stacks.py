"""What this process is doing: the stacks of its asyncio tasks and of its threads, as text.

``asyncio.Task.get_stack`` ends at the outermost coroutine, which says what a program began and not
where it hangs. Here the chain of awaits is followed to its end.

All of this may be called by a signal handler, in the middle of anything: so nothing here takes a
lock that the code which was interrupted might hold. (That of ``threading`` may be taken again.)
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

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


def describe_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return all tasks of a loop with their stacks; those that wait at the same place, together."""
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
        stack = list(_frames(frame))
        lines += [f"    {line}" for line in reversed(stack[:MAX_FRAMES])]
    return lines


def _frames(frame: FrameType | None) -> Iterator[str]:
    """Yield lines from the innermost call on, without those of the report itself."""
    reporting = {__file__, __file__.replace("stacks.py", "task_reports.py")}
    while frame is not None:
        if frame.f_code.co_filename not in reporting:
            yield _line(frame, frame.f_lineno)
        frame = frame.f_back


def _line(frame: FrameType, number: int | None) -> str:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    source = linecache.getline(path, number or 0, frame.f_globals).strip()
    return f"{path}:{number}, in {name}{f': {source}' if source else ''}"
