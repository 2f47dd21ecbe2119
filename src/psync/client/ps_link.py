"""The link to one ps task: connections, detection of their loss, retransmission.

Every request to a ps may be repeated: pulls change nothing, updates bear an identity by
which the ps answers a repetition from memory. So a lost connection is made again and the
request is sent again, until the ps has answered or is lost.

What becomes of it then ``on_lost`` decides. A worker ends its session, and the closure runs again
elsewhere (``worker_task``): if its update had reached the backup, the ledger answers "duplicate";
after a rollback it is applied anew, unless the checkpoint has it (``chief.rollback``).
The coordinator recovers the ps (``chief.recovery``); its own requests wait (``hold``), and are sent
again under the same identities (``outgoing``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from psync.client.keepalive import keep_alive
from psync.client.numbers import Numbers
from psync.closures.membership import backoff
from psync.errors import (
    ClosedError,
    ConnectFailed,
    ConnectionLost,
    ParameterServerLost,
    PsyncError,
)
from psync.net.endpoint import Endpoint
from psync.net.peer import Into, Peer, Received
from psync.wire.codec import Message, check
from psync.wire.frames import Segment
from psync.wire.handshake import LANES

logger = logging.getLogger(__name__)

AWAY_FOR_S = 0.3
"""A ps with a backup that is gone for so long is lost: waiting longer costs more than a mistake. A
launcher may hold the socket of a ps that has died: then nobody refuses."""

REFUSED_FOR_S = 2.0
"""A ps that was there, and at whose address nobody has listened for this long, is lost: not
"refused" once, which something between us and the ps may have said."""

MAX_LOSSES = 16
"""Connections that one request may outlive: more, and it is what breaks them."""

SETS_PER_CONNECTION = 8192
"""Sets of shards that a ps may be named by their numbers alone. Fewer than it allows: forgotten
ones stay known to a connection for its life, so a new one is made then, which knows none."""


class Question:
    """A request that nobody waits for in a coroutine."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end: Callable[[], object] | None = None  # while it is under way

    def give_up(self) -> None:
        """Call nothing more, and write no more to memory for the reply."""
        end, self.end = self.end, None
        if end is not None:
            end()


class PsLink:
    """The way to one ps task: a connection for each lane that is used, made again when it goes.

    Invariant: one incarnation of the ps is talked to. Another one has lost the shards, and
    from then on every call raises ParameterServerLost.
    """

    def __init__(self, endpoint: Endpoint, index: int, address: str, lost_after_s: float) -> None:
        self.index = index
        self.task = f"/job:ps/task:{index}"
        self.address = address
        self.incarnation: int | None = None  # of the ps; None until the first connection
        self.lost: ParameterServerLost | None = None  # set once, for ever
        self.on_lost: Callable[[ParameterServerLost], None] | None = None
        self.updates = Numbers()  # of pushes, assigns and gradients for accumulators
        self._endpoint = endpoint
        self.refused_for_s = REFUSED_FOR_S
        self.away_for_s = math.inf  # without any connection, once there was one; then it is lost
        self.lost_after_s = lost_after_s  # inf: it may not be up yet, so as long as it takes
        self._life = 0  # how often it was revived
        self._peers: dict[str, Peer] = {}
        self._connecting = {lane: asyncio.Lock() for lane in LANES}
        self._attempts: dict[str, asyncio.Timeout] = {}  # to connect
        self._keepalive: asyncio.Task[None] | None = None
        self._closed = False
        self._asking: set[asyncio.Task[None]] = set()
        self._released: asyncio.Event | None = None  # while ordinary calls are held back
        self.num_calls = 0  # requests so far, answers, and connections

    @property
    def state(self) -> str:
        """Return how it is: "unconnected", "connected", "broken" or "lost"; for reports."""
        if self.lost is not None:
            return "lost"
        if self.is_open:
            return "connected"
        return "unconnected" if self.incarnation is None else "broken"

    async def peer(self, lane: str) -> Peer:
        """Return an open connection.

        Raises:
            ParameterServerLost: None comes up within the time, or the ps came back empty.
            AuthenticationError, ProtocolError: It is not our ps.
            FencedError: A newer incarnation of this task has replaced us.
            ClosedError: The link was closed here.

        Cancellation: Safe.
        """
        peer = self._peers.get(lane)
        if peer is not None and peer.is_open and self.lost is None:
            return peer
        async with self._connecting[lane]:
            while True:
                peer = self._peers.get(lane)
                self._check_usable()
                if peer is not None and peer.is_open:
                    return peer
                life = self._life
                try:
                    peer = await self._connect_here(lane)
                except ConnectFailed as exc:
                    if life != self._life:
                        continue  # it was looked for where it is not any more
                    raise self._declare_lost(
                        f"at {self.address} cannot be reached ({exc.message})"
                    ) from exc
                if life == self._life:
                    break
                peer.close()
            if self._closed or self.lost is not None:  # meanwhile
                peer.close()
                self._check_usable()
            if self.incarnation is None:
                self.incarnation = peer.incarnation
            elif self.incarnation != peer.incarnation:
                peer.close()
                raise self._declare_lost(f"at {self.address} was restarted and has lost its shards")
            self._peers[lane] = peer
            peer.state["sets"] = set()  # that the ps certainly knows here
            self.num_calls += 1
            if self._keepalive is None:
                pings = keep_alive(self.task, self._open_peers, lambda: self.peer("control"))
                self._keepalive = asyncio.get_running_loop().create_task(pings)
            return peer

    async def _connect_here(self, lane: str) -> Peer:
        """Connect, unless the ps is looked for elsewhere meanwhile, see ``revive``."""
        try:
            async with asyncio.timeout(None) as attempt:
                self._attempts[lane] = attempt
                return await self._connect(lane)
        except TimeoutError as exc:
            raise ConnectFailed(f"{self.task} is not looked for there any more") from exc
        finally:
            del self._attempts[lane]

    async def _connect(self, lane: str) -> Peer:
        """Connect, with patience for a ps that is slow or far, and less for one that has ended.

        A ps listens as long as it lives. Where nobody listens any more, it has ended; where
        nobody has listened yet, our patience is infinite, see ``lost_after_s``.
        """
        connect = self._endpoint.connect_retrying
        loop = asyncio.get_running_loop()
        while self.incarnation is not None and self.away_for_s < math.inf and not self.is_open:
            began = loop.time()
            try:
                async with asyncio.timeout(self.away_for_s):
                    return await connect(self.address, self.task, lane)
            except TimeoutError as exc:
                if loop.time() - began > 2 * self.away_for_s:
                    continue  # our own loop stood still: the answer may be unread
                raise ConnectFailed(f"nobody answers within {self.away_for_s:g} s") from exc
        patience_s = self.lost_after_s
        if self.refused_for_s < patience_s < math.inf:
            try:
                return await connect(self.address, self.task, lane, timeout_s=self.refused_for_s)
            except ConnectFailed as exc:
                if exc.__cause__ and isinstance(exc.__cause__.__cause__, ConnectionRefusedError):
                    raise
            patience_s -= self.refused_for_s
        try:
            return await connect(self.address, self.task, lane, timeout_s=patience_s)
        except ConnectFailed as exc:
            last = exc.__cause__ or exc
            raise ConnectFailed(
                f"no connection within {self.lost_after_s:g} s: {last}", hint=exc.hint
            ) from last

    async def call(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Segment] = (),
        *,
        bulk: bool = False,
        into: Into | None = None,
        set_ids: Iterable[int] = (),
        locked: bool = False,
        cut: bool = False,
        urgent: bool = False,
        at_once: bool = False,
    ) -> Received:
        """Send a request that may be repeated, over and over until it is answered.

        Args:
            build: Makes the message for a connection: what it defines depends on that.
            segments: As for ``Peer.call``.
            bulk: Whether a large body goes or comes.
            into: As for ``Peer.call``.
            set_ids: The sets that the ps knows once it has answered: not before, as messages may
                overtake one another.
            locked: Whether it is about a lock, or said under one: then nothing may be in front of
                it that waits for a lock.
            cut: Whether it is about a cut: then nothing may be in front of it that waits at a gate.
            urgent: Whether it is part of a recovery: others wait while that goes on, see ``hold``.
            at_once: As for ``Peer.call``.

        Raises:
            ParameterServerLost: See ``peer``, also for its other errors.
            ConnectionLost: Again and again: the request itself seems to be the cause.
            LocalProtocolError: A field of it is of a wrong type.
            PsyncError: The ps's answer.

        Cancellation: Safe; the request may have been served.
        """
        lane = "cut" if cut else "lock" if locked else "bulk" if bulk else "control"
        self.num_calls += 1
        losses = 0
        while True:
            if self._released is not None and not urgent:
                await self._released.wait()
            peer = self._peers.get(lane)
            if peer is None or not peer.is_open or self.lost is not None:
                try:
                    peer = await self.peer(lane)
                except ParameterServerLost:
                    if self._released is None or urgent:
                        raise
                    continue  # a recovery has begun
                if self._released is not None and not urgent:
                    continue  # likewise, and the ps is there, but empty
            try:
                message = build(peer)
                received = await peer.call(message, segments, into=into, at_once=at_once)
            except ConnectionLost as exc:
                losses += 1
                check(message)  # or it would cost the next connections, too
                if losses == MAX_LOSSES:
                    raise ConnectionLost(
                        f"{self.task}: {losses} connections in a row were lost with the same "
                        f"request, the last because: {exc.message}"
                    ) from exc
                logger.info("%s: repeating a request: %s", self.task, exc.message)
            else:
                self._note_known(peer, set_ids)
                return received
            finally:
                self.num_calls += 1
            if losses > 1:
                await asyncio.sleep(backoff(losses, self._endpoint.platform.uniform()))

    def ask(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Segment],
        then: Callable[[Received | Exception], None],
        *,
        bulk: bool = False,
        into: Into | None = None,
        set_ids: Iterable[int] = (),
        locked: bool = False,
        at_once: bool = False,
    ) -> Question:
        """As ``call``, without a coroutine while there is a connection and it lasts.

        Args:
            build: As for ``call``.
            segments: As for ``call``.
            then: Called once with the reply, or with what ``call`` would raise. Must not raise.
            bulk: As for ``call``, like all that follow.
            into: Where the reply's body belongs.
            set_ids: The sets that the ps knows once it has answered.
            locked: Whether it is said under a lock.
            at_once: Whether it is on its way when this returns.

        Returns:
            The request, which can be given up.
        """
        question = Question()

        def call() -> Coroutine[Any, Any, Received]:
            return self.call(build, segments, bulk=bulk, into=into, set_ids=set_ids, locked=locked)

        def again() -> None:
            task = asyncio.get_running_loop().create_task(_tell(then, call))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            question.end = task.cancel

        peer = self._peers.get("lock" if locked else "bulk" if bulk else "control")
        if peer is None or not peer.is_open or self.lost is not None or self._released is not None:
            again()
            return question

        def answered(outcome: Received | Exception) -> None:
            question.end = None  # which leads back here: memory would be held until it is collected
            self.num_calls += 1
            if isinstance(outcome, ConnectionLost):
                again()
                return
            if not isinstance(outcome, Exception):
                self._note_known(peer, set_ids)
            then(outcome)

        self.num_calls += 1
        try:
            question.end = peer.ask(build(peer), segments, answered, into)
            if at_once:
                peer.connection.flush()
        except PsyncError as exc:
            then(exc)
        return question

    @staticmethod
    def _note_known(peer: Peer, set_ids: Iterable[int]) -> None:
        known: set[int] = peer.state["sets"]
        known.update(set_ids)
        if len(known) >= SETS_PER_CONNECTION:
            peer.close()  # what is under way is repeated on a new one

    def notify(self, message: Message) -> None:
        """Send a notification if there is a connection."""
        peer = self._peers.get("control")
        if peer is not None and peer.is_open:
            peer.notify(message)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return any(peer.is_open for peer in self._peers.values())

    @property
    def is_held(self) -> bool:
        """Whether a recovery is under way."""
        return self._released is not None

    def hold(self) -> None:
        """Hold ordinary calls back, also those that are under way and lose their connection."""
        if self._released is None and not self._closed:  # else nobody would release them
            self._released = asyncio.Event()

    def release(self) -> None:
        """Let them go on: the ps has been recovered; or, if it is lost, they raise that."""
        released, self._released = self._released, None
        if released is not None:
            released.set()

    async def recovered(self) -> bool:
        """Wait for the end of a recovery; return whether the ps is there. Cancellation: safe."""
        while self._released is not None:
            await self._released.wait()
        return self.lost is None and not self._closed

    def revive(self) -> None:
        """Forget that the ps was lost, and under which incarnation it was there."""
        for peer in self._peers.values():
            peer.abort(ConnectionLost(f"{self.task} is being recovered"))
        self._peers.clear()
        self._end_attempts()
        self.lost = None
        self.incarnation = None
        self._life += 1
        if self._keepalive is not None:
            self._keepalive.cancel()  # the next connection has one of its own
            self._keepalive = None

    @property
    def gone_for_good(self) -> str | None:
        """Return what became of the ps, if nobody starts it again."""
        return self._endpoint.platform.given_up.reason(self.address)

    def give_up(self, message: str) -> None:
        """The ps says itself that it has lost its shards, or is gone for good."""
        self._declare_lost(message)
        self._end_attempts()

    def _end_attempts(self) -> None:
        for attempt in self._attempts.values():
            if not attempt.expired():  # it ends already
                attempt.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close the connections; calls under way fail. Cancellation: safe."""
        self._closed = True
        self.release()
        if self._keepalive is not None:
            self._keepalive.cancel()
            await asyncio.gather(self._keepalive, return_exceptions=True)
        for peer in self._peers.values():
            peer.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the link to {self.task} is closed")
        if self.lost is not None:
            raise self.lost.with_traceback(None)  # it is raised many times

    def _declare_lost(self, message: str) -> ParameterServerLost:
        if self.lost is not None:
            return self.lost
        error = self.lost = ParameterServerLost(
            self.task, message, hint="its shards are gone: restart the program"
        )
        for peer in self._peers.values():
            peer.abort(ConnectionLost(error.message))
        if self.on_lost is not None:
            self.on_lost(error)  # which may revive it at once
        return error

    def _open_peers(self) -> list[Peer] | None:
        return None if self.lost else [peer for peer in self._peers.values() if peer.is_open]


async def _tell(
    then: Callable[[Received | Exception], None], call: Callable[[], Awaitable[Received]]
) -> None:
    outcome: Received | Exception
    try:
        outcome = await call()
    except Exception as exc:
        outcome = exc
    then(outcome)


def always(message: Message) -> Callable[[Peer], Message]:
    """Return what makes this message for any connection, see ``PsLink.call``."""
    return lambda peer: message
