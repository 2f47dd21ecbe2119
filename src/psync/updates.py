"""A push or assign that has come in: whose it is, what it changes, and how, shard by shard.

Layer: L3. Imports: blocks, store, ledger, specs, wire.

Joins what the message says with what the store and the ledger know. It decides nothing
about time: ``ps_task`` says when to judge, begin and work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from psync.blocks import bytes_of
from psync.ledger import Client, Ledger, Verdict
from psync.specs import ShardSpec, dtype_of
from psync.store import AssignOp, Key, ShardStore, Work
from psync.wire.messages import Assign, Push


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

    def cut(self, body: memoryview) -> list[memoryview]:
        """Return the part of each shard in a body."""
        return [body[start:end] for start, end in self.bounds]


@dataclass(slots=True, eq=False)
class Update:
    """A push or assign that has come in whole, and what it is applied to."""

    client: Client
    message: Push | Assign
    known: ShardSet
    body: memoryview  # of all shards, one after the other
    store: ShardStore  # both stay the same, even if a new coordinator
    ledger: Ledger  # empties the task while the update is under way
    step: int = 0
    operands: Sequence[np.ndarray] = ()  # the views as arrays, checked; one per shard

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
            if known.dtype is not None and optimizer in known.optimizers:
                array = bytes_of(self.body).view(known.dtype)
                self.operands = [array[part] for part in known.elements]
            else:
                parts = zip(known.keys, known.cut(self.body), strict=True)
                self.operands = [store.check_apply(optimizer, *part) for part in parts]
                known.optimizers.add(optimizer)
            self.step = store.begin_push(optimizer, message.step)
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
        message, key, operand = self.message, self.known.keys[position], self.operands[position]
        if isinstance(message, Push):
            return self.store.apply_checked(message.optimizer, key, operand, self.step)
        return self.store.assign_checked(key, cast(AssignOp, message.op), operand)
