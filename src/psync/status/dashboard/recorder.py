"""A status a second, for the dashboard and the run log of a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from psync.status.dashboard.run_log import INTERVAL_S, RunLog
from psync.status.dashboard.view import History, to_json, view_of
from psync.status.http import serving_dashboard
from psync.status.model import Status

if TYPE_CHECKING:
    from psync.status.sampling import ClusterSource

logger = logging.getLogger(__name__)


class Recorder:
    """Takes a status a second, from ``start`` to ``close``; the dashboard shows the newest one.

    Args:
        source: Of the statuses.
        log: Where they are written; None: nowhere.

    Attributes:
        newest: The newest status; None: there was none yet.
    """

    def __init__(self, source: ClusterSource, log: RunLog | None = None) -> None:
        self._source = source
        self._log = log
        self._history = History()
        self.newest: Status | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # never cancelled: it may be writing

    def start(self) -> None:
        """Begin."""
        self._source.asks_workers += 1
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Take a last status, and end. Cancellation: it ends by itself."""
        self._closing.set()
        task, self._task = self._task, None
        if task is not None:
            self._source.asks_workers -= 1
            await asyncio.wait((task,))

    def add(self, status: Status) -> None:
        """Show a status."""
        self.newest = status
        self._history.add(status)

    async def view(self, span: str, time: float | None) -> str:
        """Return the page as JSON; "{}" before the first status. Cancellation: safe."""
        if self.newest is None:
            return "{}"
        return to_json(view_of(self.newest, self._history, span=span))

    async def status(self, time: float | None) -> Status | None:
        """Return the newest status. Cancellation: safe."""
        return self.newest

    async def _run(self) -> None:
        fails = is_last = False
        while not is_last:
            is_last = self._closing.is_set()
            try:
                status = await self._source.status()
                self.add(status)
                if self._log is not None:
                    await asyncio.to_thread(self._log.add, status)
                fails = False
            except Exception:  # the page stands still; training does not
                if not fails:  # a run of days must not fill its log with one error
                    logger.exception("the dashboard cannot read the status")
                fails = True
            if not is_last:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._closing.wait()


_begun: set[str] = set()
"""Logs that this process has begun. The one of ``PSYNC_RUN_LOG`` is of all its coordinators."""


@contextlib.asynccontextmanager
async def shown(
    source: ClusterSource,
    address: str | None = None,
    log: str | os.PathLike[str] | None = None,
) -> AsyncIterator[str]:
    """Return a context in which a run is shown or written down; yields the dashboard's URL.

    The URL is printed, too. Without a dashboard it is "".

    Args:
        source: Of the status.
        address: Of the dashboard; None: as ``PSYNC_DASHBOARD`` says; "": none.
        log: Path of the run log; None: as ``PSYNC_RUN_LOG`` says; "": none.

    Raises:
        ConfigurationError: The port is in use; the log cannot be written, or its path is
            something else's; aiohttp is missing.
    """
    environ, url = os.environ, ""
    address = environ.get("PSYNC_DASHBOARD", "") if address is None else address
    path = environ.get("PSYNC_RUN_LOG", "") if log is None else os.fspath(log)
    # A log goes on if a launcher has started the program again, or if this is a further
    # coordinator of the program for which the launcher wants a log.
    is_again = log is None and path in _begun
    continues = is_again or environ.get("PSYNC_RESTART_COUNT", "0") not in ("", "0")
    async with contextlib.AsyncExitStack() as stack:
        written = None
        if path:
            written = RunLog(path, source.program, append=continues)
            stack.push_async_callback(asyncio.to_thread, written.close)
            _begun.add(path)
        recorder = Recorder(source, written)
        stack.push_async_callback(recorder.close)
        if address:
            url = await stack.enter_async_context(serving_dashboard(recorder, address))
        recorder.start()
        if url:
            print(f"psync: dashboard at {url}", file=sys.stderr, flush=True)
        yield url
