"""One connection, as the tasks at its ends see it: requests, bodies, who waits, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
    transport_of,
)
from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FencedError,
    LocalProtocolError,
    PsyncError,
    RemoteError,
    RemoteProtocolError,
    ValueMismatchError,
    WorkerLost,
)
from psync.net import connection as connection_module
from psync.net.connection import WRITE_HIGH_BYTES, Connection, Handler, Request
from psync.testing import MemoryNetwork, settle
from psync.wire.codec import Message, encode
from psync.wire.frames import Frame, FrameDecoder, Kind, Segment, Sink
from psync.wire.handshake import BULK
from psync.wire.limits import Limits
from psync.wire.messages import (
    AskStatistics,
    Done,
    FetchFunction,
    FinalBelow,
    Hello,
    Pulled,
    Read,
    Statistics,
    Text,
    Update,
    UpdateAccumulator,
)
from psync.wire.tensors import to_bytes_view
from turns import Turns, peered
from wire_tools import encode_frame

KIB, MIB = 1 << 10, 1 << 20
WHOLE = (65_536, 65_536)
"""Sizes of the pieces in which bytes arrive: all that is there."""


def pull(nbytes: int = 0) -> Read:
    return Read(nbytes)


def values(request: Request[Read]) -> None:
    """Answer with as many bytes as the message asks for."""
    request.answer(Pulled([]), [bytes(request.message.plan)])


SERVED: Handlers = {Read: Handler(values), AskStatistics: Handler(done)}


class Held:
    """A handler that keeps its requests until a test answers them."""

    def __init__(self, *, in_coroutine: bool = False) -> None:
        self.requests: list[Request[Any]] = []
        self.given_up: list[Request[Any]] = []
        self._in_coroutine = in_coroutine

    def __call__(self, request: Request[Any]) -> None:
        request.on_given_up = self.given_up.append
        if self._in_coroutine:
            request.start(self._keep(request))
        else:
            self.requests.append(request)

    async def _keep(self, request: Request[Any]) -> None:
        await asyncio.sleep(0)
        self.requests.append(request)


def halves(memory: Any) -> list[memoryview]:
    """Memory for a body whose borders are those of no segment."""
    whole = to_bytes_view(memory) if isinstance(memory, np.ndarray) else memoryview(memory)
    return [whole[: len(whole) // 3], whole[len(whole) // 3 :]]


def onto(memory: Any) -> Sink:
    return lambda reply: halves(memory)


def raw(
    kind: Kind, number: int, message: Message | bytes, segments: Sequence[Segment] = ()
) -> Callable[[Connection], None]:
    """Say something that a connection would not."""
    header = message if isinstance(message, bytes) else encode(message)
    frame = encode_frame(kind, number, header, segments)
    return lambda peer: transport_of(peer).writelines(frame)


def open_work(peer: Connection) -> tuple[int, int, int]:
    """Our requests, theirs, and the bytes of their bodies."""
    return len(peer._calls), len(peer._serving), peer._unfinished_bytes


def asked(peer: Connection, message: Message, body: Sequence[Any] = ()) -> list[Any]:
    """Ask; the list gets the outcome."""
    got: list[Any] = []
    peer.ask(message, body, got.append)
    return got


# --- what passes, on every kind of network ---------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_both_sides_ask_and_bodies_come_whole_to_where_either_wants_them(
    place: str, tmp_path: Path
) -> None:
    """Bodies are echoed: that of a request comes back as that of its answer."""
    prepared: list[tuple[tuple[int, ...], bytearray]] = []

    def echo(request: Request[Any]) -> None:
        request.answer(Done(), request.segments)

    def prepare(request: Request[Any]) -> list[memoryview]:
        prepared.append((request.lengths, bytearray(request.nbytes)))
        return halves(prepared[-1][1])

    def name(request: Request[FetchFunction]) -> None:
        request.answer(Text(f"{request.peer.task} asked for {request.message.key!r}"))

    network, address = places(tmp_path)[place]()
    handlers: Handlers = {
        FetchFunction: Handler(name),
        Update: Handler(echo),
        UpdateAccumulator: Handler(echo, prepare),
    }
    async with connected(network, handlers, handlers, address=address) as pair:
        for peer, who in ((pair.peer, WORKER), (pair.back, PS)):
            answer = await peer.call(FetchFunction(b"f"))
            assert answer.message == Text(f"{who} asked for b'f'")
            assert not answer.segments
        await asyncio.gather(pair.peer.ping(), pair.peer.ping(), pair.back.ping())
        for sizes in ([], [0], [5], [0, 3, 0], [70 * KIB], [70 * KIB, 0, 1], [MIB, 9]):
            sent = [pattern(size, seed=index).tobytes() for index, size in enumerate(sizes)]
            got = await pair.peer.call(push(), sent)
            assert [bytes(segment) for segment in got.segments] == sent
            memory, whole = bytearray(sum(sizes)), b"".join(sent)
            got = await pair.peer.call(
                UpdateAccumulator(1, 0, -1, 0, "assign", 0), sent, into=onto(memory)
            )
            assert (got.message, [*got.segments], memory) == (Done(), [], whole)
            assert not sizes or prepared.pop() == (tuple(sizes), whole)
        assert not prepared, "nobody is asked where a body belongs that there is not"


@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_a_large_reply_is_read_straight_into_the_callers_array(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.arange(8 << 20, dtype=np.uint64)  # 64 MiB

    def served(request: Request[Read]) -> None:
        whole = to_bytes_view(source)
        request.answer(Pulled([]), [[whole[at : at + MIB] for at in range(0, len(whole), MIB)]])

    destination = np.zeros_like(source)
    received, straight = FrameDecoder.received, 0

    def watch(decoder: FrameDecoder, nbytes: int) -> Frame | None:
        nonlocal straight
        straight += np.shares_memory(np.frombuffer(decoder.room, np.uint8), destination)
        return received(decoder, nbytes)

    monkeypatch.setattr(FrameDecoder, "received", watch)
    network, address = places(tmp_path)[place]()
    async with connected(network, {Read: Handler(served)}, address=address, lane="bulk") as pair:
        await pair.peer.call(pull(), into=onto(destination))
        assert straight > 10
        np.testing.assert_array_equal(destination, source)


# --- any exchanges, in any order -------------------------------------------------------------

HOW = (
    "now", "later", "later raises", "coroutine", "coroutine raises", "kept", "raises", "refused",
)  # fmt: skip
DO = ("ask", "ask", "ask", "tell", "go on", "go on", "give up", "stall", "flow", "turn", "settle")


class End:
    """A task of the exchanges: what it has asked, what it was asked, and what became of both."""

    def __init__(self, turns: Turns) -> None:
        self.peer: Any = None
        self.came: list[int] = []  # numbers of the messages, in the order in which they are served
        self.noted: set[int] = set()  # of those in a coroutine
        self.held: dict[int, Callable[[], object]] = {}  # what goes on with a request
        self.calls: dict[int, tuple[int, str, int, bytearray | None, list[Any]]] = {}
        self.left: dict[int, bytes] = {}  # calls that were given up; what was in their memory then
        self.told: list[int] = []  # numbers of notifications
        self._turns = turns
        self.handlers: Handlers = {UpdateAccumulator: Handler(self._serve, self._prepare)}

    def do(self, what: str, number: int, drawn: int) -> None:
        how, size = HOW[drawn % 8], (0, 1, 5000, 70_000, 300_000)[drawn // 8 % 5]
        body = [pattern(size, number).tobytes()]
        if what == "ask":
            got: list[Any] = []
            memory = bytearray(size) if drawn // 40 % 2 else None
            into = None if memory is None else onto(memory)
            message = UpdateAccumulator(number, 0, -1, 0, how, 0)
            call = self.peer.ask(message, body, got.append, into)
            self.calls[number] = call, how, size, memory, got
        elif what == "tell":
            self.told.append(number)
            how = "coroutine" if how == "coroutine" else "now"
            self.peer.notify(UpdateAccumulator(number, 0, -1, 0, how, 0), body)
        elif what == "go on" and self.held:
            self.held.pop(list(self.held)[drawn % len(self.held)])()
        elif what == "give up":
            open_ = [n for n, call in self.calls.items() if not call[4] and n not in self.left]
            if open_:
                number = open_[drawn % len(open_)]
                self.peer.give_up(self.calls[number][0])
                self.left[number] = bytes(self.calls[number][3] or b"")

    def _prepare(self, request: Request[UpdateAccumulator]) -> list[memoryview]:
        if request.message.accumulator == "refused":
            raise ValueMismatchError(f"no {request.message.sequence}")
        return halves(bytearray(request.nbytes))

    def _serve(self, request: Request[UpdateAccumulator]) -> None:
        number, how = request.message.sequence, request.message.accumulator
        assert b"".join(request.segments) == pattern(request.nbytes, number).tobytes()
        self.came.append(number)
        if how == "raises":
            raise ValueMismatchError(f"no {number}")
        if how == "now":
            self._answer(request)
        elif how.startswith("later"):
            self._keep(request)
        else:
            self.noted.add(number)
            request.start(self._in_coroutine(request, number, how))

    def _answer(self, request: Request[UpdateAccumulator]) -> None:
        number = request.message.sequence
        if request.message.accumulator.endswith("raises"):
            request.fail(ValueMismatchError(f"no {number}"))
        request.answer(Statistics({"n": number}), request.segments)

    def _keep(self, request: Request[UpdateAccumulator]) -> None:
        number = request.message.sequence
        request.on_given_up = lambda _: self.held.pop(number)  # type: ignore[assignment, return-value]
        self.held[number] = lambda: self._answer(request)

    async def _in_coroutine(
        self, request: Request[UpdateAccumulator], number: int, how: str
    ) -> None:
        try:
            future = self._turns.create_future()
            self.held[number] = lambda: future.done() or future.set_result(None)
            await future
        finally:  # also where it was given up before it began: it begins all the same
            self.held.pop(number, None)
            self.noted.remove(number)
        if request.over:
            self.noted.add(number)  # a mistake: it was to be cancelled
        if how == "coroutine raises":
            raise ValueMismatchError(f"no {number}")
        self._keep(request) if how == "kept" else self._answer(request)

    def check(self, other: End, lane: str, ending: str) -> None:
        for number, (_, how, size, memory, outcomes) in self.calls.items():
            if number in self.left:
                assert outcomes == [], "nobody wants to know any more"
                assert memory is None or memory == self.left[number]
                continue
            (outcome,) = outcomes
            if isinstance(outcome, ConnectionLost) and ending != "in order":
                why = "lost: " if ending == "cut" else ""
                assert outcome.message.startswith(f"the connection to {self.peer.task} was {why}")
                assert ending != "cut" or isinstance(outcome.__cause__, ConnectionResetError)
                continue
            if how.endswith("raises") or how == "refused":
                assert isinstance(outcome, ValueMismatchError)
                assert outcome.message == f"no {number}"
            else:
                assert outcome.message == Statistics({"n": number})
                body = b"".join(outcome.segments) if memory is None else memory
                assert body == pattern(size, number).tobytes()
        told = [number for number in other.came if number in self.told]
        assert ending != "in order" or sorted(told) == self.told
        assert lane == BULK or other.came == sorted(other.came), "nothing is overtaken"
        assert len(set(other.came)) == len(other.came)
        assert not self.noted
        assert open_work(self.peer) == (0, 0, 0)


@example("control", 0, [("ask", False, 5), ("settle", False, 0)], "abort")  # kept, and then lost
@settings(max_examples=150, deadline=None)
@given(
    lane=st.sampled_from(["control", BULK]),
    seed=st.integers(0, 1000),
    steps=st.lists(st.tuples(st.sampled_from(DO), st.booleans(), st.integers(0, 999)), max_size=40),
    ending=st.sampled_from(["in order", "in order", "cut", "close", "abort"]),
)
def test_whatever_two_tasks_ask_each_other_comes_out_once_and_right(
    lane: str, seed: int, steps: list[tuple[str, bool, int]], ending: str
) -> None:
    """Each call gets its own answer, or the reason why there is none, or was given up. Nothing
    counts as unfinished afterwards, nobody waits for ever though both sides are full of bodies,
    and no memory of who gave up is written."""
    with pytest.MonkeyPatch.context() as patch:
        turns = Turns()
        patch.setattr(asyncio, "get_running_loop", lambda: turns)
        patch.setattr(connection_module, "WRITE_HIGH_BYTES", 100_000)
        ends = End(turns), End(turns)
        pair = peered(
            turns, ends[1].handlers, ends[0].handlers, lane=lane, seed=seed, kernel_bytes=4096,
            limits=Limits(unfinished_bytes=200_000),
        )  # fmt: skip
        ends[0].peer, ends[1].peer = pair.peer, pair.back
        directions = pair.link.to_client, pair.link.to_server
        for number, (what, side, drawn) in enumerate(steps, 1):
            if what in ("stall", "flow"):
                getattr(directions[side], what)()
            elif what in ("turn", "settle"):
                for _ in range(drawn % 9 if what == "turn" else 1):
                    getattr(turns, what)()
            else:
                ends[side].do(what, number, drawn)
        for direction in directions:
            direction.flow()
        if ending == "cut":
            pair.link.cut()
        elif ending != "in order":
            getattr(pair.peer, ending)()
        turns.settle()
        while ends[0].held or ends[1].held:
            for end in ends:
                end.do("go on", 0, 0)
            turns.settle()
            for end in ends:  # of a connection that is gone, only what a coroutine still works on
                assert end.peer.is_open or end.held.keys() <= end.noted
        for one, other in (ends, ends[::-1]):
            one.check(other, lane, ending)
        assert pair.peer.is_open is pair.back.is_open is (ending == "in order")
        pair.peer.abort()
        turns.settle()
        assert turns.reports == []


# --- what is written when --------------------------------------------------------------------


def writes(peer: Connection) -> list[list[Any]]:
    """What is given to the kernel from now on, call by call."""
    transport, made = transport_of(peer), []
    writelines = transport.writelines
    transport.writelines = lambda buffers: (made.append(list(buffers)), writelines(made[-1]))
    return made


def test_small_messages_of_one_turn_share_a_system_call_but_for_the_first(turns: Turns) -> None:
    got: list[bytes] = []
    told = Handler(lambda request: (got.append(bytes(request.segments[0])), done(request)))
    pair = peered(turns, {**SERVED, Update: told})
    made, back = writes(pair.peer), writes(pair.back)
    for first in (True, False):
        calls = [asked(pair.peer, AskStatistics()) for _ in range(3 if first else 1)]
        assert [len(write) for write in made] == [1]
        size = len(made[0][0])
        turns.turn()
        assert [len(data) for (data,) in made] == ([size, 2 * size] if first else [size])
        turns.settle()
        assert all(calls)
        made.clear()
    back.clear()
    small, large = bytearray(b"x"), bytes(65 * KIB)
    for body in (small, small):
        pair.peer.notify(push(), [body])
    assert made == []
    pair.peer.flush()  # who has other work to do does not let the peer wait
    assert [len(write) for write in made] == [1]
    for body in (small, large, small):
        pair.peer.notify(push(), [body])
    small[:] = b"y"  # it was copied
    assert [len(write) for write in made] == [1, 1, 2], "a large one follows what was before it"
    assert made[2][1] is large, "and is not copied"
    turns.settle()
    assert got == [b"x", b"x", b"x", large, b"x"]
    assert back == [], "notifications are not answered"
    made.clear()
    for _ in range(5):
        pair.peer.notify(push(), [bytes(40 * KIB)])
    assert len(made) == 2, "they do not pile up until the turn ends"
    pair.peer.abort()
    pair.peer.flush()
    turns.settle()
    assert len(made) == 2


@pytest.mark.parametrize("lane", [BULK, "control"])
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


@pytest.mark.virtual_time
@pytest.mark.parametrize("way_out", ["flow", "abort"])
async def test_who_makes_a_large_message_only_when_there_is_room_waits_for_it(way_out: str) -> None:
    network = MemoryNetwork()
    async with connected(network, {Update: Handler(lambda request: None)}) as pair:
        (link,) = network.links()
        await pair.peer.wait_writable()
        link.to_server.stall()
        for _ in range(2):
            pair.peer.notify(push(), [bytes(6 * MIB)])
        waiting = asyncio.create_task(pair.peer.wait_writable())
        await settle()
        assert not waiting.done()
        pair.peer.abort() if way_out == "abort" else link.to_server.flow()
        await waiting


@pytest.mark.virtual_time
async def test_a_request_that_waits_for_room_can_be_given_up_unsent() -> None:
    network = MemoryNetwork()
    async with connected(network, SERVED) as pair:
        (link,) = network.links()
        link.to_server.stall()
        body, deadline = [bytes(6 * MIB)], asyncio.get_running_loop().time() + 1
        first, second, third = (
            asyncio.create_task(pair.peer.call(AskStatistics(), body, deadline=when))
            for when in (None, None, deadline)
        )
        await settle()
        second.cancel()
        await asyncio.wait([second, third])
        assert isinstance(third.exception(), TimeoutError)
        link.to_server.flow()
        assert (await first).message == Done()
        assert link.to_server.written_bytes < 7 * MIB
        assert (await pair.peer.call(AskStatistics())).message == Done()


@pytest.mark.promise("input.peers-bounded")
@pytest.mark.parametrize("place", ["tcp", "unix"])
async def test_a_real_slow_reader_costs_a_bounded_write_buffer(place: str, tmp_path: Path) -> None:
    came = asyncio.Semaphore(0)

    def counted(request: Request[Read]) -> None:
        came.release()
        values(request)

    network, address = places(tmp_path)[place]()
    async with connected(network, {Read: Handler(counted)}, address=address) as pair:
        transport_of(pair.peer).pause_reading()
        calls = [asyncio.create_task(pair.peer.call(pull(MIB))) for _ in range(40)]
        for _ in calls:
            await came.acquire()
        unsent = transport_of(pair.back).get_write_buffer_size()
        assert WRITE_HIGH_BYTES < unsent <= WRITE_HIGH_BYTES + 2 * MIB
        transport_of(pair.peer).resume_reading()
        for call in calls:
            assert len((await call).segments[0]) == MIB


# --- one message after the other, and where bodies go ----------------------------------------


def test_one_message_is_dealt_with_before_the_next_one_is_looked_at(turns: Turns) -> None:
    """All are read at once, but no body is placed before the one before it was used; and nothing
    is handed over behind the one that closed the connection."""
    order: list[str] = []

    def prepare(request: Request[Update]) -> list[memoryview]:
        order.append(f"prepare {request.message.sequence}")
        return [memoryview(bytearray(length)) for length in request.lengths]

    def run(request: Request[Update]) -> None:
        order.append(f"run {request.message.sequence} {bytes(request.segments[0])!r}")
        request.answer(Done())
        if request.message.sequence == 2:
            request.peer.close()

    pair = peered(turns, {Update: Handler(run, prepare)}, chunk=WHOLE)
    pair.link.to_server.stall()
    got = [asked(pair.peer, push(number), [b"abc"[number - 1 :][:1]]) for number in (1, 2, 3)]
    turns.settle()
    pair.link.to_server.flow()
    turns.settle()
    assert order == ["prepare 1", "run 1 b'a'", "prepare 2", "run 2 b'b'"]
    assert [type(outcome) for (outcome,) in got] == [Request, Request, ConnectionLost]


def test_an_error_in_placing_a_body_fails_that_request_alone(turns: Turns) -> None:
    refusals: dict[int, Exception] = {
        0: ValueMismatchError("too large", hint="make it smaller"), 1: ZeroDivisionError("oops"),
    }  # fmt: skip

    def prepare(request: Request[Update]) -> list[memoryview]:
        if request.message.sequence in refusals:
            raise refusals[request.message.sequence]
        return [memoryview(bytearray(5))]

    def broken(*_: Any) -> list[memoryview]:
        raise ValueMismatchError("no room for this")

    pair = peered(turns, {Update: Handler(done, prepare), **SERVED})
    for size in (0, 10, 300 * KIB):
        with pytest.raises(ValueMismatchError, match="too large\nhint: make it smaller"):
            pair.ask(push(0), [bytes(size)])
        with pytest.raises(RemoteError, match=r"ZeroDivisionError on .*: oops"):
            pair.ask(push(1), [bytes(size)])
        with pytest.raises(LocalProtocolError, match=f"5 bytes .* for a body of {size}"):
            pair.ask(push(2), [bytes(size)])
        with pytest.raises(ValueMismatchError, match="no room for this"):
            pair.ask(pull(size), into=broken)
        with pytest.raises(LocalProtocolError) as caught:
            pair.ask(pull(size), into=onto(bytearray(99)))
        assert caught.value.message == f"99 bytes of memory were given for a body of {size}"
    assert pair.ask(push(2), [bytes(5)]).message == Done()


def test_large_segments_are_recycled_once_nobody_sees_them(turns: Turns) -> None:
    pair = peered(turns, SERVED)
    first, second = (pair.ask(pull(100 * KIB)) for _ in range(2))
    assert pair.pool.hits == 0, "the first one is still in use"
    del first, second
    pair.ask(pull(100 * KIB))
    assert pair.pool.hits == 1


@pytest.mark.virtual_time
async def test_what_is_above_the_limits_is_not_sent_by_either_side() -> None:
    limits = Limits(header_bytes=2000, segment_bytes=100)
    async with connected(server={Update: Handler(done), **SERVED}, limits=limits) as pair:
        before = pair.peer.bytes_sent
        for send in (pair.peer.call, pair.peer.notify):
            with pytest.raises(LocalProtocolError) as caught:
                await send(push(), [bytes(101)])  # type: ignore[func-returns-value,misc]
            assert caught.value.message == "segment of 101 bytes, at most 100 are allowed"
            assert caught.value.__notes__ == [f"while sending Update to {PS}"]
        with pytest.raises(LocalProtocolError, match="header of 3005 bytes, at most 2000"):
            await pair.peer.call(FetchFunction(bytes(3000)))
        with pytest.raises(LocalProtocolError, match=r"^FinalBelow cannot be encoded: ") as caught:
            await pair.peer.call(FinalBelow(1 << 70))
        assert caught.value.__notes__ == [f"while sending FinalBelow to {PS}"]
        assert pair.peer.bytes_sent == before
        assert len(pair.peer._calls) == 0
        with pytest.raises(LocalProtocolError, match="segment of 101 bytes, at most 100"):
            await pair.peer.call(pull(101))  # an answer that is too large is an error to its caller
        assert (await pair.peer.call(push(), [bytes(100)])).message == Done()


# --- giving up -------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_call_that_is_not_answered_in_time_is_given_up() -> None:
    gate = Gate()
    loop = asyncio.get_running_loop()
    async with connected(server={AskStatistics: Handler(gate)}) as pair:
        deadline = loop.time() + 2.5
        with pytest.raises(DeadlineExceeded) as caught:
            await pair.peer.call(AskStatistics(), deadline=deadline)
        assert loop.time() == deadline
        assert caught.value.message == f"{PS} did not answer AskStatistics within 2.5 s"
        assert isinstance(caught.value, TimeoutError)
        await settle()
        assert gate.cancelled == 1
        assert len(pair.back._serving) == len(pair.peer._calls) == 0
        gate.open.set()
        await pair.peer.call(AskStatistics(), deadline=loop.time() + 1)
        await asyncio.sleep(10)  # the timer of a call that was answered is gone


def test_an_answer_may_come_at_the_very_deadline(turns: Turns) -> None:
    """In one turn of the loop, before who waits for it goes on."""
    pair = peered(turns, {AskStatistics: Handler(Held())})
    answer = b"".join(encode_frame(Kind.REPLY, 1, encode(Done())))

    def comes() -> None:
        pair.peer.get_buffer(-1)[: len(answer)] = answer
        pair.peer.buffer_updated(len(answer))

    turns.call_at(1.0, comes)
    call = turns.create_task(pair.peer.call(AskStatistics(), deadline=1.0))
    turns.advance(2.0)
    assert call.result().message == Done()
    assert pair.peer.is_open


@pytest.mark.virtual_time
async def test_a_ping_given_up_does_not_take_the_answer_of_the_next_one() -> None:
    loop = asyncio.get_running_loop()
    async with connected(MemoryNetwork(latency=(0.6, 0.6))) as pair:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pair.peer.ping()
        start = loop.time()
        await pair.peer.ping()
        assert loop.time() - start == pytest.approx(1.2)


# --- handlers --------------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
async def test_errors_of_psync_come_back_as_themselves_and_others_with_their_traceback(
    slowly: bool,
) -> None:
    errors: list[BaseException] = [
        ValueMismatchError("shape (2,) instead of (3,)", hint="transpose it"),
        WorkerLost("/job:worker/task:7"),  # not the one that answers
        ZeroDivisionError("integer division"),
        asyncio.CancelledError(),  # by somebody else: it is no reason not to answer
    ]

    async def later(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    def handle(request: Request[Read]) -> None:
        error = errors[request.message.plan]
        if slowly or not isinstance(error, Exception):
            request.start(later(error))
        else:
            raise error

    async with connected(server={Read: Handler(handle)}) as pair:
        for number, error in enumerate(errors):
            with pytest.raises(PsyncError) as caught:
                await pair.peer.call(pull(number))
            came: Any = caught.value
            if isinstance(error, PsyncError):
                assert type(came) is type(error)
                assert (str(came), came.hint) == (str(error), error.hint)
                assert getattr(came, "task", None) == getattr(error, "task", None)
            else:
                assert type(came) is RemoteError
                assert came.message == f"{type(error).__name__} on {PS}: {error}"
                assert came.task == PS
                assert "raise error" in came.traceback_text
        assert pair.peer.is_open


@pytest.mark.parametrize("first", ["answer", "fail", "give up"])
def test_a_request_is_answered_once_and_a_later_answer_leaves_at_once(
    turns: Turns, first: str
) -> None:
    handler = Held()
    pair = peered(turns, {AskStatistics: Handler(handler)})
    got: list[Any] = []
    number = pair.peer.ask(AskStatistics(), (), got.append)
    turns.settle()
    (request,), made = handler.requests, writes(pair.back)
    if first == "give up":
        pair.peer.give_up(number)
    else:
        request.answer(Done()) if first == "answer" else request.fail(ValueMismatchError("no"))
        assert len(made) == (first == "answer")
    turns.settle()
    assert request.over
    request.answer(Statistics({}))
    request.fail(ValueMismatchError("again"))
    request.give_up()
    pair.peer.give_up(number)
    turns.settle()
    assert len(made) == (first != "give up")
    assert handler.given_up == ([request] if first == "give up" else [])
    outcomes = {"answer": [Request], "fail": [ValueMismatchError], "give up": []}
    assert [type(outcome) for outcome in got] == outcomes[first]


def test_who_is_told_at_the_end_may_answer_and_give_up_others(turns: Turns) -> None:
    handler = Held()
    pair = peered(turns, {AskStatistics: Handler(handler)})
    told: list[int] = []

    def first_told(outcome: object) -> None:
        told.append(1)
        pair.peer.give_up(2)

    pair.peer.ask(AskStatistics(), (), first_told)
    for number in (2, 3):
        pair.peer.ask(AskStatistics(), (), lambda _, number=number: told.append(number))
    turns.settle()
    one, two, three = handler.requests
    given_up: list[Any] = []
    one.on_given_up = lambda request: (given_up.append(request), two.answer(Done()))
    two.on_given_up = three.on_given_up = given_up.append
    pair.peer.abort()
    turns.settle()
    assert told == [1, 3]
    assert given_up == [one, three], "the second one was answered"


@pytest.mark.virtual_time
@pytest.mark.parametrize("slowly", [False, True])
async def test_mistakes_of_a_handler_are_told_to_the_caller_or_the_log(
    slowly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def mistaken(request: Request[Read]) -> None:
        if request.message.plan:
            request.answer(Pulled([]), [object()])  # type: ignore[list-item]
        request.answer(Pulled([]))
        raise ZeroDivisionError("behind the answer")

    async def later(request: Request[Read]) -> None:
        mistaken(request)

    async with connected(server={Read: Handler(later if slowly else mistaken)}) as pair:
        assert (await pair.peer.call(pull())).message == Pulled([])
        assert [record.message for record in caplog.records] == [f"a message of {WORKER} failed"]
        assert caplog.records[0].exc_info is not None
        with pytest.raises(RemoteError, match=f"TypeError on {PS}"):
            await pair.peer.call(pull(1))
        assert pair.peer.is_open


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["at once", "slowly", "before its body"])
@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), FencedError("replaced")], ids=repr)
async def test_a_notification_that_fails_ends_the_connection_with_a_log(
    how: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for an answer, and what it was about would be lost silently."""

    def fails(request: Request[Update]) -> list[memoryview]:
        raise error

    async def later(request: Request[Update]) -> None:
        await asyncio.sleep(0)
        raise error

    refuse = fails if how == "before its body" else None
    handler = Handler(later if how == "slowly" else fails, refuse)
    async with connected(server={Update: handler}) as pair:
        pair.peer.notify(push(), [bytes(10)])
        await pair.peer.wait_closed()
        await pair.back.wait_closed()
        assert pair.back.error is error
    (record,) = caplog.records
    if isinstance(error, FencedError):
        assert record.message.startswith(f"{PS} lost {WORKER} (")
        assert record.message.endswith(": replaced")
    else:
        assert record.message == f"a message of {WORKER} failed"
        assert record.exc_info is not None


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", ["now", "later", "coroutine", "raises", "refused"])
async def test_bodies_are_freed_with_the_answer_and_not_by_the_collector(how: str) -> None:
    memories: list[weakref.ref[Any]] = []
    held = Held(in_coroutine=how == "coroutine")

    def memory(*_: Any) -> list[memoryview]:
        root = np.zeros(MIB, np.uint8)
        memories.append(weakref.ref(root))
        if how == "refused":
            raise ValueMismatchError("no")
        return [root.data]

    def serve(request: Request[Update]) -> None:
        if how == "raises":
            raise ValueMismatchError("no")
        request.answer(Done(), request.segments) if how == "now" else held(request)

    async with connected(server={Update: Handler(serve, memory)}) as pair:
        gc.disable()
        try:
            calling = asyncio.create_task(pair.peer.call(push(), [bytes(MIB)], into=memory))
            await settle()
            for request in held.requests:
                request.answer(Done(), request.segments)
                del request
            held.requests.clear()
            await asyncio.wait([calling])
            assert (calling.exception() is not None) is (how in ("raises", "refused"))
            del calling
            await pair.peer.ping()
            assert [each() for each in memories] == [None] * (
                1 if how in ("raises", "refused") else 2
            )
        finally:
            gc.enable()


# --- back-pressure ---------------------------------------------------------------------------


@pytest.mark.promise("input.peers-bounded")
@pytest.mark.virtual_time
@pytest.mark.parametrize("lane", [BULK, "control"])
@pytest.mark.parametrize("how", ["in a coroutine", "kept", "kept by a coroutine", "told"])
async def test_requests_are_read_only_while_the_handlers_bodies_fit_the_limit(
    how: str, lane: str
) -> None:
    """Until their answer is given, though the coroutine that has kept the request has ended."""
    gate, held = Gate(), Held(in_coroutine=how == "kept by a coroutine")
    limits = Limits(unfinished_bytes=250 * KIB)
    network = MemoryNetwork()
    handler = Handler(held if "kept" in how else gate)
    async with connected(network, {Update: handler}, lane=lane, limits=limits) as pair:
        got: list[Any] = []
        for number in range(20):
            if how == "told":
                pair.peer.notify(push(number), [bytes(100 * KIB)])
            else:
                pair.peer.ask(push(number), [bytes(100 * KIB)], got.append)
        await settle()
        assert gate.begun + len(held.requests) == 3
        assert pair.back._unfinished_bytes == 300 * KIB
        (link,) = network.links()
        assert link.to_server.delivered_bytes < 500 * KIB
        gate.open.set()
        await settle()
        while held.requests:
            held.requests.pop(0).answer(Done())
            await settle()
        assert gate.begun == (0 if "kept" in how else 20)
        assert len(got) == (0 if how == "told" else 20)
        assert pair.back._unfinished_bytes == 0


@pytest.mark.promise("input.peers-bounded")
@pytest.mark.parametrize("end", ["answer", "fail"])
def test_a_body_counts_until_its_handler_is_done_though_its_caller_has_given_up(
    turns: Turns, end: str
) -> None:
    """Who is not told of that still works on it: an update is applied all the same."""
    kept: list[Request[Any]] = []
    limits = Limits(unfinished_bytes=250 * KIB)
    pair = peered(turns, {Update: Handler(kept.append)}, lane=BULK, limits=limits)
    for number in range(20):
        given_up = pair.peer.ask(push(number), [bytes(100 * KIB)], lambda _: None)
        turns.settle()
        pair.peer.give_up(given_up)
        turns.settle()
    assert len(kept) == 3
    assert pair.back._unfinished_bytes == 300 * KIB
    while kept:
        request = kept.pop(0)
        request.answer(Done()) if end == "answer" else request.fail(ValueMismatchError("no"))
        turns.settle()
    assert pair.back._unfinished_bytes == 0
    pair.peer.ask(push(), [bytes(100 * KIB)], lambda _: None)
    turns.settle()
    pair.peer.abort()
    turns.settle()
    assert open_work(pair.back) == (0, 0, 0)


@pytest.mark.promise("input.peers-bounded")
def test_who_only_waits_is_heard_when_it_gives_up(turns: Turns) -> None:
    """The body of a request that rests counts no more, so what its caller says is read."""
    held = Held()
    pair = peered(turns, {Update: Handler(held)}, lane=BULK, limits=Limits(unfinished_bytes=1))
    number = pair.peer.ask(push(), [bytes(100)], lambda _: None)
    turns.settle()
    pair.peer.give_up(number)
    turns.settle()
    assert held.given_up == [], "nothing is read"
    held.requests[0].rest()
    turns.settle()
    assert held.given_up == held.requests
    assert open_work(pair.back) == (0, 0, 0)


# --- what a peer must not say ----------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("misbehave", "told"),
    [
        (raw(Kind.REQUEST, 1, Statistics({})), "this task does not serve Statistics"),
        (raw(Kind.NOTIFY, 0, Statistics({})), "this task does not serve Statistics"),
        (raw(Kind.REQUEST, 1, Done(), [bytes(MIB)]), "this task does not serve Done"),
        (raw(Kind.REQUEST, 0, AskStatistics()), "request id 0 cannot be used"),
        (raw(Kind.NOTIFY, 7, AskStatistics()), "request id 7 cannot be used"),
        (raw(Kind.REQUEST, 5, FinalBelow(1)), "request id 5 cannot be used"),  # twice, see below
        (raw(Kind.REQUEST, 1, b"\xc1"), "header is not valid msgpack: DecodeError"),
        (raw(Kind.REQUEST, 1, b"\xc1", [b"x"]), "header is not valid msgpack: DecodeError"),
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
    async with connected(server={**SERVED, FinalBelow: Handler(Held())}) as pair:
        for _ in range(2 if "id 5" in told else 1):
            misbehave(pair.peer)
        await pair.back.wait_closed()
        assert isinstance(pair.back.error, RemoteProtocolError)
        assert pair.back.error.message == told
        await pair.peer.wait_closed()
        other = await pair.client.connect("ps0:1", PS)
        assert (await other.call(AskStatistics())).message == Done(), "the task lives on"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.records[0].message.endswith(f": {told}")


@pytest.mark.parametrize(
    ("nonsense", "told"),
    [
        (raw(Kind.REPLY, 1, b"\xc1"), "header is not valid msgpack: DecodeError"),
        (raw(Kind.REPLY, 1, b"\xc1", [b"x"]), "header is not valid msgpack: DecodeError"),
        (raw(Kind.ERROR, 1, b"\xc1"), "header is not valid msgpack: DecodeError"),
        (raw(Kind.ERROR, 1, Done()), "got Done in a frame ERROR"),
    ],
)
def test_a_call_whose_answer_is_nonsense_fails(
    turns: Turns, nonsense: Callable[[Connection], None], told: str
) -> None:
    pair = peered(turns, {AskStatistics: Handler(lambda request: nonsense(request.peer))})
    with pytest.raises(ConnectionLost) as caught:
        pair.ask(AskStatistics(), into=lambda *_: [memoryview(bytearray(1))])
    assert caught.value.message == f"the connection to {PS} was lost: {told}"
    assert isinstance(caught.value.__cause__, RemoteProtocolError)


def test_nothing_is_served_behind_a_frame_that_is_wrong(turns: Turns) -> None:
    served: list[Request[Any]] = []
    pair = peered(turns, {AskStatistics: Handler(served.append)})
    raw(Kind.HELLO, 0, b"")(pair.peer)
    raw(Kind.REQUEST, 1, AskStatistics())(pair.peer)
    turns.settle()
    assert pair.back.is_closed
    assert served == []


def test_answers_that_nobody_waits_for_are_ignored(turns: Turns) -> None:
    pair = peered(turns, SERVED)
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


# --- the end ---------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_every_open_call_and_ping_fails_with_the_connection() -> None:
    """Those who serve them go on."""
    network, gate = MemoryNetwork(), Gate()
    async with connected(network, {AskStatistics: Handler(gate)}, lane="bulk") as pair:
        assert repr(pair.peer) == f"<Connection {PS} bulk open, 0 calls>"
        network.links()[0].to_client.stall()
        waiting = [asyncio.create_task(pair.peer.call(AskStatistics())) for _ in range(3)]
        cancelled = [asyncio.create_task(pair.peer.ping()), waiting.pop()]
        pinging = asyncio.create_task(pair.peer.ping())
        await settle()
        assert repr(pair.peer) == f"<Connection {PS} bulk open, 3 calls>"
        assert open_work(pair.peer) == (3, 0, 0)
        assert open_work(pair.back) == (0, 3, 0)
        told: list[Connection] = []
        pair.peer.on_closed.append(told.append)
        pair.peer.abort(ConnectionLost("it was silent for 15 s"))
        pair.peer.abort(ConnectionLost("the first reason is told"))
        for each in cancelled:  # in the turn in which they are lost
            each.cancel()
        for result in await asyncio.gather(*waiting, pinging, return_exceptions=True):
            assert isinstance(result, ConnectionLost)
            assert result.message == f"the connection to {PS} was lost: it was silent for 15 s"
        assert told == [pair.peer]
        for attempt in (pair.peer.call(AskStatistics()), pair.peer.ping()):
            with pytest.raises(ConnectionLost, match="was lost: it was silent for 15 s"):
                await attempt  # type: ignore[misc]
        pair.peer.notify(FinalBelow(1))  # lost without a word
        assert repr(pair.peer) == f"<Connection {PS} bulk closed, 0 calls>"
        await pair.back.wait_closed()
        gate.open.set()
        await settle()
        assert (gate.begun, gate.cancelled) == (3, 0)
        assert len(pair.back._serving) == 0


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("is_half", [True, False])
async def test_an_end_in_the_middle_of_a_message_is_told_apart(
    place: str, is_half: bool, tmp_path: Path
) -> None:
    """The peer ends its stream in order, with half of a message said; though it would listen."""

    def ends(request: Request[Read]) -> None:
        frame = encode_frame(Kind.REPLY, 1, encode(Pulled([])), [bytes(200 * KIB)])
        transport_of(request.peer).write(frame[0] if is_half else b"")
        transport_of(request.peer).write_eof()

    network, address = places(tmp_path)[place]()
    async with connected(network, {Read: Handler(ends)}, address=address) as pair:
        with pytest.raises(ConnectionLost) as caught:
            await pair.peer.call(pull())
        why = ": the peer closed the connection in the middle of a message" if is_half else ""
        how = "lost" if is_half else "closed"
        assert caught.value.message == f"the connection to {PS} was {how}{why}"


@pytest.mark.parametrize("end", ["close", "abort"])
def test_close_writes_what_waits_and_abort_does_not(turns: Turns, end: str) -> None:
    got: list[int] = []
    pair = peered(turns, {Update: Handler(lambda request: got.append(request.message.sequence))})
    pair.link.to_server.stall()
    for number, size in enumerate((6 * MIB, 5, MIB, 7)):  # the others wait for room
        pair.peer.notify(push(number), [bytes(size)])
    getattr(pair.peer, end)()
    pair.link.to_server.flow()
    turns.settle()
    assert got == ([0, 1, 2, 3] if end == "close" else [])
    assert pair.peer.is_closed
    assert pair.back.is_closed


def test_after_the_end_nothing_is_done_any_more(turns: Turns) -> None:
    pair = peered(turns, SERVED)
    made = writes(pair.peer)
    pair.peer.close()
    got = asked(pair.peer, AskStatistics())
    for act in (
        pair.peer.close,
        lambda: transport_of(pair.peer).pause_reading(),
        lambda: transport_of(pair.peer).resume_reading(),
        pair.peer.resume_writing,
        lambda: pair.peer.notify(push(), [bytes(MIB)]),
        lambda: pair.peer.buffer_updated(0),
    ):
        act()
    turns.settle()
    assert made == []
    (outcome,) = got
    assert str(outcome) == f"the connection to {PS} was closed"
    with pytest.raises(ConnectionLost, match=f"the connection to {PS} was closed"):
        asked(pair.peer, AskStatistics())


def test_a_task_that_closes_as_soon_as_it_is_connected_sees_no_message(turns: Turns) -> None:
    """The peer's first one has arrived together with the last word of the handshake."""
    got: list[Any] = []
    pair = peered(
        turns, client={FinalBelow: Handler(got.append)}, chunk=WHOLE,
        server_opened=lambda peer: peer.notify(FinalBelow(1)),
        client_opened=lambda peer: peer.close(),
    )  # fmt: skip
    turns.settle()
    assert got == []
    assert pair.peer.is_closed
    assert pair.back.is_closed


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_connection_ended_before_it_is_up_is_aborted_when_it_is(turns: Turns, end: str) -> None:
    pair = peered(turns, before=lambda peer: getattr(peer, end)())
    assert pair.peer.is_closed
    assert pair.back.is_closed
    assert not pair.back.task
    with pytest.raises(ConnectionLost, match="the connection to the peer was closed"):
        asked(pair.peer, AskStatistics())
