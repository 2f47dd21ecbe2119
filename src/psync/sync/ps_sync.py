"""Synchronous requests on every ps: staged parts, and the commands of ps 0.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

    message       then
    StagePush     check, take memory, keep the buffer it arrives in (``staging``)
    DescribeSet   check, say how large the shards are
    MeasureStep   say what the norms of the same mean would be; changes nothing
    CloseStep     take the parts that ps 0 was given for this ps; the mean of the named pushes is
                  applied, shard by shard, moving averages follow, and the global step if it is
                  here; a repetition changes nothing (``step_applier``)

StagePush and CloseStep are entries of the log, and a backup does with them what is done here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from psync.errors import BusyError, NotServedError, RemoteProtocolError, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.ps.admission import PsLocks
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import Executor, Listed
from psync.ps.shard_sets import Body, ShardSet, body_in_place, memory_for, set_of
from psync.store.ledger import Ledger
from psync.store.step_norms import ShardSums
from psync.store.store import ShardStore
from psync.sync.cross_ps_sets import Along, ShareNumbers, WholeSet, whole_set_of
from psync.sync.groups import CLOSER, GroupTable
from psync.sync.log_entries import body_of, entries_of_snapshot, staged_entry
from psync.sync.pushes import Close
from psync.sync.staging import Staging
from psync.sync.step_applier import StepApplier
from psync.sync.step_update import Part
from psync.sync.tokens import Replica
from psync.wire.codec import Message
from psync.wire.messages import (
    CloseStep,
    Contribute,
    CountPush,
    DescribeSet,
    Done,
    HoldPush,
    MeasureStep,
    NormsMeasured,
    SetGroups,
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
        executor: In whose order all is done.
        num_ps: Number of ps tasks.
        shares: Numbers that connections of this coordinator's tasks may still use; None: none.
        serves: False: no coordinator has attached it yet, or its backup serves in its place.

    Attributes:
        shares: Numbers of what other ps tasks hold of sets that connections to ps 0 use.
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
        executor: Executor,
        num_ps: int,
        shares: ShareNumbers | None = None,
        *,
        serves: bool = True,
    ) -> None:
        super().__init__(store, task)
        self.shares = shares or ShareNumbers(num_ps, CLOSER)
        self.ledger = ledger
        self.executor = executor
        self.staging = Staging(platform.limits.staging_bytes, task)
        make = platform.parts.of(StepApplier)
        self.applier = make(self, ledger, self.staging, work, locks, executor)
        self.serves = serves
        self._pool = pool

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            StagePush: Handler(self._stage, self._prepare_part),
            DescribeSet: Handler(self._describe),
            MeasureStep: Handler(self._measure_for),
            CloseStep: Handler(self._close_for),
        }

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who does which entry of the log of the one whose backup this is."""
        return {
            SetGroups: Handler(self._set_groups),
            HoldPush: Handler(self._hold),
            StagePush: Handler(self._replay_stage),
            CloseStep: Handler(self._replay_close),
        }

    # Staging.

    def _prepare_part(self, request: Request[StagePush]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        peer, message = request.peer, request.message
        lengths = request.lengths
        known = set_of(peer, message.set_id, message.members, self._task).look_up(self.store)
        known.check_lengths(lengths, self._task, message.rows)
        return self.reserve(request, sum(lengths), known)

    def reserve(
        self,
        request: Request[StagePush] | Request[Contribute],
        nbytes: int,
        known: ShardSet | None = None,
    ) -> Sequence[memoryview]:
        """Take memory for a part that is about to arrive.

        Args:
            request: With which it comes.
            nbytes: Its size.
            known: Of which shards it is, if it may stay where it is lent.
        """
        message, replica = request.message, request.peer.client
        config = self.known(message.group, message.config).config
        # What is stale is dropped once it is here.
        self.staging.reserve(
            message.group, replica, message.push, message.local_step, nbytes, config
        )
        if known is None or message.rows is not None:
            return memory_for(self._pool, nbytes, varies=message.rows is not None)
        return body_in_place(request, self._pool, known, nbytes, is_alone=self.executor.is_alone)

    def _stage(self, request: Request[StagePush]) -> None:
        message, replica = request.message, request.peer.client
        known = set_of(request.peer, message.set_id, message.members, self._task).look_up(
            self.store
        )
        body = known.body_of(request.segments, self._task, message.rows)
        part = self._part_with(message, known, body)
        if self.staging.is_expected(message.group, replica, message.push):
            self._submit(request, part)
        else:
            request.answer(Staged(stale=True))

    def _replay_stage(self, request: Request[StagePush]) -> None:
        message = request.message
        self.known(message.group, message.config)
        known = set_of(request.peer, message.set_id, message.members, self._task).look_up(
            self.store
        )
        self._submit(request, self._part_with(message, known, request.segments))

    def _submit(self, request: Request[StagePush], part: Part) -> None:
        message = request.message
        entry = staged_entry(part, message, self.known(message.group, None).raw)

        def keep() -> None:
            kept = self.keep(request.peer.client, message, part)
            request.answer(Staged(not kept))

        self.executor.submit(request, entry, body_of(part), keep)

    def _part_with(self, message: StagePush | HoldPush, known: ShardSet, body: Body) -> Part:
        """Return the part of a push that belongs to this ps.

        Raises:
            ValueMismatchError: It does not fit.
        """
        group, rows = message.group, message.rows
        if rows is None:
            return Part(known, known.gradients(self.store, group, body), body)
        return Part(known, known.row_gradients(self.store, group, body, rows), body, rows)

    def keep(
        self, replica: Replica, message: StagePush | Contribute | CountPush, part: Part
    ) -> bool:
        """Keep a part that has arrived, in its turn; False: it is stale."""
        self.ledger.check_incarnation(*replica)
        return self.staging.stage(
            message.group, replica, message.push, message.local_step, part.nbytes, part
        )

    def part_of(
        self, message: Contribute | CountPush | HoldPush, known: WholeSet, body: Body
    ) -> Part:
        """Return what a push that has come whole brings, or ps 0's part that came along.

        Raises:
            ValueMismatchError: It does not fit.
        """
        own = known.own.look_up(self.store)
        group, rows = message.group, message.rows
        if rows is not None:
            return Part(own, own.row_gradients(self.store, group, body, rows), body, rows, known)
        mine, along = known.cut(body)
        return Part(own, own.gradients(self.store, group, mine), body, None, known, along)

    def replayed_part(self, request: Request[CountPush]) -> Part | None:
        """Return what has come along with a push, as the log says it; None: nothing."""
        if request.message.set_id < 0:
            return None
        return self._whole_part(request.peer, request.message, request.segments)

    def _whole_part(self, peer: Connection, message: CountPush | HoldPush, body: Body) -> Part:
        known = whole_set_of(peer, message.set_id, message.members, self.shares, self._task)
        if message.rows is None:
            known.fit(self.store, tuple(message.lengths), self._task)
        return self.part_of(message, known, body)

    def _hold(self, request: Request[HoldPush]) -> None:
        """Keep a part that is staged over there, whether its sender lives or not."""
        peer, message, body = request.peer, request.message, request.segments
        if message.whole:
            part = self._whole_part(peer, message, body)
        else:
            keys = [(variable, index) for _, variable, index in message.members]
            known = set_of(peer, message.set_id, keys, self._task).look_up(self.store)
            part = self._part_with(message, known, body)
        replica = (peer.task, peer.incarnation)
        self.staging.stage(
            message.group, replica, message.push, message.local_step, part.nbytes, part
        )
        request.answer(Done())

    def _set_groups(self, request: Request[SetGroups]) -> None:
        self.set_groups(request.message)
        request.answer(_DONE)

    def set_groups(self, message: SetGroups) -> None:
        """Know the groups that the one knows whose backup this is."""
        for group, config, step in message.groups:
            self.known(group, config)
            if step >= 0:
                self.staging.close(group, step - 1)
                self.staging.applied(group, step - 1)
        for group in message.spread:
            self.known(group, None).spread = True

    def control(self) -> list[Any]:
        """Return what is staged and decided, as plain data in an order of its own, for a digest."""
        held = sorted(
            [group, *replica, push, local_step, part.nbytes]
            for group, replica, push, local_step, part in self.staging.held()
        )
        decided = sorted(
            [group, self.staging.step(group), known.spread, known.outgoing and [
                known.outgoing.close.step, known.outgoing.is_measured]]
            for group, known in self._groups.items()
            if self.staging.step(group) is not None or known.outgoing is not None
        )  # fmt: skip
        return [held, decided]

    async def entries(self, rule: Mapping[str, Any] | None = None) -> list[Listed]:
        """Return entries that give a backup what no snapshot has; see ``entries_of_snapshot``."""
        spread = [group for group, known in self._groups.items() if known.spread]
        measured = [
            NormsMeasured(each.close.group, each.close.step, each.scales, each.ratios)
            for each in self.outgoing()
            if each.is_measured
        ]
        steps, held = dict(self.staging.steps), self.staging.held()
        return entries_of_snapshot(self.raw_configs(), steps, spread, held, rule, measured)

    def along(self, close: Close) -> list[Sequence[Along]]:
        """Return what belongs to others of each push of a step; on ps 0."""
        parts = [
            self.staging.staged(close.group, (task, incarnation), push)
            for task, incarnation, push, _ in close.pushes
        ]
        return [() if part is None else part.along for part in parts]

    def _describe(self, request: Request[DescribeSet]) -> None:
        peer, message = request.peer, request.message
        self._check_closer(peer)
        known = set_of(peer, message.set_id, message.members, self._task).look_up(self.store)
        if message.group >= 0:
            self.known(message.group, message.config)
            known.gradients(self.store, message.group, memory_for(self._pool, known.nbytes))
        request.answer(SetSizes(list(known.lengths)))

    # Measuring.

    def _measure_for(self, request: Request[MeasureStep]) -> None:
        sums = self.applier.measure(request.message, self._came_along(request))
        if isinstance(sums, list):
            request.answer(StepMeasured(sums))
        else:
            request.start(self._measured(request, sums))

    async def _measured(
        self, request: Request[MeasureStep], under_way: Awaitable[list[ShardSums]]
    ) -> None:
        request.answer(StepMeasured(await under_way))

    # Closing.

    def _close_for(self, request: Request[CloseStep]) -> None:
        along = self._came_along(request)
        ahead = request.message.ahead
        wanted = [set_of(request.peer, number, None, self._task) for number in ahead]
        self.applier.close(request, along, lambda: request.answer(_DONE, self.values_of(wanted)))

    def _replay_close(self, request: Request[CloseStep]) -> None:
        along = self._parts_along(request)
        self.applier.close(request, along, lambda: request.answer(_DONE))

    def _check_closer(self, peer: Connection) -> None:
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        if peer.task != CLOSER:
            raise UsageError(f"{self._task}: {peer.task} may not close a step, only {CLOSER}")
        self.check_served()

    def check_served(self) -> None:
        """Raise NotServedError unless this process serves its ps, for a coordinator."""
        if not self.serves:
            raise NotServedError(f"{self._task} is not, or no longer, served by this process")

    def _came_along(
        self, request: Request[CloseStep] | Request[MeasureStep]
    ) -> Sequence[Part | None]:
        """Return the part of each push that has come with the word to close or measure the step."""
        self._check_closer(request.peer)
        return self._parts_along(request)

    def _parts_along(
        self, request: Request[CloseStep] | Request[MeasureStep]
    ) -> Sequence[Part | None]:
        """Return the part of each push that has come with a closing; () is all None."""
        peer, message, segments = request.peer, request.message, request.segments
        self.known(message.group, message.config)
        for number, members in message.sets:
            set_of(peer, number, members, self._task)
        if not segments:
            return ()
        if len([number for number in message.along if number >= 0]) != len(segments):
            raise RemoteProtocolError(f"{self._task}: {len(segments)} parts came with a closing")
        bodies = iter(segments)
        parts: list[Part | None] = []
        for number in message.along:
            if number < 0:
                parts.append(None)
                continue
            known = set_of(peer, number, None, self._task).look_up(self.store)
            body = known.body_of([next(bodies)], self._task)
            parts.append(Part(known, known.gradients(self.store, message.group, body), body))
        return parts

    def values_of(self, wanted: Sequence[ShardSet]) -> list[list[memoryview]]:
        """Return the values of all shards of these sets; none if one is busy."""
        try:
            return [self.store.read(key) for known in wanted for key in known.keys]
        except BusyError:
            return []


_DONE = Done()
