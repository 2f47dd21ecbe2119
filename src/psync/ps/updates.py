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
               here: its shard is as it was, the answer is a RuleError, and is noted on its ticket
               for those who ask again

Creating shards is idempotent, so a lost connection repeats it.

A program that restores a checkpoint, or changes the learning rate, does so by SetOptimizer, and by
assigns to slots. The former is idempotent, so a lost connection repeats it: an entry of the log,
which the ledger does not judge. ``MeasurePush`` is the first round of layer-wise optimizers: the
norms of an update before it is applied.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from psync.cluster import parse_task_name
from psync.errors import PlanForgotten, RemoteProtocolError, UsageError, ValueMismatchError
from psync.net.connection import Connection, Handler, Request
from psync.numerics.memory import ABOVE_BYTES
from psync.numerics.rules import Sums
from psync.ps.admission import Claim, UpdateGate
from psync.ps.computes import Compute
from psync.ps.cooperative_work import INLINE_BYTES
from psync.ps.executor import Service
from psync.ps.plans import (
    NO_BYTES,
    NO_PLANS,
    Body,
    ShardSet,
    body_in_place,
    memory_for,
    owned,
)
from psync.ps.pulls import PsPulls
from psync.specs import ShardSpec, dtype_of
from psync.store.commit_log import LogState
from psync.store.ledger import Client, Ledger, Ticket
from psync.store.push_counts import EARLY, FURTHER, HOME
from psync.store.reattach import Progress
from psync.store.rows import RowValues
from psync.store.store import Adjacent, AssignOp, Key, ShardStore, Work
from psync.store.sync_config import SyncConfig
from psync.store.work import DONE
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    CreateShards,
    DefinePlan,
    Done,
    Failure,
    MarkRestore,
    Measured,
    MeasurePush,
    OptimizerState,
    Pushed,
    SetOptimizer,
    Update,
)
from psync.wire.remote_errors import exception_of, failure_of
from psync.wire.tensors import array_from_bytes

_PS = operator.itemgetter(0)

Source = Key | np.ndarray | None
"""What a shard begins as: a copy of another, so many of one element, or a value that is sent."""

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


class Parts(Protocol):
    """Takes parts of synchronous pushes: ``sync.ps_sync``."""

    # Reserves memory for a part, see ``Staging.reserve``: group, client and number of its push,
    # local step, bytes, the group.
    reserve: Callable[[tuple[int, Client, int], int, int, SyncConfig], None]

    def took(self, request: Request[Update], part: Any) -> None: ...
    def define(self, known: ShardSet) -> None: ...
    def part(self, known: ShardSet, client: Client, message: Update, body: Body) -> Any: ...
    def replay(self, request: Request[Update], known: ShardSet) -> None: ...


class PsUpdate(msgspec.Struct, eq=False):
    """A push, assign or average that has come in whole, and what it is applied to."""

    request: Request[Update]  # gets the answer
    client: Client
    message: Update
    known: ShardSet  # its plan
    wanted: ShardSet | None  # whose values its answer brings
    body: Body  # of averages nothing
    store: ShardStore
    step: int = 0
    others: tuple[int, ...] = ()  # ps tasks with a part of a push that is counted here
    # The body as arrays, checked; one per shard.
    operands: Sequence[np.ndarray | RowValues] | Adjacent = ()
    runs: Sequence[slice] = ()  # of shards updated together; (): each by itself
    costs: Sequence[int] = ()  # bytes that each run or shard's update touches
    nbytes: int = 0  # of all, less what shards do not cost that are updated together

    def begin(self, here: int, ledger: Ledger) -> None:
        """Check the whole update before any of it is applied, and draw its step.

        Args:
            here: Index of this ps.
            ledger: What has been judged here.
        """
        message, store, known, body = self.message, self.store, self.known, self.body
        optimizer, factors, self.costs = known.optimizer, message.factors, known.costs
        if known.followed:
            if factors is None or not 0 <= factors[0] < 1:
                decay = None if factors is None else factors[0]
                raise ValueMismatchError(f"moving average: expected decay in [0, 1), got {decay}")
        else:
            if factors is not None:
                self._check_ratios(factors)
            self.operands = known.operands(store, body, message.rows)
            if message.rows is not None:
                each = zip(known.keys, self.operands, known.costs, strict=True)
                self.costs = [
                    store.rows_cost(key, operand.rows) if isinstance(operand, RowValues) else length
                    for key, operand, length in each
                ]
            elif type(self.operands) is Adjacent and factors is None:
                self.runs = known.runs
        if self.known.is_push:
            if message.place == HOME and message.spread:
                # Each may get several messages, and so may this ps.
                self.others = tuple(sorted({*map(_PS, message.spread)} - {here}))
            place = message.place
            if place == FURTHER:  # the first may wait for a lock, or have taken another lane
                first = min((at for ps, at in message.spread or () if ps == here), default=-1)
                if first >= message.acked_below and not ledger.knows(self.client, first):
                    place = EARLY
            self.step = store.begin_push(optimizer, message.elsewhere, place, self.others)
        if self.runs:
            self.costs, self.nbytes = known.run_costs, known.cost
        else:
            self.nbytes = sum(self.costs)
        if known.one is not None:
            nbytes = known.one.nbytes
            self.costs, self.nbytes = (*self.costs, nbytes), self.nbytes + nbytes

    def _check_ratios(self, ratios: Sequence[float]) -> None:
        known = self.known
        if len(ratios) != len(known.keys) or not self.store.rule(known.optimizer).takes_norms:
            raise UsageError(
                f"{self.store.task}: {len(ratios)} trust ratios for {len(known.keys)} shards "
                f"and optimizer {known.optimizer}"
            )

    def whole(self) -> None:
        """Do all the work; for small shards. Raises BusyError, with nothing done: one is busy."""
        message, known, done = self.message, self.known, 0
        if known.says.raised is not None:
            self.store.check_idle((known.says.raised,))
        if self.known.is_push and message.rows is None and message.factors is None:
            self.store.apply_at_once(known.optimizer, known.plan, self.operands, self.step)  # type: ignore[arg-type]
            done = len(self.runs or known.keys)
        else:
            self.store.check_idle(known.needed)
        for position in range(done, len(self.costs)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard, or run of shards."""
        known, store = self.known, self.store
        if known.says.raised is not None and position == len(self.runs or known.keys):
            return store.assign_checked(known.says.raised, "add", cast(np.ndarray, known.one))
        if self.runs:
            run = self.runs[position]
            if run.stop - run.start > 1:
                gradients = cast(Adjacent, self.operands)[run]
                plan = known.run_plans[position]
                store.apply_at_once(known.optimizer, plan, gradients, self.step)
                return DONE
            position = run.start
        key, factors = known.keys[position], self.message.factors
        if known.followed:
            return store.average(key, known.followed[position], cast(Sequence[float], factors)[0])
        operand = self.operands[position]
        if isinstance(operand, RowValues):
            if self.known.is_push:
                return store.apply_rows(known.optimizer, key, *operand, self.step)
            return store.scatter(key, known.says.op, *operand)
        if known.says.slot:
            return store.load_slot(key, known.optimizer, known.says.slot, operand)
        if self.known.is_push:
            ratio = None if factors is None else factors[position]
            return store.apply_checked(known.optimizer, key, operand, self.step, ratio)
        return store.assign_checked(key, cast(AssignOp, known.says.op), operand)


def copied_by(message: CreateShards) -> list[Key]:
    """Return the shards whose values others begin with."""
    return [(each[0], each[1]) for each in message.sources if isinstance(each, tuple | list)]


def nothing_is_left() -> None:
    """Execute an entry that was done when it came."""


@dataclass(eq=False)
class PsUpdates(Service):
    """The pushes and assigns of one ps under one coordinator.

    Args:
        gate: Who must wait while a cut is taken.
        pulls: Reads what an answer brings.
        sync: Takes those of synchronous pushes.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        counted: Told when pushes were counted here of which some other ps has no part.
        num_others: Other ps tasks.
        pushes, assigns: How many were applied.
        base: Updates of shards that were made by restores, and are no progress; -1: there is some.
        is_restoring: Whether a restore has begun, and not ended.
        staleness: Of asynchronous pushes.
    """

    gate: UpdateGate
    pulls: PsPulls
    sync: Parts
    check_coordinator: Callable[[Connection], None]
    counted: Callable[[], None] = lambda: None
    num_others: int = 0
    pushes: int = 0
    assigns: int = 0
    base: int = 0
    is_restoring: bool = False
    staleness: PushStaleness = field(default_factory=PushStaleness)

    def __post_init__(self) -> None:
        self._index = parse_task_name(self.task)[1]

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            CreateShards: Handler(self._create_shards, self._prepare_shards),
            DefinePlan: Handler(self.plans.serve),
            Update: Handler(self._arrived, self._prepare_update),
            SetOptimizer: Handler(self._set_optimizer),
            MeasurePush: Handler(self._measure, self._prepare_measure),
            MarkRestore: Handler(self._mark_restore),
        }

    # A section of the state: shards, ledger, and whether a restore is under way.

    def control(self) -> list[Any]:
        """Return what the ledger remembers, and the counts of optimizers that were used."""
        optimizers = self.store.optimizers.items()
        counts = sorted((number, each.count.state) for number, each in optimizers)
        return [
            self.ledger.control(encode), [each for each in counts if any(each[1])],
            self.base, self.is_restoring,
        ]  # fmt: skip

    async def live(self, _: list[memoryview]) -> tuple[int, bool]:
        """Return what snapshots do not have."""
        return self.base, self.is_restoring

    async def restore(self, state: tuple[int, bool], _: Iterator[memoryview]) -> None:
        """Be where the primary was."""
        self.base, self.is_restoring = state

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes entries: the primary has checked whether their clients are served."""
        return {Update: Handler(self._replay)}

    # Shards, created from values that are sent, as copies, or filled with one element.

    def _prepare_shards(self, request: Request[CreateShards]) -> Sequence[memoryview]:
        peer, message = request.peer, request.message
        lengths = request.lengths
        self.check_coordinator(peer)
        shards = self._to_create(message)
        if lengths != tuple(spec.nbytes for spec, source in shards if source is None):
            raise ValueMismatchError(f"{self.task}: initial values do not have the shards' sizes")
        return memory_for(self.pool, sum(lengths))

    def _create_shards(self, request: Request[CreateShards]) -> asyncio.Future[None]:
        message, body = request.message, request.segments
        self.check_coordinator(request.peer)
        shards = self._to_create(message)
        if not body and None in message.sources:
            raise ValueMismatchError(f"{self.task}: no initial values for {len(shards)} shards")
        return self.work.to_the_end(self._fill_shards(shards, *body))

    async def _fill_shards(
        self, shards: Sequence[tuple[ShardSpec, Source]], body: memoryview = NO_BYTES
    ) -> None:
        store, start = self.store, 0
        for spec, source in shards:
            if isinstance(source, np.ndarray):
                store.create(spec, fill=source)
                continue
            if source is not None:
                copy = partial(self._copy, spec, source)
                await self.work.shard_by_shard([spec.nbytes], copy)
                continue
            size = spec.nbytes
            view = body[start : start + size]
            start += size
            if size <= INLINE_BYTES:
                store.create(spec, view)
            elif store.create(spec):
                await self.work.finish(store.assign(spec.key, "assign", view))
                store.shards()[spec.key].version = 0  # it has only begun

    def _copy(self, spec: ShardSpec, source: Key, _: int) -> Work:
        return self.store.copy(spec, source)

    def _to_create(self, message: CreateShards) -> list[tuple[ShardSpec, Source]]:
        """Return each shard, and that of which it is to be a copy, or what each element is."""
        if len(message.sources) != len(message.shards):
            raise RemoteProtocolError(
                f"{self.task}: {len(message.sources)} sources for {len(message.shards)} shards"
            )
        shards: list[tuple[ShardSpec, Source]] = []
        for declared, source in zip(message.shards, message.sources, strict=True):
            name, variable_id, index, offset, shape, dtype = declared
            if min(variable_id, index, offset, *shape) < 0:
                raise RemoteProtocolError(
                    f"{self.task}: negative numbers in the declaration of {name!r}"
                )
            dtype_of(dtype)  # raises for those that no variable has
            spec = ShardSpec(name, variable_id, index, offset, tuple(shape), dtype, self._index)
            if isinstance(source, bytes):
                shards.append((spec, self._filling(spec, source)))
            else:
                shards.append((spec, None if source is None else (source[0], source[1])))
        return shards

    def _filling(self, spec: ShardSpec, data: bytes) -> np.ndarray:
        """Return what all elements of a shard begin as."""
        if len(data) != dtype_of(spec.dtype).itemsize or (spec.dtype == "bool" and data[0] > 1):
            raise ValueMismatchError(
                f"{spec} on {self.task}: expected an element of {spec.dtype}, got {data[:16]!r}"
            )
        return array_from_bytes(data, (), spec.dtype)

    # Optimizers, set from outside.

    def _set_optimizer(self, request: Request[SetOptimizer]) -> None:
        message = request.message
        store, optimizer = self.store, message.optimizer
        store.define_optimizer(optimizer, message.config)
        if message.learning_rate is not None:
            store.set_learning_rate(optimizer, message.learning_rate)
        if message.step >= 0:
            store.set_count(optimizer, message.step)
            self.counted()
        request.answer(OptimizerState(*store.push_count(optimizer).counts))

    def _mark_restore(self, request: Request[MarkRestore]) -> None:
        self.check_coordinator(request.peer)
        if request.message.ended:
            if self.is_restoring and self.base >= 0:
                self.base = self.store.num_updates
            self.is_restoring = False
        elif not self.is_restoring:
            if self.progress is Progress.UPDATED:
                self.base = -1
            self.is_restoring = True
        request.answer(Done())

    @property
    def progress(self) -> Progress:
        """How far the values here have come."""
        if self.is_restoring:
            return Progress.TORN
        return Progress.UPDATED if self.store.num_updates > self.base else Progress.INITIAL

    # Norms: the first round of layer-wise optimizers.

    def _prepare_measure(self, request: Request[MeasurePush]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        known = self._measured(request)
        known.check_lengths(request.lengths, self.task)
        return memory_for(self.pool, known.nbytes)

    def _measured(self, request: Request[MeasurePush]) -> ShardSet:
        plan = self.plans.plan(request.peer.client, request.message.plan)
        return self._look_up(plan)

    def _measure(self, request: Request[MeasurePush]) -> None:
        known = self._measured(request)
        optimizer = known.optimizer
        whole = known.body_of(request.segments, self.task)
        gradients = cast(Sequence[np.ndarray], known.operands(self.store, whole))

        def step() -> int:
            return self.store.push_count(optimizer).next_step(request.message.elsewhere)

        self.store.check_rate(optimizer, step())
        sums: list[Sums] = []

        def begin(i: int) -> Work:
            return self.store.measure(optimizer, known.keys[i], gradients[i], step(), sums)

        def answer() -> None:
            each = zip(known.keys, sums, strict=True)
            request.answer(Measured([(*key, *of_shard) for key, of_shard in each]))

        self.work.serve(request, self.store, known.keys, known.costs, begin, answer)

    # Updates.

    def _prepare_update(self, request: Request[Update]) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        message, client, lengths = request.message, request.peer.client, request.lengths
        known = self.plans.of.get(client, NO_PLANS).get(message.plan)
        try:
            if known is None:
                known = self.plans.plan(client, message.plan)
            if known.store is not self.store:
                self._look_up(known)
            if lengths != known.lengths or message.rows is not None:
                known.check_lengths(lengths, self.task, message.rows)
        except Exception as exc:
            self._refused(request, known, exc)
            raise
        request.token = known
        nbytes = known.nbytes if message.rows is None else sum(lengths)
        if known.group is not None:
            key = known.optimizer, client, message.sequence
            self.sync.reserve(key, message.local_step, nbytes, known.group)
        if message.rows is not None:
            return memory_for(self.pool, nbytes, varies=True)
        if request.borrowed is not None and known.optimizer >= 0:
            is_alone = self.executor.log.state is LogState.ALONE
            return body_in_place(request, self.pool, known, nbytes, is_alone=is_alone)
        if nbytes < ABOVE_BYTES:
            return (np.empty(nbytes, np.uint8).data,)
        return memory_for(self.pool, nbytes)

    def _look_up(self, known: ShardSet) -> ShardSet:
        if known.says.variable_set:
            self.sync.define(known)
        return known.look_up(self.store)

    def _refused(self, request: Request[Any], known: ShardSet | None, error: Exception) -> None:
        """Note that a message was refused before it was judged: no cut waits for it."""
        # It comes again; or the ledger does not know it.
        if isinstance(error, PlanForgotten) or (known is not None and known.says.variable_set):
            return
        self.ledger.refuse(request.peer.client, request.message.sequence)
        self.gate.wake()

    def _arrived(self, request: Request[Update]) -> None:
        message, store = request.message, self.store
        known: ShardSet | None = request.token
        body = request.segments
        client = request.peer.client
        if known is None:  # nothing has come in
            known = self.plans.of.get(client, NO_PLANS).get(message.plan)
        try:
            # While the body came in a timeline may have ended.
            if known is None or known.store is not store:
                known = self.plans.plan(client, message.plan)
                self._look_up(known)
            if known.followed:
                body = ()
            elif message.rows is not None or len(body) != 1 or len(body[0]) != known.nbytes:
                body = known.body_of(body, self.task, message.rows)
        except Exception as exc:
            self._refused(request, known, exc)
            raise
        if known.group is not None:
            request.token, request.nbytes = known, 0  # it only waits; the part is in the budget
            self.sync.took(request, self.sync.part(known, client, message, body))
            return
        update = PsUpdate(request, client, message, known, known.wanted, body, store)
        self._admit(update)

    def _replay(self, request: Request[Update]) -> None:
        """Execute an entry: it was admitted on the primary, and nobody gets values here."""
        known = self.plans.plan(request.peer.client, request.message.plan)
        if known.store is not self.store:
            self._look_up(known)
        if known.says.variable_set:
            self.sync.replay(request, known)
            return
        client, message, body = request.peer.client, request.message, request.segments
        update = PsUpdate(request, client, message, known, None, body, self.store)
        self._submit(update)

    # Admission: nothing is noted of an update that waits, which has not begun.

    def _admit(self, update: PsUpdate) -> None:
        gate, locks, needed = self.gate, self.locks, update.known.needed
        locked: Claim | None = None
        must_wait = gate.cut > 0 and gate.holds(update.client, update.message.sequence)
        if update.message.lock:
            locks.check(update.client, update.message.lock, needed)
            if must_wait:  # nobody else gets the lock before this is done, even if its holder dies
                locked = locks.begin(needed)
        elif locks.num_exclusive and locks.blocks(needed):
            must_wait = True
        if must_wait:  # it is applied even if its request is given up
            gate.arrived(update.client, update.message.sequence)
            self._carry(update.request, self._when_admitted(update, locked))
        else:
            self._submit(update)

    def _carry(self, _: Request[Any], waiting: Coroutine[Any, Any, None]) -> None:
        self.work.to_the_end(waiting)

    async def _when_admitted(self, update: PsUpdate, locked: Claim | None) -> None:
        message = update.client, update.message.sequence
        try:
            while True:
                if locked is None and self.locks.blocks(update.known.needed):
                    claim = self.locks.claim(update.known.needed)
                    self.gate.waits_for_lock(*message, waits=True)
                    try:
                        await self.locks.turn(claim)
                        if not self.gate.holds(*message):
                            self._submit(update)
                            return
                    finally:
                        self.locks.end(claim)
                        self.gate.waits_for_lock(*message, waits=False)
                elif not self.gate.holds(*message):
                    self._submit(update)
                    return
                await self.gate.turn(*message)
        except Exception as exc:
            update.request.fail(exc)
        finally:
            if locked is not None:
                self.locks.end(locked)
            self.gate.passed(*message)

    def _submit(self, update: PsUpdate) -> None:
        if self.executor.log.state is not LogState.ALONE:
            update.body = owned(self.pool, update.body)
            self.plans.keep(update.client, update.known)
        self.executor.submit(
            update.request, update.message, update.body, partial(self._judge, update),
            partial(self._claim, update),
        )  # fmt: skip

    def _claim(self, update: PsUpdate) -> Callable[[], None]:
        """An update takes longer than a turn: it is under way for cuts, and for who locks."""
        claim = self.locks.begin(update.known.needed)
        self.gate.began()

        def ended() -> None:
            self.locks.end(claim)
            self.gate.ended()

        return ended

    # In log order.

    def _judge(self, update: PsUpdate) -> Compute:
        message, known = update.message, update.known
        try:
            ticket = self.ledger.judge(
                update.client, message.sequence, message.acked_below,
                message.closure if message.closure >= 0 else None, message.ordinal,
                known.digest, known.names, message.spread or (), arrived=True,
            )  # fmt: skip
            if not ticket.first and not ticket.recorded:
                self.ledger.record(ticket, Pushed("duplicate", 0))
            if ticket.recorded:
                return self._answering(update, ticket)
            update.begin(self._index, self.ledger)
        except Exception:
            self.ledger.refuse(update.client, message.sequence)
            self.gate.wake()
            raise
        if update.known.is_push:
            counted, elsewhere = self.store.optimizers[known.optimizer].count.answer()
            answer = Pushed("accepted", counted, None, elsewhere)
            if message.place == HOME and len(update.others) < self.num_others:
                self.counted()
            self.staleness.note(update.client[0], known.optimizer, update.step)
            self.pushes += 1
        else:
            answer = Pushed("accepted", 0)
            self.assigns += 1
        self.ledger.record(ticket, answer)
        at_once = update.whole
        if update.runs and known.says.raised is None:
            at_once = partial(
                update.store.apply_at_once, known.optimizer, known.plan,
                update.operands,  # type: ignore[arg-type]  # there are runs, so none of rows
                update.step,
            )  # fmt: skip
        return Compute(
            known.needed, partial(self._applied, update, ticket), update.nbytes, at_once,
            partial(self.work.shard_by_shard, update.costs, update.work),
        )  # fmt: skip

    def _applied(self, update: PsUpdate, ticket: Ticket) -> None:
        """All shards have it, and nobody was told yet."""
        if self.gate.cut:
            self.gate.wake()
        if self.store.failures and update.known.is_push:
            failed = self.store.take_failure(update.known.optimizer, update.step)
            if failed is not None:
                ticket.failure = encode(failure_of(failed))
                raise failed
        if update.wanted is None:
            update.request.answer(ticket.answer)
        else:
            self._answer(update, ticket.answer)

    def _answer(self, update: PsUpdate, answer: Pushed) -> None:
        """Answer, with the values that were asked for if no shard is busy."""
        read = None if update.wanted is None else self.pulls.read_now(update.wanted)
        if read is None:
            update.request.answer(answer)
            return
        brought = Pushed(answer.outcome, answer.step, self.pulls.closed.steps, answer.elsewhere)
        update.request.answer(brought, read)

    def _answering(self, update: PsUpdate, ticket: Ticket) -> Compute:
        """Return what answers once the shards are as an earlier update has left them.

        That may not be applied yet.
        """

        def done() -> None:
            failure = self.ledger.failure_of(ticket)
            if failure is not None:
                raise exception_of(cast(Failure, decode(failure)), self.task)
            self._answer(update, ticket.answer)

        return Compute(update.known.needed, done)
