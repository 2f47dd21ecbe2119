"""A push, assign or average that has come in whole: what it changes, shard by shard.

Layer: L3. Imports: errors, specs, blocks, store, ledger, rpc, wire.

Joins what the message says with what the store and the ledger know. It decides nothing
about time: ``ps_task`` says when to judge, begin and work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from psync.blocks import BlockPool, bytes_of
from psync.errors import GradientError, RemoteProtocolError, UsageError
from psync.ledger import Client, Ledger, Verdict
from psync.rpc import Peer
from psync.specs import ShardSpec, dtype_of
from psync.store import AssignOp, Key, ShardStore, Work
from psync.wire.messages import Assign, AverageShards, Contribute, Pull, Push, StagePush
from psync.wire.tensors import to_bytes_view

NO_BYTES = memoryview(b"")

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

    def check_lengths(self, lengths: Sequence[int], task: str) -> None:
        """Check the sizes of a body's segments on the ps ``task``.

        Raises:
            GradientError: They are not those of the shards.
        """
        if lengths == self.lengths:
            return
        for spec, expected, length in zip(self.specs, self.lengths, lengths, strict=False):
            if expected != length:
                raise GradientError(
                    f"{spec} on {task}: expected shape {spec.shape} {spec.dtype} "
                    f"({expected} bytes), got {length} bytes"
                )
        raise GradientError(f"{task}: {len(lengths)} arrays for {len(self.specs)} shards")

    def body_of(self, body: Sequence[memoryview], task: str) -> memoryview:
        """Return a body that has come in, all segments in one.

        Raises:
            GradientError: It is not that of these shards.
        """
        if not body:  # no segments came, so nobody was asked where to put them
            self.check_lengths((), task)
        elif len(body[0]) == self.nbytes:
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

    def cut(self, body: memoryview) -> list[memoryview]:
        """Return the part of each shard in a body."""
        return [body[start:end] for start, end in self.bounds]


def set_of(
    peer: Peer, message: Pull | Push | Assign | StagePush | Contribute, task: str
) -> ShardSet:
    """Return a set, which the connection may be defining, or defining anew, just now.

    Raises:
        RemoteProtocolError: It is not defined.
        UsageError: The connection has defined too many.
    """
    sets: dict[int, ShardSet] = peer.state.setdefault("sets", {})
    if message.members is not None:
        if len(sets) >= MAX_SETS and message.set_id not in sets:
            raise UsageError(f"{task}: {peer.task} has defined too many sets")
        sets[message.set_id] = ShardSet(tuple((key[0], key[1]) for key in message.members))
    known = sets.get(message.set_id)
    if known is None:
        raise RemoteProtocolError(f"{task}: set {message.set_id} is not defined")
    return known


def memory_for(pool: BlockPool, nbytes: int) -> Sequence[memoryview]:
    """Take memory for a body, all segments in one."""
    root = pool.take(nbytes)
    body = to_bytes_view(root)
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
    step: int = 0
    operands: Sequence[np.ndarray] = ()  # the views as arrays, checked; one per shard
    followed: Sequence[Key] = ()  # by the averages: one per shard

    @property
    def needed(self) -> Sequence[Key]:
        """The shards that must be idle while the work begins."""
        return (*self.known.keys, *self.followed) if self.followed else self.known.keys

    def judge(self) -> Verdict:
        """Ask the ledger."""
        message = self.message
        return self.ledger.begin(
            self.client, message.sequence, message.acked_below,
            message.closure if message.closure >= 0 else None, message.ordinal,
            self.known.digest, self.known.names,
        )  # fmt: skip

    def begin(self) -> None:
        """Check the whole update before any of it is applied, and draw its step."""
        message, store, known = self.message, self.store, self.known
        if isinstance(message, Push):
            optimizer = message.optimizer
            self.operands = known.gradients(store, optimizer, self.body)
            self.step = store.begin_push(optimizer, message.step)
        elif isinstance(message, AverageShards):
            if not 0 <= message.decay < 1:
                raise GradientError(
                    f"moving average: expected decay in [0, 1), got {message.decay}"
                )
            self.followed = [(variable, index) for _, variable, index in message.shards]
            for average, key in zip(known.keys, self.followed, strict=True):
                store.check_average(average, key)
        else:
            parts = zip(known.keys, known.cut(self.body), strict=True)
            self.operands = [store.check_assign(key, message.op, view) for key, view in parts]

    def at_once(self) -> None:
        """Do all the work; for small shards, none of which is busy."""
        message, keys = self.message, self.known.keys
        if isinstance(message, Push):
            self.store.apply_at_once(message.optimizer, keys, self.operands, self.step)
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
        if isinstance(message, Push):
            return self.store.apply_checked(message.optimizer, key, operand, self.step)
        return self.store.assign_checked(key, cast(AssignOp, message.op), operand)
