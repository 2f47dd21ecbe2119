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

import operator
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from psync.cluster import parse_task_name
from psync.errors import UsageError, ValueMismatchError
from psync.net.connection import Handler, Request
from psync.numerics.memory import ABOVE_BYTES, BlockPool
from psync.ps.admission import Claim, GateService, PsLocks
from psync.ps.computes import Compute
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import Executor, Listed
from psync.ps.optimizers import OptimizerService
from psync.ps.pulls import PsPulls
from psync.ps.shard_sets import Body, ShardSet, body_in_place, memory_for, owned, set_of
from psync.store.commit_log import LogNames, LogState
from psync.store.ledger import Call, Client, Duplicate, Ledger, Verdict
from psync.store.push_counts import HOME
from psync.store.rows import RowValues
from psync.store.store import Adjacent, AssignOp, Key, ShardStore, Work, ones
from psync.store.work import nothing
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import Assign, AssignLocked, AverageShards, Failure, Push, Pushed
from psync.wire.remote_errors import exception_of, failure_of

_PS = operator.itemgetter(0)

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


class Update(Compute):
    """A push, assign or average that has come in whole, and what it is applied to.

    It is a compute once it has been judged.

    Args:
        request: Gets the answer.
        message: Of the request.
        known: The shards that it changes.
        body: Of averages nothing.
        store: Has them, even if a new coordinator empties the task meanwhile.
        ledger: Likewise.
    """

    __slots__ = (
        "body", "client", "costs", "followed", "known", "ledger", "message", "needed",
        "operands", "others", "raised", "request", "runs", "step", "store", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        request: Request[Any],
        message: Push | Assign | AverageShards,
        known: ShardSet,
        body: Body,
        store: ShardStore,
        ledger: Ledger,
    ) -> None:
        self.request = request
        self.client: Client = request.peer.client
        self.message = message
        self.known = known
        self.body = body
        self.store = store
        self.ledger = ledger
        self.needed: Sequence[Key] = known.keys  # the shards that it reads or changes
        self.wanted: ShardSet | None = None  # whose values its answer brings
        self.step = 0
        self.others: tuple[int, ...] = ()  # ps tasks with a part of a push that is counted here
        # The body as arrays, checked; one per shard.
        self.operands: Sequence[np.ndarray | RowValues] = ()
        self.raised: tuple[Key, np.ndarray] | None = None  # a shard, and the one added to it
        self.followed: Sequence[Key] = ()  # by the averages: one per shard
        self.runs: Sequence[slice] = ()  # of shards updated together; (): each by itself
        self.costs: Sequence[int] = known.costs  # bytes that each run or shard's update touches
        self.nbytes = 0  # of all, less what shards do not cost that are updated together

    def entry(self, names: LogNames) -> Message:
        """Return it as the log has it: its set by a number of the log's own, and no lock."""
        message = self.message
        if isinstance(message, AverageShards):
            return message
        number, members = names.of_set(self.known.members)
        if isinstance(message, AssignLocked):
            return Assign(
                message.sequence, message.acked_below, message.closure, message.ordinal,
                number, members, message.op, message.rows, message.spread,
            )  # fmt: skip
        if isinstance(message, Push):  # a backup answers nobody
            return replace(message, set_id=number, members=members, pull=-1, pull_members=None)
        return replace(message, set_id=number, members=members)

    @property
    def identity(self) -> tuple[Client, int, Call | None]:
        """Who sent it, its sequence, and its call in a closure: as the ledger knows it."""
        message = self.message
        call = None if message.closure < 0 else (message.closure, message.ordinal)
        return self.client, message.sequence, call

    def judge(self) -> Verdict:
        """Ask the ledger."""
        message, known = self.message, self.known
        return self.ledger.judge(
            self.client, message.sequence, message.acked_below,
            message.closure if message.closure >= 0 else None, message.ordinal,
            known.digest, known.names, message.spread or (), arrived=True,
        )  # fmt: skip

    def begin(self, here: int) -> None:
        """Check the whole update before any of it is applied, and draw its step.

        Args:
            here: Index of this ps.
        """
        message, store, known = self.message, self.store, self.known
        if isinstance(message, Push) and message.rows is None:
            optimizer = message.optimizer
            if message.raised is not None:
                self._check_raised((message.raised[0], message.raised[1]))
            if message.ratios is not None:
                self._check_ratios(message.ratios, optimizer)
            body = self.body
            if optimizer in known.optimizers and known.dtype is not None and len(body) == 1:
                self.operands = Adjacent(np.asarray(body[0]).view(known.dtype), known.elements)
            else:
                self.operands = known.gradients(store, optimizer, body)
            if message.place == HOME and message.spread:
                # Each may get several messages, and so may this ps.
                self.others = tuple(sorted({*map(_PS, message.spread)} - {here}))
            self.step = store.begin_push(optimizer, message.elsewhere, message.place, self.others)
            if type(self.operands) is Adjacent and message.ratios is None:
                if store.optimizers[optimizer].is_elementwise:
                    self.runs, self.costs, self.nbytes = known.runs, known.run_costs, known.cost
            if not self.runs:
                self.nbytes = sum(self.costs)
        else:
            self._begin_other(here)
        if self.raised is not None:
            nbytes = self.raised[1].nbytes
            self.costs, self.nbytes = (*self.costs, nbytes), self.nbytes + nbytes

    def _begin_other(self, here: int) -> None:
        message, store, known = self.message, self.store, self.known
        if isinstance(message, AverageShards):
            if not 0 <= message.decay < 1:
                raise ValueMismatchError(
                    f"moving average: expected decay in [0, 1), got {message.decay}"
                )
            self.followed = [(variable, index) for _, variable, index in message.shards]
            self.needed = (*known.keys, *self.followed)
            for average, key in zip(known.keys, self.followed, strict=True):
                store.check_average(average, key)
        elif message.rows is not None:
            self._begin_rows(message, message.rows, here)
        else:
            op = cast(Assign, message).op
            parts = zip(known.keys, known.cut(self.body), strict=True)
            self.operands = [store.check_assign(key, op, view) for key, view in parts]
        self.nbytes = sum(self.costs)

    def _begin_rows(self, message: Push | Assign, counts: Sequence[int], here: int) -> None:
        known, store = self.known, self.store
        if isinstance(message, Push):
            if message.raised is not None:
                self._check_raised((message.raised[0], message.raised[1]))
            self.operands = known.row_gradients(store, message.optimizer, self.body, counts)
        else:
            self.operands = known.row_operands(
                store,
                self.body,
                counts,
                lambda key, part: store.check_assign(key, message.op, part),
                lambda key: store.check_scatter(key, message.op),
            )
        self.costs = [
            store.rows_cost(key, operand.rows) if isinstance(operand, RowValues) else length
            for key, operand, length in zip(known.keys, self.operands, known.costs, strict=True)
        ]
        if isinstance(message, Push):
            if message.place == HOME and message.spread:
                self.others = tuple(sorted({*map(_PS, message.spread)} - {here}))
            self.step = store.begin_push(
                message.optimizer, message.elsewhere, message.place, self.others
            )

    def _check_raised(self, raised: Key) -> None:
        """Check that one can be added to a shard."""
        spec = self.store.spec(raised)
        if spec.size != 1:
            raise ValueMismatchError(
                f"{spec} on {self.store.task}: expected one number, to be raised by one, got shape "
                f"{spec.shape}"
            )
        one = self.store.check_assign(raised, "add", ones(spec.shape, spec.dtype))
        self.raised = raised, one

    def _check_ratios(self, ratios: Sequence[float], optimizer: int) -> None:
        if len(ratios) != len(self.known.keys) or not self.store.is_layerwise(optimizer):
            raise UsageError(
                f"{self.store.task}: {len(ratios)} trust ratios for {len(self.known.keys)} shards "
                f"and optimizer {optimizer}"
            )

    def whole(self) -> None:
        """Do all the work; for small shards. Raises BusyError, with nothing done: one is busy."""
        message, known, done = self.message, self.known, 0
        if self.raised is not None:
            self.store.check_idle((self.raised[0],))
        if isinstance(message, Push) and message.rows is None and message.ratios is None:
            self.store.apply_at_once(message.optimizer, known.plan, self.operands, self.step)  # type: ignore[arg-type]
            done = len(self.runs or known.keys)
        else:
            self.store.check_idle(self.needed)
        for position in range(done, len(self.costs)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard, or run of shards."""
        if self.raised is not None and position == len(self.runs or self.known.keys):
            raised, one = self.raised
            return self.store.assign_checked(raised, "add", one)
        message, known = self.message, self.known
        if self.runs:
            run = self.runs[position]
            if run.stop - run.start > 1:
                assert isinstance(message, Push), "of others there are no runs"
                gradients = cast(Adjacent, self.operands)[run]
                plan = known.run_plans[position]
                self.store.apply_at_once(message.optimizer, plan, gradients, self.step)
                return nothing()
            position = run.start
        key = known.keys[position]
        if isinstance(message, AverageShards):
            return self.store.average(key, self.followed[position], message.decay)
        operand = self.operands[position]
        if isinstance(operand, RowValues):
            if isinstance(message, Push):
                return self.store.apply_rows(message.optimizer, key, *operand, self.step)
            return self.store.scatter(key, message.op, *operand)
        if isinstance(message, Push):
            ratio = None if message.ratios is None else message.ratios[position]
            return self.store.apply_checked(message.optimizer, key, operand, self.step, ratio)
        return self.store.assign_checked(key, cast(AssignOp, message.op), operand)


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
        optimizers = self._store.optimizers.items()
        counts = sorted((number, each.count.state) for number, each in optimizers)
        return [self._ledger.control(encode), [each for each in counts if any(each[1])]]

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
        message = request.message
        try:
            sets = request.peer.state.get("sets")
            known = sets.get(message.set_id) if sets and message.members is None else None
            if known is None:
                known = set_of(request.peer, message.set_id, message.members, self._task)
            if isinstance(message, Push) and message.config is not None:
                self._store.define_optimizer(message.optimizer, message.config)
            if known.store is not self._store:
                known.look_up(self._store)
            if request.lengths != known.lengths or message.rows is not None:
                known.check_lengths(request.lengths, self._task, message.rows)
        except Exception:
            self._refused(request)
            raise
        request.token = known
        if message.rows is not None:
            return memory_for(self._pool, sum(request.lengths), varies=True)
        if request.borrowed is not None and isinstance(message, Push):
            is_alone = self._executor.is_alone
            return body_in_place(request, self._pool, known, known.nbytes, is_alone=is_alone)
        if known.nbytes < ABOVE_BYTES:
            return (np.empty(known.nbytes, np.uint8).data,)
        return memory_for(self._pool, known.nbytes)

    def _refused(self, request: Request[Any]) -> None:
        """Note that a message was refused before it was judged: no cut waits for it."""
        self._ledger.refuse(request.peer.client, request.message.sequence)
        self._gate.wake()

    def _arrived(self, request: Request[Any]) -> None:
        peer, message, store = request.peer, request.message, self._store
        known, body = request.token, request.segments
        try:
            # While the body came in a timeline may have ended.
            if not isinstance(known, ShardSet) or known.store is not store:
                known = set_of(peer, message.set_id, message.members, self._task).look_up(store)
            if message.rows is not None or len(body) != 1 or len(body[0]) != known.nbytes:
                body = known.body_of(body, self._task, message.rows)
            update = Update(request, message, known, body, store, self._ledger)
            if isinstance(message, Push):
                if message.pull >= 0:
                    wanted = peer.state["sets"].get(message.pull)
                    if wanted is None or message.pull_members is not None:
                        wanted = set_of(peer, message.pull, message.pull_members, self._task)
                    update.wanted = wanted if wanted.store is store else wanted.look_up(store)
                if message.raised is not None:
                    raised = (message.raised[0], message.raised[1])
                    store.spec(raised)  # raises if it is not here
                    update.needed = (*known.keys, raised)
        except Exception:
            self._refused(request)
            raise
        self._admit(update)

    def _average_arrived(self, request: Request[AverageShards]) -> None:
        message = request.message
        known = ShardSet(tuple((average, index) for average, _, index in message.shards))
        try:
            known.look_up(self._store)
        except Exception:
            self._refused(request)
            raise
        self._admit(Update(request, message, known, (), self._store, self._ledger))

    # Admission: nothing is noted of an update that waits, which has not begun.

    def _admit(self, update: Update) -> None:
        gate, locks = self._gate, self._locks
        locked: Claim | None = None
        must_wait = gate.rule.cut > 0 and gate.rule.holds(update.client, update.message.sequence)
        if isinstance(update.message, AssignLocked):
            locks.check(update.client, update.message, update.needed)
            if must_wait:  # nobody else gets the lock before this is done, even if its holder dies
                locked = locks.table.begin(update.needed)
        elif locks.table.num_exclusive and locks.table.blocks(update.needed):
            must_wait = True
        if must_wait:  # it is applied even if its request is given up
            gate.arrived(update.client, update.message.sequence)
            self._carry(update.request, self._when_admitted(update, locked))
        elif self._executor.log.state is LogState.ALONE:
            self._executor.submit(
                update.request, update.entry, update.body, partial(self._judge, update),
                partial(self._claim, update),
            )  # fmt: skip
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
                        if not self._gate.rule.holds(*message):
                            self._submit(update)
                            return
                    finally:
                        self._locks.end(claim)
                        self._gate.waits_for_lock(*message, waits=False)
                elif not self._gate.rule.holds(*message):
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
            update.request, update.entry, update.body, partial(self._judge, update),
            partial(self._claim, update),
        )  # fmt: skip

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
        message = update.message
        try:
            verdict = update.judge()
            if isinstance(verdict, Duplicate):  # the first one may not be applied yet
                return self._answering(update, cast(Pushed, verdict.answer))
            if not verdict.first:
                duplicate = self._ledger.record(verdict, Pushed("duplicate", 0))
                return self._answering(update, duplicate)
            update.begin(self._index)
        except Exception:
            self._ledger.refuse(update.client, message.sequence)
            self._gate.wake()
            raise
        if isinstance(message, Push):
            known, elsewhere = self._store.optimizers[message.optimizer].count.answer()
            answer = Pushed("accepted", known, None, elsewhere)
            if message.place == HOME and len(update.others) < self.num_others:
                self.counted()
            self.staleness.note(update.client[0], message.optimizer, update.step)
            self.pushes += 1
        else:
            answer = Pushed("accepted", 0)
            self.assigns += 1
        self._ledger.record(verdict, answer)
        update.keys = update.needed
        update.done = partial(self._applied, update, answer)
        if update.runs and update.raised is None and isinstance(message, Push):
            update.at_once = partial(
                update.store.apply_at_once, message.optimizer, update.known.plan,
                update.operands,  # type: ignore[arg-type]  # there are runs, so none of rows
                update.step,
            )  # fmt: skip
        else:
            update.at_once = update.whole
        update.in_pieces = partial(self._work.shard_by_shard, update.costs, update.work)
        return update

    def _applied(self, update: Update, answer: Pushed) -> None:
        """All shards have it, and nobody was told yet."""
        del update.done, update.at_once, update.in_pieces  # which lead back: its body would be held
        if self._gate.rule.cut:
            self._gate.wake()
        message = update.message
        if self._store.failures and isinstance(message, Push):
            failed = self._store.take_failure(message.optimizer, update.step)
            if failed is not None:
                client, sequence, call = update.identity
                self._ledger.note_failure(client, sequence, call, encode(failure_of(failed)))
                raise failed
        if update.wanted is None:
            update.request.answer(answer)
        else:
            self._answer(update, answer)

    def _answer(self, update: Update, answer: Pushed) -> None:
        """Answer, with the values that were asked for if no shard is busy."""
        wanted, read = update.wanted, None
        if wanted is not None and wanted.compression is None:
            read = self._pulls.read_now(wanted)
        if read is None:
            update.request.answer(answer)
            return
        brought = Pushed(answer.outcome, answer.step, self._pulls.closed.steps, answer.elsewhere)
        update.request.answer(brought, read)

    def _answering(self, update: Update, answer: Pushed) -> Compute:
        """Return what answers once the shards are as an earlier update has left them."""

        def done() -> None:
            failure = self._ledger.failure_of(*update.identity)
            if failure is not None:
                raise exception_of(cast(Failure, decode(failure)), self._task)
            self._answer(update, answer)

        return Compute(update.needed, done)
