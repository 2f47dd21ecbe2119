"""The recorder: a status a second, for the dashboard and the run log of a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from psync.status.dashboard.run_log import RunLog
from psync.status.dashboard.shows import LiveShow
from psync.status.model import Status

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class Recorder:
    """Takes a status a second, from ``start`` to ``close``.

    Args:
        read: Returns the status.
        log: Where statuses are written; None: nowhere. It is closed with this.
        interval_s: Between two statuses.

    Attributes:
        show: What the dashboard shows.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Status]],
        log: RunLog | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.show = LiveShow()
        self._read = read
        self._log = log
        self._interval_s = interval_s
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

    async def _run(self) -> None:
        fails = False
        while True:
            is_last = self._closing.is_set()
            try:
                await self._take()
                fails = False
            except Exception:  # the page stands still; training does not
                if not fails:  # a run of days must not fill its log with one error
                    logger.exception("the dashboard cannot read the status")
                fails = True
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._closing.wait()

    async def _take(self) -> None:
        status = await self._read()
        self.show.add(status)
        log = self._log
        if log is not None:
            await self._write(log, lambda: log.add(status))

    async def _write(self, log: RunLog, write: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(write)
        except OSError as exc:
            logger.warning("run log %s is no longer written: %s", log.path, exc.strerror)
            self._log = None
