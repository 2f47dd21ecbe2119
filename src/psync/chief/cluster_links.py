"""The coordinator's connections to all tasks, re-established when they break.

``Membership`` decides what a connection made or lost means; this carries it out. One
supervising coroutine per task: connect, attach, wait for the end, report, again; those of the
workers are in ``worker_links``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from psync.chief.enquiry import ServedSearch, absent, enquire
from psync.chief.worker_links import WorkerLinks
from psync.client.ps_client import PsClient
from psync.client.ps_link import PsLink
from psync.closures.flapping import LIMIT, Flapping
from psync.closures.membership import Action as MembershipAction
from psync.closures.membership import Fence, Membership, ParameterServerUnreachable, WorkerIsLost
from psync.cluster import ClusterSpec, task_name
from psync.errors import (
    ConnectFailed,
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    PsyncError,
)
from psync.net.endpoint import Endpoint
from psync.net.environment import note_incarnation
from psync.net.platform import Platform
from psync.numerics.blocks import BlockPool
from psync.wire import ps_messages
from psync.wire.messages import AskStatistics, Done, Statistics
from psync.wire.ps_messages import AttachPs, FinalBelow
from psync.wire.worker_messages import AttachWorker

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
        keep: Whether ps tasks set aside what they hold, to be adopted. Then ps 0 is attached first:
            a synchronous step that is being closed gets to its end before others refuse it.
        may_move: Whether a ps may be served elsewhere than at its own address.

    Attributes:
        on_ps_lost: Called when variables are gone.
        on_worker_given_up: Called when a worker will not come again.
        on_replaced: Called when a newer coordinator has taken the cluster over.
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
        self._keep = keep
        self._ps_0_attached = asyncio.Event()
        self.on_ps_lost: Callable[[ParameterServerLost], None] = lambda _: None
        self.on_worker_given_up: Callable[[], None] = lambda: None
        self.on_replaced: Callable[[FencedError], None] = lambda _: None
        self._origin = origin
        self._program = program
        self._ps_timeout_s = ps_timeout_s
        workers = _addresses(cluster, "worker")
        self._processes = _addresses(cluster, "ps")  # where each ps is at first, and grants
        self._ps = dict(self._processes)  # where it is served
        self._moves = 0  # how often that has changed
        self.homes = list(range(len(self._ps)))  # in whose process
        self._platform = platform
        self.incarnation = 0  # until ps 0 has granted one
        self.pool = BlockPool()
        self.endpoint = Endpoint(platform, task_name("chief", 0), self.incarnation, {}, self.pool)
        client = platform.parts.of(PsClient)
        self.ps = client(self.endpoint, list(self._ps.values()), self.pool, ps_timeout_s)
        self.membership = Membership(workers, self._ps, ps_timeout_s=ps_timeout_s)
        self.workers = WorkerLinks(
            self.endpoint, self.membership, self, workers, Flapping(max_flaps)
        )
        self._search = ServedSearch(
            self.endpoint, self._processes, self.ask_again, may_move=may_move
        )
        self._supervisors: set[asyncio.Task[None]] = set()
        self._fences: set[asyncio.Task[None]] = set()  # not acknowledged yet
        self._changed = asyncio.Event()  # somebody joined
        self._failure: BaseException | None = None  # why the cluster cannot come up
        self.is_up = False  # the cluster came up
        self._enquiring = asyncio.Lock()
        self._fenced_ps: set[int] = set()  # that serve us under the present incarnation
        self._is_closing = False
        self._min_workers = 0  # wanted at the start
        self._unlisten: Callable[[], object] = lambda: None

    async def start(self, min_workers: int, timeout_s: float) -> None:
        """Connect to all tasks; return when every ps and ``min_workers`` workers are there.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._min_workers = min_workers
        self._unlisten = self._platform.given_up.listen(self._given_up)
        await self._ask_ps_0(timeout_s)
        if self._keep:
            await self._find_served(deadline, timeout_s)
        for index, link in enumerate(self.ps.links):
            link.on_lost = self.on_ps_lost
            link.lost_after_s = math.inf  # one that was never here is late, not lost
            self.supervise(self._keep_ps(index))
        self.workers.start()
        try:
            async with asyncio.timeout_at(deadline):
                ended = not self._keep
                while not (self._is_ready(min_workers) and ended):
                    if self._is_ready(min_workers):
                        await self._search.end_former()
                        ended = True
                        continue
                    self._changed.clear()
                    await self._changed.wait()
                    if self._failure is not None:
                        raise self._failure
        except TimeoutError as exc:
            missing = ", ".join(f"{task} at {at}" for task, at in self.membership.missing())
            raise _did_not_come_up(timeout_s, missing or self._search.missing()) from exc
        self.is_up = True

    def _is_ready(self, min_workers: int) -> bool:
        return (
            self.membership.ready(min_workers)
            and len(self.workers.attached) >= min_workers
            and len(self._fenced_ps) == len(self._ps)
            # A new incarnation begins with empty ps tasks: what is created now would be gone.
            and not self._enquiring.locked()
        )

    async def close(self) -> None:
        """Close everything. Cancellation: connections may still be closing."""
        self._is_closing = True
        self._unlisten()
        tasks = (*self._supervisors, *self._fences)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            try:
                await self.ps.close()
            finally:
                await self.endpoint.close()

    def final_below(self, closure: int) -> None:
        """Tell ps tasks that closures with smaller ids are final: late updates of them are refused.

        One that is not connected just now hears it the next time.
        """
        for link in self.ps.links:
            link.notify(FinalBelow(closure))

    async def ps_statistics(self) -> list[dict[str, Any]]:
        """Return each ps task's counters. Raises ParameterServerLost. Cancellation: safe."""
        counters = []
        for link in self.ps.links:
            received = await link.call(lambda _: AskStatistics())
            assert isinstance(received.message, Statistics)
            counters.append(received.message.counters)
        return counters

    def statistics(self) -> dict[str, Any]:
        """Return counters of the connections."""
        return dict(self.endpoint.statistics())

    # Incarnations.

    async def _ask_ps_0(self, timeout_s: float) -> None:
        """Let ps 0 grant an incarnation: nobody else is asked for anything before."""
        task, address = next(iter(self._ps.items()))

        def given_up(at: str, _: str) -> None:
            if at == address and not asking.expired():
                asking.reschedule(asyncio.get_running_loop().time())

        unlisten = None
        try:
            async with asyncio.timeout(timeout_s) as asking:
                unlisten = self._platform.given_up.listen(given_up)
                self._bear(await enquire(self._platform, task, address))
        except TimeoutError as exc:
            if (lost := self.ps.links[0].lost) is not None:
                raise lost from exc
            tasks = dict(self.membership.missing())  # all of them: nobody has been tried
            missing = ", ".join(await absent(self._platform, tasks)) or f"{task} at {address}"
            raise _did_not_come_up(timeout_s, missing) from exc
        finally:
            if unlisten is not None:
                unlisten()

    async def ask_again(self, refused: int, task: str, address: str) -> None:
        """A task has served a higher incarnation than ``refused``: ask ps 0 for one above that.

        So it is where ps 0 was started anew on a machine whose clock is behind. All tasks are
        attached again.

        Raises:
            FencedError: It is not so: a newer coordinator has come.
        """
        try:
            async with self._enquiring:
                if self.incarnation != refused:
                    return  # somebody has asked meanwhile
                seen = await enquire(self._platform, task, address)
                if seen <= refused:
                    raise FencedError(f"{task} serves a newer coordinator than this one")
                logger.warning("%s has seen a newer coordinator than ps 0 has granted", task)
                ps_0, at = next(iter(self._processes.items()))
                self._bear(await enquire(self._platform, ps_0, at, previous=refused, seen=seen))
                for peer in self.endpoint.peers:
                    peer.abort(ConnectionLost("this coordinator has a new incarnation"))
        finally:
            self._changed.set()

    def _bear(self, incarnation: int) -> None:
        note_incarnation(incarnation)
        self.incarnation = self.endpoint.incarnation = incarnation
        self._fenced_ps.clear()

    # What an earlier coordinator has left, and where.

    async def _find_served(self, deadline: float, timeout_s: float) -> None:
        """Find where each ps is served. Raises ConnectFailed, and as ``ServedSearch.run``."""
        try:
            async with asyncio.timeout_at(deadline):
                found = await self._search.run()
        except TimeoutError as exc:
            raise _did_not_come_up(timeout_s, self._search.missing()) from exc
        for link, place in zip(self.ps.links, found, strict=True):
            self.homes[link.index] = place.process
            if place.address:
                self._ps[link.task] = link.address = place.address

    # Supervision.

    def _given_up(self, address: str, reason: str) -> None:
        """Whoever has started the task at this address does not start it again."""
        for name, at in self.workers.addresses().items():
            if at == address:
                self.supervise(self._give_up_worker(name, reason))
        for link in self.ps.links:
            if link.address == address:
                link.give_up(f"at {address} is lost: it {reason}")

    async def _give_up_worker(self, name: str, reason: str) -> None:
        await self.workers.give_up(name, reason)
        if not self.is_up and len(self.workers.addresses()) < self._min_workers:
            raise ConnectFailed(
                f"the cluster did not come up: {name} {reason}",
                hint="what it wrote says why it ended",
            )
        self.on_worker_given_up()

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        self._supervisors.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._changed.set()
            if self.is_up and isinstance(error, FencedError):
                self.on_replaced(error)
            elif not isinstance(error, PsyncError):
                logger.error("a supervisor of the coordinator failed", exc_info=error)

    async def _keep_ps(self, index: int) -> None:
        link, first = self.ps.links[index], True
        loop = asyncio.get_running_loop()
        while True:
            mine = self.incarnation
            try:
                if index and self._keep:
                    await self._ps_0_attached.wait()
                peer = await link.peer("control")
                link.lost_after_s = self._ps_timeout_s
                await link.call(lambda _: self._ps_attachment(index))
            except ParameterServerLost:
                if not await link.recovered():
                    raise
                continue
            except FencedError:
                if self.is_up:
                    raise
                await self.ask_again(mine, link.task, link.address)
                continue
            if not peer.is_open:
                continue
            if mine == self.incarnation:
                self._fenced_ps.add(index)
            if not index:
                self._ps_0_attached.set()
            self.perform(self.membership.connected(link.task, peer.incarnation))
            if not first:
                logger.warning("%s is reachable again", link.task)
            first = False
            self._changed.set()
            await peer.wait_closed()
            self.perform(self.membership.disconnected(link.task, loop.time()))

    async def attach_ps(self, link: PsLink) -> None:
        """Attach a ps that may have been started again, while others are held back.

        Raises:
            ParameterServerLost: It was lost again.

        Cancellation: Safe.
        """
        await link.call(lambda _: self._ps_attachment(link.index), urgent=True)

    def ps_moved(self, link: PsLink) -> None:
        """A ps has another address now, which workers that are attached from now on are told."""
        self._ps[link.task] = link.address
        self._moves += 1

    def _ps_attachment(self, index: int) -> AttachPs:
        # One that was started again while this program runs is of no lineage: see ``reattach``.
        keep = self._keep or self.is_up
        addresses = list(self._ps.values())
        return AttachPs(self.incarnation, index, addresses, self._ps_timeout_s, keep, self._moves)

    # What the connections to workers need of all, see ``worker_links``.

    def supervise(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a supervisor until the links are closed; its error is that of all."""
        task = asyncio.get_running_loop().create_task(work)
        self._supervisors.add(task)
        task.add_done_callback(self._supervisor_ended)
        return task

    def ps_addresses(self) -> list[str]:
        """Return where the ps tasks are."""
        return list(self._ps.values())

    def attachment(self, place: int, num_workers: int, incarnation: int) -> AttachWorker:
        """Return what a worker is told."""
        return AttachWorker(
            place, num_workers, incarnation, self.incarnation, self._origin, self._program,
            list(self._ps.values()), self._ps_timeout_s,
        )  # fmt: skip

    def worker_joined(self) -> None:
        """A worker takes part: perhaps that is what is waited for."""
        self._changed.set()

    def perform(self, actions: Sequence[MembershipAction]) -> None:
        """Do what the membership decided."""
        for action in actions:
            if isinstance(action, Fence):
                self._fence(action)
            elif isinstance(action, ParameterServerUnreachable):
                logger.warning("%s cannot be reached; waiting for it", action.task)
            elif isinstance(action, WorkerIsLost):
                logger.debug("%s: incarnation %d is over", action.task, action.incarnation)

    def _fence(self, action: Fence) -> None:
        if (
            self._is_closing
        ):  # who loses its connection now is not lost; the next coordinator fences
            return
        link = next(link for link in self.ps.links if link.task == action.ps)

        async def fence() -> None:
            received = await link.call(lambda _: ps_messages.Fence(action.task, action.below))
            if not isinstance(received.message, Done):
                logger.error("%s did not take a fence", action.ps)

        task = asyncio.get_running_loop().create_task(fence())
        self._fences.add(task)
        task.add_done_callback(self._fenced)

    def _fenced(self, task: asyncio.Task[None]) -> None:
        self._fences.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a fence was not taken: %s", error)


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
