"""One decoded update on a ps (push, assign or average): validation and effects, shard by shard.

Joins the message with store and ledger. It decides nothing about time: the services say when to
judge, begin and work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from psync.errors import GradientError, RemoteProtocolError, UsageError
from psync.net.peer import Peer
from psync.numerics.blocks import BlockPool, bytes_of, roomy
from psync.specs import ShardSpec, dtype_of
from psync.store.commit_log import LogNames
from psync.store.ledger import Call, Client, Ledger, Verdict
from psync.store.rows import RowValues
from psync.store.store import AssignOp, Key, ShardStore, Work
from psync.wire.codec import Message
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.lock_messages import AssignLocked
from psync.wire.ps_messages import Assign, AverageShards, MeasurePush, Pull, Push
from psync.wire.sync_messages import DescribeSet, StagePush
from psync.wire.tensors import to_bytes_view

NO_BYTES = memoryview(b"")

ROW_NUMBER_BYTES = 8

MAX_SETS = 65_536
"""Of one connection. Clients keep far fewer and define numbers anew."""


@dataclass(slots=True)
class ShardSet:
    """Shards that a connection calls by one number, and what a store says of them."""

    keys: tuple[Key, ...]
    store: ShardStore | None = None  # the one that the rest was read from
    specs: Sequence[ShardSpec] = ()
    names: Sequence[str] = ()  # of the variables
    lengths: tuple[int, ...] = ()  # bytes of each shard
    bounds: Sequence[tuple[int, int]] = ()  # where each one lies in a body
    nbytes: int = 0
    digest: int = 0
    dtype: np.dtype | None = None  # of all shards, or None: they differ, or are bool
    elements: Sequence[slice] = ()  # where each one lies in a body, in elements of ``dtype``
    optimizers: set[int] = field(default_factory=set)  # that all shards may be pushed to with

    def look_up(self, store: ShardStore) -> ShardSet:
        """Read the shards' sizes, once for all messages of the connection.

        Raises:
            UnknownVariableError: A shard is not there.
        """
        if self.store is not store:
            self.specs = [store.spec(key) for key in self.keys]
            self.names = [spec.variable for spec in self.specs]
            self.lengths = tuple(spec.nbytes for spec in self.specs)
            ends = list(itertools.accumulate(self.lengths))
            self.bounds = list(zip([0, *ends], ends, strict=False))
            self.nbytes = sum(self.lengths)
            self.digest = hash(self.keys)  # of integers: the same in every process
            self._look_up_dtype()
            self.optimizers = set()
            self.store = store
        return self

    def _look_up_dtype(self) -> None:
        names = {spec.dtype for spec in self.specs}
        self.dtype = None
        if len(names) == 1 and names != {"bool"}:  # bytes of a bool are checked one by one
            self.dtype = dtype_of(names.pop())
            size = self.dtype.itemsize
            self.elements = [slice(start // size, end // size) for start, end in self.bounds]

    def check_lengths(
        self, lengths: Sequence[int], task: str, rows: Sequence[int] | None = None
    ) -> None:
        """Check the sizes of a body's segments on the ps ``task``.

        Args:
            lengths: As they were declared.
            task: Name of the ps.
            rows: As for ``lengths_with``, or None where all shards are whole.

        Raises:
            GradientError: They are not those of the shards, or rows.
        """
        if rows is not None:
            self._check_row_lengths(lengths, task, rows)
            return
        if lengths == self.lengths:
            return
        for spec, expected, length in zip(self.specs, self.lengths, lengths, strict=False):
            if expected != length:
                raise GradientError(
                    f"{spec} on {task}: expected shape {spec.shape} {spec.dtype} "
                    f"({expected} bytes), got {length} bytes"
                )
        raise GradientError(f"{task}: {len(lengths)} arrays for {len(self.specs)} shards")

    def _check_row_lengths(self, lengths: Sequence[int], task: str, rows: Sequence[int]) -> None:
        expected = self.lengths_with(rows)
        if lengths == expected:
            return
        for spec, count, right, length in zip(self.specs, rows, expected, lengths, strict=False):
            if right != length:
                what = f"{count} rows" if count >= 0 else f"shape {spec.shape} {spec.dtype}"
                raise GradientError(
                    f"{spec} on {task}: expected {what} ({right} bytes), got {length} bytes"
                )
        raise GradientError(f"{task}: {len(lengths)} arrays for {len(self.specs)} shards")

    def lengths_with(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the segments of a body that has only some rows of some shards.

        Args:
            rows: For each shard their number, or -1 for the whole shard.

        Raises:
            GradientError: They are not of these shards.
        """
        store = self.store
        assert store is not None, "looked up before sizes are asked for"
        if len(rows) != len(self.keys):
            raise GradientError(
                f"{store.task}: {len(rows)} numbers of rows for {len(self.keys)} shards"
            )
        return tuple(
            length if count < 0 else count * (ROW_NUMBER_BYTES + store.row_bytes(key))
            for key, length, count in zip(self.keys, self.lengths, rows, strict=True)
        )

    def body_of(
        self, body: Sequence[memoryview], task: str, rows: Sequence[int] | None = None
    ) -> memoryview:
        """Return a body that has come in, all segments in one.

        Raises:
            GradientError: It is not that of these shards, or rows.
        """
        nbytes = self.nbytes if rows is None else sum(self.lengths_with(rows))
        if not body:  # no segments came, so nobody was asked where to put them
            self.check_lengths((), task)
        elif len(body[0]) == nbytes:
            return body[0]
        raise GradientError(f"{task}: the variables were declared anew meanwhile")

    def gradients(self, store: ShardStore, optimizer: int, body: memoryview) -> list[np.ndarray]:
        """Return each shard's gradient in a body, checked as ``store.check_apply`` does."""
        if self.dtype is not None and optimizer in self.optimizers:
            array = bytes_of(body).view(self.dtype)
            return [array[part] for part in self.elements]
        parts = zip(self.keys, self.cut(body), strict=True)
        gradients = [store.check_apply(optimizer, *part) for part in parts]
        self.optimizers.add(optimizer)
        return gradients

    def row_gradients(
        self, store: ShardStore, optimizer: int, body: memoryview, counts: Sequence[int]
    ) -> list[np.ndarray | RowValues]:
        """Return each shard's gradient in a body of which some are rows; all checked."""
        return self.row_operands(
            store,
            body,
            counts,
            lambda key, part: store.check_apply(optimizer, key, part),
            lambda key: store.check_apply_rows(optimizer, key),
        )

    def row_operands(
        self,
        store: ShardStore,
        body: memoryview,
        counts: Sequence[int],
        check_whole: Callable[[Key, memoryview], np.ndarray],
        check_some: Callable[[Key], None],
    ) -> list[np.ndarray | RowValues]:
        """Return what a body has for each shard.

        Args:
            store: That holds the shards.
            body: Of the size that ``lengths_with`` says.
            counts: As for ``lengths_with``.
            check_whole: Checks what is for a whole shard, and returns it as it is used.
            check_some: Checks that some rows of a shard can be updated.
        """
        operands: list[np.ndarray | RowValues] = []
        start = 0
        for key, count, length in zip(self.keys, counts, self.lengths_with(counts), strict=True):
            part = body[start : start + length]
            start += length
            if count < 0:
                operands.append(check_whole(key, part))
                continue
            check_some(key)
            end = count * ROW_NUMBER_BYTES
            rows = bytes_of(part[:end]).view(np.int64)
            operands.append(RowValues(rows, store.check_rows(key, rows, part[end:])))
        return operands

    def cut(self, body: memoryview) -> list[memoryview]:
        """Return the part of each shard in a body."""
        return [body[start:end] for start, end in self.bounds]


def set_of(
    peer: Peer,
    message: Pull | Push | MeasurePush | Assign | StagePush | DescribeSet,
    task: str,
) -> ShardSet:
    """Return a set, which the connection may be defining, or defining anew, just now.

    Raises:
        RemoteProtocolError: It is not defined.
        UsageError: The connection has defined too many.
    """
    return numbered_set(peer, message.set_id, message.members, task)


def numbered_set(
    peer: Peer, number: int, members: Sequence[tuple[int, int]] | None, task: str
) -> ShardSet:
    """Return the set that a connection calls by a number; see ``set_of``."""
    sets: dict[int, ShardSet] = peer.state.setdefault("sets", {})
    if members is not None:
        if len(sets) >= MAX_SETS and number not in sets:
            raise UsageError(f"{task}: {peer.task} has defined too many sets")
        sets[number] = ShardSet(tuple((key[0], key[1]) for key in members))
    known = sets.get(number)
    if known is None:
        raise RemoteProtocolError(f"{task}: set {number} is not defined")
    return known


def memory_for(pool: BlockPool, nbytes: int, *, varies: bool = False) -> Sequence[memoryview]:
    """Take memory for a body, all segments in one.

    Args:
        pool: Where from.
        nbytes: Size of the body.
        varies: Whether such bodies are of another size each time.
    """
    if varies and nbytes <= SMALL_BODY_BYTES:
        return (to_bytes_view(np.empty(nbytes, np.uint8)),)
    root = pool.take(roomy(nbytes) if varies else nbytes)
    body = to_bytes_view(root)[:nbytes]
    pool.give(root)  # handed out again once the update has let go of it
    return (body,)


@dataclass(slots=True, eq=False)
class Update:
    """A push, assign or average that has come in whole, and what it is applied to."""

    client: Client
    message: Push | Assign | AverageShards
    known: ShardSet
    body: memoryview  # of all shards, one after the other; of averages nothing
    store: ShardStore  # both stay the same, even if a new coordinator
    ledger: Ledger  # empties the task while the update is under way
    needed: Sequence[Key]  # the shards that it reads or changes
    wanted: Sequence[Key] = ()  # whose values its answer brings
    step: int = 0
    operands: Sequence[np.ndarray | RowValues] = ()  # the views as arrays, checked; one per shard
    followed: Sequence[Key] = ()  # by the averages: one per shard
    costs: Sequence[int] = ()  # bytes that the update of each shard touches

    def entry(self, names: LogNames) -> Message:
        """Return it as the log has it: its set by a number of the log's own, and no lock."""
        message = self.message
        if isinstance(message, AverageShards):
            return message
        number, members = names.of_set(self.known.keys)
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
        message = self.message
        return self.ledger.judge(
            self.client, message.sequence, message.acked_below,
            message.closure if message.closure >= 0 else None, message.ordinal,
            self.known.digest, self.known.names, message.spread or (),
        )  # fmt: skip

    def begin(self) -> None:
        """Check the whole update before any of it is applied, and draw its step."""
        message, store, known = self.message, self.store, self.known
        self.costs = known.lengths
        if not isinstance(message, AverageShards) and message.rows is not None:
            self._begin_rows(message, message.rows)
        elif isinstance(message, Push):
            optimizer = message.optimizer
            self._check_ratios(message)
            self.operands = known.gradients(store, optimizer, self.body)
            self.step = store.begin_push(optimizer, message.step)
        elif isinstance(message, AverageShards):
            if not 0 <= message.decay < 1:
                raise GradientError(
                    f"moving average: expected decay in [0, 1), got {message.decay}"
                )
            self.followed = [(variable, index) for _, variable, index in message.shards]
            self.needed = (*known.keys, *self.followed)
            for average, key in zip(known.keys, self.followed, strict=True):
                store.check_average(average, key)
        else:
            parts = zip(known.keys, known.cut(self.body), strict=True)
            self.operands = [store.check_assign(key, message.op, view) for key, view in parts]

    def _begin_rows(self, message: Push | Assign, counts: Sequence[int]) -> None:
        known, store = self.known, self.store
        if isinstance(message, Push):
            optimizer = message.optimizer
            self.operands = known.row_gradients(store, optimizer, self.body, counts)
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
            for key, operand, length in zip(known.keys, self.operands, known.lengths, strict=True)
        ]
        if isinstance(message, Push):
            self.step = store.begin_push(message.optimizer, message.step)

    def _check_ratios(self, message: Push) -> None:
        ratios = message.ratios
        if ratios is None:
            return
        if len(ratios) != len(self.known.keys) or not self.store.is_layerwise(message.optimizer):
            raise UsageError(
                f"{self.store.task}: {len(ratios)} trust ratios for {len(self.known.keys)} shards "
                f"and optimizer {message.optimizer}"
            )

    def at_once(self) -> None:
        """Do all the work; for small shards, none of which is busy."""
        message, keys = self.message, self.known.keys
        if isinstance(message, Push) and message.rows is None and message.ratios is None:
            wholes = cast(Sequence[np.ndarray], self.operands)
            self.store.apply_at_once(message.optimizer, keys, wholes, self.step)
            return
        for position in range(len(keys)):
            for _ in self.work(position):
                pass

    def work(self, position: int) -> Work:
        """Begin on one shard."""
        message, key = self.message, self.known.keys[position]
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
