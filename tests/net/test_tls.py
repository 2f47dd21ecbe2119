"""One connection with TLS: every byte arrives, nothing is held for longer than it has to be."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from endpoints import Handlers, connected, pattern
from psync.errors import AuthenticationError, ConfigurationError, ConnectionLost, PsyncError
from psync.net.certificates import Tls, load_tls
from psync.net.connection import Handler, Request
from psync.net.tls import (
    BELOW_HIGH_BYTES,
    LINGER_S,
    PIECE_BYTES,
    TlsChannel,
    TlsNetwork,
    refusal_of,
)
from psync.net.transport import Network, SocketNetwork
from psync.testing import MemoryNetwork
from psync.testing.link import Link
from psync.wire.messages import Pulled, Read
from recorder import Recorder
from tls_files import authority, tls_of, variables_of
from turns import Turns, linked

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return tls_of(tmp_path_factory.mktemp("tls") / "certs", authority())


class Ends:
    """A client and a server, and the link below them."""

    def __init__(self, client: Recorder, server: Recorder, link: Link) -> None:
        self.client, self.server, self.link = client, server, link

    def close(self, turns: Turns) -> None:
        for above in (self.client, self.server):
            above.transport.close()
        turns.advance(1.0)
        assert "lost" in self.client.events
        assert "lost" in self.server.events
        assert not self.link.fabric.problems


def calling(tls: Tls, above: Recorder) -> TlsChannel:
    return TlsChannel(above, tls, server_name="ps0")


def called(tls: Tls, above: Recorder) -> TlsChannel:
    return TlsChannel(above, tls)


def joined(turns: Turns, tls: Tls, words: bytes = b"", **options: Any) -> Ends:
    client, server = Recorder(words, room=1000), Recorder(room=1000)
    *_, link = linked(lambda: calling(tls, client), lambda: called(tls, server), **options)
    turns.settle()
    return Ends(client, server, link)


# --- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [(1, 3), (1, 70_000)], ids=["bytewise", "in pieces"])
def test_what_is_written_arrives_in_order_however_it_is_cut(
    seed: int, chunk: tuple[int, int], tls: Tls, turns: Turns
) -> None:
    rng = random.Random(seed)
    words = b"said before TLS was up"
    ends = joined(turns, tls, words, seed=seed, latency=(0.0, 0.01), chunk=chunk)
    largest = 20 if chunk[1] == 3 else 600_000
    for sender, receiver in ((ends.client, ends.server), (ends.server, ends.client)):
        parts = [pattern(rng.randrange(largest), seed).tobytes() for _ in range(20)]
        for first, last in ((0, 1), (1, 4), (4, 11), (11, 20)):
            sender.transport.writelines([memoryview(part) for part in parts[first:last]])
            turns.advance(rng.random() / 100)
        turns.advance(60)
        assert bytes(receiver.received) == sender.words + b"".join(parts)
    ends.close(turns)


@pytest.mark.parametrize("place", ["tcp", "unix", "memory"])
async def test_tensors_go_through_both_ways(place: str, tls: Tls, tmp_path: Path) -> None:
    """Far more than any buffer on the way holds."""
    sent = pattern(9 * MIB + 5)
    got: list[int] = []

    def echo(request: Request[Read]) -> None:
        segments = request.segments
        got.extend(map(len, segments))
        request.answer(Pulled([]), [memoryview(sent), b"small", *segments])

    handlers: Handlers = {Read: Handler(echo)}
    below: Network = MemoryNetwork() if place == "memory" else SocketNetwork()
    address = {"tcp": "127.0.0.1:0", "unix": f"unix:{tmp_path}/ps0", "memory": "ps0:1"}[place]
    async with connected(TlsNetwork(below, tls), handlers, address=address) as pair:
        for _ in range(2):
            calls = [pair.peer.call(Read(0), [memoryview(sent), b"x" * 100]) for _ in range(2)]
            for answer in await asyncio.gather(*calls):
                first, small, second, third = answer.segments
                assert first == second == memoryview(sent)
                assert (small, third) == (b"small", b"x" * 100)
    assert got == [len(sent), 100] * 4
    if isinstance(below, MemoryNetwork):
        below.check()


def below_of(transport: Any) -> Any:
    """What carries the encrypted bytes."""
    return transport._below


@pytest.mark.promise("security.tls")
def test_nothing_of_it_can_be_read_on_the_way(tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls, words=b"a secret word")
    seen = b""
    below = below_of(ends.client.transport)
    write = below.write

    def spy(data: bytes) -> None:
        nonlocal seen
        seen += data
        write(data)

    below.write = spy
    ends.client.transport.write(b"another secret word")
    turns.settle()
    assert bytes(ends.server.received) == b"a secret wordanother secret word"
    assert len(seen) > 19
    assert b"secret" not in seen
    ends.close(turns)


# --- room ------------------------------------------------------------------------------------


def test_a_reader_that_stops_costs_a_bounded_amount_and_the_writer_is_told(
    tls: Tls, turns: Turns
) -> None:
    ends = joined(turns, tls)
    client, server = ends.client.transport, ends.server
    client.set_write_buffer_limits(high=4 * MIB)
    server.transport.pause_reading()
    assert not server.transport.is_reading()
    piece = bytes(MIB)
    for _ in range(3):
        client.write(piece)
    assert ends.client.events == ["made"]
    for _ in range(4):
        client.write(piece)
    turns.settle()
    assert ends.client.events == ["made", "pause"]
    unsent = client.get_write_buffer_size()
    assert 4 * MIB < unsent <= 7 * MIB + 64 * KIB
    # What is encrypted is not more than fits below.
    assert below_of(client).get_write_buffer_size() <= BELOW_HIGH_BYTES + 2 * PIECE_BYTES
    assert not server.received
    server.transport.resume_reading()
    turns.settle()
    assert ends.client.events == ["made", "pause", "resume"]
    assert server.received == bytes(7 * MIB)
    assert client.get_write_buffer_size() == 0
    ends.close(turns)


def test_a_large_message_does_not_keep_the_loop_from_all_else(tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls)
    sent: list[int] = []
    below_of(ends.client.transport).write = lambda data: sent.append(len(data))  # room for all
    ends.client.transport.write(bytes(20 * MIB))
    left = []
    while size := ends.client.transport.get_write_buffer_size():
        left.append(size // MIB)
        turns.turn()
    assert left == [16, 12, 8, 4]
    assert 20 * MIB < sum(sent) < 20.1 * MIB
    ends.client.transport.abort()
    turns.settle()
    assert "lost" in ends.server.events
    assert "lost" in ends.client.events


def test_what_came_before_a_pause_is_there_after_it(tls: Tls, turns: Turns) -> None:
    """All of it has arrived in one piece, and is decrypted already or lies with TLS."""
    ends = joined(turns, tls, chunk=(MIB, MIB))
    server = ends.server

    def pause_at_once(nbytes: int) -> None:
        server.received += server.memory[:nbytes]
        server.transport.pause_reading()

    server.buffer_updated = pause_at_once  # type: ignore[method-assign]
    ends.client.transport.write(b"x" * 3500)
    seen = []
    for _ in range(4):
        turns.settle()
        seen.append(len(server.received))
        server.transport.resume_reading()
    assert seen == [1000, 2000, 3000, 3500]
    ends.close(turns)


def test_memory_that_waits_is_not_copied(tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls)
    ends.server.transport.pause_reading()
    large = bytearray(32 * MIB)
    ends.client.transport.write(memoryview(large))
    turns.settle()
    with pytest.raises(BufferError):  # somebody still looks at it
        large.append(1)
    ends.server.transport.resume_reading()
    turns.settle()
    assert len(ends.server.received) == len(large)
    large.append(1)
    ends.close(turns)


# --- the end ---------------------------------------------------------------------------------


def test_close_sends_everything_first(tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls)
    ends.client.transport.write(bytes(20 * MIB))
    ends.client.transport.close()
    assert ends.client.transport.is_closing()
    ends.client.transport.write(b"too late")
    ends.client.transport.close()
    turns.settle()
    assert "lost" in ends.server.events
    assert "lost" in ends.client.events
    assert ends.server.received == bytes(20 * MIB)
    assert ends.server.events == ["made", "data", "eof", "lost"]
    assert ends.client.lost is None


def test_abort_sends_nothing_more(tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls)
    ends.server.transport.pause_reading()
    ends.client.transport.write(bytes(20 * MIB))
    ends.client.transport.abort()
    turns.settle()
    assert "lost" in ends.client.events
    ends.server.transport.resume_reading()
    turns.settle()
    assert "lost" in ends.server.events
    assert len(ends.server.received) < 2 * MIB


def test_close_before_tls_is_up_says_nothing(tls: Tls, turns: Turns) -> None:
    client = Recorder(b"words")
    linked(lambda: calling(tls, client), Recorder)
    client.transport.close()
    turns.settle()
    assert "lost" in client.events
    assert (client.events, client.lost) == (["made", "lost"], None)


@pytest.mark.promise("security.tls")
@pytest.mark.parametrize("at", [0, 5, 20, 100, -1])
def test_bytes_that_somebody_changes_end_the_connection(at: int, tls: Tls, turns: Turns) -> None:
    ends = joined(turns, tls)
    update = ends.server.transport.buffer_updated

    def tampered(nbytes: int) -> None:
        ends.server.transport._room[at if at >= 0 else nbytes - 1] ^= 1
        update(nbytes)

    ends.server.transport.buffer_updated = tampered
    ends.client.transport.write(bytes(200))
    turns.settle()
    assert "lost" in ends.server.events
    error = ends.server.lost
    assert isinstance(error, ConnectionLost)
    assert error.message.startswith("TLS with the peer broke: ")
    assert not ends.server.received
    turns.settle()
    assert "lost" in ends.client.events


def test_a_peer_that_goes_on_talking_after_it_was_refused_is_left(tls: Tls, turns: Turns) -> None:
    server, stranger = Recorder(), Recorder(b"GET / HTTP/1.1\r\n\r\n")
    linked(lambda: stranger, lambda: called(tls, server))
    turns.settle()
    refused = turns.time()
    assert b"uses TLS" in stranger.received
    while "lost" not in server.events:
        stranger.transport.write(b"more" * 1000)
        turns.advance(0.1)
    assert LINGER_S <= turns.time() - refused <= LINGER_S + 0.2
    assert server.received == b""
    assert isinstance(server.lost, AuthenticationError)
    turns.settle()
    assert "lost" in stranger.events


def test_who_leaves_in_the_middle_of_the_handshake_is_told_of_and_a_probe_is_not(
    tls: Tls, turns: Turns
) -> None:
    for words in (b"", b"\x16\x03\x01"):
        server, stranger = Recorder(), Recorder(words)
        linked(lambda stranger=stranger: stranger, lambda server=server: called(tls, server))  # type: ignore[misc]
        turns.settle()
        stranger.transport.close()
        turns.settle()
        assert "lost" in server.events
        if words:
            assert isinstance(server.lost, ConnectionLost)
            assert server.lost.message == ("the peer left in the middle of the TLS handshake")
        else:
            assert (server.events, server.lost) == (["made", "lost"], None)


def test_a_protocol_that_does_not_want_the_connection_costs_no_computation(
    tls: Tls, turns: Turns
) -> None:
    class Unwilling(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.abort()

    for side in ("client", "server"):
        above = {"client": Recorder(), "server": Recorder(), side: Unwilling()}
        channel = calling(tls, above["client"])
        linked(lambda channel=channel: channel, lambda above=above: called(tls, above["server"]))  # type: ignore[misc]
        turns.settle()
        assert "lost" in above["client"].events
        assert "lost" in above["server"].events
        with pytest.raises(ValueError, match="handshake not done"):
            channel.get_extra_info("ssl_object").getpeercert()


class Below(asyncio.Transport):
    """A transport that takes everything, and ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.ended = False

    def write(self, data: Any) -> None:
        self.said += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.ended

    def abort(self) -> None:
        self.ended = True

    close = abort


@pytest.fixture(scope="module")
def greeting() -> bytes:
    """The first words of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(incoming, outgoing, server_hostname="ps0")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("accepts", [True, False])
def test_whatever_a_stranger_says_ends_in_a_clear_error(
    accepts: bool, tls: Tls, greeting: bytes
) -> None:
    """Random bytes, and good first words with some of them changed."""
    rng = random.Random(7)

    async def talk() -> None:
        above, below = Recorder(b"words"), Below()
        channel = TlsChannel(above, tls) if accepts else TlsChannel(above, tls, server_name="ps0")
        channel.connection_made(below)
        words = bytearray(greeting if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 300)))
        for _ in range(rng.randrange(4)):
            words[rng.randrange(len(words))] = rng.randrange(256)
        words += rng.randbytes(rng.randrange(100)) * rng.randrange(3)
        while words and not below.ended:
            room = channel.get_buffer(-1)
            nbytes = min(len(words), rng.randrange(1, 400))
            room[:nbytes] = words[:nbytes]
            del words[:nbytes]
            channel.buffer_updated(nbytes)
        channel.eof_received()
        channel.connection_lost(None)
        assert above.events == ["made", "lost"]
        assert isinstance(above.lost, PsyncError)
        assert above.lost.message.isprintable()
        assert not above.received
        assert len(channel.get_buffer(-1)) <= 64 * KIB

    async def talk_often() -> None:
        for _ in range(300):
            await talk()

    asyncio.run(talk_often())


def test_records_begin_as_the_standard_says() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(incoming, outgoing, server_hostname="ps0")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    assert outgoing.read()[:2] == b"\x16\x03"


CA, CERT, KEY, MUTUAL = (
    "PSYNC_TLS_CA_FILE",
    "PSYNC_TLS_CERT_FILE",
    "PSYNC_TLS_KEY_FILE",
    "PSYNC_TLS_MUTUAL",
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return variables_of(tmp_path / "certs", authority())


def refused(environ: dict[str, str]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load_tls(environ)
    return caught.value


def test_no_variable_means_no_tls() -> None:
    assert load_tls({}) is None
    assert load_tls({CA: "", CERT: "", KEY: "", MUTUAL: ""}) is None
    assert load_tls({MUTUAL: "0"}) is None


def test_tls_1_3_with_names_and_certificates_of_both_sides(environ: dict[str, str]) -> None:
    tls = load_tls(environ)
    assert tls is not None
    assert tls.server is not None
    for context in (tls.client, tls.server):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1  # and none of the system's
    assert tls.client.check_hostname
    own = ssl.PEM_cert_to_DER_cert(Path(environ[CERT]).read_text())
    assert tls.binding == hashlib.sha256(own).digest()


def test_without_mutual_tls_a_task_that_connects_needs_no_certificate(
    environ: dict[str, str],
) -> None:
    tls = load_tls({CA: environ[CA], MUTUAL: "0"})
    assert tls is not None
    assert tls.client.verify_mode == ssl.CERT_REQUIRED
    assert (tls.server, tls.binding) == (None, b"")
    tls = load_tls({**environ, MUTUAL: "0"})
    assert tls is not None
    assert tls.server is not None
    assert tls.server.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([CERT, KEY], f"{CERT} is set, but {CA} is not"),
        ([KEY], f"{KEY} is set, but {CA} is not"),
        ([CA, CERT], f"{CERT} is set, but {KEY} is not"),
        ([CA, KEY], f"{KEY} is set, but {CERT} is not"),
        ([CA], f"{CA} is set, but {CERT} is not: both sides of a connection present a certificate"),
    ],
)
def test_what_is_missing_is_named(names: list[str], told: str, environ: dict[str, str]) -> None:
    assert refused({name: environ[name] for name in names}).message == told


def test_mutual_tls_is_said_with_0_and_1(environ: dict[str, str]) -> None:
    assert refused({**environ, MUTUAL: "no"}).message == f"{MUTUAL}: expected 0 or 1, got 'no'"
    assert refused({MUTUAL: "1"}).message == f"{MUTUAL} is 1, but {CA} is not set"


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_file_that_is_not_there_is_named(name: str, environ: dict[str, str]) -> None:
    missing = environ[name] + ".gone"
    error = refused({**environ, name: missing})
    what = "read" if name == KEY else "used"
    assert error.message == f"{name} ({missing}): cannot be {what}: No such file or directory"


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_a_key_that_others_can_read_or_change_is_refused(
    mode: int, environ: dict[str, str]
) -> None:
    os.chmod(environ[KEY], mode)
    error = refused(environ)
    assert error.message == (
        f"{KEY} ({environ[KEY]}): users other than its owner can read or change it "
        f"(mode {mode:04o})"
    )
    assert error.hint == f"chmod 600 {environ[KEY]}"


@pytest.mark.parametrize("name", [CA, CERT])
@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_without_a_certificate_is_named(
    name: str, text: str, environ: dict[str, str]
) -> None:
    Path(environ[name]).write_text(text)
    assert refused(environ).message.startswith(f"{name} ({environ[name]}): cannot be used: ")


def test_the_key_of_another_certificate_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    other = variables_of(tmp_path / "other", authority())
    error = refused({**environ, KEY: other[KEY]})
    assert error.message.endswith("cannot be used: key values mismatch")


def test_nobody_is_asked_for_a_password(environ: dict[str, str]) -> None:
    path = Path(environ[KEY])
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert refused(environ).message == (
        f"{KEY}: the key has a password, which psync cannot ask for"
    )


def test_what_openssl_says_is_told_in_words() -> None:
    for reason, told in [
        ("TLSV1_ALERT_UNKNOWN_CA", "b:1 refuses the certificate of this task: unknown ca"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "b:1 requires a certificate, but this task has none"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "b:1 presents no certificate"),
        ("NO_SHARED_CIPHER", "TLS with b:1 failed: no shared cipher"),
    ]:
        error = ssl.SSLError(1, "[SSL] library words")
        error.reason = reason
        assert refusal_of(error, "b:1").message == told


def test_openssl_may_have_no_words() -> None:
    error = ssl.SSLError("odd")
    error.reason = None  # type: ignore[assignment]
    assert refusal_of(error, "b:1").message == "TLS with b:1 failed: ('odd',)"
