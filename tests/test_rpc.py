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
from endpoints import PLACES, PS, WORKER, Handlers, connected, done, places

from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FencedError,
    GradientError,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    WorkerLost,
)
from psync.rpc import Handler, Peer, Reply
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, encode
from psync.wire.frames import Kind, Segment, encode_frame
from psync.wire.limits import Limits
from psync.wire.messages import (
    AskStatistics,
    Assign,
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

KIB = 1 << 10
MIB = 1 << 20


def push(sequence: int = 1) -> Push:
    return Push(sequence, 0, -1, 0, 0, None, 0, None, 0)


def pull(set_id: int = 0) -> Pull:
    return Pull(set_id, None, -1, "")


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def views_of(array: np.ndarray) -> Callable[[Message, tuple[int, ...]], list[memoryview]]:
    return lambda message, lengths: [to_bytes_view(array)]


class Gate:
    """A handler that waits until it is told to answer, and counts who waits."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def __call__(self, peer: Peer, message: Any, segments: list[memoryview]) -> Reply:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(Done())


# --- requests and replies --------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_both_sides_ask_and_answer_on_one_connection(place: str, tmp_path: Path) -> None:
    def name(peer: Peer, message: FetchFunction, segments: list[memoryview]) -> Reply:
        return Reply(Function(f"{peer.task} asked for {message.key!r}"))

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

    def echo(peer: Peer, message: Push, segments: list[memoryview]) -> Reply:
        return Reply(Pushed("accepted", message.sequence), segments)

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

    def handle(peer: Peer, message: Push, segments: list[memoryview]) -> Reply | Awaitable[Reply]:
        if message.sequence % 3 == 0:
            return slow(message, segments)
        return Reply(Pushed("accepted", message.sequence), segments)

    async def ask(peer: Peer, sequence: int) -> None:
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


@pytest.mark.virtual_time
async def test_one_message_is_dealt_with_before_the_next_one_is_looked_at() -> None:
    """All are read at once, but no body is placed before the one before it was used."""
    order: list[str] = []

    def prepare(peer: Peer, message: Push, lengths: tuple[int, ...]) -> list[memoryview]:
        order.append(f"prepare {message.sequence}")
        return [memoryview(bytearray(length)) for length in lengths]

    def run(peer: Peer, message: Push, segments: list[memoryview]) -> Reply:
        order.append(f"run {message.sequence} {bytes(segments[0])!r}")
        return Reply(Done())

    network = MemoryNetwork(chunk=(65_536, 65_536))
    async with connected(network, {Push: Handler(run, prepare)}) as pair:
        await asyncio.gather(
            pair.peer.call(push(1), [b"a"]),
            pair.peer.call(push(2), [b"b"]),
            pair.peer.call(push(3), [b"c"]),
        )
    assert order == [
        "prepare 1", "run 1 b'a'", "prepare 2", "run 2 b'b'", "prepare 3", "run 3 b'c'",
    ]  # fmt: skip


# --- bodies that go where the caller wants them ----------------------------------------------


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_a_large_reply_is_read_straight_into_the_callers_array(
    place: str, tmp_path: Path
) -> None:
    source = np.arange(8 << 20, dtype=np.uint64)  # 64 MiB

    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        whole = to_bytes_view(source)
        return Reply(Pulled([]), [[whole[at : at + MIB] for at in range(0, len(whole), MIB)]])

    network, address = places(tmp_path)[place]()
    async with connected(network, {Pull: Handler(values)}, address=address, lane="bulk") as pair:
        destination = np.zeros_like(source)
        wire = pair.peer.connection.wire
        get_buffer, straight = wire.get_buffer, 0

        def watch() -> memoryview:
            nonlocal straight
            room = get_buffer()
            straight += np.shares_memory(np.frombuffer(room, np.uint8), destination)
            return room

        wire.get_buffer = watch  # type: ignore[method-assign]
        got = await pair.peer.call(pull(), into=views_of(destination))
        assert got.message == Pulled([])
        assert got.segments == []
        assert straight > 10
        np.testing.assert_array_equal(destination, source)


@pytest.mark.virtual_time
async def test_memory_for_a_reply_may_have_other_borders_than_its_segments() -> None:
    asked: list[tuple[Message, tuple[int, ...]]] = []
    destination = np.zeros(10, np.uint8)

    def into(message: Message, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        asked.append((message, lengths))
        return [to_bytes_view(destination[:7]), to_bytes_view(destination[7:])]

    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [b"0123", b"", b"456789"])

    async with connected(server={Pull: Handler(values)}) as pair:
        await pair.peer.call(pull(), into=into)
    assert asked == [(Pulled([]), (4, 0, 6))]
    assert destination.tobytes() == b"0123456789"


@pytest.mark.virtual_time
async def test_an_error_in_placing_a_reply_fails_that_call_alone() -> None:
    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [bytes(100 * KIB)])

    def broken(message: Message, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        raise GradientError("no room for this")

    async with connected(server={Pull: Handler(values)}) as pair:
        with pytest.raises(GradientError, match="no room for this"):
            await pair.peer.call(pull(), into=broken)
        with pytest.raises(LocalProtocolError) as caught:
            await pair.peer.call(pull(), into=views_of(np.zeros(99, np.uint8)))
        assert caught.value.message == "99 bytes of memory were given for a body of 102400"
        assert len((await pair.peer.call(pull())).segments[0]) == 100 * KIB


@pytest.mark.virtual_time
async def test_large_segments_are_recycled_once_nobody_sees_them() -> None:
    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [bytes(100 * KIB)])

    async with connected(server={Pull: Handler(values)}) as pair:
        first = await pair.peer.call(pull())
        second = await pair.peer.call(pull())
        assert pair.client.pool.statistics().hits == 0, "the first one is still in use"
        del first, second
        await pair.peer.call(pull())
        assert pair.client.pool.statistics().hits == 1


# --- giving up -------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_call_that_is_cancelled_midway_is_not_written_to_any_more() -> None:
    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [to_bytes_view(np.full(MIB, 7, np.uint8))])

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
async def test_the_peer_is_told_that_a_call_was_given_up() -> None:
    gate = Gate()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        call = asyncio.create_task(pair.peer.call(AskStatistics()))
        await settle()
        assert gate.begun == 1
        call.cancel()
        await settle()
        assert gate.cancelled == 1
        assert pair.back._serving == {}
        assert pair.peer._calls == {}


@pytest.mark.virtual_time
async def test_a_request_given_up_before_its_handler_began_leaves_nothing() -> None:
    """Request and cancellation arrive in one read: the handler's task has not begun yet.

    It begins nevertheless: what the handler noted before it returned its coroutine is undone there.
    """
    gate = Gate()
    noted: set[int] = set()
    futures: list[asyncio.Future[Reply]] = []

    async def undoing(sequence: int, answer: Awaitable[Reply]) -> Reply:
        try:
            return await answer
        finally:
            noted.remove(sequence)

    def handle(peer: Peer, message: Push, segments: list[memoryview]) -> Awaitable[Reply]:
        if message.sequence == 0:
            futures.append(asyncio.get_running_loop().create_future())
            return futures[0]
        noted.add(message.sequence)
        return undoing(message.sequence, gate(peer, message, segments))

    network = MemoryNetwork(chunk=(65_536, 65_536))
    async with connected(
        network, {Push: Handler(handle)}, limits=Limits(unfinished_bytes=500)
    ) as pair:
        (link,) = network.links()
        link.to_server.stall()
        for sequence in range(5):
            call = asyncio.create_task(pair.peer.call(push(sequence), [bytes(400)]))
            await settle()
            call.cancel()
        await settle()
        link.to_server.flow()
        await settle()
        assert gate.begun == gate.cancelled == 4
        assert noted == set()
        assert futures[0].cancelled()
        assert pair.back._unfinished_bytes == 0
        assert pair.back._serving == {}
        gate.open.set()
        assert (await pair.peer.call(push(9), [bytes(400)])).message == Done()


@pytest.mark.virtual_time
async def test_a_deadline_ends_a_call_and_not_the_connection() -> None:
    gate = Gate()
    loop = asyncio.get_running_loop()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        start = loop.time()
        with pytest.raises(DeadlineExceeded) as caught:
            await pair.peer.call(AskStatistics(), deadline=start + 2.5)
        assert loop.time() == start + 2.5
        assert caught.value.message == f"{PS} did not answer AskStatistics in time"
        assert isinstance(caught.value, TimeoutError)
        await settle()
        assert gate.cancelled == 1
        gate.open.set()
        await pair.peer.call(AskStatistics(), deadline=loop.time() + 1)
        await asyncio.sleep(10)  # the timer of a call that was answered is gone


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(10))
async def test_an_answer_that_comes_at_the_very_deadline_is_one_or_the_other(seed: int) -> None:
    async with connected(
        MemoryNetwork(seed, latency=(0.5, 0.5)),
        {AskStatistics: Handler(done), Pull: raising(GradientError("no"))},
    ) as pair:
        loop = asyncio.get_running_loop()
        for message in (AskStatistics(), pull()):
            with contextlib.suppress(DeadlineExceeded, GradientError):
                await pair.peer.call(message, deadline=loop.time() + 1.0)
            assert pair.peer._calls == {}
        await pair.peer.ping()


@pytest.mark.virtual_time
async def test_a_reply_to_a_call_that_was_given_up_is_ignored() -> None:
    """It had been sent already when the cancellation arrived."""

    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [bytes(message.set_id)])

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


@pytest.mark.virtual_time
@pytest.mark.parametrize("after", [0, 10, 40, 60 * KIB])
async def test_a_peer_that_dies_in_the_middle_of_a_message_is_named(after: int) -> None:
    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        (link,) = network.links()
        link.to_client.cut_after(after)
        return Reply(Pulled([]), [bytes(200 * KIB)])

    network = MemoryNetwork()
    async with connected(network, {Pull: Handler(values)}) as pair:
        with pytest.raises(ConnectionLost) as caught:
            await pair.peer.call(pull(), into=views_of(np.zeros(200 * KIB, np.uint8)))
        assert caught.value.message.startswith(f"the connection to {PS} was lost: ")
        assert isinstance(caught.value.__cause__, ConnectionResetError)
        assert pair.peer.is_closed


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_an_end_in_the_middle_of_a_message_is_told_apart(place: str, tmp_path: Path) -> None:
    """The peer's process ends in order, with half of a message said."""

    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        half = encode_frame(Kind.REPLY, 1, encode(Pulled([])), [bytes(200 * KIB)])[0]
        peer.connection._transport.write(half)
        peer.connection._transport.close()
        return Reply(Pulled([]))

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
        told: list[Peer] = []
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


@pytest.mark.virtual_time
async def test_repr_tells_how_a_connection_stands() -> None:
    gate = Gate()
    async with connected(server={AskStatistics: Handler(gate)}, lane="bulk") as pair:
        assert repr(pair.peer) == f"<Peer {PS} bulk open, 0 calls>"
        assert repr(pair.back) == f"<Peer {WORKER} bulk open, 0 calls>"
        call = asyncio.create_task(pair.peer.call(AskStatistics()))
        await asyncio.sleep(0)
        assert repr(pair.peer) == f"<Peer {PS} bulk open, 1 calls>"
        gate.open.set()
        await call
        pair.peer.close()
        await pair.peer.wait_closed()
        assert repr(pair.peer) == f"<Peer {PS} bulk closed, 0 calls>"


# --- errors ----------------------------------------------------------------------------------


def raising(error: Exception, *, slowly: bool = False) -> Handler:
    async def later() -> Reply:
        await asyncio.sleep(0)
        raise error

    def run(peer: Peer, message: Any, segments: list[memoryview]) -> Awaitable[Reply]:
        if slowly:
            return later()
        raise error

    return Handler(run)


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
async def test_errors_of_psync_come_back_as_themselves(slowly: bool) -> None:
    error = GradientError("shape (2,) instead of (3,)", hint="transpose it")
    async with connected(server={AskStatistics: raising(error, slowly=slowly)}) as pair:
        with pytest.raises(GradientError) as caught:
            await pair.peer.call(AskStatistics())
        assert str(caught.value) == "shape (2,) instead of (3,)\nhint: transpose it"
        assert pair.peer.is_open


@pytest.mark.virtual_time
async def test_an_error_about_a_third_task_names_that_task() -> None:
    error = WorkerLost("/job:worker/task:7")
    async with connected(server={AskStatistics: raising(error)}) as pair:
        with pytest.raises(WorkerLost) as caught:
            await pair.peer.call(AskStatistics())
        assert caught.value.task == "/job:worker/task:7"


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
async def test_other_errors_come_back_with_their_traceback(slowly: bool) -> None:
    error = ZeroDivisionError("integer division")
    async with connected(server={AskStatistics: raising(error, slowly=slowly)}) as pair:
        with pytest.raises(RemoteError) as caught:
            await pair.peer.call(AskStatistics())
        assert caught.value.message == f"ZeroDivisionError on {PS}: integer division"
        assert caught.value.task == PS
        assert "raise error" in caught.value.traceback_text
        assert pair.peer.is_open


@pytest.mark.virtual_time
async def test_a_handler_that_was_cancelled_by_somebody_else_still_answers() -> None:
    async def handle(peer: Peer, message: Any, segments: list[memoryview]) -> Reply:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner
        raise AssertionError

    async with connected(server={AskStatistics: Handler(handle)}) as pair:
        with pytest.raises(RemoteError, match=f"CancelledError on {PS}"):
            await pair.peer.call(AskStatistics())


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
async def test_a_request_is_never_left_without_an_answer(slowly: bool) -> None:
    async def nothing() -> None:
        pass

    def handle(peer: Peer, message: Any, segments: list[memoryview]) -> Any:
        return nothing() if slowly else None

    async with connected(server={AskStatistics: Handler(handle)}) as pair:
        with pytest.raises(LocalProtocolError, match="the handler of a request gave no reply"):
            await pair.peer.call(AskStatistics())


@pytest.mark.virtual_time
async def test_a_request_above_the_limits_is_not_sent() -> None:
    limits = Limits(header_bytes=2000, segment_bytes=100)
    async with connected(server={Push: Handler(done)}, limits=limits) as pair:
        before = pair.peer.connection.bytes_sent
        for send in (pair.peer.call, pair.peer.notify):
            with pytest.raises(LocalProtocolError) as caught:
                await send(push(), [bytes(101)])  # type: ignore[func-returns-value,misc]
            assert caught.value.message == "segment of 101 bytes, at most 100 are allowed"
            assert caught.value.__notes__ == [f"while sending Push to {PS}"]
        with pytest.raises(LocalProtocolError, match="header of 3005 bytes, at most 2000"):
            await pair.peer.call(FetchFunction(bytes(3000)))
        assert pair.peer.connection.bytes_sent == before
        assert pair.peer._calls == {}
        assert (await pair.peer.call(push(), [bytes(100)])).message == Done()


@pytest.mark.virtual_time
async def test_a_reply_above_the_limits_is_an_error_to_the_caller() -> None:
    def values(peer: Peer, message: Pull, segments: list[memoryview]) -> Reply:
        return Reply(Pulled([]), [bytes(101)])

    async with connected(server={Pull: Handler(values)}, limits=Limits(segment_bytes=100)) as pair:
        with pytest.raises(LocalProtocolError, match="segment of 101 bytes, at most 100"):
            await pair.peer.call(pull())
        assert pair.peer.is_open


# --- prepare ---------------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize("size", [0, 10, 300 * KIB])
async def test_prepare_says_where_a_body_belongs(size: int) -> None:
    memory = bytearray(size)
    asked: list[tuple[int, ...]] = []

    def prepare(peer: Peer, message: Push, lengths: tuple[int, ...]) -> list[memoryview]:
        asked.append(lengths)
        return [memoryview(memory)]

    def run(peer: Peer, message: Push, segments: list[memoryview]) -> Reply:
        assert len(segments) == 1
        assert segments[0].obj is memory
        return Reply(Done())

    async with connected(server={Push: Handler(run, prepare)}) as pair:
        body = pattern(size)
        await pair.peer.call(push(), [to_bytes_view(body), b""])
    assert asked == [(size, 0)]
    assert bytes(memory) == body.tobytes()


@pytest.mark.virtual_time
@pytest.mark.parametrize("size", [0, 10, 300 * KIB])
async def test_a_body_that_prepare_refuses_is_thrown_away(size: int) -> None:
    refusals: list[Exception] = [
        GradientError("too large", hint="make it smaller"),
        ZeroDivisionError("a mistake"),
    ]

    def prepare(peer: Peer, message: Push, lengths: tuple[int, ...]) -> list[memoryview]:
        raise refusals[message.sequence]

    def run(peer: Peer, message: Push, segments: list[memoryview]) -> Reply:
        raise AssertionError("the message was refused")

    async with connected(
        server={Push: Handler(run, prepare), AskStatistics: Handler(done)}
    ) as pair:
        with pytest.raises(GradientError, match="too large\nhint: make it smaller"):
            await pair.peer.call(push(0), [bytes(size)])
        with pytest.raises(RemoteError, match=r"ZeroDivisionError on .*: a mistake"):
            await pair.peer.call(push(1), [bytes(size)])
        assert (await pair.peer.call(AskStatistics())).message == Done()


@pytest.mark.virtual_time
async def test_memory_of_the_wrong_size_from_prepare_is_an_error_to_the_caller() -> None:
    handler = Handler(done, lambda peer, message, lengths: [memoryview(bytearray(5))])
    async with connected(server={Push: handler}) as pair:
        with pytest.raises(
            LocalProtocolError, match="5 bytes of memory were given for a body of 6"
        ):
            await pair.peer.call(push(), [bytes(6)])
        assert (await pair.peer.call(push(), [bytes(5)])).message == Done()


# --- notifications ---------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_notifications_are_dealt_with_in_order_and_not_answered() -> None:
    got: list[tuple[int, bytes]] = []

    async def later(message: Assign, segments: list[memoryview]) -> None:
        await asyncio.sleep(1)
        got.append((message.sequence, bytes(segments[0])))

    def handle(peer: Peer, message: Assign, segments: list[memoryview]) -> Awaitable[None] | None:
        if message.op == "add":
            return later(message, segments)
        got.append((message.sequence, bytes(segments[0])))
        return None

    async with connected(server={Assign: Handler(handle)}) as pair:  # type: ignore[arg-type]
        before = pair.peer.connection.bytes_received
        for sequence, op in ((1, "assign"), (2, "add"), (3, "sub")):
            pair.peer.notify(Assign(sequence, 0, -1, 0, 0, None, op), [b"%d" % sequence])
        await asyncio.sleep(2)
        assert got == [(1, b"1"), (3, b"3"), (2, b"2")]
        assert pair.peer.connection.bytes_received == before


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("unforeseen", [False, True])
async def test_a_notification_that_fails_ends_the_connection_with_a_log(
    slowly: bool, unforeseen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for an answer, and what it was about would be lost silently."""
    error = ZeroDivisionError("oops") if unforeseen else FencedError("replaced")
    async with connected(server={FinalBelow: raising(error, slowly=slowly)}) as pair:
        pair.peer.notify(FinalBelow(1))
        await pair.peer.wait_closed()
        await pair.back.wait_closed()
        assert pair.back.error is error
    if unforeseen:
        assert [record.message for record in caplog.records] == [f"a message of {WORKER} failed"]
        assert caplog.records[0].exc_info is not None
    else:
        assert [record.message.split(" (")[0] for record in caplog.records] == [
            f"{PS} lost {WORKER}"
        ]
        assert caplog.records[0].message.endswith(": replaced")


@pytest.mark.virtual_time
async def test_a_notification_that_prepare_refuses_ends_the_connection() -> None:
    def prepare(peer: Peer, message: Push, lengths: tuple[int, ...]) -> list[memoryview]:
        raise FencedError("replaced")

    async with connected(server={Push: Handler(done, prepare)}) as pair:
        pair.peer.notify(push(), [bytes(10)])
        await pair.back.wait_closed()
        assert isinstance(pair.back.error, FencedError)


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


@pytest.mark.virtual_time
async def test_a_peer_that_is_stopped_does_not_answer() -> None:
    network = MemoryNetwork()
    async with connected(network) as pair:
        (link,) = network.links()
        link.to_server.stall()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await pair.peer.ping()
        link.to_server.flow()
        await pair.peer.ping()


# --- back-pressure ---------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_requests_are_read_only_while_the_handlers_bodies_fit_the_limit() -> None:
    gate = Gate()
    limits = Limits(unfinished_bytes=250 * KIB)
    network = MemoryNetwork()
    async with connected(network, {Push: Handler(gate)}, limits=limits) as pair:
        calls = [
            asyncio.create_task(pair.peer.call(push(number), [bytes(100 * KIB)]))
            for number in range(20)
        ]
        await settle()
        assert gate.begun == 3
        assert pair.back._unfinished_bytes == 300 * KIB
        (link,) = network.links()
        assert link.to_server.delivered_bytes < 500 * KIB
        gate.open.set()
        await asyncio.gather(*calls)
        assert gate.begun == 20
        assert pair.back._unfinished_bytes == 0


@pytest.mark.virtual_time
async def test_a_request_larger_than_that_limit_is_served_nevertheless() -> None:
    gate = Gate()
    limits = Limits(unfinished_bytes=100)
    async with connected(server={Push: Handler(gate)}, limits=limits) as pair:
        calls = [
            asyncio.create_task(pair.peer.call(push(number), [bytes(size)]))
            for number, size in enumerate((60, 300 * KIB, 60, 300 * KIB))
        ]
        await settle()
        gate.open.set()
        await asyncio.gather(*calls)


@pytest.mark.virtual_time
async def test_two_sides_full_of_each_others_requests_do_not_wait_for_ever() -> None:
    async def echo(peer: Peer, message: Push, segments: list[memoryview]) -> Reply:
        await asyncio.sleep(0.1)
        return Reply(Done(), segments)

    handlers: Handlers = {Push: Handler(echo)}
    limits = Limits(unfinished_bytes=100 * KIB)
    network = MemoryNetwork(kernel_bytes=4096)
    async with connected(network, handlers, handlers, limits=limits) as pair:
        await asyncio.gather(
            *(
                peer.call(push(number), [bytes(80 * KIB)])
                for peer in (pair.peer, pair.back)
                for number in range(100)
            )
        )


@pytest.mark.virtual_time
async def test_plain_handlers_do_not_count() -> None:
    limits = Limits(unfinished_bytes=100)
    async with connected(server={Push: Handler(done)}, limits=limits) as pair:
        await asyncio.gather(*(pair.peer.call(push(n), [bytes(1000)]) for n in range(50)))
        assert not pair.back._reading_paused


# --- what a peer must not do -----------------------------------------------------------------


def raw(
    kind: Kind, request_id: int, message: Message | bytes, segments: Sequence[Segment] = ()
) -> Callable[[Peer], None]:
    header = message if isinstance(message, bytes) else encode(message)
    return lambda peer: peer.connection.send(encode_frame(kind, request_id, header, segments))


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
    misbehave: Callable[[Peer], None], told: str, caplog: pytest.LogCaptureFixture
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


@pytest.mark.virtual_time
async def test_a_request_id_is_not_used_twice_at_once() -> None:
    gate = Gate()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        raw(Kind.REQUEST, 5, AskStatistics())(pair.peer)
        raw(Kind.REQUEST, 5, AskStatistics())(pair.peer)
        await pair.back.wait_closed()
        assert isinstance(pair.back.error, RemoteProtocolError)
        assert pair.back.error.message == "request id 5 cannot be used"
        gate.open.set()


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("kind", "header", "segments", "told"),
    [
        (Kind.REPLY, b"\xc1", [], "header is not valid msgpack: FormatError"),
        (Kind.REPLY, b"\xc1", [b"x"], "header is not valid msgpack: FormatError"),
        (Kind.ERROR, b"\xc1", [], "header is not valid msgpack: FormatError"),
        (Kind.ERROR, encode(Done()), [], "got Done in a frame ERROR"),
    ],
)
async def test_a_call_whose_answer_is_nonsense_fails(
    kind: Kind, header: bytes, segments: list[bytes], told: str
) -> None:
    def nonsense(peer: Peer, message: Any, _: list[memoryview]) -> Awaitable[Reply]:
        peer.connection.send(encode_frame(kind, 1, header, segments))
        return asyncio.get_running_loop().create_future()

    async with connected(server={AskStatistics: Handler(nonsense)}) as pair:
        with pytest.raises(ConnectionLost) as caught:
            await pair.peer.call(AskStatistics(), into=lambda *_: [memoryview(bytearray(1))])
        assert caught.value.message == f"the connection to {PS} was lost: {told}"
        assert isinstance(caught.value.__cause__, RemoteProtocolError)


@pytest.mark.virtual_time
async def test_answers_that_nobody_waits_for_are_ignored() -> None:
    async with connected(server={AskStatistics: Handler(done)}) as pair:
        for misbehave in (
            raw(Kind.REPLY, 99, Done()),
            raw(Kind.REPLY, 99, Pulled([]), [bytes(200 * KIB)]),
            raw(Kind.ERROR, 99, Done()),
            raw(Kind.CANCEL, 99, b""),
            raw(Kind.PONG, 0, b""),
        ):
            misbehave(pair.back)
            misbehave(pair.peer)
        await pair.peer.ping()
        assert (await pair.peer.call(AskStatistics())).message == Done()
