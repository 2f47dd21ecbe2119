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

    def run(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run ``function`` in the thread, in a copy of this context.

        Returns:
            A future of (value, exception), one of which is None. It is the caller's to
            shield: cancelling it does not stop the thread.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="psync step", daemon=True)
            self._thread.start()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((function, contextvars.copy_context(), future))
        return future

    async def call(self, function: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
        """Run ``function`` in the thread and return its value; a thread cannot be stopped.

        Args:
            function: As of ``run``.
            is_over: Whether nobody waits for it any more: then a cancellation is raised at once.

        Raises:
            BaseException: What it raises.

        Cancellation: Raised once the function has returned.
        """
        work = self.run(function)
        cancelled = False
        while not work.done():
            try:
                await asyncio.shield(work)
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
                self._loop.call_soon_threadsafe(_settle, future, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if not future.done():
        future.set_result(outcome)
