"""The network endpoint of a task: listener, outgoing connections, peers, request handlers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from psync.closures.membership import backoff
from psync.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ConnectFailed,
    FencedError,
    ProtocolError,
    PsyncError,
)
from psync.net import handshake_limits
from psync.net.connection import Connection, Handler, Spawn, Tap
from psync.net.platform import Platform
from psync.net.shared.bodies import Sharing
from psync.net.shielding import begin, end_all
from psync.net.transport import Listener, one_line, reason
from psync.numerics.memory import BlockPool
from psync.wire.codec import Message
from psync.wire.frames import VERSION
from psync.wire.handshake import NONCE_BYTES, ClientHandshake, Handshake, ServerHandshake, State
from psync.wire.messages import Challenge, Hello, Refused

logger = logging.getLogger(__name__)

REPORT_AFTER_S = 5.0
"""A connection that is not up by then is reported, and again at doubling intervals."""

OWN_NAME_WITHIN_S = 60.0
"""By then the name at which a task listens can be resolved. That of a pod of Kubernetes comes into
the DNS some seconds after the pod has begun, and that it was not there stays in caches."""

_PROVED = ("fenced", "early")
"""Why peers are refused that hold the secret."""

_LEVELS = {"fenced": logging.DEBUG, "early": logging.DEBUG, "full": logging.INFO}
"""Of what is logged of a refusal, by its reason; else it is a warning."""

CLOSE_TIMEOUT_S = 1.0
"""A peer that has not taken by then what we had to say to it will not get it."""


@dataclass(eq=False, repr=False)
class Endpoint:
    """Where a task's connections begin and end.

    Args:
        platform: Network, secret, randomness.
        task: Own task name.
        incarnation: Own incarnation; may be raised later (``incarnation`` attribute), for
            connections made from then on.
        handlers: Who serves which message.
        pool: Memory for received segments.
        admit: Last word on a peer that has proved itself; None admits all.
    """

    platform: Platform
    task: str
    incarnation: int
    handlers: dict[type[Message], Handler]
    pool: BlockPool = field(default_factory=BlockPool)
    admit: Callable[[Hello], Refused | None] | None = None

    def __post_init__(self) -> None:
        self._sharings: weakref.WeakSet[Sharing] = weakref.WeakSet()  # of connections that are gone
        self.on_peer: list[Callable[[Connection], None]] = []  # told of each accepted connection
        self._peers: dict[Connection, None] = {}  # open, or in their handshake, in this order
        # Of connections that are gone.
        self._traffic = Counter(bytes_sent=0, bytes_received=0, bytes_lent=0, bytes_borrowed=0)
        # Of them, accepted ones in their handshake, the oldest first, and where they come from.
        self._unproven: dict[Connection, handshake_limits.Place] = {}
        self._failures = handshake_limits.FailedHandshakes(self.platform.limits.handshake_failures)
        self._log_quota = handshake_limits.LogQuota()
        self._untold: asyncio.TimerHandle | None = None  # None: every line was written
        self._untold_level = logging.NOTSET  # the highest of those that were not
        self._tasks: set[asyncio.Task[None]] = set()  # handlers that run
        self.spawn: Spawn = partial(begin, under_way=self._tasks)  # starts one that takes time
        self._listeners: list[Listener] = []
        self._tap_of: Callable[[Connection], Tap] | None = None
        self._closed = False

    @property
    def peers(self) -> list[Connection]:
        """The open connections."""
        return [peer for peer in self._peers if peer.is_open]

    async def listen(self, address: str) -> Listener:
        """Accept connections at ``address``. A name that cannot be resolved yet is waited for.

        Raises:
            ConfigurationError: The address is in use or not this machine's, or its name is none.

        Cancellation: Safe.
        """
        self._check_not_closed()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OWN_NAME_WITHIN_S
        for attempt in itertools.count():
            try:
                listener = await self.platform.network.listen(address, self._accept)
                break
            except OSError as exc:
                if not isinstance(exc, socket.gaierror) or loop.time() >= deadline:
                    raise ConfigurationError(
                        f"{self.task} cannot listen on {address}: {reason(exc)}",
                        hint="is another process listening there, such as a task of an earlier "
                        "run? is it an address of this machine?",
                    ) from exc
                if not attempt:
                    logger.warning(
                        "%s cannot listen on %s yet, and retries for %.0f s: %s",
                        self.task, address, OWN_NAME_WITHIN_S, reason(exc),
                    )  # fmt: skip
            await asyncio.sleep(backoff(attempt, self.platform.uniform()))
        self._listeners.append(listener)
        return listener

    async def connect(self, address: str, expect: str, lane: str = "control") -> Connection:
        """Open one connection to the task ``expect`` at ``address``; one attempt.

        Raises:
            ConnectFailed: Nobody answers there, or not in time, or has no room for us.
            AuthenticationError: It does not hold our secret, or refused us.
            FencedError: It knows a newer incarnation of this task.
            ProtocolError: Something else than that task answers.
            ClosedError: This endpoint is closed.

        Cancellation: Safe; the connection is closed.
        """
        self._check_not_closed()
        secret, incarnation = self.platform.secret, self.incarnation
        seconds = self.platform.limits.handshake_seconds
        nonce = self.platform.random_bytes(NONCE_BYTES)
        hello = Hello(VERSION, VERSION, self.task, incarnation, lane, nonce, secret is not None)
        peer = self._new_peer(
            ClientHandshake(None if secret is None else secret.value, hello, expect)
        )
        try:
            async with asyncio.timeout(seconds):
                await self.platform.network.connect(address, lambda: peer)
                await peer.settled.wait()
            if not peer.task:
                error = peer.error
                if isinstance(error, ProtocolError) and expect not in error.message:
                    raise type(error)(f"{expect} at {address}: {error.message}", hint=error.hint)
                if isinstance(error, ProtocolError | AuthenticationError | FencedError):
                    raise error
                why = "the connection was closed" if peer.error is None else one_line(peer.error)
                raise ConnectFailed(f"{expect} at {address}: {why}")
            if incarnation != self.incarnation:  # who speaks over it would be taken for another
                raise ConnectFailed(
                    f"{expect} at {address}: the connection was begun under incarnation "
                    f"{incarnation}, which is {self.incarnation} by now"
                )
        except BaseException as exc:
            self._forget(peer)
            peer.abort()
            if isinstance(exc, OSError) and not isinstance(exc, PsyncError):
                late = f"no answer within {seconds} s"
                why = late if isinstance(exc, TimeoutError) else reason(exc)
                raise ConnectFailed(f"{expect} at {address}: {why}") from exc
            raise
        return peer

    async def connect_retrying(
        self,
        address: str,
        expect: str,
        lane: str = "control",
        *,
        timeout_s: float = math.inf,
        refused_s: float = math.inf,
        level: int = logging.WARNING,
    ) -> Connection:
        """As ``connect``, again and again with growing pauses until it works.

        Args:
            address: As for ``connect``.
            expect: As for ``connect``.
            lane: As for ``connect``.
            timeout_s: Seconds until it is given up.
            refused_s: Seconds for which nobody listens there until it is given up.
            level: Of the log, for saying that it takes long.

        Raises:
            ConnectFailed: Not within ``timeout_s`` seconds (an attempt that is under way then
                is waited for); names the task, the address and the last reason.
            AuthenticationError, FencedError, ProtocolError, ClosedError: At once; waiting would
                not help.

        Cancellation: Safe.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        # As a time, not as what has been waited: near it, rounding would leave pauses of nothing.
        deadline = start + timeout_s
        refused_until = math.inf  # while nobody listens there
        report_after_s = REPORT_AFTER_S
        for attempt in itertools.count():
            try:
                peer = await self.connect(address, expect, lane)
                break
            except ConnectFailed as exc:
                now = loop.time()
                if not isinstance(exc.__cause__, ConnectionRefusedError):
                    refused_until = math.inf
                elif refused_until == math.inf:
                    refused_until = now + refused_s
                if now >= min(deadline, refused_until):
                    waited_s = timeout_s if now >= deadline else refused_s
                    raise ConnectFailed(
                        f"no connection within {waited_s:g} s: {exc.message}",
                        hint=f"is {expect} running, and is this its address?",
                    ) from exc
                if now - start >= report_after_s:
                    logger.log(
                        level, "%s has been waiting for a connection for %.0f s: %s",
                        self.task, now - start, exc.message,
                    )  # fmt: skip
                    report_after_s = 2 * (now - start)
            pause_s = backoff(attempt, self.platform.uniform())
            await asyncio.sleep(min(pause_s, deadline - now, refused_until - now))
        return peer

    async def close(self, *, goes_on: bool = False) -> None:
        """Stop listening, close every connection, cancel the handlers and wait for them.

        ``goes_on``: somebody may still write to its memory, so what others read there is spared.
        Cancellation: Connections are closed; handlers may still be ending.
        """
        self._closed = True
        for listener in self._listeners:
            listener.close()
        self._tell_untold()
        for peer in list(self._peers):
            peer.close()
        await end_all(each for each in self._tasks if each is not asyncio.current_task())
        for listener in self._listeners:
            await listener.wait_closed()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._wait_closed()
        except TimeoutError:
            for peer in list(self._peers):
                peer.abort()
            await self._wait_closed()
        for sharing in () if goes_on else list(self._sharings):
            sharing.drop()
        self.platform.memory.let_go()

    def statistics(self) -> dict[str, int]:
        """Return how many connections are open, or are not yet, and the bytes over all so far."""
        num_open, traffic = len(self.peers), self._traffic.copy()
        for peer in self._peers:
            traffic.update(peer.traffic())
        known = {each.sharing for each in self._peers if each.sharing} | set(self._sharings)
        return {
            "connections": num_open,
            "handshakes": len(self._peers) - num_open,
            **traffic,
            "bytes_lent_now": sum(each.bytes_lent_now for each in known),
            "bytes_kept_now": sum(each.bytes_kept_now for each in known),
            **self.platform.memory.statistics(),
        }

    def tap(self, tap_of: Callable[[Connection], Tap] | None) -> None:
        """Show each message of all connections, also of those that come, to a tap of their own.

        Args:
            tap_of: Makes it; None: they are not shown any more.
        """
        self._tap_of = tap_of
        for peer in self.peers:
            peer.tap = None if tap_of is None else tap_of(peer)

    def _forget(self, peer: Connection) -> None:
        """A connection is gone; what it has carried still counts."""
        if self._peers.pop(peer, self) is None:
            self._traffic.update(peer.traffic())
            if peer.sharing is not None:
                self._sharings.add(peer.sharing)

    # Accepting.

    def _accept(self) -> asyncio.BufferedProtocol:
        secret = self.platform.secret
        nonce, secured = self.platform.random_bytes(NONCE_BYTES), secret is not None
        challenge = Challenge(VERSION, self.task, self.incarnation, nonce, secured, b"")
        handshake = ServerHandshake(None if secret is None else secret.value, challenge, self.admit)
        peer = self._new_peer(handshake)
        if self._closed:
            peer.abort()
        return peer

    def made(self, peer: Connection, peername: object) -> None:
        """A connection is there, and nothing was said yet: a newcomer takes a place, or none.

        Args:
            peer: The connection.
            peername: Where the peer is, as its socket says it.
        """
        if isinstance(peer.handshake, ClientHandshake):
            return
        limits, source = self.platform.limits, handshake_limits.source_of(peername)
        if not self._failures.allows(source, asyncio.get_running_loop().time()):
            peer.abort()
            return
        if len(self._peers) > limits.connections:
            peer.refuse(Refused("full", f"it has {limits.connections} connections"))
            return
        place = self._failures.place(source)
        oldest = handshake_limits.displaced(self._unproven, place, limits.handshakes)
        if oldest is not None:
            self._count_failure(self._unproven.pop(oldest).source, handshake_limits.DISPLACED)
            oldest.refuse(Refused("full", "its place was needed for a newer connection"))
        self._unproven[peer] = place

    def opened(self, peer: Connection) -> None:
        """The handshake of a connection is over."""
        if self._tap_of is not None:
            peer.tap = self._tap_of(peer)
        if (place := self._unproven.pop(peer, None)) is not None:  # it was accepted
            self._failures.succeeded(place.source)
            for listener in self.on_peer:
                listener(peer)

    def gone(self, peer: Connection) -> None:
        """A connection is gone, open or not."""
        self._forget(peer)
        place = self._unproven.pop(peer, None)
        if peer.task or isinstance(peer.handshake, ServerHandshake):  # else who connects is told
            self._report_closed(peer)
        if place is None or self._closed:
            return
        refused = peer.handshake.refused
        if refused is not None and refused.reason in _PROVED:
            self._failures.succeeded(place.source)
        else:
            self._count_failure(place.source)

    def _count_failure(self, source: str | None, failures: float = 1.0) -> None:
        if self._failures.failed(source, asyncio.get_running_loop().time(), failures):
            self._log_stranger(
                logging.WARNING,
                "%s: %d handshakes with %s have failed; most connections from there are closed at "
                "once, until that ends", self.task, self.platform.limits.handshake_failures, source,
            )  # fmt: skip

    # Both.

    def _new_peer(self, handshake: Handshake) -> Connection:
        peer = self.platform.parts.of(Connection)(handshake, self)
        self._peers[peer] = None
        return peer

    def _report_closed(self, peer: Connection) -> None:
        refused, error = peer.handshake.refused, peer.error
        who = f"{peer.task or peer.handshake.peer_task or 'a stranger'} ({peer.peername})"
        if refused is not None:
            # Whoever finds no room tries again, and says so himself when it takes too long. A task
            # that is fenced has begun anew, or is told by the error that it gets.
            level = _LEVELS.get(refused.reason, logging.WARNING)
            log = logger.log if refused.reason in _PROVED else self._log_stranger
            log(level, "%s refused %s: %s", self.task, who, refused.detail)
        elif self._closed:
            return
        elif peer.handshake.state is State.AWAIT_PROOF and not isinstance(error, PsyncError):
            # It has seen our proof. It died, or it has another secret: that stands in its own log.
            self._log_stranger(
                logging.DEBUG, "%s: %s left before its handshake was over", self.task, who
            )
        elif isinstance(error, PsyncError):
            log = logger.log if peer.task else self._log_stranger
            level = logging.DEBUG if peer.ended_here else logging.WARNING
            log(level, "%s lost %s: %s", self.task, who, one_line(error))

    def _log_stranger(self, level: int, text: str, *args: object) -> None:
        """Write a line about somebody who has not proved himself, unless there are too many."""
        if not logger.isEnabledFor(level):
            return
        loop = asyncio.get_running_loop()
        if self._log_quota.allows(loop.time()):
            logger.log(level, text, *args)
        elif not self._closed:
            self._untold_level = max(self._untold_level, level)
            if self._untold is None:
                self._untold = loop.call_at(self._log_quota.ends, self._tell_untold)

    def _tell_untold(self) -> None:
        if self._untold is not None:
            self._untold.cancel()
            level, self._untold, self._untold_level = self._untold_level, None, logging.NOTSET
            logger.log(
                level,
                "%s: %d more messages about unknown peers in the last minute were suppressed",
                self.task, self._log_quota.untold(),
            )  # fmt: skip

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.task} has closed its connections and opens no new ones")

    async def _wait_closed(self) -> None:
        for peer in list(self._peers):
            await peer.wait_closed()
