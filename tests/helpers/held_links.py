"""What ps 0 and the others tell each other, in place of connections: until a test delivers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from asked import frame_of, peer_of, served, spawn
from inside import handlers_of
from psync.client.link import Call
from psync.cluster import task_name
from psync.errors import ClosedError, ConnectionLost
from psync.net.connection import AsIfFrom, Connection
from psync.ps_task import PsTask
from psync.wire.codec import Message, decode, encode
from psync.wire.frames import Frame
from stage_words import error_words, message_words
from traced_log import TracedServices

if TYPE_CHECKING:
    from stage import Stage


@dataclass(eq=False)
class Letter:
    """A request of ps 0 to another ps; then its answer. Or what that says unasked."""

    link: HeldLink
    build: Callable[[Connection], Message] | None  # None: nobody has asked
    then: Callable[[Any], None]
    answer: Frame | Exception | None = None
    message: Message | None = None  # as it was sent last
    is_served: bool = False  # its answer will come

    def __str__(self) -> str:
        here, there = self.link.owner.name, f"ps {self.link.index}"
        if self.answer is None:
            return f"{here} → {there}: {message_words(cast(Message, self.message))}"
        if isinstance(self.answer, Exception):
            return f"{there} → {here}: {error_words(self.answer)}"
        return f"{there} → {here}: {message_words(self.answer.message)}"


@dataclass(eq=False)
class FarEnd(AsIfFrom):
    """The connection of ps 0, as another ps sees it."""

    link: HeldLink | None = None

    def notify(self, message: Message) -> None:
        link = cast(HeldLink, self.link)
        if not self.is_closed:
            said = partial(link.client.hear, link.task)
            link.stage.letters.post(Letter(link, None, said, frame_of(message)))


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
        self.far = FarEnd((task_name("ps", 0), self.client.incarnation), {}, spawn, link=self)

    def ask(self, call: Call, then: Callable[[Frame | Exception], None]) -> Call:
        if self.lost is None:
            self.stage.letters.post(Letter(self, call.build, then))
        else:
            asyncio.get_running_loop().call_soon(then, self.lost)
        return call

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def hang_up(self) -> list[Letter]:
        """The connection is gone: return what was on its way, and must be asked again."""
        letters = self.stage.letters
        self.far.is_closed = True
        mine = [each for each in letters.all if each.link is self]
        letters.all = [each for each in letters.all if each.link is not self]
        asked = [each for each in mine if each.build is not None]
        for letter in asked:
            letter.is_served, letter.answer = False, None
        return asked

    def fail(self, error: Exception) -> None:
        """All that is asked fails."""
        asked = self.hang_up()
        self._connect()
        for letter in asked:
            letter.then(error)

    def revive(self) -> None:
        self.lost = None
        asked = self.hang_up()
        self._connect()
        for letter in asked:
            self.stage.letters.post(letter)


class HeldClient:
    """In place of the ``PsClient`` of ps 0."""

    stage: Stage

    def __init__(self, endpoint: Any, addresses: Sequence[str], *_: Any) -> None:
        self.incarnation, self._handlers = endpoint.incarnation, endpoint.handlers
        self.owner = cast(TracedServices, self.stage.serving[0].services)  # nobody else has one
        self.links = [HeldLink(self, index, each) for index, each in enumerate(addresses)]

    def hear(self, task: str, said: Frame) -> None:
        """Another ps has said something, which nobody has asked."""
        served(self._handlers[type(said.message)], peer_of((task, 0)), said.message)

    async def close(self) -> None:
        self.stage.letters.give_up(self)


class Letters:
    """All that is on its way between ps tasks, in the order in which it was said.

    Args:
        stage: Where they are.
    """

    def __init__(self, stage: Stage) -> None:
        self.all: list[Letter] = []
        self._stage = stage

    def post(self, letter: Letter) -> None:
        """Something is said, perhaps again."""
        if letter.build is not None:
            letter.message = letter.build(cast(Connection, None))  # these are alike on each
        self.all.append(letter)
        self._stage.say(str(letter), by=letter.build and letter.link.owner)

    def give_up(self, client: HeldClient) -> None:
        """Links are closed: what is under way on them fails."""
        for link in client.links:
            link.fail(ClosedError("the link is closed"))

    def deliverable(self) -> Letter | None:
        """Return the first letter whose receiver is there."""
        for letter in self.all:
            if letter.answer is not None:
                return letter
            there = self._stage.at.get(letter.link.address)
            if not letter.is_served and not letter.link.held and there not in self._stage.dead:
                return letter
        return None

    def deliver(self) -> bool:
        """Let the next letter arrive; return whether there was one."""
        letter = self.deliverable()
        if letter is None:
            return False
        if letter.answer is not None:
            self.all.remove(letter)
            letter.then(letter.answer)
            return True
        there, far = self._stage.at[letter.link.address], letter.link.far
        message = decode(encode(cast(Message, letter.message)))
        letter.is_served = True

        def answered(outcome: Any) -> None:
            if far.is_closed:
                return
            self.all.remove(letter)
            if isinstance(outcome, Exception):
                letter.answer = outcome
            else:
                letter.answer = frame_of(outcome.message)
            self.all.append(letter)
            self._stage.say(str(letter))

        served(handlers_of(there)[type(message)], far, message, (), answered)
        return True

    def drop(self, *, last: bool = False) -> None:
        """Lose the next letter with its connection; all is asked again, or it was the last time."""
        letter = self.deliverable()
        if letter is not None and last:
            letter.link.fail(ConnectionLost("so many connections were lost with the same request"))
        elif letter is not None:
            letter.link.revive()

    def lose(self, dead: PsTask) -> None:
        """A ps has died: what it has said is gone, and what it was asked is asked again."""
        for link in {letter.link: None for letter in self.all}:
            if link.owner is dead.services:
                link.hang_up()
            elif self._stage.at.get(link.address) is dead:
                asked = link.hang_up()
                self.all += asked
