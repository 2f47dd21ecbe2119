"""Links of one task in a training session: as the chief, or as a worker.

The chief attaches the ps tasks, and lets workers enter; a worker compares what it has declared with
what the ps tasks hold for the chief.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from psync.api.sync_replicas import wait_over
from psync.chief.creation import MESSAGE_SHARDS, Creation, as_sent
from psync.chief.declarations import Declaration
from psync.chief.enquiries import enquire
from psync.client.context import Runtime
from psync.client.link import PsLink, always, ask, note_plugins
from psync.client.ps import PsClient
from psync.cluster import CHIEF, ENQUIRER
from psync.errors import ConnectFailed, RemoteProtocolError, TrainingEnded
from psync.net.endpoint import Endpoint
from psync.net.environment import note_incarnation
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.serialization.failures import describe_exception
from psync.wire import messages
from psync.wire.codec import Message

PS_LOST_HINT = (
    "its shards are gone, and a training session does not return to a checkpoint automatically: "
    "start the program again, as `psync run --chief-restarts` does, with a chief that restores the "
    'newest one: docs/howto/tensorflow.md, "What a session survives"'
)


@dataclass(eq=False)
class SessionLinks:
    """The links of one task in a session."""

    platform: Platform
    task: str  # name of this task
    addresses: list[str]  # of the ps tasks, in order
    declared: list[Declaration]  # new ones appear at the end; those dealt with are taken from it
    _: KW_ONLY
    origin: str  # token of the strategy
    connect_timeout_s: float  # how long the cluster may take to come up
    ps_timeout_s: float  # a ps that cannot be reached for this many seconds is lost
    ps: PsClient = field(init=False)  # the links themselves, once they are made
    endpoint: Endpoint = field(init=False)  # what they are made by

    def __post_init__(self) -> None:
        self._pool = BlockPool()
        self._stack = contextlib.AsyncExitStack()
        self._comparing = asyncio.Lock()

    # The chief.

    async def attach(self, *, trains: bool) -> Runtime:
        """Become the chief of all ps tasks, which drop what they hold for an earlier one.

        Raises:
            ConnectFailed: They are not there in time; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        where = f"/job:ps/task:0 at {self.addresses[0]}"
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                incarnation = await enquire(self.platform, "/job:ps/task:0", self.addresses[0])
        except TimeoutError as exc:
            raise ConnectFailed(
                f"no connection within {self.connect_timeout_s:g} s to {where}",
                hint="is this task running, and is this its address?",
            ) from exc
        note_incarnation(incarnation)
        ps = self._connect_as(CHIEF, incarnation)

        message = messages.AttachPs(incarnation, self.addresses, self.ps_timeout_s)

        async def attach(link: PsLink) -> None:
            note_plugins(link, await link.call(always(message)))

        await self._to_each_ps(attach)
        creation = Creation(self.declared, ps)
        return Runtime(ps, self.origin, ensure_created=creation.ensure, in_session=trains)

    async def declare(self, num_workers: int, *, trains: bool) -> None:
        """Let the workers enter, when so many have come.

        Raises:
            ConnectFailed: They have not come in time; says who has.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        message = messages.Declared(trains, num_workers)
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await self._tell(message)
        except TimeoutError:
            link = self.ps.links[0]
            said, _ = await ask(link, messages.AskStatistics(), messages.Statistics)
            came = said.counters["session"].get("asking", ())
            raise ConnectFailed(
                f"{num_workers} workers were to take part in training, and within "
                f"{self.connect_timeout_s:g} s there came {', '.join(came) or 'none'}",
                hint="check that each of them runs this program: psync.run(main, on_workers=True)",
            ) from None

    async def end_training(self, reason: str, *, failed: bool) -> None:
        """Close the token channels. Cancellation: Training may have ended."""
        await self._tell(messages.EndTraining(reason, failed))

    # A worker.

    async def enter(self) -> Runtime:
        """Take part, once the chief has declared its variables.

        Raises:
            ConnectFailed: ps 0 is not there in time, or no chief.
            TrainingEnded: The chief has failed.
            FencedError: Another process of this task has asked after this one.
            AuthenticationError, ProtocolError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        boot = self.platform.new_incarnation()
        incarnation = await self._enquire(messages.EnterSession(boot))
        ps = self._connect_as(self.task, incarnation)
        await self._to_each_ps(lambda link: link.peer("control"))
        return Runtime(ps, self.origin, ensure_created=self.compare, in_session=True)

    async def compare(self) -> None:
        """Compare what was declared with what the ps tasks hold for the chief, but once.

        Raises:
            ConfigurationError: The chief has declared something else, or nothing.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; goes on with the next call.
        """
        while self.declared:
            async with self._comparing:
                batch = self.declared[:MESSAGE_SHARDS]
                by_ps: dict[int, list[tuple[str, int, int, int, list[int], str]]] = {}
                for shard in (shard for each in batch for shard in each.spec.shards):
                    by_ps.setdefault(shard.ps, []).append(as_sent(shard))
                for index, shards in by_ps.items():
                    for start in range(0, len(shards), MESSAGE_SHARDS):
                        message = messages.CheckShards(shards[start : start + MESSAGE_SHARDS])
                        await self.ps.links[index].call(always(message))
                del self.declared[: len(batch)]

    async def leave(self) -> messages.TrainingOver | None:
        """Take part no longer; the chief ends training so, and waits until all others have left.

        Returns:
            Why training has ended, for the chief.

        Cancellation: Safe; training has ended.
        """
        answer = await self._tell(messages.LeaveSession())
        return answer if isinstance(answer, messages.TrainingOver) else None

    async def fail(self, error: BaseException) -> None:
        """Take part no longer, because of an error that the chief shall raise.

        Cancellation: Training may have ended.
        """
        await self._tell(messages.ReplicaFailed(*describe_exception(error).texts))

    async def _enquire(self, message: messages.EnterSession) -> int:
        endpoint = Endpoint(self.platform, self.task, ENQUIRER, {})
        enquirer = self.platform.parts.of(PsClient)(
            endpoint, self.addresses[:1], self._pool, math.inf
        )
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                received = await enquirer.links[0].call(lambda _: message)
        except TimeoutError:
            what = "the chief has not begun a training session"
            hint = "is the chief running, and does it wait for others?"
            if enquirer.links[0].incarnation is None:
                what = f"no connection to /job:ps/task:0 at {self.addresses[0]}"
                hint = "is this task running, and is this its address?"
            raise ConnectFailed(f"{what} within {self.connect_timeout_s:g} s", hint=hint) from None
        finally:
            await enquirer.close()
            await endpoint.close()
        answer = received.message
        if isinstance(answer, messages.TrainingOver):
            raise TrainingEnded(answer.reason)
        if not isinstance(answer, messages.SessionEntered):
            raise RemoteProtocolError("ps 0 sent a wrong answer to EnterSession")
        return answer.incarnation

    # Both.

    def ends(self) -> list[Coroutine[Any, Any, messages.TrainingOver]]:
        """Return, for each ps, what waits until it says that training has ended, or is lost."""
        losses = [_until_lost(link) for link in self.ps.links[1:]]
        return [wait_over(self.ps, self.task), *losses]

    async def close(self) -> None:
        """Close all connections. Cancellation: safe."""
        await self._stack.aclose()

    def _connect_as(self, task: str, incarnation: int) -> PsClient:
        self.endpoint = Endpoint(self.platform, task, incarnation, {}, self._pool)
        self._stack.push_async_callback(self.endpoint.close)
        client = self.platform.parts.of(PsClient)
        # One that was never here is late, not lost.
        self.ps = client(self.endpoint, self.addresses, self._pool, math.inf)
        self._stack.push_async_callback(self.ps.close)
        for link in self.ps.links:
            link.on_lost = lambda error: setattr(error, "hint", PS_LOST_HINT)
        return self.ps

    async def _to_each_ps(self, act: Callable[[PsLink], Awaitable[object]]) -> None:
        """Do something at every ps for the first time."""
        missing = dict.fromkeys(self.ps.links)

        async def one(link: PsLink) -> None:
            await act(link)
            link.lost_after_s = self.ps_timeout_s
            del missing[link]

        try:
            async with asyncio.timeout(self.connect_timeout_s), asyncio.TaskGroup() as group:
                for link in self.ps.links:
                    group.create_task(one(link))
        except TimeoutError as exc:
            names = ", ".join(f"{link.task} at {link.address}" for link in missing)
            raise ConnectFailed(
                f"no connection within {self.connect_timeout_s:g} s to {names}",
                hint="are these tasks running, and are these their addresses?",
            ) from exc
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _tell(self, message: Message) -> Message:
        return (await self.ps.links[0].call(lambda _: message)).message


async def _until_lost(link: PsLink) -> NoReturn:
    """Raise what a call would raise, even if there are no calls."""
    while True:
        await (await link.peer("control")).wait_closed()
