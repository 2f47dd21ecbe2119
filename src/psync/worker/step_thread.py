"""A thread for functions that may block: plain steps of a worker, evaluations."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

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
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                if is_over():
                    raise
                cancelled = True
        value, error = work.result()
        if cancelled:
            raise asyncio.CancelledError
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
