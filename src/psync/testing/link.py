"""A connection in memory as a test sees it: two directions that can be made to fail.

Bytes are delivered late and in pieces of random sizes, as on a real network. Buffers and errors
follow the kernel. While a receiver reads nothing, the kernels hold up to ``kernel_bytes``, and the
rest counts in the writer's buffer. A side learns only when it reads or writes that the other one
is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import os
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from psync.testing.memory_sharing import MemoryChannel

Buffer = bytes | bytearray | memoryview

_NOISE = (os.path.dirname(__file__), os.path.dirname(asyncio.__file__))


class BufferChanged(AssertionError):
    """Memory that was passed to ``write()`` was changed before it was sent."""


class Segment:
    """The bytes of one ``write()``.

    Args:
        data: What was written.
        start: Its position in the stream.
        due: Loop time at which it has crossed the network.
        check: Whether to take a checksum.
    """

    __slots__ = ("checksum", "due", "is_taken", "offset", "passed", "start", "view", "writer")

    def __init__(self, data: Buffer, *, start: int, due: float, check: bool) -> None:
        self.view = memoryview(data).cast("B")
        self.start = start
        self.due = due
        self.offset = 0  # bytes handed over
        self.is_taken = False  # by the kernel: no longer the writer's memory
        # Bytes objects cannot change.
        self.checksum = None if not check or isinstance(data, bytes) else zlib.crc32(self.view)
        self.passed = 0  # checksum of the bytes handed over
        self.writer = "" if self.checksum is None else _find_writer()

    @property
    def left_bytes(self) -> int:
        """What has not been handed over yet."""
        return len(self.view) - self.offset

    def hand_over(self, num_bytes: int) -> memoryview:
        """Return the next bytes, at most ``num_bytes``: a view of the writer's memory."""
        piece = self.view[self.offset : self.offset + num_bytes]
        self.offset += piece.nbytes
        if self.checksum is not None:
            self.passed = zlib.crc32(piece, self.passed)
        return piece

    def is_intact(self) -> bool:
        """Whether the memory holds what was written, and did whenever a part was handed over."""
        if self.checksum is None:
            return True
        if self.left_bytes == 0 and self.passed != self.checksum:
            return False
        return zlib.crc32(self.view) == self.checksum

    def take(self) -> None:
        """Copy what is left: the kernel has it now."""
        self.view = memoryview(bytes(self.view[self.offset :]))
        self.start += self.offset
        self.offset = 0
        self.is_taken = True
        self.checksum = None


def check_buffer(data: Any) -> None:
    """Raise TypeError for what one of the event loops would refuse, or send wrongly."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"expected bytes, bytearray or memoryview, got a {type(data).__name__}")
    if isinstance(data, memoryview) and not (
        data.ndim == 1 and data.c_contiguous and data.format in ("B", "b", "c")
    ):
        raise TypeError(
            "expected a contiguous one-dimensional memoryview of bytes, got format "
            f"{data.format!r}, shape {data.shape}, strides {data.strides}"
        )


def _find_writer() -> str:
    """Say which lines wrote: up to four, innermost first, without asyncio's and ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_noise(frame):
        frame = frame.f_back
    lines: list[str] = []
    while frame is not None and len(lines) < 4 and not _is_noise(frame):
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return ", called from ".join(lines)


def _is_noise(frame: FrameType) -> bool:
    return _is_of_noise(frame.f_code.co_filename)


@functools.cache
def _is_of_noise(filename: str) -> bool:
    return filename.startswith(_NOISE)


HIGH_BYTES = 64 << 10
"""Where the event loops set the high water mark; the low one is a quarter of it."""


class MemoryTransport(asyncio.Transport):
    """One end of a link; see ``asyncio.Transport`` for what is public."""

    def __init__(
        self,
        outgoing: Direction,
        incoming: Direction,
        context: contextvars.Context,
        *,
        name: str,
        peer: str,
    ) -> None:
        super().__init__({"sockname": _socket_name(name), "peername": _socket_name(peer)})
        self._out = outgoing
        self._in = incoming
        self._context = context
        self._loop = outgoing.link.loop
        self._protocol: asyncio.BufferedProtocol | None = None
        self._is_connected = False  # the protocol knows
        self._closing = False
        self._reading_paused = False
        self._saw_end = False  # of the incoming stream
        self._wrote_end = False
        self._writing_paused = False
        self._low_bytes, self._high_bytes = HIGH_BYTES // 4, HIGH_BYTES
        self.is_lost = False  # the socket is closed

    def __repr__(self) -> str:
        side = "client" if self._out.name == "to_server" else "server"
        return f"<{side} of {self._out.link!r}>"

    # asyncio.Transport.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol go on; only buffered ones can."""
        if not isinstance(protocol, asyncio.BufferedProtocol):
            raise TypeError(f"expected a BufferedProtocol, got a {type(protocol).__name__}")
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._attached()

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether the protocol gets what comes."""
        return not (self._reading_paused or self._closing)

    def pause_reading(self) -> None:
        """Take nothing from the peer until ``resume_reading``."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """Take bytes again."""
        self._reading_paused = False
        self._in.wake()

    def write(self, data: Any) -> None:
        """Send bytes; a reference to them is kept until they have been sent."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send buffers one after the other; references are kept until they have been sent."""
        buffers = tuple(list_of_data)
        for data in buffers:
            check_buffer(data)
        if self._wrote_end:
            raise RuntimeError("cannot write after write_eof()")
        if self._closing:
            return  # like the other loops; the protocol knows, or will
        for data in buffers:
            if len(data):
                self._out.write(data)
        self._watch_limits()

    def can_write_eof(self) -> bool:
        """Return True."""
        return True

    def write_eof(self) -> None:
        """End the outgoing stream; the incoming one goes on."""
        if not self._closing and not self._wrote_end:
            self._wrote_end = True
            self._out.end(None)

    def close(self) -> None:
        """Close when everything is sent; nothing is read any more."""
        if not self._closing:
            self._closing = True
            self._in.wake()
            self._finish_close()

    def abort(self) -> None:
        """Close at once; what has not been sent never will be."""
        self._force_close(None)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are still in the writer's memory."""
        return self._out.buffered_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the low and the high water mark."""
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the water marks for ``pause_writing`` and ``resume_writing``."""
        if high is None:
            high = HIGH_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"expected high >= low >= 0, got high={high!r}, low={low!r}")
        self._low_bytes, self._high_bytes = low, high
        self._watch_limits()

    # For the link, which calls these from the loop and outside every task.

    def start(self, protocol: asyncio.BufferedProtocol) -> None:
        """Tell the protocol that it is connected, and let bytes in."""
        self._protocol = protocol
        self._is_connected = True
        try:
            protocol.connection_made(self)
        finally:
            self._in.wake()

    def takes_bytes(self) -> bool:
        """Whether the protocol would get what comes now."""
        return self._is_connected and not (self._reading_paused or self._closing or self._saw_end)

    def next_buffer(self) -> memoryview | None:
        """Ask the protocol for memory; None if that failed and the connection has ended."""
        try:
            buffer: Any = self._context.run(self._attached().get_buffer, -1)
            if not len(buffer):
                raise RuntimeError("get_buffer() returned an empty buffer")
            room = memoryview(buffer).cast("B")
            if room.readonly:
                raise TypeError("get_buffer() returned a read-only buffer")
        except Exception as exc:
            self._blame("get_buffer", exc)
            return None
        return room

    def received(self, num_bytes: int) -> None:
        """Tell the protocol that so many bytes are in its buffer."""
        try:
            self._context.run(self._attached().buffer_updated, num_bytes)
        except Exception as exc:
            self._blame("buffer_updated", exc)

    def ended(self, error: OSError | None) -> None:
        """Tell the protocol that the incoming stream is over."""
        self._saw_end = True
        if error is not None:
            self.fail(error)
            return
        try:
            keep_open = self._context.run(self._attached().eof_received)
        except Exception as exc:
            self._blame("eof_received", exc)
            return
        if not keep_open:
            self.close()

    def sent(self) -> None:
        """Look again at the water marks, as bytes have left the write buffer."""
        if self.is_lost:
            return
        if self._writing_paused and self._out.buffered_bytes <= self._low_bytes:
            self._writing_paused = False
            try:
                self._context.run(self._attached().resume_writing)
            except Exception as exc:
                self._report("resume_writing", exc)
        self._finish_close()

    def fail(self, error: Exception, *, tell_peer: bool = True) -> None:
        """End the connection because of ``error``."""
        self._force_close(error, tell_peer=tell_peer)

    def _finish_close(self) -> None:
        if self._closing and not self.is_lost and self._out.buffered_bytes == 0:
            self._lose(None)
            self._out.end(None)

    def _force_close(self, error: Exception | None, *, tell_peer: bool = True) -> None:
        if self.is_lost:
            return
        self._out.drop_unsent()
        self._lose(error)
        if tell_peer:
            self._out.end_abruptly()

    def _lose(self, error: Exception | None) -> None:
        self.is_lost = self._closing = True
        if self._is_connected:
            lost = self._attached().connection_lost
            self._loop.call_soon(lost, error, context=self._context)
        self._in.wake()  # what still comes is refused
        self._out.link.side_lost()

    def _watch_limits(self) -> None:
        # Called by the protocol's side, so it runs in the context it is in.
        if not self._writing_paused and self._out.buffered_bytes > self._high_bytes:
            self._writing_paused = True
            try:
                self._attached().pause_writing()
            except Exception as exc:
                self._report("pause_writing", exc)

    def _attached(self) -> asyncio.BufferedProtocol:
        if self._protocol is None:
            raise RuntimeError(f"{self!r} has no protocol yet")
        return self._protocol

    def _blame(self, method: str, exc: Exception) -> None:
        self._report(method, exc)
        self.fail(exc)

    def _report(self, method: str, exc: Exception) -> None:
        self._loop.call_exception_handler(
            {
                "message": f"protocol.{method}() failed",
                "exception": exc,
                "transport": self,
                "protocol": self._protocol,
            }
        )


def reset_error(message: str) -> ConnectionResetError:
    """Return the error that sockets raise when the peer is gone."""
    return ConnectionResetError(errno.ECONNRESET, message)


def _socket_name(name: str) -> tuple[str, int] | str:
    """Return an address as sockets tell it: ``host:port`` as a pair, anything else as it is."""
    host, _, port = name.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else name


LATE = 0.25
"""Fraction of deliverable pieces that wait for another pass of the loop."""


@dataclass(frozen=True)
class Ends:
    """The two ends of a connection by name: hosts ("" if unnamed) and the server's address."""

    client_host: str
    server_host: str
    address: str

    def server_is(self, name: str) -> bool:
        """Whether ``name`` is the server's address or host."""
        return name in (self.address, self.server_host)

    def are(self, a: str, b: str | None) -> bool:
        """Whether ``a`` is one end and ``b`` (None: any host) the other."""
        if b is None:
            return a == self.client_host or self.server_is(a)
        return (a == self.client_host and self.server_is(b)) or (
            b == self.client_host and self.server_is(a)
        )


@dataclass
class Fabric:
    """Settings, faults and live links of one network; see ``MemoryNetwork``."""

    seed: int
    latency: tuple[float, float]
    chunk: tuple[int, int]
    check_buffers: bool
    kernel_bytes: int
    spread: float = 0.0
    problems: list[BufferChanged] = field(default_factory=list)
    links: dict[int, Link] = field(default_factory=dict)  # live ones, by number
    separations: list[tuple[str, str | None]] = field(default_factory=list)
    deaf: list[tuple[str, str]] = field(default_factory=list)  # from whom nothing gets to whom
    stopped: set[str] = field(default_factory=set)  # hosts whose processes take nothing
    on_delivery: Callable[[Link, str, int], None] | None = None

    def stream(self, name: str) -> random.Random:
        """Return an independent generator, so that one decision does not shift another."""
        return random.Random(f"{self.seed}:{name}")

    def are_separated(self, ends: Ends) -> bool:
        """Whether a partition lies between the two ends."""
        return bool(self.separations) and any(ends.are(a, b) for a, b in self.separations)


class Direction:
    """One of the two streams of a link, with its faults.

    Attributes:
        name: ``"to_server"`` or ``"to_client"``.
        written_bytes: Bytes that the sender's transport has accepted.
        buffered_bytes: Bytes that are still in the sender's write buffer.
        delivered_bytes: Bytes that the receiver's protocol has received.
    """

    sender: MemoryTransport  # who writes; both are set by the link
    receiver: MemoryTransport

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.name = name
        self.written_bytes = 0
        self.buffered_bytes = 0
        self.delivered_bytes = 0
        self._kernel_bytes = 0  # taken from the sender, not yet delivered
        self._segments: deque[Segment] = deque()  # those that the kernel took come first
        self._end: tuple[float, OSError | None] | None = None  # when it is due, and which
        self._last_due = 0.0
        self._pump_handle: asyncio.Handle | None = None
        self._stalled = False
        self._cut_after: int | None = None
        self._random = link.fabric.stream(f"{link.number}:{name}")
        ends = link.ends
        hosts = ends.client_host, ends.server_host
        self._hosts = hosts if name == "to_server" else hosts[::-1]  # from, to
        spread = link.fabric.spread
        self._slower = 10 ** (self._random.random() * spread) if spread else 1.0
        self._context = contextvars.Context()  # nobody's: the transports have their own

    def __repr__(self) -> str:
        return f"<{self.name} of {self.link!r}>"

    # Faults.

    def stall(self) -> None:
        """Deliver nothing to the receiver until ``flow``, as if it were too slow."""
        self._stalled = True
        self.wake()

    def flow(self) -> None:
        """End a ``stall``."""
        self._stalled = False
        self.wake()

    def cut_after(self, num_bytes: int) -> None:
        """Cut the link after ``num_bytes`` more have been delivered in this direction."""
        self._cut_after = num_bytes
        if num_bytes <= 0:
            self.link.cut()

    # For the transports.

    def write(self, data: Buffer) -> None:
        """Accept bytes from the sender."""
        check = self.link.fabric.check_buffers
        segment = Segment(data, start=self.written_bytes, due=self._draw_arrival(), check=check)
        self.written_bytes += len(data)
        self.buffered_bytes += len(data)
        self._segments.append(segment)
        self.wake()

    def end(self, error: OSError | None) -> None:
        """End the receiver's stream: in order (None), or with a reset that overtakes the bytes."""
        if error is not None:
            self.drop_all()
        if self._end is None:
            self._end = self._draw_arrival(), error
            self.wake()

    def end_abruptly(self) -> None:
        """End the receiver's stream as an aborted socket does.

        The receiver gets the bytes in the kernel and then either an orderly end, possibly in the
        middle of a message, or a reset. The peer's kernel decides which.
        """
        is_reset = self._random.random() < 0.5
        self.end(reset_error("the peer aborted the connection") if is_reset else None)

    def drop_unsent(self) -> None:
        """Drop the bytes in the sender's write buffer, but not those in the kernel's.

        The kernel has taken as many bytes as it has room for, and continues to send them.
        """
        self._take()
        self._segments = deque(segment for segment in self._segments if segment.is_taken)
        self.buffered_bytes = 0

    def drop_all(self) -> None:
        """Drop all undelivered bytes."""
        self._segments.clear()
        self.buffered_bytes = self._kernel_bytes = 0
        self._end = None

    def wake(self) -> None:
        """Schedule the delivery of bytes that can be delivered."""
        if self._pump_handle is not None or not (self._segments or self._end):
            return
        due = self._segments[0].due if self._segments else self._end[0]  # type: ignore[index]
        loop, context = self.link.loop, self._context
        if due > loop.time() and not self._is_blocked():
            self._pump_handle = loop.call_at(due, self._pump, due, context=context)
        else:
            self._pump_handle = loop.call_soon(self._pump, due, context=context)

    def _draw_arrival(self) -> float:
        low, high = self.link.fabric.latency
        latency = (low + (high - low) * self._random.random()) * self._slower  # as ``uniform``
        arrival = self.link.loop.time() + latency
        if arrival > self._last_due:  # nothing overtakes
            self._last_due = arrival
        return self._last_due

    def _draw_size(self) -> int:
        """Draw a size evenly over the orders of magnitude, since small pieces tell most."""
        low, high = self.link.fabric.chunk
        size = int(low * (high / low) ** self._random.random())
        return size if self._cut_after is None else min(size, self._cut_after)

    def _is_blocked(self) -> bool:
        fabric = self.link.fabric
        if self._hosts[1] in fabric.stopped or self.link.is_partitioned:
            return True
        if fabric.deaf and self._hosts in fabric.deaf:
            return True
        receiver = self.receiver
        return not receiver.is_lost and (self._stalled or not receiver.takes_bytes())

    def _pump(self, due: float) -> None:
        """Deliver one piece, or the end; or let the kernel take what the receiver does not."""
        self._pump_handle = None
        if self._is_blocked():
            self._absorb()
            return  # whatever ends the blockade wakes this direction
        if self.receiver.is_lost:
            self._refuse()
            return
        if self._random.random() >= LATE:
            if self._segments:
                # A real loop may call a little early, so its clock alone will not do.
                self._deliver(max(self.link.loop.time(), due))
            elif self._end is not None:
                (_, error), self._end = self._end, None
                self.receiver.ended(error)
        self.wake()

    def _deliver(self, now: float) -> None:
        room = self.receiver.next_buffer()
        if room is None:
            return
        with room:
            filled = self._fill(room, now)
        if filled is None:
            return
        self.delivered_bytes += filled
        if self.link.fabric.on_delivery is not None:
            self.link.fabric.on_delivery(self.link, self.name, filled)
        if self._cut_after is not None:
            self._cut_after -= filled
        self.receiver.received(filled)
        self.sender.sent()
        if self._cut_after is not None and self._cut_after <= 0:
            self.link.cut()

    def _fill(self, room: memoryview, now: float) -> int | None:
        """Move bytes that have arrived into ``room``; None if they were not what was written."""
        wanted = min(len(room), self._draw_size())
        filled = 0
        while filled < wanted and self._segments and self._segments[0].due <= now:
            segment = self._segments[0]
            piece = segment.hand_over(wanted - filled)
            room[filled : filled + len(piece)] = piece
            filled += len(piece)
            if segment.is_taken:
                self._kernel_bytes -= len(piece)
            else:
                self.buffered_bytes -= len(piece)
            if segment.offset == len(segment.view):
                self._segments.popleft()
                if not self._verify(segment):
                    return None
        return filled

    def _absorb(self) -> None:
        """Let the kernel take whole segments while it has room."""
        changed = self._take()
        if changed is None:
            self.sender.sent()
        else:
            self._verify(changed)

    def _take(self) -> Segment | None:
        """Copy whole segments out of the writer's hands; return one that was changed there."""
        for segment in self._segments:
            if segment.is_taken:
                continue
            num_bytes = segment.left_bytes
            if self._kernel_bytes + num_bytes > self.link.fabric.kernel_bytes:
                break
            if not segment.is_intact():
                return segment
            segment.take()
            self._kernel_bytes += num_bytes
            self.buffered_bytes -= num_bytes
        return None

    def _refuse(self) -> None:
        """Answer bytes for a closed socket as a kernel does: with a reset."""
        has_bytes = bool(self._segments)
        self.drop_all()
        if has_bytes:
            self.sender.fail(reset_error("the peer has closed the connection"))

    def _verify(self, segment: Segment) -> bool:
        if segment.is_intact():
            return True
        problem = BufferChanged(
            f"{len(segment.view)} bytes, written at position {segment.start} {self.name} of "
            f"{self.link!r}, were changed before they were sent; written at {segment.writer}"
        )
        self.link.fabric.problems.append(problem)
        self.link.cut(problem)
        return False


class Link:
    """One connection as seen from outside; ``MemoryNetwork.links`` lists them.

    Attributes:
        number: Number of the connection on the network, in the order of connecting.
        ends: The names of client and server, and the server's address.
        to_server, to_client: The two directions, with their counters and faults.
        client, server: The transports.
    """

    def __init__(
        self,
        number: int,
        ends: Ends,
        fabric: Fabric,
        client_context: contextvars.Context,
        server_context: contextvars.Context,
    ) -> None:
        self.number = number
        self.ends = ends
        self.fabric = fabric
        self.loop = asyncio.get_running_loop()
        self._is_partitioned = False
        self.channels: tuple[MemoryChannel, MemoryChannel] | None = None  # client's, server's
        self.to_server = to_server = Direction(self, "to_server")
        self.to_client = to_client = Direction(self, "to_client")
        client, server = f"{ends.client_host or 'client'}#{number}", ends.address
        self.client = MemoryTransport(
            to_server, to_client, client_context, name=client, peer=server
        )
        self.server = MemoryTransport(
            to_client, to_server, server_context, name=server, peer=client
        )
        to_server.sender = to_client.receiver = self.client
        to_client.sender = to_server.receiver = self.server
        fabric.links[number] = self

    def __repr__(self) -> str:
        return f"<link {self.number} from {self.ends.client_host or 'client'} to {self.address}>"

    @property
    def address(self) -> str:
        """The address of the server."""
        return self.ends.address

    @property
    def is_live(self) -> bool:
        """Whether at least one side still has its connection."""
        return not (self.client.is_lost and self.server.is_lost)

    @property
    def is_partitioned(self) -> bool:
        """Whether all traffic is blocked now."""
        return self._is_partitioned or self.fabric.are_separated(self.ends)

    def cut(self, error: Exception | None = None) -> None:
        """End the connection: both sides get ``connection_lost`` with a ConnectionResetError.

        Args:
            error: Exception to use instead.
        """
        for transport in (self.client, self.server):
            transport.fail(error or reset_error("the connection was cut"), tell_peer=False)
        self.to_server.drop_all()
        self.to_client.drop_all()

    def partition(self) -> None:
        """Block both directions until ``heal``, without notifying either side."""
        self._is_partitioned = True
        self.wake()

    def heal(self) -> None:
        """End a ``partition``; pending data arrive now, in order, as with TCP."""
        self._is_partitioned = False
        self.wake()

    def share(self, protocol: object, side: int) -> None:
        """Give a protocol its end of the side channel, if there is one."""
        if self.channels is None:
            return
        if hasattr(protocol, "share"):
            protocol.share(self.channels[side])
        else:
            self.end_channel(side)

    def end_channel(self, side: int) -> None:
        """Close one end of the side channel, if there is one."""
        if self.channels is not None:
            self.channels[side].end()

    def wake(self) -> None:
        """Check again for data that can be delivered."""
        self.to_server.wake()
        self.to_client.wake()

    def side_lost(self) -> None:
        """Remove the link from the live links when both sides are gone; transports call it."""
        if not self.is_live:
            self.fabric.links.pop(self.number, None)
