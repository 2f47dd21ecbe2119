"""The connections to one ps task: one for each lane that is used, made again when it is lost.

A ps may be away for a while, be lost, and be recovered. What becomes of a lost one ``on_lost``
decides. A worker ends its session, and the closure runs again elsewhere (``worker_task``): if its
update had reached the backup, the ledger answers "duplicate"; after a rollback it is applied anew,
unless the checkpoint has it (``chief.recovery``). The coordinator recovers the ps
(``chief.recovery``); its own requests wait (``hold``), and are sent again under the same identities
(``outgoing``).

A ps that is stopped is found by pings: its kernel still answers, its loop does not.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from psync.client.numbers import Numbers
from psync.errors import (
    ClosedError,
    ConnectFailed,
    ConnectionLost,
    ParameterServerLost,
    PsyncError,
)
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.wire.handshake import LANES

logger = logging.getLogger(__name__)

AWAY_FOR_S = 0.3
"""A ps with a backup that is gone for so long is lost: waiting longer costs more than a mistake. A
launcher may hold the socket of a ps that has died: then nobody refuses."""

REFUSED_FOR_S = 2.0
"""A ps that was there, and at whose address nobody has listened for this long, is lost: not
"refused" once, which something between us and the ps may have said."""

PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 10.0
"""A ps runs no user code and answers within milliseconds; two silent periods: it is gone."""


class Lanes:
    """The connections to one ps task.

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
        self._peers: dict[str, Connection] = {}
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

    async def peer(self, lane: str) -> Connection:
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
                self._keepalive = asyncio.get_running_loop().create_task(self._keep_alive())
            return peer

    async def _connect_here(self, lane: str) -> Connection:
        """Connect, unless the ps is looked for elsewhere meanwhile, see ``revive``."""
        try:
            async with asyncio.timeout(None) as attempt:
                self._attempts[lane] = attempt
                return await self._connect(lane)
        except TimeoutError as exc:
            raise ConnectFailed(f"{self.task} is not looked for there any more") from exc
        finally:
            del self._attempts[lane]

    async def _connect(self, lane: str) -> Connection:
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
                raise ConnectFailed(f"no answer within {self.away_for_s:g} s") from exc
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

    def fail(self, error: ParameterServerLost) -> None:
        """Let all requests fail with this error, including those that wait for a connection."""
        self.lost = self.lost or error
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
            self.task, message,
            hint="its shards are lost, and there is no checkpoint or complete backup: restart the "
            'program; with a psync.CheckpointManager, or with ps_recovery="backup" and a complete '
            "backup, training would continue",
        )  # fmt: skip
        for peer in self._peers.values():
            peer.abort(ConnectionLost(error.message))
        if self.on_lost is not None:
            self.on_lost(error)  # which may revive it at once
        return error

    def _open_peers(self) -> list[Connection]:
        return [peer for peer in self._peers.values() if peer.is_open]

    async def _keep_alive(self) -> None:
        """Ping the ps for as long as it is not lost, and end its connections when it is silent."""
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self.lost is not None:
                return
            if not self.is_open:
                silent_since = None
                continue
            began = loop.time()
            try:
                # Pings do not queue behind tensors: if need be the control lane is opened.
                peer = await self.peer("control")
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await peer.ping()
                silent_since = None
            except TimeoutError:
                # Our own loop may have been blocked by a step, with the answer unread: only
                # a second silence in a row counts.
                if silent_since is None:
                    silent_since = began
                    continue
                waited = loop.time() - silent_since
                text = f"{self.task} did not answer pings for {waited:.0f} s"
                logger.warning("%s; its connections are closed", text)
                for peer in self._open_peers():
                    peer.abort(ConnectionLost(text))
                silent_since = None
            except PsyncError as exc:  # whoever needs the ps gets it, too
                logger.info("%s: no ping: %s", self.task, exc.message)
                silent_since = None
