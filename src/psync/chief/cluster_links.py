"""The coordinator's connections to all tasks: how the cluster comes up, and its end.

``ps_links`` and ``worker_links`` keep them, ``supervision`` has what both need; ``Membership``
decides what a connection made or lost means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from psync.chief.enquiry import ServedSearch, absent
from psync.chief.events import Events
from psync.chief.ps_links import PsLinks
from psync.chief.supervision import Supervision
from psync.chief.worker_links import WorkerLinks
from psync.client.ps_client import PsClient
from psync.client.ps_link import ask
from psync.closures.flapping import LIMIT, Flapping
from psync.closures.membership import Membership
from psync.cluster import ClusterSpec, task_name
from psync.errors import ConnectFailed
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.wire.closure_numbers import Kept, pack_kept
from psync.wire.messages import AskStatistics, FinalBelow, Statistics

logger = logging.getLogger(__name__)


class ClusterLinks:
    """All connections of one coordinator.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        origin: Token of the strategy.
        program: Token of this process.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
        max_flaps: As for ``Flapping``.
        keep: Whether ps tasks set aside what they hold, to be adopted; see ``PsLinks``.
        may_move: Whether a ps may be served elsewhere than at its own address.

    Attributes:
        ps: The client that has the links to ps tasks.
        served, workers, supervision: Keep the connections.
        events: Of this coordinator.
        on_worker_given_up: Called when a worker will not come again.
    """

    def __init__(
        self,
        platform: Platform,
        cluster: ClusterSpec,
        *,
        origin: str,
        program: str,
        ps_timeout_s: float,
        max_flaps: int | None = LIMIT,
        keep: bool = False,
        may_move: bool = False,
    ) -> None:
        self.on_worker_given_up: Callable[[], None] = lambda: None
        self._platform = platform
        self._keep = keep
        workers, ps = _addresses(cluster, "worker"), _addresses(cluster, "ps")
        pool = BlockPool()
        # Its incarnation is 0 until ps 0 has granted one.
        self.endpoint = Endpoint(platform, task_name("chief", 0), 0, {}, pool)
        client = platform.parts.of(PsClient)
        self.ps = client(self.endpoint, list(ps.values()), pool, ps_timeout_s)
        self.membership = Membership(workers, ps)
        self.events = Events()
        self.supervision = Supervision(self.endpoint, ps, self.events)
        self.served = PsLinks(
            self.supervision,
            self.ps.links,
            self.membership,
            ps,
            keep=keep,
            ps_timeout_s=ps_timeout_s,
        )
        self.workers = WorkerLinks(
            self.supervision, self.membership, self.served, workers, Flapping(max_flaps),
            (origin, program),
        )  # fmt: skip
        self._search = ServedSearch(
            self.endpoint, ps, self.supervision.ask_again, may_move=may_move
        )
        self._min_workers = len(workers)  # wanted at the start, at most
        self._unlisten: Callable[[], object] = lambda: None

    async def start(self, min_workers: int, timeout_s: float) -> None:
        """Connect to all tasks; return when every ps and ``min_workers`` workers are there.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        self.expect(min_workers)
        self._unlisten = self._platform.given_up.listen(self._given_up)
        await self._ask_ps_0(timeout_s)
        if self._keep:
            await self._find_served(deadline, timeout_s)
        self.served.start()
        self.workers.start()
        try:
            async with asyncio.timeout_at(deadline):
                await self._all_there()
                if self._keep:
                    await self._search.end_former()
                    await self._all_there()
        except TimeoutError as exc:
            missing = ", ".join(f"{task} at {at}" for task, at in self.membership.missing())
            raise _did_not_come_up(timeout_s, missing or self._search.missing()) from exc
        self.supervision.is_up = True

    async def _all_there(self) -> None:
        supervision = self.supervision
        while not self._is_ready():
            if supervision.failure is not None:
                raise supervision.failure
            supervision.changed.clear()
            await supervision.changed.wait()

    def _is_ready(self) -> bool:
        return (
            self.membership.ready(self._min_workers)
            and len(self.workers.attached) >= self._min_workers
            and self.served.are_attached()
            # A new incarnation begins with empty ps tasks: what is created now would be gone.
            and not self.supervision.enquiring.locked()
        )

    async def close(self) -> None:
        """Close everything. Cancellation: connections may still be closing."""
        self._unlisten()
        try:
            await self.supervision.close()
        finally:
            try:
                await self.ps.close()
            finally:
                await self.endpoint.close()

    def expect(self, num_workers: int) -> None:
        """There will be so many workers: a cluster that is coming up waits for no more."""
        self._min_workers = min(self._min_workers, num_workers)
        self.supervision.changed.set()

    def final_below(self, closure: int, kept: Kept) -> None:
        """Tell ps tasks that closures with smaller ids are final: late updates of them are refused.

        One that is not connected just now is told by the next, higher number.

        Args:
            closure: Id of the lowest closure that is not final.
            kept: Those below it that may come again, as of now: a rollback changes them.
        """
        message, segments = FinalBelow(closure, self.ps.timeline), pack_kept(kept)
        for link in self.ps.links:
            link.notify(message, segments)

    async def ps_statistics(self) -> list[dict[str, Any]]:
        """Return each ps task's counters. Raises ParameterServerLost. Cancellation: safe."""
        answers = [await ask(link, AskStatistics(), Statistics) for link in self.ps.links]
        return [message.counters for message, _ in answers]

    async def _ask_ps_0(self, timeout_s: float) -> None:
        """Let ps 0 grant an incarnation: nobody else is asked for anything before."""
        link = self.ps.links[0]

        def given_up(at: str, _: str) -> None:
            if at == link.address and not asking.expired():
                asking.reschedule(asyncio.get_running_loop().time())

        unlisten = None
        try:
            async with asyncio.timeout(timeout_s) as asking:
                unlisten = self._platform.given_up.listen(given_up)
                await self.supervision.enquire()
        except TimeoutError as exc:
            if link.lost is not None:
                raise link.lost from exc
            tasks = dict(self.membership.missing())  # all of them: nobody has been tried
            missing = await absent(self._platform, tasks) or [f"{link.task} at {link.address}"]
            raise _did_not_come_up(timeout_s, ", ".join(missing)) from exc
        finally:
            if unlisten is not None:
                unlisten()

    async def _find_served(self, deadline: float, timeout_s: float) -> None:
        """Find where each ps is served. Raises ConnectFailed, and as ``ServedSearch.run``."""
        try:
            async with asyncio.timeout_at(deadline):
                found = await self._search.run()
        except TimeoutError as exc:
            raise _did_not_come_up(timeout_s, self._search.missing()) from exc
        for link, place in zip(self.ps.links, found, strict=True):
            self.served.homes[link.index] = place.process
            if place.address:
                self.served.move(link, place.address)

    def _given_up(self, address: str, reason: str) -> None:
        """Whoever has started the task at this address does not start it again."""
        for name, at in self.workers.addresses().items():
            if at == address:
                self.supervision.supervise(self._give_up_worker(name, reason))
        for link in self.ps.links:
            if link.address == address:
                link.give_up(f"at {address} is lost: it {reason}")

    async def _give_up_worker(self, name: str, reason: str) -> None:
        await self.workers.give_up(name, reason)
        if not self.supervision.is_up and len(self.workers.addresses()) < self._min_workers:
            raise ConnectFailed(
                f"the cluster did not come up: {name} {reason}",
                hint="its output says why it ended",
            )
        self.on_worker_given_up()


def _did_not_come_up(timeout_s: float, missing: str) -> ConnectFailed:
    return ConnectFailed(
        f"the cluster did not come up within {timeout_s:g} s: no connection to {missing}",
        hint="are these tasks running, and are these their addresses?",
    )


def _addresses(cluster: ClusterSpec, job: str) -> dict[str, str]:
    return {
        task_name(job, index): cluster.task_address(job, index)
        for index in cluster.task_indices(job)
    }
