"""The link to one ps task: requests, each sent again until it is answered.

Every request to a ps may be repeated: pulls change nothing, updates bear an identity by which the
ps answers a repetition from memory. So a lost connection is made again and the request is sent
again, until the ps has answered or is lost. There is a connection for each lane that is used.

A ps may be away for a while, be lost, and be recovered. What becomes of a lost one ``on_lost``
decides. A worker ends its session, and the closure runs again elsewhere (``worker_task``): if its
update had reached the backup, the ledger answers "duplicate"; after a rollback it is applied anew,
unless the checkpoint has it (``chief.recovery``). The coordinator recovers the ps
(``chief.recovery``); its own requests wait (``hold``), and are sent again under the same identities
(``client.ps``).

A ps that is stopped is found by pings: its kernel still answers, its loop does not.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from types import UnionType
from typing import Any, Generic, Self, TypeVar

import msgspec

from psync.client.counters import Numbers
from psync.client.plan import Landing
from psync.closures.membership import backoff
from psync.errors import (
    ClosedError,
    ConnectFailed,
    ConnectionLost,
    FencedError,
    LocalProtocolError,
    ParameterServerLost,
    PlanForgotten,
    PsyncError,
    RemoteProtocolError,
    TaskLost,
)
from psync.net.connection import Connection
from psync.net.endpoint import Endpoint
from psync.net.shielding import begin, shielded
from psync.numerics.rules import Registered
from psync.wire.codec import Message, check
from psync.wire.frames import SMALL_BODY_BYTES, Frame, Segment, Sink
from psync.wire.messages import Contributed, DefinePlan

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

AWAY_FOR_S = 0.3
"""A ps with a backup that is gone for so long is lost: waiting longer costs more than a mistake. A
launcher may hold the socket of a ps that has died: then nobody refuses."""

REFUSED_FOR_S = 2.0
"""A ps that was there, and at whose address nobody has listened for this long, is lost: not
"refused" once, which something between us and the ps may have said."""

PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 10.0
"""A ps runs no user code and answers within milliseconds; two silent periods: it is gone."""

MAX_LOSSES = 16
"""Connections in a row that one request may outlive: more, and it is what breaks them."""

LASTED_S = 60.0
"""A connection that was there for so long was not broken by a request."""

CLOSED = "the connections to the ps tasks are closed"

MAX_DEFINED = 65_536
"""Plans that a connection is known to have named; then all are named again."""

Then = Callable[[Frame | Exception], None]
"""Called once with the reply, or with the reason why there is none. Must not raise."""


class PsLink:
    """The way to one ps task.

    Invariant: one incarnation of the ps is talked to. Another one has lost the shards, and
    from then on every call raises ParameterServerLost.

    Args:
        endpoint: Bears the client's name and incarnation.
        index: Of the ps.
        address: Where it is.
        lost_after_s: A ps that cannot be reached for so long is lost. inf: it may not be up yet.
        client: Counts the calls of all its links; None: this is its only one.

    Attributes:
        incarnation: Of the ps; None until the first connection.
        lost: Set once, for ever, unless it is revived.
        on_lost: Told of that.
        updates: Numbers of pushes, assigns and gradients for accumulators.
        plugins: What plugins have registered there, as it said when it was attached from here;
            None: it was not.
        away_for_s: So long it may be without any connection, once there was one; then it is lost.
        relied_on: Answers of which those of other ps tasks may never come if this one is lost, or
            does not reach these; and which of the calls is that to this one.
        repeating: Calls that have no connection.
    """

    plugins: Sequence[Registered] | None = None

    def __init__(
        self,
        endpoint: Endpoint,
        index: int,
        address: str,
        lost_after_s: float,
        client: Outgoing | None = None,
    ) -> None:
        self.index = index
        self.task = f"/job:ps/task:{index}"
        self.address = address
        self.incarnation: int | None = None
        self.lost: ParameterServerLost | None = None
        self.on_lost: Callable[[ParameterServerLost], None] | None = None
        self.updates = Numbers()
        self.refused_for_s = REFUSED_FOR_S
        self.away_for_s = math.inf
        self.lost_after_s = lost_after_s
        self.client = client or Outgoing()
        self.relied_on: dict[Answers[Any], int] = {}
        self._endpoint = endpoint
        self._peers: dict[str, Connection] = {}
        self._attempts: dict[str, asyncio.Task[Exception | None]] = {}  # by lane
        self._keepalive: asyncio.Task[None] | None = None
        self._closed = False
        self._released: asyncio.Event | None = None  # while ordinary calls are held back
        self.repeating: set[asyncio.Task[None]] = set()

    # Requests.

    async def call(
        self,
        message: Message,
        segments: Sequence[Segment] = (),
        *,
        bulk: bool = False,
        urgent: bool = False,
    ) -> Frame:
        """Make a ``Call``, and return the reply.

        Args:
            message: As for ``Call``, as are ``segments`` and ``urgent``.
            bulk: Whether a large body goes or comes.

        Raises:
            ParameterServerLost: See ``peer``, also for its other errors.
            ConnectionLost: Again and again: the request itself seems to be the cause.
            LocalProtocolError: A field of it is of a wrong type.
            PsyncError: The ps's answer.

        Cancellation: Safe; the request may have been served.
        """
        call = Call(self, message, segments, lane="bulk" if bulk else "control", urgent=urgent)
        answers = Answers(Message, "", [call]).send()
        await answers.all()
        (received,) = answers.outcomes
        assert isinstance(received, Frame), "else its error was raised"
        return received

    def ask(self, call: Call) -> Call:
        """Make a call of this link; without a coroutine while there is a connection."""
        if not call.lane:
            call.lane = "bulk" if call.nbytes > SMALL_BODY_BYTES else "control"
        peer = self._peers.get(call.lane)
        is_held = self._released is not None and not call.urgent
        self.client.calls += 1
        if peer is None or not peer.is_open or self.lost is not None or is_held:
            call.end = begin(self._ask_later(call), self.repeating).cancel
            return call
        try:
            definition = call.definition
            if definition is not None and definition.plan not in (named := peer.state["plans"]):
                if len(named) >= MAX_DEFINED:
                    named.clear()
                named.add(definition.plan)
                peer.notify(definition)
            if call.build is not None:
                call.message = call.build()
            number = peer.ask(call.message, call.segments, call.told, call.into, copied=call.copied)
            call.end = functools.partial(peer.give_up, number)
        except Exception as exc:
            call.told(exc)
        return call

    async def _ask_later(self, call: Call) -> None:
        """Make a call once there is a connection, and no recovery goes on."""
        try:
            if call.losses > 1:
                await asyncio.sleep(backoff(call.losses, self._endpoint.platform.uniform()))
            is_ready = False
            while not is_ready:
                while self._released is not None and not call.urgent:
                    await self._released.wait()
                try:
                    await self.peer(call.lane)
                except ParameterServerLost:
                    if self._released is None or call.urgent:
                        raise
                # Else a recovery has begun, and the ps may be there, but empty.
                is_ready = self._released is None or call.urgent
        except Exception as exc:
            call.told(exc)
        else:
            call.asked = asyncio.get_running_loop().time()
            self.ask(call)

    def notify(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a notification if there is a connection."""
        peer = self._peers.get("control")
        if peer is not None and peer.is_open:
            peer.notify(message, segments)

    # Connections.

    async def peer(self, lane: str) -> Connection:
        """Return an open connection.

        Raises:
            ParameterServerLost: None comes up within the time, or the ps came back empty.
            AuthenticationError, ProtocolError: It is not our ps.
            FencedError: A newer incarnation of this task has replaced us.
            ClosedError: The link was closed here.

        Cancellation: Safe.
        """
        while True:
            if self._closed:
                raise ClosedError(f"the link to {self.task} is closed")
            if self.lost is not None:
                raise self.lost.with_traceback(None)  # it is raised many times
            peer = self._peers.get(lane)
            if peer is not None and peer.is_open:
                return peer
            attempt = self._attempts.get(lane)
            if attempt is None or attempt.done():  # by whoever ends all tasks of the loop
                attempt = asyncio.get_running_loop().create_task(self._attempt(lane))
                self._attempts[lane] = attempt
            await asyncio.wait([attempt])
            if not attempt.cancelled() and (error := attempt.result()) is not None:
                raise error.with_traceback(None)  # it is raised for all who have waited

    async def _attempt(self, lane: str) -> Exception | None:
        """Make the connection of a lane, for all who wait for it; return why there is none."""
        failed: Exception | None = None
        try:
            peer = await self._connect(lane)
        except Exception as exc:  # who cancels it has removed it
            failed = exc
        self._attempts.pop(lane, None)  # before anybody hears of it, who may end all attempts
        if isinstance(failed, ConnectFailed):
            lost = self._declare_lost(f"at {self.address} cannot be reached ({failed.message})")
            lost.__cause__ = failed
            return lost
        if failed is not None:
            return failed
        if self.lost is not None or self.incarnation not in (None, peer.incarnation):
            peer.close()
            return self._declare_lost(f"at {self.address} was restarted and has lost its shards")
        self.incarnation = peer.incarnation
        self._peers[lane] = peer
        peer.state["plans"] = set()  # that were defined on it
        self.client.calls += 1
        if self._keepalive is None:
            self._keepalive = asyncio.get_running_loop().create_task(self._keep_alive())
        return None

    async def _connect(self, lane: str) -> Connection:
        """Connect, with patience for a ps that is slow or far, and less for one that has ended.

        A ps listens as long as it lives. Where nobody listens any more, it has ended; where
        nobody has listened yet, our patience is infinite, see ``lost_after_s``.
        """
        connect = self._endpoint.connect_retrying
        loop = asyncio.get_running_loop()
        while self.incarnation is not None and self.away_for_s < math.inf and not self.is_open:
            began = loop.time()
            try:
                async with asyncio.timeout(self.away_for_s):
                    return await connect(self.address, self.task, lane)
            except TimeoutError as exc:
                if loop.time() - began <= 2 * self.away_for_s:
                    raise ConnectFailed(f"no answer within {self.away_for_s:g} s") from exc
                # Our own loop stood still: the answer may be unread.
        patience_s = self.lost_after_s
        refused_s = math.inf if patience_s == math.inf else self.refused_for_s
        return await connect(
            self.address, self.task, lane, timeout_s=patience_s, refused_s=refused_s
        )

    async def _keep_alive(self) -> None:
        """Ping the ps for as long as it is not lost, and end its connections when it is silent."""
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self.lost is not None:
                return
            for answers, at in list(self.relied_on.items()):
                answers.ask_again(at)
            before, silent_since, began = silent_since, None, loop.time()
            if not self.is_open:
                continue
            try:
                # Pings queue behind few tensors: if need be the control lane is opened.
                peer = await self.peer("control")
                came = peer.bytes_received
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await peer.ping()
            except TimeoutError:
                if peer.bytes_received > came:
                    continue  # what is read under a lock comes in front of the answer
                # Our own loop may have been blocked by a step, with the answer unread: only
                # a second silence in a row counts.
                if before is None:
                    silent_since = began
                    continue
                text = f"{self.task} did not answer pings for {loop.time() - before:.0f} s"
                logger.warning("%s; its connections are closed", text)
                self._abort(text)
            except PsyncError as exc:  # whoever needs the ps gets it, too
                logger.info("%s: no ping: %s", self.task, exc.message)

    def _abort(self, why: str) -> None:
        for peer in self._peers.values():
            peer.abort(ConnectionLost(why))

    # How it is.

    @property
    def state(self) -> str:
        """Return how it is: "unconnected", "connected", "broken" or "lost"; for reports."""
        if self.lost is not None:
            return "lost"
        if self.is_open:
            return "connected"
        return "unconnected" if self.incarnation is None else "broken"

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return any(peer.is_open for peer in self._peers.values())

    @property
    def is_held(self) -> bool:
        """Whether a recovery is under way."""
        return self._released is not None

    # What becomes of it.

    def hold(self) -> None:
        """Hold ordinary calls back, also those that are under way and lose their connection."""
        if self._released is None and not self._closed:  # else nobody would release them
            self._released = asyncio.Event()

    def release(self) -> None:
        """Let them go on: the ps has been recovered; or, if it is lost, they raise that."""
        released, self._released = self._released, None
        if released is not None:
            released.set()
            self._end_answers()

    async def recovered(self) -> bool:
        """Wait for the end of a recovery; return whether the ps is there. Cancellation: safe."""
        while self._released is not None:
            await self._released.wait()
        return self.lost is None and not self._closed

    def revive(self) -> None:
        """Forget that the ps was lost, and under which incarnation it was there."""
        self._abort(f"{self.task} is being recovered")
        self._peers.clear()
        self._end_attempts()
        self.lost = None
        self.incarnation = None
        if self._keepalive is not None:
            self._keepalive.cancel()  # the next connection has one of its own
            self._keepalive = None

    def give_up(self, message: str) -> None:
        """The ps says itself that it has lost its shards, or is gone for good."""
        self._declare_lost(message)
        self._end_attempts()

    def fail(self, error: ParameterServerLost) -> None:
        """Let all requests fail with this error, including those that wait for a connection."""
        self.lost = self.lost or error
        self._end_attempts()
        self._end_answers()

    def _end_answers(self) -> None:
        if self.lost is not None and self._released is None:
            for answers in self.relied_on:
                answers.lack(self.lost)

    def _end_attempts(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel()
        self._attempts.clear()

    def _declare_lost(self, message: str) -> ParameterServerLost:
        if self.lost is not None:
            return self.lost
        error = self.lost = ParameterServerLost(
            self.task, message,
            hint="its shards are lost, and there is no checkpoint or complete backup: restart the "
            'program; with a psync.CheckpointManager, or with ps_recovery="backup" and a complete '
            "backup, training would continue",
        )  # fmt: skip
        self._abort(error.message)
        if self.on_lost is not None:
            self.on_lost(error)  # which may revive it at once
        self._end_answers()
        return error

    def close(self) -> list[asyncio.Task[Any]]:
        """Close the connections; calls under way fail. Return what has not ended yet."""
        self._closed = True
        self.release()
        for peer in self._peers.values():
            peer.close()
        ending: list[asyncio.Task[Any]] = [*self._attempts.values()]
        self._end_attempts()
        if self._keepalive is not None:
            self._keepalive.cancel()
            ending.append(self._keepalive)
        return ending


class Call(msgspec.Struct, eq=False):
    """A request to a ps that may be repeated: it is sent over and over until it is answered.

    Attributes:
        link: To the ps.
        message: What is asked.
        segments: As for ``Connection.call``.
        nbytes: Of the larger body, that goes or comes.
        lane: Over which connection it goes; "": that for its bytes.
        into: As for ``Connection.call``.
        lengths: Of the segments of its answer; None: whatever comes.
        urgent: Whether it is part of a recovery: others wait while that goes on, see ``hold``.
        copied: As for ``Connection.call``.
        number: By which the ps knows it again, of an update.
        definition: Of the plan that the message names, which the connection has to know.
        build: Makes the message, each time that it is sent; None: it is always the same.
        end: Gives it up; None: it is not under way.
        then: Told of the end; None: it is over, or given up, or one of several.
        answers: Told instead, of one of several; ``at``: its place among them.
        losses: Connections in a row that were lost with it.
        asked: When it was sent again, by the loop's clock.
    """

    link: PsLink
    message: Any = None  # None: it is built, and was not sent yet
    segments: Sequence[Segment] = ()
    nbytes: int = 0
    lane: str = ""
    into: Sink | None = None
    lengths: tuple[int, ...] | None = None
    urgent: bool = False
    copied: bool = False
    number: int = 0
    definition: DefinePlan | None = None
    build: Callable[[], Message] | None = None
    end: Callable[[], object] | None = None
    then: Then | None = None
    answers: Answers[Any] | None = None
    at: int = 0
    losses: int = 0
    asked: float = math.inf

    def give_up(self) -> None:
        """Call nothing more, and write no more to memory for the reply."""
        end, self.end, self.then, self.answers = self.end, None, None, None
        if end is not None:
            end()

    def told(self, outcome: Frame | Exception) -> None:
        """It is over; unless its connection is gone, or what it names is forgotten."""
        self.link.client.calls += 1
        if isinstance(outcome, ConnectionLost | PlanForgotten):
            error = self._refusal(outcome)
            if error is None:
                self.end = begin(self.link._ask_later(self), self.link.repeating).cancel
                return
            outcome = error
        self.end = None
        # These lead back here: they would hold what came.
        then, answers, self.then, self.answers = self.then, self.answers, None, None
        if answers is not None:
            answers.outcomes[self.at] = outcome
            answers.missing -= 1
            if not answers.missing:
                answers.complete()
            elif answers.ends_early:
                if isinstance(outcome, Exception):
                    answers.complete()
                elif type(outcome.message) is Contributed and not outcome.message.count:
                    answers.complete()
        elif then is not None:
            then(outcome)

    def _refusal(self, lost: ConnectionLost | PlanForgotten) -> Exception | None:
        """Return why it is not made again; None: it is."""
        link = self.link
        if isinstance(lost, PlanForgotten):  # each connection hears what they are once more
            for peer in link._peers.values():
                peer.state["plans"].clear()
        if asyncio.get_running_loop().time() - self.asked > LASTED_S:
            self.losses = 0
        self.losses += 1
        try:
            if self.message is not None:
                check(self.message)  # or it would cost the next connections, too
        except LocalProtocolError as exc:
            return exc
        if self.losses < MAX_LOSSES:
            logger.debug("%s: repeating a request: %s", link.task, lost.message)
            return None
        if isinstance(lost, PlanForgotten):
            return lost
        error = ConnectionLost(
            f"{link.task}: {self.losses} connections in a row were lost with the same request, "
            f"the last because: {lost.message}"
        )
        error.__cause__ = lost
        return error


class Answers(Generic[M]):
    """Calls that are made at once, and the answers to them, in order.

    What ``all_of`` is for coroutines, and without them: every pull and push comes through here.

    Args:
        kind: Of the answers.
        question: What is asked: "a pull".
        calls: Are made by ``send``.
        body: What the answers bring: "the shards".
        landing: Gets values that may come with the answers; None: they bring what was asked for.
        outgoing: Of the client, if the calls are to be made again when all have ended, and ps
            tasks have rolled back meanwhile.

    Attributes:
        ends_early: Whether all is over with an error, or when a push counts in no step.
        ended: Done when all have ended, or as soon as more would change nothing.
        drawn: (ps, number there) of each call of an update, see ``Outgoing.deliver``.
    """

    ends_early = False

    def __init__(
        self,
        kind: type[M] | UnionType,
        question: str,
        calls: Sequence[Call],
        body: str = "",
        landing: Landing | None = None,
        outgoing: Outgoing | None = None,
    ) -> None:
        self.calls = calls
        self.drawn: list[tuple[int, int]] = []
        if landing is not None:
            for call in calls:
                place = landing.plan.first.get(call.link.index)
                if place is not None:
                    pulled = landing.plan.requests[place]
                    call.into, call.lengths = functools.partial(landing.into, place), pulled.lengths
                    call.nbytes = max(call.nbytes, pulled.nbytes)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing = self._turns = 0
        self.outcomes: list[Frame | Exception | None] = []
        self._kind, self._question, self._body = kind, question, body
        self._landing = landing
        self._outgoing = outgoing
        self._timeline = outgoing and outgoing.timeline

    def send(self) -> Self:
        """Make the calls, perhaps once more."""
        self.missing = len(self.calls)
        self.outcomes = [None] * self.missing
        for at, call in enumerate(self.calls):
            call.answers, call.at, call.losses = self, at, 0
            call.link.ask(call)
        if not self.calls:
            self.complete()
        return self

    def complete(self) -> None:
        """All have ended: an error, or answers that no rollback has undone, are the end."""
        outgoing = self._outgoing
        if outgoing is not None:
            if self._timeline != outgoing.timeline:
                self._timeline = outgoing.timeline
                if not any(isinstance(outcome, Exception) for outcome in self.outcomes):
                    self.send()
                    return
            if self.drawn:
                outgoing.answered(self.calls)
        if not self.ended.done():
            self.ended.set_result(None)

    def ask_again(self, at: int) -> None:
        """Make a call once more if it is answered and others are not: it may say now why.

        Called again and again; the call is made in the turns 1, 2, 4, 8, …
        """
        self._turns += 1
        is_due = not self._turns & (self._turns - 1)
        if is_due and self.missing and isinstance(self.outcomes[at], Frame):
            self.missing += 1
            self.outcomes[at] = None
            self.calls[at].answers, self.calls[at].losses = self, 0
            self.calls[at].link.ask(self.calls[at])

    def lack(self, error: Exception) -> None:
        """Those that are not there will not come."""
        self.outcomes = [error if each is None else each for each in self.outcomes]
        self.complete()

    def give_up(self) -> None:
        """Nobody wants the answers any more that are not there."""
        for call in self.calls:
            call.give_up()
        if self.drawn and self._outgoing is not None:
            self._outgoing.answered(self.calls)

    async def all(self) -> list[M]:
        """Return the answers.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: All are given up.
        """
        try:
            await self.ended
        finally:
            if self.missing:
                self.give_up()
        return self.messages()

    def messages(self) -> list[M]:
        """Return the answers that have come, once.

        Raises:
            Exception: The first error.
        """
        for call in self.calls:
            call.build = None  # which leads back here: it would hold what was sent
        messages, landing = [], self._landing
        for call, outcome in zip(self.calls, self.outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                continue
            message, got = outcome.message, outcome.lengths
            if not isinstance(message, self._kind):
                message = expect(outcome, self._kind, call.link.task, self._question)
            messages.append(message)
            if landing is not None and message.steps is not None:  # type: ignore[attr-defined]
                landing.steps.append(message.steps)  # type: ignore[attr-defined]
            if got != call.lengths and call.lengths is not None and (got or landing is None):
                raise RemoteProtocolError(
                    f"{call.link.task} sent wrong sizes for {self._body}: expected "
                    f"{sum(call.lengths)} bytes, got {sum(got)}"
                )
        return messages


class Outgoing:
    """All updates of one client of ps tasks, see ``client.ps``.

    Attributes:
        timeline: Grows whenever all ps tasks have rolled back to a snapshot.
        begun: What is under way, and shielded from cancellation.
        calls: Requests so far of all its links, answers, and connections.
    """

    def __init__(self) -> None:
        self.timeline = self.calls = 0
        self.begun: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def deliver(self, update: Answers[M]) -> list[M]:
        """Deliver an update; return the answer to each of its messages.

        Raises:
            Exception: The first error, once all have ended.

        Cancellation: As ``shielded``.
        """
        if self._closed:
            raise ClosedError(CLOSED)
        for call in update.calls:  # as ``Numbers.draw``
            numbers = call.link.updates
            number = call.number = numbers.next
            numbers.next = number + 1
            numbers.under_way[number] = None
            update.drawn.append((call.link.index, number))
        ended = update.ended
        self.begun.add(ended)
        try:
            update.send()
            await ended
        except asyncio.CancelledError:
            if self._closed:
                update.give_up()
            else:
                self._go_on(update)
            raise
        finally:
            self.begun.discard(ended)
        return update.messages()

    def answered(self, calls: Sequence[Call]) -> None:
        """Acknowledge the numbers of these calls, with the next messages to their ps tasks."""
        for call in calls:  # as ``Numbers.answered``
            numbers = call.link.updates
            numbers.under_way.pop(call.number, None)
            numbers.acked_below = next(iter(numbers.under_way), numbers.next)

    async def shielded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` and return what it returns.

        Raises:
            ClosedError: The client was closed; nothing is begun.
            Exception: What it raises.

        Cancellation: It goes on in the background, see ``drain``; an error is logged then.
        """
        if self._closed:  # what is stopped would begin to unlock, and nobody would stop that
            raise ClosedError(CLOSED)
        under_way = begin(work(), self.begun)
        try:
            return await shielded(under_way)
        except asyncio.CancelledError:
            under_way.add_done_callback(_note_result)
            raise

    def _go_on(self, update: Answers[Any]) -> None:
        """Let a delivery end without its caller, who was cancelled."""
        update.ended = asyncio.get_running_loop().create_future()
        if not update.missing:
            update.ended.set_result(None)
        begin(update.all(), self.begun).add_done_callback(_note_result)

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


def _note_result(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        level = logging.DEBUG if isinstance(error, FencedError | TaskLost) else logging.INFO
        logger.log(level, "a push whose step was cancelled failed: %s", error)


def expect(received: Frame, kind: type[M] | UnionType, who: str, question: str) -> M:
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
    received = await link.call(message, segments, **lane)
    return expect(received, kind, link.task, type(message).__name__), received.segments


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all and return their results; the first error wins once all have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]
