"""Requests of a peer: what they are answered, where their bodies go, how much is read at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from asked import Reply
from endpoints import PS, WORKER, Gate, Handlers, connected, done, pattern, push, raising
from psync.errors import (
    FencedError,
    LocalProtocolError,
    PsyncError,
    RemoteError,
    ValueMismatchError,
    WorkerLost,
)
from psync.net.connection import Connection, Handler, Request
from psync.testing import MemoryNetwork, settle
from psync.wire.limits import Limits
from psync.wire.messages import AskStatistics, Assign, Done, FinalBelow, Pull, Pulled, Push
from psync.wire.tensors import to_bytes_view
from turns import Turns, peered

KIB = 1 << 10
MIB = 1 << 20


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueMismatchError("shape (2,) instead of (3,)", hint="transpose it"),
        WorkerLost("/job:worker/task:7"),  # not the one that answers
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_of_psync_come_back_as_themselves(error: PsyncError, slowly: bool) -> None:
    async with connected(server={AskStatistics: raising(error, slowly=slowly)}) as pair:
        with pytest.raises(type(error)) as caught:
            await pair.peer.call(AskStatistics())
        assert str(caught.value) == str(error)
        assert caught.value.hint == error.hint
        assert getattr(caught.value, "task", None) == getattr(error, "task", None)
        assert pair.peer.is_open


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
    async def handle(request: Request[Any]) -> None:
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

    def handle(request: Request[Any]) -> None:
        return nothing() if slowly else None

    async with connected(server={AskStatistics: Handler(handle)}) as pair:
        with pytest.raises(LocalProtocolError, match="the handler of a request gave no reply"):
            await pair.peer.call(AskStatistics())


def test_a_reply_above_the_limits_is_an_error_to_the_caller(turns: Turns) -> None:
    def values(request: Request[Pull]) -> None:
        request.answer(Pulled([]), [bytes(101)])

    pair = peered(turns, {Pull: Handler(values)}, limits=Limits(segment_bytes=100))
    with pytest.raises(LocalProtocolError, match="segment of 101 bytes, at most 100"):
        pair.ask(Pull(0, None, -1, ""))
    assert pair.peer.is_open


# --- prepare ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 300 * KIB])
def test_prepare_says_where_a_body_belongs(turns: Turns, size: int) -> None:
    memory = bytearray(size)
    asked: list[tuple[int, ...]] = []

    def prepare(request: Request[Push]) -> list[memoryview]:
        lengths = request.lengths
        asked.append(lengths)
        return [memoryview(memory)]

    def run(request: Request[Push]) -> None:
        segments = request.segments
        assert len(segments) == 1
        assert segments[0].obj is memory
        request.answer(Done())

    body = pattern(size)
    peered(turns, {Push: Handler(run, prepare)}).ask(push(), [to_bytes_view(body), b""])
    assert asked == [(size, 0)]
    assert bytes(memory) == body.tobytes()


@pytest.mark.parametrize("size", [0, 10, 300 * KIB])
def test_a_body_that_prepare_refuses_is_thrown_away(turns: Turns, size: int) -> None:
    refusals: list[Exception] = [
        ValueMismatchError("too large", hint="make it smaller"),
        ZeroDivisionError("a mistake"),
    ]

    def prepare(request: Request[Push]) -> list[memoryview]:
        message = request.message
        raise refusals[message.sequence]

    def run(request: Request[Push]) -> None:
        message = request.message
        raise AssertionError("the message was refused")

    pair = peered(turns, {Push: Handler(run, prepare), AskStatistics: Handler(done)})
    with pytest.raises(ValueMismatchError, match="too large\nhint: make it smaller"):
        pair.ask(push(0), [bytes(size)])
    with pytest.raises(RemoteError, match=r"ZeroDivisionError on .*: a mistake"):
        pair.ask(push(1), [bytes(size)])
    assert pair.ask(AskStatistics()).message == Done()


def test_memory_of_the_wrong_size_from_prepare_is_an_error_to_the_caller(turns: Turns) -> None:
    handler = Handler(done, lambda peer, message, lengths: [memoryview(bytearray(5))])
    pair = peered(turns, {Push: handler})
    with pytest.raises(LocalProtocolError, match="5 bytes of memory were given for a body of 6"):
        pair.ask(push(), [bytes(6)])
    assert pair.ask(push(), [bytes(5)]).message == Done()


# --- notifications ---------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_notifications_are_dealt_with_in_order_and_not_answered() -> None:
    got: list[tuple[int, bytes]] = []

    async def later(message: Assign, segments: list[memoryview]) -> None:
        await asyncio.sleep(1)
        got.append((message.sequence, bytes(segments[0])))

    def handle(
        peer: Connection, message: Assign, segments: list[memoryview]
    ) -> Awaitable[None] | None:
        if message.op == "add":
            return later(message, segments)
        got.append((message.sequence, bytes(segments[0])))
        return None

    async with connected(server={Assign: Handler(handle)}) as pair:  # type: ignore[arg-type]
        before = pair.peer.bytes_received
        for sequence, op in ((1, "assign"), (2, "add"), (3, "sub")):
            pair.peer.notify(Assign(sequence, 0, -1, 0, 0, None, op), [b"%d" % sequence])
        await asyncio.sleep(2)
        assert got == [(1, b"1"), (3, b"3"), (2, b"2")]
        assert pair.peer.bytes_received == before


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


def test_a_notification_that_prepare_refuses_ends_the_connection(turns: Turns) -> None:
    def prepare(request: Request[Push]) -> list[memoryview]:
        raise FencedError("replaced")

    pair = peered(turns, {Push: Handler(done, prepare)})
    pair.peer.notify(push(), [bytes(10)])
    turns.settle()
    assert pair.back.is_closed
    assert isinstance(pair.back.error, FencedError)


# --- giving up -------------------------------------------------------------------------------


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

    def handle(peer: Connection, message: Push, segments: list[memoryview]) -> Awaitable[Reply]:
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
        assert pair.back.statistics()["unfinished_bytes"] == 0
        assert pair.back.statistics()["serving"] == 0
        gate.open.set()
        assert (await pair.peer.call(push(9), [bytes(400)])).message == Done()


# --- back-pressure ---------------------------------------------------------------------------


@pytest.mark.promise("input.peers-bounded")
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
        assert pair.back.statistics()["unfinished_bytes"] == 300 * KIB
        (link,) = network.links()
        assert link.to_server.delivered_bytes < 500 * KIB
        gate.open.set()
        await asyncio.gather(*calls)
        assert gate.begun == 20
        assert pair.back.statistics()["unfinished_bytes"] == 0


@pytest.mark.virtual_time
async def test_a_body_counts_until_its_answer_is_given_though_the_handler_has_ended() -> None:
    given: list[Later] = []

    async def handle(request: Request[Push]) -> None:
        await asyncio.sleep(0)
        given.append(Later(lambda _: None))
        return given[-1]

    limits = Limits(unfinished_bytes=250 * KIB)
    async with connected(server={Push: Handler(handle)}, limits=limits) as pair:
        calls = [
            asyncio.create_task(pair.peer.call(push(number), [bytes(100 * KIB)]))
            for number in range(20)
        ]
        await settle()
        assert len(given) == 3
        assert pair.back.statistics()["unfinished_bytes"] == 300 * KIB
        for number, call in enumerate(calls):
            await settle()
            given[number].give(Reply(Done()))
            await call
        given_up = asyncio.create_task(pair.peer.call(push(20), [bytes(100 * KIB)]))
        await settle()
        assert pair.back.statistics()["unfinished_bytes"] == 100 * KIB
        given_up.cancel()
        await settle()
        assert given[20].over
        assert pair.back.statistics()["unfinished_bytes"] == 0


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
    async def echo(request: Request[Push]) -> None:
        segments = request.segments
        await asyncio.sleep(0.1)
        request.answer(Done(), segments)

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


def test_plain_handlers_do_not_count(turns: Turns) -> None:
    pair = peered(turns, {Push: Handler(done)}, limits=Limits(unfinished_bytes=100))
    got: list[object] = []
    for number in range(50):
        pair.peer.ask(push(number), [bytes(1000)], got.append)
    turns.settle()
    assert [getattr(answer, "message", answer) for answer in got] == [Done()] * 50
