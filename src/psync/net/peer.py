"""Request and reply between two tasks, in both directions on one connection.

``Peer`` is one open connection; ``endpoint.Endpoint`` makes them. It sends our requests, matches
replies to them, and places the bodies that come in; ``serving`` answers the other side's requests.
One message is handled before the next one of the same connection is read.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
)
from psync.net.connection import Connection
from psync.net.serving import Handler as Handler
from psync.net.serving import Into as Into
from psync.net.serving import Later as Later
from psync.net.serving import Received as Received
from psync.net.serving import Reply as Reply
from psync.net.serving import RequestServer, Spawn, fail
from psync.net.shared.regions import SharedMemory
from psync.numerics.memory import BlockPool
from psync.wire.codec import Message, decode
from psync.wire.frames import SMALL_BODY_BYTES, Buffer, Frame, Kind, Segment
from psync.wire.handshake import ClientHandshake, ServerHandshake
from psync.wire.lent import Borrowed
from psync.wire.limits import Limits
from psync.wire.messages import Failure
from psync.wire.protocol import Protocol
from psync.wire.remote_errors import exception_of

# Members of an enum are slow to look up.
_REQUEST, _REPLY, _ERROR = int(Kind.REQUEST), int(Kind.REPLY), int(Kind.ERROR)
_NOTIFY, _CANCEL, _PING, _PONG = map(int, (Kind.NOTIFY, Kind.CANCEL, Kind.PING, Kind.PONG))


Then = Callable[[Received | Exception], None]


@dataclass(slots=True, eq=False)
class Call:
    """A request of ours that is not answered yet."""

    number: int
    buffers: list[Buffer]
    then: Then  # told what becomes of it
    into: Into | None  # where the reply's body belongs, or None: anywhere
    reply: Message | None = None  # decoded before its body is there


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
        report_opened: Told when the handshake is over.
        report_closed: Told when the connection is gone, unless it was never made.
        server: Serves the peer's requests.
        memory: Of this task, to be shared with peers of its host; None: it is not.
    """

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        handlers: dict[type[Message], Handler],
        pool: BlockPool,
        limits: Limits,
        spawn: Spawn,
        report_opened: Callable[[Peer], None],
        report_closed: Callable[[Peer, Exception | None], None],
        server: type[RequestServer] = RequestServer,
        memory: SharedMemory | None = None,
    ) -> None:
        wire = Protocol(handshake, limits, self._sink)
        self.connection = Connection(wire, self.opened, self.received, self.closed, memory)
        self._redirect = wire.decoder.redirect
        self.task = ""  # the peer's name; proven, and "" until the connection is open
        self.incarnation = 0  # the peer's
        self.lane = ""  # one of handshake.LANES
        self.state: dict[str, Any] = {}  # what handlers keep per connection
        self.lent: Borrowed | None = None  # the body that is being prepared for, if it is lent
        self.error: Exception | None = None  # why it closed, once it has
        self.is_open = False
        self.is_closed = False
        self.ended_here = False  # by ``abort``
        self.on_closed: list[Callable[[Peer], None]] = []  # told once, in order
        self._pool = pool
        self._report_opened = report_opened
        self._report_closed = report_closed
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._server = server(self, handlers, limits, spawn)
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self.is_closed else "opening"
        return f"<Peer {self.task or '?'} {self.lane} {state}, {len(self._calls)} calls>"

    def statistics(self) -> dict[str, int]:
        """Return how many of our requests are open, and what is known of theirs."""
        return {"calls": len(self._calls), **self._server.statistics()}

    # Our requests.

    async def call(
        self,
        message: Message,
        segments: Sequence[Segment] = (),
        *,
        into: Into | None = None,
        deadline: float | None = None,
        copied: bool = False,
    ) -> Received:
        """Send a request and wait for its reply.

        Args:
            message: The request.
            segments: Its body. Above 64 KiB it is not copied, and must not change before the
                reply; if there is none, because of a cancellation or a deadline, before the
                connection is closed, or what was lent of it is given back.
            into: Says where the reply's body belongs. The reply's ``segments`` are then empty.
            deadline: Loop time (seconds) at which to give up; None: never.
            copied: Whether the body is copied, also where the peer could read it as it is.

        Raises:
            ConnectionLost: The connection went; the request may or may not have been served.
            DeadlineExceeded: There is no reply in time; the request may or may not be served.
            LocalProtocolError: The request is larger than the limits allow.
            PsyncError: What the handler there raised; RemoteError for foreign exceptions.

        Cancellation: The peer is told and memory given by ``into`` is not written any more.
        """
        future: asyncio.Future[Received] = self._loop.create_future()
        call = self._ask(message, segments, functools.partial(_resolve, future), into, copied)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            seconds = deadline - self._loop.time()
            timer = self._loop.call_at(deadline, self._expire, call, message, seconds)
        try:
            return await future
        finally:
            if call.number in self._calls:
                self._give_up(call)
            if timer is not None:
                timer.cancel()

    def _expire(self, call: Call, message: Message, seconds: float) -> None:
        self._give_up(call)
        limit = f"{round(max(0.0, seconds), 3):g} s"
        what = f"{self.task} did not answer {type(message).__name__} within {limit}"
        call.then(DeadlineExceeded(what))

    def ask(
        self,
        message: Message,
        segments: Sequence[Segment],
        then: Then,
        into: Into | None = None,
        *,
        copied: bool = False,
    ) -> Callable[[], None]:
        """Send a request as ``call`` does, without a coroutine that waits for its reply.

        Args:
            message: As for ``call``.
            segments: As for ``call``.
            then: Called once with the reply, or with what ``call`` would raise. Must not raise.
            into: As for ``call``.
            copied: As for ``call``.

        Returns:
            What to call to give the request up: then nothing else is called, and memory of
            ``into`` is not written any more.

        Raises:
            ConnectionLost, LocalProtocolError: As ``call``: nothing was sent.
        """
        return functools.partial(self._give_up, self._ask(message, segments, then, into, copied))

    def _ask(
        self,
        message: Message,
        segments: Sequence[Segment],
        then: Then,
        into: Into | None,
        copied: bool,
    ) -> Call:
        self._check_open()
        number = self._next_id
        # The first of several need not wait for the others, and most are alone.
        buffers = self.connection.send_message(
            _REQUEST, number, message, segments, at_once=not self._calls, copied=copied
        )
        self._next_id = number + 1
        call = self._calls[number] = Call(number, buffers, then, into)
        return call

    def _give_up(self, call: Call) -> None:
        """Nobody wants an answer any more; nothing if it is there."""
        if self._calls.pop(call.number, None) is not None:
            self._redirect(call)
            if not self.connection.withdraw(call.buffers):
                self.connection.send_message(_CANCEL, call.number)

    def notify(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message that has no reply; lost without a word if the connection is gone.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        if self.is_open:
            self.connection.send_message(_NOTIFY, 0, message, segments)

    async def ping(self) -> None:
        """Wait for the peer's loop to answer.

        Raises:
            ConnectionLost: The connection went.

        Cancellation: Safe.
        """
        self._check_open()
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.connection.send_message(_PING, 0)
        await pong

    def close(self) -> None:
        """Close once everything is written."""
        self.connection.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; open calls fail with ConnectionLost caused by ``error``.

        The caller knows why, and logs it if a user needs it.
        """
        self.ended_here = True
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

    # What the connection reports.

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
            self._server.serve(frame)
        elif kind == _PING:
            self.connection.send_message(_PONG, 0)
        elif kind == _PONG:
            if self._pongs and not (pong := self._pongs.popleft()).done():
                pong.set_result(None)
        elif kind == _CANCEL:
            self._server.give_up(frame.request_id)
        else:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} after the handshake")

    def closed(self, error: Exception | None) -> None:
        """Fail what is open and tell who asked to be told."""
        self.is_open, self.is_closed, self.error = False, True, error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.then(self._lost())
        for pong in self._pongs:
            fail(pong, self._lost())
        self._pongs.clear()
        self._gone.set()
        self._server.closed()
        self._report_closed(self, error)
        for listener in self.on_closed:
            listener(self)

    # Where bodies go.

    def _sink(self, frame: Frame) -> Sequence[memoryview] | None:
        kind = frame.kind
        if kind == _REPLY:
            call = self._calls.get(frame.request_id)
            if call is None:
                return None
            if call.into is not None:
                frame.token = call
                call.reply = decode(frame.header)
                try:
                    views = call.into(call.reply, frame.lengths, frame.borrowed)
                    return _fitting(views, frame)
                except Exception as exc:
                    del self._calls[frame.request_id]
                    call.then(exc)
                    return None
        elif kind == _REQUEST or kind == _NOTIFY:
            frame.token = message = decode(frame.header)
            handler = self._server.handler_of(message)
            if handler.prepare is not None:
                self.lent = frame.borrowed
                try:
                    views = handler.prepare(self, message, frame.lengths)
                    frame.segments = _fitting(views, frame)
                    return frame.segments
                except Exception as exc:
                    frame.token = exc
                    return None
                finally:
                    self.lent = None
        else:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} with a body")
        return self._anywhere(frame)

    def _anywhere(self, frame: Frame) -> Sequence[memoryview]:
        """Small bodies share one buffer; large segments get recycled ones of their own."""
        total = frame.nbytes
        if total <= SMALL_BODY_BYTES:
            whole = memoryview(bytearray(total))
            at = 0
            for length in frame.lengths:
                frame.segments.append(whole[at : at + length])
                at += length
            return [whole]
        for length in frame.lengths:
            frame.segments.append(self._pool.lend(length).data)
        return frame.segments

    # Replies.

    def _settle(self, frame: Frame) -> None:
        call = self._calls.get(frame.request_id)
        if call is None:  # we gave up
            return
        outcome: Received | Exception
        if frame.kind == _REPLY:
            outcome = Received(call.reply or decode(frame.header), frame.segments)
        else:
            failure = decode(frame.header)
            if not isinstance(failure, Failure):
                raise RemoteProtocolError(f"got {type(failure).__name__} in a frame ERROR")
            outcome = exception_of(failure, self.task)
        del self._calls[frame.request_id]  # not before: what is there fails with the connection
        call.then(outcome)


def _resolve(future: asyncio.Future[Received], outcome: Received | Exception) -> None:
    if isinstance(outcome, Exception):
        fail(future, outcome)
    elif not future.done():
        future.set_result(outcome)


def _fitting(views: Sequence[memoryview], frame: Frame) -> list[memoryview]:
    given = len(views[0]) if len(views) == 1 else sum(map(len, views))
    if given != frame.nbytes:
        raise LocalProtocolError(f"{given} bytes of memory were given for a body of {frame.nbytes}")
    return list(views)


@dataclass(slots=True, eq=False)
class AsIfFrom:
    """Stands for the connection over which an entry of a log came to the ps that has the log."""

    task: str
    incarnation: int
    state: dict[str, Any]
    lane: str = "control"
    lent: Borrowed | None = None
    on_closed: list[Any] = field(default_factory=list)
