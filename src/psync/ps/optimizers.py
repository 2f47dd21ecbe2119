"""Optimizer requests on a ps: definitions, slots, steps, learning rates, and norms for Lamb.

A program that restores a checkpoint, or changes the learning rate, does so by these. Both are
idempotent, so a lost connection repeats them. The ledger does not judge them: of a value that is
set while others push to the same variables, the last one counts.

``MeasurePush`` is the first round of layer-wise optimizers: the norms of an update before it is
applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from psync.errors import ValueMismatchError
from psync.net.connection import Handler, Request
from psync.numerics.memory import BlockPool
from psync.numerics.rules import Sums, slot_dtype
from psync.ps.cooperative_work import LongWork
from psync.ps.plans import Plans, ShardSet, memory_for
from psync.specs import dtype_of
from psync.store.store import ShardStore, Work
from psync.wire.codec import Message
from psync.wire.messages import (
    Measured,
    MeasurePush,
    OptimizerState,
    SetOptimizer,
    SetSlots,
)


class OptimizerService:
    """Optimizers on one ps, under one coordinator.

    Those that change something are served as entries of the log: ``Executor`` answers Done.

    Args:
        task: Name of the ps.
        store: Its shards.
        work: What takes long.
        pool: Memory for what comes in.
        plans: Of all clients.
        counted: Told when the number of an optimizer's pushes was set.
    """

    def __init__(
        self,
        task: str,
        store: ShardStore,
        work: LongWork,
        pool: BlockPool,
        plans: Plans,
        counted: Callable[[], None],
    ) -> None:
        self._task = task
        self._store = store
        self._work = work
        self._pool = pool
        self._plans = plans
        self._counted = counted

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            SetSlots: Handler(self._set_slots, self._prepare_slots),
            SetOptimizer: Handler(self._set_optimizer),
            MeasurePush: Handler(self._measure, self._prepare_measure),
        }

    def _prepare_slots(self, request: Request[SetSlots]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        message = request.message
        lengths = request.lengths
        if lengths != self._lengths(message):
            raise ValueMismatchError(f"{self._task}: values of slots do not have the slots' sizes")
        return memory_for(self._pool, sum(lengths))

    def _lengths(self, message: SetSlots) -> tuple[int, ...]:
        self._store.define_optimizer(message.optimizer, message.config)
        specs = [self._store.spec((variable, index)) for variable, index, _ in message.members]
        return tuple(spec.size * slot_dtype(dtype_of(spec.dtype)).itemsize for spec in specs)

    def _set_slots(self, request: Request[SetSlots]) -> asyncio.Future[None]:
        message, body = request.message, request.segments
        lengths = self._lengths(message)
        whole = body[0] if body else memoryview(b"")
        if len(whole) != sum(lengths):
            raise ValueMismatchError(f"{self._task}: values of slots do not have the slots' sizes")
        return self._work.to_the_end(self._load(message, lengths, whole))

    async def _load(self, message: SetSlots, lengths: Sequence[int], body: memoryview) -> None:
        at = 0
        for (variable, index, slot), nbytes in zip(message.members, lengths, strict=True):
            work = await self._work.when_idle(
                self._store.load_slot, (variable, index), message.optimizer, slot,
                body[at : at + nbytes],
            )  # fmt: skip
            await self._work.finish(work)
            at += nbytes

    def _set_optimizer(self, request: Request[SetOptimizer]) -> None:
        message = request.message
        store, optimizer = self._store, message.optimizer
        store.define_optimizer(optimizer, message.config)
        if message.learning_rate is not None:
            store.set_learning_rate(optimizer, message.learning_rate)
        if message.step >= 0:
            store.set_count(optimizer, message.step)
            self._counted()
        request.answer(OptimizerState(*store.push_count(optimizer).counts))

    # Norms.

    def _prepare_measure(self, request: Request[MeasurePush]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        known = self._known(request)
        known.check_lengths(request.lengths, self._task)
        return memory_for(self._pool, known.nbytes)

    def _known(self, request: Request[MeasurePush]) -> ShardSet:
        plan = self._plans.plan(request.peer.client, request.message.plan)
        return plan.look_up(self._store)

    def _measure(self, request: Request[MeasurePush]) -> None:
        known = self._known(request)
        optimizer = known.optimizer
        whole = known.body_of(request.segments, self._task)
        gradients = known.gradients(self._store, optimizer, whole)

        def step() -> int:
            return self._store.push_count(optimizer).next_step(request.message.elsewhere)

        self._store.check_rate(optimizer, step())
        sums: list[Sums] = []

        def begin(i: int) -> Work:
            return self._store.measure(optimizer, known.keys[i], gradients[i], step(), sums)

        async def measure_slowly() -> None:
            await self._work.to_the_end(self._work.shard_by_shard(known.costs, begin))
            request.answer(Measured(sums))

        if not self._work.fits_now(self._store, known.keys, sum(known.costs)):
            request.start(measure_slowly())
            return
        for i in range(len(known.keys)):
            for _ in begin(i):
                pass
        request.answer(Measured(sums))
