"""The coordinator's connections to every task, made again when they go.

Layer: L3. Imports: errors, cluster, endpoint, membership, platform, ps_client, rpc, wire.

``Membership`` decides what a connection made or lost means; this carries it out. One
supervising coroutine per task: connect, attach, wait for the end, report, again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from psync.blocks import BlockPool
from psync.cluster import ClusterSpec, task_name
from psync.endpoint import Endpoint
from psync.errors import (
    ConnectFailed,
    FencedError,
    ParameterServerLost,
    PsyncError,
    TransportError,
)
from psync.membership import Action as MembershipAction
from psync.membership import Assign, Fence, Membership, ParameterServerUnreachable, WorkerIsLost
from psync.platform import Platform
from psync.ps_client import PsClient
from psync.rpc import Handler, Peer
from psync.wire import messages
from psync.wire.messages import AttachPs, AttachWorker, Done, Message

logger = logging.getLogger(__name__)

STRANGER_PAUSE_S = 5.0
"""Pause before an address is tried again at which something else than our task answered."""


class LinksOwner(Protocol):
    """Who is told what happens in the cluster."""

    def worker_joined(self, worker: str, control: Peer, bulk: Peer) -> None:
        """A worker is ready for closures."""

    def worker_lost(self, worker: str) -> None:
        """Put back what it held."""

    def ps_lost(self, error: ParameterServerLost) -> None:
        """Variables are gone."""

    def replaced(self, error: FencedError) -> None:
        """A newer coordinator has taken the cluster over."""


class ClusterLinks:
    """All connections of one coordinator.

    Args:
        platform: Network, secret, randomness.
        cluster: The training cluster.
        owner: Is told of workers and losses.
        handlers: Who serves the workers' messages.
        origin: Token of the strategy.
        program: Token of this process.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
    """

    def __init__(
        self,
        platform: Platform,
        cluster: ClusterSpec,
        owner: LinksOwner,
        handlers: dict[type[Message], Handler],
        *,
        origin: str,
        program: str,
        ps_timeout_s: float,
    ) -> None:
        self._owner = owner
        self._origin = origin
        self._program = program
        self._ps_timeout_s = ps_timeout_s
        self._workers = _addresses(cluster, "worker")
        self._ps = _addresses(cluster, "ps")
        self.incarnation = platform.new_incarnation()
        self.pool = BlockPool()
        self._endpoint = Endpoint(
            platform, task_name("chief", 0), self.incarnation, handlers, self.pool
        )
        self.ps = PsClient(self._endpoint, list(self._ps.values()), self.pool, ps_timeout_s)
        self.membership = Membership(self._workers, self._ps, ps_timeout_s=ps_timeout_s)
        self._attached: set[str] = set()  # workers that have joined, not only connected
        self._supervisors: set[asyncio.Task[None]] = set()
        self._fences: set[asyncio.Task[None]] = set()  # not acknowledged yet
        self._changed = asyncio.Event()  # somebody joined
        self._failure: BaseException | None = None  # why the cluster cannot come up
        self._up = False  # the cluster came up
        self._is_closing = False

    async def start(self, min_workers: int, timeout_s: float) -> None:
        """Connect to all tasks; return when every ps and ``min_workers`` workers are there.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        for index, link in enumerate(self.ps.links):
            link.on_lost = self._owner.ps_lost
            link.lost_after_s = math.inf  # one that was never here is late, not lost
            self._supervise(self._keep_ps(index))
        for index, (worker, address) in enumerate(self._workers.items()):
            self._supervise(self._keep_worker(index, worker, address))
        try:
            async with asyncio.timeout(timeout_s):
                while not (
                    self.membership.ready(min_workers) and len(self._attached) >= min_workers
                ):
                    self._changed.clear()
                    await self._changed.wait()
                    if self._failure is not None:
                        raise self._failure
        except TimeoutError as exc:
            missing = ", ".join(f"{task} at {at}" for task, at in self.membership.missing())
            raise ConnectFailed(
                f"the cluster did not come up within {timeout_s:g} s: no connection to {missing}",
                hint="are these tasks running, and are these their addresses?",
            ) from exc
        self._up = True

    async def close(self) -> None:
        """Close everything. Cancellation: connections may still be closing."""
        self._is_closing = True
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
                await self._endpoint.close()

    def final_below(self, closure: int) -> None:
        """Tell ps tasks that closures with smaller ids are final: late updates of them are refused.

        One that is not connected just now hears it the next time.
        """
        for link in self.ps.links:
            link.notify(messages.FinalBelow(closure))

    async def ps_statistics(self) -> list[dict[str, Any]]:
        """Return each ps task's counters. Raises ParameterServerLost. Cancellation: safe."""
        counters = []
        for link in self.ps.links:
            received = await link.call(lambda _: messages.AskStatistics())
            assert isinstance(received.message, messages.Statistics)
            counters.append(received.message.counters)
        return counters

    def statistics(self) -> dict[str, Any]:
        """Return counters of the connections."""
        return dict(self._endpoint.statistics())

    # Supervision.

    def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._supervisors.add(task)
        task.add_done_callback(self._supervisor_ended)

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        self._supervisors.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._changed.set()
            if self._up and isinstance(error, FencedError):
                self._owner.replaced(error)
            elif not isinstance(error, PsyncError):
                logger.error("a supervisor of the coordinator failed", exc_info=error)

    async def _keep_ps(self, index: int) -> None:
        link, first = self.ps.links[index], True
        loop = asyncio.get_running_loop()
        addresses = list(self._ps.values())
        attachment = AttachPs(self.incarnation, index, addresses, self._ps_timeout_s)
        while True:
            peer = await link.peer("control")
            link.lost_after_s = self._ps_timeout_s
            await link.call(lambda _: attachment)
            if not peer.is_open:
                continue
            self._perform(self.membership.connected(link.task, peer.incarnation))
            if not first:
                logger.warning("%s is reachable again", link.task)
            first = False
            self._changed.set()
            await _closed(peer)
            self._perform(self.membership.disconnected(link.task, loop.time()))

    async def _keep_worker(self, index: int, worker: str, address: str) -> None:
        first = True
        while True:
            try:
                lanes = await self._attach_worker(index, worker, address)
            except PsyncError as exc:
                if not self._up or isinstance(exc, FencedError):
                    raise
                logger.error("%s cannot take part: %s", worker, exc)
                await asyncio.sleep(STRANGER_PAUSE_S)
                continue
            if lanes is None:
                continue
            if not first:
                logger.warning("%s takes part again", worker)
            first = False
            control, bulk = lanes
            self._attached.add(worker)
            self._owner.worker_joined(worker, control, bulk)
            self._changed.set()
            await _closed(control, bulk)
            logger.warning(
                "%s is lost (%s); its closures run again", worker,
                control.error or bulk.error or "it closed the connection",
            )  # fmt: skip
            control.abort()
            bulk.abort()
            self._lost(worker)
            self._attached.discard(worker)
            self._owner.worker_lost(worker)

    async def _attach_worker(
        self, index: int, worker: str, address: str
    ) -> tuple[Peer, Peer] | None:
        """Return its control and bulk connection; None if one is gone already.

        Raises:
            PsyncError: The worker refuses, or something else answers.
        """
        control = await self._endpoint.connect_retrying(address, worker)
        try:
            bulk = await self._endpoint.connect_retrying(address, worker, "bulk")
        except BaseException:
            control.abort()
            raise
        attached = False
        try:
            if control.is_open and bulk.is_open and bulk.incarnation == control.incarnation:
                incarnation = self._connected(worker, control.incarnation)
                try:
                    await control.call(self._attachment(index, incarnation))
                    attached = True
                except TransportError as exc:
                    logger.info("%s: attaching it failed: %s", worker, exc)
                finally:
                    if not attached:
                        self._lost(worker)
        finally:
            if not attached:  # also if it refuses: it has room for so many connections only
                control.abort()
                bulk.abort()
        return (control, bulk) if attached else None

    def _attachment(self, index: int, incarnation: int) -> AttachWorker:
        return AttachWorker(
            index, len(self._workers), incarnation, self.incarnation, self._origin, self._program,
            list(self._ps.values()), self._ps_timeout_s,
        )  # fmt: skip

    def _connected(self, worker: str, boot: int) -> int:
        # Not below our own incarnation: ps tasks refuse whoever worked for an earlier coordinator.
        actions = self.membership.connected(worker, max(boot, self.incarnation))
        self._perform(actions)
        return next(action.incarnation for action in actions if isinstance(action, Assign))

    def _lost(self, worker: str) -> None:
        now = asyncio.get_running_loop().time()
        self._perform(self.membership.disconnected(worker, now))

    def _perform(self, actions: list[MembershipAction]) -> None:
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
            received = await link.call(lambda _: messages.Fence(action.task, action.below))
            if not isinstance(received.message, Done):
                logger.error("%s did not take a fence", action.ps)

        task = asyncio.get_running_loop().create_task(fence())
        self._fences.add(task)
        task.add_done_callback(self._fenced)

    def _fenced(self, task: asyncio.Task[None]) -> None:
        self._fences.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a fence was not taken: %s", error)


def _addresses(cluster: ClusterSpec, job: str) -> dict[str, str]:
    return {
        task_name(job, index): cluster.task_address(job, index)
        for index in cluster.task_indices(job)
    }


async def _closed(*peers: Peer) -> None:
    """Wait until one of the connections is gone."""
    gone = asyncio.Event()
    listener: Callable[[Peer], None] = lambda _: gone.set()  # noqa: E731
    for peer in peers:
        if peer.is_closed:
            return
        peer.on_closed.append(listener)
    await gone.wait()
