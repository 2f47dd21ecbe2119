"""Pulls of single rows: row numbers grouped by ps, results put into the order of the request.

A row that is requested many times travels once. Rows travel in ascending order, so those of one
shard lie side by side, and a lookup costs one small request to each ps that has some of them;
the answers land one behind the other, and one pass brings the rows into the order in which they
were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from psync.client.ps_link import Body, Call, PsLink, always, copied_to, together
from psync.client.pulled_steps import PulledSteps
from psync.client.work_meter import WorkMeter
from psync.errors import ValueMismatchError
from psync.numerics.memory import BlockPool, roomy
from psync.numerics.rows import IndexedSlices, distinct, merged
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.wire.frames import SMALL_BODY_BYTES
from psync.wire.messages import PullRows, RowsPulled
from psync.wire.tensors import to_bytes_view

ROWS_PER_REQUEST_BYTES = 32 << 20
"""More rows of one ps are asked for in several messages, each of which may see another version."""

PARTS_PER_REQUEST = 4096


class Wanted(NamedTuple):
    """Rows of one shard, and where they belong."""

    shard: ShardSpec
    rows: np.ndarray | range  # local to the shard
    target: memoryview

    @property
    def part(self) -> tuple[int, int, int, int, int, int]:
        """As the wire has it."""
        rows, (variable, index) = self.rows, self.shard.key
        if isinstance(rows, range):
            return (variable, index, len(rows), rows.start, rows.stop, rows.step)
        return (variable, index, len(rows), 0, 0, 0)


class PsRows:
    """What is done row by row, the part of ``PsClient`` that is not concerned with plans."""

    links: list[PsLink]
    work: WorkMeter
    _pool: BlockPool

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with any contents, whose memory is used again once nobody holds it."""
        nbytes = math.prod(shape) * dtype.itemsize
        array: np.ndarray = np.ndarray(shape, dtype, self._pool.lend(roomy(nbytes)))
        return array

    def in_order(
        self, gradients: Sequence[np.ndarray | IndexedSlices]
    ) -> list[np.ndarray | IndexedSlices]:
        """Return the same gradients; those of rows with ascending indices, each once."""
        if IndexedSlices not in map(type, gradients):
            return list(gradients)
        ordered: list[np.ndarray | IndexedSlices] = []
        for gradient in gradients:
            if isinstance(gradient, IndexedSlices):
                rows, values = merged(gradient.indices, gradient.values, "add", self.empty)
                if rows is not gradient.indices:
                    gradient = IndexedSlices(values, rows)
            ordered.append(gradient)
        return ordered

    async def read_rows(
        self,
        spec: VariableSpec,
        rows: np.ndarray,
        *,
        seen: PulledSteps | None = None,
    ) -> np.ndarray:
        """Return some rows of a variable. Each row is one version of itself, never a torn one.

        Rows of one shard are of one version as long as they are not more than 32 MiB.

        Args:
            spec: Of the variable.
            rows: int64, 1-D, each in [0, number of rows), in any order; duplicates travel once.
            seen: Notes which steps of synchronous groups the values are of.

        Returns:
            Shape (number of rows asked for, *shape of a row); writable, the caller's own.

        Raises:
            ValueMismatchError: There is no such row.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        check_exist(spec, rows)
        dtype = dtype_of(spec.dtype)
        # A ps gathers in any order; rows of several are cut at the shards, so they must ascend.
        each, inverse = distinct(rows, sort=len(spec.shards) > 1)
        made = self.empty((len(rows), *spec.shape[1:]), dtype)
        landed = made if inverse is None else self.empty((len(each), *spec.shape[1:]), dtype)
        await self._read(_parts_of(spec, each, landed), seen)
        if inverse is not None:
            landed.take(inverse, 0, made, "clip")
        return made

    async def read_range(
        self,
        spec: VariableSpec,
        start: int,
        stop: int,
        step: int = 1,
        *,
        seen: PulledSteps | None = None,
    ) -> np.ndarray:
        """Return the rows ``range(start, stop, step)`` of a variable; else as ``read_rows``.

        Args:
            spec: Of the variable.
            start: As for ``range``.
            stop: Likewise.
            step: Likewise; not 0.
            seen: As for ``read_rows``.

        Raises:
            ValueMismatchError: There is no such row.
            ParameterServerLost: A ps is gone.

        Cancellation: Safe.
        """
        rows = range(start, stop, step)
        check_exist(spec, np.array([rows[0], rows[-1]] if rows else [], np.int64))
        made = self.empty((len(rows), *spec.shape[1:]), dtype_of(spec.dtype))
        await self._read(_runs_of(spec, rows, made), seen)
        return made

    async def _read(self, wanted: Sequence[Wanted], seen: PulledSteps | None) -> None:
        messages = _messages_of(wanted)
        if not messages:
            return
        calls = []
        for parts in messages:
            lengths = tuple([len(one.target) for one in parts])
            targets = [one.target for one in parts if one.target]
            body = Body(lengths, copied_to(targets), "the rows")
            numbers = [to_bytes_view(one.rows) for one in parts if isinstance(one.rows, np.ndarray)]
            message = PullRows([one.part for one in parts], -1, "")
            bulk = max(sum(lengths), sum(map(len, numbers))) > SMALL_BODY_BYTES
            link = self.links[parts[0].shard.ps]
            calls.append(
                Call(link, always(message), RowsPulled, "a pull of rows", numbers, bulk, body)
            )
        with self.work.pull:
            answers = await together(calls)
        if seen is not None:
            for pulled in answers:
                seen.note(pulled.steps)


def check_exist(spec: VariableSpec, rows: np.ndarray) -> None:
    """Check that a variable has these rows.

    Raises:
        ValueMismatchError: It has not.
    """
    if not len(rows):
        return
    count = spec.shape[0] if spec.shape else 0
    lowest, highest = int(rows.min()), int(rows.max())
    if lowest < 0 or highest >= count:
        raise ValueMismatchError(
            f'variable "{spec.name}": row {lowest if lowest < 0 else highest} does not exist, '
            + (f"it has {count}" if spec.shape else "a scalar has no rows")
        )


def _messages_of(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Return what is asked for in one message each: of one ps, and not too much."""
    messages: list[list[Wanted]] = []
    open_ones: dict[int, tuple[list[Wanted], int]] = {}  # by ps: the last message and its size
    for one in wanted:
        ps, nbytes = one.shard.ps, len(one.target)
        parts, size = open_ones.get(ps, ([], 0))
        if not parts or size + nbytes > ROWS_PER_REQUEST_BYTES or len(parts) >= PARTS_PER_REQUEST:
            parts, size = [], 0
            messages.append(parts)
        parts.append(one)
        open_ones[ps] = parts, size + nbytes
    return messages


def _parts_of(spec: VariableSpec, rows: np.ndarray, made: np.ndarray) -> list[Wanted]:
    """Return what is wanted of which shard.

    Args:
        spec: Of the variable.
        rows: Each once; of more than one shard: ascending.
        made: Where they belong.
    """
    ends = [*rows.searchsorted([shard.offset for shard in spec.shards[1:]]).tolist(), len(rows)]
    bounds = list(zip([0, *ends], ends, strict=False))
    return _cut(spec, bounds, made, lambda shard, part: rows[part] - shard.offset)


def _runs_of(spec: VariableSpec, rows: range, made: np.ndarray) -> list[Wanted]:
    """As ``_parts_of``, of rows that are evenly spaced."""

    def local(shard: ShardSpec, part: slice) -> range:
        run = rows[part]
        first, last = run[0] - shard.offset, run[-1] - shard.offset
        step = run.step if first != last else 1  # of one row any number would do for numpy
        return range(first, last + step, step)

    bounds = [
        _within(rows, shard.offset, shard.offset + (shard.shape or (0,))[0])
        for shard in spec.shards
    ]
    return _cut(spec, bounds, made, local)


def _cut(
    spec: VariableSpec,
    bounds: Sequence[tuple[int, int]],  # of each shard: its positions among all rows
    made: np.ndarray,
    local: Callable[[ShardSpec, slice], np.ndarray | range],
) -> list[Wanted]:
    """Return what is wanted of each shard, in parts that one message may carry."""
    row_bytes = math.prod(spec.shape[1:]) * made.dtype.itemsize
    most = max(1, ROWS_PER_REQUEST_BYTES // max(1, row_bytes))
    targets = to_bytes_view(made)
    wanted = []
    for shard, (begin, end) in zip(spec.shards, bounds, strict=True):
        for start in range(begin, end, most):
            stop = min(start + most, end)
            target = targets[start * row_bytes : stop * row_bytes]
            wanted.append(Wanted(shard, local(shard, slice(start, stop)), target))
    return wanted


def _within(rows: range, low: int, high: int) -> tuple[int, int]:
    """Return which positions of ``rows`` have numbers from ``low`` to below ``high``."""
    if rows.step < 0:
        begin, end = _within(rows[::-1], low, high)
        return len(rows) - end, len(rows) - begin
    begin, end = (-((rows.start - bound) // rows.step) for bound in (low, high))
    return min(max(begin, 0), len(rows)), min(max(end, 0), len(rows))
