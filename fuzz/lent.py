"""Frames with extents and words about memory, to a task that shares some: in any order.

What comes out: bodies, or RemoteProtocolError. Nothing is read outside of the regions, no region
that is not one is mapped, and no descriptor stays open.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Any

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    from samples import Draw

    from psync.errors import RemoteProtocolError
    from psync.net.shared.bodies import Sharing
    from psync.net.shared.regions import SEALS, SharedMemory, map_foreign
    from psync.wire.frames import Extent, Frame, FrameDecoder, Kind, encode_head
    from psync.wire.limits import Limits

    limits = Limits(header_bytes=1000, segments=20, segment_bytes=6000, body_bytes=20_000)
    sizes = (4096, 100, 5000, 1)

    def region(number: int, kind: int) -> int:
        """Return a descriptor: of what it should be, or of something else."""
        if kind == 1:
            return os.open("/dev/null", os.O_RDONLY)
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        nbytes = sizes[number % len(sizes)] - (kind == 2)
        os.ftruncate(fd, nbytes)
        if kind != 3 and nbytes:
            os.pwrite(fd, bytes([number]) * nbytes, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~1 if kind == 4 else SEALS)
        return fd

    class Channel:
        """Gives what an input has drawn."""

        make = None

        def __init__(self, draw: Draw) -> None:
            self.given = [(draw.below(6), draw.below(40)) for _ in range(draw.below(10))]

        def take(self) -> Iterator[tuple[int, memoryview]]:
            while self.given:
                number, kind = self.given.pop(0)
                yield number, map_foreign(region(number, kind), sizes[number % len(sizes)])

        def nothing(self, *_: Any) -> None: ...

        give = end = close = when_ended = look_no_more = nothing

    def one_input(data: bytes) -> None:
        draw = Draw(data[-32:])
        files = len(os.listdir("/proc/self/fd"))
        memory: Any = SharedMemory()
        sharing = Sharing(memory, Channel(draw), lambda: None)  # type: ignore[arg-type]
        kept: list[memoryview] = []

        def sink(frame: Frame) -> list[memoryview] | None:
            if frame.borrowed is not None and frame.request_id % 3 == 1:
                kept[:] = frame.segments = frame.borrowed.keep()
                return frame.segments
            if frame.request_id % 3 == 2:
                return None  # nobody wants it
            frame.segments = [memoryview(bytearray(length)) for length in frame.lengths]
            return frame.segments

        def look_at(frame: Frame) -> None:
            if frame.kind == Kind.RETURN:
                sharing.returned(frame.request_id)
            elif frame.kind == Kind.FORGET:
                sharing.forget(frame.request_id)
            if frame.borrowed is not None:
                for segment in frame.segments:  # of one region: its number is all that is in it
                    assert set(segment) <= set(range(6))

        decoder = FrameDecoder(limits, sink)
        decoder.borrow = sharing.borrow
        rest = memoryview(data)
        frame: Frame | None = None
        try:
            while rest:
                room = decoder.room
                count = min(len(room), len(rest), 1 + draw.below(200))
                room[:count] = rest[:count]
                rest = rest[count:]
                frame = decoder.received(count)
                while frame is not None or decoder.copying is not None:
                    if frame is None:
                        frame = decoder.received(0)
                    else:
                        look_at(frame)
                        frame = decoder.next_frame()
        except RemoteProtocolError as exc:
            exc.__traceback__ = None  # it is kept, and what it holds would seem to be in use
        frame = None
        kept.clear()
        sharing.due()
        sharing.close()
        assert sharing.is_over, "somebody still reads"
        assert len(os.listdir("/proc/self/fd")) == files

    def lent(number: int, *extents: tuple[int, int, int]) -> bytes:
        named = [Extent(*extent) for extent in extents]
        length = sum(extent.nbytes for extent in named)
        return encode_head(Kind.REQUEST, number, b"head", [length], named)

    def word(kind: Kind, number: int) -> bytes:
        return encode_head(kind, number, b"")

    heads = [
        lent(number, *extents)
        for number in (1, 2, 3)
        for extents in (
            [(0, 0, 100)], [(1, 5, 95)], [(0, 0, 4096), (2, 4000, 1000)], [(3, 0, 1)] * 20,
            [(4, 0, 0)], [(5, 99, 1), (0, 1, 2), (1, 3, 4)],
        )
    ]  # fmt: skip
    words = [word(Kind.FORGET, number) for number in range(3)] + [word(Kind.RETURN, 1)]
    # The last bytes draw what the side channel gives: ten regions, each of a number and a kind.
    tails = [bytes([9, *range(1, 21)]) + bytes(20), bytes([6, 0, 9, 1, 9, 2, 9, 3, 9, 4, 9, 5, 9])]
    tails = [tail.ljust(32, b"\xff")[:32] for tail in tails]
    seeds = [head + tail for head in heads for tail in tails]
    seeds += [heads[0] + each + heads[1] + tails[1] for each in words]
    seeds.append(b"".join(heads) + tails[1])
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
