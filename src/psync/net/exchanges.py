"""Requests and their answers while they are under way: ours, and theirs.

``rpc.Peer`` and its ``serving.RequestServer`` keep these for each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from psync.wire.codec import Message
from psync.wire.frames import Segment

Into = Callable[[Message, tuple[int, ...]], Sequence[memoryview]]


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

    __slots__ = ("_deliver", "_on_given_up", "outcome", "over")

    def __init__(self, on_given_up: Callable[[Later], None]) -> None:
        self.outcome: Reply | Exception | None = None  # what was given
        self.over = False  # given, or given up
        self._on_given_up = on_given_up
        self._deliver: Callable[[Reply | Exception], None] | None = None

    def give(self, outcome: Reply | Exception) -> None:
        """Answer; nothing if that is over."""
        if not self.over:
            self.over, self.outcome = True, outcome
            if self._deliver is not None:
                self._deliver(outcome)

    def give_up(self) -> None:
        """Nobody wants the answer any more."""
        if not self.over:
            self.over = True
            self._on_given_up(self)

    def deliver_to(self, deliver: Callable[[Reply | Exception], None]) -> None:
        """Say where the answer goes."""
        if self.outcome is not None:
            deliver(self.outcome)
        else:
            self._deliver = deliver


class Then:
    """In a future's place: hands on what comes in the same turn of the loop."""

    __slots__ = ("_is_done", "_then")

    def __init__(self, then: Callable[[Received | Exception], None]) -> None:
        self._then = then
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, received: Received) -> None:
        self._is_done = True
        self._then(received)

    def set_exception(self, error: Exception) -> None:
        self._is_done = True
        self._then(error)

    def exception(self) -> None:
        """Nothing has to be looked at."""


class Call:
    """A request of ours that is not answered yet."""

    __slots__ = ("future", "into", "reply", "timer")

    def __init__(self, future: asyncio.Future[Received] | Then, into: Into | None) -> None:
        self.future = future
        self.into = into  # where the reply's body belongs, or None: anywhere
        self.reply: Message | None = None  # decoded before its body is there
        self.timer: asyncio.TimerHandle | None = None


class Serving:
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


class Refusal:
    """Token of a request that ``prepare`` refused: its body is thrown away."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def fail(future: asyncio.Future[Any] | Then, error: Exception) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if not future.done():
        future.set_exception(error)
        future.exception()
