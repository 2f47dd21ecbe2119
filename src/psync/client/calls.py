"""Several requests at once: their answers in order, and the first error when all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from psync.client.ps_link import Question
from psync.errors import RemoteProtocolError
from psync.net.peer import Received
from psync.wire.codec import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Answers:
    """The answers to what is asked of several ps tasks at once, for one who waits for all.

    What ``all_of`` is for coroutines, and without them: every pull comes through here.

    Args:
        count: How many there will be.
    """

    __slots__ = ("_all", "_missing", "_outcomes", "questions")

    def __init__(self, count: int) -> None:
        self.questions: list[Question] = []
        self._outcomes: list[Received | Exception | None] = [None] * count
        self._missing = count
        self._all = asyncio.get_running_loop().create_future()

    def note(self, position: int, outcome: Received | Exception) -> None:
        """One of them is there."""
        self._outcomes[position] = outcome
        self._missing -= 1
        if not self._missing and not self._all.done():
            self._all.set_result(None)

    async def wait(self) -> list[Received]:
        """Return them, in order.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: All are given up.
        """
        try:
            if self._missing:
                await self._all
        finally:
            if self._missing:
                for question in self.questions:
                    question.give_up()
        received: list[Received] = []
        for outcome in self._outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome is not None, "none is missing"
            received.append(outcome)
        return received


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first error wins once all have ended, so nothing is left running.

    Like ``asyncio.gather``, but the last one needs no task: every pull and push comes through here.
    """
    others = [asyncio.ensure_future(call) for call in calls[:-1]]
    try:
        outcomes = [await _outcome(call) for call in (calls[-1], *reversed(others))]
    except BaseException:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        raise
    results: list[T] = []
    for outcome in reversed(outcomes):
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


async def _outcome(call: Awaitable[T]) -> T | Exception:
    try:
        return await call
    except Exception as exc:
        return exc


def expect(received: Received, kind: type[M], who: str, question: str) -> M:
    """Return the message of an answer.

    Args:
        received: The answer.
        kind: That it should be of.
        who: Gave it.
        question: What was asked: "a pull".

    Raises:
        RemoteProtocolError: It is of another kind.
    """
    message = received.message
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{who} answered {question} with {type(message).__name__}")
    return message
