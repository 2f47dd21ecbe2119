"""A connection from its first byte on: what may be said when, and what follows from it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import (
    AuthenticationError,
    ConnectFailed,
    FencedError,
    FrameTooLarge,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
)
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import PREFIX, VERSION, FrameDecoder, Kind
from psync.wire.handshake import EXPECTED, ClientHandshake, Handshake, ServerHandshake, State
from psync.wire.limits import DEFAULT_LIMITS, HANDSHAKE_LIMITS
from psync.wire.messages import Challenge, Done, Hello, Proof, Refused, Welcome
from wire_tools import Anywhere, encode_frame, joined, pour, splits

SECRET = b"a secret of the whole cluster"
PS, WORKER = "/job:ps/task:0", "/job:worker/task:1"


class Side:
    """A half of a handshake, with the decoder of its connection."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake
        self.decoder = FrameDecoder(HANDSHAKE_LIMITS, Anywhere())

    @property
    def state(self) -> State:
        return self.handshake.state

    def received(self, nbytes: int) -> None:
        self.handshake.received(self.decoder, nbytes)


def new_client(
    secret: bytes | None = SECRET, *, expect: str | None = PS, lane: str = "control"
) -> Side:
    hello = Hello(VERSION, VERSION, WORKER, 3, lane, bytes(range(32)), secret is not None)
    return Side(ClientHandshake(secret, hello, expect))


def new_server(
    secret: bytes | None = SECRET, *, admit: Callable[[Hello], Refused | None] | None = None
) -> Side:
    challenge = Challenge(VERSION, PS, 5, bytes(32), secret is not None, b"")
    return Side(ServerHandshake(secret, challenge, admit))


def said(side: Side) -> bytes:
    return joined(side.handshake.data_to_send())


def greet(protocol: Side, data: bytes, sizes: Iterable[int] = ()) -> None:
    """Give a half of a handshake to the other side in pieces of ``sizes``, then whole."""
    rest = memoryview(data)
    for size in itertools.chain(sizes, itertools.repeat(len(data))):
        if not rest:
            return
        count = min(len(room := protocol.decoder.room), len(rest), size)
        room[:count], rest = rest[:count], rest[count:]
        protocol.received(count)


def frame_of(kind: Kind, message: Message | None = None) -> bytes:
    return joined(encode_frame(kind, 0, b"" if message is None else encode(message)))


def words(data: bytes) -> list[tuple[Kind, Message]]:
    """Read a side's half of a handshake."""
    frames = pour(FrameDecoder(DEFAULT_LIMITS, Anywhere()), data)
    return [(Kind(frame.kind), decode(frame.header)) for frame in frames]


def converse(client: Side, server: Side) -> tuple[bytes, bytes]:
    """Carry out the handshake; return what each side said."""
    from_client = from_server = b""
    while True:
        out = said(client)
        from_client += out
        greet(server, out)
        back = said(server)
        from_server += back
        greet(client, back)
        if not out and not back:
            return from_client, from_server


# --- the handshake ---------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_both_sides_open_and_know_each_other(secret: bytes | None, lane: str) -> None:
    client, server = new_client(secret, lane=lane), new_server(secret)
    converse(client, server)
    assert client.state is server.state is State.OPEN
    seen = [
        (each.peer_task, each.peer_incarnation, each.lane)
        for each in (client.handshake, server.handshake)
    ]
    assert seen == [(PS, 5, lane), (WORKER, 3, lane)]
    assert said(client) == said(server) == b""


@pytest.mark.parametrize(("seen", "state"), [(b"one", State.OPEN), (b"two", State.CLOSED)])
def test_a_connection_opens_if_both_sides_see_the_same_tls(seen: bytes, state: State) -> None:
    client, server = new_client(), new_server()
    client.handshake.binding, server.handshake.binding = b"one", seen
    with contextlib.suppress(AuthenticationError):
        converse(client, server)
    assert client.state is state
    assert (server.state is State.OPEN) is (state is State.OPEN)


def test_golden_bytes_of_the_greeting() -> None:
    assert said(new_client()).hex() == (
        "5053594e" "02" "01" "0000" "0000000000000000" "43000000" "00000000" "0000000000000000"
        "98010202" "b22f6a6f623a776f726b65722f7461736b3a31" "03" "a7636f6e74726f6c"
        "c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" "c3"
    )  # fmt: skip


def test_the_handshake_is_the_same_however_its_bytes_arrive() -> None:
    from_client, from_server = converse(new_client(), new_server())
    for sizes in splits(from_client):
        server = new_server()
        greet(server, from_client, sizes)
        assert server.state is State.OPEN
    for sizes in splits(from_server):
        client = new_client()
        greet(client, from_server, sizes)
        assert client.state is State.OPEN


# --- frames of an open connection ------------------------------------------------------------


def test_frames_behind_the_handshake_wait_until_they_are_asked_for() -> None:
    """They may have arrived in the same read; the limits are already the new ones for them."""
    client, server = new_client(), new_server()
    greet(server, said(client))
    greet(client, said(server))
    data = said(client)
    data += joined(encode_frame(Kind.REQUEST, 9, bytes(5000), [b"abc"]))
    server.decoder.room[: len(data)] = data
    server.received(len(data))
    assert server.state is State.OPEN
    server.decoder.limits = DEFAULT_LIMITS
    frame = server.decoder.next_frame()
    assert frame is not None
    assert frame.request_id == 9
    assert [bytes(segment) for segment in frame.segments] == [b"abc"]
    assert server.decoder.next_frame() is None


def test_a_fault_of_a_stranger_closes_for_ever() -> None:
    server = new_server()
    with pytest.raises(RemoteProtocolError):
        greet(server, bytes(32))
    assert server.state is State.CLOSED
    with pytest.raises(LocalProtocolError, match="bytes were received on a closed connection"):
        server.received(0)


# --- who is turned away ----------------------------------------------------------------------


def refused_by(server: Side, client: Side) -> PsyncError:
    with pytest.raises(PsyncError) as caught:
        converse(client, server)
    assert client.state is State.CLOSED
    return caught.value


def test_a_wrong_secret_is_found_by_the_client_first() -> None:
    client, server = new_client(b"another secret, just as long"), new_server()
    error = refused_by(server, client)
    assert isinstance(error, AuthenticationError)
    assert error.message == f"{PS} does not have the same secret as this task"
    assert error.hint == "give all tasks of the cluster the same PSYNC_SECRET"
    assert said(client) == b"", "nothing is proved to a stranger"
    assert server.state is State.AWAIT_PROOF


def test_a_wrong_proof_is_refused() -> None:
    client, server = new_client(), new_server()
    greet(server, said(client))
    said(server)
    greet(server, frame_of(Kind.PROOF, Proof(bytes(32))))
    assert server.state is State.CLOSED
    assert server.handshake.refused == Refused("authentication", "the proof does not match")
    assert words(said(server)) == [(Kind.REFUSED, server.handshake.refused)]


def test_admit_has_the_last_word_on_a_peer_that_has_proved_itself() -> None:
    asked: list[Hello] = []

    def admit(hello: Hello) -> Refused:
        asked.append(hello)
        return Refused("fenced", "incarnation 3 was replaced")

    server = new_server(admit=admit)
    error = refused_by(server, new_client())
    assert isinstance(error, FencedError)
    assert error.message == f"{PS} refused the connection: incarnation 3 was replaced"
    assert [(hello.task, hello.incarnation) for hello in asked] == [(WORKER, 3)]
    assert server.handshake.refused == Refused("fenced", "incarnation 3 was replaced")


def test_admit_is_not_asked_about_a_stranger() -> None:
    def admit(hello: Hello) -> None:
        raise AssertionError("asked about a stranger")

    server = new_server(admit=admit)
    greet(server, said(new_client()))
    greet(server, frame_of(Kind.PROOF, Proof(bytes(32))))
    assert server.state is State.CLOSED


def test_a_peer_can_be_turned_away_before_it_has_said_anything() -> None:
    full = Refused("full", "it has 1024 connections")
    server = new_server()
    server.handshake.refuse(full)
    assert server.state is State.CLOSED
    assert server.handshake.refused == full
    client = new_client()
    with pytest.raises(ConnectFailed) as caught:
        greet(client, said(server))
    assert caught.value.message == "the peer refused the connection: it has 1024 connections"


# --- what breaks a handshake -----------------------------------------------------------------

SERVER_STATES = (State.AWAIT_HELLO, State.AWAIT_PROOF)
CLIENT_STATES = (State.AWAIT_CHALLENGE, State.AWAIT_WELCOME)


def brought_to(state: State) -> Side:
    client, server = new_client(), new_server()
    if state in (State.AWAIT_PROOF, State.AWAIT_WELCOME):
        greet(server, said(client))
    if state is State.AWAIT_WELCOME:
        greet(client, said(server))
    reached = client if state in CLIENT_STATES else server
    assert reached.state is state
    said(reached)
    return reached


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (state, kind)
        for state, kind in itertools.product(SERVER_STATES + CLIENT_STATES, Kind)
        if kind not in EXPECTED[state]
    ],
)
def test_a_frame_out_of_turn_is_refused(state: State, kind: Kind) -> None:
    protocol = brought_to(state)
    with pytest.raises(RemoteProtocolError) as caught:
        greet(protocol, frame_of(kind, Done()))
    assert caught.value.message == f"got a frame {kind.name} while {state.value}"
    assert caught.value.hint == "the peer must finish the handshake first"
    assert protocol.state is State.CLOSED


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (state, kind, message)
        for state in SERVER_STATES + CLIENT_STATES
        for kind in EXPECTED[state]
        for message in (
            Hello(1, 1, WORKER, 3, "control", bytes(32), True),
            Challenge(1, PS, 5, bytes(32), True, bytes(32)),
            Proof(bytes(32)),
            Welcome(),
            Refused("x", "y"),
            Done(),
        )
        if message.code != kind
    ],
)
def test_a_frame_cannot_carry_the_message_of_another_one(
    state: State, kind: Kind, message: Message
) -> None:
    """A PROOF frame with a greeting in it must not be taken for a proof, for example."""
    protocol = brought_to(state)
    with pytest.raises(RemoteProtocolError) as caught:
        greet(protocol, frame_of(kind, message))
    assert caught.value.message == f"got {type(message).__name__} in a frame {kind.name}"
    assert protocol.state is State.CLOSED


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2, frame_of(Kind.HELLO)])
def test_a_stranger_is_told_no_more_than_that_it_is_one(data: bytes) -> None:
    server = new_server()
    with pytest.raises(RemoteProtocolError):
        greet(server, data)
    assert words(said(server)) == [(Kind.REFUSED, Refused("protocol", "malformed greeting"))]


def test_a_client_says_nothing_to_a_stranger() -> None:
    client = new_client()
    said(client)
    with pytest.raises(RemoteProtocolError):
        greet(client, bytes(32))
    assert said(client) == b""


@pytest.mark.promise("input.no-memory-for-claims")
@pytest.mark.parametrize("state", SERVER_STATES + CLIENT_STATES)
def test_a_stranger_cannot_make_us_take_memory(state: State) -> None:
    protocol = brought_to(state)
    large = PREFIX.pack(b"PSYN", VERSION, Kind.REQUEST, 0, 1, 0, 1, 1 << 20)
    with pytest.raises(FrameTooLarge):
        greet(protocol, large)
    protocol = brought_to(state)
    with pytest.raises(FrameTooLarge):
        greet(protocol, PREFIX.pack(b"PSYN", VERSION, Kind.HELLO, 0, 0, 4097, 0, 0))


@pytest.mark.promise("security.no-pickle-from-strangers")
@settings(max_examples=200, deadline=None)
@given(
    state=st.sampled_from([*SERVER_STATES, *CLIENT_STATES]),
    data=st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda kind, header: joined(encode_frame(kind, 0, header)),
            st.sampled_from(list(Kind)),
            st.binary(max_size=80),
        ),
    ),
    by_bytes=st.booleans(),
)
def test_garbage_never_opens_a_connection(state: State, data: bytes, by_bytes: bool) -> None:
    protocol = brought_to(state)
    with contextlib.suppress(PsyncError):
        greet(protocol, data, [1] * len(data) if by_bytes else [])
    assert protocol.state is not State.OPEN


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), of_server=st.booleans())
def test_a_byte_changed_on_the_way_never_opens_a_connection(
    position: int, value: int, of_server: bool
) -> None:
    from_client, from_server = converse(new_client(), new_server())
    original = from_server if of_server else from_client
    data = bytearray(original)
    position %= len(data)
    data[position] = value
    protocol = new_client() if of_server else new_server()
    with contextlib.suppress(PsyncError):
        greet(protocol, data)
    # The id of a request has no meaning in a handshake.
    in_an_id = any(8 <= position - start < 16 for start in (0, original.index(b"PSYN", 4)))
    if data != original and not in_an_id:
        assert protocol.state is not State.OPEN
