"""Recovery from the loss of a ps: failover, rollback, or the end of the program.

A ps with a backup fails over to it (``failover``), another one goes back to a checkpoint
(``rollback``); what that means for all else is in ``recovery_state``. This is the coordinator's
half: a worker that loses a ps ends its session, see ``worker_task``.
"""

from __future__ import annotations

import asyncio
import logging

from psync.chief.cluster_links import ClusterLinks
from psync.chief.creation import Creation
from psync.chief.events import Events
from psync.chief.failover import ReplicaRecovery
from psync.chief.recovery_state import RecoveryState
from psync.chief.rollback import PsRecovery
from psync.closures.queue import ClosureQueue
from psync.errors import ConnectFailed, ParameterServerLost

logger = logging.getLogger(__name__)

RESTART_S = 60.0
"""A ps that was lost has at least this many seconds to be there again, if it can be recovered."""


class ClusterRecovery:
    """Whether the ps tasks of one coordinator are there, are being brought back, or are gone.

    Args:
        state: Whether training runs.
        links: To all tasks.
        queue: Knows which closures have ended.
        creation: Knows what was created, and what is adopted.
        events: Where a recovery is told.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
        has_backups: Whether each ps has a backup.

    Attributes:
        state: As it was given.
        from_checkpoint: Goes back to the newest checkpoint, if it has a source of them.
        replicas: Lets backups take over; None: there are none.
    """

    def __init__(
        self,
        state: RecoveryState,
        links: ClusterLinks,
        queue: ClosureQueue,
        creation: Creation,
        events: Events,
        *,
        ps_timeout_s: float,
        has_backups: bool,
    ) -> None:
        self.state = state
        self._links = links
        self._creation = creation
        self.from_checkpoint = PsRecovery(
            state, links, queue, creation, events, max(ps_timeout_s, RESTART_S)
        )
        self.replicas = (
            ReplicaRecovery(state, links, events, self.from_checkpoint) if has_backups else None
        )
        if self.replicas is not None:
            state.on_recovered = self.replicas.resume
        links.on_ps_lost = self.ps_lost

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
        return [*self.state.describe(), *(self.replicas or self.from_checkpoint).describe()]

    # What is lost.

    def ps_lost(self, error: ParameterServerLost) -> None:
        """Go back to a checkpoint; or, if that cannot be, end everything: variables are gone."""
        if self.state.is_closed:
            logger.error("%s", error)
        elif not (self.replicas or self.from_checkpoint).takes_over(error):
            self.state.failed(error)

    def will_recover(self, error: ParameterServerLost) -> bool:
        """A ps is lost, says ps 0, before it was noticed here; return whether it is recovered."""
        if self.from_checkpoint.source is None or self.state.is_closed:
            return False
        if all(link.task != error.task for link in self._links.ps.links):
            return False  # a gang has ended because some ps was lost, which we know
        # Once the worker's other results are noted.
        asyncio.get_running_loop().call_soon(self.ps_lost, error)
        return True

    # The end.

    def stop(self) -> None:
        """The coordinator is being closed: what is lost from now on is at most noted."""
        self.state.is_closed = True

    async def close(self) -> None:
        """Bring back nothing more; after ``stop``. Cancellation: safe."""
        if self.replicas is not None:
            await self.replicas.close()
        await self.from_checkpoint.close()
