"""Networks: listening and connecting over TCP and Unix sockets, behind one interface.

``SocketNetwork`` knows TCP (``host:port``, ``[v6]:port``) and Unix sockets (``unix:/path``); tests
have a network in memory (``psync.testing``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from psync.cluster import join_address, split_address
from psync.errors import PsyncError
from psync.net.platform import is_deserted
from psync.net.shared.door_names import BACKLOG, door_beside, shut
from psync.net.shared.doors import Door, doors_of, through_door
from psync.net.shared.doors import Factory as Factory

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 4
USER_TIMEOUT_MS = 30_000
"""A host that takes no byte for this long is dead (the figure Dask uses)."""

UNIX_BUFFER_BYTES = 1 << 20
"""Unix sockets do not tune their buffers; TCP ones do unless they are set."""


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
        self, server: asyncio.Server, address: str, doors: Sequence[Door], path: str | None
    ) -> None:
        for sock in server.sockets:
            keep_from_children(sock)
        self._server = server
        self._doors = doors
        self._path = path  # of a Unix socket that has to be removed
        self.address = address

    def close(self) -> None:
        self._server.close()
        for door in self._doors:
            door.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None

    async def wait_closed(self) -> None:
        # Server.wait_closed() of 3.12 waits for the connections too; closing a listener
        # must not. The sockets themselves are closed by close().
        for door in self._doors:
            await door.wait_closed()
        await asyncio.sleep(0)


# From Python 3.13 on, closing a server also removes its file, which is the launcher's where the
# socket was passed on: who is started again would be found by nobody.
_KEEPS_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class SocketNetwork:
    """TCP and Unix sockets.

    Args:
        inherited: Sockets that a launcher bound and listens on already, by address: a task
            that is to listen there takes the socket over instead.
        inherited_doors: Likewise the doors beside them.
        shares_memory: Whether tasks of the same host are reached through doors, and share memory:
            see ``net.shared``.
    """

    def __init__(
        self,
        inherited: dict[str, socket.socket] | None = None,
        inherited_doors: dict[str, socket.socket] | None = None,
        *,
        shares_memory: bool = False,
    ) -> None:
        self._inherited = dict(inherited or {})
        self._inherited_doors = dict(inherited_doors or {})
        self._shares_memory = shares_memory

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection; see ``Network``."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        if self._shares_memory:
            made = await through_door(await doors_of(host, port), factory)
            if made is not None:
                return made
        if port is None:
            return await loop.create_unix_connection(factory, host)
        return await loop.create_connection(factory, host, port)

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen; see ``Network``."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        inherited = self._inherited.pop(address, None)
        server: asyncio.Server
        bound_to, path = address, None
        if port is None:
            bound = inherited or _bind_unix(host)
            try:
                server = await loop.create_unix_server(
                    factory, sock=bound, backlog=BACKLOG, **_KEEPS_FILE
                )
            except BaseException:
                bound.close()
                raise
            path = None if inherited else host
        else:
            place: Any = {"sock": inherited} if inherited else {"host": host or None, "port": port}
            server = await loop.create_server(factory, **place, backlog=BACKLOG)
            bound_to = join_address(host, server.sockets[0].getsockname()[1])
        return _SocketListener(server, bound_to, self._doors(address, server, factory), path)

    def _doors(self, address: str, server: asyncio.Server, factory: Factory) -> list[Door]:
        inherited = self._inherited_doors.pop(address, None)
        if not self._shares_memory:
            if inherited is not None:
                shut(inherited)  # nobody would be let in
            return []
        found = [inherited] if inherited is not None else map(door_beside, server.sockets)
        doors = [door for door in found if door is not None]
        for door in doors:
            keep_from_children(door)
        return [Door(door, factory) for door in doors]


def reason(error: OSError) -> str:
    """Return why the network refused, in the system's own words where it has some."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return os.strerror(error.errno).lower() if error.errno else str(error)


def one_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, PsyncError):
        return error.message if error.hint is None else f"{error.message} ({error.hint})"
    return reason(error) if isinstance(error, OSError) else str(error)


def _bind_unix(path: str) -> socket.socket:
    """Bind a socket, for its owner alone. One that nobody listens on any more makes way.

    Both loops would bind themselves, but remove a living one, too.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        try:
            sock.bind(path)
        except OSError:
            if not (Path(path).is_socket() and is_deserted(path)):
                raise
            Path(path).unlink(missing_ok=True)
            sock.bind(path)
        os.chmod(path, 0o600)
    except BaseException:
        sock.close()
        raise
    return sock


def name_of(peername: Any) -> str:
    """Return the other side's address for messages, as a transport says it."""
    if isinstance(peername, tuple):
        return f"{peername[0]}:{peername[1]}"
    if isinstance(peername, bytes):  # a door: of its name the address
        return peername.decode(errors="replace").rpartition("/")[2]
    return str(peername) if peername else "a Unix socket"


_own: dict[int, int] = {}
"""Descriptor and inode of each socket that children must not have; some are closed by now."""


def keep_from_children(sock: Any) -> None:
    """Let forked children have nothing in place of a socket: with it they would hold its address,
    and keep a connection open that this process has closed, or lost with its life.
    """
    _own[sock.fileno()] = os.fstat(sock.fileno()).st_ino


def _begin_child() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd, inode in _own.items():
        with contextlib.suppress(OSError):  # it is closed
            if os.fstat(fd).st_ino == inode:
                # Its number stays taken: what was copied with this process may close it.
                os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
    _own.clear()


os.register_at_fork(after_in_child=_begin_child)


def set_options(sock: Any) -> None:
    """Let the kernel find dead hosts, give Unix sockets room, and keep both from children."""
    if sock is None:  # a network in memory
        return
    keep_from_children(sock)
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
