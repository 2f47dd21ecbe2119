"""Workers that join a running cluster: the door of its chief, and the membership of a worker.

A worker may join a cluster that runs: ``psync join HOST:PORT`` and ``PSYNC_JOIN`` make a
process a worker that knows the chief's address and the secret, and nothing else. It tells the
chief's door where it listens and is told its index; the workforce then brings it to the
coordinators of the program, the one that runs and those that come later. From then on it is served
as every other worker is, and leaves as they do. Its connection to the door stays open. A worker
that leaves says so. One whose connection is lost silently is missed for a while, in which it may
come back under its index (the network was cut, or the chief is a new process), and then forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass

from psync.cluster import CHIEF, join_address, split_address, task_name
from psync.errors import (
    ConfigurationError,
    ConnectFailed,
    PsyncError,
    RemoteProtocolError,
    TransportError,
)
from psync.launch.process import PYTHON
from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform, Workforce
from psync.net.resolvers import interface_towards
from psync.net.secret import load_secret
from psync.net.shared.door_names import BACKLOG
from psync.wire.messages import Done, JoinCluster, Joined, LeaveCluster

logger = logging.getLogger(__name__)

JOINING = "/job:worker/joining"
"""What a worker calls itself to the door, before it has an index."""

SAY_GOODBYE_S = 2.0
"""A chief that has not heard by then that a worker has left, notices it."""

FIRST_JOINED = 10_000
"""Index of the first worker that joins: whoever started the others goes on numbering below it."""

FORGET_AFTER_S = 60.0
"""A worker that was lost silently has been killed, or is back by then."""


class Membership:
    """That of this process, which listens at ``address``, in the cluster of a ``chief``."""

    def __init__(self, platform: Platform, chief: str, address: str) -> None:
        self._endpoint = Endpoint(platform, JOINING, platform.new_incarnation(), {})
        self._chief = chief
        self._address = address
        self.index = -1
        self._peer: Connection | None = None

    async def begin(self) -> None:
        """Join the cluster.

        Raises:
            ConnectFailed: The chief does not answer.
            AuthenticationError: The chief has another secret.
            RemoteProtocolError: Something else answers, or another version of psync.
            ConfigurationError: The chief refuses this worker.
        """
        try:
            self._peer = await self._endpoint.connect(self._chief, CHIEF)
        except ConnectFailed as exc:
            raise ConnectFailed(
                exc.message,
                hint="is the program running, and is this the address of its chief? Workers can "
                "join only while it runs, and only if it ends in psync.run(main)",
            ) from exc
        await self._ask(self._peer)

    async def _ask(self, peer: Connection) -> None:
        received = (await peer.call(JoinCluster(self._address, self.index, PYTHON))).message
        if not isinstance(received, Joined):
            raise RemoteProtocolError(
                f"{CHIEF} answered JoinCluster with {type(received).__name__}"
            )
        if self.index not in (-1, received.index):
            raise ConfigurationError(
                f"worker {self.index} was away from {self._chief} for so long that another worker "
                "has its index",
                hint="restart it: it joins as a new worker",
            )
        self.index = received.index

    async def keep(self) -> None:
        """Come back to the door whenever the connection is lost, until cancelled.

        Raises:
            PsyncError: The chief does not want this worker any more.
        """
        while True:
            assert self._peer is not None, "it has begun"
            await self._peer.wait_closed()
            logger.debug("the connection to the door of %s is lost", self._chief)
            self._peer = await self._endpoint.connect_retrying(
                self._chief, CHIEF, level=logging.INFO
            )
            with contextlib.suppress(TransportError):
                await self._ask(self._peer)

    async def end(self) -> None:
        """Say that this worker has left, and close. Cancellation: the chief misses it."""
        try:
            if self._peer is not None and self._peer.is_open:
                async with asyncio.timeout(SAY_GOODBYE_S):
                    await self._peer.call(LeaveCluster("it has left"))
        except (TimeoutError, PsyncError) as exc:
            logger.debug("the chief was not told that this worker has left: %s", exc)
        finally:
            await self._endpoint.close()


def listen_towards(chief: str, listen: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and its address as others have to know it."""
    chief_host, chief_port = split_address(chief)
    if not chief_port:
        raise ConfigurationError(f"expected host:port of the chief, got {chief!r}")
    if load_secret(os.environ) is None:  # whatever PSYNC_INSECURE says
        raise ConfigurationError(
            "no secret is set, and joining requires the cluster's secret",
            hint="set PSYNC_SECRET, or PSYNC_SECRET_FILE to the path of a file with it",
        )
    if listen:
        host, port = split_address(listen if ":" in listen else f"{listen}:0")
    else:
        port = 0
        try:
            host, _ = interface_towards(chief_host, chief_port)
        except OSError as exc:
            raise ConfigurationError(f"{chief} is unreachable: {exc.strerror or exc}") from exc
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port or 0), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigurationError(
            f"this worker cannot listen on {listen or host}: {exc.strerror or exc}"
        ) from exc
    return listener, join_address(host, listener.getsockname()[1])


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that has joined."""

    address: str
    peer: Connection  # its newest connection
    forgetting: asyncio.TimerHandle | None = None  # while it is missed


class Door:
    """Takes in workers that join. An async context manager; it listens while it is entered.

    Args:
        platform: Network, secret.
        address: Of the chief.
        workforce: Told of workers that come and leave.
        added: Gets the address of each worker that is present, by name: for the program's end.

    Raises:
        ConfigurationError: From entering it: the address is in use, or not this machine's.
    """

    def __init__(
        self, platform: Platform, address: str, workforce: Workforce, added: dict[str, str]
    ) -> None:
        self._address = address
        self._workforce = workforce
        self._added = added
        self._members: dict[int, _Member] = {}
        self._next = FIRST_JOINED
        self._endpoint = Endpoint(
            platform, CHIEF, platform.new_incarnation(),
            {JoinCluster: Handler(self._join), LeaveCluster: Handler(self._leave)},
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self._endpoint.listen(self._address)

    async def __aexit__(self, *exc_info: object) -> None:
        for member in self._members.values():
            if member.forgetting is not None:
                member.forgetting.cancel()
        self._members.clear()
        await self._endpoint.close()

    def _join(self, request: Request[JoinCluster]) -> None:
        peer, message = request.peer, request.message
        if message.python != PYTHON:
            raise ConfigurationError(
                f"the chief runs Python {PYTHON}, but the worker at {message.address} runs "
                f"{message.python} and could not read the program's functions",
                hint="start the worker with the same Python version as the chief",
            )
        split_address(message.address)  # is it one?
        index, known = message.index, self._members.get(message.index)
        if index < FIRST_JOINED or (known is not None and known.address != message.address):
            index, known = self._next, None
        self._next = max(self._next, index + 1)
        if known is not None and known.forgetting is not None:
            known.forgetting.cancel()
        self._members[index] = _Member(message.address, peer)
        peer.on_closed.append(lambda _: self._miss(index, peer))
        name = task_name("worker", index)
        logger.info("%s joins, from %s", name, message.address)
        self._added[name] = message.address
        self._workforce.change({index: message.address}, ())
        request.answer(Joined(index))

    def _leave(self, request: Request[LeaveCluster]) -> None:
        peer, message = request.peer, request.message
        for index, member in list(self._members.items()):
            if member.peer is peer:
                self._forget(index, message.reason)
        request.answer(Done())

    def _miss(self, index: int, peer: Connection) -> None:
        member = self._members.get(index)
        if member is not None and member.peer is peer:
            loop = asyncio.get_running_loop()
            why = f"it was lost {FORGET_AFTER_S:g} s ago"
            member.forgetting = loop.call_later(FORGET_AFTER_S, self._forget, index, why)

    def _forget(self, index: int, reason: str) -> None:
        del self._members[index]
        name = task_name("worker", index)
        logger.info("%s is no longer a worker of the cluster: %s", name, reason)
        self._added.pop(name, None)
        self._workforce.change({}, (index,))
