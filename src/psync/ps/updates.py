"""Pushes and assigns on a ps: admitted, judged in log order, applied, answered.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

    arrived    whole, from a client that is served, or refused (FencedError). From now on it is
               applied, whatever becomes of its request, its connection or its client: another ps
               may have applied its part of the same update. One outside of closures is the
               exception: it is refused if its client is replaced while it waits (FencedError)
    admitted   an update of a locked shard waits until the lock ends, unless it is the holder's; one
               that comes while a cut is taken waits at the gate
    judged     (by the ``executor``, in the order of the log)
               fresh                       checked, recorded with its answer, applied
               same sequence               the recorded answer again, once that is applied
               same call, other run        "duplicate": another run of the closure was first
    applied    shard by shard (``computes``); then the answer leaves. A rule of a user's may raise
               here: its shard is as it was, the answer is a RuleError, and is noted for those who
               ask again (``ledger.note_failure``)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from psync.cluster import parse_task_name
from psync.net.connection import Handler, Request
from psync.numerics.memory import BlockPool
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.cut_gate import GateService
from psync.ps.executor import Executor, Listed
from psync.ps.locks import PsLocks
from psync.ps.optimizers import OptimizerService
from psync.ps.pulls import PsPulls
from psync.ps.shard_sets import ShardSet, body_in_place, memory_for, numbered_set, owned, set_of
from psync.ps.update import Update
from psync.store.commit_log import LogState
from psync.store.ledger import Duplicate, Fresh, Ledger, Ticket
from psync.store.ledger_snapshot import control_of
from psync.store.locks import Claim
from psync.store.push_counts import HOME
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import Assign, AssignLocked, AverageShards, Failure, Push, Pushed
from psync.wire.remote_errors import exception_of, failure_of

MAX_STALENESS = 255
"""What is staler is counted as this."""


class PushStaleness:
    """Staleness of asynchronous pushes: updates of others since the same task's last push.

    The same as ``PushResult.staleness``, where a task pushes to the same ps tasks each time.
    """

    def __init__(self) -> None:
        # By task and optimizer: step of its last push, and staleness of that; -1: it is the first.
        self._last: dict[tuple[str, int], list[int]] = {}
        self._counts = [0] * (MAX_STALENESS + 1)

    def note(self, task: str, optimizer: int, step: int) -> None:
        """Note that a push is applied as the optimizer's step ``step``."""
        last = self._last.get((task, optimizer))
        if last is None:
            self._last[task, optimizer] = [step, -1]
            return
        staleness = step - last[0] - 1
        if staleness < 0:  # the program has set the optimizer back
            staleness = 0
        last[0], last[1] = step, staleness
        self._counts[staleness if staleness < MAX_STALENESS else MAX_STALENESS] += 1

    def statistics(self) -> dict[str, Any]:
        """Return that of each task's newest push, and how often each staleness occurred."""
        newest: dict[str, int] = {}
        for (task, _), (_, staleness) in self._last.items():
            newest[task] = max(staleness, newest.get(task, -1))
        return {
            # A list: there may be many workers.
            "newest": [(task, steps) for task, steps in newest.items() if steps >= 0],
            "counts": {str(steps): count for steps, count in enumerate(self._counts) if count},
        }


class PsUpdates:
    """The pushes and assigns of one ps under one coordinator.

    Args:
        task: Name of the ps.
        store: Its shards.
        ledger: Knows which updates were seen.
        work: What takes long.
        pool: Memory for what comes in.
        locks: Who must wait.
        executor: In whose order all is done.
        gate: Who must wait while a cut is taken.
        pulls: Reads what an answer brings.
    """

    def __init__(
        self,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
        locks: PsLocks,
        executor: Executor,
        gate: GateService,
        pulls: PsPulls,
    ) -> None:
        self.pushes = self.assigns = 0  # that were applied
        self.staleness = PushStaleness()
        # Told when pushes were counted here of which some other ps has no part.
        self.counted: Callable[[], None] = lambda: None
        self.num_others = 0  # ps tasks
        self._executor = executor
        self._task = task
        self._index = parse_task_name(task)[1]
        self._store = store
        self._ledger = ledger
        self._work = work
        self._pool = pool
        self._locks = locks
        self._gate = gate
        self._pulls = pulls
        self._optimizers = OptimizerService(task, store, work, pool, lambda: self.counted())

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Push: Handler(self._arrived, self._prepare_update),
            Assign: Handler(self._arrived, self._prepare_update),
            AssignLocked: Handler(self._arrived, self._prepare_update),
            AverageShards: Handler(self._average_arrived),
            **self._optimizers.handlers(),
        }

    # A section of the state: shards and ledger, all of which is in snapshots.

    def control(self) -> list[Any]:
        """Return what the ledger remembers, and the counts of optimizers that were used."""
        optimizers = self._store.optimizers().items()
        counts = sorted((number, each.count.state) for number, each in optimizers)
        return [control_of(self._ledger, encode), [each for each in counts if any(each[1])]]

    async def entries(self) -> list[Listed]:
        """Return no entries."""
        return []

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes entries: the primary has checked whether their clients are served."""
        return {
            Push: Handler(self._arrived),
            Assign: Handler(self._arrived),
            AverageShards: Handler(self._average_arrived),
        }

    def _prepare_update(self, request: Request[Push | Assign]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        peer, message = request.peer, request.message
        lengths = request.lengths
        try:
            known = set_of(peer, message, self._task)
            if isinstance(message, Push) and message.config is not None:
                self._store.define_optimizer(message.optimizer, message.config)
            known.look_up(self._store)
            known.check_lengths(lengths, self._task, message.rows)
        except Exception:
            self._refused(request)
            raise
        request.token = known
        if message.rows is not None:
            return memory_for(self._pool, sum(lengths), varies=True)
        if request.borrowed is not None and isinstance(message, Push):
            is_alone = self._executor.is_alone
            return body_in_place(request, self._pool, known, known.nbytes, is_alone=is_alone)
        return memory_for(self._pool, known.nbytes)

    def _refused(self, request: Request[Any]) -> None:
        """Note that a message was refused before it was judged: no cut waits for it."""
        self._ledger.refuse(request.peer.client, request.message.sequence)
        self._gate.wake()

    def _arrived(self, request: Request[Any]) -> None:
        peer, message = request.peer, request.message
        try:
            # While the body came in a timeline may have ended.
            known = request.token
            if not isinstance(known, ShardSet) or known.store is not self._store:
                known = set_of(peer, message, self._task).look_up(self._store)
            whole = known.body_of(request.segments, self._task, message.rows)
            needed: Sequence[Key] = known.keys
            wanted: ShardSet | None = None
            if isinstance(message, Push):
                if message.pull >= 0:
                    pulled = numbered_set(peer, message.pull, message.pull_members, self._task)
                    wanted = pulled.look_up(self._store)
                if message.raised is not None:
                    raised = (message.raised[0], message.raised[1])
                    self._store.spec(raised)  # raises if it is not here
                    needed = (*needed, raised)
        except Exception:
            self._refused(request)
            raise
        client, ledger = peer.client, self._ledger
        self._admit(
            Update(request, client, message, known, whole, self._store, ledger, needed, wanted)
        )

    def _average_arrived(self, request: Request[AverageShards]) -> None:
        message = request.message
        known = ShardSet(tuple((average, index) for average, _, index in message.shards))
        try:
            known.look_up(self._store)
        except Exception:
            self._refused(request)
            raise
        client, keys = request.peer.client, known.keys
        self._admit(Update(request, client, message, known, (), self._store, self._ledger, keys))

    # Admission: nothing is noted of an update that waits, which has not begun.

    def _admit(self, update: Update) -> None:
        locked: Claim | None = None
        must_wait = self._gate.holds(update.client, update.message.sequence)
        if isinstance(update.message, AssignLocked):
            self._locks.check(update.client, update.message, update.needed)
            if must_wait:  # nobody else gets the lock before this is done, even if its holder dies
                locked = self._locks.table.begin(update.needed)
        elif self._locks.table.blocks(update.needed):
            must_wait = True
        if must_wait:  # it is applied even if its request is given up
            self._gate.arrived(update.client, update.message.sequence)
            self._carry(update.request, self._when_admitted(update, locked))
        else:
            self._submit(update)

    def _carry(self, _: Request[Any], waiting: Coroutine[Any, Any, None]) -> None:
        self._work.to_the_end(waiting)

    async def _when_admitted(self, update: Update, locked: Claim | None) -> None:
        message = update.client, update.message.sequence
        try:
            while True:
                if locked is None and self._locks.table.blocks(update.needed):
                    claim = self._locks.claim(update.needed)
                    self._gate.waits_for_lock(*message, waits=True)
                    try:
                        await self._locks.turn(claim)
                        if not self._gate.holds(*message):
                            self._submit(update)
                            return
                    finally:
                        self._locks.end(claim)
                        self._gate.waits_for_lock(*message, waits=False)
                elif not self._gate.holds(*message):
                    self._submit(update)
                    return
                await self._gate.turn(*message)
        except Exception as exc:
            update.request.fail(exc)
        finally:
            if locked is not None:
                self._locks.end(locked)
            self._gate.passed(*message)

    def _submit(self, update: Update) -> None:
        if self._executor.log.state is not LogState.ALONE:  # any more: it may have waited
            update.body = owned(self._pool, update.body)
        self._executor.submit(
            update.request,
            update.entry,
            update.body,
            lambda: self._judge(update),
            lambda: self._claim(update),
        )

    def _claim(self, update: Update) -> Callable[[], None]:
        """An update takes longer than a turn: it is under way for cuts, and for who locks."""
        claim = self._locks.table.begin(update.needed)
        self._gate.began()

        def ended() -> None:
            self._locks.end(claim)
            self._gate.ended()

        return ended

    # In log order.

    def _judge(self, update: Update) -> Compute:
        try:
            verdict = update.judge()
            if isinstance(verdict, Duplicate):  # the first one may not be applied yet
                return self._answering(update, cast(Pushed, verdict.answer))
            if isinstance(verdict, Fresh):
                update.begin(self._index)
                return self._accept(update, verdict.ticket)
        except Exception:
            self._ledger.refuse(update.client, update.message.sequence)
            self._gate.wake()
            raise
        return self._answering(update, self._ledger.record(verdict.ticket, Pushed("duplicate", 0)))

    def _accept(self, update: Update, ticket: Ticket) -> Compute:
        if isinstance(update.message, Push):
            message = update.message
            step, elsewhere = self._store.optimizers()[message.optimizer].count.answer()
            answer = Pushed("accepted", step, None, elsewhere)
            if message.place == HOME and len(update.others) < self.num_others:
                self.counted()
            self.staleness.note(update.client[0], update.message.optimizer, update.step)
            self.pushes += 1
        else:
            answer = Pushed("accepted", 0)
            self.assigns += 1
        self._ledger.record(ticket, answer)
        return Compute(
            update.needed,
            functools.partial(self._applied, update, answer),
            update.nbytes,
            update.at_once,
            functools.partial(self._work.shard_by_shard, update.costs, update.work),
        )

    def _applied(self, update: Update, answer: Pushed) -> None:
        """All shards have it, and nobody was told yet."""
        if self._gate.is_shut:
            self._gate.wake()
        if isinstance(update.message, Push):
            failed = self._store.take_failure(update.message.optimizer, update.step)
            if failed is not None:
                client, sequence, call = update.identity
                self._ledger.note_failure(client, sequence, call, encode(failure_of(failed)))
                raise failed
        self._answer(update, answer)

    def _answer(self, update: Update, answer: Pushed) -> None:
        """Answer, with the values that were asked for if no shard is busy."""
        if update.wanted is not None and (read := self._pulls.read_now(update.wanted)) is not None:
            steps, values = read
            brought = Pushed(answer.outcome, answer.step, steps, answer.elsewhere)
            update.request.answer(brought, values)
        else:
            update.request.answer(answer)

    def _answering(self, update: Update, answer: Pushed) -> Compute:
        """Return what answers once the shards are as an earlier update has left them."""

        def done() -> None:
            failure = self._ledger.failure_of(*update.identity)
            if failure is not None:
                raise exception_of(cast(Failure, decode(failure)), self._task)
            self._answer(update, answer)

        return Compute(update.needed, done)
