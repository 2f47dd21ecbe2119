"""One asyncio connection: the wire protocol on a transport, without copies of large messages.

``Connection`` is an ``asyncio.BufferedProtocol``: the transport reads from the socket into
the memory that the wire protocol names, which for a large segment is its destination.

A large message is written with one ``writelines`` and never copied: uvloop (and asyncio
from 3.12 on) keeps references to the buffers until the kernel has taken them, so nothing
that was written may change in place (see ``numerics.memory``). Small messages are copied, and those
of one turn of the loop share a system call: that call is most of what they cost.

Large messages wait, in order, while the transport has much unsent, or while they are copied. On the
lane for large bodies small ones do not, and so overtake them. On all others nothing is overtaken: a
cancellation comes after what it cancels.

To a task of the same host a large body is lent instead, see ``net.shared``: it stays where it is,
or is copied to memory that the peer can read, and only the frame's head is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psync.errors import ConnectionLost, LocalProtocolError, PsyncError
from psync.net.shared.bodies import Sharing, Waker
from psync.net.shared.channel import SideChannel
from psync.net.shared.loans import Loan
from psync.net.shared.regions import SharedMemory
from psync.net.transport import name_of, set_options
from psync.wire import protocol as wire
from psync.wire.codec import Message, encode
from psync.wire.frames import (
    PREFIX_BYTES,
    SMALL_BODY_BYTES,
    Buffer,
    Frame,
    Kind,
    Segment,
    encode_head,
    flat,
)
from psync.wire.handshake import BULK
from psync.wire.lent import LENT_ABOVE_BYTES, Extent
from psync.wire.messages import Refused

logger = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 4 << 20
"""Above this much unsent data large messages wait."""

SENT = 256
"""Added to the kind of a message that is shown to a tap, if it goes out."""

_RETURN, _FORGET = int(Kind.RETURN), int(Kind.FORGET)

Tap = Callable[[int, int, bytes, int], None]
"""Shown each message: its kind, request id, header, and the bytes of its body."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A large message that was not written yet, or a small one behind it."""

    buffers: list[Buffer]
    loan: Loan | None = None  # its body is lent
    copy: Callable[[], bool] | None = None  # copies a part of that; returns whether it was the last


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
        memory: Of this task, to be shared with peers of its host; None: it is not.
    """

    def __init__(
        self,
        protocol: wire.Protocol,
        opened: Callable[[], None],
        received: Callable[[Frame], None],
        closed: Callable[[Exception | None], None],
        memory: SharedMemory | None = None,
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
        self._waiting: deque[_Waiting] = deque()  # large messages, until there is room
        self._read_pauses = 0  # reasons not to read
        self._memory = memory
        self._sharing: Sharing | None = None  # of memory, with the peer
        self._room = asyncio.Event()  # set while large messages need not wait, and at the end
        self._room.set()
        self._in_order = False  # whether small messages wait behind large ones

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
            set_options(transport.get_extra_info("socket"))
            self.peername = name_of(transport.get_extra_info("peername"))
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
            self._hand_over(frame)
        except Exception as exc:
            self.fail(exc)
        self.flush()

    def _hand_over(self, frame: Frame | None) -> None:
        """Hand this frame to the owner, and all others that are there."""
        while frame is not None and not self._closing:
            if self._sharing is not None and frame.kind in (_RETURN, _FORGET):
                self._sharing.told(frame.kind == _RETURN, frame.request_id)
            else:
                if self.tap is not None:
                    self.tap(frame.kind, frame.request_id, frame.header, frame.nbytes)
                self._received(frame)
            frame = self._decoder.next_frame()
        if self._sharing is not None and self._decoder.is_copying and not self._closing:
            self.pause_reading()  # until all of that body is there
            self._loop.call_soon(self._go_on_copying)

    def _go_on_copying(self) -> None:
        if self._closing:
            return
        self._flush_due = True
        try:
            frame = self._decoder.copy_more()
            if self._decoder.is_copying:
                self._loop.call_soon(self._go_on_copying)
            else:
                self.resume_reading()
                self._hand_over(frame or self._decoder.next_frame())
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
        self._go_on_writing()

    def _go_on_writing(self) -> None:
        while self._waiting and self._writable and not self._closing:
            if self._waiting[0].copy is not None:
                if not self._waiting[0].copy():
                    self._loop.call_soon(self._go_on_writing)
                    return
                self._waiting[0].copy = None
            self._write_large(self._waiting.popleft())
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
        if self._sharing is not None:
            self._sharing.close()
        self._closed(error)

    # For the owner.

    def send_message(
        self,
        kind: int,
        request_id: int,
        message: Message | None = None,
        segments: Sequence[Segment] = (),
        *,
        at_once: bool = False,
        copied: bool = False,
    ) -> list[Buffer]:
        """Make a frame, ``send`` it, and return its buffers.

        ``at_once``: a small one waits for no others of this turn, which costs another turn.
        ``copied``: the peer is lent a copy of the segments, and never their own memory.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        loan: Loan | None = None
        extents: Sequence[Extent] = ()
        try:
            header = b"" if message is None else encode(message)
            lengths, body = flat(segments) if segments else ((), [])
            nbytes = sum(lengths)
            if nbytes > LENT_ABOVE_BYTES and self._sharing is not None:
                loan = self._sharing.lend(body, nbytes, copied=copied)
                extents = () if loan is None else loan.extents
            head = encode_head(kind, request_id, header, lengths, extents, self.wire.limits)
        except LocalProtocolError as exc:
            if loan is not None and self._sharing is not None:
                self._sharing.withdrawn(loan)
            exc.add_note(f"while sending {type(message).__name__} to {self.wire.peer_task}")
            raise
        if self.tap is not None:
            table = len(head) - PREFIX_BYTES - len(header)  # lengths, extents
            self.tap(kind | SENT, request_id, header, table + nbytes)
        buffers: list[Buffer] = [head] if loan is not None else [head, *body]
        self._send(buffers, nbytes + len(head), loan, at_once)
        return buffers

    def send(self, buffers: list[Buffer]) -> None:
        """Send one message, none of whose buffers may change if it is above 64 KiB."""
        self._send(buffers, sum(map(len, buffers)), None, False)

    def _send(self, buffers: list[Buffer], nbytes: int, loan: Loan | None, at_once: bool) -> None:
        if self._closing:
            return
        if nbytes <= SMALL_BODY_BYTES and loan is None:
            if self._in_order and self._waiting:
                self._waiting.append(_Waiting([b"".join(buffers)]))
                return
            self._small.append(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            self._small_bytes += nbytes
            if self._small_bytes > SMALL_BODY_BYTES or (at_once and not self._flush_due):
                self.flush()
            elif not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self.flush)
            return
        idle = self._writable and not self._waiting
        if idle and loan is None:
            self.flush()
            self._write(buffers)
            return
        copy = loan.copying() if loan is not None and loan.sources else None
        self._waiting.append(_Waiting(buffers, loan, copy))
        if idle:
            self._room.clear()  # nothing may overtake it
            self._go_on_writing()

    def flush(self) -> None:
        """Write small messages now, not at the end of this turn: the peer can begin with them."""
        if self._sharing is not None and self._sharing.has_to_say:
            # First: the peer may need the memory for what comes after them.
            self._flush_due, small, self._small = True, self._small, []
            self._say_returns()
            self._small += small
        self._flush_due = False
        if self._small:
            small = self._small
            self._small, self._small_bytes = [], 0
            if not self._closing:
                self._write([small[0] if len(small) == 1 else b"".join(small)])

    def withdraw(self, buffers: list[Buffer]) -> bool:
        """Take back a message given to ``send``; return False if that is too late."""
        for index, waiting in enumerate(self._waiting):
            if waiting.buffers is buffers:
                del self._waiting[index]
                if waiting.loan is not None and self._sharing is not None:
                    self._sharing.withdrawn(waiting.loan)
                return True
        return False

    async def wait_writable(self) -> None:
        """Wait until large messages need not wait, or the connection is gone.

        For whoever makes the next large message only then. Cancellation: safe.
        """
        await self._room.wait()

    def pause_reading(self) -> None:
        """Stop taking bytes from the peer, until ``resume_reading`` has been called as often."""
        self._read_pauses += 1
        if self._read_pauses == 1 and not self._closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes again, unless there is another reason not to."""
        self._read_pauses -= 1
        if not (self._read_pauses or self._closing):
            self._transport.resume_reading()

    def close(self) -> None:
        """Close once everything is written."""
        if self._closing or self._transport is None:
            self._closing = True
            return
        self.flush()
        while self._waiting:
            waiting = self._waiting.popleft()
            while waiting.copy is not None and not waiting.copy():
                pass
            self._write_large(waiting)
        self._closing = True
        self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; ``error`` is what the owner is told."""
        self._closing = True
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()
        if self._sharing is not None and not self._open:
            # Nothing is lent; and uvloop tells no end of a connection whose making was cancelled.
            self._sharing.close()

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

    # Sharing memory.

    def share(self, channel: SideChannel) -> None:
        """The peer is a task of this host: what is large is lent. Before anything is said."""
        if self._memory is None:
            channel.close()
            return
        self._sharing = Sharing(self._memory, channel, Waker(self._say_returns))
        self._decoder.borrow = self._sharing.borrow

    @property
    def sharing(self) -> Sharing | None:
        """What is lent over this connection; None: the peer is elsewhere."""
        return self._sharing

    def _say_returns(self) -> None:
        assert self._sharing is not None, "it says that there is something"
        returns, gone = self._sharing.due()
        for number in returns:
            self.send_message(_RETURN, number)
        for number in gone:
            self.send_message(_FORGET, number)

    # Writing.

    def _write_large(self, message: _Waiting) -> None:
        if message.loan is not None and self._sharing is not None:
            self._sharing.sent(message.loan)
        self.flush()
        self._write(message.buffers)

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
            self._in_order = self.wire.lane != BULK
            self._deadline.cancel()
            self._opened()
            if not self._closing:
                return self._decoder.next_frame()
        return None

    def _give_up(self) -> None:
        seconds = self.wire.limits.handshake_seconds
        self.abort(ConnectionLost(f"the handshake was not over within {seconds} s"))
