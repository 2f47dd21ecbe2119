"""What ps 0 asks other ps tasks, in place of connections: it waits until a test delivers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from asked import Asked, frame_of, peer_of, served
from inside import handlers_of
from psync.client.link import Call
from psync.errors import ClosedError, PsyncError
from psync.net.connection import Connection
from psync.ps_task import PsTask
from psync.sync.groups import CLOSER
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import Frame
from psync.wire.messages import DefinePlan
from stage_words import PLANS, error_words, message_words
from traced_log import TracedServices

if TYPE_CHECKING:
    from stage import Stage


@dataclass(eq=False)
class Letter:
    """A request of ps 0 to another ps; then its answer."""

    link: HeldLink
    build: Callable[[Connection], Message]
    segments: Sequence[Any]
    then: Callable[[Frame | Exception], None]
    defined: Sequence[DefinePlan] = ()  # in front of it
    message: Message | None = None  # as it was sent last
    to: PsTask | None = None  # who works on it
    answer: Frame | Exception | None = None

    def __str__(self) -> str:
        here, there = self.link.owner.name, f"ps {self.link.index}"
        if self.answer is None:
            return f"{here} → {there}: {message_words(cast(Message, self.message))}"
        if isinstance(self.answer, Exception):
            return f"{there} → {here}: {error_words(self.answer)}"
        return f"{there} → {here}: {message_words(self.answer.message)}"


class HeldLink:
    """In place of a ``PsLink``."""

    def __init__(self, client: HeldClient, index: int, address: str) -> None:
        self.client, self.stage, self.owner = client, client.stage, client.owner
        self.index, self.task, self.address = index, f"/job:ps/task:{index}", address
        self.lost: Exception | None = None
        self.lost_after_s = 15.0
        self.on_lost: Any = None
        self.held = False
        self._connect()

    def _connect(self) -> None:
        self.near = cast(Connection, peer_of((self.task, 0), plans=set()))
        self.defined: list[DefinePlan] = []  # for the next letter
        self.far = cast(Connection, peer_of((CLOSER, self.client.incarnation)))

    def ask(self, request: Call[Any], then: Callable[[Frame | Exception], None]) -> None:
        self.stage.letters.post(Letter(self, request.build, request.segments, then))

    def define(self, peer: Connection, *definitions: DefinePlan) -> None:
        for definition in definitions:
            if definition.plan not in peer.state["plans"]:
                peer.state["plans"].add(definition.plan)
                PLANS[definition.plan] = definition
                self.defined.append(definition)

    async def call(
        self,
        build: Callable[[Connection], Message],
        segments: Sequence[Any] = (),
        **_: Any,
    ) -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        def then(outcome: Frame | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.ask(Call(cast(Any, self), build, segments), then)
        return await future

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def revive(self) -> None:
        self.lost = None
        self._connect()
        self.stage.letters.send_again(self)


class HeldClient:
    """In place of the ``PsClient`` of ps 0."""

    stage: Stage

    def __init__(self, endpoint: Any, addresses: Sequence[str], *_: Any) -> None:
        self.incarnation = endpoint.incarnation
        self.owner = cast(TracedServices, self.stage.serving[0].services)  # nobody else has one
        self.links = [HeldLink(self, index, each) for index, each in enumerate(addresses)]

    async def close(self) -> None:
        self.stage.letters.give_up(self)


class Letters:
    """All requests between ps tasks that have no answer yet.

    Args:
        stage: Where they are.
    """

    def __init__(self, stage: Stage) -> None:
        self.all: list[Letter] = []
        self._stage = stage

    def post(self, letter: Letter) -> None:
        """A ps asks another one."""
        letter.message = letter.build(letter.link.near)
        letter.defined, letter.link.defined = letter.link.defined, []
        self.all.append(letter)
        self._stage.say(str(letter), by=letter.link.owner)

    def send_again(self, link: HeldLink) -> None:
        """A connection is made again: what was not answered is sent again."""
        for letter in [each for each in self.all if each.link is link]:
            self.all.remove(letter)
            letter.answer, letter.to = None, None
            self.post(letter)

    def give_up(self, client: HeldClient) -> None:
        """Links are closed: what is under way on them fails."""
        for letter in [each for each in self.all if each.link.client is client]:
            self.all.remove(letter)
            letter.then(ClosedError("the link is closed"))

    def deliverable(self) -> Letter | None:
        """Return the first letter whose receiver is there."""
        for letter in self.all:
            if letter.answer is not None:
                return letter
            there = self._stage.at.get(letter.link.address)
            if letter.to is None and not letter.link.held and there not in self._stage.dead:
                return letter
        return None

    def deliver(self) -> bool:
        """Let the next request or answer arrive; return whether there was one."""
        letter = self.deliverable()
        if letter is None:
            return False
        if letter.answer is not None:
            self.all.remove(letter)
            letter.then(letter.answer)
            return True
        letter.to = self._stage.at[letter.link.address]
        there, message = letter.to, decode(encode(cast(Message, letter.message)))
        for definition in letter.defined:
            served(handlers_of(there)[DefinePlan], letter.link.far, definition)

        def answered(outcome: Any) -> None:
            if there in self._stage.dead or letter.to is not there:
                return
            if isinstance(outcome, Exception):
                letter.answer = outcome
            else:
                flat = [bytes(part) for each in outcome.segments for part in _flat(each)]
                letter.answer = frame_of(outcome.message, list(map(memoryview, flat)))
            self._stage.say(str(letter))

        asked = Asked(
            letter.link.far,
            message,
            [memoryview(bytes(each)) for each in letter.segments],
            answered,
        )
        try:
            handlers_of(there)[type(message)].serve(asked)
        except PsyncError as exc:
            asked.fail(exc)
        return True

    def drop(self) -> Letter | None:
        """Lose the next request or answer with its connection, over which it will come again."""
        letter = self.deliverable()
        if letter is not None:
            letter.link.revive()
        return letter

    def lose(self, dead: PsTask) -> None:
        """A ps has died: what it has asked is gone, and what it has answered did not arrive."""
        for letter in list(self.all):
            if letter.link.owner is dead.services:
                self.all.remove(letter)
            elif letter.to is dead or self._stage.at.get(letter.link.address) is dead:
                letter.answer, letter.to = None, None


def _flat(segment: Any) -> list[Any]:
    return list(segment) if isinstance(segment, list | tuple) else [segment]
