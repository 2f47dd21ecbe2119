"""What ps 0 asks other ps tasks, in place of connections: it waits until a test delivers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from psync.net.peer import Peer, Received
from psync.ps.backup_host import AsIfFrom
from psync.ps_task import PsTask
from psync.sync.groups import CLOSER
from psync.wire.codec import Message
from stage_words import error_words, message_words
from traced_log import TracedServices

if TYPE_CHECKING:
    from stage import Stage


@dataclass(eq=False)
class Letter:
    """A request of ps 0 to another ps; then its answer."""

    link: HeldLink
    build: Callable[[Peer], Message]
    segments: Sequence[Any]
    then: Callable[[Received | Exception], None]
    set_ids: Sequence[int]
    message: Message | None = None  # as it was sent last
    to: PsTask | None = None  # who works on it
    answer: Received | Exception | None = None

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
        self.near = cast(Peer, AsIfFrom(self.task, 0, {}))
        self.far = cast(Peer, AsIfFrom(CLOSER, self.client.incarnation, {}))

    def ask(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Any],
        then: Callable[[Received | Exception], None],
        *,
        set_ids: Iterable[int] = (),
        **_: Any,
    ) -> None:
        self.stage.post(Letter(self, build, segments, then, list(set_ids)))

    async def call(
        self,
        build: Callable[[Peer], Message],
        segments: Sequence[Any] = (),
        *,
        set_ids: Iterable[int] = (),
        **_: Any,
    ) -> Received:
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

        def then(outcome: Received | Exception) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.ask(build, segments, then, set_ids=set_ids)
        return await future

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def revive(self) -> None:
        self.lost = None
        self._connect()
        self.stage.send_again(self)


class HeldClient:
    """In place of the ``PsClient`` of ps 0."""

    stage: Stage

    def __init__(self, endpoint: Any, addresses: Sequence[str], *_: Any) -> None:
        self.incarnation = endpoint.incarnation
        self.owner = cast(TracedServices, self.stage.serving[0].services)  # nobody else has one
        self.links = [HeldLink(self, index, each) for index, each in enumerate(addresses)]

    async def close(self) -> None:
        self.stage.give_up(self)
