"""Questions of a chief before it attaches anything: for an incarnation, and who serves which ps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from psync.backups.locate_ps import Found, Place, Primary, places
from psync.client.link import all_of, expect
from psync.closures.membership import backoff
from psync.cluster import CHIEF, ENQUIRER
from psync.errors import AttachError, ConnectFailed, ConnectionLost, FencedError, PsyncError
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.store.reattach import BACK
from psync.wire import messages
from psync.wire.codec import Message

logger = logging.getLogger(__name__)


M = TypeVar("M", bound=Message)

ANSWER_WITHIN_S = 1.0
"""A task that is there accepts a connection sooner."""


async def enquire(
    platform: Platform, task: str, address: str, *, previous: int = 0, seen: int = 0
) -> int:
    """Ask ps 0 for a new incarnation, or another task for the highest that it has served.

    Waits for the task as long as it takes, and asks again if a connection is lost.

    Args:
        platform: Network, secret, randomness.
        task: Whom to ask.
        address: Where it listens.
        previous: What this coordinator was granted before; 0: nothing.
        seen: The highest that another task has served; 0: none is known.

    Raises:
        FencedError: Another coordinator has asked after this one.
        AuthenticationError, ProtocolError: Something else answers at that address.

    Cancellation: Safe.
    """
    endpoint = Endpoint(platform, CHIEF, ENQUIRER, {})
    try:
        grant = messages.GrantCoordinator(previous, seen)
        return (await _ask(endpoint, task, address, grant, messages.CoordinatorGranted)).incarnation
    finally:
        await endpoint.close()


async def _ask(endpoint: Endpoint, task: str, address: str, message: Message, answer: type[M]) -> M:
    """Return an answer, however often connections are lost."""
    losses = 0
    while True:
        peer = await endpoint.connect_retrying(address, task)
        try:
            return expect(await peer.call(message), answer, task, type(message).__name__)
        except ConnectionLost as exc:
            logger.info("%s: the request is retried: %s", task, exc.message)
            await asyncio.sleep(backoff(losses, endpoint.platform.uniform()))
            losses += 1
        finally:
            peer.close()


async def absent(platform: Platform, tasks: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (name, address) of those that do not answer at once, for a message.

    Args:
        platform: Network, secret, randomness.
        tasks: Address of each task, by its name.

    Cancellation: Safe.
    """
    endpoint = Endpoint(platform, CHIEF, ENQUIRER, {})

    missing: set[str] = set()

    async def look(task: str, address: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await endpoint.connect(address, task)
        except (ConnectFailed, TimeoutError):
            missing.add(task)
        except PsyncError:
            pass  # somebody answers

    try:
        await asyncio.gather(*(look(*item) for item in tasks.items()))
    finally:
        await endpoint.close()
    return [item for item in tasks.items() if item[0] in missing]


@dataclass(eq=False)
class ServedSearch:
    """What one coordinator asks of all ps processes when it comes.

    A chief does not know yet under which incarnation it will be served, so it asks under
    ``ENQUIRER``, which is never refused, on a connection that serves for nothing else. The process
    at ps 0's own address grants incarnations (``ps.succession``), wherever ps 0 is served. If
    another ps or a worker refuses the number, because ps 0 was restarted with a clock behind, the
    chief asks for a higher one; if ps 0 has granted another chief since, it gives up: two that
    start at once do not overtake each other for ever. With ``attach=True`` it also asks the ps
    processes which ps tasks they serve (``ServedSearch``), before it attaches any of them.
    """

    endpoint: Endpoint  # the coordinator's, under the incarnation that it was granted
    processes: Mapping[str, str]
    """Address of each process, by the name of the ps that was there at first."""
    ask_again: Callable[[int, str, str], Awaitable[None]]
    """Lets a higher incarnation be granted, since a task has refused this one: (incarnation, task,
    address)."""
    may_move: bool  # whether a ps may be served elsewhere than at its own address
    _answers: dict[str, tuple[int, Found]] = field(default_factory=dict)  # to which incarnation
    _asked: set[str] = field(default_factory=set)  # who has not answered

    async def run(self) -> list[Place]:
        """Return where each ps is served; from then on no other one begins to serve it.

        Waits for all processes as long as it takes.

        Raises:
            AttachError: It cannot be told, or it is where this program cannot keep it.
            FencedError: A newer coordinator has come.
            AuthenticationError, ProtocolError: Something else answers at an address.

        Cancellation: Safe.
        """
        while late := [item for item in self.processes.items() if not self._has_answered(item[0])]:
            await all_of([self._find(*item) for item in late])
        found = places([self._answers[task][1] for task in self.processes])
        for ps, place in enumerate(found):
            if not place.address:
                continue
            task, where = f"/job:ps/task:{ps}", list(self.processes)[place.process]
            if not self.may_move:
                raise AttachError(
                    f"{task} has been replaced by its backup, in the process of {where}",
                    hint='continue with ParameterServerStrategy(..., ps_recovery="backup"); or '
                    f"{BACK}",
                )
            logger.info("%s is served in the process of %s, at %s", task, where, place.address)
        return found

    def missing(self) -> list[tuple[str, str]]:
        """Return (name, address) of those that have not answered."""
        return [item for item in self.processes.items() if item[0] in self._asked]

    async def end_former(self) -> None:
        """Let all processes end what earlier coordinators have left: all ps tasks are attached.

        Raises:
            FencedError, AuthenticationError, ProtocolError: As for ``run``.

        Cancellation: Some may have done it.
        """
        each = self.processes.items()
        await all_of(
            [self._ask(task, at, messages.EndFormer(), messages.Done) for task, at in each]
        )

    def _has_answered(self, task: str) -> bool:
        """What was asked under a lower incarnation does not bind those in between."""
        return self._answers.get(task, (None,))[0] == self.endpoint.incarnation

    async def _find(self, task: str, address: str) -> None:
        mine = self.endpoint.incarnation
        try:
            answer = await self._ask(task, address, messages.AskServed(), messages.ServedHere)
        except FencedError:
            await self.ask_again(mine, task, address)
            return
        primaries = tuple(Primary(*each) for each in answer.primaries)
        copies = frozenset((ps, coordinator, epoch) for ps, coordinator, epoch in answer.copies)
        self._answers[task] = mine, Found(primaries, copies)

    async def _ask(self, task: str, address: str, message: Message, answer: type[M]) -> M:
        self._asked.add(task)
        answered = await _ask(self.endpoint, task, address, message, answer)
        self._asked.discard(task)
        return answered
