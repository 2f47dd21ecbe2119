"""Plans: what clients do with sets of shards, each by a number of its own; memory of bodies.

A client says once for each connection what it calls by a number (``DefinePlan``), right before the
first message that names it: the definition is there when that is looked at. The number is a digest
of the definition, so it never means anything else, whichever task, incarnation or timeline says it.
A definition is known as soon as it comes. It is also an entry of the log, which waits for no gate
and no lock, so it stands before all entries that name the plan.

    event                        the plans then
    the same number again        nothing changes, and it is no second entry; another definition of
                                 that number is a protocol error
    a connection is lost         stay: the client defines what it uses on the next one
    too many of a client's       the one that was defined first goes. Who names one that is not
                                 there is told (PlanForgotten), and defines it again
    a next incarnation defines   those of the ones before go. Not before that: an update may have
    its first plan               been accepted, and come later in the log
    an update has waited, and    is defined again in the log, in front of the update
    its plan has gone
    a copy for a new backup      all plans go with it, of the moment at which its log begins
    the backup is promoted       it has those of the log; clients define them on their new
                                 connections
    a rollback                   stay, but are made again: what they read from the store as well
    a newer coordinator          all go: nobody is served who has defined them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from psync.errors import FencedError, PlanForgotten, RemoteProtocolError, ValueMismatchError
from psync.net.connection import Request
from psync.numerics.compression import (
    WIDE,
    Compression,
    Widened,
    narrow_dtype,
    split_members,
)
from psync.numerics.memory import ABOVE_BYTES, BLOCK_BYTES, BlockPool, bytes_of, roomy
from psync.numerics.rules import slot_dtype
from psync.ps.cooperative_work import SHARD_BYTES
from psync.specs import ShardSpec, dtype_of
from psync.store.ledger import Client
from psync.store.rows import RowValues
from psync.store.store import Adjacent, Key, Plan, ShardStore, ones
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message, decode
from psync.wire.frames import copies
from psync.wire.messages import DefinePlan, Done
from psync.wire.tensors import cut

NO_BYTES = memoryview(b"")

Body = Sequence[memoryview]
"""Of all shards of a set, one after the other, in pieces: each shard lies in one of them. What is
copied out, and so all that a log has, is one piece; what lies where its sender has it may be
several."""

ROW_NUMBER_BYTES = 8

MAX_PLANS = 16_384
"""Of one client, which uses far fewer at a time."""

_DONE = Done()

NO_PLANS: Mapping[int, Any] = {}


@dataclass(slots=True, eq=False)
class ShardSet:
    """A set of shards, what a client does with it, and what a store says of that.

    Args:
        says: What it does.
        header: The same, as it came.

    Raises:
        RemoteProtocolError: As ``compression.split_members``; or the averages do not follow one
            variable each.
    """

    says: DefinePlan
    header: bytes = b""
    keys: tuple[Key, ...] = field(init=False)
    compression: Compression | None = field(init=False)  # how float32 travels
    optimizer: int = field(init=False)
    is_push: bool = field(init=False)
    others: list[int] = field(init=False)  # as in ``DefinePlan``
    followed: tuple[Key, ...] = ()  # by the averages: one per shard
    wanted: ShardSet | None = None  # whose values an answer brings
    group: SyncConfig | None = None  # of a synchronous push; None: not looked up
    # What the store says.
    store: ShardStore | None = None  # the one that the rest was read from
    specs: Sequence[ShardSpec] = ()
    names: Sequence[str] = ()  # of the variables
    lengths: tuple[int, ...] = ()  # bytes of each shard in a body
    costs: tuple[int, ...] = ()  # bytes of each shard
    bounds: Sequence[tuple[int, int]] = ()  # where each one lies in a body
    nbytes: int = 0
    digest: int = 0
    needed: Sequence[Key] = ()  # shards that an update reads or changes
    one: np.ndarray | None = None  # what is added to the one that is raised
    dtype: np.dtype | None = None  # of all shards, or None: they differ, or are bool
    elements: Sequence[slice] = ()  # where each one lies in a body, in elements of ``dtype``
    plan: Plan = field(default_factory=lambda: Plan(()))  # of all shards
    # Of an elementwise optimizer, for shards of one ``dtype``.
    runs: Sequence[slice] = ()  # of shards that can be updated together
    run_plans: Sequence[Plan] = ()  # of each run
    run_costs: Sequence[int] = ()  # bytes of each run
    cost: int = 0  # of all of them, see ``PsUpdate.nbytes``
    is_checked: bool = False  # whether all shards may be updated so

    def __post_init__(self) -> None:
        says = self.says
        self.compression, self.keys = split_members(says.members)
        self.optimizer = says.optimizer
        self.is_push = says.optimizer >= 0 and not says.slot
        self.others = says.others or []
        if says.follows is not None:
            if len(says.follows) != len(self.keys):
                raise RemoteProtocolError(
                    f"{len(says.follows)} variables for {len(self.keys)} averages"
                )
            indices = [index for _, index in self.keys]
            self.followed = tuple(zip(says.follows, indices, strict=True))
        if says.pull is not None:
            self.wanted = ShardSet(DefinePlan(-1, says.pull))

    def is_narrow(self, spec: ShardSpec) -> bool:
        """Return whether a shard of the set travels compressed."""
        return self.compression is not None and spec.dtype == WIDE

    def look_up(self, store: ShardStore) -> ShardSet:
        """Read what the store says, once for all messages on one timeline.

        Raises:
            UnknownVariableError: A shard is not there.
            ConfigurationError: The optimizer is none, or is known as another one.
            RemoteProtocolError: The group of a synchronous push is not known yet.
            UsageError: It has no such slot.
            ValueMismatchError: What is to be raised is more than one number; or an average does
                not fit what it follows.
        """
        if self.store is not store:
            if self.says.variable_set:
                if self.group is None:
                    raise RemoteProtocolError(f"plan {self.says.plan} is of synchronous pushes")
            elif self.says.config is not None:
                store.define_optimizer(self.optimizer, self.says.config)
            self.specs = [store.spec(key) for key in self.keys]
            self.names = [spec.variable for spec in self.specs]
            self.costs = self.lengths = tuple(spec.nbytes for spec in self.specs)
            if self.says.slot:
                for key in self.keys:
                    store.check_slot(key, self.optimizer, self.says.slot)
                self.lengths = tuple(
                    spec.size * slot_dtype(dtype_of(spec.dtype)).itemsize for spec in self.specs
                )
            elif self.compression is not None:
                size = narrow_dtype(self.compression).itemsize
                self.lengths = tuple(
                    spec.size * size if self.is_narrow(spec) else spec.nbytes for spec in self.specs
                )
            ends = list(itertools.accumulate(self.lengths))
            self.bounds = list(zip([0, *ends], ends, strict=False))
            self.nbytes = sum(self.lengths)
            self.digest = hash(self.keys)  # of integers: the same in every process
            self.plan = Plan(self.keys)
            self.is_checked = False
            self._look_up_others(store)
            self._look_up_dtype(store)
            self.store = store
        return self

    def _look_up_others(self, store: ShardStore) -> None:
        """Read what the store says of other shards than these."""
        if self.wanted is not None:
            self.wanted.look_up(store)
        for average, key in zip(self.keys, self.followed, strict=False):
            store.check_average(average, key)
        self.needed = (*self.keys, *self.followed)
        if self.says.raised is not None:
            spec = store.spec(self.says.raised)
            if spec.size != 1:
                raise ValueMismatchError(
                    f"{spec} on {store.task}: expected one number, to be raised by one, got shape "
                    f"{spec.shape}"
                )
            self.one = store.check_assign(self.says.raised, "add", ones(spec.shape, spec.dtype))
            self.needed = (*self.needed, self.says.raised)

    def _look_up_dtype(self, store: ShardStore) -> None:
        names = {spec.dtype for spec in self.specs}
        self.dtype, self.runs = None, ()
        # Bytes of a bool are checked one by one, what is narrow is widened, slots are wider.
        is_plain = self.compression is None and not self.says.slot
        if len(names) == 1 and names != {"bool"} and is_plain:
            self.dtype = dtype_of(names.pop())
            size = self.dtype.itemsize
            self.elements = [slice(start // size, end // size) for start, end in self.bounds]
            optimizer = store.optimizers.get(self.optimizer)
            if optimizer is not None and optimizer.is_elementwise:
                self.runs = _runs_of(self.costs)
                self.run_plans = [Plan(self.keys[run]) for run in self.runs]
                self.run_costs = [sum(self.costs[run]) for run in self.runs]
                self.cost = sum(self.costs) - SHARD_BYTES * (len(self.keys) - len(self.runs))

    def check_lengths(
        self, lengths: Sequence[int], task: str, rows: Sequence[int] | None = None
    ) -> None:
        """Check the sizes of a body's segments on the ps ``task``.

        Args:
            lengths: As they were declared.
            task: Name of the ps.
            rows: As for ``lengths_with``, or None where all shards are whole.

        Raises:
            ValueMismatchError: They are not those of the shards, or rows.
        """
        expected = self.lengths if rows is None else self.lengths_with(rows)
        if lengths == expected:
            return
        counts = [-1] * len(self.specs) if rows is None else rows
        for spec, count, right, got in zip(self.specs, counts, expected, lengths, strict=False):
            if right != got:
                how = f" as {self.compression}" if rows is None and self.is_narrow(spec) else ""
                what = f"{count} rows" if count >= 0 else f"shape {spec.shape} {spec.dtype}{how}"
                raise ValueMismatchError(
                    f"{spec} on {task}: expected {what} ({right} bytes), got {got} bytes"
                )
        raise ValueMismatchError(f"{task}: {len(lengths)} arrays for {len(self.specs)} shards")

    def lengths_with(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the segments of a body that has only some rows of some shards.

        Args:
            rows: For each shard their number, or -1 for the whole shard.

        Raises:
            ValueMismatchError: They are not of these shards.
        """
        store = self.store
        assert store is not None, "looked up before sizes are asked for"
        if len(rows) != len(self.keys):
            raise ValueMismatchError(
                f"{store.task}: {len(rows)} numbers of rows for {len(self.keys)} shards"
            )
        return tuple(
            length if count < 0 else count * (ROW_NUMBER_BYTES + store.row_bytes(key))
            for key, length, count in zip(self.keys, self.lengths, rows, strict=True)
        )

    def body_of(self, body: Body, task: str, rows: Sequence[int] | None = None) -> Body:
        """Return a body that has come in.

        Raises:
            ValueMismatchError: It is not that of these shards, or rows.
        """
        nbytes = self.nbytes if rows is None else sum(self.lengths_with(rows))
        if not body:  # no segments came, so nobody was asked where to put them
            self.check_lengths((), task)
            return ()
        if sum(map(len, body)) == nbytes and self.fits(list(map(len, body))):
            return body if nbytes else ()
        raise ValueMismatchError(f"{task}: the variables were declared again in the meantime")

    def fits(self, pieces: Sequence[int]) -> bool:
        """Return whether each shard lies in one of pieces of these sizes, of all shards."""
        if len(pieces) <= 1:
            return True
        return {end for _, end in self.bounds}.issuperset(itertools.accumulate(pieces))

    def operands(
        self, store: ShardStore, body: Body, counts: Sequence[int] | None = None
    ) -> Sequence[np.ndarray | RowValues] | Adjacent:
        """Return what a body has for each shard: gradients or values, checked, or parts of slots.

        Args:
            store: That holds the shards.
            body: Of the size that ``lengths_with`` says; with ``counts`` in one piece.
            counts: As for ``lengths_with``; None: all shards are whole.
        """
        if counts is not None:
            return self._row_operands(store, body, counts)
        dtype = self.dtype if len(body) == 1 else None
        if dtype is not None and self.is_checked:
            return Adjacent(np.asarray(body[0]).view(dtype), self.elements)
        parts = zip(self.keys, self.cut(body), strict=True)
        operands = [self._operand(store, *part) for part in parts]
        self.is_checked = True
        return operands if dtype is None else self.operands(store, body)

    def _operand(self, store: ShardStore, key: Key, part: memoryview) -> np.ndarray:
        """Return what is for a whole shard, checked; ``Widened`` is cut as an array is."""
        if not self.is_push:
            return bytes_of(part) if self.says.slot else store.check_assign(key, self.says.op, part)
        if self.compression is None or not self.is_narrow(store.spec(key)):
            return store.check_apply(self.optimizer, key, part)
        store.check_optimizable(self.optimizer, key)
        return cast(np.ndarray, Widened(bytes_of(part).view(narrow_dtype(self.compression))))

    def _row_operands(
        self, store: ShardStore, body: Body, counts: Sequence[int]
    ) -> list[np.ndarray | RowValues]:
        operands: list[np.ndarray | RowValues] = []
        whole, start = body[0] if body else NO_BYTES, 0
        for key, count, length in zip(self.keys, counts, self.lengths_with(counts), strict=True):
            part = whole[start : start + length]
            start += length
            if count < 0:
                operands.append(self._operand(store, key, part))
                continue
            if self.is_push:
                store.check_apply_rows(self.optimizer, key)
            else:
                store.check_scatter(key, self.says.op)
            end = count * ROW_NUMBER_BYTES
            rows = bytes_of(part[:end]).view(np.int64)
            operands.append(RowValues(rows, store.check_rows(key, rows, part[end:])))
        return operands

    def cut(self, body: Body) -> list[memoryview]:
        """Return the part of each shard in a body."""
        if len(body) <= 1:
            whole = body[0] if body else NO_BYTES
            return [whole[start:end] for start, end in self.bounds]
        return [views[0] if views else NO_BYTES for views in cut(body, self.lengths)]


class Plans:
    """What the clients of one ps call by numbers, under one coordinator. Single owner.

    Args:
        task: Name of the ps.

    Attributes:
        of: By client, by number.
        note: Puts a definition into the log.
    """

    def __init__(self, task: str) -> None:
        self.of: dict[Client, dict[int, ShardSet]] = {}
        self.note: Callable[[Client, Message], None] = lambda *_: None
        self._task = task

    def since(self, coordinator: int) -> Plans:
        """Return what those have defined that a coordinator may have started; plans of their own.

        Updates that go on where they began still use these, which hold that store.
        """
        made = Plans(self._task)
        for task, incarnation, header in self.snapshot():
            if incarnation >= coordinator:
                made.restore((task, incarnation), header)
        return made

    def snapshot(self) -> list[tuple[str, int, bytes]]:
        """Return (task, incarnation, definition) of all plans, for a backup."""
        return [
            (*client, plan.header) for client, plans in self.of.items() for plan in plans.values()
        ]

    def restore(self, client: Client, header: bytes) -> ShardSet:
        """Return the plan that is defined so, by what ``snapshot`` has returned elsewhere."""
        message = cast(DefinePlan, decode(header))
        plans = self.of.setdefault(client, {})
        if message.plan not in plans:
            plans[message.plan] = ShardSet(message, header)
        return plans[message.plan]

    def serve(self, request: Request[DefinePlan]) -> None:
        """Know a plan from now on.

        Raises:
            RemoteProtocolError: Its number is that of another one; or it makes no sense.
        """
        self._define(request.peer.client, request.message, request.header)
        request.answer(_DONE)

    def keep(self, client: Client, plan: ShardSet) -> None:
        """What names a plan is to be an entry, and has perhaps waited: define it if it has gone."""
        if self.of.get(client, NO_PLANS).get(plan.says.plan) is not plan:
            self._define(client, decode(plan.header), plan.header)

    def _define(self, client: Client, message: Any, header: bytes) -> None:
        plans = self.of.get(client)
        if plans is None:
            task, incarnation = client
            for other in [c for c in self.of if c[0] == task and c[1] < incarnation]:
                del self.of[other]
            plans = self.of[client] = {}
        known = plans.get(message.plan)
        if known is not None:
            if known.header != header:
                raise RemoteProtocolError(f"{self._task}: plan {message.plan} is another one")
            return
        if len(plans) >= MAX_PLANS:
            del plans[next(iter(plans))]
        plans[message.plan] = ShardSet(message, header)
        self.note(client, message)

    def plan(self, client: Client, number: int) -> ShardSet:
        """Return what a client calls by a number.

        Raises:
            FencedError: A newer incarnation of its task has defined plans.
            PlanForgotten: It is not defined.
        """
        known = self.of.get(client, NO_PLANS).get(number)
        if known is not None:
            return known
        task, incarnation = client
        for other, newer in self.of:
            if other == task and newer > incarnation:
                raise FencedError(
                    f"incarnation {incarnation} of {task} has been replaced by {newer}"
                )
        raise PlanForgotten(f"{self._task}: plan {number} of {task} is not defined")


def _runs_of(sizes: Sequence[int]) -> list[slice]:
    """Return which of a set's shards may be updated together in one turn of the loop.

    Args:
        sizes: Bytes of each.

    Returns:
        All shards, in order: runs of small ones, and others alone.
    """
    runs: list[slice] = []
    nbytes = BLOCK_BYTES  # of the run that could go on
    for place, size in enumerate(sizes):
        small = 0 < size <= ABOVE_BYTES
        if small and nbytes + size <= BLOCK_BYTES:
            runs[-1] = slice(runs[-1].start, place + 1)
            nbytes += size
        else:
            runs.append(slice(place, place + 1))
            nbytes = size if small else BLOCK_BYTES
    return runs


def memory_for(pool: BlockPool, nbytes: int, *, varies: bool = False) -> Sequence[memoryview]:
    """Take memory for a body, all segments in one.

    Args:
        pool: Where from.
        nbytes: Size of the body.
        varies: Whether such bodies are of another size each time.
    """
    if nbytes < ABOVE_BYTES:  # that the pool does not keep, nor anybody else maps
        return (np.empty(nbytes, np.uint8).data,)
    # Handed out again once the update has let go of it.
    return (pool.lend(roomy(nbytes) if varies else nbytes).data[:nbytes],)


def body_in_place(
    request: Request[Any], pool: BlockPool, known: ShardSet, nbytes: int, *, is_alone: bool
) -> Body:
    """As ``memory_for``, but the body itself where it is lent, for this ps alone.

    Its owner could write to it while it is read. Of numbers to be computed with that harms nobody
    else; but a backup must compute with the same ones, see ``owned``.

    Args:
        request: Which is being prepared for.
        pool: Where memory comes from otherwise.
        known: Whose body it is.
        nbytes: Size of the body.
        is_alone: Whether there is no backup.
    """
    lent = request.borrowed
    if lent is None or not is_alone or not known.fits(list(map(len, lent.views))):
        return memory_for(pool, nbytes)
    return lent.keep()


def owned(pool: BlockPool, body: Body) -> Body:
    """Return a body that nobody else can write to: what is lent, which is read-only, copied out."""
    for piece in body:
        if piece.readonly:
            break
    else:
        return body
    memory = memory_for(pool, sum(map(len, body)))
    for _ in copies(memory, body):
        pass
    return memory
