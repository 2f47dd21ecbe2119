"""The sender of schedule reports to ps 0.

``ScheduleReports`` decides, this sends: one report at a time, and of the states that follow one
another meanwhile the last. Nothing is sent before the program has declared something at which
workers wait for each other, since ps 0 would have no use for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

from psync.client.ps_link import PsLink
from psync.closures.schedule_report import ScheduleReports, ScheduleState
from psync.cluster import parse_task_name
from psync.errors import ClosedError, FencedError, ParameterServerLost, PsyncError
from psync.wire.sync_messages import ReportSchedule

logger = logging.getLogger(__name__)


class ScheduleReporter:
    """Sends reports for as long as ps 0 serves this coordinator.

    Args:
        link: To ps 0.
        reports: Decides.
        workers_wait: Says whether the program has declared a synchronous group or a staleness
            bound; asked with each ``look`` until it has, and then no more.
    """

    def __init__(
        self, link: PsLink, reports: ScheduleReports, workers_wait: Callable[[], bool]
    ) -> None:
        self._link = link
        self._reports = reports
        self._workers_wait = workers_wait
        self._is_wanted = False
        self._versions = itertools.count(1)
        self._news = asyncio.Event()

    def start(self) -> asyncio.Task[None]:
        """Report the state, and from now on each that follows: ps 0 is attached.

        Returns:
            What does it; to be cancelled at the end.
        """
        self.look()
        return asyncio.get_running_loop().create_task(self._run())

    def look(self) -> None:
        """Something has happened. Nothing is sent in this turn of the loop."""
        if not self._reports.look():
            return
        self._is_wanted = self._is_wanted or self._workers_wait()
        if self._is_wanted:
            self._news.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._reports.next_deadline()):
                        await self._news.wait()
                self._news.clear()
                state = self._reports.decide(loop.time())
                if state is not None:
                    await self._report(state)
        except (ParameterServerLost, FencedError, ClosedError) as exc:
            logger.debug("the schedule is not reported any more: %s", exc)  # others say why
        except PsyncError as exc:
            logger.error("the schedule is not reported any more: %s", exc)

    async def _report(self, state: ScheduleState) -> None:
        message = ReportSchedule(
            next(self._versions),
            [(_index(worker), incarnation) for worker, incarnation in state.workers],
            list(state.missing),
            state.queued,
            [(closure, _index(worker)) for closure, worker in state.in_flight],
        )
        await self._link.call(lambda _: message)


def _index(worker: str) -> int:
    return parse_task_name(worker)[1]
