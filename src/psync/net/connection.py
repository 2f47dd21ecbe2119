"""One open connection to another task: frames, our requests, theirs, and backpressure.

``Connection`` is an ``asyncio.BufferedProtocol``: the transport reads from the socket into
the memory that the decoder names, which for a large segment is its destination. It matches replies
to our requests, and hands theirs to handlers; ``endpoint.Endpoint`` makes connections. One message
is handled before the next one of the same connection is read.

A handler gets a ``Request`` and answers it once, now or later, with ``answer`` or ``fail``. One
that needs no waiting answers in the turn of the loop in which the request came: no task is made for
a small pull. One that waits may keep the request, or go on in a coroutine (``Request.start``).

A large message is written with one ``writelines`` and never copied: uvloop (and asyncio
from 3.12 on) keeps references to the buffers until the kernel has taken them, so nothing
that was written may change in place (see ``numerics.memory``). Small messages are copied, and those
of one turn of the loop share a system call: that call is most of what they cost.

Large messages wait, in order, while the transport has much unsent, or while they are copied. On the
lane for large bodies small ones do not, and so overtake them. On the other one nothing is
overtaken: a cancellation comes after what it cancels. That one is read whatever waits, if its peer
may have to end a wait: with an unlock, for example.

To a task of the same host a large body is lent instead, see ``net.shared``: it stays where it is,
or is copied to memory that the peer can read, and only the frame's head is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from psync.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    PsyncError,
    RemoteProtocolError,
)
from psync.net.shared.bodies import Loan, Sharing, Waker
from psync.net.shared.doors import SideChannel
from psync.net.transport import name_of, set_options
from psync.wire.codec import UNENCODABLE, Message, encode, header_decoder, to_header, undecodable
from psync.wire.frames import (
    LENT_ABOVE_BYTES,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
    PREFIX_FORMAT,
    SENT,
    SMALL_BODY_BYTES,
    VERSION,
    Buffer,
    Frame,
    FrameDecoder,
    Kind,
    Segment,
    Sink,
    check_sizes,
    encode_head,
    flat,
    with_lengths,
)
from psync.wire.handshake import BULK, Handshake, State
from psync.wire.limits import HANDSHAKE_LIMITS
from psync.wire.messages import Done, Failure, Refused
from psync.wire.remote_errors import exception_of, failure_of
from psync.wire.tensors import Joined

if TYPE_CHECKING:
    from psync.net.endpoint import Endpoint

logger = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 4 << 20
"""Above this much unsent data large messages wait."""

RETURN_WITHIN_S = 0.005
"""A body that was lent is given back with the next message to its owner, or after so long: said at
once it would cost as much as a message of its own, at both ends, and a timer for each body."""

_NONE: Sequence[Any] = ()  # neither segments nor extents
_OVER = Done()

# Members of an enum are slow to look up.
_REQUEST, _REPLY, _ERROR, _NOTIFY = map(int, (Kind.REQUEST, Kind.REPLY, Kind.ERROR, Kind.NOTIFY))
_CANCEL, _PING, _PONG = map(int, (Kind.CANCEL, Kind.PING, Kind.PONG))
_RETURN, _FORGET = int(Kind.RETURN), int(Kind.FORGET)

M = TypeVar("M", bound=Message)

Tap = Callable[[int, int, bytes, int], None]
"""Shown each message: its kind, request id, header, and the bytes of its body."""

Then = Callable[[Frame | Exception], None] | asyncio.Future[Frame]
"""Gets the reply (a frame, with ``message`` and ``segments``), or the reason why there is none."""

Answer = tuple[Message, Sequence[Segment]]
"""A message and its segments."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Request(Frame, Generic[M]):
    """A request or notification of the peer's; it is answered once, now or later.

    Attributes:
        message: What came.
        segments: Its body, where ``Handler.prepare`` has put it.
        peer: The connection over which it came.
        over: It was answered, or nobody wants an answer any more.
        on_given_up: Called with the request when its caller gives it up, or the connection goes,
            before it was answered; not if it is served by a coroutine, which is cancelled instead,
            unless only the connection goes.
    """

    message: M
    peer: Connection
    over = False
    is_held = False  # its body counts, and its caller may give it up
    in_coroutine = False  # it is served by one
    task: asyncio.Task[Any] | None = None  # once that has begun
    on_given_up: Callable[[Request[Any]], None] | None = None

    def answer(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Answer; nothing if that is over. To a notification nothing is sent."""
        is_over, self.over = self.over, True
        peer, number = self.peer, self.request_id
        # One that has waited goes out at once: others of this turn are still to be answered.
        has_waited, self.is_held = self.is_held, False
        if has_waited:  # nobody works on its body any more
            if peer._serving.get(number) is self:
                del peer._serving[number]
            peer._unfinished_bytes -= self.nbytes
            if peer._pauses:
                peer._pause_or_go_on()
        if number and not is_over:
            at_once = has_waited and not self.in_coroutine
            try:
                peer.send(_REPLY, number, message, segments, at_once=at_once)
            except Exception as exc:  # it cannot be made; who waits must hear of it
                peer.send(_ERROR, number, failure_of(exc))

    def fail(self, error: BaseException) -> None:
        """Answer with an error; nothing if that is over. A notification ends the connection."""
        is_over, self.over = self.over, True
        if self.is_held:
            self.answer(_OVER)  # its body counts no more; nothing is sent
        if is_over:
            return
        if self.request_id:
            self.peer.send(_ERROR, self.request_id, failure_of(error))
        elif isinstance(error, Exception):
            self.peer.fail(error)  # nobody waits for an answer, but it must not be lost

    def rest(self) -> None:
        """Nobody works on its body any more; it only waits, so that body counts no more.

        Else a caller that gives up would not be heard: nothing more is read.
        """
        if self.is_held:
            self.peer._unfinished_bytes -= self.nbytes
            if self.peer._pauses:
                self.peer._pause_or_go_on()
        self.nbytes = 0

    def raised(self, error: Exception) -> None:
        """The handler has raised: the answer, unless it is given; then a mistake is logged."""
        if self.over and not isinstance(error, PsyncError):
            logger.error("a message of %s failed", self.peer.task, exc_info=error)
        self.fail(error)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on in a coroutine; what it raises is the answer.

        It is cancelled when the caller gives up, or this task closes; not when the connection goes.
        A caller that gives up cancels it at its first await at the earliest: what was noted before
        can be undone there. Not for who is in such a coroutine: it goes on by itself.
        """
        self.in_coroutine = True
        self.peer.spawn(self._run(work)).add_done_callback(functools.partial(self._has_run, work))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.current_task()
        if self.over and self.task is not None:  # it was given up, but begins all the same
            self.task.cancel()
        try:
            await work
        except asyncio.CancelledError as exc:
            self.fail(exc)
            raise
        except Exception as exc:
            self.raised(exc)
        finally:
            self.in_coroutine, self.task = False, None
        if self.peer.is_closed:  # what waits for its time
            self.give_up()

    def give_up(self) -> None:
        """Nobody wants the answer any more; nothing if that is over."""
        if self.over:
            return
        self.over = True
        if self.in_coroutine:  # its body counts until that has ended
            if self.task is not None:
                self.task.cancel()
            return
        # Who is not told works on it until it is answered all the same: so long its body counts.
        if self.is_held and (self.on_given_up is not None or self.peer.is_closed):
            self.answer(_OVER)  # its body counts no more; nothing is sent
        if self.on_given_up is not None:
            self.on_given_up(self)

    def _has_run(self, work: Coroutine[Any, Any, None], _: asyncio.Task[None]) -> None:
        self.in_coroutine, self.task = False, None
        work.close()  # if the task was cancelled before its first step
        if self.is_held and (self.over or not self.request_id):
            self.answer(_OVER)  # its body counts no more; nothing is sent


class OwnRequest(Request[M]):
    """A request that a task makes to itself, or reads from a log: the outcome goes to a callback.

    Args:
        peer: Whom it is from.
        message: What it says.
        segments: Its body.
        then: Told the answer (message, segments), or the error; once.
    """

    kind, request_id = _REQUEST, 1

    def __init__(
        self,
        peer: Connection | AsIfFrom,
        message: M,
        segments: Sequence[memoryview],
        then: Callable[[Answer | BaseException], None],
    ) -> None:
        self.peer = peer  # type: ignore[assignment]
        self.message, self.segments, self._then = message, segments, then

    def answer(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Tell the callback."""
        if not self.over:
            self.over = True
            self._then((message, segments))

    def fail(self, error: BaseException) -> None:
        """Tell the callback."""
        if not self.over:
            self.over = True
            self._then(error)


class AsIfFrom(msgspec.Struct, eq=False):
    """Stands for the connection over which an entry of a log came to the ps that has the log."""

    client: tuple[str, int]
    state: dict[str, Any] = {}
    spawn: Spawn = asyncio.create_task
    lane: str = "control"
    is_closed: bool = False
    on_closed: list[Any] = []
    holds: int = 0

    @property
    def task(self) -> str:
        """Name of the task that has sent it."""
        return self.client[0]

    @property
    def incarnation(self) -> int:
        """Of that task."""
        return self.client[1]


@dataclass(frozen=True, slots=True)
class Handler:
    """How one type of message is served.

    Attributes:
        run: Called with the request once it is complete, in the order in which they came. What it
            raises is the answer. A coroutine that it returns is run in a task, see
            ``Request.start``.
        prepare: Called with the request when its header is there, if it has segments. Returns
            where the body belongs, as views whose borders need not be those of the segments, and
            which are the ``segments`` of the request; or raises to refuse it before memory is
            taken. A body that is lent (``borrowed``) may be kept, and returned, as it is.
    """

    run: Callable[[Request[Any]], Any]
    prepare: Callable[[Request[Any]], Sequence[memoryview]] | None = None


class Connection(asyncio.BufferedProtocol):
    """One connection to another task.

    Invariants: After any fault in the middle of a frame the connection is aborted, since nobody
    knows how much was read or written. Each call ends with its reply, the peer's error,
    ConnectionLost or DeadlineExceeded; none is left hanging when the connection goes. Each request
    of the peer is answered once, unless the peer gives it up or the connection goes.

    Args:
        handshake: This side's half.
        owner: Whose connection it is: has handlers, limits and memory, and is told when it is made,
            opened and gone.
    """

    def __init__(self, handshake: Handshake, owner: Endpoint) -> None:
        self.handshake = handshake
        self.task = ""  # the peer's name; proven, and "" until the connection is open
        self.incarnation = 0  # the peer's
        self.client = ("", 0)  # both
        self.lane = ""  # one of handshake.LANES
        self.holds = 0  # what others may wait for until the peer says so on the control lane
        self.peername = "?"  # address of the other side, for messages
        self.state: dict[str, Any] = {}  # what handlers keep per connection
        self.error: Exception | None = None  # why it closes, or has closed
        self.is_open = False  # the handshake is over, and the connection not gone
        self.is_closed = False
        self.ended_here = False  # by ``abort``
        self.settled = asyncio.Event()  # set once it is open, or gone
        # Told once, in order, when it is gone, unless it was never made.
        self.on_closed: list[Callable[[Connection], None]] = []
        self.tap: Tap | None = None  # while somebody traces, see ``net.trace``
        self.bytes_received = 0
        self.bytes_sent = 0
        self.sharing: Sharing | None = None  # of memory; None: the peer is elsewhere
        self.spawn = owner.spawn
        self._owner = owner
        self._handlers = owner.handlers
        self._limits = limits = owner.platform.limits
        # A body up to this size is neither lent nor too large.
        self._plain_bytes = min(LENT_ABOVE_BYTES, limits.segment_bytes, limits.body_bytes)
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(HANDSHAKE_LIMITS, self._sink, Request)
        # Asked for at each read: where the next bytes belong, which the decoder knows before.
        self.get_buffer = functools.partial(getattr, self._decoder, "room")  # type: ignore[method-assign]
        self._transport: Any = None  # asyncio.Transport; None until connected
        self._deadline: asyncio.TimerHandle  # of the handshake; from connection_made on
        self._closing = False  # nothing is sent or handed over any more
        self._gone = asyncio.Event()
        # Our requests.
        # By id: who gets the outcome, where the reply's body belongs (None: anywhere), what is
        # sent.
        self._calls: dict[int, tuple[Then, Sink | None, list[Buffer]]] = {}
        self._next_id = 1
        self._pongs: deque[asyncio.Future[None]] = deque()
        # Theirs.
        self._serving: dict[int, Request[Any]] = {}  # that take time, by id
        self._unfinished_bytes = 0  # bodies that handlers still work on
        self._pauses = False  # nothing is read now
        # What is sent.
        self._writable = True  # whether the transport has room for large messages
        self._small: list[Buffer] = []  # small messages of this turn of the loop
        self._small_bytes = 0
        self._flush_due = False
        # Large messages until there is room, and small ones behind them; what is lent of each.
        self._waiting: deque[tuple[list[Buffer], Loan | None]] = deque()
        self._room = asyncio.Event()  # set while large messages need not wait, and at the end
        self._room.set()
        self._in_order = False  # whether small messages wait behind large ones

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self.is_closed else "opening"
        return f"<Connection {self.task or '?'} {self.lane} {state}, {len(self._calls)} calls>"

    def traffic(self) -> dict[str, int]:
        """Return how many bytes went over it, or were lent, so far."""
        sharing = self.sharing
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_lent": 0 if sharing is None else sharing.bytes_lent,
            "bytes_borrowed": 0 if sharing is None else sharing.bytes_borrowed,
        }

    # Our requests.

    async def call(
        self,
        message: Message,
        segments: Sequence[Segment] = (),
        *,
        into: Sink | None = None,
        deadline: float | None = None,
        copied: bool = False,
    ) -> Frame:
        """Send a request and wait for its reply.

        Args:
            message: The request.
            segments: Its body. Above 64 KiB it is not copied, and must not change before the
                reply; if there is none, because of a cancellation or a deadline, before the
                connection is closed, or what was lent of it is given back.
            into: Says where the reply's body belongs, given the reply, with its ``message``. The
                reply's ``segments`` are then empty.
            deadline: Loop time (seconds) at which to give up; None: never.
            copied: Whether the body is copied, also where the peer could read it as it is.

        Returns:
            The reply, with ``message`` and ``segments``.

        Raises:
            ConnectionLost: The connection went; the request may or may not have been served.
            DeadlineExceeded: There is no reply in time; the request may or may not be served.
            LocalProtocolError: The request is larger than the limits allow.
            PsyncError: What the handler there raised; RemoteError for foreign exceptions.

        Cancellation: The peer is told and memory given by ``into`` is not written any more.
        """
        future: asyncio.Future[Frame] = self._loop.create_future()
        number = self.ask(message, segments, future, into, copied=copied)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            limit = f"{round(max(0.0, deadline - self._loop.time()), 3):g} s"
            what = f"{self.task} did not answer {type(message).__name__} within {limit}"
            timer = self._loop.call_at(deadline, fail, future, DeadlineExceeded(what))
        try:
            return await future
        finally:
            if number in self._calls:
                self.give_up(number)
            if timer is not None:
                timer.cancel()

    def ask(
        self,
        message: Message,
        segments: Sequence[Segment],
        then: Then,
        into: Sink | None = None,
        *,
        copied: bool = False,
    ) -> int:
        """Send a request as ``call`` does, without a coroutine that waits for its reply.

        Args:
            message: As for ``call``.
            segments: As for ``call``.
            then: Called once with the reply, or with what ``call`` would raise; must not raise. Or
                a future that gets them.
            into: As for ``call``.
            copied: As for ``call``.

        Returns:
            The number of the request, for ``give_up``.

        Raises:
            ConnectionLost, LocalProtocolError: As ``call``: nothing was sent.
        """
        if not self.is_open:
            raise self._lost() if self.is_closed else ConnectionLost("there is no connection yet")
        number = self._next_id
        # The first of several need not wait for the others, and most are alone.
        buffers = self.send(
            _REQUEST, number, message, segments, at_once=not self._calls, copied=copied
        )
        self._next_id = number + 1
        self._calls[number] = (then, into, buffers)
        return number

    def give_up(self, number: int) -> None:
        """Nobody wants the answer of a request any more; nothing if it is there.

        Nothing else is called then, and memory of ``into`` is not written any more.
        """
        call = self._calls.pop(number, None)
        if call is not None:
            self._decoder.redirect(number)
            if not self._withdraw(call[2]):
                self.send(_CANCEL, number)

    def notify(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message that has no reply; lost without a word if the connection is gone.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        if self.is_open:
            self.send(_NOTIFY, 0, message, segments)

    async def ping(self) -> None:
        """Wait for the peer's loop to answer.

        Raises:
            ConnectionLost: The connection went.

        Cancellation: Safe.
        """
        if not self.is_open:
            raise self._lost()
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.send(_PING, 0)
        await pong

    def _lost(self) -> ConnectionLost:
        what = f"the connection to {self.task or 'the peer'}"
        if self.error is None:
            return ConnectionLost(f"{what} was closed")
        text = self.error.message if isinstance(self.error, PsyncError) else str(self.error)
        lost = ConnectionLost(f"{what} was lost: {text}")
        lost.__cause__ = self.error
        return lost

    # What comes in.

    def buffer_updated(self, nbytes: int) -> None:
        """Decode what came, serve or settle it, and send what there is to say to it."""
        self.bytes_received += nbytes
        if self._closing:
            return
        self._flush_due = True  # below: no need to come back for it
        decoder = self._decoder
        try:
            if self.is_open:
                frame = decoder.received(nbytes)
            else:
                binding = self._transport.get_extra_info("channel_binding", b"")
                self.handshake.binding = binding
                self.handshake.received(decoder, nbytes)
                frame = self._go_on_shaking_hands()
            while frame is not None:
                kind = frame.kind
                if self.tap is not None and kind not in (_RETURN, _FORGET):
                    self.tap(kind, frame.request_id, frame.header, frame.nbytes)
                if frame.message is None and _REQUEST <= kind <= _NOTIFY:  # it has no body
                    try:
                        frame.message = header_decoder()(frame.header)
                    except Exception as exc:
                        raise undecodable(frame.header, exc) from exc
                if kind == _REPLY or kind == _ERROR:
                    if frame.request_id in self._calls:  # else we gave up
                        outcome = frame if kind == _REPLY else self._failure(frame.message)
                        # Not before: what is there fails with the connection.
                        then, *_ = self._calls.pop(frame.request_id)
                        if not isinstance(then, asyncio.Future):
                            then(outcome)
                        elif outcome is frame and not then.done():
                            then.set_result(frame)
                        else:
                            _tell(then, outcome)
                elif kind == _REQUEST or kind == _NOTIFY:
                    self._serve(frame)  # type: ignore[arg-type]  # the decoder makes these
                else:
                    self._handle_other(kind, frame.request_id)
                if decoder.start == decoder.end or self._closing:
                    break
                frame = decoder.next_frame()
            if decoder.copying is not None and not self._closing:
                self._loop.call_soon(self.buffer_updated, 0)
                self._pause_or_go_on()
            elif self._pauses:
                self._pause_or_go_on()
        except Exception as exc:
            self.fail(exc)
        if self._small:
            self.flush()
        else:
            self._flush_due = False

    def _pause_or_go_on(self) -> None:
        """Read, unless a lent body is still being copied, or handlers have too much to work on."""
        too_much = self._unfinished_bytes > self._limits.unfinished_bytes
        unfinished = too_much and not (self._in_order and self.holds)
        pauses = unfinished or self._decoder.copying is not None
        if pauses is self._pauses or self._closing:
            return
        self._pauses = pauses
        if pauses:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _handle_other(self, kind: int, request_id: int) -> None:
        if kind == _PING:
            self.send(_PONG, 0)
        elif kind == _PONG:
            if self._pongs and not (pong := self._pongs.popleft()).done():
                pong.set_result(None)
        elif kind == _CANCEL:
            if (request := self._serving.pop(request_id, None)) is not None:
                request.give_up()
        elif self.sharing is not None and kind == _RETURN:
            self.sharing.returned(request_id)
        elif self.sharing is not None and kind == _FORGET:
            self.sharing.forget(request_id)
        else:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} after the handshake")

    def _failure(self, message: Message) -> Exception:
        if not isinstance(message, Failure):
            raise RemoteProtocolError(f"got {type(message).__name__} in a frame ERROR")
        return exception_of(message, self.task)

    # Where bodies go.

    def _sink(self, frame: Frame) -> Sequence[memoryview] | None:
        kind, call = frame.kind, None
        if kind == _REPLY:
            call, frame.token = self._calls.get(frame.request_id), frame.request_id
            if call is None:  # we gave up
                return None
        elif kind != _REQUEST and kind != _NOTIFY:
            raise RemoteProtocolError(f"got a frame {Kind(kind).name} with a body")
        try:
            frame.message = header_decoder()(frame.header)
        except Exception as exc:
            raise undecodable(frame.header, exc) from exc
        place: Any
        if call is not None:
            place = call[1]
        else:
            assert isinstance(frame, Request)
            frame.peer = self
            handler = self._handlers.get(type(frame.message))
            if handler is None:
                raise self._unserved(frame.message)
            place = handler.prepare
        if place is not None:
            try:
                views: Sequence[memoryview] | None = place(frame)
                if views is not None and (given := sum(map(len, views))) != frame.nbytes:
                    raise LocalProtocolError(
                        f"{given} bytes of memory were given for a body of {frame.nbytes}"
                    )
            except Exception as exc:
                if call is None:
                    frame.token = exc  # the answer, once all of it has come
                else:
                    del self._calls[frame.request_id]
                    _tell(call[0], exc)
                return None
            if call is None:
                frame.segments = views or ()
            return views
        segments: list[memoryview] = []
        frame.segments = segments
        # Small bodies share one buffer; large segments get recycled ones of their own.
        if frame.nbytes <= SMALL_BODY_BYTES:
            whole = memoryview(bytearray(frame.nbytes))
            at = 0
            for length in frame.lengths:
                segments.append(whole[at : at + length])
                at += length
            return [whole]
        segments += [self._owner.pool.lend(length).data for length in frame.lengths]
        return segments

    # Their requests.

    def _unserved(self, message: Message) -> RemoteProtocolError:
        return RemoteProtocolError(f"this task does not serve {type(message).__name__}")

    def _serve(self, request: Request[Any]) -> None:
        """Serve a request or notification that is complete.

        Raises:
            RemoteProtocolError: The peer must not send that.
        """
        number, message, error = request.request_id, request.message, request.token
        if (number == 0) is (request.kind == _REQUEST) or number in self._serving:
            raise RemoteProtocolError(f"request id {number} cannot be used")
        request.peer = self
        handler = self._handlers.get(type(message))
        if handler is None:
            raise self._unserved(message)
        if isinstance(error, Exception):  # of ``prepare``
            request.token = None  # it leads back here
            request.fail(error)
            return
        try:
            work = handler.run(request)
            if isinstance(work, CoroutineType):
                request.start(work)
        except Exception as exc:
            request.raised(exc)
        else:
            if request.over or not (number or request.in_coroutine):
                return
            # Large bodies that handlers work on are bounded: above that no more is read.
            request.is_held = True
            if number:
                self._serving[number] = request
            self._unfinished_bytes += request.nbytes
            if self._unfinished_bytes > self._limits.unfinished_bytes:
                self._pause_or_go_on()

    # What is sent.

    def send(
        self,
        kind: int,
        request_id: int,
        message: Message | None = None,
        segments: Sequence[Segment] = (),
        *,
        at_once: bool = False,
        copied: bool = False,
    ) -> list[Buffer]:
        """Make a frame and send it; return its buffers.

        ``at_once``: a small one waits for no others of this turn, which costs another turn.
        ``copied``: the peer is lent a copy of the segments, and never their own memory.

        Raises:
            LocalProtocolError: It is larger than the limits allow.
        """
        loan: Loan | None = None
        sharing, limits, lengths, body = self.sharing, self._limits, _NONE, _NONE
        count = nbytes = 0
        try:
            try:
                header = b"" if message is None else to_header(message)
            except UNENCODABLE:
                header = encode(cast(Message, message))  # says so
            size = len(header)
            if type(segments) is Joined:
                lengths, body = segments.lengths, [*filter(len, segments)]
            elif segments:
                lengths, body = flat(segments)
            if lengths:
                count, nbytes = len(lengths), sum(lengths)
            if nbytes > self._plain_bytes or size > limits.header_bytes or count > limits.segments:
                check_sizes(LocalProtocolError, limits, size, count, nbytes, lengths)
                if nbytes > LENT_ABOVE_BYTES and sharing is not None:
                    loan = sharing.lend(body, nbytes, copied=copied)
        except LocalProtocolError as exc:
            exc.add_note(f"while sending {type(message).__name__} to {self.handshake.peer_task}")
            raise
        if loan is not None:
            head = encode_head(kind, request_id, header, lengths, loan.extents)
        else:  # the same, and each call of a function would be one more for each message
            pack = with_lengths(PREFIX_FORMAT, count).pack
            head = pack(MAGIC, VERSION, kind, 0, request_id, size, count, nbytes, *lengths) + header
        if self.tap is not None:
            table = len(head) - PREFIX_BYTES - len(header)  # lengths, extents
            self.tap(kind | SENT, request_id, header, table + nbytes)
        buffers: list[Buffer] = [head] if loan is not None else [head, *body]
        if self._closing:
            return buffers
        if loan is not None or nbytes > SMALL_BODY_BYTES:  # no header is overtaken
            self._waiting.append((buffers, loan))
            if len(self._waiting) == 1:
                self._go_on_writing()
            return buffers
        nbytes += len(head)
        frame = b"".join(buffers) if body else head
        if self._waiting and self._in_order:
            self._waiting.append(([frame], None))
        elif at_once and not (self._flush_due or self._small or (sharing and sharing.has_to_say)):
            if not self._transport.is_closing():
                self.bytes_sent += nbytes
                self._transport.writelines((frame,))
        else:
            self._small.append(frame)
            self._small_bytes += nbytes
            if self._small_bytes > SMALL_BODY_BYTES or (at_once and not self._flush_due):
                self.flush()
            elif not self._flush_due:
                self._flush_due = True
                self._loop.call_soon(self.flush)
        return buffers

    def flush(self) -> None:
        """Write small messages now, not at the end of this turn: the peer can begin with them."""
        self._flush_due, small = False, self._small
        if self.sharing is not None and self.sharing.has_to_say:
            # First: the peer may need the memory for what comes after them.
            due = self.sharing.due()
            said = [PREFIX.pack(MAGIC, VERSION, kind, 0, number, 0, 0, 0) for kind, number in due]
            small = [*said, *small]
        if small:
            self._small, self._small_bytes = [], 0
            if not self._closing and not self._transport.is_closing():
                data = small[0] if len(small) == 1 else b"".join(small)
                self.bytes_sent += len(data)
                self._transport.writelines((data,))

    def _write(self, buffers: list[Buffer]) -> None:
        if not self._transport.is_closing():
            self.bytes_sent += sum(map(len, buffers))
            self._transport.writelines(buffers)

    def _go_on_writing(self, *, at_once: bool = False) -> None:
        """Write what waits, none of which may change, while there is room; ``at_once``: anyway."""
        while self._waiting and not self._closing and (self._writable or at_once):
            buffers, loan = self._waiting[0]
            while loan is not None and loan.sources and not loan.copy_part():
                if not at_once:
                    self._room.clear()  # nothing may overtake it
                    self._loop.call_soon(self._go_on_writing)
                    return
            self._waiting.popleft()
            if loan is not None and self.sharing is not None:
                self.sharing.sent(loan)
            self.flush()
            self._write(buffers)
        if self._writable:
            self._room.set()

    def _withdraw(self, buffers: list[Buffer]) -> bool:
        """Take back what was to be sent; return False if that is too late."""
        for index, (waiting, loan) in enumerate(self._waiting):
            if waiting is buffers:
                del self._waiting[index]
                if loan is not None and self.sharing is not None:
                    self.sharing.withdrawn(loan)
                return True
        return False

    async def wait_writable(self) -> None:
        """Wait until large messages need not wait, or the connection is gone.

        For whoever makes the next large message only then. Cancellation: safe.
        """
        await self._room.wait()

    def pause_writing(self) -> None:
        """The transport holds more than it should."""
        self._writable = False
        self._room.clear()

    def resume_writing(self) -> None:
        """The transport has room again: large messages that waited go on."""
        self._writable = True
        self._go_on_writing()

    # Its beginning.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        self._transport = transport
        seconds = self._limits.handshake_seconds
        late = ConnectionLost(f"the handshake was not over within {seconds} s")
        self._deadline = self._loop.call_later(seconds, self._end, late)
        if self._closing:  # before it was up
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        with contextlib.suppress(OSError):  # the peer may be gone already
            set_options(transport.get_extra_info("socket"))
            self.peername = name_of(transport.get_extra_info("peername"))
        self._owner.made(self, transport.get_extra_info("peername"))
        if not self._closing:
            self._go_on_shaking_hands()

    def _go_on_shaking_hands(self) -> Frame | None:
        """Say what there is to say; once open, return the first frame if it is there."""
        handshake = self.handshake
        self._write(handshake.data_to_send())
        if handshake.state is State.CLOSED:
            self.close()
        elif handshake.state is State.OPEN:
            self.task, self.incarnation = handshake.peer_task, handshake.peer_incarnation
            self.client, self.lane = (self.task, self.incarnation), handshake.lane
            self._decoder.limits = self._limits
            self.is_open = True
            self._in_order = self.lane != BULK
            self.holds = int(not self.task.startswith("/job:worker/"))
            self._deadline.cancel()
            self.settled.set()
            self._owner.opened(self)
            if not self._closing:
                return self._decoder.next_frame()
        return None

    def refuse(self, refused: Refused) -> None:
        """Turn the peer away in the middle of its handshake, and say why."""
        if not self._closing:
            self.handshake.refuse(refused)
            self._go_on_shaking_hands()

    def share(self, channel: SideChannel) -> None:
        """The peer is a task of this host: what is large is lent. Before anything is said."""
        memory, waker = self._owner.platform.memory, Waker(self.flush, RETURN_WITHIN_S)
        self.sharing = Sharing(memory, channel, waker)
        self._decoder.borrow = self.sharing.borrow

    # Its end.

    def close(self) -> None:
        """Close once everything is written."""
        if self._closing or self._transport is None:
            self._closing = True
            return
        self.flush()
        self._go_on_writing(at_once=True)
        self._closing = True
        self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; open calls fail with ConnectionLost caused by ``error``.

        The caller knows why, and logs it if a user needs it.
        """
        self.ended_here = True
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._closing = True
        if self.error is None:
            self.error = error
        if self._transport is not None:
            self._transport.abort()
        if self.sharing is not None and not self.is_open:
            # Nothing is lent; and uvloop tells no end of a connection whose making was cancelled.
            self.sharing.close()

    def fail(self, error: Exception) -> None:
        """Close because of ``error``, and say where it came from if that was not foreseen."""
        if not isinstance(error, PsyncError):
            logger.error("a message of %s failed", self.handshake.peer_task, exc_info=error)
        if self.is_open or self._closing:
            self._end(error)
            return
        self.error = error
        self._write(self.handshake.data_to_send())  # what a stranger may know of it
        self._closing = True
        self._transport.close()  # once that is on its way; within the deadline

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is open, and tell who asked to be told, once."""
        self.error = self.error or exc
        if self.error is None and self._decoder.receiving and not self._closing:
            self.error = ConnectionLost("the peer closed the connection in the middle of a message")
        self._closing = True
        self._small.clear()
        self._waiting.clear()
        self._room.set()
        self._deadline.cancel()
        if self.sharing is not None:
            self.sharing.close()
        self.is_open, self.is_closed = False, True
        self._gone.set()
        self.settled.set()
        for number in list(self._calls):
            call = self._calls.pop(number, None)
            if call is not None:  # not given up by who was told before
                _tell(call[0], self._lost())
        for pong in self._pongs:
            fail(pong, self._lost())
        self._pongs.clear()
        # What waits for its time is given up; handlers go on.
        for request in list(self._serving.values()):
            if not request.in_coroutine:
                request.give_up()
        self._owner.gone(self)
        for listener in self.on_closed:
            listener(self)

    async def wait_closed(self) -> None:
        """Wait until the connection, if it was ever made, is gone. Cancellation: safe."""
        if self._transport is not None:
            await self._gone.wait()


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _tell(then: Then, outcome: Frame | Exception) -> None:
    if not isinstance(then, asyncio.Future):
        then(outcome)
    elif isinstance(outcome, Exception):
        fail(then, outcome)
    elif not then.done():
        then.set_result(outcome)
