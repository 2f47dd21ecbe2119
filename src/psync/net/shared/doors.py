"""Doors: where a task can be reached by the others of its host, beside its address.

A door is a Unix socket with an abstract name, made of the address at which its task listens. So who
knows the address finds the door if it runs on the same host, in the same network namespace, for the
same user; nobody else does, and connects to the address. What follows is the same handshake. The
first byte over a connection through a door comes with one end of its side channel. Nothing depends
on doors: whatever goes wrong, the address is there.

A *side channel* carries the descriptors of regions, which a loop's transport cannot carry. Nobody
waits for it: what is written to a socket of this kind is in the receiver's queue at once, so a
region is there before the first message that names it. It has an end at each side for as long as
that side reads the other's memory: the end of file says, even of a process that was killed, that
nobody does any more.

Who has no descriptor left for a region of the peer's loses the connection, as it cannot read what
is lent there; who has none for the channel does not get one. It shares memory with nobody from then
on, so the next connection is to the address.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import resource
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from psync.errors import RemoteProtocolError
from psync.net.platform import PerProcess
from psync.net.shared.door_names import BACKLOG, may_share, name_of_door
from psync.net.shared.regions import PAGE, Make, Region, make_region, map_foreign

Factory = Callable[[], asyncio.BufferedProtocol]

PREAMBLE = b"P"
PREAMBLE_S = 5.0
"""Whoever has not said it by then is not psync."""

AGAIN_S = 1.0
"""Until it is tried again to let somebody in, as both loops do it."""


_GIVEN = struct.Struct("<QQ")  # number, bytes

ran_out = PerProcess(threading.Event)
"""Set once this process had no descriptor left for a region of another one, or a side channel."""

logger = logging.getLogger(__name__)


class SideChannel:
    """One end of a side channel between processes.

    Args:
        sock: Of type SOCK_SEQPACKET, connected; owned.

    Attributes:
        make: Makes regions that can be given over it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.make: Make = make_region
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None  # that looks at it

    def give(self, region: Region) -> bool:
        """Let the peer map a region; return False if that cannot be."""
        try:
            rights = array.array("i", [region.fd])
            self._sock.sendmsg(
                [_GIVEN.pack(region.number, region.nbytes)],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
                socket.MSG_DONTWAIT,
            )
        except OSError:  # its queue is full, or it is gone
            return False
        return True

    def take(self) -> Iterator[tuple[int, memoryview]]:
        """Return the regions that the peer has given: number, memory.

        Raises:
            RemoteProtocolError: It has given something else, or no descriptor is left for it.
        """
        while (received := self._receive()) is not None:
            data, fds, all_came = received
            if not data:
                return
            if not all_came:
                share_no_more()
                raise RemoteProtocolError("no descriptor is left for a region of shared memory")
            if len(data) != _GIVEN.size or len(fds) != 1:
                _close_all(fds)
                raise RemoteProtocolError("got something that is no region of shared memory")
            number, nbytes = _GIVEN.unpack(data)
            try:
                memory = map_foreign(fds[0], nbytes)
            except RemoteProtocolError as exc:
                if getattr(exc.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE):
                    share_no_more()
                raise
            yield number, memory

    def end(self) -> None:
        """This side reads nothing of the peer's any more."""
        with contextlib.suppress(OSError):  # the other end is closed
            self._sock.shutdown(socket.SHUT_WR)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the other side reads nothing of ours any more."""

        def look() -> None:
            while (received := self._receive()) is not None:
                data, fds, _ = received
                _close_all(fds)
                if not data:
                    self.look_no_more()
                    then()
                    return

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, look)

    def close(self) -> None:
        """Close this end; in any thread, once nobody looks at it."""
        self.look_no_more()
        self._sock.close()

    def look_no_more(self) -> None:
        """Nothing is lent any more, so its end does not matter; by the loop that looks at it."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._sock)
            self._loop = None

    def _receive(self) -> tuple[bytes, list[int], bool] | None:
        """Return what is next: nothing as b"" is its end; None: nothing is there yet."""
        try:
            return receive_fds(self._sock, _GIVEN.size + 1)
        except ConnectionResetError:  # told once: it was closed, and had not read all of ours
            return self._receive()
        except BlockingIOError:
            return None
        except OSError:
            return b"", [], True


def share_no_more() -> None:
    """This process has no descriptor left."""
    if not ran_out().is_set():
        ran_out().set()
        logger.warning(
            "no file descriptor is left for shared memory, so tensors now go through sockets; to "
            "use shared memory, raise `ulimit -n` of all tasks of this host (it is %d here)",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


def receive_fds(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
    """Return what is next, and at most two descriptors that came with it; never wait for it.

    The third is whether all came with it that had been sent: else no descriptor was left here.

    Whether a socket waits can be changed by all who have it, so it is said each time. Python 3.11's
    ``recv_fds`` ignores flags.

    Raises:
        OSError: BlockingIOError: nothing is there.
    """
    fds = array.array("i")
    room, flags = socket.CMSG_LEN(2 * fds.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, ancillary, flags_of_it, _ = sock.recvmsg(nbytes, room, flags)
    for level, kind, received in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(received[: len(received) - len(received) % fds.itemsize])
    return data, list(fds), bool(fds) or not flags_of_it & socket.MSG_CTRUNC


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def shares_memory(environ: Mapping[str, str]) -> bool:
    """Whether tasks of one host share memory: they may, see ``may_share``, and this system can.

    Raises:
        ConfigurationError: What says so cannot be understood.
    """
    needed = (
        (socket, "SO_PEERCRED"), (socket, "send_fds"), (os, "memfd_create"), (fcntl, "F_ADD_SEALS"),
    )  # fmt: skip
    if not may_share(environ) or not all(hasattr(*each) for each in needed):
        return False
    try:
        make_region(0, PAGE)
    except OSError:
        return False
    return True


class Door:
    """Accepts connections from tasks of the same host.

    Args:
        sock: Listens; owned.
        factory: Makes the protocol of a connection.
    """

    def __init__(self, sock: socket.socket, factory: Factory) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._welcoming: dict[asyncio.Task[None], socket.socket] = {}
        self._again: asyncio.TimerHandle | None = None  # looks again when there was no descriptor
        self._look()

    def _look(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accept nobody any more; open connections stay."""
        if self._sock.fileno() < 0:
            return
        if self._again is not None:
            self._again.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
        self._sock.close()
        # Not cancelled: uvloop tells no end of a connection whose making is cancelled.
        for sock in self._welcoming.values():
            with contextlib.suppress(OSError):  # its other end is gone
                sock.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self) -> None:
        """Wait until nobody stands in the door. Cancellation: safe."""
        await asyncio.gather(*self._welcoming, return_exceptions=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            if _is_shut(self._sock):  # by the process that had it before: see below
                self.close()
            return
        except OSError:  # there are too many open files, and the loop would call again at once
            self._loop.remove_reader(self._sock)
            self._again = self._loop.call_later(AGAIN_S, self._look)
            return
        if ran_out().is_set():
            sock.close()
            self._shut()
            return
        if not _is_own(sock) or len(self._welcoming) >= BACKLOG:
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._welcome(sock))
        self._welcoming[task] = sock
        task.add_done_callback(self._welcoming.pop)

    def _shut(self) -> None:
        """No descriptor is left: whoever comes next finds no door, and goes to the address."""
        if self._sock.fileno() >= 0:
            self._sock.shutdown(socket.SHUT_RDWR)  # a launcher has it, too
        self.close()

    async def _welcome(self, sock: socket.socket) -> None:
        channel: SideChannel | None = None
        try:
            async with asyncio.timeout(PREAMBLE_S):
                channel = await self._channel_of(sock)
            await self._loop.connect_accepted_socket(_sharing(self._factory, channel), sock)
        except BaseException as exc:
            sock.close()
            if channel is not None:
                channel.close()
            if not isinstance(exc, OSError):
                raise

    async def _channel_of(self, sock: socket.socket) -> SideChannel:
        while True:
            try:
                said, fds, all_came = receive_fds(sock, len(PREAMBLE))
            except BlockingIOError:
                readable = asyncio.Event()
                self._loop.add_reader(sock, readable.set)
                try:
                    await readable.wait()
                finally:
                    self._loop.remove_reader(sock)
                continue
            if not all_came:  # no descriptor is left for it: the connection has taken the last one
                share_no_more()
                self._shut()
                raise OSError(errno.EMFILE, "no descriptor for the channel of a connection")
            if said == PREAMBLE and len(fds) == 1 and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
                channel = socket.socket(fileno=fds.pop())
                if (channel.family, channel.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                    return SideChannel(channel)
                channel.close()
            _close_all(fds)
            raise OSError(errno.EPROTO, "no channel came with a connection")


async def through_door(
    names: Iterable[str], factory: Factory
) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol] | None:
    """Connect through the first of these doors that there is.

    Returns:
        None: There is none, or this process has no descriptors for it.

    Raises:
        OSError: The connection was lost at once.

    Cancellation: Safe, nothing stays open.
    """
    if ran_out().is_set():
        return None
    sock = _connected(names)
    if sock is None:
        return None
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        sock.close()
        return None
    channel = SideChannel(ours)
    try:
        with theirs:
            socket.send_fds(sock, [PREAMBLE], [theirs.fileno()])
        loop = asyncio.get_running_loop()
        made: Any = await loop.create_unix_connection(_sharing(factory, channel), sock=sock)
    except BaseException:
        sock.close()
        channel.close()
        raise
    if made[0].is_closing() and not isinstance(loop, asyncio.BaseEventLoop):
        sock.detach()  # uvloop has closed the descriptor, and takes the socket only afterwards
    return made  # type: ignore[no-any-return]


async def doors_of(host: str, port: int | None) -> list[str]:
    """Return the names that a door at an address can have.

    Args:
        host: Name or number of the host, or the path of a Unix socket.
        port: Its port; None: it is a Unix socket.

    Raises:
        OSError: The name cannot be resolved.
    """
    names = []
    if port is None:
        with contextlib.suppress(OSError):
            names.append(name_of_door(host, None))
        return names
    loop = asyncio.get_running_loop()
    for family, *_, resolved in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        number = str(resolved[0])
        names.append(name_of_door(number, port))
        if _is_here(family, number):
            names.append(name_of_door("*", port))
    return names


def _connected(names: Iterable[str]) -> socket.socket | None:
    for name in dict.fromkeys(names):
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect(name)
            if _is_own(sock):
                return sock
        sock.close()
    return None


def _sharing(factory: Factory, channel: SideChannel) -> Factory:
    def make() -> asyncio.BufferedProtocol:
        protocol = factory()
        share = getattr(protocol, "share", None)
        if share is None:  # it can do without
            channel.close()
        else:
            share(channel)
        return protocol

    return make


def _is_own(sock: socket.socket) -> bool:
    """Whether the other end is a process of the same user."""
    size = struct.calcsize("iII")
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


def _is_shut(sock: socket.socket) -> bool:
    """Whether nobody can connect to it any more; a loop would call again and again for it."""
    poll = select.poll()
    poll.register(sock, select.POLLHUP)
    return bool(poll.poll(0))


def _is_here(family: int, host: str) -> bool:
    """Whether an address is one of this machine."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
