"""Recovery from the loss of a ps: failover, rollback, or the end of the program.

    RUNNING    --a ps is lost, and ``replicas`` or ``from_checkpoint`` can recover it--> RECOVERING
    RUNNING    --a ps is lost, and neither can-->                                        GONE
    RECOVERING --``recovery_ended``-->                                                   RUNNING
    RECOVERING --``recovery_failed``-->                                                  GONE
    any        --a newer coordinator is served-->                                        GONE

``ReplicaRecovery`` and ``PsRecovery`` bring ps tasks back; this pauses closures meanwhile, and
keeps the reason for the end. All that is scheduled after the end fails with the same error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from psync.chief.cluster_links import ClusterLinks
from psync.chief.creation import Creation
from psync.chief.events import Events
from psync.chief.failover import ReplicaRecovery
from psync.chief.rollback import PsRecovery
from psync.client.ps_link import PsLink
from psync.closures.queue import Action, ClosureQueue
from psync.closures.schedule_report import ScheduleReports
from psync.errors import ConnectFailed, ConnectionLost, FencedError, ParameterServerLost
from psync.replicas.gang_runner import GangRunner

logger = logging.getLogger(__name__)

RESTART_S = 60.0
"""A ps that was lost has at least this many seconds to be there again, if it can be recovered."""


class ClusterRecoveryOwner(Protocol):
    """The coordinator."""

    def perform(self, actions: Sequence[Action]) -> None:
        """Do what the queue decided."""

    def fail(self, error: Exception) -> None:
        """End all that is scheduled or runs with an error that is no closure's own."""

    def tell_again(self) -> None:
        """ps tasks know nothing of what they were told: tell them how far closures are."""


class ClusterRecovery:
    """Whether the ps tasks of one coordinator are there, are being brought back, or are gone.

    Args:
        links: To all tasks.
        queue: Stands still during a recovery.
        gangs: That run are ended by one.
        reports: Are told again to ps 0 after one.
        creation: Knows what was created, and what is adopted.
        events: Where a recovery is told.
        owner: The coordinator.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
        replicate: Whether each ps has a backup.

    Attributes:
        from_checkpoint: Goes back to the newest checkpoint, if it has a source of them.
        replicas: Lets backups take over; None: there are none.
    """

    def __init__(
        self,
        links: ClusterLinks,
        queue: ClosureQueue,
        gangs: GangRunner,
        reports: ScheduleReports,
        creation: Creation,
        events: Events,
        owner: ClusterRecoveryOwner,
        *,
        ps_timeout_s: float,
        replicate: bool,
    ) -> None:
        self._links = links
        self._queue = queue
        self._gangs = gangs
        self._reports = reports
        self._creation = creation
        self._owner = owner
        self.from_checkpoint = PsRecovery(links.ps, self, events, max(ps_timeout_s, RESTART_S))
        self.replicas = (
            ReplicaRecovery(links.ps, links.endpoint, self, events, self.from_checkpoint)
            if replicate
            else None
        )
        # Why nothing can be done any more: a newer coordinator has taken over, or a ps is lost.
        self._gone: FencedError | ParameterServerLost | None = None
        self._recovering = False  # the queue stands still until a ps is recovered
        self._closed = False

    # Backups.

    def links_started(self) -> None:
        """Backups begin where each ps is served; before anything is done with them."""
        if self.replicas is not None:
            self.replicas.served_in(self._links.homes)

    async def first_backups(self, timeout_s: float, *, attached: bool) -> None:
        """Make backups, if there are any; see ``backed_up`` for those that are made later.

        Args:
            timeout_s: Seconds.
            attached: Whether something goes on: then they are made once all of it is adopted,
                in the background.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds.

        Cancellation: Safe.
        """
        if self.replicas is None:
            return
        if attached:
            self._creation.on_adopted = self.replicas.resume
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.replicas.start()
        except TimeoutError as exc:
            where = "; ".join(self.replicas.describe())
            raise ConnectFailed(
                f"no backups of all ps tasks within {timeout_s:g} s: {where}"
            ) from exc

    async def backed_up(self) -> None:
        """Wait until every ps has a backup; see ``ClusterCoordinator.backed_up``."""
        if self.replicas is not None:
            if self._creation.reattachment is not None:
                await self._creation.ensure(last=True)
            while not self.replicas.complete:
                await self.replicas.changed()

    def describe(self) -> list[str]:
        """Say where each ps and its backup are, and what a lost ps would mean; for reports."""
        return (self.replicas or self.from_checkpoint).describe()

    # What is lost.

    def ps_lost(self, error: ParameterServerLost) -> None:
        """Go back to a checkpoint; or, if that cannot be, end everything: variables are gone."""
        if self._closed:
            logger.error("%s", error)
        elif not (self.replicas or self.from_checkpoint).takes_over(error):
            self.recovery_failed(error)

    def will_recover(self, error: ParameterServerLost) -> bool:
        """A ps is lost, says ps 0, before it was noticed here; return whether it is recovered."""
        if self.from_checkpoint.source is None or self._closed:
            return False
        if all(link.task != error.task for link in self._links.ps.links):
            return False  # a gang has ended because some ps was lost, which we know
        # Once the worker's other results are noted.
        asyncio.get_running_loop().call_soon(self.ps_lost, error)
        return True

    def replaced(self, error: FencedError) -> None:
        """End everything, now and at every join: workers and ps tasks serve another one."""
        if not isinstance(self._gone, FencedError) and not self._closed:
            logger.error("a newer coordinator has taken over: %s", error)
            self._gone = error
            self._owner.fail(error)

    def fail_if_gone(self) -> None:
        """What is scheduled after the end has the same end."""
        if self._gone is not None and not self._queue.has_failed:
            self._owner.perform(self._queue.fail(self._gone))

    # ps_recovery.RecoveryOwner, replica_recovery.ReplicaOwner.

    def recovery_began(self) -> None:
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

    def fences(self) -> list[tuple[str, int]]:
        """Return (task, lowest incarnation that may still be served) of each worker."""
        return self._links.membership.fences()

    async def attach_ps(self, link: PsLink) -> None:
        """Attach a ps that may have been started again."""
        await self._links.attach_ps(link)

    def ps_moved(self, link: PsLink) -> None:
        """A ps has another address now."""
        self._links.ps_moved(link)

    @property
    def incarnation(self) -> int:
        """What ps 0 has granted."""
        return self._links.incarnation

    def created(self) -> set[tuple[tuple[int, int], str]]:
        """Return (key, name of the variable) of all shards that were created."""
        return self._creation.created

    def is_open(self, closure: int) -> bool:
        """Whether a closure has not ended yet."""
        return self._queue.is_open(closure)

    def recovery_ended(self) -> None:
        """Go on: ps tasks know nothing of what they were told since the checkpoint."""
        self._reports.tell_all()
        self._owner.tell_again()
        if self.replicas is not None:
            self.replicas.resume()
        self._resume()

    def recovery_failed(self, error: ParameterServerLost) -> None:
        """End everything that is scheduled: variables are gone."""
        logger.error("%s", error)
        self._gone = self._gone or error
        self._resume()
        if not self._closed:
            self._owner.fail(error)
            # Pushes that were begun wait for an answer that cannot come.
            self._links.workers.end_sessions(error)

    def _resume(self) -> None:
        recovering, self._recovering = self._recovering, False
        if recovering:
            self._owner.perform(self._queue.resume())

    # The end.

    def stop(self) -> None:
        """The coordinator is being closed: what is lost from now on is at most noted."""
        self._closed = True

    async def close(self) -> None:
        """Bring back nothing more; after ``stop``. Cancellation: safe."""
        if self.replicas is not None:
            await self.replicas.close()
        await self.from_checkpoint.close()
