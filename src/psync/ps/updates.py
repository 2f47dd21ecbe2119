"""Pushes and assigns on a ps: judged by the ledger, validated, applied, answered.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

Small updates are applied within the turn of the loop in which they arrive. Large ones are
applied block by block by one task, which lets the loop breathe between blocks; a shard
that is being updated is busy, and requests for it wait, so no reader sees half an update. An
update of a locked shard waits, before it is judged, until the lock ends, unless it is the holder's.

    message       ledger says          then
    an update     (with a backup: once that has it, see ``committer``)
                  fresh                validate, apply, record the answer, answer
                  same sequence        the recorded answer again
                  same sequence, now   wait for the first one's answer
                  same call, other run "duplicate": another run of the closure was first
                  old incarnation      FencedError
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from psync.net.peer import Handler, Peer, Reply
from psync.numerics.blocks import BlockPool
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.cut_gate import GateService
from psync.ps.locks import PsLocks
from psync.ps.optimizers import MeasureService, SlotService
from psync.ps.update import NO_BYTES, ShardSet, Update, memory_for, set_of
from psync.store.ledger import (
    AlreadyApplied,
    Duplicate,
    Fresh,
    InProgress,
    Ledger,
    Ticket,
    Verdict,
)
from psync.store.locks import Claim
from psync.store.store import ShardStore
from psync.wire.codec import Message
from psync.wire.lock_messages import AssignLocked
from psync.wire.ps_messages import Assign, AverageShards, Push, Pushed


class PsUpdates:
    """The pushes and assigns of one ps under one coordinator.

    Args:
        task: Name of the ps.
        store: Its shards.
        ledger: Knows which updates were seen.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait.
        committer: In whose order all is done, once it has begun.
        gate: Who must wait while a cut is taken.
    """

    def __init__(
        self,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
        locks: PsLocks,
        committer: Committer,
        gate: GateService,
    ) -> None:
        self.pushes = self.assigns = 0  # that were applied
        self._committer = committer
        self._task = task
        self._store = store
        self._ledger = ledger
        self._work = work
        self._pool = pool
        self._locks = locks
        self._gate = gate
        self._slots = SlotService(task, store, work, pool)
        self._measures = MeasureService(task, store, work, pool)

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Push: Handler(self._update, self._prepare_update),
            Assign: Handler(self._update, self._prepare_update),
            AssignLocked: Handler(self._update, self._prepare_update),
            AverageShards: Handler(self._average),
            **self._slots.handlers(),
            **self._measures.handlers(),
        }

    def _prepare_update(
        self, peer: Peer, message: Push | Assign, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        try:
            known = set_of(peer, message, self._task)
            if isinstance(message, Push) and message.config is not None:
                self._store.define_optimizer(message.optimizer, message.config)
            known.look_up(self._store)
            known.check_lengths(lengths, self._task, message.rows)
        except Exception:
            self._refused(peer, message)
            raise
        return memory_for(self._pool, sum(lengths), varies=message.rows is not None)

    def _refused(self, peer: Peer, message: Push | Assign | AverageShards) -> None:
        """Note that a message was refused before it was judged: no cut waits for it."""
        client = (peer.task, peer.incarnation)
        # With a log, only what a backup would know, too.
        if not self._committer.is_begun or self._ledger.serves(client):
            self._ledger.refuse(client, message.sequence)
        self._gate.look_again()

    def _update(
        self, peer: Peer, message: Push | Assign, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        try:
            known = set_of(peer, message, self._task).look_up(self._store)
            whole = known.body_of(body, self._task, message.rows)
        except Exception:
            self._refused(peer, message)
            raise
        update = Update(
            (peer.task, peer.incarnation), message, known, whole, self._store,
            self._ledger,
        )  # fmt: skip
        return self._judged(update)

    def _average(
        self, peer: Peer, message: AverageShards, _: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        known = ShardSet(tuple((average, index) for average, _, index in message.shards))
        try:
            known.look_up(self._store)
        except Exception:
            self._refused(peer, message)
            raise
        client = (peer.task, peer.incarnation)
        return self._judged(Update(client, message, known, NO_BYTES, self._store, self._ledger))

    def _judged(self, update: Update) -> Reply | Awaitable[Reply]:
        if self._locks.table.blocks(update.needed) and not isinstance(update.message, AssignLocked):
            return self._when_unlocked(update)
        return self._judged_now(update)

    async def _when_unlocked(self, update: Update) -> Reply:
        """Nothing is noted of an update that waits for a lock: it has not begun."""
        claim = self._locks.claim(update.needed)
        message = update.client, update.message.sequence
        self._gate.waits_for_lock(*message, waits=True)
        try:
            await self._locks.turn(claim)
            answer = self._judged_now(update)
        finally:
            self._locks.end(claim)
            self._gate.waits_for_lock(*message, waits=False)
        return answer if isinstance(answer, Reply) else await answer

    async def _when_open(self, update: Update) -> Reply:
        """Nor of one that waits at the gate."""
        await self._gate.turn(update.client, update.message.sequence)
        answer = self._judged(update)
        return answer if isinstance(answer, Reply) else await answer

    def _judged_now(self, update: Update) -> Reply | Awaitable[Reply]:
        if self._gate.holds(update.client, update.message.sequence):
            return self._when_open(update)
        if self._committer.is_begun:
            return self._commit(update)
        return self._judge(update)

    def _commit(self, update: Update) -> Awaitable[Reply]:
        """Do it in its turn. It counts as begun from now on: for cuts, and for who locks shards."""
        message = update.message
        if isinstance(message, AssignLocked):
            self._locks.check(update.client, message, update.needed)
        claim = self._locks.table.begin(update.needed)
        self._gate.began()

        def ended() -> None:
            self._locks.end(claim)
            self._gate.ended()

        try:
            return self._committer.commit(
                update.client, message, (update.body,) if len(update.body) else (),
                lambda: self._judge_in_turn(update), keys=update.known.keys, ended=ended,
            )  # fmt: skip
        except Exception:
            ended()
            raise

    def _judge(self, update: Update) -> Reply | Awaitable[Reply]:
        return self._judge_by(update, self._judged)

    def _judge_in_turn(self, update: Update) -> Reply | Awaitable[Reply]:
        """As ``_judge``, for an entry of the log, whose turn this is, however long it takes."""
        return self._judge_by(update, self._judge_in_turn)

    def _judge_by(
        self, update: Update, again: Callable[[Update], Reply | Awaitable[Reply]]
    ) -> Reply | Awaitable[Reply]:
        verdict = update.judge()
        if isinstance(verdict, InProgress):
            return self._update_later(update, verdict.ticket, again)
        return self._act(update, verdict)

    async def _update_later(
        self, update: Update, ticket: Ticket, again: Callable[[Update], Reply | Awaitable[Reply]]
    ) -> Reply:
        """The same update is being applied for another message: its end decides."""
        while not ticket.settled:
            await self._work.next_turn()
        answer = again(update)
        return answer if isinstance(answer, Reply) else await answer

    def _act(self, update: Update, verdict: Verdict) -> Reply | Awaitable[Reply]:
        if isinstance(verdict, Fresh):
            return self._apply(update, verdict.ticket)
        if isinstance(verdict, AlreadyApplied):
            return Reply(update.ledger.finish(verdict.ticket, Pushed("duplicate", 0)))
        return Reply(cast(Pushed, cast(Duplicate, verdict).answer))

    def _apply(self, update: Update, ticket: Ticket) -> Reply | Awaitable[Reply]:
        try:
            if isinstance(update.message, AssignLocked) and not self._committer.is_begun:
                self._locks.check(update.client, update.message, update.needed)
            update.begin()
        except Exception:
            update.ledger.fail(ticket)  # nothing has changed: a retry is judged anew
            self._gate.look_again()
            raise
        if not self._work.fits_now(update.store, update.needed, sum(update.costs)):
            claim = self._locks.table.begin(update.needed)
            self._gate.began()
            return self._work.to_the_end(self._apply_slowly(update, ticket, claim))
        try:
            update.at_once()
        except Exception as exc:
            self._work.give_up(exc)
            raise
        return self._applied(update, ticket)

    async def _apply_slowly(self, update: Update, ticket: Ticket, claim: Claim) -> Reply:
        """Apply shard after shard, large ones block after block, small ones several at once."""
        try:
            await self._work.shard_by_shard(update.costs, update.work)
            return self._applied(update, ticket)
        finally:
            self._locks.end(claim)
            self._gate.ended()
            self._work.wake()  # repetitions that wait for the answer

    def _applied(self, update: Update, ticket: Ticket) -> Reply:
        push = isinstance(update.message, Push)
        answer = Pushed("accepted", update.step + 1 if push else 0)
        update.ledger.finish(ticket, answer)
        self.pushes += push
        self.assigns += not push
        if self._gate.is_shut:
            self._gate.look_again()
        return Reply(answer)
