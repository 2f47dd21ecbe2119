"""Joining a running cluster as another worker.

``psync join HOST:PORT`` and ``PSYNC_JOIN`` make a process a worker that knows the chief's address
and the secret, and nothing else: the chief's ``door`` gives it its index. From then on it is
served as every other worker is, and leaves as they do; while the connection to the door is lost it
tries to get it back, under its index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from psync.cluster import ClusterSpec, split_address, task_name
from psync.cluster_roles import CHIEF
from psync.errors import (
    ConfigurationError,
    ConnectFailed,
    PsyncError,
    RemoteProtocolError,
    TransportError,
)
from psync.launch.identity import OwnTask
from psync.launch.interfaces import PYTHON, interface_towards, joined_with
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.environment import platform_of
from psync.net.platform import Platform
from psync.net.resolvers import SimpleClusterResolver
from psync.net.secret import load_secret
from psync.net.transport import BACKLOG
from psync.wire.messages import JoinCluster, Joined, LeaveCluster

logger = logging.getLogger(__name__)

JOINING = "/job:worker/joining"
"""What a worker calls itself to the door, before it has an index."""

SAY_GOODBYE_S = 2.0
"""A chief that has not heard by then that a worker has left, notices it."""


class Membership:
    """That of this process in a cluster which it has joined.

    Args:
        platform: Network, secret.
        chief: Where the chief listens.
        address: Where this worker listens.
    """

    def __init__(self, platform: Platform, chief: str, address: str) -> None:
        self._endpoint = Endpoint(platform, JOINING, platform.new_incarnation(), {})
        self._chief = chief
        self._address = address
        self.index = -1
        self._peer: Connection | None = None

    async def begin(self) -> None:
        """Be taken in.

        Raises:
            ConnectFailed: Nobody answers.
            AuthenticationError: The chief has another secret.
            RemoteProtocolError: Something else answers, or another version of psync.
            ConfigurationError: The chief refuses this worker.

        Cancellation: Safe.
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
        """Come back to the door whenever the connection is lost. Ends with the task.

        Raises:
            PsyncError: The chief does not want this worker any more.

        Cancellation: The connection stays as it is.
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


@contextlib.asynccontextmanager
async def joining(chief: str, listen: str = "") -> AsyncIterator[tuple[OwnTask, Membership]]:
    """Return a context in which this process is a worker of a cluster that runs.

    The socket at which it listens is then found by ``platform_of``, as one that a launcher has
    passed on.

    Args:
        chief: Where the chief of the cluster listens.
        listen: Where this worker is to listen, host or host:port; by default at a free port of
            the interface by which it reaches the chief.

    Raises:
        ConfigurationError: An address is none, or taken; there is no secret.
        ConnectFailed, AuthenticationError, RemoteProtocolError, ConfigurationError: As for
            ``Membership.begin``.
    """
    _, port = split_address(chief)
    if not port:
        raise ConfigurationError(f"expected host:port of the chief, got {chief!r}")
    if load_secret(os.environ) is None:  # whatever PSYNC_INSECURE says
        raise ConfigurationError(
            "no secret is set, and joining requires the cluster's secret",
            hint="set PSYNC_SECRET, or PSYNC_SECRET_FILE to the path of a file with it",
        )
    host, own_port = _split(listen) if listen else (interface_towards(chief), 0)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, own_port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigurationError(
            f"this worker cannot listen on {listen or host}: {exc.strerror or exc}"
        ) from exc
    address = joined_with(host, listener.getsockname()[1])
    nobody = SimpleClusterResolver(ClusterSpec({}))
    try:
        platform = platform_of(nobody, address)
        membership = Membership(platform, chief, address)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(membership.end)
            await membership.begin()
            os.environ["PSYNC_LISTEN_FD"] = str(listener.detach())
            cluster = ClusterSpec({"chief": [chief], "worker": {membership.index: address}})
            index = membership.index
            resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=index)
            logger.info(
                "%s joins the cluster of %s, and listens at %s",
                task_name("worker", index), chief, address,
            )  # fmt: skip
            yield OwnTask(resolver, cluster, "worker", index), membership
    finally:
        listener.close()


def _split(listen: str) -> tuple[str, int]:
    host, port = split_address(listen if ":" in listen else f"{listen}:0")
    return host, port or 0


async def join(
    serve: Callable[[OwnTask, str], Coroutine[Any, Any, int]], chief: str, listen: str
) -> int:
    """Join a running cluster as a worker, serve until told to stop, return the exit code.

    Args:
        serve: Called with the task, and what to say while no coordinator comes.
        chief: Where its chief listens.
        listen: Where this worker is to listen; see ``joining``.

    Raises:
        ConfigurationError, ConnectFailed, AuthenticationError, RemoteProtocolError: It cannot join.
        TrainingEnded: As ``run_task``.

    Cancellation: It leaves, without ending what it runs.
    """
    async with joining(chief, listen) as (own, membership):
        awaited = f"{own.name} waits for the coordinator of {chief} to connect to {own.address}"
        serving = asyncio.ensure_future(serve(own, awaited))
        keeping = asyncio.ensure_future(membership.keep())
        try:
            await asyncio.wait((serving, keeping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                keeping.result()  # the chief does not want it any more, and this says why
            return serving.result()
        finally:
            serving.cancel()
            keeping.cancel()
            await asyncio.gather(serving, keeping, return_exceptions=True)
