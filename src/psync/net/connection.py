"""One asyncio connection: the wire protocol on a transport, without copies of large messages.

``Connection`` is an ``asyncio.BufferedProtocol``: the transport reads from the socket into
the memory that the wire protocol names, which for a large segment is its destination.

A large message is written with one ``writelines`` and never copied: uvloop (and asyncio
from 3.12 on) keeps references to the buffers until the kernel has taken them, so nothing
that was written may change in place (see ``numerics.blocks``). Small messages are copied, and those
of one turn of the loop share a system call: that call is most of what they cost.

Large messages wait, in order, while the transport has much unsent; small ones never do,
and so may overtake them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from psync.errors import ConnectionLost, LocalProtocolError, PsyncError
from psync.wire import protocol as wire
from psync.wire.codec import Message, encode
from psync.wire.frames import (
    PREFIX_BYTES,
    SMALL_BODY_BYTES,
    Buffer,
    Frame,
    Segment,
    encode_frame,
)
from psync.wire.messages import Refused

logger = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 4 << 20
"""Above this much unsent data large messages wait."""

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 4
USER_TIMEOUT_MS = 30_000
"""A host that takes no byte for this long is dead (the figure Dask uses)."""

SENT = 256
"""Added to the kind of a message that is shown to a tap, if it goes out."""

UNIX_BUFFER_BYTES = 1 << 20
"""Unix sockets do not tune their buffers; TCP ones do unless they are set."""


Tap = Callable[[int, int, bytes, int], None]
"""Shown each message: its kind, request id, header, and the bytes of its body."""


class Connection(asyncio.BufferedProtocol):
    """One connection: feeds the wire protocol, writes what it and its owner say.

    Invariant: after any fault in the middle of a frame the connection is aborted, since
    nobody knows how much was read or written.

    Args:
        protocol: Shakes hands; its decoder cuts what is read into frames.
        opened: Called when the handshake is over.
        received: Called with each frame that came in. What it raises ends the connection.
        closed: Called once when the connection is gone, with the reason, also when it never opened.
            Must not raise.
    """

    def __init__(
        self,
        protocol: wire.Protocol,
        opened: Callable[[], None],
        received: Callable[[Frame], None],
        closed: Callable[[Exception | None], None],
    ) -> None:
        self.wire = protocol
        self.peername = "?"  # address of the other side, for messages
        # Told where the peer is, as its socket says it, before anything is said; may close.
        self.on_made: Callable[[object], None] | None = None
        self.bytes_received = 0
        self.bytes_sent = 0
        self.tap: Tap | None = None  # while somebody traces, see ``net.tracing.recorder``
        self._decoder = protocol.decoder
        # Where the next bytes belong is the decoder's to say, and asked for each read.
        self.get_buffer = protocol.decoder.get_buffer  # type: ignore[method-assign]
        self._opened = opened
        self._received = received
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # asyncio.Transport; None until connected
        self._deadline: asyncio.TimerHandle  # of the handshake; from connection_made on
        self._error: Exception | None = None  # why it is being closed
        self._open = False  # handshake over
        self._closing = False  # nothing is sent or handed over any more
        self._writable = True  # whether the transport has room for large messages
        self._small: list[Buffer] = []  # small messages of this turn of the loop
        self._small_bytes = 0
        self._flush_due = False
        self._waiting: deque[list[Buffer]] = deque()  # large messages, until there is room
        self._room = asyncio.Event()  # set while large messages need not wait, and at the end
        self._room.set()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        self._transport = transport
        self._deadline = self._loop.call_later(self.wire.limits.handshake_seconds, self._give_up)
        if self._closing:  # before it was up
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        with contextlib.suppress(OSError):  # the peer may be gone already
            _set_options(transport.get_extra_info("socket"))
            self.peername = _name(transport.get_extra_info("peername"))
        if self.on_made is not None:
            self.on_made(transport.get_extra_info("peername"))
            if self._closing:
                return
        self._go_on_shaking_hands()

    def buffer_updated(self, nbytes: int) -> None:
        """Decode what came, hand it to the owner, and send what the owner has to say to it."""
        self.bytes_received += nbytes
        if self._closing:
            return
        self._flush_due = True  # below: no need to come back for it
        try:
            if self._open:
                frame = self._decoder.buffer_updated(nbytes)
            else:
                self.wire.bind(self._transport.get_extra_info("channel_binding", b""))
                self.wire.received(nbytes)
                frame = self._go_on_shaking_hands()
            while frame is not None and not self._closing:
                if self.tap is not None:
                    self.tap(frame.kind, frame.request_id, frame.header, frame.nbytes)
                self._received(frame)
                frame = self._decoder.next_frame()
        except Exception as exc:
            self.fail(exc)
        self.flush()

    def eof_received(self) -> bool:
        """Close: half-open connections have no use here."""
        return False

    def pause_writing(self) -> None:
        """The transport holds more than it should."""
        self._writable = False
        self._room.clear()

    def resume_writing(self) -> None:
        """The transport has room again: large messages that waited go on."""
        self._writable = True
        while self._waiting and self._writable and not self._closing:
            self._write(self._waiting.popleft())
        if self._writable:
            self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner, once."""
        error = self._error or exc
        if error is None and self._decoder.receiving and not self._closing:
            error = ConnectionLost("the peer closed the connection in the middle of a message")
        self._closing = True
        self._small.clear()
        self._waiting.clear()
        self._room.set()
        self._deadline.cancel()
        self._closed(error)

    # For the owner.

    def send_message(
        self,
        kind: int,
        request_id: int,
        message: Message | None = None,
        segments: Sequence[Segment] = (),
    ) -> list[Buffer]:
        """Make a frame, ``send`` it, and return its buffers.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        try:
            header = b"" if message is None else encode(message)
            buffers = encode_frame(kind, request_id, header, segments, self.wire.limits)
        except LocalProtocolError as exc:
            exc.add_note(f"while sending {type(message).__name__} to {self.wire.peer_task}")
            raise
        if self.tap is not None:
            nbytes = sum(map(len, buffers)) - PREFIX_BYTES - len(header)
            self.tap(kind | SENT, request_id, header, nbytes)
        self.send(buffers)
        return buffers

    def send(self, buffers: list[Buffer]) -> None:
        """Send one message; does nothing on a closing connection.

        The buffers of a message above 64 KiB must not change until the transport has let go
        of them.
        """
        if self._closing:
            return
        nbytes = sum(map(len, buffers))
        if nbytes <= SMALL_BODY_BYTES:
            self._small.append(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            self._small_bytes += nbytes
            if self._small_bytes > SMALL_BODY_BYTES:
                self.flush()
            elif not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self.flush)
        elif self._writable and not self._waiting:
            self.flush()
            self._write(buffers)
        else:
            self._waiting.append(buffers)

    def flush(self) -> None:
        """Write small messages now, and not at the end of this turn of the loop.

        For whoever goes on with work that takes long, while the peer could begin with its own.
        """
        self._flush_due = False
        if self._small:
            small = self._small
            self._small, self._small_bytes = [], 0
            if not self._closing:
                self._write([small[0] if len(small) == 1 else b"".join(small)])

    def withdraw(self, buffers: list[Buffer]) -> bool:
        """Take back a message given to ``send``; return False if that is too late."""
        for index, waiting in enumerate(self._waiting):
            if waiting is buffers:
                del self._waiting[index]
                return True
        return False

    @property
    def is_writable(self) -> bool:
        """Whether large messages need not wait, so that no small one may overtake them."""
        return self._room.is_set()

    async def wait_writable(self) -> None:
        """Wait until large messages need not wait, or the connection is gone.

        For whoever makes the next large message only then. Cancellation: safe.
        """
        await self._room.wait()

    def pause_reading(self) -> None:
        """Stop taking bytes from the peer."""
        if not self._closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes again."""
        if not self._closing:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close once everything is written."""
        if self._closing or self._transport is None:
            self._closing = True
            return
        self.flush()
        for buffers in self._waiting:
            self._write(buffers)
        self._closing = True
        self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; ``error`` is what the owner is told."""
        self._closing = True
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, refused: Refused) -> None:
        """Turn the peer away in the middle of its handshake, and say why."""
        if not self._closing:
            self.wire.refuse(refused)
            self._go_on_shaking_hands()

    def fail(self, error: Exception) -> None:
        """Close because of ``error``, and say where it came from if that was not foreseen."""
        if not isinstance(error, PsyncError):
            logger.error("a message of %s failed", self.wire.peer_task, exc_info=error)
        if self._open or self._closing:
            self.abort(error)
            return
        self._error = error
        self._write(self.wire.data_to_send())  # what a stranger may know of it
        self._closing = True
        self._transport.close()  # once that is on its way; within the deadline

    @property
    def is_connected(self) -> bool:
        """Whether there was a transport: only then is the owner told of its end."""
        return self._transport is not None

    # Writing.

    def _write(self, buffers: list[Buffer]) -> None:
        if not self._transport.is_closing():
            self.bytes_sent += sum(map(len, buffers))
            self._transport.writelines(buffers)

    # Handshake.

    def _go_on_shaking_hands(self) -> Frame | None:
        """Say what there is to say; once open, return the first frame if it is there."""
        self._write(self.wire.data_to_send())
        if self.wire.state is wire.State.CLOSED:
            self.close()
        elif self.wire.state is wire.State.OPEN:
            self._open = True
            self._deadline.cancel()
            self._opened()
            if not self._closing:
                return self._decoder.next_frame()
        return None

    def _give_up(self) -> None:
        seconds = self.wire.limits.handshake_seconds
        self.abort(ConnectionLost(f"the handshake was not over within {seconds} s"))


def _name(peername: Any) -> str:
    if isinstance(peername, tuple):
        return f"{peername[0]}:{peername[1]}"
    return str(peername) if peername else "a Unix socket"


def _set_options(sock: Any) -> None:
    """Let the kernel find dead hosts, and give Unix sockets room."""
    if sock is None:  # a network in memory
        return
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
