"""Networks: listening and connecting over TCP and Unix sockets, behind one interface.

``SocketNetwork`` knows TCP (``host:port``, ``[v6]:port``) and Unix sockets (``unix:/path``); tests
have a network in memory (``psync.testing``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any, Protocol

from psync.cluster import split_address

Factory = Callable[[], asyncio.BufferedProtocol]

BACKLOG = 1024
"""All tasks of a cluster connect at once."""


class Listener(Protocol):
    """A listening address."""

    address: str  # as bound: a port 0 is resolved

    def close(self) -> None:
        """Stop listening; open connections stay."""

    async def wait_closed(self) -> None:
        """Wait until the address is free again. Cancellation: safe."""


class Network(Protocol):
    """Where connections come from: sockets, or memory in tests."""

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection. Raises OSError. Cancellation: safe, nothing stays open."""

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen on ``address``. Raises OSError. Cancellation: safe."""


class _SocketListener:
    def __init__(
        self, server: asyncio.AbstractServer, address: str, path: str | None = None
    ) -> None:
        self._server = server
        self._path = path  # of a Unix socket that has to be removed
        self.address = address

    def close(self) -> None:
        self._server.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None

    async def wait_closed(self) -> None:
        # Server.wait_closed() of 3.12 waits for the connections too; closing a listener
        # must not. The sockets themselves are closed by close().
        await asyncio.sleep(0)


# From Python 3.13 on, closing a server also removes its file, which is the launcher's where the
# socket was passed on: who is started again would be found by nobody.
_KEEPS_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class SocketNetwork:
    """TCP and Unix sockets.

    Args:
        inherited: Sockets that a launcher bound and listens on already, by address: a task
            that is to listen there takes the socket over instead.
    """

    def __init__(self, inherited: dict[str, socket.socket] | None = None) -> None:
        self._inherited = dict(inherited or {})

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection; see ``Network``."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        if port is None:
            return await loop.create_unix_connection(factory, host)
        return await loop.create_connection(factory, host, port)

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen; see ``Network``."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        inherited = self._inherited.pop(address, None)
        server: asyncio.AbstractServer
        if port is None:
            bound = inherited or _bind_unix(host)
            try:
                server = await loop.create_unix_server(
                    factory, sock=bound, backlog=BACKLOG, **_KEEPS_FILE
                )
            except BaseException:
                bound.close()
                raise
            return _SocketListener(server, address, None if inherited else host)
        if inherited is not None:
            server = await loop.create_server(factory, sock=inherited, backlog=BACKLOG)
            port = inherited.getsockname()[1]
        else:
            server = await loop.create_server(factory, host or None, port, backlog=BACKLOG)
            port = server.sockets[0].getsockname()[1]
        return _SocketListener(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def reason(error: OSError) -> str:
    """Return why the network refused, in the system's own words where it has some."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return os.strerror(error.errno).lower() if error.errno else str(error)


def _bind_unix(path: str) -> socket.socket:
    """Bind a socket, for its owner alone. One that nobody listens on any more makes way.

    Both loops would bind themselves, but remove a living one, too.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        try:
            sock.bind(path)
        except OSError:
            if not _is_stale(path):
                raise
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_stale(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a full backlog would keep us waiting
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
