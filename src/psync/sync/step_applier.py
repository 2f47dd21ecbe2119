"""Application of decided steps on one ps: the mean measured, then applied.

Small steps are applied within the turn of the loop in which they are closed, large ones block
by block; each runs to completion (shielded), whatever becomes of the connection to ps 0. A step
that changes locked shards waits for the locks, and later requests wait for the step. With a
backup, a step is applied in log order.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from psync.errors import RemoteProtocolError
from psync.numerics.layerwise_rules import Sums
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.locks import PsLocks
from psync.store.locks import Claim
from psync.store.step_norms import ShardSums, StepNorms
from psync.sync.groups import GroupTable, KnownGroup
from psync.sync.log_entries import FROM_CLOSER, closing_entry
from psync.sync.staging import Staging
from psync.sync.step_update import Part, StepUpdate, averages_of
from psync.wire.sync_messages import CloseStep, MeasureStep


class StepApplier:
    """Applies the steps of one ps under one coordinator.

    Args:
        task: Name of the ps.
        groups: What is known of groups, and the store.
        staging: Parts of pushes.
        work: What takes long.
        locks: Who must wait.
        committer: In whose order steps are applied, once it has begun.
    """

    def __init__(
        self,
        task: str,
        groups: GroupTable,
        staging: Staging,
        work: LongWork,
        locks: PsLocks,
        committer: Committer,
    ) -> None:
        self._committer = committer
        self._task = task
        self._table = groups
        self._store = groups.store
        self._staging = staging
        self._work = work
        self._locks = locks
        self._in_log: set[asyncio.Task[None]] = set()  # closings that wait for their turn there

    def measure(
        self, message: MeasureStep, along: Sequence[Part | None] = ()
    ) -> list[ShardSums] | Awaitable[list[ShardSums]]:
        """Measure a step that ps 0 has decided; nothing is changed.

        Args:
            message: What it has said.
            along: As for ``close``.

        Returns:
            The sums of each shard, or what to wait for.

        Raises:
            RemoteProtocolError: Another step of the group is being applied.
        """
        known = self._table.known(message.group, message.config)
        if self._is_closed(known, message):
            return []  # a repetition that was overtaken: nobody waits for the answer
        update = self._gather(message, known, along)
        if self._work.fits_now(self._store, update.keys, sum(update.costs)):
            return update.measure_at_once(message.what)
        return self._work.to_the_end(self._measure_slowly(update, message.what))

    async def _measure_slowly(self, update: StepUpdate, what: str) -> list[ShardSums]:
        sums: list[Sums] = []
        await self._work.shard_by_shard(
            update.costs[: len(update.keys)], lambda i: update.measure(what, i, sums)
        )
        return update.sums_by_shard(sums)

    def close(
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
        known = self._table.known(group, message.config)
        is_closed = self._is_closed(known, message)
        if not self._committer.is_begun or is_closed:
            begun()
        if is_closed:
            return None if known.closing is None else self._closed_by_another(known, group, step)
        update = self._gather(message, known, along)
        if not self._committer.is_begun and not self._locks.table.blocks(update.touched):
            return self._apply(update, known)
        known.closing = step
        if not self._committer.is_begun:
            act = functools.partial(self._apply, update, known)
            return self._work.to_the_end(self._when_unlocked(update, known, act))

        def begin_and_apply() -> Awaitable[None] | None:
            begun()
            return self._apply(update, known)

        entry, body = closing_entry(message, known.raw, along)
        commit = functools.partial(
            self._committer.commit, FROM_CLOSER, entry, body, begin_and_apply
        )
        # Not as work under way: for that a copy waits, which may be before it in the log.
        task = asyncio.get_running_loop().create_task(self._when_unlocked(update, known, commit))
        self._in_log.add(task)
        task.add_done_callback(self._ended_in_log)
        under_way = asyncio.shield(task)
        under_way.add_done_callback(_seen)
        return under_way

    async def _when_unlocked(
        self, update: StepUpdate, known: KnownGroup, act: Callable[[], Awaitable[None] | None]
    ) -> None:
        """Apply a step, or put it into the log, where no entry may wait for a lock."""
        claim = self._locks.claim(update.touched)
        try:
            await self._locks.turn(claim)
            under_way = act()
            if under_way is not None:
                await under_way
        except Exception as exc:
            known.failed = exc
            raise
        finally:
            self._over(known, claim, update.step)

    def _ended_in_log(self, task: asyncio.Task[None]) -> None:
        self._in_log.discard(task)
        _seen(task)

    def _over(self, known: KnownGroup, claim: Claim, step: int) -> None:
        self._locks.end(claim)
        if known.closing == step:  # else the next one has begun
            known.closing = None
        self._work.wake()  # repetitions that wait for the end

    def _apply(self, update: StepUpdate, known: KnownGroup) -> Awaitable[None] | None:
        update.begin()
        if not self._work.fits_now(self._store, update.touched, update.cost):
            known.closing = update.step
            claim = self._locks.table.begin(update.touched)
            return self._work.to_the_end(self._apply_slowly(update, known, claim))
        try:
            update.at_once()
        except Exception as exc:
            self._work.give_up(exc)
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

    async def _closed_by_another(self, known: KnownGroup, group: int, step: int) -> None:
        """Wait for the end of a closing that another message began; raise what that has raised."""
        while known.closing == step:
            await self._work.next_turn()
        present = self._staging.step(group)
        if (present is None or present <= step) and known.failed is not None:
            raise known.failed.with_traceback(None)

    def _gather(
        self, message: CloseStep, known: KnownGroup, along: Sequence[Part | None]
    ) -> StepUpdate:
        """Say what a step changes here; nothing has changed yet if this raises."""
        if known.averages is None:
            known.averages = averages_of(self._store, known.config, self._task)
        parts: list[Part] = []
        weights: list[float] = []
        taken = self._staging.take(message.group, message.step, message.pushes, along)
        for part, weight in taken:
            if part.known.keys:  # else all of it belongs to others
                parts.append(part)
                weights.append(weight)
        scales, ratios = message.scales, message.ratios
        norms = StepNorms(
            self._store.rule(message.group),
            None if scales is None else {variable: factor for variable, factor in scales},
            None if ratios is None else {variable: factor for variable, factor in ratios},
        )
        update = StepUpdate(
            self._store, message.group, known.config, message.step, known.averages, norms
        )
        update.gather(parts, weights)
        return update

    async def _apply_slowly(self, update: StepUpdate, known: KnownGroup, claim: Claim) -> None:
        try:
            for what in update.passes():
                update.norms.conclude(what, await self._measure_slowly(update, what))
            await self._work.shard_by_shard(update.costs, update.work)
        except Exception as exc:
            if not self._work.is_torn:
                self._work.give_up(exc)  # the shards are whole, the step is not
            self._locks.end(claim)
            raise
        try:
            self._closed(update)
        finally:
            self._over(known, claim, update.step)

    def _closed(self, update: StepUpdate) -> None:
        self._staging.closed(update.group, update.step)


def _seen(ended: asyncio.Future[None]) -> None:
    """Take note of an error, even if ps 0 has gone, so that nobody waits for it."""
    if not ended.cancelled():
        ended.exception()
