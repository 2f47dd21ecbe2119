"""Requests that a test makes without a connection, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import CoroutineType
from typing import Any, NamedTuple

from psync.net.connection import AsIfFrom, Handler, OwnRequest
from psync.wire.codec import Message, encode
from psync.wire.frames import Frame


class Reply(NamedTuple):
    """An answer."""

    message: Message
    segments: Sequence[Any] = ()


Outcome = Reply | BaseException


class Lent(list[bytearray]):
    """Segments that a ps may read where they are, as in memory that a worker shares with it."""

    is_kept = False

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(each).toreadonly() for each in self]

    def keep(self) -> list[memoryview]:
        self.is_kept = True
        return self.views


class Asked(OwnRequest[Any]):
    """A request; ``outcome`` is its answer or error, once it is there."""

    def __init__(
        self,
        peer: Any,
        message: Message,
        segments: Sequence[memoryview] = (),
        then: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(peer, message, segments, self._settle)
        self.header = encode(message)
        self.outcome: Outcome | None = None
        self._told = then

    def _settle(self, outcome: Any) -> None:
        self.outcome = Reply(*outcome) if isinstance(outcome, tuple) else outcome
        if self._told is not None:
            self._told(self.outcome)

    def done(self) -> bool:
        """Whether it is answered."""
        return self.outcome is not None

    def result(self) -> Reply:
        """The answer. Raises the error, if it is one."""
        assert self.outcome is not None, f"{self.message} has to wait"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def frame_of(message: Message, segments: Sequence[Any] = ()) -> Frame:
    """A reply, as who has asked gets it."""
    frame = Frame()
    frame.message, frame.segments = message, list(segments)
    return frame


def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run it as a connection would."""
    return asyncio.get_running_loop().create_task(work)


def peer_of(client: tuple[str, int], **state: Any) -> AsIfFrom:
    """What stands for the connection of a client."""
    return AsIfFrom(client, state, spawn)


def arrived(
    handler: Handler,
    peer: Any,
    message: Message,
    segments: Sequence[Any] = (),
    then: Callable[[Any], None] | None = None,
) -> Asked:
    """A request whose body has come in, to where the handler wants it; it is not served yet."""
    asked = Asked(peer, message, [memoryview(bytes(each)) for each in segments], then)
    if handler.prepare is not None and segments:
        whole = b"".join(map(bytes, segments))
        asked.lengths = tuple(map(len, segments))
        asked.nbytes = len(whole)
        asked.borrowed = segments if isinstance(segments, Lent) else None
        views, at = list(handler.prepare(asked)), 0
        if asked.borrowed is not None and asked.borrowed.is_kept:
            asked.segments = views
            return asked
        for view in views:
            view[:] = whole[at : at + len(view)]
            at += len(view)
        assert at == len(whole)
        asked.segments = views
    return asked


def served(
    handler: Handler,
    peer: Any,
    message: Message,
    segments: Sequence[Any] = (),
    then: Callable[[Any], None] | None = None,
) -> Asked:
    """Let a handler serve a request, as a connection would; ``then`` gets the outcome."""
    asked = Asked(peer, message, (), then)
    try:
        asked = arrived(handler, peer, message, segments, then)
        if isinstance(work := handler.run(asked), CoroutineType):
            asked.start(work)
    except Exception as exc:
        asked.fail(exc)
    return asked
