"""One decoded update on a ps (push, assign or average): validation and effects, shard by shard.

Joins the message with store and ledger. It decides nothing about time: the services say when to
judge, begin and work.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from psync.errors import UsageError, ValueMismatchError
from psync.net.connection import Request
from psync.numerics.common_blocks import Adjacent
from psync.ps.cooperative_work import SHARD_BYTES
from psync.ps.shard_sets import Body, ShardSet
from psync.store.commit_log import LogNames
from psync.store.ledger import Call, Client, Ledger, Verdict
from psync.store.push_counts import HOME
from psync.store.rows import RowValues
from psync.store.shard import nothing
from psync.store.store import AssignOp, Key, ShardStore, Work, ones
from psync.wire.codec import Message
from psync.wire.messages import Assign, AssignLocked, AverageShards, Push

_PS = operator.itemgetter(0)


@dataclass(slots=True, eq=False)
class Update:
    """A push, assign or average that has come in whole, and what it is applied to."""

    request: Request[Any]  # gets the answer
    client: Client
    message: Push | Assign | AverageShards
    known: ShardSet
    body: Body  # of averages nothing
    store: ShardStore  # both stay the same, even if a new coordinator
    ledger: Ledger  # empties the task while the update is under way
    needed: Sequence[Key]  # the shards that it reads or changes
    wanted: ShardSet | None = None  # whose values its answer brings
    step: int = 0
    others: tuple[int, ...] = ()  # the other ps tasks with a part of a push that is counted here
    operands: Sequence[np.ndarray | RowValues] = ()  # the views as arrays, checked; one per shard
    raised: tuple[Key, np.ndarray] | None = None  # a shard, and the one that is added to it
    followed: Sequence[Key] = ()  # by the averages: one per shard
    runs: Sequence[slice] = ()  # of shards that are updated together; (): each by itself
    costs: Sequence[int] = ()  # bytes that the update of each run or shard touches

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
        if isinstance(message, Push) and message.raised is not None:
            self._check_raised((message.raised[0], message.raised[1]))
        self.costs = known.costs
        if not isinstance(message, AverageShards) and message.rows is not None:
            self._begin_rows(message, message.rows, here)
        elif isinstance(message, Push):
            optimizer = message.optimizer
            self._check_ratios(message)
            self.operands = known.gradients(store, optimizer, self.body)
            self._draw_step(message, here)
            if isinstance(self.operands, Adjacent) and message.ratios is None:
                if store.has_bundles(optimizer):
                    self.runs, self.costs = known.runs, known.run_costs
        elif isinstance(message, AverageShards):
            if not 0 <= message.decay < 1:
                raise ValueMismatchError(
                    f"moving average: expected decay in [0, 1), got {message.decay}"
                )
            self.followed = [(variable, index) for _, variable, index in message.shards]
            self.needed = (*known.keys, *self.followed)
            for average, key in zip(known.keys, self.followed, strict=True):
                store.check_average(average, key)
        else:
            parts = zip(known.keys, known.cut(self.body), strict=True)
            self.operands = [store.check_assign(key, message.op, view) for key, view in parts]
        if self.raised is not None:
            self.costs = (*self.costs, self.raised[1].nbytes)

    def _draw_step(self, message: Push, here: int) -> None:
        if message.place == HOME and message.spread:
            others = {
                *map(_PS, message.spread)
            }  # each may get several messages, and so may this ps
            others.discard(here)
            self.others = tuple(sorted(others))
        self.step = self.store.begin_push(
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

    def _begin_rows(self, message: Push | Assign, counts: Sequence[int], here: int) -> None:
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
            for key, operand, length in zip(known.keys, self.operands, known.costs, strict=True)
        ]
        if isinstance(message, Push):
            self._draw_step(message, here)

    def _check_ratios(self, message: Push) -> None:
        ratios = message.ratios
        if ratios is None:
            return
        if len(ratios) != len(self.known.keys) or not self.store.is_layerwise(message.optimizer):
            raise UsageError(
                f"{self.store.task}: {len(ratios)} trust ratios for {len(self.known.keys)} shards "
                f"and optimizer {message.optimizer}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that all of it touches, less what shards do not cost that are updated together."""
        together = len(self.known.keys) - len(self.runs) if self.runs else 0
        return sum(self.costs) - SHARD_BYTES * together

    def at_once(self) -> None:
        """Do all the work; for small shards, none of which is busy."""
        message, keys, done = self.message, self.known.keys, 0
        if isinstance(message, Push) and message.rows is None and message.ratios is None:
            self.store.apply_at_once(message.optimizer, keys, self.operands, self.step)  # type: ignore[arg-type]
            done = len(self.runs or keys)
        for position in range(done, len(self.costs)):
            for _ in self.work(position):
                pass

    def _run_at_once(self, run: slice) -> Work:
        """Do the work on small shards when all are idle; nothing is left to be done."""
        assert isinstance(self.message, Push), "of others there are no runs"
        keys, optimizer = self.known.keys[run], self.message.optimizer
        self.store.check_idle(keys)  # before any of them is changed
        self.store.apply_at_once(optimizer, keys, cast(Adjacent, self.operands)[run], self.step)
        return nothing()

    def work(self, position: int) -> Work:
        """Begin on one shard, or run of shards."""
        if self.raised is not None and position == len(self.runs or self.known.keys):
            raised, one = self.raised
            return self.store.assign_checked(raised, "add", one)
        if self.runs:
            run = self.runs[position]
            if run.stop - run.start > 1:
                return self._run_at_once(run)
            position = run.start
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
