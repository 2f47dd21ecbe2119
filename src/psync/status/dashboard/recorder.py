"""A status a second, for the dashboard and the run log of a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from psync.status.dashboard.run_log import INTERVAL_S, RunLog
from psync.status.dashboard.server import serving
from psync.status.dashboard.view import History, to_json, view_of
from psync.status.model import Status

if TYPE_CHECKING:
    from psync.status.sampling import StatusSource

logger = logging.getLogger(__name__)


class Recorder:
    """Takes a status a second, from ``start`` to ``close``; the dashboard shows the newest one.

    Args:
        read: Returns the status.
        log: Where statuses are written; None: nowhere. It is closed with this.

    Attributes:
        newest: The newest status; None: there was none yet.
    """

    def __init__(self, read: Callable[[], Awaitable[Status]], log: RunLog | None = None) -> None:
        self._read = read
        self._log = log
        self._history = History()
        self.newest: Status | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # never cancelled: it may be writing

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Take a last status, and end.

        Cancellation: It ends by itself; the log has no last line.
        """
        self._closing.set()
        if self._task is not None:
            await asyncio.wait((self._task,))
        log, self._log = self._log, None
        if log is not None:
            await self._write(log, log.close)

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
        fails = False
        while True:
            is_last = self._closing.is_set()
            try:
                status = await self._read()
                self.add(status)
                if self._log is not None:
                    await self._write(self._log, functools.partial(self._log.add, status))
                fails = False
            except Exception:  # the page stands still; training does not
                if not fails:  # a run of days must not fill its log with one error
                    logger.exception("the dashboard cannot read the status")
                fails = True
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._closing.wait()

    async def _write(self, log: RunLog, write: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(write)
        except OSError as exc:
            logger.warning("run log %s is no longer written: %s", log.path, exc.strerror)
            self._log = None


_begun: set[str] = set()
"""Logs that this process has begun. The one of ``PSYNC_RUN_LOG`` is of all its coordinators."""


def hosts_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names by which a dashboard may be asked for, as ``PSYNC_DASHBOARD_HOSTS`` says."""
    names = environ.get("PSYNC_DASHBOARD_HOSTS", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


class Attached:
    """What shows or writes down one coordinator's run, from its start to its end.

    Args:
        source: Of the status.
        address: Of the dashboard; None: as ``PSYNC_DASHBOARD`` says; "": none.
        log: Path of the run log; None: as ``PSYNC_RUN_LOG`` says; "": none.

    Attributes:
        url: Of the dashboard, with its token; "": there is none.
    """

    def __init__(
        self,
        source: StatusSource,
        address: str | None = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        environ = os.environ
        self._source = source
        self._address = environ.get("PSYNC_DASHBOARD", "") if address is None else address
        self._log = environ.get("PSYNC_RUN_LOG", "") if log is None else os.fspath(log)
        # A log goes on if a launcher has started the program again, or if this is a further
        # coordinator of the program for which the launcher wants a log.
        is_again = log is None and self._log in _begun
        self._continues = is_again or environ.get("PSYNC_RESTART_COUNT", "0") not in ("", "0")
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def start(self) -> None:
        """Begin, and print the URL.

        Raises:
            ConfigurationError: The port is in use; the log cannot be written, or its path is
                something else's; aiohttp is missing.

        Cancellation: ``close`` still has to be called.
        """
        log = None
        if self._log:
            log = RunLog(self._log, self._source.program, append=self._continues)
            _begun.add(self._log)
        recorder = Recorder(self._source.status, log)
        self._stack.push_async_callback(recorder.close)
        if self._address:
            page = serving(recorder, self._address, hosts_of(os.environ))
            self.url = await self._stack.enter_async_context(page)
        self._source.asks_workers += 1
        recorder.start()
        if self.url:
            print(f"psync: dashboard at {self.url}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        """Write the last status, and end. Cancellation: a connection may still be closing."""
        await self._stack.aclose()
