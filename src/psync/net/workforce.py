"""Workers that come and leave while a cluster runs, as whoever starts its tasks decides.

A local cluster and ``psync run`` say here which workers they have started and which they have asked
to leave; the coordinator that runs, or runs next, follows. The other way, it says how much there is
to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from psync.closures.membership import Load
from psync.cluster import ClusterSpec
from psync.net.process_state import PerProcess


class Follower(Protocol):
    """A coordinator that runs or is starting."""

    def workers_changed(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Take workers in (address by index), let others leave; return what does it.

        What comes is known, perhaps, and what leaves not: then nothing happens.
        """

    def load(self) -> Load:
        """Return what there is to do."""


class Workforce:
    """Workers that have come and left since the tasks of a cluster were started."""

    def __init__(self) -> None:
        self._added: dict[int, str] = {}  # address by index
        self._removed: set[int] = set()
        self._followers: dict[Follower, None] = {}  # the newest last

    def change(
        self, added: Mapping[int, str], removed: Collection[int]
    ) -> list[asyncio.Task[None]]:
        """Some workers are there now, others are to leave.

        Args:
            added: Where each of the new ones listens, by index. They may still be starting.
            removed: Indices of those that leave.

        Returns:
            What ends when coordinators that run have taken the new ones in, and those that leave
            have left; it raises nothing.
        """
        for index in removed:
            self._added.pop(index, None)
            self._removed.add(index)
        for index, address in added.items():
            self._removed.discard(index)
            self._added[index] = address
        followers = list(self._followers)
        return [task for each in followers for task in each.workers_changed(added, removed)]

    def follow(self, follower: Follower) -> Callable[[], object]:
        """Let a coordinator follow, what has changed before it started included.

        Returns:
            What ends that.
        """
        self._followers[follower] = None
        follower.workers_changed(self._added, self._removed)
        return lambda: self._followers.pop(follower, None)

    def present(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return a cluster with the workers that there are now, and not those of its strategy."""
        jobs = {
            job: {index: cluster.task_address(job, index) for index in cluster.task_indices(job)}
            for job in cluster.jobs
        }
        known = jobs.get("worker", {})
        there = {i: at for i, at in known.items() if i not in self._removed} | self._added
        return ClusterSpec({**jobs, "worker": dict(sorted(there.items()))})

    def load(self) -> Load:
        """Return what the coordinator that runs has to do; where none does, nothing."""
        return next((each.load() for each in reversed(self._followers)), Load())


workforce_of_launcher: PerProcess[Workforce] = PerProcess(Workforce)
"""That of the launcher which has started this process, a chief."""
