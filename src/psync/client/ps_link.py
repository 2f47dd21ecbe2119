"""The link to one ps task: requests, each sent again until it is answered.

Every request to a ps may be repeated: pulls change nothing, updates bear an identity by
which the ps answers a repetition from memory. So a lost connection is made again (``lanes``) and
the request is sent again, until the ps has answered or is lost.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from psync.client.lanes import Lanes
from psync.closures.membership import backoff
from psync.errors import (
    ConnectionLost,
    LocalProtocolError,
    ParameterServerLost,
    RemoteProtocolError,
)
from psync.net.connection import Connection, Into
from psync.numerics.rules import Registered
from psync.wire.codec import Message, check
from psync.wire.frames import Frame, Segment
from psync.wire.lent import Borrowed
from psync.wire.tensors import to_bytes_view

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

MAX_LOSSES = 16
"""Connections that one request may outlive: more, and it is what breaks them."""

SETS_PER_CONNECTION = 8192
"""Sets of shards that a ps may be named by their numbers alone. Fewer than it allows: forgotten
ones stay known to a connection for its life, so a new one is made then, which knows none."""


class Question:
    """A request that nobody waits for in a coroutine."""

    end: Callable[[], object] | None = None  # while it is under way

    def give_up(self) -> None:
        """Call nothing more, and write no more to memory for the reply."""
        end, self.end = self.end, None
        if end is not None:
            end()


class PsLink(Lanes):
    """The way to one ps task.

    Attributes:
        plugins: What plugins have registered there, as it said when it was attached from here;
            None: it was not.
    """

    plugins: Sequence[Registered] | None = None

    async def call(
        self,
        build: Callable[[Connection], Message],
        segments: Sequence[Segment] = (),
        *,
        bulk: bool = False,
        into: Into | None = None,
        set_ids: Iterable[int] = (),
        locked: bool = False,
        cut: bool = False,
        urgent: bool = False,
        copied: bool = False,
    ) -> Frame:
        """Send a request that may be repeated, over and over until it is answered.

        Args:
            build: Makes the message for a connection: what it defines depends on that.
            segments: As for ``Connection.call``.
            bulk: Whether a large body goes or comes.
            into: As for ``Connection.call``.
            set_ids: The sets that the ps knows once it has answered: not before, as messages may
                overtake one another.
            locked: Whether it is about a lock, or said under one: then nothing may be in front of
                it that waits for a lock.
            cut: Whether it is about a cut, or a backup: then nothing may be in front of it that
                waits at a gate, or for the backup.
            urgent: Whether it is part of a recovery: others wait while that goes on, see ``hold``.
            copied: As for ``Connection.call``.

        Raises:
            ParameterServerLost: See ``peer``, also for its other errors.
            ConnectionLost: Again and again: the request itself seems to be the cause.
            LocalProtocolError: A field of it is of a wrong type.
            PsyncError: The ps's answer.

        Cancellation: Safe; the request may have been served.
        """
        lane = "cut" if cut else "lock" if locked else "bulk" if bulk else "control"
        self.num_calls += 1
        losses = 0
        while True:
            if self._released is not None and not urgent:
                await self._released.wait()
            peer = self._peers.get(lane)
            if peer is None or not peer.is_open or self.lost is not None:
                try:
                    peer = await self.peer(lane)
                except ParameterServerLost:
                    if self._released is None or urgent:
                        raise
                    continue  # a recovery has begun
                if self._released is not None and not urgent:
                    continue  # likewise, and the ps is there, but empty
            try:
                message = build(peer)
                received = await peer.call(message, segments, into=into, copied=copied)
            except ConnectionLost as exc:
                losses += 1
                check(message)  # or it would cost the next connections, too
                if losses == MAX_LOSSES:
                    raise ConnectionLost(
                        f"{self.task}: {losses} connections in a row were lost with the same "
                        f"request, the last because: {exc.message}"
                    ) from exc
                logger.debug("%s: repeating a request: %s", self.task, exc.message)
            else:
                self._note_known(peer, set_ids)
                return received
            finally:
                self.num_calls += 1
            if losses > 1:
                await asyncio.sleep(backoff(losses, self._endpoint.platform.uniform()))

    def ask(self, request: Call[Any], then: Callable[[Frame | Exception], None]) -> Question:
        """As ``call``, without a coroutine while there is a connection and it lasts.

        Args:
            request: Of this link.
            then: Called once with the reply, or with what ``call`` would raise. Must not raise.

        Returns:
            The request, which can be given up.
        """
        _, build, _, _, segments, bulk, body, set_ids, locked, copied = request
        question, into = Question(), None if body is None else body.place

        def again() -> None:
            call = functools.partial(
                self.call, build, segments, bulk=bulk, into=into, set_ids=set_ids, locked=locked,
                copied=copied,
            )  # fmt: skip
            task = asyncio.get_running_loop().create_task(_tell(then, call))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            question.end = task.cancel

        peer = self._peers.get("lock" if locked else "bulk" if bulk else "control")
        if peer is None or not peer.is_open or self.lost is not None or self._released is not None:
            again()
            return question

        def answered(outcome: Frame | Exception) -> None:
            question.end = None  # which leads back here: memory would be held until it is collected
            self.num_calls += 1
            if isinstance(outcome, ConnectionLost):
                try:
                    check(message)  # or it would cost the next connections, too
                except LocalProtocolError as exc:
                    outcome = exc
                else:
                    again()
                    return
            if not isinstance(outcome, Exception):
                self._note_known(peer, set_ids)
            then(outcome)

        self.num_calls += 1
        try:
            message = build(peer)
            number = peer.ask(message, segments, answered, into, copied=copied)
            question.end = functools.partial(peer.give_up, number)
        except Exception as exc:
            then(exc)
        return question

    @staticmethod
    def _note_known(peer: Connection, set_ids: Iterable[int]) -> None:
        known: set[int] = peer.state["sets"]
        known.update(set_ids)
        if len(known) >= SETS_PER_CONNECTION:
            peer.close()  # what is under way is repeated on a new one

    @property
    def lends(self) -> bool:
        """Whether large bodies do not travel to it, since it reads this task's memory."""
        peer = self._peers.get("bulk")
        return peer is not None and peer.is_open and peer.sharing is not None

    def notify(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a notification if there is a connection."""
        peer = self._peers.get("control")
        if peer is not None and peer.is_open:
            peer.notify(message, segments)


Where = Callable[[Borrowed | None], Sequence[memoryview]]
"""Returns where a body belongs; or that body itself if it is lent, and kept."""


@dataclass(slots=True, eq=False)
class Body:
    """Where the body of an answer belongs."""

    lengths: tuple[int, ...]  # of the segments that are asked for
    where: Where  # for those that are not empty
    what: str  # has these lengths, for messages: "the shards"
    may_lack: bool = False  # whether an answer without a body is one, too
    got: tuple[int, ...] = ()  # lengths of what came

    def place(
        self, _: Message, lengths: tuple[int, ...], lent: Borrowed | None
    ) -> Sequence[memoryview]:
        """As ``Into``."""
        self.got = lengths
        if lengths == self.lengths:
            return self.where(lent)
        return [to_bytes_view(np.empty(sum(lengths), np.uint8))]  # thrown away

    def check(self, task: str) -> None:
        """Check that it came.

        Raises:
            RemoteProtocolError: It has other sizes.
        """
        if self.got != self.lengths and (self.got or not self.may_lack):
            raise RemoteProtocolError(
                f"{task} sent wrong sizes for {self.what}: expected {sum(self.lengths)} bytes, got "
                f"{sum(self.got)}"
            )


def copied_to(targets: Sequence[memoryview]) -> Where:
    """Return what says that a body belongs there, whether it is lent or not."""
    return lambda lent: targets


class Call(NamedTuple, Generic[M]):
    """A request to a ps; arguments of ``PsLink.call`` as there."""

    link: PsLink
    build: Callable[[Connection], Message]
    kind: type[M]  # of the answer
    question: str  # for messages: "a pull"
    segments: Sequence[Segment] = ()
    bulk: bool = False
    body: Body | None = None  # of the answer; None: it is dropped, if there is one
    set_ids: Sequence[int] = ()
    locked: bool = False
    copied: bool = False


async def together(calls: Sequence[Call[M]]) -> list[M]:
    """Make all calls at once and return the answers, in order.

    What ``calls.all_of`` is for coroutines, and without them: every pull and push comes through
    here.

    Raises:
        Exception: The first error, once all have ended.

    Cancellation: All are given up.
    """
    return await Answers(calls).all()


class Answers(Generic[M]):
    """Calls that are made at once, and the answers to them.

    Args:
        calls: Are made by this.
    """

    def __init__(self, calls: Sequence[Call[M]]) -> None:
        self._calls = calls
        self._outcomes: list[Frame | Exception | None] = [None] * len(calls)
        self._missing = len(calls)
        self._settled: asyncio.Future[None] | None = None  # while somebody waits
        self._questions: list[Question] = []
        self._ask(range(len(calls)))

    def _ask(self, positions: Sequence[int]) -> None:
        for position in positions:
            call = self._calls[position]
            self._questions.append(call.link.ask(call, functools.partial(self._note, position)))

    def _note(self, position: int, outcome: Frame | Exception) -> None:
        """One of them is there."""
        self._outcomes[position] = outcome
        self._missing -= 1
        if not self._missing and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def settled(self) -> asyncio.Future[None]:
        """Return what ends when all have ended; to cancel it gives nothing up."""
        self._settled = asyncio.get_running_loop().create_future()
        if not self._missing:
            self._settled.set_result(None)
        return self._settled

    def give_up(self) -> None:
        """Nobody wants the answers any more that are not there."""
        if self._missing:
            for question in self._questions:
                question.give_up()

    async def all(self) -> list[M]:
        """Return them, in order.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: All are given up.
        """
        try:
            await self.settled()
        finally:
            self.give_up()
        return self.messages()

    def messages(self) -> list[M]:
        """Return the answers, in order; all have ended.

        Raises:
            Exception: The first error.
        """
        messages = []
        for call, outcome in zip(self._calls, self._outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome is not None, "none is missing"
            messages.append(expect(outcome, call.kind, call.link.task, call.question))
            if call.body is not None:
                call.body.check(call.link.task)
        return messages


def expect(received: Frame, kind: type[M], who: str, question: str) -> M:
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


async def ask(
    link: PsLink, message: Message, kind: type[M], segments: Sequence[Segment] = (), **lane: bool
) -> tuple[M, Sequence[memoryview]]:
    """Return the answer of a ps, which is of one kind, and what came with it.

    Args:
        link: To the ps.
        message: The request; it may be repeated.
        kind: The kind of message that is expected.
        segments: As for ``PsLink.call``, like ``lane``, and what it raises.
        lane: Over which connection.

    Raises:
        RemoteProtocolError: It answers something else.
    """
    received = await link.call(always(message), segments, **lane)  # type: ignore[arg-type]
    return expect(received, kind, link.task, type(message).__name__), received.segments


async def _tell(
    then: Callable[[Frame | Exception], None], call: Callable[[], Awaitable[Frame]]
) -> None:
    outcome: Frame | Exception
    try:
        outcome = await call()
    except Exception as exc:
        outcome = exc
    then(outcome)


def always(message: Message) -> Callable[[Connection], Message]:
    """Return what makes this message for any connection, see ``PsLink.call``."""
    return lambda peer: message
