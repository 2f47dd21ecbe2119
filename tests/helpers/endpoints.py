"""What the tests of connections share: endpoints that know each other, on any network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psync.net.connection import Connection, Handler, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.transport import Network, SocketNetwork
from psync.testing import MemoryNetwork
from psync.wire.codec import Message
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.messages import Done, Hello, Refused, Update

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
SECRET = Secret(b"a secret of the whole cluster")

Handlers = dict[type[Message], Handler]

MADE: weakref.WeakKeyDictionary[Endpoint, None] = weakref.WeakKeyDictionary()
"""By ``new_endpoint``, in this order; see the fixture ``closed_at_the_end``."""


def done(request: Request[Any]) -> None:
    """A handler that has nothing to do."""
    request.answer(Done())


def push(sequence: int = 1) -> Update:
    return Update(sequence, 0, -1, 0, 0)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Gate:
    """A handler that waits until it is told to answer, and counts who waits."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    def __call__(self, request: Request[Any]) -> None:
        request.start(self.wait(request))

    async def wait(self, request: Request[Any]) -> None:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        request.answer(Done())


def raising(error: Exception, *, slowly: bool = False) -> Handler:
    async def later(request: Request[Any]) -> None:
        await asyncio.sleep(0)
        raise error

    def at_once(request: Request[Any]) -> None:
        raise error

    return Handler(later if slowly else at_once)


def new_endpoint(
    network: Network,
    task: str = PS,
    handlers: Handlers | None = None,
    *,
    incarnation: int = 1,
    secret: Secret | None = SECRET,
    limits: Limits = DEFAULT_LIMITS,
    admit: Callable[[Hello], Refused | None] | None = None,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> Endpoint:
    platform = Platform(
        network, secret, limits=limits, random_bytes=random_bytes, uniform=lambda: 0.5
    )
    made = Endpoint(platform, task, incarnation, handlers or {}, admit=admit)
    MADE[made] = None
    return made


@dataclass
class Pair:
    """Two tasks with one connection."""

    network: Network
    server: Endpoint  # a ps, which listens
    client: Endpoint  # a worker, which has connected
    peer: Connection  # the ps, as the worker sees it
    back: Connection  # the worker, as the ps sees it
    address: str  # where the ps listens


@contextlib.asynccontextmanager
async def connected(
    network: Network | None = None,
    server: Handlers | None = None,
    client: Handlers | None = None,
    *,
    address: str = "ps0:1",
    lane: str = "control",
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Pair]:
    """A worker connected to a ps. At the end nothing may be left, and nothing was torn."""
    network = MemoryNetwork() if network is None else network
    ps = new_endpoint(network, PS, server, limits=limits)
    worker = new_endpoint(network, WORKER, client, incarnation=2, limits=limits)
    accepted: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    ps.on_peer.append(lambda peer: accepted.done() or accepted.set_result(peer))
    try:
        listener = await ps.listen(address)
        peer = await worker.connect(listener.address, PS, lane)
        yield Pair(network, ps, worker, peer, await accepted, listener.address)
    finally:
        await worker.close()
        await ps.close()
    assert is_deserted(ps)
    assert is_deserted(worker)
    if isinstance(network, MemoryNetwork):
        network.check()


def is_deserted(endpoint: Endpoint) -> bool:
    """Whether it has no connection, not even one in its handshake."""
    statistics = endpoint.statistics()
    return statistics["connections"] == statistics["handshakes"] == 0


async def wait_deserted(endpoint: Endpoint) -> None:
    """Wait until the last connection is gone, one in its handshake among them."""
    while peers := list(endpoint._peers):
        await asyncio.gather(*(peer.wait_closed() for peer in peers))


def transport_of(peer: Connection) -> Any:
    """What carries a peer's bytes."""
    return peer._transport


def places(directory: Path) -> dict[str, Callable[[], tuple[Network, str]]]:
    """Every kind of network, and an address on it to listen on."""
    return {
        "memory": lambda: (MemoryNetwork(), "ps0:1"),
        "tcp": lambda: (SocketNetwork(), "127.0.0.1:0"),
        "unix": lambda: (SocketNetwork(), f"unix:{directory}/ps0"),
        "one host": lambda: (SocketNetwork(shares_memory=True), "127.0.0.1:0"),
        "one host, unix": lambda: (SocketNetwork(shares_memory=True), f"unix:{directory}/ps0"),
        "one host, memory": lambda: (MemoryNetwork(shares_memory=True), "ps0:1"),
    }


PLACES = ("memory", "tcp", "unix", "one host", "one host, unix", "one host, memory")


def is_writable(connection: Connection) -> bool:
    """Whether large messages need not wait."""
    waiting = connection.wait_writable()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False
