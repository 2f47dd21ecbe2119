"""The side channel of a connection between two processes of one host: descriptors of regions.

A loop's transport cannot carry descriptors, so they have a socket of their own beside each
connection. Nobody waits for it: what is written to a socket of this kind is in the receiver's queue
at once, so a region is there before the first message that names it. It has an end at each side for
as long as that side reads the other's memory: the end of file says, even of a process that was
killed, that nobody does any more.

Who has no descriptor left for a region of the peer's loses the connection, as it cannot read what
is lent there; who has none for the channel does not get one. It shares memory with nobody from then
on, so the next connection is to the address.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from psync.errors import RemoteProtocolError
from psync.net.platform import PerProcess
from psync.net.shared.regions import Make, Region, make_region, map_foreign

_GIVEN = struct.Struct("<QQ")  # number, bytes

ran_out = PerProcess(threading.Event)
"""Set once this process had no descriptor left for a region of another one, or a side channel."""

_log = logging.getLogger(__name__)


class SideChannel(Protocol):
    """One end."""

    make: Make  # of regions that can be given over it

    def give(self, region: Region) -> bool:
        """Let the peer map a region; return False if that cannot be."""

    def take(self) -> Iterator[tuple[int, memoryview]]:
        """Return the regions that the peer has given: number, memory.

        Raises:
            RemoteProtocolError: It has given something else, or no descriptor is left for it.
        """

    def end(self) -> None:
        """This side reads nothing of the peer's any more."""

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the other side reads nothing of ours any more."""

    def look_no_more(self) -> None:
        """Nothing is lent any more, so its end does not matter; by the loop that looks at it."""

    def close(self) -> None:
        """Close this end; in any thread, once nobody looks at it."""


class SocketChannel:
    """A side channel between processes.

    Args:
        sock: Of type SOCK_SEQPACKET, connected; owned.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.make: Make = make_region
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None  # that looks at it

    def give(self, region: Region) -> bool:
        """See ``SideChannel``."""
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
        """See ``SideChannel``."""
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
        """See ``SideChannel``."""
        with contextlib.suppress(OSError):  # the other end is closed
            self._sock.shutdown(socket.SHUT_WR)

    def when_ended(self, then: Callable[[], None]) -> None:
        """See ``SideChannel``."""

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
        """See ``SideChannel``."""
        self.look_no_more()
        self._sock.close()

    def look_no_more(self) -> None:
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
        _log.warning(
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
