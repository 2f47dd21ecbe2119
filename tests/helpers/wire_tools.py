"""What the tests of the wire share: feeding a decoder in pieces, sinks, bytes of messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from psync.errors import LocalProtocolError, RemoteProtocolError
from psync.wire import frames
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import Buffer, Extent, Frame, FrameDecoder, Segment, encode_head, flat
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.tensors import Joined


def pour(decoder: FrameDecoder, data: Buffer, sizes: Iterable[int] = ()) -> list[Frame]:
    """Give ``data`` to a decoder in pieces of ``sizes`` (then: as large as it takes them)."""
    frames: list[Frame] = []
    rest = memoryview(data)
    for size in itertools.chain(sizes, itertools.repeat(1 << 40)):
        if not rest:
            return frames
        room = decoder.room
        assert len(room), "it is never empty"
        count = min(len(room), len(rest), size)
        room[:count] = rest[:count]
        rest = rest[count:]
        frame = decoder.received(count)
        while frame is not None or decoder.copying is not None:
            if frame is None:
                frame = decoder.received(0)
                continue
            frames.append(frame)
            frame = decoder.next_frame()
    raise AssertionError("not reached")


def splits(data: bytes) -> Iterator[list[int]]:
    """Yield the sizes of pieces: whole, byte by byte, and in two at every point."""
    yield [len(data)]
    yield [1] * len(data)
    for point in range(1, len(data)):
        yield [point, len(data) - point]


class Anywhere:
    """A sink that gives each segment memory of its own, and remembers whom it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Frame] = []

    def __call__(self, frame: Frame) -> Sequence[memoryview] | None:
        self.asked.append(frame)
        frame.segments = [memoryview(bytearray(length)) for length in frame.lengths]
        return frame.segments


def joined(buffers: Iterable[Buffer]) -> bytes:
    """Return what the buffers put on the wire."""
    return b"".join(buffers)


def kinds_of(module: ModuleType) -> set[type[Message]]:
    """Return the classes of messages that ``module`` itself defines."""
    return {
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Message)
        and hasattr(kind, "code")  # the others are bases
        and kind.__module__ == module.__name__
    }


def check_bytes(message: Message, header: str) -> None:
    """Check that ``message`` has this header, in hexadecimal, and comes back from it."""
    assert encode(message).hex() == header
    come = decode(bytes.fromhex(header))
    assert type(come) is type(message)
    assert encode(come).hex() == header  # tuples come as lists


def encode_frame(
    kind: int,
    request_id: int,
    header: bytes,
    segments: Sequence[Segment] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> list[Buffer]:
    """Return the buffers of a frame whose body is not lent, as a connection sends it."""
    lengths, buffers = flat(segments)
    lengths = segments.lengths if isinstance(segments, Joined) else lengths
    frames.check_sizes(LocalProtocolError, limits, len(header), len(lengths), sum(lengths), lengths)
    return [encode_head(kind, request_id, header, lengths), *buffers]


def cut(memory: bytes | bytearray, points: Iterable[int]) -> list[memoryview]:
    """Return views of the parts between these points; empty ones among them."""
    edges = [0, *sorted(min(point, len(memory)) for point in points), len(memory)]
    view = memoryview(memory)
    return [view[start:stop] for start, stop in itertools.pairwise(edges)]


class Lent:
    """A body that is lent, see ``wire.frames.Borrowed``; counts how often it comes back."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self.is_kept = False
        self.num_returns = 0

    def keep(self) -> list[memoryview]:
        self.is_kept = True
        return list(self.views)

    def give_back(self) -> None:
        self.num_returns += 1


class Lender:
    """Finds extents in memory of its own, by region; see ``wire.frames.Borrow``."""

    def __init__(self, regions: dict[int, bytes | bytearray]) -> None:
        self.regions = regions
        self.lent: list[Lent] = []

    def __call__(self, extents: Sequence[Extent]) -> Lent:
        views = []
        for region, offset, nbytes in extents:
            if offset + nbytes > len(self.regions.get(region, b"")):
                raise RemoteProtocolError("there is no such memory")
            views.append(memoryview(self.regions[region])[offset : offset + nbytes].toreadonly())
        self.lent.append(Lent(views))
        return self.lent[-1]
