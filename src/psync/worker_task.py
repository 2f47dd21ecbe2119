"""The worker task: attaches to a coordinator and runs its closures.

    idle --AttachWorker--> attached (a ``Session``) --connection lost or newer coordinator--> idle

A task that is asked to leave (SIGTERM, ``leave``) is *leaving*: its closure ends, its updates are
answered, its results are reported, then the task ends; ``AttachWorker`` is refused meanwhile, and a
second SIGTERM ends it at once. A session also ends when a ps cannot be reached from here: the
coordinator gets the reason, and attaches the worker again.

One session at a time. A worker listens and never connects to the coordinator: a chief that proves
the secret, and is newer than the one before, may attach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from psync.client.context import Runtime
from psync.client.ps import PsClient
from psync.errors import (
    ConnectionLost,
    FencedError,
    ParameterServerLost,
    PsyncError,
    UsageError,
    WorkerLost,
)
from psync.net.chief_presence import ChiefPresence
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.shielding import shielded
from psync.net.trace import SpanRecorder
from psync.net.transport import Listener
from psync.numerics.memory import BlockPool
from psync.wire import messages
from psync.wire.codec import Message
from psync.worker.iterators import WorkerIterator
from psync.worker.session import Session

logger = logging.getLogger(__name__)

UPDATES_END_WITHIN_S = 1.0
"""When a session ends, updates that its steps have begun may take so long: ps tasks answer soon, or
refuse them. One that is given up may reach some ps tasks only."""


class WorkerTask:
    """One worker.

    Args:
        platform: Network, secret, randomness.
        index: Of this task among the workers.
        address: Where to listen.
        main_by_name: Whether this process runs the coordinator's script, so that classes of
            its ``__main__`` are found here by name.
    """

    def __init__(
        self, platform: Platform, index: int, address: str, *, main_by_name: bool = False
    ) -> None:
        self.task = f"/job:worker/task:{index}"
        self.stopped = asyncio.Event()  # set when someone asked this task to end
        self._platform = platform
        self._address = address
        self._main_by_name = main_by_name
        self._pool = BlockPool()
        self._endpoint = Endpoint(
            platform, self.task, platform.new_incarnation(), self._handlers(), self._pool
        )
        self._recorder = SpanRecorder(platform, self.task)
        self._recorder.watch_endpoint(self._endpoint)
        self._endpoint.handlers[messages.AskSpans] = Handler(self._recorder.answer)
        self._session: Session | None = None
        self._unwatch = contextlib.ExitStack()  # the session
        self._end = contextlib.AsyncExitStack()  # of the session, and what it has
        self._newest_coordinator = 0  # the highest incarnation of one that was served
        self._endpoint.on_peer.append(lambda peer: peer.on_closed.append(self._lane_closed))
        self.chief = ChiefPresence(self._endpoint)
        self._ending: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Task[None] | None = None  # once somebody has asked for it

    async def start(self) -> Listener:
        """Listen. Raises ConfigurationError if the address is taken. Cancellation: safe."""
        return await self._endpoint.listen(self._address)

    async def close(self) -> None:
        """Stop what runs and close all connections.

        Cancellation: Sessions end; connections stay open: call it again.
        """
        if self._leaving is not None:
            self._leaving.cancel()
            self._await_end(self._leaving)
        self._end_session()
        while self._ending:
            await asyncio.wait(list(self._ending))
        self._recorder.close()
        await self._endpoint.close()
        self._platform.memory.end()

    async def leave(self, reason: str, *, hint: str = "") -> None:
        """End what runs, give back what does not, tell the coordinator, and set ``stopped``.

        Nothing is waited for where no coordinator is. A second call waits for the first one.

        Args:
            reason: Why, for the log of the coordinator.
            hint: How it can be had sooner, for our own log.

        Cancellation: It goes on.
        """
        await shielded(self._begin_leaving(reason, hint))

    async def _leave(self, reason: str, hint: str) -> None:
        session = self._session
        level = logging.DEBUG if session is None else logging.INFO  # nobody misses it
        logger.log(level, "%s leaves: %s", self.task, reason)
        try:
            if session is not None:
                await session.leave(reason, hint=hint)
        except PsyncError as exc:
            logger.info("%s leaves, but could not tell its coordinator: %s", self.task, exc)
        finally:
            self.stopped.set()

    def _leave_soon(self, request: Request[messages.LeaveCluster]) -> None:
        self._session_of(request.peer)
        self._begin_leaving(request.message.reason, "")
        request.answer(messages.Done())

    def _begin_leaving(self, reason: str, hint: str) -> asyncio.Task[None]:
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave(reason, hint))
        return self._leaving

    def describe(self) -> list[str]:
        """Say what this task does; for reports."""
        if self._session is None:
            return [f"{self.task} at {self._address}: waits for a coordinator"]
        head = f"{self.task} at {self._address}:"
        return [head, *(f"  {line}" for line in self._session.describe())]

    def statistics(self) -> dict[str, Any]:
        """Return counters of the connections, and what its time went to while it had a session."""
        work = {} if self._session is None else self._session.runtime.ps.work.read()
        return {"network": self._endpoint.statistics(), "work": work}

    def _handlers(self) -> dict[type[Message], Handler]:
        return {
            messages.AttachWorker: Handler(self._attach),
            messages.RunClosures: Handler(self._told),
            messages.GiveBack: Handler(self._told),
            messages.CancelClosures: Handler(self._told),
            messages.AskPosition: Handler(self._position),
            messages.LeaveCluster: Handler(self._leave_soon),
            messages.GrantCoordinator: Handler(
                lambda request: request.answer(messages.Number(self._newest_coordinator))
            ),
            messages.AskStatistics: Handler(
                lambda request: request.answer(messages.Statistics(self.statistics()))
            ),
            messages.Shutdown: Handler(self._shutdown),
        }

    def _told(self, request: Request[Any]) -> None:
        """Serve a notification of the session's coordinator, and ignore what others have sent."""
        session = self._session
        if session is not None and request.peer is session.control:
            session.told[type(request.message)](request.message, request.segments)

    def _position(self, request: Request[messages.AskPosition]) -> None:
        request.answer(self._session_of(request.peer).iterator_position(request.message))

    def _session_of(self, peer: Connection) -> Session:
        """Return the session if its coordinator asks; else raise UsageError."""
        session = self._session
        if session is None or peer is not session.control:
            raise UsageError(
                f"{peer.task} ({peer.incarnation}) is not the coordinator of {self.task}"
            )
        return session

    def _lane_closed(self, peer: Connection) -> None:
        session = self._session
        if session is not None and (peer is session.control or peer is session.bulk):
            logger.debug("%s: the coordinator is gone", self.task)
            self._end_session()
            session.control.abort()  # without the other lane this one is of no use
            session.bulk.abort()

    def _attach(self, request: Request[messages.AttachWorker]) -> None:
        peer, message = request.peer, request.message
        if not peer.task.startswith("/job:chief/") or peer.lane != "control":
            raise UsageError(
                f"{self.task}: expected a coordinator's control connection, got {peer.task}, "
                f"lane {peer.lane}"
            )
        session = self._session
        if message.coordinator < self._newest_coordinator:
            raise self._fenced(peer, self._newest_coordinator)
        newest = (each for each in reversed(self._endpoint.peers) if each.client == peer.client)
        bulk = next((each for each in newest if each.lane == "bulk"), None)
        if bulk is None:  # it was there, or the coordinator would not ask
            raise ConnectionLost(f"{self.task} has no bulk connection to {peer.task}")
        if self._leaving is not None:
            raise WorkerLost(self.task, "is about to leave")
        self._newest_coordinator = message.coordinator
        self._end_session()
        if session is not None and session.control is not peer:
            # Or an earlier coordinator would wait for ever for what it has sent here.
            session.control.abort(FencedError(f"{peer.task} has attached {self.task} again"))
            session.bulk.abort()
        clients = Endpoint(self._platform, self.task, message.incarnation, {}, self._pool)
        parts = self._platform.parts
        ps = parts.of(PsClient)(clients, message.ps_addresses, self._pool, message.ps_timeout_s)
        for link in ps.links:
            link.on_lost = self._lost_ps
        iterators: dict[str, WorkerIterator] = {}
        runtime = Runtime(ps, message.origin, message.program, None, iterators.get)
        self._session = session = parts.of(Session)(
            message, peer, bulk, runtime, iterators, self._platform, self._main_by_name
        )
        self._unwatch.callback(self._recorder.watch_endpoint(clients))
        self._unwatch.callback(self._recorder.watch(session.record))
        # A ps may still compute from what a push has lent it, and keep that update.
        self._end.push_async_callback(clients.close, goes_on=True)
        # Of a push that is given up one ps may have its part, and another not yet.
        self._end.push_async_callback(ps.close, UPDATES_END_WITHIN_S)
        self._end.push_async_callback(session.close)
        request.answer(messages.Done())

    def _lost_ps(self, error: ParameterServerLost) -> None:
        """A ps cannot be reached from here: begin anew, once the coordinator says so.

        It decides whether the ps is lost, or whether only we are cut off from it. Nothing is raised
        in the step, whose closure runs again.
        """
        session = self._session
        if session is None:
            return
        for link in session.runtime.ps.links:
            link.hold()
        session.stop(error.message)
        self._end_session()

    def _shutdown(self, request: Request[messages.Shutdown]) -> None:
        peer, message = request.peer, request.message
        if not peer.task.startswith("/job:chief/"):
            raise UsageError(f"{self.task}: expected a coordinator, got {peer.task}")
        session = self._session  # without one any chief may stop it
        if session is not None and peer.incarnation < session.attach.coordinator:
            raise self._fenced(peer, session.attach.coordinator)
        logger.info("%s: %s asks it to stop: %s", self.task, peer.task, message.reason)
        self.stopped.set()
        request.answer(messages.Done())

    def _fenced(self, peer: Connection, newest: int) -> FencedError:
        return FencedError(
            f"{self.task} works for a newer coordinator than {peer.task}: "
            f"incarnation {newest}, not {peer.incarnation}"
        )

    def _end_session(self) -> None:
        if self._session is not None:
            self._session = None
            self._unwatch.close()
            self._await_end(asyncio.get_running_loop().create_task(self._end.pop_all().aclose()))

    def _await_end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a session did not end in order", self.task, exc_info=error)
