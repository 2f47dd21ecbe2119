"""Updates measured on a ps before they are made: the first round of layerwise optimizers.

A variable of several shards lies on several ps tasks, and a layerwise rule needs norms over all of
it. Each ps says what its shards contribute, and changes nothing; the client adds that up and sends
the ratio with the push. Nothing is remembered in between, so there is nothing to repeat or to lose.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import numpy as np

from psync.net.peer import Handler, Peer, Reply
from psync.numerics.blocks import BlockPool
from psync.numerics.layerwise_rules import Sums
from psync.ps.cooperative_work import LongWork
from psync.ps.update import ShardSet, memory_for, set_of
from psync.store.store import ShardStore, Work
from psync.wire.codec import Message
from psync.wire.ps_messages import Measured, MeasurePush


class MeasureService:
    """Who measures updates on one ps, under one coordinator.

    Args:
        task: Name of the ps.
        store: Its shards.
        work: What takes long.
        pool: Memory for what comes in.
    """

    def __init__(self, task: str, store: ShardStore, work: LongWork, pool: BlockPool) -> None:
        self._task = task
        self._store = store
        self._work = work
        self._pool = pool

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {MeasurePush: Handler(self._measure, self._prepare)}

    def _prepare(
        self, peer: Peer, message: MeasurePush, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        known = set_of(peer, message, self._task)
        self._store.define_optimizer(message.optimizer, message.config)
        known.look_up(self._store)
        known.check_lengths(lengths, self._task)
        return memory_for(self._pool, sum(lengths))

    def _measure(
        self, peer: Peer, message: MeasurePush, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = set_of(peer, message, self._task).look_up(self._store)
        whole = known.body_of(body, self._task)
        gradients = known.gradients(self._store, message.optimizer, whole)
        if not self._work.fits_now(self._store, known.keys, known.nbytes):
            return self._work.to_the_end(self._measure_slowly(message, known, gradients))
        sums: list[Sums] = []
        for position in range(len(known.keys)):
            for _ in self._begin(message, known, gradients, position, sums):
                pass
        return Reply(Measured(sums))

    async def _measure_slowly(
        self, message: MeasurePush, known: ShardSet, gradients: Sequence[np.ndarray]
    ) -> Reply:
        sums: list[Sums] = []
        await self._work.shard_by_shard(
            known.lengths, lambda i: self._begin(message, known, gradients, i, sums)
        )
        return Reply(Measured(sums))

    def _begin(
        self,
        message: MeasurePush,
        known: ShardSet,
        gradients: Sequence[np.ndarray],
        position: int,
        sums: list[Sums],
    ) -> Work:
        store, optimizer = self._store, message.optimizer
        step = max(store.optimizer_step(optimizer), message.step)
        return store.measure(optimizer, known.keys[position], gradients[position], step, sums)
