"""Pulls on a ps: whole shards, with or without a lock, and single rows.

One object serves one timeline of one coordinator, with its store. Whole shards are answered with
their own memory, or with their values in 16 bits (``numerics.compression``). Rows are gathered into
one buffer, of a bounded size; a range of rows is answered with the shard's memory, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from psync.errors import BusyError, RemoteProtocolError, UsageError
from psync.net.connection import Handler, Request
from psync.numerics.compression import WIDE, narrow_dtype, round_blocks
from psync.numerics.memory import BlockPool, bytes_of
from psync.numerics.sums import PIECE_BYTES
from psync.ps import cooperative_work
from psync.ps.admission import PsLocks
from psync.ps.cooperative_work import LongWork
from psync.ps.plans import NO_BYTES, NO_PLANS, ROW_NUMBER_BYTES, Plans, ShardSet, memory_for
from psync.store.store import Key, ShardStore, Work
from psync.wire.codec import Message
from psync.wire.frames import Segment
from psync.wire.limits import Limits
from psync.wire.messages import Pulled, Read
from psync.wire.tensors import Joined


class Closed(Protocol):
    """Knows the synchronous steps that were applied here: ``sync.staging``."""

    steps: list[tuple[int, int]]  # (group, step); the same list until there is another one


MAX_NUMBER = 1 << 62


@dataclass(slots=True, eq=False)
class WantedRows:
    """Rows of one shard that were asked for, and where they are gathered."""

    key: Key
    rows: Any  # int64, or a range
    nbytes: int
    start: int  # in the memory for all that is gathered; -1: they lie side by side


class PsPulls:
    """Serves pulls.

    Args:
        task: Name of the ps.
        store: Its shards.
        work: What takes long.
        closed: Has the last closed step of each group that has one, which values are of.
        locks: Knows who holds which.
        pool: Memory for row numbers, and for what is gathered or in 16 bits.
        plans: Of all clients.
        limits: Of what a request may make this task hold.
    """

    def __init__(
        self,
        task: str,
        store: ShardStore,
        work: LongWork,
        closed: Closed,
        locks: PsLocks,
        pool: BlockPool,
        plans: Plans,
        limits: Limits,
    ) -> None:
        self.pulls = self.row_pulls = 0  # that were served
        self._task = task
        self._store = store
        self._work = work
        self.closed = closed
        self._locks = locks
        self._pool = pool
        self._plans = plans
        self._limits = limits

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {Read: Handler(self._pull, self._prepare_rows)}

    def _pull(self, request: Request[Read]) -> None:
        message, client = request.message, request.peer.client
        known = self._plans.of.get(client, NO_PLANS).get(message.plan)
        if known is None:
            known = self._plans.plan(client, message.plan)
        if message.lock:
            self._locks.check(client, message.lock, known.keys)
        if message.rows is not None:
            self._pull_rows(request, self._wanted(known, message.rows, request.segments))
            return
        self.pulls += 1
        if known.compression is not None:
            request.start(self._pull_narrow(request, known))
            return
        try:
            if not known.slot:
                if known.store is not self._store:
                    known.look_up(self._store)
                read = self._store.read_together(known.plan)
                values: Sequence[Segment] = Joined.of(read, known.lengths)
            else:
                values = list(map(self._reader(known), known.keys))
        except BusyError:
            request.start(self._pull_later(request, known.keys, self._reader(known)))
        else:
            request.answer(Pulled(self.closed.steps), values)

    def read_now(self, known: ShardSet) -> Sequence[Segment] | None:
        """Return the values that a pull of whole shards would bring; None: one is busy."""
        try:
            views = self._store.read_together(known.plan)
        except BusyError:
            return None
        self.pulls += 1
        return Joined.of(views, known.lengths)

    def _reader(self, known: ShardSet) -> Callable[[Key], list[memoryview]]:
        store = self._store
        if not known.slot:
            return store.read
        return lambda key: store.read_slot(key, known.optimizer, known.slot)

    async def _pull_later(
        self,
        request: Request[Any],
        keys: Sequence[Key],
        read: Callable[[Key], list[memoryview]],
    ) -> None:
        """Read shard by shard: under steady updates never all of them are idle at once."""
        steps = self.closed.steps
        values = [await self._work.when_idle(read, key) for key in keys]
        request.answer(Pulled(steps), values)

    async def _pull_narrow(self, request: Request[Any], known: ShardSet) -> None:
        """Read shard by shard, then round what was read: that stays as it is meanwhile."""
        if known.slot:
            raise RemoteProtocolError(f"{self._task}: slots are not pulled compressed")
        assert known.compression is not None, "it was looked at"
        steps, dtype = self.closed.steps, narrow_dtype(known.compression)
        specs = known.look_up(self._store).specs
        read = [await self._work.when_idle(self._store.read, key) for key in known.keys]
        segments: list[Segment] = []
        done = 0
        for spec, blocks in zip(specs, read, strict=True):
            if not known.is_narrow(spec):
                segments.append(blocks)
                continue
            (memory,) = memory_for(self._pool, spec.size * dtype.itemsize)
            wide = [bytes_of(block).view(WIDE) for block in blocks]
            for nbytes in round_blocks(wide, bytes_of(memory).view(dtype)):
                done += nbytes
                if done >= PIECE_BYTES:
                    done = 0
                    await asyncio.sleep(cooperative_work.PIECE_S)
            segments.append(memory)
        request.answer(Pulled(steps), segments)

    # Rows.

    def _prepare_rows(self, request: Request[Read]) -> Sequence[memoryview]:
        lengths = request.lengths
        counts = [count for _, count, _, _, step in request.message.rows or () if not step]
        if lengths != tuple([count * ROW_NUMBER_BYTES for count in counts]):
            raise RemoteProtocolError(
                f"{self._task}: row numbers in segments of {lengths[:10]} bytes, expected those "
                f"of {counts[:10]} rows"
            )
        return memory_for(self._pool, sum(lengths), varies=True)

    def _pull_rows(self, request: Request[Read], wanted: Sequence[WantedRows]) -> None:
        store = self._store
        self.row_pulls += 1
        nbytes = cost = 0  # of what is gathered
        for one in wanted:
            if one.start >= 0:
                nbytes += one.nbytes
                cost += store.rows_cost(one.key, one.rows)
        (memory,) = memory_for(self._pool, nbytes, varies=True)
        if not self._work.fits_now(store, [one.key for one in wanted], cost):
            request.start(self._pull_rows_slowly(request, wanted, memory))
            return
        segments: list[Segment] = []
        for one in wanted:
            if one.start < 0:
                segments.append(store.read_range(one.key, one.rows.start, one.rows.stop))
                continue
            for _ in _begun(store, one, memory):
                pass
            segments.append(memory[one.start : one.start + one.nbytes])
        request.answer(Pulled(self.closed.steps), segments)

    async def _pull_rows_slowly(
        self, request: Request[Read], wanted: Sequence[WantedRows], memory: memoryview
    ) -> None:
        store, steps = self._store, self.closed.steps
        segments: list[Segment] = []
        for one in wanted:
            if one.start < 0:
                ends = one.rows.start, one.rows.stop
                segments.append(await self._work.when_idle(store.read_range, one.key, *ends))
                continue
            work = await self._work.when_idle(_begun, store, one, memory)
            await self._work.finish(work)
            segments.append(memory[one.start : one.start + one.nbytes])
        request.answer(Pulled(steps), segments)

    def _wanted(
        self, known: ShardSet, parts: Sequence[Sequence[int]], body: Sequence[memoryview]
    ) -> list[WantedRows]:
        """Return what is asked for, all of which exists."""
        store, wanted = self._store, list[WantedRows]()
        at = start = 0
        for place, count, first, stop, step in parts:
            if not 0 <= place < len(known.keys):
                raise RemoteProtocolError(f"{self._task}: the plan has no shard {place}")
            key = known.keys[place]
            rows: np.ndarray | range
            if step:
                if max(map(abs, (first, stop, step))) > MAX_NUMBER:
                    raise RemoteProtocolError(f"{self._task}: row numbers beyond {MAX_NUMBER}")
                rows = range(first, stop, step)
                ends = np.array([rows[0], rows[-1]] if rows else [], np.int64)
                row_bytes = store.check_row_numbers(key, ends)
            else:
                end = at + count * ROW_NUMBER_BYTES
                rows = bytes_of(body[0][at:end] if body else NO_BYTES).view(np.int64)
                at = end
                row_bytes = store.check_row_numbers(key, rows)
            if len(rows) != count:
                raise RemoteProtocolError(f"{self._task}: {len(rows)} rows named, {count} declared")
            nbytes = count * row_bytes
            wanted.append(WantedRows(key, rows, nbytes, -1 if step == 1 else start))
            start += nbytes if step != 1 else 0
        if start > self._limits.gathered_bytes:
            raise UsageError(
                f"{self._task}: {start} bytes of rows asked for at once, at most "
                f"{self._limits.gathered_bytes} are gathered",
                hint="request fewer rows at a time",
            )
        return wanted


def _begun(store: ShardStore, one: WantedRows, memory: memoryview) -> Work:
    rows = one.rows
    if isinstance(rows, range):
        rows = np.arange(rows.start, rows.stop, rows.step)
    target = bytes_of(memory[one.start : one.start + one.nbytes])
    return store.read_rows(one.key, rows, target)
