"""Requests from ps 0 to all ps tasks, itself among them.

``outgoing_steps`` says what all are told of a step; this tells them, and hears their answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from psync.client.link import Call, PsLink
from psync.client.ps import PsClient
from psync.errors import (
    ClosedError,
    ConfigurationError,
    FencedError,
    NotServedError,
    ParameterServerLost,
    RemoteProtocolError,
)
from psync.net.connection import AsIfFrom, Connection, OwnRequest, Request
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.ps.cooperative_work import LongWork
from psync.store.step_norms import ShardSums
from psync.store.sync_config import SyncConfig
from psync.sync.cross_ps_sets import Along, Share, Values, WholeSet
from psync.sync.groups import CLOSER, FROM_CLOSER, step_variable
from psync.sync.ps_sync import PsSync
from psync.wire.frames import SMALL_BODY_BYTES, Frame
from psync.wire.messages import (
    AttachPs,
    CloseStep,
    DescribeSet,
    Done,
    MeasureStep,
    SetSizes,
    StepMeasured,
)

T = TypeVar("T")


class AllPs:
    """The ps tasks of one coordinator's cluster.

    Args:
        platform: Network, secret.
        attach: Says who the coordinator is, and where the ps tasks are.
        sync: The part of ps 0 itself.
        pool: Memory for what comes in.
        work: What takes long.
        timeline: How often the cluster has rolled back to a snapshot.
    """

    def __init__(
        self,
        platform: Platform,
        attach: AttachPs,
        sync: PsSync,
        pool: BlockPool,
        work: LongWork,
        timeline: int = 0,
    ) -> None:
        self._platform = platform
        self._attach = attach
        self._sync = sync
        self._pool = pool
        self._work = work
        self._endpoint: Endpoint | None = None  # made when another ps is first needed
        self._client: PsClient | None = None
        self._closed = False
        self._told: set[tuple[int, int]] = set()  # (ps, group): who knows its configuration
        self._incarnation = attach.coordinator + timeline
        self._own_parts: set[asyncio.Future[None]] = set()  # of ps 0, which take long
        self._addresses = list(attach.ps_addresses)
        self._moves = False  # a ps that is lost is served elsewhere soon
        self._moved = 0  # how often we heard where they are served

    @property
    def has_others(self) -> bool:
        """Whether there is more than one ps."""
        return len(self._attach.ps_addresses) > 1

    async def describe(self, known: WholeSet, group: int, config: dict[str, Any] | None) -> None:
        """Let each other ps say whether its share of a set fits.

        Args:
            known: The set.
            group: That pushes to it; -1: its values are wanted, and no more.
            config: Of the group.

        Raises:
            ValueMismatchError: It does not fit.
            PsyncError: What a ps has against it.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        sizes = 0
        for share in known.shares:
            if not 0 < share.ps < len(self._attach.ps_addresses):
                raise RemoteProtocolError(
                    f"{CLOSER}: a set with shards on ps {share.ps}, but there are only "
                    f"{len(self._attach.ps_addresses)} ps tasks"
                )
            message = DescribeSet(share.number, group, config)
            answer = (await self._ask_of(share, message)).message
            if not isinstance(answer, SetSizes):
                raise RemoteProtocolError(
                    f"/job:ps/task:{share.ps} described a set with {type(answer).__name__}"
                )
            if group >= 0:
                known.check_share(share, answer.sizes, CLOSER)
            sizes += sum(answer.sizes)
        if group < 0 and sizes + known.own.look_up(self._sync.store).nbytes > SMALL_BODY_BYTES:
            raise RemoteProtocolError(
                f"{CLOSER}: the values of a set of more than {SMALL_BODY_BYTES} bytes are wanted"
            )
        known.checked_for.add(group)

    def close_step(
        self,
        message: CloseStep,
        along: Sequence[Sequence[Along]],
        wanted: Collection[Share],
        then: Callable[[Values, Exception | None], None],
    ) -> None:
        """Let every ps close a step, all at once. It is carried as far as it goes.

        Args:
            message: What all are told.
            along: What belongs to others of each push.
            wanted: Whose values are wanted afterwards.
            then: Called once, when all have answered, with the values that were wanted and the
                first error. Must not raise.
        """
        values: Values = {}

        def brought(ps: int, received: Frame) -> None:
            came = iter(received.segments)
            for share in wanted if received.segments else ():
                if share.ps == ps:
                    values[share.number] = list(islice(came, share.end - share.first))

        def own(request: Request[Any]) -> None:
            self._sync.applier.close(request, (), lambda: request.answer(_DONE))

        self._to_all(message, along, wanted, own, brought, lambda failed: then(values, failed))

    def measure_step(
        self,
        message: MeasureStep,
        along: Sequence[Sequence[Along]],
        then: Callable[[Sequence[ShardSums], Exception | None], None],
    ) -> None:
        """Let every ps measure a step, all at once. It is carried as far as it goes.

        Args:
            message: What all are told.
            along: As for ``close_step``.
            then: Called once, when all have answered, with the sums of all shards and the first
                error. Must not raise.
        """
        sums: list[ShardSums] = []

        def measured(ps: int, received: Frame) -> None:
            if not isinstance(received.message, StepMeasured):
                raise RemoteProtocolError(
                    f"/job:ps/task:{ps} measured a step with {type(received.message).__name__}"
                )
            for variable, index, first, second in received.message.sums:
                sums.append((variable, index, first, second))

        async def add(request: Request[Any], measured: Awaitable[list[ShardSums]]) -> None:
            sums.extend(await measured)
            request.answer(_DONE)

        def own(request: Request[Any]) -> None:
            mine = self._sync.applier.measure(message)
            if isinstance(mine, list):
                sums.extend(mine)
                request.answer(_DONE)
            else:
                request.start(add(request, mine))

        self._to_all(message, along, (), own, measured, lambda failed: then(sums, failed))

    def _to_all(
        self,
        message: CloseStep,
        along: Sequence[Sequence[Along]],
        wanted: Collection[Share],
        own: Callable[[Request[Any]], None],
        heard: Callable[[int, Frame], None],
        then: Callable[[Exception | None], None],
    ) -> None:
        """Tell all of a step; ``heard`` gets each answer, ``then`` is called when all are there.

        ``own`` does the part of ps 0; what it refuses at once no other is told.
        """
        missing = 1
        failed: Exception | None = None

        def done(error: Exception | None) -> None:
            nonlocal missing, failed
            missing -= 1
            failed = failed or error
            if not missing:
                then(failed)

        def own_done(outcome: object) -> None:
            done(outcome if isinstance(outcome, Exception) else None)

        # It runs to completion, but it may wait for a lock, or in the log.
        request = OwnRequest(AsIfFrom(FROM_CLOSER, {}, self._start), message, (), own_done)
        try:
            others = self._others()
            missing += len(others)
            own(request)
        except Exception as exc:
            request.fail(exc)
        if failed is not None:
            if missing:
                then(failed)
            return
        for link in others:
            self._tell(link, message, along, wanted, heard, done)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._own_parts.add(task)
        task.add_done_callback(self._own_parts.discard)
        return task

    def _tell(
        self,
        link: PsLink,
        message: CloseStep,
        along: Sequence[Sequence[Along]],
        wanted: Collection[Share],
        heard: Callable[[int, Frame], None],
        done: Callable[[Exception | None], None],
    ) -> None:
        ps, group = link.index, message.group
        moved = self._moved
        ahead = [share for share in wanted if share.ps == ps]
        named = list(ahead)
        numbers: list[int] = []
        segments: list[memoryview] = []
        for shares in along:
            number = -1
            for share, body in shares:
                if share.ps == ps:
                    number = share.number
                    named.append(share)
                    segments.append(body)
            numbers.append(number)

        def build(peer: Connection) -> CloseStep:
            for share in named:
                if share.number not in peer.state["plans"]:
                    link.define(peer, share.definition)
            return replace(
                message,
                config=None if (ps, group) in self._told else self._sync.known(group, None).raw,
                along=numbers if segments else [],
                ahead=[share.number for share in ahead],
            )

        def answered(outcome: Frame | Exception) -> None:
            if isinstance(outcome, FencedError):
                if self._moves:
                    self._await_move(link, moved)
                    # By no reference to this function: that would keep all that came until the
                    # garbage collector finds it.
                    self._tell(link, message, along, wanted, heard, done)
                elif isinstance(outcome, NotServedError):
                    done(_came_back(link, outcome))
                else:
                    done(outcome)
                return
            if isinstance(outcome, Exception):
                done(outcome)
                return
            if type(message) is CloseStep:  # which is in its log
                self._told.add((ps, group))
            try:
                heard(ps, outcome)
            except RemoteProtocolError as exc:
                done(exc)
            else:
                done(None)

        nbytes = sum(map(len, segments))
        link.ask(Call(link, build, segments, nbytes), answered)

    def _others(self) -> Sequence[PsLink]:
        return self._links().links[1:] if self.has_others else ()

    async def read_global_step(self, config: SyncConfig) -> int:
        """Return the present value of a group's global step.

        Raises:
            ConfigurationError: It is no single integer, or on a ps that there is not.
            UnknownVariableError: It is not on the ps that it should be on.
            ParameterServerLost: Its ps is gone.

        Cancellation: Safe.
        """
        ps, *_ = config.global_step
        if not 0 <= ps < len(self._attach.ps_addresses):
            raise ConfigurationError(
                f"{config.name}: its global step is on ps {ps}, but there are only "
                f"{len(self._attach.ps_addresses)} ps tasks"
            )
        if ps:
            client = self._links()
            wanted = client.plan((step_variable(config),))
            (value,) = await self._asking(client.links[ps], lambda: client.pull(wanted))
            return int(value)
        return await self._sync.read_global_step(config, self._work)

    async def close(self) -> None:
        """Close the links; what is under way on them fails. Cancellation: they may be left open."""
        self._closed = True
        if self._client is not None and self._endpoint is not None:
            await self._client.close()
            await self._endpoint.close(goes_on=True)

    def _links(self) -> PsClient:
        """Return the links to the other ps tasks.

        Their incarnation is the coordinator's, plus the timeline: a ps that serves a newer one
        refuses it.
        """
        if self._closed:
            raise ClosedError(f"{CLOSER} has closed its links to the other ps tasks")
        if self._client is None:
            attach = self._attach
            self._endpoint = Endpoint(self._platform, CLOSER, self._incarnation, {}, self._pool)
            self._client = self._platform.parts.of(PsClient)(
                self._endpoint, self._addresses, self._pool, attach.ps_timeout_s
            )
            if self._moves:
                self.expect_moves()
        return self._client

    # Where others are served by backups.

    def expect_moves(self) -> None:
        """From now on wait for a ps that is lost until it is served elsewhere, see ``move``.

        Which one is lost the coordinator says: what cannot be reached from here may serve all the
        same, and is looked for as long as it takes.
        """
        self._moves = True
        for link in () if self._client is None else self._client.links:
            link.lost_after_s = math.inf
            link.on_lost = lambda _, link=link: link.hold()

    async def _ask_of(self, share: Share, message: DescribeSet) -> Frame:
        """Ask a ps of its share; where it is served by its backup, that."""
        link = self._links().links[share.ps]

        def build(peer: Connection) -> DescribeSet:
            link.define(peer, share.definition)
            return message

        return await self._asking(link, lambda: link.call(build))

    async def _asking(self, link: PsLink, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask a ps until it, or its backup, answers."""
        moved = self._moved
        while True:
            try:
                return await ask()
            except FencedError as exc:
                if not self._moves:
                    if isinstance(exc, NotServedError):
                        raise _came_back(link, exc) from exc
                    raise
                moved = self._await_move(link, moved)

    def _await_move(self, link: PsLink, moved: int) -> int:
        """A ps was replaced by its backup: where that is we shall hear, or have heard already.

        ``moved`` is how often we had heard when it was asked. Returns how often we have by now.
        """
        if moved == self._moved:
            link.hold()
        return self._moved

    def move(self, addresses: Sequence[str]) -> None:
        """Take note of where each ps is served now; what is under way goes there."""
        self._addresses = list(addresses)
        self._moved += 1
        if self._client is None:
            return
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


_DONE = Done()
