"""Synchronous requests on every ps: staged parts, and the commands of ps 0.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

    message       then
    StagePush     check, take memory, keep the buffer it arrives in (``staging``)
    DescribeSet   check, say how large the shards are
    MeasureStep   say what the norms of the same mean would be; changes nothing
    CloseStep     take the parts that ps 0 was given for this ps; the mean of the named pushes is
                  applied, shard by shard, moving averages follow, and the group's step is raised
                  here; a repetition changes nothing (``step_applier``)
    RaiseStep     raise a global step (``groups``)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence

from psync.errors import BusyError, NotServedError, RemoteProtocolError, UsageError
from psync.net.peer import Handler, Peer, Reply
from psync.net.platform import Platform
from psync.numerics.blocks import BlockPool
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.locks import PsLocks
from psync.ps.update import ShardSet, memory_for, numbered_set, set_of
from psync.store.ledger import Ledger
from psync.store.step_norms import ShardSums
from psync.store.store import ShardStore
from psync.sync.cross_ps_sets import Along, WholeSet
from psync.sync.group import Close
from psync.sync.groups import CLOSER, GlobalSteps, GroupTable
from psync.sync.log_entries import staged_entry
from psync.sync.staging import Staging
from psync.sync.step_applier import StepApplier
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.recovery_messages import CountPush
from psync.wire.sync_messages import (
    CloseStep,
    Contribute,
    DescribeSet,
    MeasureStep,
    SetSizes,
    Staged,
    StagePush,
    StepMeasured,
)


class PsSync(GroupTable):
    """The synchronous groups of one ps under one coordinator.

    Args:
        platform: Limits.
        task: Name of the ps.
        store: Its shards.
        ledger: Knows who has been replaced.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait.
        committer: In whose order all is done, once it has begun.
        serves: False: no coordinator has attached it yet, or its backup serves in its place.
    """

    def __init__(
        self,
        platform: Platform,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
        locks: PsLocks,
        committer: Committer,
        *,
        serves: bool = True,
    ) -> None:
        super().__init__(store, task)
        self.ledger = ledger
        self.work = work
        self.locks = locks
        self.committer = committer
        parts = platform.parts
        self.global_steps = parts.of(GlobalSteps)(store, self._check_closer, work, locks, committer)
        self.staging = Staging(platform.limits.staging_bytes, task)
        make = parts.of(StepApplier)
        self.applier = make(task, self, self.staging, work, locks, committer)
        self._serves = serves
        self._pool = pool

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            StagePush: Handler(self._stage, self._prepare_part),
            DescribeSet: Handler(self._describe),
            MeasureStep: Handler(self._measure_for),
            CloseStep: Handler(self._close_for),
            **self.global_steps.handlers(),
        }

    def steps(self) -> list[tuple[int, int]]:
        """Return (group, step) of each group that has closed a step here; not to be changed."""
        return self.staging.steps()

    def statistics(self) -> dict[str, int]:
        """Return sizes and counters of what is staged."""
        return dataclasses.asdict(self.staging.statistics())

    # Staging.

    def _prepare_part(
        self, peer: Peer, message: StagePush, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        known = set_of(peer, message, self._task).look_up(self.store)
        known.check_lengths(lengths, self._task, message.rows)
        return self.reserve(peer, message, sum(lengths))

    def reserve(
        self, peer: Peer, message: StagePush | Contribute, nbytes: int
    ) -> Sequence[memoryview]:
        """Take memory for a part that is about to arrive."""
        config = self.define(message.group, message.config)
        replica = (peer.task, peer.incarnation)
        self.staging.check(message.group, replica, message.push, message.local_step, nbytes, config)
        # What is stale is dropped once it is here.
        return memory_for(self._pool, nbytes, varies=message.rows is not None)

    def _stage(
        self, peer: Peer, message: StagePush, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = set_of(peer, message, self._task).look_up(self.store)
        part = self.part_with(message, known, known.body_of(body, self._task, message.rows))
        if not self.committer.is_begun:
            return Reply(Staged(not self.keep(peer, message, part)))
        client = (peer.task, peer.incarnation)
        return self.committer.commit(
            client, staged_entry(part, message, self.raw_config(message.group)),
            (part.body,) if len(part.body) else (),
            lambda: Reply(Staged(not self.keep(peer, message, part))),
        )  # fmt: skip

    def part_with(self, message: StagePush | CountPush, known: ShardSet, body: memoryview) -> Part:
        """Return the part of a push that belongs to this ps; GradientError: it does not fit."""
        group, rows = message.group, message.rows
        if rows is None:
            return Part(known, known.gradients(self.store, group, body), body)
        return Part(known, known.row_gradients(self.store, group, body, rows), body, rows)

    def keep(self, peer: Peer, message: StagePush | Contribute, part: Part) -> bool:
        """Keep a part that has arrived in the memory of ``reserve``; False: it is stale."""
        replica = (peer.task, peer.incarnation)
        return self.staging.stage(message.group, replica, message.push, message.local_step, part)

    def part_of(self, message: Contribute | CountPush, known: WholeSet, body: memoryview) -> Part:
        """Return what a push that has come whole brings, or ps 0's part that came along.

        Raises:
            GradientError: It does not fit.
        """
        own = known.own.look_up(self.store)
        group, rows = message.group, message.rows
        if rows is not None:
            return Part(own, own.row_gradients(self.store, group, body, rows), body, rows, known)
        mine, along = known.cut(body)
        return Part(own, own.gradients(self.store, group, mine), body, None, known, along)

    def staged(self, group: int, replica: Replica, push: int) -> Part | None:
        """Return what is kept of a push, if anything."""
        part: Part | None = self.staging.staged(group, replica, push)
        return part

    def keep_judged(
        self, group: int, replica: Replica, push: int, local_step: int, part: Part
    ) -> None:
        """Keep a part that another ps has kept, whose backup this is."""
        self.staging.keep(group, replica, push, local_step, len(part.body), part)

    def along(self, close: Close) -> list[Sequence[Along]]:
        """Return what belongs to others of each push of a step; on ps 0."""
        parts = [
            self.staged(close.group, (task, incarnation), push)
            for task, incarnation, push, _ in close.pushes
        ]
        return [() if part is None else part.along for part in parts]

    def _describe(self, peer: Peer, message: DescribeSet, _: list[memoryview]) -> Reply:
        self._check_closer(peer)
        known = set_of(peer, message, self._task).look_up(self.store)
        if message.group >= 0:
            self.define(message.group, message.config)
            (anything,) = memory_for(self._pool, known.nbytes)
            known.gradients(self.store, message.group, anything)
        return Reply(SetSizes(list(known.lengths)))

    # Measuring.

    def _measure_for(
        self, peer: Peer, message: MeasureStep, segments: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        along = self._came_along(peer, message, segments)
        sums = self.applier.measure(message, along)
        return self._measured(sums) if isinstance(sums, list) else self._measured_after(sums)

    async def _measured_after(self, under_way: Awaitable[list[ShardSums]]) -> Reply:
        return self._measured(await under_way)

    def _measured(self, sums: list[ShardSums]) -> Reply:
        return Reply(StepMeasured(sums))

    # Closing.

    def _close_for(
        self, peer: Peer, message: CloseStep, segments: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        along = self._came_along(peer, message, segments)
        wanted = [numbered_set(peer, number, None, self._task) for number in message.ahead]
        under_way = self.applier.close(message, along)
        if under_way is None:
            return Reply(Done(), self.values_of(wanted))
        return self._done_after(under_way, wanted)

    async def _done_after(self, under_way: Awaitable[None], wanted: Sequence[ShardSet]) -> Reply:
        await under_way
        return Reply(Done(), self.values_of(wanted))

    def _check_closer(self, peer: Peer) -> None:
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        if peer.task != CLOSER:
            raise UsageError(f"{self._task}: {peer.task} may not close a step, only {CLOSER}")
        self.check_served()

    def check_served(self) -> None:
        """Raise NotServedError unless this process serves its ps, for a coordinator."""
        if not self._serves:
            raise NotServedError(f"{self._task} is not, or no longer, served by this process")

    def _came_along(
        self, peer: Peer, message: CloseStep, segments: Sequence[memoryview]
    ) -> Sequence[Part | None]:
        """Return the part of each push that has come with the word to close or measure the step."""
        self._check_closer(peer)
        return self.parts_along(peer, message, segments)

    def parts_along(
        self, peer: Peer, message: CloseStep, segments: Sequence[memoryview]
    ) -> Sequence[Part | None]:
        """Return the part of each push that has come with a closing; () is all None."""
        self.define(message.group, message.config)
        for number, members in message.sets:
            numbered_set(peer, number, members, self._task)
        if not segments:
            return ()
        if sum(number >= 0 for number in message.along) != len(segments):
            raise RemoteProtocolError(f"{self._task}: {len(segments)} parts came with a closing")
        bodies = iter(segments)
        parts: list[Part | None] = []
        for number in message.along:
            if number < 0:
                parts.append(None)
                continue
            known = numbered_set(peer, number, None, self._task).look_up(self.store)
            body = known.body_of((next(bodies),), self._task)
            parts.append(Part(known, known.gradients(self.store, message.group, body), body))
        return parts

    def values_of(self, wanted: Sequence[ShardSet]) -> list[list[memoryview]]:
        """Return the values of all shards of these sets; none if one is busy."""
        try:
            return [self.store.read(key) for known in wanted for key in known.keys]
        except BusyError:
            return []
