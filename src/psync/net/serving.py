"""The server side of a connection: request handlers, called inline or run as tasks.

A handler is a plain function that returns the reply, or a coroutine for it. Those that
need no waiting are called and answered in the same turn of the loop: no task is made for
a small pull. A handler that waits for other peers returns a ``Later``, and its reply leaves in the
turn of the loop in which it is given. ``Handler.prepare`` runs as soon as a request's header is
there: it names the memory for the body, or refuses the request before memory is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from psync.errors import LocalProtocolError, RemoteProtocolError
from psync.wire.codec import Message, decode
from psync.wire.frames import Frame, Kind, Segment
from psync.wire.limits import Limits
from psync.wire.remote_errors import failure_of

if TYPE_CHECKING:
    from psync.net.peer import Peer
    from psync.wire.lent import Borrowed


Into = Callable[[Message, tuple[int, ...], "Borrowed | None"], Sequence[memoryview]]
"""Returns memory for a reply's body, given its message and the lengths of its segments; or that
body itself, kept where it is, if it is lent."""


class Reply(NamedTuple):
    """What came back, or what to send back."""

    message: Message
    segments: Sequence[Segment] = ()


class Received(NamedTuple):
    """A reply as the caller gets it."""

    message: Message
    segments: list[memoryview]


class Later:
    """The answer to a request that waits for something, given when the time has come.

    What a future would be, without a task that waits for it: the answer leaves in the same turn of
    the loop in which it is given. Given up when the caller does, or the connection goes.

    Args:
        on_given_up: Told that nobody wants the answer any more.
    """

    __slots__ = ("_deliver", "_on_given_up", "nbytes", "outcome", "over")

    def __init__(self, on_given_up: Callable[[Later], None]) -> None:
        self.outcome: Reply | Exception | None = None  # given before it was said where it goes
        self.over = False  # given, or given up
        self.nbytes = 0  # that came with the request
        self._on_given_up = on_given_up
        self._deliver: Callable[[Reply | Exception], None] | None = None

    def give(self, outcome: Reply | Exception) -> None:
        """Answer; nothing if that is over."""
        if self.over:
            return
        self.over = True
        # It refers to this, and an answer to what it lends: that must not wait for the collector.
        deliver, self._deliver = self._deliver, None
        if deliver is None:
            self.outcome = outcome
        else:
            deliver(outcome)

    def give_up(self) -> None:
        """Nobody wants the answer any more."""
        if not self.over:
            self.over, self._deliver = True, None
            self._on_given_up(self)

    def deliver_to(self, deliver: Callable[[Reply | Exception], None]) -> None:
        """Say where the answer goes; once."""
        if self.outcome is not None:
            deliver(self.outcome)
        else:
            self._deliver = deliver


@dataclass(slots=True, eq=False)
class Serving:
    """A request of theirs that takes time; given up before it runs, it begins all the same."""

    task: asyncio.Task[Any] | None = None  # once it runs
    given_up: bool = False  # the caller does not want to know any more

    def give_up(self) -> None:
        self.given_up = True
        if self.task is not None:
            self.task.cancel()

    def begin(self) -> None:
        self.task = asyncio.current_task()
        if self.given_up:
            self.give_up()


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if not future.done():
        future.set_exception(error)
        future.exception()


# Members of an enum are slow to look up.
_REQUEST, _REPLY, _ERROR = int(Kind.REQUEST), int(Kind.REPLY), int(Kind.ERROR)

Answer = Reply | Later | None

Run = Callable[["Peer", Any, list[memoryview]], "Answer | Awaitable[Answer]"]
Prepare = Callable[["Peer", Any, tuple[int, ...]], Sequence[memoryview]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Handler:
    """How one type of message is served.

    Attributes:
        run: Called with (peer, message, segments) once the message is complete. Returns a
            Reply, a Later, or an awaitable of either; for notifications, None or an awaitable of
            None.
            What it raises goes to the caller; for notifications, it ends the connection.
            Cancelled when the caller gives up, or this task closes; not when the connection
            goes. A caller that gives up cancels it at its first await at the earliest: what
            was noted before can be undone there.
        prepare: Called with (peer, message, lengths of the segments) when the header is
            there, if there are segments. Returns where the body belongs, as views whose
            borders need not be those of the segments, and which ``run`` gets as its
            ``segments``; or raises to refuse the message. A body that is lent (``Peer.lent``)
            may be kept, and returned, as it is.
    """

    run: Run
    prepare: Prepare | None = None


class RequestServer:
    """Serves what comes in on one connection.

    Invariant: each request is answered once, with a reply or an error, unless the peer gives it up
    or the connection goes.

    Args:
        peer: The connection, as handlers know it.
        handlers: Who serves which message.
        limits: How many bytes handlers may work on before no more is read.
        spawn: Starts a handler that takes time.
    """

    def __init__(
        self, peer: Peer, handlers: dict[type[Message], Handler], limits: Limits, spawn: Spawn
    ) -> None:
        self._peer = peer
        self._connection = peer.connection
        self._handlers = handlers
        self._limits = limits
        self._spawn = spawn
        self._serving: dict[int, Serving | Later] = {}  # requests that take time, by id
        self._unfinished_bytes = 0  # bodies that handlers still work on
        self._reading_paused = False

    def handler_of(self, message: Message) -> Handler:
        """Return who serves a message.

        Raises:
            RemoteProtocolError: Nobody does.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"this task does not serve {type(message).__name__}")
        return handler

    def serve(self, frame: Frame) -> None:
        """Serve a request or notification that is complete.

        Raises:
            RemoteProtocolError: The peer must not send that.
        """
        request_id, token = frame.request_id, frame.token
        if (request_id == 0) is (frame.kind == _REQUEST) or request_id in self._serving:
            raise RemoteProtocolError(f"request id {request_id} cannot be used")
        if isinstance(token, Exception):  # of ``prepare``
            self._failed(request_id, token)
            return
        message = token if isinstance(token, Message) else decode(frame.header)
        handler = self.handler_of(message)
        try:
            answer = handler.run(self._peer, message, frame.segments)
        except Exception as exc:
            self._failed(request_id, exc)
            return
        if answer is None or isinstance(answer, Reply):
            self._answer(request_id, answer)
        elif isinstance(answer, Later):
            self._answer_later(request_id, answer, frame.nbytes)
        else:
            self._serve_slowly(request_id, answer, frame.nbytes)

    def give_up(self, request_id: int) -> None:
        """The caller does not want an answer any more."""
        serving = self._serving.pop(request_id, None)
        if isinstance(serving, Later):
            self._let_go(serving.nbytes)
        if serving is not None:
            serving.give_up()

    def statistics(self) -> dict[str, int]:
        """Return how many requests are worked on, and the bytes of their bodies."""
        return {"serving": len(self._serving), "unfinished_bytes": self._unfinished_bytes}

    def closed(self) -> None:
        """The connection is gone. What waits for its time is given up; handlers go on."""
        for serving in list(self._serving.values()):
            if isinstance(serving, Later):
                serving.give_up()

    def _answer_later(self, request_id: int, later: Later, nbytes: int) -> None:
        """Answer when that is given."""
        has_to_wait = later.outcome is None

        def deliver(outcome: Reply | Exception) -> None:
            if self._serving.get(request_id) is later:
                del self._serving[request_id]
            if isinstance(outcome, Exception):
                self._failed(request_id, outcome)
            else:
                # It has waited long enough, while others of this turn are still to be answered.
                self._answer(request_id, outcome, at_once=has_to_wait)
            if has_to_wait:
                self._let_go(later.nbytes)

        if self._peer.is_closed:
            later.give_up()
            return
        if request_id:
            self._serving[request_id] = later
        if has_to_wait:
            later.nbytes = nbytes
            self._hold(nbytes)
        later.deliver_to(deliver)

    def _hold(self, nbytes: int) -> None:
        """The bodies that handlers work on are bounded: above that nothing more is read."""
        self._unfinished_bytes += nbytes
        if self._unfinished_bytes > self._limits.unfinished_bytes and not self._reading_paused:
            self._reading_paused = True
            self._connection.pause_reading()

    def _let_go(self, nbytes: int) -> None:
        self._unfinished_bytes -= nbytes
        if self._reading_paused and self._unfinished_bytes <= self._limits.unfinished_bytes:
            self._reading_paused = False
            self._connection.resume_reading()

    def _serve_slowly(self, request_id: int, answer: Awaitable[Answer], nbytes: int) -> None:
        serving = Serving()
        if request_id:
            self._serving[request_id] = serving
        task = self._spawn(self._answer_when_ready(request_id, answer, serving, nbytes))
        self._hold(nbytes)

        def served(task: asyncio.Task[None]) -> None:
            if self._serving.get(request_id) is serving:
                del self._serving[request_id]
            if asyncio.iscoroutine(answer):
                answer.close()  # if the task was cancelled before its first step: we close
            self._let_go(nbytes)

        task.add_done_callback(served)

    async def _answer_when_ready(
        self, request_id: int, answer: Awaitable[Answer], serving: Serving, nbytes: int
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
            if isinstance(reply, Later):  # until that is given, the body is still needed
                self._answer_later(request_id, reply, nbytes)
            else:
                self._answer(request_id, reply)

    def _answer(self, request_id: int, reply: Reply | None, *, at_once: bool = False) -> None:
        if not request_id:
            return
        try:
            if reply is None:
                raise LocalProtocolError("the handler of a request gave no reply")
            self._connection.send_message(_REPLY, request_id, *reply, at_once=at_once)
        except LocalProtocolError as exc:
            self._answer_error(request_id, exc)

    def _failed(self, request_id: int, exc: Exception) -> None:
        if request_id:
            self._answer_error(request_id, exc)
        else:
            self._connection.fail(exc)  # nobody waits for an answer, but it must not be lost

    def _answer_error(self, request_id: int, exc: BaseException) -> None:
        self._connection.send_message(_ERROR, request_id, failure_of(exc))
