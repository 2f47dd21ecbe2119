"""Pulls on a ps: whole shards, with or without a lock, and single rows.

One object serves one timeline of one coordinator, with its store. Whole shards are answered with
their own memory, or with their values in 16 bits (``numerics.compression``). Rows are gathered into
one buffer, of a bounded size; a range of rows is answered with the shard's memory, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from psync.errors import BusyError, RemoteProtocolError, UsageError
from psync.net.connection import Handler, Request
from psync.net.shielding import in_turns
from psync.numerics.compression import WIDE, narrow_dtype, round_blocks
from psync.numerics.memory import bytes_of
from psync.ps import cooperative_work
from psync.ps.executor import Service
from psync.ps.plans import NO_BYTES, NO_PLANS, ROW_NUMBER_BYTES, ShardSet, memory_for
from psync.store.store import Key, Work
from psync.store.work import DONE
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


@dataclass(eq=False)
class PsPulls(Service):
    """Serves pulls.

    Args:
        closed: Has the last closed step of each group that has one, which values are of.
        limits: Of what a request may make this task hold.
        pulls, row_pulls: How many were served.
    """

    closed: Closed
    limits: Limits
    pulls: int = 0
    row_pulls: int = 0

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {Read: Handler(self._pull, self._prepare_rows)}

    def _pull(self, request: Request[Read]) -> None:
        message, client = request.message, request.peer.client
        known = self.plans.of.get(client, NO_PLANS).get(message.plan)
        if known is None:
            known = self.plans.plan(client, message.plan)
        if message.lock:
            self.locks.check(client, message.lock, known.keys)
        if message.rows is not None:
            self._pull_rows(request, self._wanted(known, message.rows, request.segments))
            return
        if known.compression is not None and known.says.slot:
            raise RemoteProtocolError(f"{self.task}: slots are not pulled compressed")
        if known.store is not self.store:
            known.look_up(self.store)
        values = self.read_now(known)
        if values is None:
            self.pulls += 1
            request.start(self._pull_slowly(request, known))
        else:
            request.answer(Pulled(self.closed.steps), values)

    def read_now(self, known: ShardSet) -> Sequence[Segment] | None:
        """Return what a pull of whole shards would bring; None: it takes longer, or one is busy."""
        if known.compression is not None:
            return None
        try:
            if known.says.slot:
                values: Any = list(map(self._reader(known), known.keys))
            else:
                values = Joined(self.store.read_together(known.plan))
                values.lengths = known.lengths
        except BusyError:
            return None
        self.pulls += 1
        return values  # type: ignore[no-any-return]

    def _reader(self, known: ShardSet) -> Callable[[Key], list[memoryview]]:
        store = self.store
        if not known.says.slot:
            return store.read
        return lambda key: store.read_slot(key, known.optimizer, known.says.slot)

    async def _pull_slowly(self, request: Request[Any], known: ShardSet) -> None:
        """Read shard by shard: under steady updates never all of them are idle at once."""
        steps, reader = self.closed.steps, self._reader(known)
        read = [await self.work.when_idle(reader, key) for key in known.keys]
        values = read if known.compression is None else await self._rounded(known, read)
        request.answer(Pulled(steps), values)

    async def _rounded(
        self, known: ShardSet, read: Sequence[list[memoryview]]
    ) -> Sequence[Segment]:
        """Return what was read as it travels compressed; it stays as it is meanwhile."""
        assert known.compression is not None, "it was looked at"
        dtype = narrow_dtype(known.compression)
        segments: list[Segment] = []

        def rounding() -> Iterator[int]:
            for spec, blocks in zip(known.specs, read, strict=True):
                if not known.is_narrow(spec):
                    segments.append(blocks)
                    continue
                (memory,) = memory_for(self.pool, spec.size * dtype.itemsize)
                wide = [bytes_of(block).view(WIDE) for block in blocks]
                yield from round_blocks(wide, bytes_of(memory).view(dtype))
                segments.append(memory)

        await in_turns(rounding(), cooperative_work.PIECE_S)
        return segments

    # Rows.

    def _prepare_rows(self, request: Request[Read]) -> Sequence[memoryview]:
        lengths = request.lengths
        counts = [count for _, count, _, _, step in request.message.rows or () if not step]
        if lengths != tuple([count * ROW_NUMBER_BYTES for count in counts]):
            raise RemoteProtocolError(
                f"{self.task}: row numbers in segments of {lengths[:10]} bytes, expected those "
                f"of {counts[:10]} rows"
            )
        return memory_for(self.pool, sum(lengths), varies=True)

    def _pull_rows(self, request: Request[Read], wanted: Sequence[WantedRows]) -> None:
        store, steps = self.store, self.closed.steps
        self.row_pulls += 1
        costs = [0 if each.start < 0 else store.rows_cost(each.key, each.rows) for each in wanted]
        nbytes = sum(each.nbytes for each in wanted if each.start >= 0)
        (memory,) = memory_for(self.pool, nbytes, varies=True)
        segments: list[Segment] = []

        def begin(position: int) -> Work:
            one = wanted[position]
            rows = one.rows
            if one.start < 0:
                segments.append(store.read_range(one.key, rows.start, rows.stop))
                return DONE
            if isinstance(rows, range):
                rows = np.arange(rows.start, rows.stop, rows.step)
            part = memory[one.start : one.start + one.nbytes]
            work = store.read_rows(one.key, rows, bytes_of(part))
            segments.append(part)
            return work

        self.work.serve(
            request, store, [one.key for one in wanted], costs, begin,
            lambda: request.answer(Pulled(steps), segments),
        )  # fmt: skip

    def _wanted(
        self, known: ShardSet, parts: Sequence[Sequence[int]], body: Sequence[memoryview]
    ) -> list[WantedRows]:
        """Return what is asked for, all of which exists."""
        store, wanted = self.store, list[WantedRows]()
        at = start = 0
        for place, count, first, stop, step in parts:
            if not 0 <= place < len(known.keys):
                raise RemoteProtocolError(f"{self.task}: the plan has no shard {place}")
            key = known.keys[place]
            rows: np.ndarray | range
            if step:
                if max(map(abs, (first, stop, step))) > MAX_NUMBER:
                    raise RemoteProtocolError(f"{self.task}: row numbers beyond {MAX_NUMBER}")
                rows = range(first, stop, step)
                ends = np.array([rows[0], rows[-1]] if rows else [], np.int64)
                row_bytes = store.check_row_numbers(key, ends)
            else:
                end = at + count * ROW_NUMBER_BYTES
                rows = bytes_of(body[0][at:end] if body else NO_BYTES).view(np.int64)
                at = end
                row_bytes = store.check_row_numbers(key, rows)
            if len(rows) != count:
                raise RemoteProtocolError(f"{self.task}: {len(rows)} rows named, {count} declared")
            nbytes = count * row_bytes
            wanted.append(WantedRows(key, rows, nbytes, -1 if step == 1 else start))
            start += nbytes if step != 1 else 0
        if start > self.limits.gathered_bytes:
            raise UsageError(
                f"{self.task}: {start} bytes of rows asked for at once, at most "
                f"{self.limits.gathered_bytes} are gathered",
                hint="request fewer rows at a time",
            )
        return wanted
