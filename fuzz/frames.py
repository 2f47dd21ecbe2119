"""Bytes into the decoder of frames, in pieces as they choose themselves.

What comes out: frames, or RemoteProtocolError. No frame holds more than the limits allow.
"""

from __future__ import annotations

import contextlib

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    from samples import CLASSES, Draw, sample_of

    from psync.errors import RemoteProtocolError
    from psync.wire.codec import encode
    from psync.wire.frames import Frame, FrameDecoder, Kind, encode_head
    from psync.wire.limits import Limits

    limits = Limits(header_bytes=1000, segments=20, segment_bytes=1000, body_bytes=5000)

    def sink(frame: Frame) -> list[memoryview] | None:
        assert sum(frame.lengths) <= limits.body_bytes
        if frame.request_id % 3 == 2:
            return None  # nobody wants it
        frame.segments = [memoryview(bytearray(length)) for length in frame.lengths]
        return frame.segments

    def one_input(data: bytes) -> None:
        draw = Draw(data[-16:])
        decoder = FrameDecoder(limits, sink)
        rest = memoryview(data)
        with contextlib.suppress(RemoteProtocolError):
            while rest:
                room = decoder.room
                count = min(len(room), len(rest), 1 + draw.below(200))
                room[:count] = rest[:count]
                rest = rest[count:]
                frame = decoder.received(count)
                while frame is not None:
                    assert len(frame.header) <= limits.header_bytes
                    frame = decoder.next_frame()
        assert len(decoder.room) <= 1 << 20

    def bytes_of(kind: Kind, number: int, header: bytes, body: list[bytes]) -> bytes:
        head = encode_head(kind, number, header, [len(part) for part in body])
        return b"".join((head, *body))

    headers = [encode(sample_of(kind)) for kind in CLASSES]
    seeds = [bytes_of(Kind.REQUEST, 5, header, [b"abc", b"", bytes(40)]) for header in headers]
    seeds += [bytes_of(kind, 0, headers[0], []) for kind in Kind]
    seeds.append(b"".join(seeds[:4]))
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
