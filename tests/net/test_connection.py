"""One connection: what is written when, who waits, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asked import Reply
from endpoints import (
    PS,
    SECRET,
    WORKER,
    Handlers,
    connected,
    done,
    new_endpoint,
    places,
    transport_of,
    wait_deserted,
)
from psync.errors import ConnectionLost
from psync.net.connection import WRITE_HIGH_BYTES, Connection, Handler, Request
from psync.net.transport import UNIX_BUFFER_BYTES, USER_TIMEOUT_MS, SocketNetwork
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import encode
from psync.wire.frames import Buffer, Frame, Kind, encode_frame
from psync.wire.handshake import BULK, LANES, ClientHandshake, ServerHandshake
from psync.wire.limits import DEFAULT_LIMITS
from psync.wire.messages import AskStatistics, Done, FinalBelow, Pull, Pulled, Refused
from psync.wire.protocol import Protocol
from turns import Turns, linked, peered

KIB, MIB = 1 << 10, 1 << 20


def pull(nbytes: int) -> Pull:
    return Pull(nbytes, None, -1, "")


def values(request: Request[Pull]) -> None:
    """Answer with as many bytes as the message asks for."""
    message = request.message
    request.answer(Pulled([]), [bytes(message.set_id)])


SERVED: Handlers = {Pull: Handler(values), AskStatistics: Handler(done)}


class Transport(asyncio.Transport):
    """A transport that remembers what it was told, and takes what it is given."""

    def __init__(self, **extra: object) -> None:
        super().__init__(extra)
        self.writes: list[list[Buffer]] = []
        self.told: list[str] = []

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.writes.append(list(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == WRITE_HIGH_BYTES

    def is_closing(self) -> bool:
        return "close" in self.told or "abort" in self.told

    def close(self) -> None:
        self.told.append("close")

    def abort(self) -> None:
        self.told.append("abort")

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


class Owner:
    """Remembers what the connection reports."""

    def __init__(self) -> None:
        self.reports: list[object] = []

    def opened(self) -> None:
        self.reports.append("opened")

    def received(self, frame: Frame) -> None:
        self.reports.append(frame.kind)

    def closed(self, error: Exception | None) -> None:
        self.reports.append(error)


def new_connection(refused: Refused | None = None) -> tuple[Connection, Owner]:
    owner = Owner()
    handshake = ServerHandshake(None, PS, 1, bytes(32))
    wire = Protocol(handshake, DEFAULT_LIMITS, lambda frame: None)
    if refused is not None:
        wire.refuse(refused)
    return Connection(wire, owner.opened, owner.received, owner.closed), owner


def up(**extra: object) -> tuple[Connection, Transport, Owner]:
    connection, owner = new_connection()
    transport = Transport(**extra)
    connection.connection_made(transport)
    transport.writes.clear()
    return connection, transport, owner


def message(nbytes: int) -> list[Buffer]:
    return [bytes(nbytes)]


def sizes(transport: Transport) -> list[list[int]]:
    return [[len(buffer) for buffer in write] for write in transport.writes]


# --- what shares a system call ---------------------------------------------------------------


def test_small_messages_of_one_turn_are_written_together(turns: Turns) -> None:
    connection, transport, _ = up()
    for nbytes in (10, 20, 30):
        connection.send(message(nbytes))
    assert transport.writes == []
    turns.settle()
    assert sizes(transport) == [[60]]
    connection.send(message(5))
    turns.settle()
    assert sizes(transport) == [[60], [5]]
    connection.connection_lost(None)


def test_who_has_other_work_to_do_has_small_messages_written_at_once(turns: Turns) -> None:
    connection, transport, _ = up()
    connection.send(message(10))
    connection.send(message(20))
    connection.flush()
    assert sizes(transport) == [[30]]
    connection.send(message(5))
    turns.settle()
    assert sizes(transport) == [[30], [5]]
    connection.send(message(7))
    connection.abort()
    connection.flush()
    assert sizes(transport) == [[30], [5]]
    connection.connection_lost(None)


def test_a_small_message_is_copied_and_a_large_one_is_not(turns: Turns) -> None:
    connection, transport, _ = up()
    small, large = bytearray(1000), bytearray(100 * KIB)
    connection.send([b"head", memoryview(small)])
    connection.send([b"head", memoryview(large)])
    small[:] = b"x" * len(small)
    large[:] = b"y" * len(large)
    assert bytes(transport.writes[0][0]) == b"head" + bytes(1000)
    assert bytes(transport.writes[1][1]) == large
    connection.connection_lost(None)


def test_a_large_message_follows_the_small_ones_before_it(turns: Turns) -> None:
    connection, transport, _ = up()
    connection.send(message(10))
    connection.send(message(20))
    connection.send(message(65 * KIB))
    connection.send(message(30))
    assert sizes(transport) == [[30], [65 * KIB]]
    turns.settle()
    assert sizes(transport) == [[30], [65 * KIB], [30]]
    assert connection.bytes_sent == 65 * KIB + 60
    connection.connection_lost(None)


def test_many_small_messages_do_not_pile_up_until_the_turn_ends(turns: Turns) -> None:
    connection, transport, _ = up()
    for _ in range(5):
        connection.send(message(40 * KIB))
    assert sizes(transport) == [[80 * KIB], [80 * KIB]]
    turns.settle()
    assert sizes(transport)[2:] == [[40 * KIB]]
    connection.connection_lost(None)


# --- large messages wait for room ------------------------------------------------------------


def test_large_messages_wait_while_the_transport_is_full_and_small_ones_do_not(
    turns: Turns,
) -> None:
    connection, transport, _ = up()
    connection.send(message(100 * KIB))
    connection.pause_writing()
    for nbytes in (101 * KIB, 102 * KIB, 103 * KIB):
        connection.send(message(nbytes))
    connection.send(message(7))
    turns.settle()
    assert sizes(transport) == [[100 * KIB], [7]]
    connection.resume_writing()
    assert sizes(transport)[2:] == [[101 * KIB], [102 * KIB], [103 * KIB]]
    connection.connection_lost(None)


@pytest.mark.virtual_time
async def test_no_more_is_written_than_until_the_transport_is_full_again() -> None:
    connection, transport, _ = up()
    writelines = transport.writelines

    def write_and_pause(buffers: Iterable[Any]) -> None:
        writelines(buffers)
        connection.pause_writing()

    transport.writelines = write_and_pause  # type: ignore[method-assign]
    for nbytes in (1, 2, 3):
        connection.send(message(nbytes * MIB))
    waiting = asyncio.create_task(connection.wait_writable())
    await settle()
    assert sizes(transport) == [[MIB]]
    connection.resume_writing()
    connection.send(message(4 * MIB))  # keeps its place, although there is room at this moment
    assert sizes(transport) == [[MIB], [2 * MIB]]
    connection.resume_writing()
    connection.resume_writing()
    assert sizes(transport)[2:] == [[3 * MIB], [4 * MIB]]
    await settle()
    assert not waiting.done()
    connection.resume_writing()
    await waiting
    connection.connection_lost(None)


def test_a_waiting_message_can_be_taken_back_once(turns: Turns) -> None:
    connection, transport, _ = up()
    connection.pause_writing()
    first, second, equal = message(100 * KIB), message(100 * KIB), message(100 * KIB)
    for buffers in (first, second, equal):
        connection.send(buffers)
    assert connection.withdraw(second)
    assert not connection.withdraw(second)
    assert not connection.withdraw(message(100 * KIB))
    connection.resume_writing()
    assert [write[0] is expected[0] for write, expected in zip(
        transport.writes, (first, equal), strict=True
    )] == [True, True]  # fmt: skip
    assert not connection.withdraw(first)
    connection.connection_lost(None)


@pytest.mark.virtual_time
async def test_waiting_for_room_ends_with_the_connection() -> None:
    connection, _, _ = up()
    await connection.wait_writable()
    connection.pause_writing()
    waiting = asyncio.create_task(connection.wait_writable())
    await settle()
    assert not waiting.done()
    connection.connection_lost(None)
    await waiting


@pytest.mark.parametrize("lane", LANES)
def test_small_answers_overtake_large_ones_that_wait_where_bodies_are_large(
    turns: Turns, lane: str
) -> None:
    pair = peered(turns, SERVED, lane=lane)
    pair.link.to_client.stall()
    answers: list[Any] = []
    for _ in range(20):
        pair.peer.ask(pull(MIB), (), answers.append)
    turns.settle()
    assert WRITE_HIGH_BYTES < pair.link.to_client.buffered_bytes < WRITE_HIGH_BYTES + 2 * MIB
    pair.peer.ask(AskStatistics(), (), answers.append)
    turns.settle()
    pair.link.to_client.flow()
    turns.settle()
    place = [answer.message for answer in answers].index(Done())
    assert place < 10 if lane == BULK else place == 20
    assert len(answers) == 21


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane != BULK])
@pytest.mark.parametrize("seed", range(20))
def test_where_bodies_are_small_everything_comes_in_order(
    turns: Turns, lane: str, seed: int
) -> None:
    draw = random.Random(seed)
    got: list[tuple[int, int]] = []

    def noted(request: Request[Pull]) -> None:
        message, segments = request.message, request.segments
        got.append((message.set_id, sum(map(len, segments))))

    pair = peered(turns, {Pull: Handler(noted)}, lane=lane, seed=seed)
    sent: list[tuple[int, int]] = []
    for number in range(30):
        if draw.random() < 0.2:
            draw.choice((pair.link.to_server.stall, pair.link.to_server.flow, turns.settle))()
        sent.append((number, draw.choice((0, 10, 70_000, 3 * MIB))))
        pair.peer.notify(pull(number), [bytes(sent[-1][1])])
    pair.link.to_server.flow()
    turns.settle()
    assert got == sent


@pytest.mark.virtual_time
async def test_a_request_that_waits_for_room_can_be_given_up_unsent() -> None:
    network = MemoryNetwork()
    async with connected(network, {**SERVED, **SERVED}) as pair:
        (link,) = network.links()
        link.to_server.stall()
        first = asyncio.create_task(pair.peer.call(AskStatistics(), [bytes(6 * MIB)]))
        await settle()
        second = asyncio.create_task(pair.peer.call(AskStatistics(), [bytes(6 * MIB)]))
        loop = asyncio.get_running_loop()
        third = asyncio.create_task(
            pair.peer.call(AskStatistics(), [bytes(6 * MIB)], deadline=loop.time() + 1)
        )
        await settle()
        second.cancel()
        await asyncio.wait([second, third])
        assert isinstance(third.exception(), TimeoutError)
        link.to_server.flow()
        assert (await first).message == Done()
        assert link.to_server.written_bytes < 7 * MIB
        assert (await pair.peer.call(AskStatistics())).message == Done()


# --- how it ends -----------------------------------------------------------------------------


def test_close_writes_what_waits_and_abort_does_not(turns: Turns) -> None:
    for end in ("close", "abort"):
        connection, transport, owner = up()
        connection.send(message(100 * KIB))
        connection.pause_writing()
        connection.send(message(5))
        connection.send(message(101 * KIB))
        getattr(connection, end)()
        assert transport.told == [end]
        turns.settle()
        written = [[100 * KIB], [5], [101 * KIB]] if end == "close" else [[100 * KIB]]
        assert sizes(transport) == written
        connection.connection_lost(None)
        assert owner.reports == [None]


def test_after_the_end_nothing_is_done_any_more(turns: Turns) -> None:
    connection, transport, owner = up()
    connection.close()
    connection.close()
    for act in (
        lambda: connection.send(message(5)),
        lambda: connection.send(message(MIB)),
        connection.pause_reading,
        connection.resume_reading,
        connection.resume_writing,
        lambda: connection.buffer_updated(10),
    ):
        act()
    turns.settle()
    assert transport.writes == []
    assert transport.told == ["close"]
    connection.connection_lost(None)
    assert owner.reports == [None]


def test_nothing_is_written_to_a_transport_that_closes_by_itself(turns: Turns) -> None:
    connection, transport, _ = up()
    transport.close()
    connection.send(message(MIB))
    connection.send(message(1))
    turns.settle()
    assert transport.writes == []
    connection.connection_lost(None)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_connection_ended_before_it_is_up_is_aborted_when_it_is(turns: Turns, end: str) -> None:
    connection, owner = new_connection()
    assert not connection.is_connected
    getattr(connection, end)()
    transport = Transport()
    connection.connection_made(transport)
    assert transport.told == ["abort"]
    assert transport.writes == []
    connection.connection_lost(None)
    assert owner.reports == [None]


def test_the_first_reason_is_the_one_that_is_told(turns: Turns) -> None:
    connection, _, owner = up()
    first = ConnectionLost("first")
    connection.abort(first)
    connection.abort(ConnectionLost("second"))
    connection.connection_lost(OSError("third"))
    assert owner.reports == [first]


def test_the_networks_reason_is_told_if_there_is_no_other(turns: Turns) -> None:
    connection, _, owner = up()
    error = ConnectionResetError("reset")
    connection.connection_lost(error)
    assert owner.reports == [error]


def test_a_peer_that_is_turned_away_is_told_and_left(turns: Turns) -> None:
    connection, owner = new_connection(Refused("full", "no room"))
    transport = Transport()
    connection.connection_made(transport)
    assert transport.told == ["close"]
    assert len(transport.writes) == 1
    connection.connection_lost(None)
    assert owner.reports == [None]


def test_a_peer_that_says_nothing_is_left_after_five_seconds(turns: Turns) -> None:
    connection, transport, owner = up()
    turns.advance(4.9)
    assert transport.told == []
    turns.advance(0.2)
    assert transport.told == ["abort"]
    connection.connection_lost(None)
    (error,) = owner.reports
    assert isinstance(error, ConnectionLost)
    assert error.message == "the handshake was not over within 5 s"


def test_a_stranger_is_told_no_more_than_that_it_is_one(turns: Turns) -> None:
    connection, transport, _ = up()
    connection.get_buffer(-1)[:32] = bytes(32)
    connection.buffer_updated(32)
    assert transport.told == ["close"]  # and not before the words below are on their way
    assert b"malformed greeting" in bytes(transport.writes[0][0])
    connection.connection_lost(None)


def test_an_owner_that_fails_ends_the_connection_with_a_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, turns: Turns
) -> None:
    def fail(*_: object) -> Reply:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Connection, "received", fail)
    pair = peered(turns)
    pair.peer.notify(FinalBelow(1))
    turns.settle()
    assert pair.back.is_closed
    assert isinstance(pair.back.error, ZeroDivisionError)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].message == "a message of /job:worker/task:0 failed"


def test_an_owner_may_close_at_once_and_sees_no_message_then(turns: Turns) -> None:
    """The peer's first request has arrived together with the last word of the handshake."""

    class Hasty(Owner):
        def opened(self) -> None:
            super().opened()
            connection.close()

    class Talkative(Owner):
        def opened(self) -> None:
            super().opened()
            server.send(encode_frame(Kind.NOTIFY, 0, encode(FinalBelow(1))))

    owner, other = Hasty(), Talkative()
    handshake = ClientHandshake(SECRET.value, WORKER, 1, "control", bytes(32), PS)
    wire = Protocol(handshake, DEFAULT_LIMITS, lambda frame: None)
    connection = Connection(wire, owner.opened, owner.received, owner.closed)
    wire = Protocol(ServerHandshake(SECRET.value, PS, 1, bytes(32)), DEFAULT_LIMITS, lambda _: None)
    server = Connection(wire, other.opened, other.received, other.closed)
    linked(lambda: connection, lambda: server, chunk=(65_536, 65_536))
    turns.settle()
    assert owner.reports == ["opened", None]
    assert other.reports == ["opened", None]


def test_what_was_read_behind_the_end_is_not_handed_over(turns: Turns) -> None:
    """The owner closes while it deals with the first of two messages of one read."""
    got: list[int] = []

    def handle(request: Request[FinalBelow]) -> None:
        peer, message = request.peer, request.message
        got.append(message.closure)
        peer.close()

    pair = peered(turns, {FinalBelow: Handler(handle)}, chunk=(65_536, 65_536))
    pair.link.to_server.stall()
    pair.peer.notify(FinalBelow(1))
    pair.peer.notify(FinalBelow(2))
    turns.settle()
    pair.link.to_server.flow()
    turns.settle()
    assert pair.back.is_closed
    assert got == [1]


# --- sockets ---------------------------------------------------------------------------------


async def test_the_kernel_is_asked_to_find_dead_hosts() -> None:
    async with connected(SocketNetwork(), address="127.0.0.1:0") as pair:
        for peer in (pair.peer, pair.back):
            sock = transport_of(peer).get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            host, port = peer.peername.rsplit(":", 1)
            assert host == "127.0.0.1"
            assert int(port) > 0


def test_what_a_system_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch, turns: Turns
) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    with socket.socket() as sock:
        connection, _, _ = up(socket=sock)
        assert connection.is_connected
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4


async def test_unix_sockets_get_room(tmp_path: Path) -> None:
    network, address = places(tmp_path)["unix"]()
    async with connected(network, address=address) as pair:
        sock = transport_of(pair.peer).get_extra_info("socket")
        with socket.socket(socket.AF_UNIX) as untouched:
            default = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            untouched.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
            most = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == most >= default
        assert pair.back.peername == "a Unix socket"


@pytest.mark.promise("input.peers-bounded")
@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_a_real_slow_reader_costs_a_bounded_write_buffer(place: str, tmp_path: Path) -> None:
    asked = asyncio.Semaphore(0)

    def counted(request: Request[Pull]) -> None:
        peer, message, segments = request.peer, request.message, request.segments
        asked.release()
        return values(peer, message, segments)

    network, address = places(tmp_path)[place]()
    async with connected(network, {Pull: Handler(counted)}, address=address) as pair:
        pair.peer.pause_reading()
        calls = [asyncio.create_task(pair.peer.call(pull(MIB))) for _ in range(40)]
        for _ in calls:
            await asked.acquire()
        unsent = transport_of(pair.back).get_write_buffer_size()
        assert WRITE_HIGH_BYTES < unsent <= WRITE_HIGH_BYTES + 2 * MIB
        pair.peer.resume_reading()
        for call in calls:
            assert len((await call).segments[0]) == MIB


async def test_a_peer_that_is_gone_at_once_does_no_harm() -> None:
    """It has reset the connection by the time that is accepted, or its options are set."""
    accepted = asyncio.Semaphore(0)

    def nonce(nbytes: int) -> bytes:
        accepted.release()
        return bytes(nbytes)

    endpoint = new_endpoint(SocketNetwork(), random_bytes=nonce)
    listener = await endpoint.listen("127.0.0.1:0")
    port = int(listener.address.rsplit(":", 1)[1])
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(100):
        await accepted.acquire()
    await wait_deserted(endpoint)
    await endpoint.close()


def test_a_frame_that_carries_64_kib_is_large() -> None:
    buffers = encode_frame(Kind.REPLY, 1, b"", [bytes(64 * KIB)])
    assert sum(map(len, buffers)) > 64 * KIB
