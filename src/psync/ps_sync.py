"""Synchronous training on every ps: keeps parts of pushes, applies the mean that ps 0 decides.

Layer: L3. Imports: errors, blocks, layerwise_rules, lock_table, store, ledger, step_norms, staging,
sync_groups, platform, rpc, updates, whole_sets, long_work, ps_locks, step_updates, group_table,
wire.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

    message       then
    StagePush     check, take memory, keep the buffer it arrives in (``staging``)
    DescribeSet   check, say how large the shards are
    MeasureStep   say what the norms of the same mean would be; changes nothing
    CloseStep     take the parts that ps 0 was given for this ps; the mean of the named pushes is
                  applied, shard by shard, moving averages follow, and the group's step is raised
                  here; a repetition changes nothing

Small steps are applied within the turn of the loop in which they are closed, large ones block
by block; each is carried to its end, whatever becomes of the connection to ps 0. A step that
changes shards that are locked waits for its turn, and so do those who wait for the step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

from psync.blocks import BlockPool
from psync.committer import Committer
from psync.errors import BusyError, RemoteProtocolError, UsageError
from psync.global_steps import GlobalSteps
from psync.group_table import CLOSER, GroupTable, KnownGroup
from psync.layerwise_rules import Sums
from psync.ledger import Ledger
from psync.lock_table import Claim
from psync.long_work import LongWork
from psync.platform import Platform
from psync.ps_locks import PsLocks
from psync.rpc import Handler, Peer, Reply
from psync.staging import Staging
from psync.step_norms import ShardSums, StepNorms
from psync.step_updates import Part, StepUpdate, averages_of
from psync.store import ShardStore
from psync.sync_entries import FROM_CLOSER, closing_entry, staged_entry
from psync.sync_groups import Close
from psync.tokens import Replica
from psync.updates import ShardSet, memory_for, numbered_set, set_of
from psync.whole_sets import Along, WholeSet
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
        platform: Limits and failpoints.
        task: Name of the ps.
        store: Its shards.
        ledger: Knows who has been replaced.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait.
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
    ) -> None:
        super().__init__(store, task)
        self.ledger = ledger
        self.work = work
        self.locks = locks
        self.committer: Committer | None = None  # None: there was never a backup
        self.global_steps = GlobalSteps(task, store, ledger, work, locks, platform.failpoints)
        self._in_log: set[asyncio.Task[None]] = set()  # closings that wait for their turn there
        self._staging = Staging(platform.limits.staging_bytes, task)
        self._failpoints = platform.failpoints
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

    def commit_with(self, committer: Committer) -> None:
        """From now on all that changes here is done in the order of a log."""
        self.committer = self.global_steps.committer = committer

    def steps(self) -> list[tuple[int, int]]:
        """Return (group, step) of each group that has closed a step here; not to be changed."""
        return self._staging.steps()

    def fence(self, task: str, below: int) -> None:
        """Take nothing more from incarnations of ``task`` below ``below``."""
        self._staging.fence(task, below)

    def statistics(self) -> dict[str, int]:
        """Return sizes and counters of what is staged."""
        return dataclasses.asdict(self._staging.statistics())

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
        self._staging.check(
            message.group, replica, message.push, message.local_step, nbytes, config
        )
        # What is stale is dropped once it is here.
        return memory_for(self._pool, nbytes, varies=message.rows is not None)

    def _stage(
        self, peer: Peer, message: StagePush, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = set_of(peer, message, self._task).look_up(self.store)
        part = self.part_with(message, known, known.body_of(body, self._task, message.rows))
        if self.committer is None:
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
        return self._staging.stage(message.group, replica, message.push, message.local_step, part)

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
        part: Part | None = self._staging.staged(group, replica, push)
        return part

    def held(self) -> list[tuple[int, Replica, int, int, Part]]:
        """Return (group, replica, push, local step, part) of all that is kept."""
        return self._staging.held()

    def keep_judged(
        self, group: int, replica: Replica, push: int, local_step: int, part: Part
    ) -> None:
        """Keep a part that another ps has kept, whose backup this is."""
        self._staging.keep(group, replica, push, local_step, len(part.body), part)

    def closed_before(self, group: int, step: int) -> None:
        """Take a step for closed that another ps has closed, whose backup this is."""
        self._staging.closed(group, step)

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
        sums = self.measure_step(message, along)
        return self._measured(sums) if isinstance(sums, list) else self._measured_after(sums)

    async def _measured_after(self, under_way: Awaitable[list[ShardSums]]) -> Reply:
        return self._measured(await under_way)

    def _measured(self, sums: list[ShardSums]) -> Reply:
        self._failpoints.hit("ps.step.measured")
        return Reply(StepMeasured(sums))

    def measure_step(
        self, message: MeasureStep, along: Sequence[Part | None] = ()
    ) -> list[ShardSums] | Awaitable[list[ShardSums]]:
        """Measure a step that ps 0 has decided; nothing is changed.

        Args:
            message: What it has said.
            along: As for ``close_step``.

        Returns:
            The sums of each shard, or what to wait for.

        Raises:
            RemoteProtocolError: Another step of the group is being applied.
        """
        self.define(message.group, message.config)
        known = self._groups[message.group]
        if self._is_closed(known, message):
            return []  # a repetition that was overtaken: nobody waits for the answer
        update = self._gather(message, known, along)
        if self.work.fits_now(self.store, update.keys, sum(update.costs)):
            return update.measure_at_once(message.what)
        return self.work.to_the_end(self._measure_slowly(update, message.what))

    async def _measure_slowly(self, update: StepUpdate, what: str) -> list[ShardSums]:
        sums: list[Sums] = []
        await self.work.shard_by_shard(
            update.costs[: len(update.keys)], lambda i: update.measure(what, i, sums)
        )
        return update.sums_by_shard(sums)

    # Closing.

    def _close_for(
        self, peer: Peer, message: CloseStep, segments: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        along = self._came_along(peer, message, segments)
        wanted = [numbered_set(peer, number, None, self._task) for number in message.ahead]
        under_way = self.close_step(message, along)
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

    def close_step(
        self,
        message: CloseStep,
        along: Sequence[Part | None] = (),
        begun: Callable[[], None] = lambda: None,
    ) -> Awaitable[None] | None:
        """Apply a step that ps 0 has decided.

        Args:
            message: What it has said.
            along: The part of each push that came with it, or None; () is all None.
            begun: Called when the backup has it, if there is one; before it is applied.

        Returns:
            None if it is applied now; else what to wait for.

        Raises:
            RemoteProtocolError: Another step of the group is being applied.
            ConfigurationError: Moving averages are not beside their variables.
        """
        group, step = message.group, message.step
        self.define(group, message.config)
        known = self._groups[group]
        is_closed = self._is_closed(known, message)
        if self.committer is None or is_closed:
            begun()
        if is_closed:
            return None if known.closing is None else self._closed_by_another(known, step)
        update = self._gather(message, known, along)
        if self.committer is None and not self.locks.blocks(update.touched):
            return self._apply(update, known)
        known.closing = step
        if self.committer is None:
            act = functools.partial(self._apply, update, known)
            return self.work.to_the_end(self._when_unlocked(update, known, act))

        def begin_and_apply() -> Awaitable[None] | None:
            begun()
            return self._apply(update, known)

        entry, body = closing_entry(message, known.raw, along)
        commit = functools.partial(self.committer.commit, FROM_CLOSER, entry, body, begin_and_apply)
        # Not as work under way: for that a copy waits, which may be before it in the log.
        task = asyncio.get_running_loop().create_task(self._when_unlocked(update, known, commit))
        self._in_log.add(task)
        task.add_done_callback(self._ended_in_log)
        return asyncio.shield(task)

    async def _when_unlocked(
        self, update: StepUpdate, known: KnownGroup, act: Callable[[], Awaitable[None] | None]
    ) -> None:
        """Apply a step, or put it into the log, where no entry may wait for a lock."""
        claim = self.locks.claim(update.touched)
        try:
            await self.locks.turn(claim)
            under_way = act()
            if under_way is not None:
                await under_way
        finally:
            self._over(known, claim)

    def _ended_in_log(self, task: asyncio.Task[None]) -> None:
        self._in_log.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if ps 0 has gone

    def _over(self, known: KnownGroup, claim: Claim) -> None:
        self.locks.end(claim)
        known.closing = None
        self.work.wake()  # repetitions that wait for the end

    def _apply(self, update: StepUpdate, known: KnownGroup) -> Awaitable[None] | None:
        update.begin()
        if not self.work.fits_now(self.store, update.touched, update.cost):
            known.closing = update.step
            claim = self.locks.begin(update.touched)
            return self.work.to_the_end(self._apply_slowly(update, known, claim))
        try:
            update.at_once()
        except Exception as exc:
            self.work.give_up(exc)
            raise
        self._closed(update)
        return None

    def _is_closed(self, known: KnownGroup, message: CloseStep) -> bool:
        """Return whether a step was closed here, or is being closed; so this is a repetition."""
        if known.closing is None:
            present = self._staging.step(message.group)
            return present is not None and message.step < present
        if known.closing != message.step:
            raise RemoteProtocolError(
                f"{self._task}: step {message.step} of {known.config.name} is to be closed while "
                f"step {known.closing} is being applied"
            )
        return True

    async def _closed_by_another(self, known: KnownGroup, step: int) -> None:
        """Wait for the end of a closing that another message began."""
        while known.closing == step:
            await self.work.next_turn()

    def _gather(
        self, message: CloseStep, known: KnownGroup, along: Sequence[Part | None]
    ) -> StepUpdate:
        """Say what a step changes here; nothing has changed yet if this raises."""
        if known.averages is None:
            known.averages = averages_of(self.store, known.config, self._task)
        parts: list[Part] = []
        weights: list[float] = []
        taken = self._staging.take(message.group, message.step, message.pushes, along)
        for part, weight in taken:
            if part.known.keys:  # else all of it belongs to others
                parts.append(part)
                weights.append(weight)
        scales, ratios = message.scales, message.ratios
        norms = StepNorms(
            self.store.rule(message.group),
            None if scales is None else {variable: factor for variable, factor in scales},
            None if ratios is None else {variable: factor for variable, factor in ratios},
        )
        update = StepUpdate(
            self.store, message.group, known.config, message.step, known.averages, norms
        )
        update.gather(parts, weights)
        return update

    async def _apply_slowly(self, update: StepUpdate, known: KnownGroup, claim: Claim) -> None:
        try:
            for what in update.passes():
                update.norms.conclude(what, await self._measure_slowly(update, what))
            await self.work.shard_by_shard(update.costs, update.work)
        except Exception as exc:
            if not self.work.is_torn:
                self.work.give_up(exc)  # the shards are whole, the step is not
            self.locks.end(claim)
            raise
        try:
            self._closed(update)
        finally:
            self._over(known, claim)

    def _closed(self, update: StepUpdate) -> None:
        self._staging.closed(update.group, update.step)
        self._failpoints.hit("ps.step.applied")
