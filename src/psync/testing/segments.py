"""Buffers under way in memory transports, and the check that they do not change.

A segment refers to the writer's memory, as uvloop does until the kernel has taken it. A
checksum from the time of the write shows whether that memory has changed since: with sockets
a mix of two values would have gone out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from types import FrameType
from typing import Any

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
        self.offset += len(piece)
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
    return frame.f_code.co_filename.startswith(_NOISE)
