"""One end of a connection in memory: an asyncio transport.

As strict as the strictest loop: it takes bytes, bytearrays and memoryviews of bytes only, never
sends at once, and asks for memory to read into piece by piece. Its protocol is called in the
context in which the transport was made, like a protocol on a socket, and not in that of the
task on the other side which happened to write.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from psync.testing.segments import check_buffer

if TYPE_CHECKING:
    from psync.testing.link import Direction

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
