"""What is seen of a coordinator's run: its status, dashboard, run log and report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from psync.errors import PsyncError, UsageError, other_loop
from psync.status.model import ShardStatus
from psync.status.sampling import StatusSource
from psync.status.serving import ServedStatus

if TYPE_CHECKING:
    from psync.api.strategy import ParameterServerStrategy
    from psync.coordinator import Coordinator
    from psync.net.platform import Platform
    from psync.status.dashboard.recorder import Attached, Recorder
    from psync.status.dashboard.report_page import ReportLog

logger = logging.getLogger(__name__)

_running: weakref.WeakSet[SeenRun] = weakref.WeakSet()
"""Runs of this process that can be reported."""

_reports: dict[report, None] = {}
"""Reports that are open."""


class report:
    """Write an HTML file that shows a run as the dashboard does, and opens offline.

    The report covers every coordinator of this process that runs within the context, including
    those that already run when it begins. It takes one sample per second. The file is written when
    the context ends, including after an error.

    Args:
        path: Path of the file, "….html"; an existing file is replaced. If the file cannot be
            written at the end, it is written to the folder for temporary files, and a warning names
            it.

    Raises:
        ConfigurationError: When it is entered: the folder is missing or not writable.
        UsageError: The same object is entered again; or coordinators run on another event loop.

    Cancellation: The report of the run so far is written.

    Example:
        async with psync.report("run.html"):
            async with psync.ClusterCoordinator(strategy) as coordinator:
                ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._log: ReportLog | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recorders: dict[SeenRun, Recorder] = {}

    async def __aenter__(self) -> None:
        from psync.status.dashboard.report_page import ReportLog, check_path

        if self._log is not None:
            raise UsageError("report: it can be entered only once", hint="create a new one")
        self._loop = asyncio.get_running_loop()
        here = [run for run in _running if run.loop is self._loop]
        if _running and not here:
            raise other_loop("report")
        check_path(self._path)
        self._log = ReportLog()
        _reports[self] = None
        for run in here:
            self._begin_run(run)

    def _begin_run(self, run: SeenRun) -> None:
        """Note what happens in a run from now on."""
        from psync.status.dashboard.recorder import Recorder

        run.source.asks_workers += 1
        recorder = self._recorders[run] = Recorder(run.source.status, self._log)
        recorder.start()

    async def _end_run(self, run: SeenRun) -> None:
        """Note the last of a run, if that was not done. Cancellation: safe."""
        recorder = self._recorders.pop(run, None)
        if recorder is not None:
            await recorder.close()
            run.source.asks_workers -= 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        log, path = self._log, self._path
        assert log is not None, "it was entered"
        if asyncio.get_running_loop() is not self._loop:
            raise other_loop("the end of a report")
        _reports.pop(self, None)
        try:
            for run in list(self._recorders):
                await self._end_run(run)
            written = await asyncio.to_thread(log.write_report, path)
            if written != path:
                logger.warning("report %s cannot be written; it is in %s instead", path, written)
        except (PsyncError, OSError) as exc:  # never worth the result of a run
            logger.warning("no report was written: %s", exc)
        finally:
            log.remove()


class SeenRun:
    """The status of one coordinator, and who is shown it.

    Args:
        coordinator: Not started yet.
        platform: Of it.
        strategy: Whose variables it serves.
        metrics, dashboard, run_log: As the arguments of ``ClusterCoordinator``.

    Attributes:
        source: Of the status.
        loop: The event loop on which it runs.

    Raises:
        ConfigurationError: As ``ServedStatus``.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        platform: Platform,
        strategy: ParameterServerStrategy,
        *,
        metrics: str | None,
        dashboard: str | None,
        run_log: str | os.PathLike[str] | None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.source = StatusSource(coordinator, functools.partial(placed, strategy))
        self.source.variables = lambda: {
            variable.spec.variable_id: variable.spec.name for variable in strategy.variables
        }
        self._served = ServedStatus(self.source, platform, metrics)
        self._shown: Attached | None = None  # None: there is no dashboard, and no run log
        asked = (dashboard, "PSYNC_DASHBOARD"), (run_log, "PSYNC_RUN_LOG")
        if any(os.environ.get(name) if given is None else given for given, name in asked):
            from psync.status.dashboard.recorder import Attached

            self._shown = Attached(self.source, dashboard, run_log)

    @property
    def url(self) -> str:
        """Of the dashboard; "": there is none."""
        return "" if self._shown is None else self._shown.url

    async def start(self) -> None:
        """Begin. Raises ConfigurationError. Cancellation: ``close`` still has to be called."""
        await self._served.start()
        if self._shown is not None:
            await self._shown.start()
        _running.add(self)
        for each in _reports:
            if each._loop is self.loop:
                each._begin_run(self)

    async def close(self) -> None:
        """Show it to nobody any more. Cancellation: a connection may still be closing."""
        _running.discard(self)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._served.close)
            for each in list(_reports):
                stack.push_async_callback(each._end_run, self)
            if self._shown is not None:
                await self._shown.close()


def placed(
    strategy: ParameterServerStrategy, known: tuple[ShardStatus, ...]
) -> tuple[ShardStatus, ...]:
    """Return where the shards of all variables lie, which changes when more are declared."""
    count = sum(len(variable.spec.shards) for variable in strategy.variables)
    if count == len(known):
        return known
    return tuple(
        ShardStatus(row.variable, row.shard, row.shape, row.dtype, row.nbytes, row.ps)
        for row in strategy.placement().rows
    )
