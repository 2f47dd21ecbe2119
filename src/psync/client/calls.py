"""Requests to ps tasks: parallel calls, sequence numbers of updates, shielding of pushes.

A push once begun runs to completion (shielded), whatever becomes of the step that made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from psync.client.ps_link import PsLink, Question
from psync.errors import RemoteProtocolError
from psync.net.endpoint import Endpoint
from psync.net.peer import Peer, Received
from psync.numerics.blocks import BlockPool
from psync.wire.codec import Message
from psync.wire.frames import Segment
from psync.wire.ps_messages import DefineOptimizer, Pushed

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

Spread = list[tuple[int, int]] | None
"""(ps, sequence there) of the other messages of an update; None: it is the only one."""


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """One message of an update, to one ps."""

    link: PsLink
    build: Callable[[Peer, int, Spread], Message]  # of its sequence, and of its update's spread
    segments: Sequence[Segment] = ()
    bulk: bool = False
    set_id: int | None = None
    locked: bool = False


class PsCalls:
    """Links to all ps tasks, and how calls go over them.

    Args:
        endpoint: Bears the client's name and incarnation.
        addresses: Of the ps tasks, in order.
        pool: Memory of pulled arrays, recycled once nobody holds them.
        lost_after_s: A ps that cannot be reached for this many seconds is lost.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Sequence[str],
        pool: BlockPool,
        lost_after_s: float = 15.0,
    ) -> None:
        self.links = [
            PsLink(endpoint, index, address, lost_after_s)
            for index, address in enumerate(addresses)
        ]
        self._pool = pool
        self.parts = endpoint.platform.parts
        self._pushes: set[asyncio.Future[Any]] = set()  # begun, shielded from cancellation
        self.timeline = 0  # grows whenever all ps tasks have rolled back to a snapshot

    async def shielded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` and return what it returns.

        Raises:
            Exception: What it raises.

        Cancellation: It goes on in the background, see ``drain``; an error is logged then.
        """
        under_way = asyncio.ensure_future(work())
        self._pushes.add(under_way)
        under_way.add_done_callback(self._pushes.discard)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            under_way.add_done_callback(_note_result)
            raise

    async def together(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Make all ``calls`` at once and return what they return.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: All are cancelled.
        """
        return await all_of(calls)

    async def define_optimizer(self, optimizer: int, config: dict[str, Any]) -> None:
        """Make an optimizer known to all ps tasks, so that its slots can be read.

        Raises:
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        message = DefineOptimizer(optimizer, config)
        await all_of([link.call(lambda peer: message) for link in self.links])

    async def update(self, parts: Sequence[UpdatePart]) -> list[Pushed]:
        """Send the messages of one update, all at once; return the answer to each.

        Each has a sequence of its own and names the others', so that a cut finds them all or none.
        They count as answered when all are: what one ps has been told to forget is settled on all.
        If ps tasks rolled back meanwhile, all are sent again, under the same sequences.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: As ``shielded``.
        """
        drawn = [(part.link.index, part.link.updates.draw()) for part in parts]

        async def send() -> list[Pushed]:
            try:
                while True:
                    timeline = self.timeline
                    answers = await self.together(
                        [
                            self._send_part(part, sequence, _others(drawn, position))
                            for position, (part, (_, sequence)) in enumerate(
                                zip(parts, drawn, strict=True)
                            )
                        ]
                    )
                    if self.timeline == timeline:
                        return answers
            finally:
                for part, (_, sequence) in zip(parts, drawn, strict=True):
                    part.link.updates.answered(sequence)

        return await self.shielded(send)

    async def _send_part(self, part: UpdatePart, sequence: int, spread: Spread) -> Pushed:
        received = await part.link.call(
            lambda peer: part.build(peer, sequence, spread), part.segments, bulk=part.bulk,
            set_id=part.set_id, locked=part.locked,
        )  # fmt: skip
        if not isinstance(received.message, Pushed):
            raise RemoteProtocolError(
                f"{part.link.task} answered an update with {type(received.message).__name__}"
            )
        return received.message

    async def drain(self) -> None:
        """Wait for pushes that were begun and whose callers were cancelled.

        Cancellation: Safe.
        """
        while self._pushes:
            await asyncio.wait(list(self._pushes))

    async def close(self) -> None:
        """Stop pushes that were begun, close all links. Cancellation: safe."""
        for work in self._pushes:
            work.cancel()
        await asyncio.gather(*self._pushes, return_exceptions=True)
        for link in self.links:
            await link.close()


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


async def ask(
    link: PsLink, message: Message, answer: type[M], segments: Sequence[Segment] = (), **lane: bool
) -> tuple[M, Sequence[memoryview]]:
    """Return the answer of a ps, which is of one kind, and what came with it.

    Args:
        link: To the ps.
        message: The request; it may be repeated.
        answer: The kind of message that is expected.
        segments: As for ``PsLink.call``, like ``lane``, and what it raises.
        lane: Over which connection.

    Raises:
        RemoteProtocolError: It answers something else.
    """
    received = await link.call(lambda _: message, segments, **lane)  # type: ignore[arg-type]
    if not isinstance(received.message, answer):
        raise RemoteProtocolError(
            f"{link.task} answered {type(message).__name__} with {type(received.message).__name__}"
        )
    return received.message, received.segments


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


def _others(drawn: Sequence[tuple[int, int]], position: int) -> Spread:
    if len(drawn) == 1:
        return None
    return [*drawn[:position], *drawn[position + 1 :]]


def _note_result(work: asyncio.Future[Any]) -> None:
    """Log how a push ended whose caller was cancelled."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.info("a push whose step was cancelled failed: %s", error)
