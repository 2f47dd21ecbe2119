"""Requests and replies: both ways, large and small, and whatever can go wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asked import Reply
from endpoints import (
    PLACES,
    PS,
    WORKER,
    Gate,
    Handlers,
    connected,
    done,
    pattern,
    places,
    push,
    raising,
    transport_of,
)
from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    ValueMismatchError,
)
from psync.net.connection import Connection, Handler, Into, Request
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, encode
from psync.wire.frames import FrameDecoder, Kind, Segment, encode_frame
from psync.wire.limits import Limits
from psync.wire.messages import (
    AskStatistics,
    Done,
    FetchFunction,
    FinalBelow,
    Function,
    Hello,
    Pull,
    Pulled,
    Push,
    Pushed,
    Statistics,
)
from psync.wire.tensors import to_bytes_view
from turns import Turns, peered

KIB = 1 << 10
MIB = 1 << 20


def pull(set_id: int = 0) -> Pull:
    return Pull(set_id, None, -1, "")


def views_of(array: np.ndarray) -> Into:
    return lambda message, lengths, lent: [to_bytes_view(array)]


# --- requests and replies --------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_both_sides_ask_and_answer_on_one_connection(place: str, tmp_path: Path) -> None:
    def name(request: Request[FetchFunction]) -> None:
        peer, message = request.peer, request.message
        request.answer(Function(f"{peer.task} asked for {message.key!r}"))

    network, address = places(tmp_path)[place]()
    handlers: Handlers = {FetchFunction: Handler(name)}
    async with connected(network, handlers, handlers, address=address) as pair:
        there = await pair.peer.call(FetchFunction(b"f"))
        back = await pair.back.call(FetchFunction(b"g"))
        assert there.message == Function(f"{WORKER} asked for b'f'")
        assert back.message == Function(f"{PS} asked for b'g'")
        assert there.segments == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sizes", [[], [0], [5], [0, 3, 0], [70 * KIB], [70 * KIB, 0, 1], [MIB, 9]])
async def test_bodies_of_every_size_arrive_whole(
    place: str, sizes: list[int], tmp_path: Path
) -> None:
    """They are echoed: a request's body comes back as the body of its reply."""

    def echo(request: Request[Push]) -> None:
        message, segments = request.message, request.segments
        request.answer(Pushed("accepted", message.sequence), segments)

    network, address = places(tmp_path)[place]()
    async with connected(network, {Push: Handler(echo)}, address=address) as pair:
        for sequence in (1, 2):
            sent = [pattern(size, seed=index) for index, size in enumerate(sizes)]
            got = await pair.peer.call(push(sequence), [to_bytes_view(part) for part in sent])
            assert got.message == Pushed("accepted", sequence)
            assert [bytes(segment) for segment in got.segments] == [part.tobytes() for part in sent]


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(3))
async def test_many_calls_at_once_each_get_their_own_reply(seed: int) -> None:
    async def slow(message: Push, segments: list[memoryview]) -> Reply:
        await asyncio.sleep(message.sequence % 7 / 10)
        return Reply(Pushed("accepted", message.sequence), segments)

    def handle(
        peer: Connection, message: Push, segments: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        if message.sequence % 3 == 0:
            return slow(message, segments)
        return Reply(Pushed("accepted", message.sequence), segments)

    async def ask(peer: Connection, sequence: int) -> None:
        body = pattern(sequence * 997 % 150_000, seed=sequence)
        got = await peer.call(push(sequence), [to_bytes_view(body)])
        assert got.message == Pushed("accepted", sequence)
        assert bytes(got.segments[0]) == body.tobytes()

    handlers: Handlers = {Push: Handler(handle)}
    network = MemoryNetwork(seed, latency=(0.0, 0.01))
    async with connected(network, handlers, handlers) as pair, asyncio.TaskGroup() as group:
        for sequence in range(1, 60):
            group.create_task(ask(pair.peer, sequence))
            group.create_task(ask(pair.back, sequence))


def test_one_message_is_dealt_with_before_the_next_one_is_looked_at(turns: Turns) -> None:
    """All are read at once, but no body is placed before the one before it was used."""
    order: list[str] = []

    def prepare(request: Request[Push]) -> list[memoryview]:
        message, lengths = request.message, request.lengths
        order.append(f"prepare {message.sequence}")
        return [memoryview(bytearray(length)) for length in lengths]

    def run(request: Request[Push]) -> None:
        message, segments = request.message, request.segments
        order.append(f"run {message.sequence} {bytes(segments[0])!r}")
        request.answer(Done())

    pair = peered(turns, {Push: Handler(run, prepare)}, chunk=(65_536, 65_536))
    for sequence, body in ((1, b"a"), (2, b"b"), (3, b"c")):
        pair.peer.ask(push(sequence), [body], lambda answer: None)
    turns.settle()
    assert order == [
        "prepare 1", "run 1 b'a'", "prepare 2", "run 2 b'b'", "prepare 3", "run 3 b'c'",
    ]  # fmt: skip


@pytest.mark.virtual_time
async def test_the_first_request_is_written_at_once_and_others_share_a_turn() -> None:
    async with connected(server={AskStatistics: Handler(done)}) as pair:
        sent = [pair.peer.bytes_sent]
        calls = []
        for _ in range(3):
            call = asyncio.ensure_future(pair.peer.call(AskStatistics()))
            calls.append(call)
        asyncio.get_running_loop().call_soon(
            lambda: sent.append(pair.peer.bytes_sent)
        )  # when all three have been made
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent.append(pair.peer.bytes_sent)
        first, others = sent[1] - sent[0], sent[2] - sent[1]
        assert others == 2 * first > 0
        for call in calls:
            assert (await call).message == Done()
        call = asyncio.ensure_future(pair.peer.call(AskStatistics()))
        await asyncio.sleep(0)
        assert pair.peer.bytes_sent == sent[2] + first  # it is the first again
        await call


@pytest.mark.virtual_time
async def test_a_request_above_the_limits_is_not_sent() -> None:
    limits = Limits(header_bytes=2000, segment_bytes=100)
    async with connected(server={Push: Handler(done)}, limits=limits) as pair:
        before = pair.peer.bytes_sent
        for send in (pair.peer.call, pair.peer.notify):
            with pytest.raises(LocalProtocolError) as caught:
                await send(push(), [bytes(101)])  # type: ignore[func-returns-value,misc]
            assert caught.value.message == "segment of 101 bytes, at most 100 are allowed"
            assert caught.value.__notes__ == [f"while sending Push to {PS}"]
        with pytest.raises(LocalProtocolError, match="header of 3005 bytes, at most 2000"):
            await pair.peer.call(FetchFunction(bytes(3000)))
        assert pair.peer.bytes_sent == before
        assert pair.peer.statistics()["calls"] == 0
        assert (await pair.peer.call(push(), [bytes(100)])).message == Done()


# --- bodies that go where the caller wants them ----------------------------------------------


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_a_large_reply_is_read_straight_into_the_callers_array(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.arange(8 << 20, dtype=np.uint64)  # 64 MiB

    def values(request: Request[Pull]) -> None:
        whole = to_bytes_view(source)
        request.answer(Pulled([]), [[whole[at : at + MIB] for at in range(0, len(whole), MIB)]])

    destination = np.zeros_like(source)
    get_buffer, straight = FrameDecoder.get_buffer, 0

    def watch(decoder: FrameDecoder, sizehint: int) -> memoryview:
        nonlocal straight
        room = get_buffer(decoder, sizehint)
        straight += np.shares_memory(np.frombuffer(room, np.uint8), destination)
        return room

    monkeypatch.setattr(FrameDecoder, "get_buffer", watch)
    network, address = places(tmp_path)[place]()
    async with connected(network, {Pull: Handler(values)}, address=address, lane="bulk") as pair:
        got = await pair.peer.call(pull(), into=views_of(destination))
        assert got.message == Pulled([])
        assert got.segments == []
        assert straight > 10
        np.testing.assert_array_equal(destination, source)


def test_memory_for_a_reply_may_have_other_borders_than_its_segments(turns: Turns) -> None:
    asked: list[tuple[Message, tuple[int, ...]]] = []
    destination = np.zeros(10, np.uint8)

    def into(message: Message, lengths: tuple[int, ...], lent: object) -> Sequence[memoryview]:
        asked.append((message, lengths))
        return [to_bytes_view(destination[:7]), to_bytes_view(destination[7:])]

    def values(request: Request[Pull]) -> None:
        request.answer(Pulled([]), [b"0123", b"", b"456789"])

    peered(turns, {Pull: Handler(values)}).ask(pull(), into=into)
    assert asked == [(Pulled([]), (4, 0, 6))]
    assert destination.tobytes() == b"0123456789"


def test_an_error_in_placing_a_reply_fails_that_call_alone(turns: Turns) -> None:
    def values(request: Request[Pull]) -> None:
        request.answer(Pulled([]), [bytes(100 * KIB)])

    def broken(message: Message, lengths: tuple[int, ...], lent: object) -> Sequence[memoryview]:
        raise ValueMismatchError("no room for this")

    pair = peered(turns, {Pull: Handler(values)})
    with pytest.raises(ValueMismatchError, match="no room for this"):
        pair.ask(pull(), into=broken)
    with pytest.raises(LocalProtocolError) as caught:
        pair.ask(pull(), into=views_of(np.zeros(99, np.uint8)))
    assert caught.value.message == "99 bytes of memory were given for a body of 102400"
    assert len(pair.ask(pull()).segments[0]) == 100 * KIB


def test_large_segments_are_recycled_once_nobody_sees_them(turns: Turns) -> None:
    def values(request: Request[Pull]) -> None:
        request.answer(Pulled([]), [bytes(100 * KIB)])

    pair = peered(turns, {Pull: Handler(values)})
    first = pair.ask(pull())
    second = pair.ask(pull())
    assert pair.pool.statistics().hits == 0, "the first one is still in use"
    del first, second
    pair.ask(pull())
    assert pair.pool.statistics().hits == 1


# --- giving up -------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_call_that_is_cancelled_midway_is_not_written_to_any_more() -> None:
    def values(request: Request[Pull]) -> None:
        request.answer(Pulled([]), [to_bytes_view(np.full(MIB, 7, np.uint8))])

    network = MemoryNetwork(chunk=(10_000, 20_000))
    async with connected(network, {Pull: Handler(values), AskStatistics: Handler(done)}) as pair:
        (link,) = network.links()
        half = asyncio.Event()

        def trace(_: object, direction: str, nbytes: int) -> None:
            if link.to_client.delivered_bytes > MIB // 2 and not half.is_set():
                link.to_client.stall()
                half.set()

        network.trace_deliveries(trace)
        destination = np.zeros(MIB, np.uint8)
        call = asyncio.create_task(pair.peer.call(pull(), into=views_of(destination)))
        await half.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        arrived = np.count_nonzero(destination)
        assert 0 < arrived < MIB
        link.to_client.flow()
        await pair.peer.call(AskStatistics())  # behind the rest of the body
        assert np.count_nonzero(destination) == arrived
        again = np.zeros(MIB, np.uint8)
        await pair.peer.call(pull(), into=views_of(again))
        assert np.all(again == 7)


@pytest.mark.virtual_time
@pytest.mark.parametrize("deadline_s", [2.5, None], ids=["in time", "cancelled"])
async def test_the_peer_is_told_that_a_call_was_given_up(deadline_s: float | None) -> None:
    gate = Gate()
    loop = asyncio.get_running_loop()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        start = loop.time()
        deadline = None if deadline_s is None else start + deadline_s
        call = asyncio.create_task(pair.peer.call(AskStatistics(), deadline=deadline))
        await settle()
        assert gate.begun == 1
        if deadline is None:
            call.cancel()
            await settle()
        else:
            with pytest.raises(DeadlineExceeded) as caught:
                await call
            assert loop.time() == deadline
            within = f"within {deadline_s:g} s"
            assert caught.value.message == f"{PS} did not answer AskStatistics {within}"
            assert isinstance(caught.value, TimeoutError)
            await settle()
        assert gate.cancelled == 1
        assert pair.back.statistics()["serving"] == 0
        assert pair.peer.statistics()["calls"] == 0
        gate.open.set()
        await pair.peer.call(AskStatistics(), deadline=loop.time() + 1)
        await asyncio.sleep(10)  # the timer of a call that was answered is gone


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(10))
async def test_an_answer_that_comes_at_the_very_deadline_is_one_or_the_other(seed: int) -> None:
    async with connected(
        MemoryNetwork(seed, latency=(0.5, 0.5)),
        {AskStatistics: Handler(done), Pull: raising(ValueMismatchError("no"))},
    ) as pair:
        loop = asyncio.get_running_loop()
        for message in (AskStatistics(), pull()):
            with contextlib.suppress(DeadlineExceeded, ValueMismatchError):
                await pair.peer.call(message, deadline=loop.time() + 1.0)
            assert pair.peer.statistics()["calls"] == 0
        await pair.peer.ping()


@pytest.mark.virtual_time
async def test_a_reply_to_a_call_that_was_given_up_is_ignored() -> None:
    """It had been sent already when the cancellation arrived."""

    def values(request: Request[Pull]) -> None:
        message = request.message
        request.answer(Pulled([]), [bytes(message.set_id)])

    network = MemoryNetwork()
    async with connected(network, {Pull: Handler(values)}) as pair:
        (link,) = network.links()
        for size in (0, 10, 200 * KIB):
            link.to_client.stall()
            call = asyncio.create_task(pair.peer.call(pull(size)))
            await settle()
            call.cancel()
            await settle()
            link.to_client.flow()
            await settle()
        assert len((await pair.peer.call(pull(5))).segments[0]) == 5


@pytest.mark.virtual_time
async def test_a_call_cancelled_and_lost_in_the_same_turn_is_quiet() -> None:
    gate = Gate()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        call = asyncio.create_task(pair.peer.call(AskStatistics()))
        ping = asyncio.create_task(pair.peer.ping())
        await settle()
        pair.peer.closed(None)
        call.cancel()
        ping.cancel()
        await asyncio.wait([call, ping])


# --- the connection goes ---------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 10, 40, 60 * KIB])
def test_a_peer_that_dies_in_the_middle_of_a_message_is_named(turns: Turns, after: int) -> None:
    def values(request: Request[Pull]) -> None:
        pair.link.to_client.cut_after(after)
        request.answer(Pulled([]), [bytes(200 * KIB)])

    pair = peered(turns, {Pull: Handler(values)})
    with pytest.raises(ConnectionLost) as caught:
        pair.ask(pull(), into=views_of(np.zeros(200 * KIB, np.uint8)))
    assert caught.value.message.startswith(f"the connection to {PS} was lost: ")
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert pair.peer.is_closed


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_an_end_in_the_middle_of_a_message_is_told_apart(place: str, tmp_path: Path) -> None:
    """The peer's process ends in order, with half of a message said."""

    def values(request: Request[Pull]) -> None:
        peer = request.peer
        half = encode_frame(Kind.REPLY, 1, encode(Pulled([])), [bytes(200 * KIB)])[0]
        transport_of(peer).write(half)
        transport_of(peer).close()
        request.answer(Pulled([]))

    network, address = places(tmp_path)[place]()
    async with connected(network, {Pull: Handler(values)}, address=address) as pair:
        with pytest.raises(ConnectionLost) as caught:
            await pair.peer.call(pull())
        assert caught.value.message == (
            f"the connection to {PS} was lost: "
            "the peer closed the connection in the middle of a message"
        )


@pytest.mark.virtual_time
async def test_every_open_call_and_ping_fails_with_the_connection() -> None:
    gate = Gate()
    network = MemoryNetwork()
    async with connected(network, {AskStatistics: Handler(gate)}) as pair:
        waiting = [asyncio.create_task(pair.peer.call(AskStatistics())) for _ in range(3)]
        network.links()[0].to_client.stall()
        waiting.append(asyncio.create_task(pair.peer.ping()))  # type: ignore[arg-type]
        await settle()
        told: list[Connection] = []
        pair.peer.on_closed.append(told.append)
        pair.peer.abort(ConnectionLost("it was silent for 15 s"))
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, ConnectionLost)
            assert result.message == f"the connection to {PS} was lost: it was silent for 15 s"
        assert told == [pair.peer]
        for attempt in (pair.peer.call(AskStatistics()), pair.peer.ping()):
            with pytest.raises(ConnectionLost, match="was lost: it was silent for 15 s"):
                await attempt  # type: ignore[misc]
        pair.peer.notify(FinalBelow(1))  # lost without a word
        gate.open.set()


@pytest.mark.virtual_time
async def test_a_call_on_a_connection_that_we_closed_says_so() -> None:
    async with connected() as pair:
        pair.peer.close()
        with pytest.raises(ConnectionLost) as caught:
            await pair.peer.call(AskStatistics())
        assert caught.value.message == f"the connection to {PS} was closed"
        await pair.peer.wait_closed()
        with pytest.raises(ConnectionLost, match=f"the connection to {PS} was closed"):
            await pair.peer.ping()


@pytest.mark.virtual_time
async def test_a_handler_goes_on_when_its_caller_is_gone() -> None:
    gate = Gate()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        call = asyncio.create_task(pair.peer.call(AskStatistics()))
        await settle()
        pair.peer.abort()
        await asyncio.wait([call])
        assert isinstance(call.exception(), ConnectionLost)
        await settle()
        assert pair.back.is_closed
        gate.open.set()
        await settle()
        assert gate.cancelled == 0


def test_repr_tells_how_a_connection_stands(turns: Turns) -> None:
    answer = Later(lambda later: None)
    pair = peered(turns, {AskStatistics: Handler(lambda *_: answer)}, lane="bulk")
    assert repr(pair.peer) == f"<Connection {PS} bulk open, 0 calls>"
    assert repr(pair.back) == f"<Connection {WORKER} bulk open, 0 calls>"
    pair.peer.ask(AskStatistics(), (), lambda answer: None)
    turns.settle()
    assert repr(pair.peer) == f"<Connection {PS} bulk open, 1 calls>"
    answer.give(Reply(Done()))
    turns.settle()
    pair.peer.close()
    turns.settle()
    assert repr(pair.peer) == f"<Connection {PS} bulk closed, 0 calls>"


# --- pings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_pings_are_answered_both_ways(place: str, tmp_path: Path) -> None:
    network, address = places(tmp_path)[place]()
    async with connected(network, address=address) as pair:
        await pair.peer.ping()
        await asyncio.gather(pair.peer.ping(), pair.peer.ping(), pair.back.ping())


@pytest.mark.virtual_time
async def test_a_ping_given_up_does_not_take_the_answer_of_the_next_one() -> None:
    network = MemoryNetwork(latency=(0.6, 0.6))
    loop = asyncio.get_running_loop()
    async with connected(network) as pair:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pair.peer.ping()
        start = loop.time()
        await pair.peer.ping()
        assert loop.time() - start == pytest.approx(1.2)


# --- what a peer must not do -----------------------------------------------------------------


def raw(
    kind: Kind, request_id: int, message: Message | bytes, segments: Sequence[Segment] = ()
) -> Callable[[Connection], None]:
    header = message if isinstance(message, bytes) else encode(message)
    return lambda peer: peer.send(encode_frame(kind, request_id, header, segments))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("misbehave", "told"),
    [
        (raw(Kind.REQUEST, 1, Statistics({})), "this task does not serve Statistics"),
        (raw(Kind.NOTIFY, 0, Statistics({})), "this task does not serve Statistics"),
        (raw(Kind.REQUEST, 1, Done(), [bytes(MIB)]), "this task does not serve Done"),
        (raw(Kind.REQUEST, 0, AskStatistics()), "request id 0 cannot be used"),
        (raw(Kind.NOTIFY, 7, AskStatistics()), "request id 7 cannot be used"),
        (raw(Kind.REQUEST, 1, b"\xc1"), "header is not valid msgpack: FormatError"),
        (raw(Kind.REQUEST, 1, b"\xc1", [b"x"]), "header is not valid msgpack: FormatError"),
        (raw(Kind.PING, 0, b"", [b"x"]), "got a frame PING with a body"),
        (raw(Kind.ERROR, 1, Done(), [b"x"]), "got a frame ERROR with a body"),
        (
            raw(Kind.HELLO, 0, Hello(1, 1, PS, 1, "bulk", bytes(32), True)),
            "got a frame HELLO after the handshake",
        ),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_dropped(
    misbehave: Callable[[Connection], None], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server={AskStatistics: Handler(done)}) as pair:
        misbehave(pair.peer)
        await pair.back.wait_closed()
        assert isinstance(pair.back.error, RemoteProtocolError)
        assert pair.back.error.message == told
        await pair.peer.wait_closed()
        other = await pair.client.connect("ps0:1", PS)
        assert (await other.call(AskStatistics())).message == Done(), "the task lives on"
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].message.endswith(f": {told}")


def test_a_request_id_is_not_used_twice_at_once(turns: Turns) -> None:
    pair = peered(turns, {AskStatistics: Handler(lambda *_: Later(lambda later: None))})
    raw(Kind.REQUEST, 5, AskStatistics())(pair.peer)
    raw(Kind.REQUEST, 5, AskStatistics())(pair.peer)
    turns.settle()
    assert isinstance(pair.back.error, RemoteProtocolError)
    assert pair.back.error.message == "request id 5 cannot be used"


@pytest.mark.parametrize(
    ("kind", "header", "segments", "told"),
    [
        (Kind.REPLY, b"\xc1", [], "header is not valid msgpack: FormatError"),
        (Kind.REPLY, b"\xc1", [b"x"], "header is not valid msgpack: FormatError"),
        (Kind.ERROR, b"\xc1", [], "header is not valid msgpack: FormatError"),
        (Kind.ERROR, encode(Done()), [], "got Done in a frame ERROR"),
    ],
)
def test_a_call_whose_answer_is_nonsense_fails(
    turns: Turns, kind: Kind, header: bytes, segments: list[bytes], told: str
) -> None:
    def nonsense(request: Request[Any]) -> None:
        peer = request.peer
        peer.send(encode_frame(kind, 1, header, segments))
        return Later(lambda later: None)

    pair = peered(turns, {AskStatistics: Handler(nonsense)})
    with pytest.raises(ConnectionLost) as caught:
        pair.ask(AskStatistics(), into=lambda *_: [memoryview(bytearray(1))])
    assert caught.value.message == f"the connection to {PS} was lost: {told}"
    assert isinstance(caught.value.__cause__, RemoteProtocolError)


def test_answers_that_nobody_waits_for_are_ignored(turns: Turns) -> None:
    pair = peered(turns, {AskStatistics: Handler(done)})
    for misbehave in (
        raw(Kind.REPLY, 99, Done()),
        raw(Kind.REPLY, 99, Pulled([]), [bytes(200 * KIB)]),
        raw(Kind.ERROR, 99, Done()),
        raw(Kind.CANCEL, 99, b""),
        raw(Kind.PONG, 0, b""),
    ):
        misbehave(pair.back)
        misbehave(pair.peer)
    turns.settle()
    assert pair.peer.is_open
    assert pair.back.is_open
    assert pair.ask(AskStatistics()).message == Done()
