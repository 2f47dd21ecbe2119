"""Links of a task to the ps tasks in a training session.

    chief     attach every ps → create the variables → declare → … → end training
    worker    enter → connect to every ps → compare the declarations → … → leave

A worker does not know under which incarnation it will be served: that depends on the chief's.
So it asks ps 0 under ``ENQUIRER``, which no ps refuses, on a connection that serves for nothing
else, and makes its own connections under the incarnation that it is told.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn

from psync.api.session_hooks import wait_over
from psync.chief.creation import MESSAGE_SHARDS, Creation
from psync.chief.declarations import Declaration
from psync.chief.enquiry import enquire
from psync.client.optimizer_client import note_plugins
from psync.client.ps_client import PsClient
from psync.client.ps_link import PsLink
from psync.client.runtime import Runtime
from psync.cluster import CHIEF, ENQUIRER
from psync.errors import (
    ConnectFailed,
    RemoteProtocolError,
    TrainingEnded,
)
from psync.net.endpoint import Endpoint
from psync.net.environment import note_incarnation
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.serialization.failures import describe_exception
from psync.specs import ShardSpec
from psync.wire.codec import Message
from psync.wire.messages import (
    AskStatistics,
    AttachPs,
    CheckShards,
    Declared,
    EndTraining,
    EnterSession,
    LeaveSession,
    ReplicaFailed,
    SessionEntered,
    Statistics,
    TrainingOver,
)

logger = logging.getLogger(__name__)

PS_LOST_HINT = (
    "its shards are gone, and a training session does not return to a checkpoint automatically: "
    "start the program again, as `psync run --chief-restarts` does, with a chief that restores the "
    'newest one: docs/howto/tensorflow.md, "What a session survives"'
)


class SessionLinks:
    """The links of one task in a session.

    Args:
        platform: Network, secret, randomness.
        task: Name of this task.
        ps_addresses: Of the ps tasks, in order.
        declared: What the program has declared; new declarations appear at its end.
        origin: Token of the strategy.
        connect_timeout_s: How long the cluster may take to come up.
        ps_timeout_s: A ps that cannot be reached for this many seconds is lost.
    """

    def __init__(
        self,
        platform: Platform,
        task: str,
        ps_addresses: Sequence[str],
        declared: list[Declaration],
        *,
        origin: str,
        connect_timeout_s: float,
        ps_timeout_s: float,
    ) -> None:
        self._platform = platform
        self._task = task
        self._addresses = list(ps_addresses)
        self._declared = declared
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._ps_timeout_s = ps_timeout_s
        self._pool = BlockPool()
        self._endpoint: Endpoint | None = None
        self._ps: PsClient | None = None

    @property
    def ps(self) -> PsClient:
        """The links themselves, once they are made."""
        assert self._ps is not None, "connected"
        return self._ps

    @property
    def endpoint(self) -> Endpoint:
        """What the links are made by, once they are made."""
        assert self._endpoint is not None, "connected"
        return self._endpoint

    # The chief.

    async def attach(self, *, trains: bool) -> Runtime:
        """Become the chief of all ps tasks, which drop what they hold for an earlier one.

        Raises:
            ConnectFailed: They are not there in time; names who is missing.
            AuthenticationError, ProtocolError, FencedError: Something else answers.

        Cancellation: Safe; ``close`` still has to be called.
        """
        where = f"/job:ps/task:0 at {self._addresses[0]}"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                incarnation = await enquire(self._platform, "/job:ps/task:0", self._addresses[0])
        except TimeoutError as exc:
            raise ConnectFailed(
                f"no connection within {self._connect_timeout_s:g} s to {where}",
                hint="is this task running, and is this its address?",
            ) from exc
        note_incarnation(incarnation)
        ps = self._connect_as(CHIEF, incarnation)

        message = AttachPs(incarnation, self._addresses, self._ps_timeout_s)

        async def attach(index: int) -> None:
            note_plugins(ps.links[index], await ps.links[index].call(lambda _: message))

        await self._to_each_ps(attach)
        creation = Creation(self._declared, ps)
        return Runtime(ps, self._origin, ensure_created=creation.ensure, in_session=trains)

    async def declare(self, num_workers: int, *, trains: bool) -> None:
        """Let the workers enter, when so many have come.

        Raises:
            ConnectFailed: They have not come in time; says who has.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        message = Declared(trains, num_workers)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._tell(message)
        except TimeoutError:
            received = await self.ps.links[0].call(lambda _: AskStatistics())
            assert isinstance(received.message, Statistics), "its only answer"
            came = received.message.counters["session"].get("asking", ())
            raise ConnectFailed(
                f"{num_workers} workers were to take part in training, and within "
                f"{self._connect_timeout_s:g} s there came {', '.join(came) or 'none'}",
                hint="check that each of them runs this program: psync.run(main, on_workers=True)",
            ) from None

    async def end_training(self, reason: str, *, failed: bool) -> None:
        """Close the token channels. Cancellation: Training may have ended."""
        await self._tell(EndTraining(reason, failed))

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
        boot = self._platform.new_incarnation()
        incarnation = await self._enquire(EnterSession(boot))
        ps = self._connect_as(self._task, incarnation)

        async def connect(index: int) -> None:
            await ps.links[index].peer("control")

        await self._to_each_ps(connect)
        comparison = Comparison(self._declared, ps)
        return Runtime(ps, self._origin, ensure_created=comparison.ensure, in_session=True)

    async def leave(self) -> TrainingOver | None:
        """Take part no longer; the chief ends training so, and waits until all others have left.

        Returns:
            Why training has ended, for the chief.

        Cancellation: Safe; training has ended.
        """
        answer = await self._tell(LeaveSession())
        return answer if isinstance(answer, TrainingOver) else None

    async def fail(self, error: BaseException) -> None:
        """Take part no longer, because of an error that the chief shall raise.

        Cancellation: Training may have ended.
        """
        said = describe_exception(error)
        await self._tell(ReplicaFailed(said.type_name, said.message, said.traceback_text))

    async def _enquire(self, message: EnterSession) -> int:
        endpoint = Endpoint(self._platform, self._task, ENQUIRER, {})
        enquirer = self._platform.parts.of(PsClient)(
            endpoint, self._addresses[:1], self._pool, math.inf
        )
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                received = await enquirer.links[0].call(lambda _: message)
        except TimeoutError:
            where = f"/job:ps/task:0 at {self._addresses[0]}"
            connected = enquirer.links[0].incarnation is not None
            raise ConnectFailed(
                f"the chief has not begun a training session within {self._connect_timeout_s:g} s"
                if connected
                else f"no connection to {where} within {self._connect_timeout_s:g} s",
                hint="is the chief running, and does it wait for others?"
                if connected
                else "is this task running, and is this its address?",
            ) from None
        finally:
            await enquirer.close()
            await endpoint.close()
        answer = received.message
        if isinstance(answer, TrainingOver):
            raise TrainingEnded(answer.reason)
        if not isinstance(answer, SessionEntered):
            raise RemoteProtocolError("ps 0 sent a wrong answer to EnterSession")
        return answer.incarnation

    # Both.

    def ends(self) -> list[Coroutine[Any, Any, TrainingOver]]:
        """Return, for each ps, what waits until it says that training has ended, or is lost."""
        losses = [_until_lost(link) for link in self.ps.links[1:]]
        return [wait_over(self.ps, self._task), *losses]

    async def close(self) -> None:
        """Close all connections. Cancellation: safe."""
        if self._ps is not None and self._endpoint is not None:
            await self._ps.close()
            await self._endpoint.close()

    def _connect_as(self, task: str, incarnation: int) -> PsClient:
        self._endpoint = Endpoint(self._platform, task, incarnation, {}, self._pool)
        # One that was never here is late, not lost.
        self._ps = self._platform.parts.of(PsClient)(
            self._endpoint, self._addresses, self._pool, math.inf
        )
        for link in self._ps.links:
            link.on_lost = lambda error: setattr(error, "hint", PS_LOST_HINT)
        return self._ps

    async def _to_each_ps(self, act: Callable[[int], Awaitable[None]]) -> None:
        """Do something at every ps for the first time."""
        missing = dict(enumerate(self._addresses))

        async def one(index: int) -> None:
            await act(index)
            self.ps.links[index].lost_after_s = self._ps_timeout_s
            del missing[index]

        try:
            async with asyncio.timeout(self._connect_timeout_s), asyncio.TaskGroup() as group:
                for index in list(missing):
                    group.create_task(one(index))
        except TimeoutError as exc:
            names = ", ".join(f"/job:ps/task:{index} at {at}" for index, at in missing.items())
            raise ConnectFailed(
                f"no connection within {self._connect_timeout_s:g} s to {names}",
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


class Comparison:
    """Compares what a worker has declared with what the ps tasks hold for the chief.

    Args:
        declared: New declarations appear at the end of this list; they are taken from it.
        ps: Links to all ps tasks.
    """

    def __init__(self, declared: list[Declaration], ps: PsClient) -> None:
        self._declared = declared
        self._ps = ps
        self._lock = asyncio.Lock()

    async def ensure(self) -> None:
        """Compare what was not compared before.

        Raises:
            ConfigurationError: The chief has declared something else, or nothing.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe; goes on with the next call.
        """
        while self._declared:
            async with self._lock:
                batch = self._declared[:MESSAGE_SHARDS]
                by_ps: dict[int, list[ShardSpec]] = {}
                for declaration in batch:
                    for shard in declaration.spec.shards:
                        by_ps.setdefault(shard.ps, []).append(shard)
                for index, shards in by_ps.items():
                    await self._compare(index, shards)
                del self._declared[: len(batch)]

    async def _compare(self, index: int, shards: Sequence[ShardSpec]) -> None:
        for start in range(0, len(shards), MESSAGE_SHARDS):
            await self._ask(index, shards[start : start + MESSAGE_SHARDS])

    async def _ask(self, index: int, shards: Sequence[ShardSpec]) -> None:
        message = CheckShards([_described(spec) for spec in shards])
        await self._ps.links[index].call(lambda _: message)


def _described(spec: ShardSpec) -> tuple[str, int, int, int, list[int], str]:
    return (
        spec.variable, spec.variable_id, spec.index, spec.offset, list(spec.shape), spec.dtype,
    )  # fmt: skip
