"""Work and who waits for it: what ends first; work that goes on when its caller is cancelled.

``shielded`` is as ``asyncio.shield``, which from Python 3.14 on reports an error of such work to
the exception handler of the loop, even if somebody else looks at it: a log of an ERROR where
nothing is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

TURN_BYTES = 1 << 20
"""About what is worked on in one turn of the loop."""


def begin(work: Coroutine[Any, Any, T], under_way: set[Any]) -> asyncio.Task[T]:
    """Start work, which is in a set until it has ended: a loop itself may lose it."""
    task = asyncio.get_running_loop().create_task(work)
    under_way.add(task)
    task.add_done_callback(under_way.discard)
    return task


async def first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Wait until one of these ends, and return its result; the others are cancelled.

    If several end at once, the first of the arguments counts.

    Raises:
        BaseException: What that one raises.

    Cancellation: All are cancelled.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await end_all(tasks)


async def at_most(seconds: float, work: Awaitable[Any]) -> None:
    """Wait for work, which is cancelled after so many seconds. A TimeoutError is no error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all are over. Cancellation: they are cancelled all the same."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def shielded(work: asyncio.Future[T]) -> T:
    """Wait for ``work`` and return what it returns.

    Raises:
        BaseException: What it raises; CancelledError if it was cancelled itself.

    Cancellation: ``work`` goes on. An error of it is dropped: who cares adds a callback.
    """
    if not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            work.add_done_callback(_look)
            raise
    return work.result()


async def carried_out(work: asyncio.Future[T], is_over: Callable[[], bool] = lambda: False) -> T:
    """Wait for work that cannot be stopped, such as that of a thread; return what it returns.

    Args:
        work: Goes to its end.
        is_over: Whether a cancellation is raised at once all the same.

    Cancellation: Raised once ``work`` has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as exc:
            if is_over():
                raise
            cancelled = exc
    if cancelled is None:
        return work.result()
    _look(work)
    raise cancelled


def _look(work: asyncio.Future[T]) -> None:
    """Nobody waits for it any more, so asyncio need not complain that nobody has seen its error."""
    if not work.cancelled():
        work.exception()


def most_are_cancelled(before: Iterable[asyncio.Task[Any]] = ()) -> bool:
    """Return whether most other tasks of this loop were cancelled, as when ``asyncio.run`` ends.

    All were then, but some that have begun since. Which of them end first depends on the order in
    which they are cancelled, which depends on their addresses.

    Args:
        before: Tasks that were there before: if some are left, or were cancelled, it is they that
            count.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    known = set(before) - {asyncio.current_task()}
    if known := {task for task in known if not task.done() or task.cancelling() > 0}:
        return all(task.cancelling() > 0 for task in known)
    return 2 * sum(task.cancelling() > 0 for task in others) >= len(others)


async def in_turns(work: Iterable[int], pause_s: float = 0.0) -> None:
    """Do work that says how many bytes each piece was, with the loop running now and then.

    Cancellation: The rest is not done.
    """
    done = 0
    for nbytes in work:
        done += nbytes
        if done >= TURN_BYTES:
            done = 0
            await asyncio.sleep(pause_s)


CELL = "parent_header"
"""Name of ipykernel's variables, one for stdout, stderr and displays each."""


async def of_no_cell(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` so that what it starts belongs to no cell; outside of a notebook, just do it.

    ipykernel keeps the cell whose output something is in a context variable, which tasks and
    callbacks inherit from where they were made. Where it is not set, the cell that runs gets it.

    Cancellation: As that of ``work``.
    """
    if "ipykernel" not in sys.modules:
        return await work
    context = contextvars.Context()
    for variable, value in contextvars.copy_context().items():
        if variable.name != CELL:
            context.run(variable.set, value)
    return await asyncio.get_running_loop().create_task(work, context=context)
