"""Headers of messages: bytes as they are, and fields of every class with values that do not fit.

What comes out: a message whose fields have the declared types, or RemoteProtocolError.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    from msgspec import msgpack
    from samples import CLASSES, WRONG, Draw, drawn, fields_of, sample_of

    from psync.errors import RemoteProtocolError
    from psync.wire.codec import decode, encode
    from psync.wire.messages import Failure
    from psync.wire.remote_errors import exception_of

    by_code = {kind.code: kind for kind in CLASSES}

    def header_of(data: bytes) -> bytes:
        """What the bytes after a mark choose, some of it wrong; else the bytes themselves."""
        if data[:1] != b"\xc1":  # which is no msgpack
            return data
        draw = Draw(data[1:])
        kind = draw.of(CLASSES)
        values = [drawn(annotation, draw) for annotation in fields_of(kind).values()]
        for _ in range(draw.below(3)):
            if values:
                values[draw.below(len(values))] = draw.of(WRONG)
        if draw.below(8) == 0:
            values += [draw.of(WRONG)]
        return msgpack.encode([kind.code, *values])

    def one_input(data: bytes) -> None:
        header = header_of(data)
        try:
            message = decode(header)
        except RemoteProtocolError as exc:
            assert len(str(exc)) < 2000  # it is logged
            return
        assert type(message) is by_code[message.code]
        again = decode(encode(message))
        assert encode(again) == encode(message)
        if isinstance(message, Failure):
            str(exception_of(message, "/job:ps/task:0"))

    seeds = [encode(sample_of(kind)) for kind in CLASSES]
    seeds += [b"\xc1" + bytes((number,)) + bytes(range(20)) for number in range(len(CLASSES))]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
