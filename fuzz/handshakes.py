"""Bytes from a stranger, in every state of the handshake, to both sides.

What comes out: an error of psync. A connection is never open at the end.
"""

from __future__ import annotations

from driver import OneInput, fuzz


def setup() -> tuple[OneInput, list[bytes]]:
    from samples import CLASSES, Draw, drawn_of

    from psync.errors import (
        AuthenticationError,
        ConnectFailed,
        FencedError,
        LocalProtocolError,
        RemoteProtocolError,
        VersionMismatch,
    )
    from psync.wire.codec import encode
    from psync.wire.frames import Frame, FrameDecoder, Kind, encode_head
    from psync.wire.handshake import VERSION, ClientHandshake, Handshake, ServerHandshake, State
    from psync.wire.limits import HANDSHAKE_LIMITS
    from psync.wire.messages import Challenge, Hello, Proof, Refused, Welcome

    ps, worker = "/job:ps/task:0", "/job:worker/task:1"
    documented = (
        AuthenticationError, ConnectFailed, FencedError, RemoteProtocolError, VersionMismatch,
    )  # fmt: skip

    def nobody_sends_a_body(frame: Frame) -> list[memoryview] | None:
        raise AssertionError("a body was accepted before the handshake was over")

    def client(secret: bytes | None) -> Handshake:
        said = Hello(VERSION, VERSION, worker, 3, "control", bytes(range(32)), secret is not None)
        return ClientHandshake(secret, said, ps)

    def server(secret: bytes | None) -> Handshake:
        said = Challenge(VERSION, ps, 5, bytes(32), secret is not None, b"")
        return ServerHandshake(secret, said)

    def pour(side: Handshake, data: bytes, step: int) -> None:
        rest, decoder = memoryview(data), FrameDecoder(HANDSHAKE_LIMITS, nobody_sends_a_body)
        while rest and side.state is not State.OPEN:  # then ``frames`` goes on
            room = decoder.room
            count = min(len(room), len(rest), step)
            room[:count] = rest[:count]
            rest = rest[count:]
            side.received(decoder, count)

    secret = b"a secret of the whole cluster"

    def brought_to(state: int) -> Handshake:
        """A server or client in one of the four states in which it waits for a word."""
        one, other = client(secret), server(secret)
        said = b"".join(one.data_to_send())
        if state == 0:
            return other
        pour(other, said, 1 << 20)
        said = b"".join(other.data_to_send())
        if state == 1:
            return other
        if state == 3:
            pour(one, said, 1 << 20)
        return one

    def one_input(data: bytes) -> None:
        draw = Draw(data)
        side = brought_to(draw.below(4))
        step = draw.of((1, 7, 64, 1 << 20))
        said = draw.rest()
        if draw.below(2):  # a word of the handshake, its fields as the bytes choose
            kind = draw.of((Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.REFUSED))
            word = {
                Kind.HELLO: Hello, Kind.CHALLENGE: Challenge, Kind.PROOF: Proof,
                Kind.WELCOME: Welcome, Kind.REFUSED: Refused,
            }[kind]  # fmt: skip
            said = encode_head(kind, 0, encode(drawn_of(word, draw)))
        waited_for_welcome = side.state is State.AWAIT_WELCOME
        try:
            pour(side, said, step)
        except documented:
            assert side.state is State.CLOSED
        except LocalProtocolError:  # it was closed by what came before
            assert side.state is State.CLOSED
        # Who has checked the server's proof takes its word that all is well.
        assert side.state is not State.OPEN or waited_for_welcome
        assert sum(map(len, side.data_to_send())) < 8192

    del CLASSES
    words = [
        (Kind.HELLO, Hello(1, 1, worker, 7, "control", bytes(32), True)),
        (Kind.CHALLENGE, Challenge(1, ps, 5, bytes(32), True, b"\1" * 32)),
        (Kind.PROOF, Proof(b"\1" * 32)),
        (Kind.WELCOME, Welcome()),
        (Kind.REFUSED, Refused("full", "no room")),
    ]
    seeds = [
        bytes((state, step)) + encode_head(kind, 0, encode(word))
        for kind, word in words
        for state in range(4)
        for step in (0, 3)
    ]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
