"""Requests and replies between tasks, both ways on one connection.

Layer: L2. Imports: errors, blocks, connection, wire.

``Peer`` is one open connection; ``endpoint.Endpoint`` makes them.

A handler is a plain function that returns the reply, or a coroutine for it. Those that
need no waiting are called and answered in the same turn of the loop: no task is made for
a small pull. ``Handler.prepare`` runs as soon as a request's header is there and says
where its body belongs, or refuses it before memory is taken. One message is dealt with
before the next one of the same connection is looked at.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psync.blocks import BlockPool
from psync.connection import Connection
from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
)
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import SMALL_BODY_BYTES, Buffer, Frame, Kind, Segment, encode_frame
from psync.wire.handshake import ClientHandshake, ServerHandshake
from psync.wire.limits import Limits
from psync.wire.messages import Failure, Refused
from psync.wire.protocol import Admit, Protocol
from psync.wire.remote_errors import exception_of, failure_of
from psync.wire.tensors import to_bytes_view

# Members of an enum are slow to look up.
_REQUEST, _REPLY, _ERROR = int(Kind.REQUEST), int(Kind.REPLY), int(Kind.ERROR)
_NOTIFY, _CANCEL, _PING, _PONG = map(int, (Kind.NOTIFY, Kind.CANCEL, Kind.PING, Kind.PONG))


class Reply(NamedTuple):
    """What came back, or what to send back."""

    message: Message
    segments: Sequence[Segment] = ()


class Received(NamedTuple):
    """A reply as the caller gets it."""

    message: Message
    segments: list[memoryview]


Run = Callable[["Peer", Any, list[memoryview]], "Reply | Awaitable[Reply | None] | None"]
Prepare = Callable[["Peer", Any, tuple[int, ...]], Sequence[memoryview]]
Into = Callable[[Message, tuple[int, ...]], Sequence[memoryview]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Handler:
    """How one type of message is served.

    Attributes:
        run: Called with (peer, message, segments) once the message is complete. Returns a
            Reply or an awaitable of one; for notifications, None or an awaitable of None.
            What it raises goes to the caller; for notifications, it ends the connection.
            Cancelled when the caller gives up, or this task closes; not when the connection
            goes. A caller that gives up cancels it at its first await at the earliest: what
            was noted before can be undone there.
        prepare: Called with (peer, message, lengths of the segments) when the header is
            there, if there are segments. Returns where the body belongs, as views whose
            borders need not be those of the segments, and which ``run`` gets as its
            ``segments``; or raises to refuse the message.
    """

    run: Run
    prepare: Prepare | None = None


class _Call:
    """A request of ours that is not answered yet."""

    __slots__ = ("future", "into", "reply", "timer")

    def __init__(self, future: asyncio.Future[Received], into: Into | None) -> None:
        self.future = future
        self.into = into  # where the reply's body belongs, or None: anywhere
        self.reply: Message | None = None  # decoded before its body is there
        self.timer: asyncio.TimerHandle | None = None


class _Serving:
    """A request of theirs that takes time; given up before it runs, it begins all the same."""

    __slots__ = ("given_up", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None  # once it runs
        self.given_up = False  # the caller does not want to know any more

    def give_up(self) -> None:
        self.given_up = True
        if self.task is not None:
            self.task.cancel()

    def begin(self) -> None:
        self.task = asyncio.current_task()
        if self.given_up:
            self.give_up()


class _Refusal:
    """Token of a request that ``prepare`` refused: its body is thrown away."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class Peer:
    """One open connection to another task.

    Invariant: each call ends with its reply, the peer's error, ConnectionLost or
    DeadlineExceeded; none is left hanging when the connection goes.

    Args:
        handshake: This side's half.
        handlers: Who serves which message.
        pool: Memory for received segments.
        limits: In force for both directions.
        spawn: Starts a handler that takes time.
        on_opened: Told when the handshake is over.
        on_closed: Told when the connection is gone, unless it was never made.
        admit: See ``wire.protocol.Protocol``.
        refused: Likewise.
    """

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        handlers: dict[type[Message], Handler],
        pool: BlockPool,
        limits: Limits,
        spawn: Spawn,
        on_opened: Callable[[Peer], None],
        on_closed: Callable[[Peer, Exception | None], None],
        admit: Admit | None = None,
        refused: Refused | None = None,
    ) -> None:
        wire = Protocol(handshake, limits, self._sink, admit, refused)
        self.connection = Connection(wire, self)
        self.task = ""  # the peer's name; proven, and "" until the connection is open
        self.incarnation = 0  # the peer's
        self.lane = ""  # "control" or "bulk"
        self.state: dict[str, Any] = {}  # what handlers keep per connection
        self.error: Exception | None = None  # why it closed, once it has
        self.is_open = False
        self.is_closed = False
        self.on_closed: list[Callable[[Peer], None]] = []  # told once, in order
        self._handlers = handlers
        self._pool = pool
        self._limits = limits
        self._spawn = spawn
        self._report_opened = on_opened
        self._report_closed = on_closed
        self._calls: dict[int, _Call] = {}
        self._next_id = 1
        self._serving: dict[int, _Serving] = {}
        self._unfinished_bytes = 0  # bodies that handlers still work on
        self._reading_paused = False
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self.is_closed else "opening"
        return f"<Peer {self.task or '?'} {self.lane} {state}, {len(self._calls)} calls>"

    # Our requests.

    async def call(
        self,
        message: Message,
        segments: Sequence[Segment] = (),
        *,
        into: Into | None = None,
        deadline: float | None = None,
    ) -> Received:
        """Send a request and wait for its reply.

        Args:
            message: The request.
            segments: Its body. Above 64 KiB it is not copied, and must not change before the
                reply; if there is none, because of a cancellation or a deadline, before the
                connection is closed.
            into: Says where the reply's body belongs, given its message and the lengths of
                its segments. The reply's ``segments`` are then empty.
            deadline: Loop time (seconds) at which to give up; None: never.

        Raises:
            ConnectionLost: The connection went; the request may or may not have been served.
            DeadlineExceeded: Likewise.
            LocalProtocolError: The request is larger than the limits allow.
            PsyncError: What the handler there raised; RemoteError for foreign exceptions.

        Cancellation: The peer is told and memory given by ``into`` is not written any more.
        """
        self._check_open()
        request_id, self._next_id = self._next_id, self._next_id + 1
        buffers = self._encode(_REQUEST, request_id, message, segments)
        call = _Call(self._loop.create_future(), into)
        self._calls[request_id] = call
        if deadline is not None:
            call.timer = self._loop.call_at(deadline, self._expire, call, message)
        self.connection.send(buffers)
        try:
            return await call.future
        finally:
            if self._calls.pop(request_id, None) is not None:
                self.connection.wire.redirect(call)
                if not self.connection.withdraw(buffers):
                    self.connection.send(encode_frame(_CANCEL, request_id, b""))
            if call.timer is not None:
                call.timer.cancel()

    def notify(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message that has no reply; lost without a word if the connection is gone.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        if self.is_open:
            self.connection.send(self._encode(_NOTIFY, 0, message, segments))

    async def ping(self) -> None:
        """Wait for the peer's loop to answer.

        Raises:
            ConnectionLost: The connection went.

        Cancellation: Safe.
        """
        self._check_open()
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.connection.send(encode_frame(_PING, 0, b""))
        await pong

    def close(self) -> None:
        """Close once everything is written."""
        self.connection.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; open calls fail with ConnectionLost caused by ``error``."""
        self.connection.abort(error)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone. Cancellation: safe."""
        await self._gone.wait()

    def _check_open(self) -> None:
        if not self.is_open:
            raise self._lost() if self.is_closed else ConnectionLost("there is no connection yet")

    def _lost(self) -> ConnectionLost:
        what = f"the connection to {self.task or 'the peer'}"
        if self.error is None:
            return ConnectionLost(f"{what} was closed")
        text = self.error.message if isinstance(self.error, PsyncError) else str(self.error)
        lost = ConnectionLost(f"{what} was lost: {text}")
        lost.__cause__ = self.error
        return lost

    def _expire(self, call: _Call, message: Message) -> None:
        what = f"{self.task} did not answer {type(message).__name__} in time"
        _fail(call.future, DeadlineExceeded(what))

    def _encode(
        self, kind: int, request_id: int, message: Message, segments: Sequence[Segment]
    ) -> list[Buffer]:
        try:
            return encode_frame(kind, request_id, encode(message), segments, self._limits)
        except LocalProtocolError as exc:
            exc.add_note(f"while sending {type(message).__name__} to {self.task}")
            raise

    # connection.ConnectionOwner.

    def opened(self) -> None:
        """The handshake is over."""
        wire = self.connection.wire
        self.task, self.incarnation, self.lane = wire.peer_task, wire.peer_incarnation, wire.lane
        self.is_open = True
        self._report_opened(self)

    def received(self, frame: Frame) -> None:
        """Serve or settle what came."""
        kind = frame.kind
        if kind == _REPLY or kind == _ERROR:
            self._settle(frame)
        elif kind == _REQUEST or kind == _NOTIFY:
            self._serve(frame)
        elif kind == _PING:
            self.connection.send(encode_frame(_PONG, 0, b""))
        elif kind == _PONG:
            if self._pongs and not (pong := self._pongs.popleft()).done():
                pong.set_result(None)
        elif kind == _CANCEL:
            serving = self._serving.pop(frame.request_id, None)
            if serving is not None:
                serving.give_up()
        else:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} after the handshake")

    def closed(self, error: Exception | None) -> None:
        """Fail what is open and tell who asked to be told."""
        self.is_open, self.is_closed, self.error = False, True, error
        for call in self._calls.values():
            _fail(call.future, self._lost())
        for pong in self._pongs:
            _fail(pong, self._lost())
        self._calls.clear()
        self._pongs.clear()
        self._gone.set()
        self._report_closed(self, error)
        for listener in self.on_closed:
            listener(self)

    # Where bodies go.

    def _sink(self, frame: Frame) -> Sequence[memoryview] | None:
        kind = frame.kind
        if kind == _REPLY:
            call = self._calls.get(frame.request_id)
            if call is None or call.future.done():
                return None
            if call.into is not None:
                frame.token = call
                call.reply = decode(frame.header)
                try:
                    return _fitting(call.into(call.reply, frame.lengths), frame)
                except Exception as exc:
                    _fail(call.future, exc)
                    return None
        elif kind == _REQUEST or kind == _NOTIFY:
            frame.token = message = decode(frame.header)
            handler = self._handler_of(message)
            if handler.prepare is not None:
                try:
                    views = handler.prepare(self, message, frame.lengths)
                    frame.segments = _fitting(views, frame)
                    return frame.segments
                except Exception as exc:
                    frame.token = _Refusal(exc)
                    return None
        else:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} with a body")
        return self._anywhere(frame)

    def _anywhere(self, frame: Frame) -> Sequence[memoryview]:
        """Small bodies share one buffer; large segments get recycled ones of their own."""
        total = sum(frame.lengths)
        if total <= SMALL_BODY_BYTES:
            whole = memoryview(bytearray(total))
            at = 0
            for length in frame.lengths:
                frame.segments.append(whole[at : at + length])
                at += length
            return [whole]
        for length in frame.lengths:
            root = self._pool.take(length)
            frame.segments.append(to_bytes_view(root))
            self._pool.give(root)  # handed out again once nobody sees this segment any more
        return frame.segments

    # Replies.

    def _settle(self, frame: Frame) -> None:
        call = self._calls.get(frame.request_id)
        if call is None:  # we gave up
            return
        if frame.kind == _REPLY:
            received = Received(call.reply or decode(frame.header), frame.segments)
            if not call.future.done():
                call.future.set_result(received)
        else:
            failure = decode(frame.header)
            if not isinstance(failure, Failure):
                raise RemoteProtocolError(f"got {type(failure).__name__} in a frame ERROR")
            _fail(call.future, exception_of(failure, self.task))
        del self._calls[frame.request_id]  # not before: what is there fails with the connection

    # Their requests.

    def _handler_of(self, message: Message) -> Handler:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"this task does not serve {type(message).__name__}")
        return handler

    def _serve(self, frame: Frame) -> None:
        request_id, token = frame.request_id, frame.token
        if (request_id == 0) is (frame.kind == _REQUEST) or request_id in self._serving:
            raise RemoteProtocolError(f"request id {request_id} cannot be used")
        if isinstance(token, _Refusal):
            self._failed(request_id, token.error)
            return
        message = token if isinstance(token, Message) else decode(frame.header)
        handler = self._handler_of(message)
        try:
            answer = handler.run(self, message, frame.segments)
        except Exception as exc:
            self._failed(request_id, exc)
            return
        if answer is None or isinstance(answer, Reply):
            self._answer(request_id, answer)
        else:
            self._serve_slowly(request_id, answer, sum(frame.lengths))

    def _serve_slowly(self, request_id: int, answer: Awaitable[Reply | None], nbytes: int) -> None:
        serving = _Serving()
        if request_id:
            self._serving[request_id] = serving
        task = self._spawn(self._answer_when_ready(request_id, answer, serving))
        # The bodies that handlers work on are bounded: above that nothing more is read.
        self._unfinished_bytes += nbytes
        if self._unfinished_bytes > self._limits.unfinished_bytes and not self._reading_paused:
            self._reading_paused = True
            self.connection.pause_reading()

        def served(task: asyncio.Task[None]) -> None:
            if self._serving.get(request_id) is serving:
                del self._serving[request_id]
            if asyncio.iscoroutine(answer):
                answer.close()  # if the task was cancelled before its first step: we close
            self._unfinished_bytes -= nbytes
            if self._reading_paused and self._unfinished_bytes <= self._limits.unfinished_bytes:
                self._reading_paused = False
                self.connection.resume_reading()

        task.add_done_callback(served)

    async def _answer_when_ready(
        self, request_id: int, answer: Awaitable[Reply | None], serving: _Serving
    ) -> None:
        serving.begin()
        try:
            reply = await answer
        except asyncio.CancelledError as exc:
            if request_id and not serving.given_up:
                self._answer_error(request_id, exc)
            raise
        except Exception as exc:
            self._failed(request_id, exc)
        else:
            self._answer(request_id, reply)

    def _answer(self, request_id: int, reply: Reply | None) -> None:
        if not request_id:
            return
        try:
            if reply is None:
                raise LocalProtocolError("the handler of a request gave no reply")
            buffers = self._encode(_REPLY, request_id, *reply)
        except LocalProtocolError as exc:
            self._answer_error(request_id, exc)
        else:
            self.connection.send(buffers)

    def _failed(self, request_id: int, exc: Exception) -> None:
        if request_id:
            self._answer_error(request_id, exc)
        else:
            self.connection.fail(exc)  # nobody waits for an answer, but it must not be lost

    def _answer_error(self, request_id: int, exc: BaseException) -> None:
        self.connection.send(self._encode(_ERROR, request_id, failure_of(exc), ()))


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _fitting(views: Sequence[memoryview], frame: Frame) -> list[memoryview]:
    given, needed = sum(map(len, views)), sum(frame.lengths)
    if given != needed:
        raise LocalProtocolError(f"{given} bytes of memory were given for a body of {needed}")
    return list(views)
