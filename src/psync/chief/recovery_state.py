"""Whether training runs, stands still during a recovery, or is over because of a loss.

    RUNNING    --``rollback_began``, ``failover_began``-->  RECOVERING
    RECOVERING --``recovered``-->                           RUNNING
    any        --``failed``: a ps is lost for good-->       GONE
    any        --``replaced`` by a newer coordinator-->     GONE

Closures are held back while it recovers. What is scheduled when all is gone has the same end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from psync.chief.cluster_links import ClusterLinks
from psync.closures.queue import Action, ClosureQueue
from psync.closures.schedule_report import ScheduleReports
from psync.errors import ConnectionLost, FencedError, ParameterServerLost
from psync.replicas.gang_runner import GangRunner

logger = logging.getLogger(__name__)


class RecoveryState:
    """What a recovery does to all else that a coordinator has.

    Args:
        links: To all tasks.
        queue: Stands still during a recovery.
        gangs: That run are ended by one.
        reports: Are told again to ps 0 after one.
        perform: Does what the queue decided.
        tell_again: Tells ps tasks how far closures are, of which they know nothing.

    Attributes:
        on_recovered: Called at the end of a recovery, before closures go on.
    """

    def __init__(
        self,
        links: ClusterLinks,
        queue: ClosureQueue,
        gangs: GangRunner,
        reports: ScheduleReports,
        perform: Callable[[Sequence[Action]], None],
        tell_again: Callable[[], None],
    ) -> None:
        self.on_recovered: Callable[[], None] = lambda: None
        self._links = links
        self._queue = queue
        self._gangs = gangs
        self._reports = reports
        self._perform = perform
        self._tell_again = tell_again
        # Why nothing can be done any more: a newer coordinator has taken over, or a ps is lost.
        self._gone: FencedError | ParameterServerLost | None = None
        links.on_replaced, links.on_worker_given_up = self.replaced, self.fail_if_gone
        self._recovering = False  # the queue stands still until a ps is recovered
        self.is_closed = False

    def describe(self) -> list[str]:
        """Say whether closures stand still; for reports."""
        return ["closures are held back: a ps is being recovered"] if self._recovering else []

    def fail(self, error: Exception) -> None:
        """End all that is scheduled or runs with an error that is no closure's own."""
        actions = self._queue.fail(error)
        self._gangs.fail(error)
        self._perform(actions)

    def replaced(self, error: FencedError) -> None:
        """End everything, now and at every join: workers and ps tasks serve another one."""
        if not isinstance(self._gone, FencedError) and not self.is_closed:
            logger.error("a newer coordinator has taken over: %s", error)
            self._gone = error
            self.fail(error)

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be done any more, or perhaps so: workers were given up."""
        return self._gone is not None or bool(self._links.workers.given_up)

    def fail_if_gone(self) -> None:
        """End what is scheduled where nobody is left who could do it."""
        if not self.is_gone or self._queue.has_failed:
            return
        if self._gone is not None:
            self.fail(self._gone)
            return
        workers_gone = self._links.workers.all_given_up()
        if workers_gone is not None and (
            self._gangs or self._queue.low_water() < self._queue.next_id
        ):
            self.fail(workers_gone)

    def rollback_began(self) -> None:
        """Send nothing to workers, and give up all that are there: each gets a new incarnation."""
        self.failover_began()
        self.end_sessions()

    def failover_began(self) -> None:
        """Send nothing to workers."""
        if not self._recovering:
            self._recovering = True
            self._queue.pause()
        self._gangs.fail(ParameterServerLost("/job:ps", "was lost while replicas ran"))

    def end_sessions(self) -> None:
        """Give up all workers that are there: each gets a new incarnation."""
        self._reports.sessions_end()
        self._links.workers.end_sessions(ConnectionLost("a ps was lost"))

    def recovered(self) -> None:
        """Go on: ps tasks know nothing of what they were told since the checkpoint."""
        self._reports.tell_all()
        self._tell_again()
        self.on_recovered()
        self._resume()

    def failed(self, error: ParameterServerLost) -> None:
        """End everything that is scheduled: variables are gone."""
        logger.error("%s", error)
        self._gone = self._gone or error
        self._resume()
        if not self.is_closed:
            self.fail(error)
            # Pushes that were begun wait for an answer that cannot come.
            self._links.workers.end_sessions(error)

    def _resume(self) -> None:
        recovering, self._recovering = self._recovering, False
        if recovering:
            self._perform(self._queue.resume())
