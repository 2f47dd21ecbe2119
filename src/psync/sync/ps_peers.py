"""Requests from ps 0 to all ps tasks, itself among them.

``OutgoingSteps`` says what all are told of a step; this tells them, and hears their answers.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from psync.client.link import Call, PsLink
from psync.client.ps import PsClient
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLost,
    FencedError,
    NotServedError,
    ParameterServerLost,
    RemoteProtocolError,
)
from psync.net.connection import AsIfFrom, Handler, OwnRequest, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.specs import ShardSpec, VariableSpec
from psync.store.sync_config import SyncConfig
from psync.sync.ps_sync import CLOSER, FROM_CLOSER, PsSync
from psync.sync.step import GLOBAL_STEP_DTYPE
from psync.wire.codec import Message, replace
from psync.wire.frames import Frame
from psync.wire.messages import (
    AttachPs,
    CloseStep,
    Done,
    FollowParts,
    Held,
    Measured,
)

Then = Callable[[list[Message], Exception | None], None]
"""Called once, with the answers and the first error. Must not raise."""


class AllPs:
    """The ps tasks of one coordinator's cluster.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        pool: Memory for what comes in.
        heard: Told of parts that other ps tasks hold, see ``follow``.
        lost: Told that one cannot be followed any more, and why.
        timeline: How often the cluster has rolled back to a snapshot.

    Attributes:
        addresses: Where each ps is served.
        following: By ps, the request that is answered with what parts it holds.
    """

    def __init__(
        self,
        platform: Platform,
        attach: AttachPs,
        sync: PsSync,
        pool: BlockPool,
        heard: Callable[[Request[Held]], None],
        lost: Callable[[int, Exception], None],
        timeline: int = 0,
    ) -> None:
        self._lost = lost
        self.following: dict[int, Call | None] = {}
        self._sync = sync
        # A ps that serves a newer coordinator or timeline refuses what comes from this one.
        incarnation = attach.coordinator + timeline
        handlers: dict[type[Message], Handler] = {Held: Handler(heard)}
        self._endpoint = Endpoint(platform, CLOSER, incarnation, handlers, pool)
        self._client: PsClient = platform.parts.of(PsClient)(
            self._endpoint, attach.ps_addresses, pool, attach.ps_timeout_s
        )
        self._closed = False
        self._told: set[tuple[int, int]] = set()  # (ps, group): who knows its configuration
        self._asked: dict[tuple[int, int], Call] = {}  # (ps, group): of the newest step
        self._self = AsIfFrom(FROM_CLOSER, spawn=self._start)
        self._own_parts: set[asyncio.Future[None]] = set()  # of ps 0, which take long
        self.addresses = list(attach.ps_addresses)
        self._moves = False  # a ps that is lost is served elsewhere soon
        self._moved = 0  # how often we heard where they are served

    def tell(self, message: CloseStep, parts: Sequence[Sequence[int]], then: Then) -> None:
        """Tell every ps of a step, all at once. It is carried as far as it goes.

        Where nothing of the group is elsewhere so far no other is told, nor of what ps 0 itself
        refuses at once.

        Args:
            message: Says it.
            parts: Of each push, the other ps tasks that have a part.
            then: Called once, when all have answered.
        """
        answers: list[Message] = []
        missing = 1
        failed: Exception | None = None

        def told(outcome: Any) -> None:
            done(outcome if isinstance(outcome, Exception) else outcome[0])

        def done(outcome: Message | Exception) -> None:
            nonlocal missing, failed
            missing -= 1
            if isinstance(outcome, Exception):
                failed = failed or outcome
            else:
                answers.append(outcome)
            if not missing:
                then(answers, failed)

        # It runs to completion, but it may wait for a lock, or in the log.
        request, others = OwnRequest(self._self, message, (), told), list[PsLink]()
        try:
            is_alone = message.step < self._sync.groups[message.group].elsewhere
            if not is_alone and len(self.addresses) > 1:
                others = self._links().links[1:]
            missing += len(others)
            self._sync.execute(request)
        except Exception as exc:
            request.fail(exc)
        if failed is None:
            for link in others:
                named = zip(message.pushes, parts, strict=True)
                here = [push for push, tasks in named if link.index in tasks]
                is_whole = len(here) == len(message.pushes)
                self._tell(link, message if is_whole else replace(message, pushes=here), done)
        elif missing:
            then(answers, failed)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._own_parts.add(task)
        task.add_done_callback(self._own_parts.discard)
        return task

    def _tell(
        self,
        link: PsLink,
        message: CloseStep | FollowParts,
        done: Callable[[Message | Exception], None],
    ) -> None:
        ps, moved = link.index, self._moved
        measures = type(message) is CloseStep and message.measures
        expected = Measured if measures else Done

        def build() -> Message:
            if isinstance(message, FollowParts) or (ps, message.group) in self._told:
                return message
            return replace(message, config=self._sync.groups[message.group].raw)

        def answered(outcome: Frame | Exception) -> None:
            if isinstance(outcome, FencedError) and self._moves:
                self._await_move(link, moved)
                # By no reference to this function: that would keep all that came until the
                # garbage collector finds it.
                self._tell(link, message, done)
            elif isinstance(outcome, NotServedError):
                done(_came_back(link, outcome))
            elif isinstance(outcome, Exception):
                done(outcome)
            elif type(answer := outcome.message) is not expected:
                done(
                    RemoteProtocolError(
                        f"{link.task} answered {type(message).__name__} with "
                        f"{type(answer).__name__}"
                    )
                )
            else:
                if type(message) is CloseStep and not measures:  # it is in its log
                    self._told.add((ps, message.group))
                done(answer)

        call = link.ask(Call(link, build=build), answered)
        if isinstance(message, CloseStep):
            self._asked[ps, message.group] = call
        elif ps in self.following:
            self.following[ps] = call

    def awaited(self, group: int) -> list[int]:
        """Return the ps tasks that have not answered yet of a step that they were told of."""
        away = [
            ps
            for (ps, number), call in self._asked.items()
            if number == group and call.then is not None
        ]
        return away or [0]

    def follow(self, others: Sequence[int]) -> None:
        """Hear from now on which parts of pushes are held on the other ps tasks.

        Raises:
            RemoteProtocolError: One of these is none.
        """
        for ps in others:
            if ps in self.following or self._closed:
                continue
            if not 0 < ps < len(self.addresses):
                raise RemoteProtocolError(
                    f"{CLOSER}: a push with shards on ps {ps}, but there are only "
                    f"{len(self.addresses)} ps tasks"
                )
            self.following[ps] = None
            link = self._links().links[ps]
            self._tell(link, FollowParts(), functools.partial(self._unfollowed, ps))

    def _unfollowed(self, ps: int, outcome: Message | Exception) -> None:
        """A ps cannot be followed: who waits for parts there waits in vain."""
        self.following.pop(ps, None)
        if isinstance(outcome, ConnectionLost):  # however often: it lost no connection
            self.follow((ps,))
        elif isinstance(outcome, Exception) and not self._closed:
            self._lost(ps, outcome)

    async def read_global_step(self, config: SyncConfig) -> int:
        """Return the present value of a group's global step.

        Raises:
            ConfigurationError: It is no single integer, or on a ps that there is not.
            UnknownVariableError: It is not on the ps that it should be on.
            ParameterServerLost: Its ps is gone.

        Cancellation: Safe.
        """
        ps, *_ = config.global_step
        if not 0 <= ps < len(self.addresses):
            raise ConfigurationError(
                f"{config.name}: its global step is on ps {ps}, but there are only "
                f"{len(self.addresses)} ps tasks"
            )
        if ps:
            client = self._links()
            name, (_, variable, index) = f"{config.name}: global step", config.global_step
            # The shard, as a variable of its own.
            shard = ShardSpec(name, variable, index, 0, (), GLOBAL_STEP_DTYPE, ps)
            wanted = client.plan(
                (VariableSpec(name, variable, (), GLOBAL_STEP_DTYPE, False, (shard,), ""),)
            )
            moved = self._moved
            while True:  # until it, or its backup, answers
                try:
                    (value,) = await client.pull(wanted)
                    return int(value)
                except FencedError as exc:
                    if isinstance(exc, NotServedError) and not self._moves:
                        raise _came_back(client.links[ps], exc) from exc
                    if not self._moves:
                        raise
                    moved = self._await_move(client.links[ps], moved)
        return await self._sync.read_global_step(config)

    async def close(self) -> None:
        """Close the links; what is under way on them fails. Cancellation: they may be left open."""
        self._closed = True
        for call in self.following.values():
            if call is not None:
                call.give_up()
        await self._client.close()
        await self._endpoint.close(goes_on=True)

    def _links(self) -> PsClient:
        """Return the links to the other ps tasks, if they are not closed."""
        if self._closed:
            raise ClosedError(f"{CLOSER} has closed its links to the other ps tasks")
        return self._client

    # Where others are served by backups.

    def expect_moves(self) -> None:
        """From now on wait for a ps that is lost until it is served elsewhere, see ``move``.

        Which one is lost the coordinator says: what cannot be reached from here may serve all the
        same, and is looked for as long as it takes.
        """
        self._moves = True
        for link in self._client.links:
            link.lost_after_s = math.inf
            link.on_lost = lambda _, link=link: link.hold()

    def _await_move(self, link: PsLink, moved: int) -> int:
        """A ps was replaced by its backup: where that is we shall hear, or have heard already.

        ``moved`` is how often we had heard when it was asked. Returns how often we have by now.
        """
        if moved == self._moved:
            link.hold()
        return self._moved

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served now; what is under way goes there."""
        self.addresses = list(addresses)
        self._moved += 1
        for link, address in zip(self._client.links, addresses, strict=True):
            if link.address != address or link.lost is not None:
                link.revive()
                link.address = address
                self._told = {(ps, group) for ps, group in self._told if ps != link.index}
            link.release()


def _came_back(link: PsLink, refused: NotServedError) -> ParameterServerLost:
    """Return what it means that a ps without a backup serves nothing: it was started again.

    A step must not fail with the refusal itself: the coordinator knows what to do about a loss.
    """
    lost = ParameterServerLost(link.task, f"refuses {CLOSER}: {refused.message}")
    lost.__cause__ = refused
    return lost
