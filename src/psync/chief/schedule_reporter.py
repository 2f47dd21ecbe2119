"""Reports to ps tasks: the schedule, for ps 0, and which closures are final.

``ScheduleReports`` decides what ps 0 hears, this sends: one report at a time, and of the states
that follow one another meanwhile the last. Nothing is sent before a worker waits for others, in a
synchronous group or at a staleness bound, since ps 0 would have no use for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from psync.client.ps_link import PsLink, always
from psync.closures.queue import ClosureQueue
from psync.closures.schedule_report import ScheduleReports, ScheduleState
from psync.cluster import parse_task_name
from psync.errors import ClosedError, FencedError, ParameterServerLost, PsyncError
from psync.wire.closure_numbers import Kept
from psync.wire.messages import AwaitWaiters, ReportSchedule

logger = logging.getLogger(__name__)


FINAL_EVERY = 1024
"""ps tasks are told that closures are final whenever this many more are, or a quarter of those that
are kept: these are listed each time, and a rollback may have undone a million data shards."""


class ScheduleReporter:
    """Sends reports for as long as ps 0 serves this coordinator.

    Args:
        link: To ps 0.
        reports: Decides.
    """

    def __init__(self, link: PsLink, reports: ScheduleReports) -> None:
        self._link = link
        self._reports = reports
        self._versions = itertools.count(1)
        self._news = asyncio.Event()

    def look(self) -> None:
        """Something has happened. Nothing is sent in this turn of the loop."""
        if self._reports.look():
            self._news.set()

    async def run(self) -> None:
        """Report the state once somebody waits, and then each that follows: ps 0 is attached."""
        self._news.set()
        loop = asyncio.get_running_loop()
        try:
            await self._link.call(always(AwaitWaiters()))
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._reports.next_deadline()):
                        await self._news.wait()
                self._news.clear()
                state = self._reports.decide(loop.time())
                if state is not None:
                    await self._report(state)
        except (ParameterServerLost, FencedError, ClosedError) as exc:
            logger.debug("the schedule is no longer reported: %s", exc)  # others say why
        except PsyncError as exc:
            logger.error("the schedule is no longer reported: %s", exc)

    async def _report(self, state: ScheduleState) -> None:
        message = ReportSchedule(
            next(self._versions),
            [(_index(worker), incarnation) for worker, incarnation in state.workers],
            list(state.missing),
            state.queued,
            [(closure, _index(worker)) for closure, worker in state.in_flight],
        )
        await self._link.call(always(message))


@dataclass(eq=False)
class FinalClosures:
    """Tells ps tasks which closures are final: late updates of these are refused.

    A ps ignores a number that is lower than one it knows, with what is kept. So ``told`` never goes
    down, not even after an error, when it is above the low-water mark for a while.
    """

    queue: ClosureQueue
    send: Callable[[int, Kept], None]
    """Tells all ps tasks that closures with smaller ids are final, but for those that are kept."""
    told: int = 0
    refused: bool = False  # whether ps tasks refuse all that was scheduled before an error
    num_kept: int = 0  # that were told last

    def look(self, at_least: int | None = None) -> None:
        """Tell them if so many more closures are final than they know; see ``FINAL_EVERY``."""
        if at_least is None:
            at_least = max(FINAL_EVERY, self.num_kept // 4)
        if self.queue.low_water() - self.told >= at_least:
            self.told = self.queue.low_water()
            self.tell_again()

    def look_for_errors(self) -> None:
        """Let steps be refused that compute on their loop and have not heard of an error yet."""
        if self.queue.has_failed != self.refused:
            self.refused = not self.refused
            if self.refused:
                self.told = self.queue.next_id
                self.tell_again()

    def tell_again(self) -> None:
        """Tell them what they were told last: they may know nothing of it."""
        kept = self.queue.kept(self.told)
        self.num_kept = len(kept)
        self.send(self.told, kept)


def _index(worker: str) -> int:
    return parse_task_name(worker)[1]
