"""Pushes and assigns on a ps: each is judged, checked whole, applied, answered.

Layer: L3. Imports: blocks, store, ledger, platform, rpc, long_work, updates, wire.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

Small updates are applied within the turn of the loop in which they arrive. Large ones are
applied block by block by one task, which lets the loop breathe between blocks; a shard
that is being updated is busy, and whoever wants to read or update it waits its turn, so
nobody sees half an update.

    message       ledger says          then
    an update     fresh                validate, apply, record the answer, answer
                  same sequence        the recorded answer again
                  same sequence, now   wait for the first one's answer
                  same call, other run "duplicate": another run of the closure was first
                  old incarnation      FencedError
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import cast

from psync.blocks import BlockPool
from psync.ledger import (
    AlreadyApplied,
    Duplicate,
    Fresh,
    InProgress,
    Ledger,
    Ticket,
    Verdict,
)
from psync.long_work import LongWork
from psync.platform import Platform
from psync.rpc import Handler, Peer, Reply
from psync.store import ShardStore
from psync.updates import NO_BYTES, ShardSet, Update, memory_for, set_of
from psync.wire.messages import (
    Assign,
    AverageShards,
    DefineOptimizer,
    Done,
    Message,
    Push,
    Pushed,
)


class PsUpdates:
    """The pushes and assigns of one ps under one coordinator.

    Args:
        platform: Failpoints.
        task: Name of the ps.
        store: Its shards.
        ledger: Knows which updates were seen.
        work: What takes long.
        pool: Memory for what comes in.
    """

    def __init__(
        self,
        platform: Platform,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
    ) -> None:
        self.pushes = self.assigns = 0  # that were applied
        self._failpoints = platform.failpoints
        self._task = task
        self._store = store
        self._ledger = ledger
        self._work = work
        self._pool = pool

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Push: Handler(self._update, self._prepare_update),
            Assign: Handler(self._update, self._prepare_update),
            AverageShards: Handler(self._average),
            DefineOptimizer: Handler(self._define),
        }

    def _prepare_update(
        self, peer: Peer, message: Push | Assign, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        known = set_of(peer, message, self._task)
        if isinstance(message, Push) and message.config is not None:
            self._store.define_optimizer(message.optimizer, message.config)
        known.look_up(self._store)
        known.check_lengths(lengths, self._task)
        return memory_for(self._pool, known.nbytes)

    def _define(self, peer: Peer, message: DefineOptimizer, _: list[memoryview]) -> Reply:
        self._store.define_optimizer(message.optimizer, message.config)
        return Reply(Done())

    def _update(
        self, peer: Peer, message: Push | Assign, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = set_of(peer, message, self._task).look_up(self._store)
        whole = known.body_of(body, self._task)
        self._failpoints.hit("ps.push.received")
        update = Update(
            (peer.task, peer.incarnation), message, known, whole, self._store,
            self._ledger,
        )  # fmt: skip
        return self._judged(update)

    def _average(
        self, peer: Peer, message: AverageShards, _: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = ShardSet(tuple((average, index) for average, _, index in message.shards))
        known.look_up(self._store)
        client = (peer.task, peer.incarnation)
        return self._judged(Update(client, message, known, NO_BYTES, self._store, self._ledger))

    def _judged(self, update: Update) -> Reply | Awaitable[Reply]:
        verdict = update.judge()
        if isinstance(verdict, InProgress):
            return self._update_later(update, verdict)
        return self._act(update, verdict)

    async def _update_later(self, update: Update, verdict: Verdict) -> Reply:
        """The same update is being applied for another message: its end decides."""
        while isinstance(verdict, InProgress):
            while not verdict.ticket.settled:
                await self._work.next_turn()
            verdict = update.judge()
        answer = self._act(update, verdict)
        return answer if isinstance(answer, Reply) else await answer

    def _act(self, update: Update, verdict: Verdict) -> Reply | Awaitable[Reply]:
        if isinstance(verdict, Fresh):
            return self._apply(update, verdict.ticket)
        if isinstance(verdict, AlreadyApplied):
            return Reply(update.ledger.finish(verdict.ticket, Pushed("duplicate", 0)))
        return Reply(cast(Pushed, cast(Duplicate, verdict).answer))

    def _apply(self, update: Update, ticket: Ticket) -> Reply | Awaitable[Reply]:
        try:
            update.begin()
        except Exception:
            update.ledger.fail(ticket)  # nothing has changed: a retry is judged anew
            raise
        known = update.known
        if not self._work.fits_now(update.store, update.needed, known.nbytes):
            return self._work.to_the_end(self._apply_slowly(update, ticket))
        try:
            update.at_once()
        except Exception as exc:
            self._work.give_up(exc)
            raise
        return self._applied(update, ticket)

    async def _apply_slowly(self, update: Update, ticket: Ticket) -> Reply:
        """Apply shard after shard, large ones block after block, small ones several at once."""
        await self._work.shard_by_shard(update.known.lengths, update.work)
        try:
            return self._applied(update, ticket)
        finally:
            self._work.wake()  # repetitions that wait for the answer

    def _applied(self, update: Update, ticket: Ticket) -> Reply:
        push = isinstance(update.message, Push)
        answer = Pushed("accepted", update.step + 1 if push else 0)
        update.ledger.finish(ticket, answer)
        self.pushes += push
        self.assigns += not push
        self._failpoints.hit("ps.push.applied" if push else "ps.assign.applied")
        return Reply(answer)
