"""Workers that a local cluster or ``psync run`` starts, or asks to leave, while a program runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from psync.chief.cluster_links import ClusterLinks
from psync.closures.queue import ClosureQueue
from psync.closures.scaling_rule import Load
from psync.cluster import task_name
from psync.errors import PsyncError

logger = logging.getLogger(__name__)


class FollowedWorkers:
    """Takes the workers in, and lets them leave in order; a ``net.platform.Follower``.

    Args:
        links: Of the coordinator, which runs or is starting.
        queue: Its closures.
    """

    def __init__(self, links: ClusterLinks, queue: ClosureQueue) -> None:
        self._links = links
        self._queue = queue

    def load(self) -> Load:
        """Return what there is to do."""
        return Load.of(self._queue.statistics())

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Add and remove workers; see ``Follower``."""
        known = self._links.workers.addresses()
        names = {task_name("worker", index): at for index, at in added.items()}
        work = [self._add(name, at) for name, at in names.items() if known.get(name) != at]
        leaving = [name for index in removed if (name := task_name("worker", index)) in known]
        self._links.expect(len(known) - len(leaving))
        work += [self._remove(name) for name in leaving]
        return [self._links.supervision.supervise(each) for each in work]

    async def _add(self, name: str, address: str) -> None:
        workers = self._links.workers
        await workers.started.wait()
        try:
            while name in workers.addresses():  # its predecessor, which has left or is about to
                await workers.give_up(name, "was replaced")
            await workers.add(address, int(name.rpartition(":")[2]), None)
        except PsyncError as exc:
            logger.error("%s at %s was not added: %s", name, address, exc)
            self._links.on_worker_given_up()  # it may have been the last hope

    async def _remove(self, name: str) -> None:
        if name in self._links.workers.addresses():
            await self._links.workers.remove(name, "the cluster is made smaller")
            self._links.on_worker_given_up()
