"""The report on tasks that can never continue."""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Iterator
from types import FrameType
from typing import Any


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
