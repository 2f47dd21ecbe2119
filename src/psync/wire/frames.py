"""Frames: a fixed prefix, a small header, raw segments.

The decoder never copies a large segment: it asks its ``sink`` where the bytes belong as
soon as the header is known, and from then on offers exactly that memory to the transport
(``asyncio.BufferedProtocol``), which reads from the socket straight into it. Only what
arrived together with the header passes through the scratch buffer.

Frames are handed out one at a time, and the next one is not looked at before it is asked
for. So the limits may change between two frames that arrived in one read, and a sink is
asked about a frame only when the one before it has been dealt with.

    prefix (32 bytes, little endian)
    magic "PSYN" | version u8 | kind u8 | number of extents u16 | request id u64
    | header length u32 | number of segments u32 | body length u64
    then: segment lengths u64 each; extents, each of region, offset and bytes, u64 each; header;
    segments, unless there are extents

Extents say where in memory of the sender's the body lies, which tasks of one host can read: then
nothing of it is on the wire. Such a body is *lent*, see ``net.shared``.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from psync.errors import (
    FrameTooLarge,
    ProtocolError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.wire.codec import Message
from psync.wire.limits import HANDSHAKE_LIMITS, Limits

MAGIC = b"PSYN"
TLS_HELLO = b"\x16\x03"
"""How TLS begins: a record of its handshake."""

SAME_TLS = (
    "set PSYNC_TLS_CA_FILE, PSYNC_TLS_CERT_FILE and PSYNC_TLS_KEY_FILE for all tasks, or none"
)

VERSION = 2
PREFIX_FORMAT = "<4sBBHQIIQ"
PREFIX = struct.Struct(PREFIX_FORMAT)
PREFIX_BYTES = PREFIX.size


@functools.lru_cache
def with_lengths(before: str, count: int) -> struct.Struct:
    """Return the layout of something and then the lengths of so many segments."""
    return struct.Struct(f"{before}{count}Q")


SCRATCH_BYTES = 128 << 10
"""Room for prefixes, headers and small frames; Dask's asyncio transport used the same."""

SMALL_BODY_BYTES = 64 << 10
"""Above this a body counts as bulk: it travels on the bulk connection."""


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    REQUEST = 16
    REPLY = 17
    ERROR = 18
    NOTIFY = 19
    CANCEL = 20
    PING = 21
    PONG = 22
    RETURN = 23  # a lent body is not needed any more; the request id is its number
    FORGET = 24  # a region will not be named any more; the request id is its number


_KINDS = frozenset(int(kind) for kind in Kind)

SENT = 256
"""Added to the kind of a message that is shown to a tap, if it goes out."""

# Bodies that are lent: they lie in memory of the sender's that the receiver can read. A frame has
# the extents of such a body instead of its bytes. The connection's ``Borrow`` finds them; they are
# copied here to where an ordinary body would have been read, unless the receiver keeps them.

EXTENT = struct.Struct("<QQQ")
EXTENT_BYTES = EXTENT.size

MAX_EXTENTS = 0xFFFF
"""Of one body: the prefix has two bytes for their number."""

LENT_ABOVE_BYTES = 64 << 10
"""A smaller body is on the wire: a system call costs more than its bytes."""

COPY_BYTES = 4 << 20
"""Copied in one turn of the loop: less than a millisecond."""


class Extent(NamedTuple):
    """A part of a body that is lent."""

    region: int  # of the sender's memory
    offset: int
    nbytes: int


class Borrowed(Protocol):
    """A body that the peer has lent.

    Attributes:
        views: Its extents, read-only.
        is_kept: Whether somebody reads them where they are.
    """

    views: Sequence[memoryview]
    is_kept: bool

    @property
    def may_keep(self) -> bool:
        """Whether it may be kept for as long as somebody likes: not too much is."""

    def keep(self) -> list[memoryview]:
        """Return ``views``; the body is given back when nobody sees any of them any more."""

    def give_back(self) -> None:
        """It is not needed any more."""


Borrow = Callable[[Sequence[tuple[int, int, int]]], Borrowed]
"""Finds a body that is lent. Raises RemoteProtocolError if there is no such memory."""


def copies(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> Iterator[int]:
    """Copy ``sources`` to ``targets``, which have as many bytes; yield after each COPY_BYTES."""
    done, at_once = 0, COPY_BYTES
    onto = iter(targets)
    target, at = memoryview(b""), 0
    for source in sources:
        begin, size = 0, len(source)
        while begin < size:
            while at == len(target):
                target, at = next(onto), 0
            count = min(size - begin, len(target) - at, at_once - done)
            # Of small sources there are many, and to cut them takes as long as to copy them.
            part = source if count == size else source[begin : begin + count]
            target[at : at + count] = part
            begin, at, done = begin + count, at + count, done + count
            if done == at_once:
                yield done
                done = 0


Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has format "B", so that its ``len`` counts bytes."""

Segment = Buffer | Sequence[memoryview]
"""What may be sent as one segment: one buffer of bytes, or several that are sent as one."""


class Frame:
    """One received frame; its segments are complete once the decoder returns it.

    The decoder fills it, as a constructor would take as long as the rest of a small one;
    ``message``, ``segments`` and ``token`` are the receiver's to fill.
    """

    kind: int  # a value of Kind
    request_id: int  # 0 where there is none
    header = b""  # msgpack
    lengths: tuple[int, ...] = ()  # bytes of each segment
    nbytes = 0  # of all segments
    segments: Sequence[memoryview] = ()
    message: Message = None  # type: ignore[assignment]  # once the header is decoded
    token: Any = None  # see ``FrameDecoder.redirect``
    borrowed: Borrowed | None = None  # the body, if it is lent


Sink = Callable[[Frame], "Sequence[memoryview] | None"]
"""Decides where the body of a frame goes.

Called once the header is complete, if the frame has segments. Returns writable byte views
whose lengths add up to the body's, in order (their borders need not be those of the
segments), or None: then the body is read and thrown away. Of one that is lent it may instead keep
the memory in which it is.
"""


def flat(segments: Sequence[Segment]) -> tuple[Sequence[int], list[Buffer]]:
    """Return the length of each segment, and the buffers that are not empty; not of ``Joined``."""
    lengths: list[int] = []
    buffers: list[Buffer] = []
    for segment in segments:
        if isinstance(segment, (bytes, bytearray, memoryview)):
            lengths.append(len(segment))
            if lengths[-1]:
                buffers.append(segment)
        else:
            lengths.append(sum(map(len, segment)))
            buffers += filter(len, segment)
    return lengths, buffers


def encode_head(
    kind: int,
    request_id: int,
    header: bytes,
    lengths: Sequence[int] = (),
    extents: Sequence[Extent] = (),
) -> bytes:
    """Return what is before the segments of a frame; with extents, all of it.

    Args:
        kind: Of the frame.
        request_id: Of the request; 0: there is none.
        header: An encoded message.
        lengths: Of the segments.
        extents: Where they lie, if they are lent.
    """
    count = len(lengths)
    head = with_lengths(PREFIX_FORMAT, count).pack(
        MAGIC, VERSION, kind, len(extents), request_id, len(header), count, sum(lengths), *lengths
    )
    return head + b"".join([EXTENT.pack(*extent) for extent in extents]) + header


class FrameDecoder:
    """Turns bytes into frames. Not to be used any more once it has raised.

    Use: fill ``room`` → ``received(n)`` → a frame or None; after a frame, ``next_frame()`` until it
    returns None. While a body that is lent is ``copying``, ``received(0)`` copies more of it.

    Args:
        limits: May be replaced between frames, when the peer has proved itself.
        sink: Says where bodies go.
        make: Makes frames.

    Attributes:
        room: Memory for the next bytes of the stream, however many; never empty.
        start: First unread byte of the scratch buffer.
        end: Behind its last received byte.
        copying: Copies a body that is lent, piece by piece; None: nothing is being copied.
        borrow: Finds such bodies; None: the peer has nothing that could be lent.
    """

    def __init__(self, limits: Limits, sink: Sink, make: type[Frame] = Frame) -> None:
        self.limits = limits
        self.start = self.end = 0
        self.copying: Iterator[int] | None = None
        self.borrow: Borrow | None = None
        self._sink = sink
        self._make = make
        # Not zeroed: memory that small frames never reach is never taken from the system.
        self.room = self._scratch = np.empty(SCRATCH_BYTES, np.uint8).data
        self._frame: Frame | None = None  # whose body is being received, else None
        self._targets: deque[memoryview] = deque()  # where the rest of the body goes
        self._discard = 0  # bytes of a body still to be thrown away

    def received(self, nbytes: int) -> Frame | None:
        """Account for ``nbytes`` put into ``room``; return a complete frame.

        Raises:
            RemoteProtocolError: If the bytes are not a frame, or declare more than the
                limits allow.
        """
        if self._frame is not None:
            return self._received_body(nbytes)
        # A prefix and a header, from scratch.
        start, scratch, limits = self.start, self._scratch, self.limits
        end = self.end = self.end + nbytes
        if end - start < PREFIX_BYTES:
            self._wait_for(PREFIX_BYTES)
            return None
        magic, version, kind, extents, request_id, header_len, count, body_len = PREFIX.unpack_from(
            scratch, start
        )
        if (
            magic != MAGIC
            or version != VERSION
            or kind not in _KINDS
            or (extents and (self.borrow is None or not count))
        ):
            raise _not_a_frame(magic, version, kind, extents)
        if (
            header_len > limits.header_bytes
            or count > limits.segments
            or body_len > limits.body_bytes
            or body_len > limits.segment_bytes
        ):
            check_sizes(FrameTooLarge, limits, header_len, count, body_len)
        head = start + PREFIX_BYTES + 8 * count + EXTENT_BYTES * extents
        body = head + header_len
        if end < body:
            self._wait_for(body - start)
            return None
        frame = self._make()
        frame.kind, frame.request_id, frame.nbytes = kind, request_id, body_len
        frame.header = bytes(scratch[head:body])
        self.start = body
        if count or body_len:
            lengths = with_lengths("<", count).unpack_from(scratch, start + PREFIX_BYTES)
            frame.lengths = lengths
            if body_len > limits.segment_bytes:
                check_sizes(FrameTooLarge, limits, header_len, count, body_len, lengths)
            if sum(lengths) != body_len:
                raise RemoteProtocolError(
                    f"segments add up to {sum(lengths)} bytes, the prefix says {body_len}"
                )
            if extents:
                named = scratch[head - EXTENT_BYTES * extents : head]
                return self._begin_lent(frame, list(EXTENT.iter_unpack(named)))
            targets = self._sink(frame)
            if end - body > body_len:
                end = body + body_len
            self.start = end
            if targets is None:
                self._discard = body + body_len - end
            else:
                at = body
                for target in targets:
                    stop = at + len(target)
                    if stop <= end:
                        target[:] = scratch[at:stop]
                    else:
                        there = max(0, end - at)
                        target[:there] = scratch[at : at + there]
                        self._targets.append(target[there:])
                    at = stop
            if self._targets or self._discard:
                self._frame = frame
                self._wait_for_body()
                return None
        if self.start == self.end:
            self.start = self.end = 0
            self.room = scratch
        return frame

    def _received_body(self, nbytes: int) -> Frame | None:
        targets = self._targets
        if self.copying is not None:
            self.end += nbytes
            self._wait_for(self.end - self.start + 1)
            return self._copy_more()
        if targets:
            while targets and nbytes >= len(targets[0]):
                nbytes -= len(targets.popleft())
            if nbytes:
                targets[0] = targets[0][nbytes:]
        else:
            self._discard -= nbytes
        if targets or self._discard:
            self._wait_for_body()
            return None
        return self._complete()

    def _wait_for(self, need: int) -> None:
        """Let the scratch buffer have room for so many bytes from the first unread one on."""
        if self.start + need > len(self._scratch):
            unread = bytes(self._scratch[self.start : self.end])
            if need > len(self._scratch):
                self._scratch = np.empty(need, np.uint8).data
            self._scratch[: len(unread)] = unread
            self.start, self.end = 0, len(unread)
        self.room = self._scratch[self.end :]

    def _wait_for_body(self) -> None:
        """Let the next bytes go where the rest of a body belongs."""
        self.start = self.end = 0
        self.room = self._targets[0] if self._targets else self._scratch[: self._discard]

    def _complete(self) -> Frame | None:
        """Return the frame whose body is complete."""
        frame, self._frame = self._frame, None
        if self.start == self.end:
            self.start = self.end = 0
            self.room = self._scratch
        return frame

    def next_frame(self) -> Frame | None:
        """Return the next frame if all of it has arrived already.

        Raises:
            RemoteProtocolError: As ``received``.
        """
        return None if self.start == self.end or self._frame is not None else self.received(0)

    def redirect(self, token: object) -> None:
        """Throw away the rest of the body whose frame carries ``token``, if one is coming in.

        For a receiver that gave up: its memory is not written to any more.
        """
        if self._frame is None or self._frame.token != token:
            return
        if self.copying is not None:
            self.copying = iter(())  # the next piece is the last
        if self._targets:
            self._discard = sum(map(len, self._targets))
            self._targets.clear()
            self._wait_for_body()

    @property
    def receiving(self) -> bool:
        """Whether the stream would end inside a frame if it ended now."""
        return self._frame is not None or self.start != self.end

    def _begin_lent(self, frame: Frame, extents: Sequence[tuple[int, int, int]]) -> Frame | None:
        """Find a body that is lent, and copy it unless the sink keeps it; return the frame then."""
        if sum([nbytes for _, _, nbytes in extents]) != frame.nbytes:
            raise RemoteProtocolError(f"extents add up to other than {frame.nbytes} bytes")
        assert self.borrow is not None, "the prefix was checked"
        frame.borrowed = borrowed = self.borrow(extents)
        targets = self._sink(frame)
        self._frame = frame
        if borrowed.is_kept:
            return self._complete()
        self.copying = iter(()) if targets is None else copies(targets, borrowed.views)
        return self._received_body(0)

    def _copy_more(self) -> Frame | None:
        """Copy a part of a body that is lent; return its frame with the last one."""
        assert self.copying is not None, "one has begun"
        if next(self.copying, None) is not None:
            return None
        self.copying = None
        frame = self._complete()
        assert frame is not None, "its body was copied"
        assert frame.borrowed is not None, "which is lent"
        frame.borrowed.give_back()
        return frame


def _not_a_frame(magic: bytes, version: int, kind: int, flags: int) -> RemoteProtocolError:
    if magic.startswith(TLS_HELLO):
        return RemoteProtocolError("the peer uses TLS, but this task does not", hint=SAME_TLS)
    if magic != MAGIC:
        return RemoteProtocolError(
            f"expected a psync frame, which starts with {MAGIC!r}, got {magic!r}",
            hint="something that is not psync is talking to this port",
        )
    if version != VERSION:
        return VersionMismatch(
            f"the peer speaks version {version} of the wire protocol, this task speaks {VERSION}",
            hint="install the same version of psync for all tasks",
        )
    return RemoteProtocolError(f"unknown frame of kind {kind} with flags {flags:#06x}")


def check_sizes(
    error: type[ProtocolError],
    limits: Limits,
    header_len: int,
    count: int,
    body_len: int,
    lengths: Sequence[int] = (),
) -> None:
    """Raise ``error`` if a frame is larger than the limits allow.

    Args:
        error: Says that it is.
        limits: The limits.
        header_len: Bytes of the header.
        count: Number of segments.
        body_len: Bytes of all segments.
        lengths: Bytes of each segment, if they are known yet.
    """
    for size, what, name in (
        (header_len, "header of {} bytes", "header_bytes"),
        (count, "{} segments", "segments"),
        (body_len, "body of {} bytes", "body_bytes"),
        (max(lengths, default=0), "segment of {} bytes", "segment_bytes"),
    ):
        limit = getattr(limits, name)
        if size > limit:
            hint = f"PSYNC_LIMIT_{name.upper()} sets the limit, on all tasks"
            if name == "segment_bytes":
                hint = f"split the variable into more shards, see variable_partitioner; or {hint}"
            raise error(
                f"{what.format(size)}, at most {limit} are allowed",
                hint=None if limits is HANDSHAKE_LIMITS else hint,
            )
