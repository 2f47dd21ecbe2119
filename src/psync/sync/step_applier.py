"""Application of decided steps on one ps: the mean measured, then applied.

A closing is an entry of the log, judged in its order: its parts are taken, and the group is at the
next step. The update of the shards is a compute, and moving averages and the global step follow
with it; pulls name the next step once it is done. A step that changes locked shards waits for the
locks before it is an entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from psync.net.connection import Request
from psync.numerics.rules import Sums
from psync.ps.admission import PsLocks
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import Executor, awaited
from psync.store.ledger import STEP, Ledger
from psync.store.step_norms import ShardSums, StepNorms
from psync.store.store import Key
from psync.sync.groups import FROM_CLOSER, GroupTable, KnownGroup
from psync.sync.staging import Staging
from psync.sync.step_update import Average, Part, StepUpdate, averages_of
from psync.wire.codec import decode, encode
from psync.wire.messages import CloseStep, Failure, MeasureStep
from psync.wire.remote_errors import exception_of, failure_of


class StepApplier:
    """Applies the steps of one ps under one coordinator.

    Args:
        groups: What is known of groups, and the store.
        ledger: Notes steps in which a rule of a user's has raised.
        staging: Parts of pushes.
        work: What takes long.
        locks: Who must wait.
        executor: In whose order steps are applied.
    """

    def __init__(
        self,
        groups: GroupTable,
        ledger: Ledger,
        staging: Staging,
        work: LongWork,
        locks: PsLocks,
        executor: Executor,
    ) -> None:
        self._executor = executor
        self._table = groups
        self._store = groups.store
        self._ledger = ledger
        self._staging = staging
        self._work = work
        self._locks = locks

    def measure(self, message: MeasureStep) -> list[ShardSums] | Awaitable[list[ShardSums]]:
        """Measure a step that ps 0 has decided; nothing is changed.

        Args:
            message: What it has said.

        Returns:
            The sums of each shard, or what to wait for.

        Raises:
            RemoteProtocolError: A part of it is still coming in.
        """
        known = self._table.known(message.group, message.config)
        if self._is_closed(message):
            return []  # a repetition that was overtaken: nobody waits for the answer
        self._staging.check_here(message.group, message.step, message.pushes)
        update = self._gather(message, known)
        if self._work.fits_now(self._store, update.keys, sum(update.costs)):
            return update.measure_at_once(message.what)
        return self._work.to_the_end(self._measure_slowly(update, message.what))

    async def _measure_slowly(self, update: StepUpdate, what: str) -> list[ShardSums]:
        sums: list[Sums] = []
        await self._work.shard_by_shard(
            update.costs[: len(update.keys)], lambda i: update.measure(what, i, sums)
        )
        return update.sums_by_shard(sums)

    def close(self, request: Request[CloseStep], answer: Callable[[], None]) -> None:
        """Apply a step that ps 0 has decided; one that is closed is not applied again.

        Args:
            request: What it has said; it is answered, or fails.
            answer: Answers, once the step is applied.

        Raises:
            RemoteProtocolError: A part of it is still coming in.
            ConfigurationError: Moving averages are not beside their variables.
            RuleError: A rule of a user's raised for some shard, which is as it was; all others are
                updated. ps 0 then ends the group (``outgoing_steps``).
        """
        message = request.message
        known = self._table.known(message.group, message.config)
        answer = self._unless_failed(message, answer)
        if self._is_closed(message):
            self._executor.in_turn(lambda: Compute(known.touched, answer), request)
            return
        self._staging.check_here(message.group, message.step, message.pushes)
        keys = self._keys_of(message, known)

        client = request.peer.client

        def submit(request: Request[Any]) -> None:
            self._executor.submit(
                request, message, (), lambda: self._judge(message, known, answer),
                lambda: self._claim(keys), client,
            )  # fmt: skip

        if self._locks.blocks(keys):
            request.start(self._when_unlocked(keys, submit))
        else:
            submit(request)

    async def _when_unlocked(
        self, keys: Sequence[Key], submit: Callable[[Request[Any]], None]
    ) -> None:
        claim = self._locks.claim(keys)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await self._locks.turn(claim)
            submit(awaited(FROM_CLOSER, done))
            await done
        finally:
            self._locks.end(claim)

    def _claim(self, keys: Sequence[Key]) -> Callable[[], None]:
        claim = self._locks.begin(keys)
        return lambda: self._locks.end(claim)

    def _judge(self, message: CloseStep, known: KnownGroup, answer: Callable[[], None]) -> Compute:
        if self._is_closed(message):
            return Compute(known.touched, answer)
        update = self._gather(message, known)
        update.begin()
        nbytes = self._staging.close(message.group, message.step, message.pushes)
        known.touched = update.touched

        def at_once() -> None:
            update.at_once()
            self._applied(update, nbytes)

        async def in_pieces() -> None:
            for what in update.alone:
                update.norms.conclude(what, await self._measure_slowly(update, what))
            await self._work.shard_by_shard(update.costs, update.work)
            self._applied(update, nbytes)

        cost = sum(update.costs) * (1 + len(update.alone))
        return Compute(update.touched, answer, cost, at_once, in_pieces)

    def _applied(self, update: StepUpdate, nbytes: int) -> None:
        """A step is applied here, and ps 0 does not know yet."""
        self._staging.applied(update.group, update.step, nbytes)
        failed = self._store.take_failure(update.group, update.optimizer_step)
        if failed is not None:
            failure = encode(failure_of(failed))
            self._ledger.note_failure((STEP, update.group), update.step, None, failure)

    def _unless_failed(self, message: CloseStep, answer: Callable[[], None]) -> Callable[[], None]:
        """Return what answers, when a step is applied; raises RuleError where a rule did."""

        def checked() -> None:
            failure = self._ledger.failure_of((STEP, message.group), message.step, None)
            if failure is not None:
                raise exception_of(cast(Failure, decode(failure)), self._store.task)
            answer()

        return checked

    def _is_closed(self, message: CloseStep) -> bool:
        """Return whether a step was closed here, so that this is a repetition."""
        present = self._staging.step(message.group)
        return present is not None and message.step < present

    def _keys_of(self, message: CloseStep, known: KnownGroup) -> Sequence[Key]:
        """Return the shards that a step will change, if it is not closed."""
        parts = self._staging.parts(message.group, message.pushes)
        keys = dict.fromkeys([key for part, _ in parts for key in part.known.keys])
        for average in known.averages or self._averages(known):
            keys[average.shadow] = keys[average.value] = None
        global_step = self._table.global_step(known.config)
        return [*keys] if global_step is None else [*keys, global_step]

    def _averages(self, known: KnownGroup) -> Sequence[Average]:
        if known.averages is None:
            known.averages = averages_of(self._store, known.config, self._store.task)
        return known.averages

    def _gather(self, message: CloseStep, known: KnownGroup) -> StepUpdate:
        """Say what a step changes here; nothing has changed yet if this raises."""
        parts: list[Part] = []
        weights: list[float] = []
        for part, weight in self._staging.parts(message.group, message.pushes):
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
            self._store, message.group, known.config, message.step, known.averages or (), norms,
            self._table.global_step(known.config),
        )  # fmt: skip
        update.gather(parts, weights)
        return update
