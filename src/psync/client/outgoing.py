"""Delivery of what a task changes on ps tasks: each change at most once, whatever is lost.

A *delivery* is one change, in one message or several: an update (a message to each ps), a
contribution (parts staged on every ps, then the word to ps 0), a take. It has a number at each
place whose answer it waits for: a ps, or a group or accumulator on one. The messages bear these
numbers and say which smaller ones are answered (``client.numbers``); the ledger of a ps answers a
repetition from memory.

    state       meaning                               leaves it by
    drawn       it has its numbers                    the first message → under way
    under way   on a connection, or waiting for one   every answer → answered; an error, or its
                                                      caller's cancellation → given up
    answered    the caller has the answers            its numbers are acknowledged
    given up    nobody waits for an answer; it may    its numbers are acknowledged
                have been served

    dies, or is lost                    what follows
    a connection, a message, an answer  ``PsLink`` sends the message again, under the same number
    a ps that has a backup              the coordinator's link waits for the failover, then sends it
                                        to that. A worker's session ends, see ``client.lanes``
    a ps, before a rollback             the link waits; all messages of an update are sent again
                                        under the same numbers, also those that were answered: what
                                        one ps has undone no other may keep. A worker's session ends
    a ps, for good                      ParameterServerLost to the caller, when all messages have
                                        ended; those to other ps tasks may have been served
    the caller (cancelled)              shielded: it goes on, its error is logged; ``drain`` waits
                                        for it. Otherwise it is given up
    this task                           ps tasks fence it. Its closure runs again elsewhere and
                                        sends the same (closure, ordinal): answered "duplicate"
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from psync.client.numbers import Numbers
from psync.client.ps_link import Answers, Call
from psync.errors import ClosedError, FencedError, TaskLost
from psync.net.shielding import shielded
from psync.wire.codec import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Outgoing:
    """All deliveries of one client of ps tasks."""

    def __init__(self) -> None:
        self.timeline = 0  # grows whenever all ps tasks have rolled back to a snapshot
        self.begun: set[asyncio.Future[Any]] = set()  # shielded from cancellation
        self._closed = False

    async def deliver(
        self, places: Sequence[Numbers], calls_of: Callable[[Sequence[int]], Sequence[Call[M]]]
    ) -> list[M]:
        """Deliver an update; return the answer to each of its messages.

        Args:
            places: Where it has numbers.
            calls_of: Returns its messages, given these numbers.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: As ``shielded``.
        """
        self._check_open()
        delivery = _Delivery(self, places, calls_of)
        try:
            return await delivery.end()
        except asyncio.CancelledError:
            if self._closed:
                delivery.give_up()
            else:
                self._go_on(delivery)
            raise

    def answered(self, places: Sequence[Numbers], numbers: Sequence[int]) -> None:
        """Acknowledge these numbers, with the next messages to their places."""
        for place, number in zip(places, numbers, strict=True):
            place.answered(number)

    def ask(self, calls: Sequence[Call[M]]) -> Answers[M]:
        """Send the messages of a delivery."""
        return Answers(calls)

    async def shielded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` and return what it returns.

        Raises:
            ClosedError: The client was closed; nothing is begun.
            Exception: What it raises.

        Cancellation: It goes on in the background, see ``drain``; an error is logged then.
        """
        self._check_open()
        under_way = asyncio.ensure_future(work())
        self.begun.add(under_way)
        under_way.add_done_callback(self.begun.discard)
        try:
            return await shielded(under_way)
        except asyncio.CancelledError:
            under_way.add_done_callback(_note_result)
            raise

    def _check_open(self) -> None:
        if self._closed:  # what is stopped would begin to unlock, and nobody would stop that
            raise ClosedError("the connections to the ps tasks are closed")

    def _go_on(self, delivery: _Delivery[Any]) -> None:
        """Do the rest of a delivery without its caller, who was cancelled."""

        def ended(rest: asyncio.Future[Any]) -> None:
            self.begun.discard(rest)
            if rest.cancelled():  # all is closed; perhaps before it has begun
                delivery.give_up()
            _note_result(rest)

        rest = asyncio.ensure_future(delivery.end())
        self.begun.add(rest)
        rest.add_done_callback(ended)

    async def drain(self) -> None:
        """Wait for what was begun and whose callers were cancelled. Cancellation: safe."""
        while self.begun:
            await asyncio.wait(list(self.begun))

    async def close(self, patience_s: float = 0.0) -> None:
        """Begin nothing more; stop what has not ended after so long. Cancellation: safe."""
        self._closed = True
        if self.begun and patience_s:
            await asyncio.wait(list(self.begun), timeout=patience_s)
        for work in self.begun:
            work.cancel()
        await asyncio.gather(*self.begun, return_exceptions=True)


class _Delivery(Generic[M]):
    """One delivery: no task while its caller waits, who passes it on when cancelled.

    Args:
        outgoing: Of which it is one.
        places: As for ``Outgoing.deliver``.
        calls_of: As for ``Outgoing.deliver``.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        places: Sequence[Numbers],
        calls_of: Callable[[Sequence[int]], Sequence[Call[M]]],
    ) -> None:
        self._outgoing = outgoing
        self._places = places
        self._calls_of = calls_of
        self._numbers = [place.draw() for place in places]
        self._ask()

    def _ask(self) -> None:
        self._timeline = self._outgoing.timeline
        try:
            self._answers = self._outgoing.ask(self._calls_of(self._numbers))
        except BaseException:
            self._outgoing.answered(self._places, self._numbers)
            raise

    async def end(self) -> list[M]:
        """Wait for the answers, and return them.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: It is under way as before, and somebody else may wait for its end.
        """
        outgoing = self._outgoing
        while True:
            settled = self._answers.settled()
            outgoing.begun.add(settled)
            try:
                await settled
            finally:
                outgoing.begun.discard(settled)
            try:
                messages = self._answers.messages()
            except Exception:
                outgoing.answered(self._places, self._numbers)
                raise
            if outgoing.timeline == self._timeline:
                outgoing.answered(self._places, self._numbers)
                return messages
            self._ask()

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._answers.give_up()
        self._outgoing.answered(self._places, self._numbers)


def _note_result(work: asyncio.Future[Any]) -> None:
    """Log how a delivery ended whose caller was cancelled."""
    if not work.cancelled() and (error := work.exception()) is not None:
        level = logging.DEBUG if isinstance(error, FencedError | TaskLost) else logging.INFO
        logger.log(level, "a push whose step was cancelled failed: %s", error)
