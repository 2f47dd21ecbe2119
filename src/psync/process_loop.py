"""The event loop of a task's process: which one, and how signals and a launcher end what it runs.

Layer: L4. Imports: errors, task_reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from psync.errors import ConfigurationError
from psync.task_reports import report_on_signal

T = TypeVar("T")

LAST_WORDS_S = 3.0
"""How long a worker may go on that is told to exit when its training session has ended. Less than
the launcher's patience (``processes.GRACE_S``)."""


def run_loop(
    main: Callable[[], Awaitable[T]],
    *,
    terminated_code: int = 143,
    last_words: asyncio.Event | None = None,
) -> T:
    """Run ``main`` on a new loop; SIGTERM and Ctrl-C cancel it: everything is closed in order.

    SIGUSR1 is answered by a report of what the process does; see ``task_reports``.

    Args:
        main: Coroutine function without arguments.
        terminated_code: With which the process ends after SIGTERM: 128 + 15, or 0 where that is
            the orderly end, as of a ps that serves.
        last_words: Once it is set, SIGTERM leaves ``main`` some seconds to end by itself.

    Raises:
        SystemExit: After a signal.
    """
    terminated = False
    report_on_signal()

    async def body() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            if last_words is not None and last_words.is_set():
                loop.call_later(LAST_WORDS_S, task.cancel)
            else:
                task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await main()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(body())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        if terminated:
            sys.exit(terminated_code)
        raise


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, where it is installed and not turned off with ``PSYNC_LOOP=asyncio``.

    Raises:
        ConfigurationError: If ``PSYNC_LOOP`` names neither.
    """
    name = os.environ.get("PSYNC_LOOP", "uvloop")
    if name not in ("uvloop", "asyncio"):
        raise ConfigurationError(f"PSYNC_LOOP: expected uvloop or asyncio, got {name!r}")
    if name == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def end_of_run(fd: int) -> Iterator[asyncio.Event]:
    """Return a context manager for an event that is set once the launcher says that the run ends.

    Args:
        fd: Read end of a pipe, ``PSYNC_RUN_FD``, which is closed with the context. Nobody writes
            to it; its end is the message, so that one who begins to listen late hears it too.
    """
    os.set_inheritable(fd, False)
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        loop.remove_reader(fd)
        over.set()

    loop.add_reader(fd, ended)
    try:
        yield over
    finally:
        loop.remove_reader(fd)
        os.close(fd)
