"""Rows of an array by their numbers: sparse gradients, scatter operations, merging of duplicates.

Arithmetic is numpy's in the array's own dtype: integers wrap around, overflow of floats is
infinite, the smaller of a number and NaN is NaN. Row numbers are sorted and made unique first;
each operation says how it combines the operands of duplicates.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from psync.errors import UsageError, ValueMismatchError
from psync.numerics.memory import Block, BlockArray, BlockPool
from psync.numerics.sums import firsts, sum_dtype
from psync.specs import plain_array


def ascending(rows: np.ndarray) -> bool:
    """Return whether row numbers ascend strictly, so that each is there once."""
    few = rows[:16].tolist()  # mostly these tell already
    return few == sorted({*few}) and bool((rows[1:] > rows[:-1]).all())


def in_order(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers in ascending order, and which of ``rows`` each one was.

    Equal ones stay in their order.

    Args:
        rows: int64, not negative.
    """
    bits = max(0, len(rows) - 1).bit_length()
    if (needed := bits + int(rows.view(np.uint64).max(initial=0)).bit_length()) > 63:
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    # Sorting numbers that end with their position takes a fifth of the time of argsort.
    packed: Any = rows.astype(np.uint32 if needed <= 32 else np.int64)
    packed <<= bits
    packed |= np.arange(len(rows), dtype=packed.dtype)
    packed.sort()
    return (packed >> bits).astype(np.int64), (packed & ((1 << bits) - 1)).astype(np.int64)


def distinct(rows: np.ndarray, *, sort: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the row numbers ascending, each once, and where each of ``rows`` is among them.

    The second is None if ``rows`` are like this already.

    Args:
        rows: int64, not negative.
        sort: Whether they must ascend. Else they stay as they are if each is there once.
    """
    if ascending(rows) or (not sort and ascending(np.sort(rows))):
        return rows, None
    ordered, order = in_order(rows)
    inverse = np.empty(len(rows), np.int64)
    first = firsts(ordered)
    inverse[order] = np.cumsum(first) - 1
    return ordered[first], inverse


def starts_of(ordered: np.ndarray) -> np.ndarray:
    """Return where each run of equal numbers begins."""
    return np.flatnonzero(firsts(ordered))


Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an array of a shape and dtype with any contents."""

SCATTER_OPS = ("add", "sub", "mul", "div", "min", "max", "assign")

LONG_RUN = 8
"""Duplicates of one row beyond this many are reduced on their own, row by row."""

_UFUNCS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
_MERGES = {**_UFUNCS, "sub": np.add, "div": np.multiply}


def check_scatter(op: str, dtype: str, what: str) -> None:
    """Check that rows of a dtype can be changed by an operation.

    Args:
        op: Anything that came from outside.
        dtype: Name of the array's.
        what: The array, for messages.

    Raises:
        UsageError: There is no such operation.
        ValueMismatchError: There is none for the dtype.
    """
    if op not in SCATTER_OPS:
        raise UsageError(
            f"{what}: unknown operation {op[:100]!r}", hint=f"use one of {', '.join(SCATTER_OPS)}"
        )
    if dtype == "bool" and op != "assign":
        raise ValueMismatchError(f"{what}: bool values can only be assigned, not {op!r}")
    if op == "div" and "int" in dtype:
        raise ValueMismatchError(
            f"{what}: {dtype} values cannot be divided: the quotient is not an integer",
            hint="declare the variable with a floating dtype, or read, divide and assign",
        )


def combine(op: str, current: np.ndarray, operand: np.ndarray) -> None:
    """Change ``current`` in place: ``current = current op operand``."""
    if op == "assign":
        np.copyto(current, operand)
        return
    with np.errstate(all="ignore"):  # an overflow is a result
        _UFUNCS[op](current, operand, out=current)


def merged(
    rows: np.ndarray, values: np.ndarray, op: str, empty: Empty = np.empty
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, values) with each row once, ascending, that change an array as these do.

    Operands of one row are summed for "add" and "sub", multiplied for "mul" and "div"; of several
    values to assign the last one stays. Half precision is computed in float32, and rounded once.

    Args:
        rows: int64, not negative, in any order.
        values: One row for each.
        op: One of SCATTER_OPS.
        empty: Makes the array of the result: called with shape and dtype.

    Returns:
        What was given, if it is like this already.
    """
    if ascending(rows):
        return rows, values
    ordered, order = in_order(rows)
    starts = starts_of(ordered)
    if len(starts) == len(ordered):
        return ordered, taken(values, order, empty)
    if op == "assign":
        ends = np.append(starts[1:], len(ordered)) - 1
        return ordered[starts], taken(values, order[ends], empty)
    half = values.dtype.itemsize == 2 and values.dtype.kind not in "iu"
    work = sum_dtype(values.dtype) if half else values.dtype
    with np.errstate(all="ignore"):
        made = _reduced(_MERGES[op], values, order, starts, work, empty)
    return ordered[starts], made.astype(values.dtype, copy=False)


def taken(values: np.ndarray, order: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Return ``values[order]``, all of which exist, in memory that ``empty`` makes."""
    made = empty((len(order), *values.shape[1:]), values.dtype)
    return values.take(order, 0, made, "clip")


def _reduced(
    ufunc: np.ufunc,
    values: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
    dtype: np.dtype,
    empty: Empty,
) -> np.ndarray:
    """Return each run of ``values[order]`` as one row.

    As ``ufunc.reduceat`` does, which takes ten times as long where most runs are of one row.
    """
    lengths = np.diff(starts, append=len(order))
    made = taken(values, order[starts], empty).astype(dtype, copy=False)
    longer = np.flatnonzero(lengths > 1)
    for position in range(1, LONG_RUN):  # the second ones of all runs, the third ones, …
        if not len(longer):
            return made
        operand = values[order[starts[longer] + position]].astype(dtype, copy=False)
        made[longer] = ufunc(made[longer], operand)
        longer = longer[lengths[longer] > position + 1]
    for run in longer.tolist():
        rest = order[starts[run] + LONG_RUN : starts[run] + lengths[run]]
        made[run] = ufunc(made[run], ufunc.reduce(values[rest], axis=0, dtype=dtype))
    return made


class IndexedSlices:
    """Some rows of an array: row ``i`` of ``values`` belongs to row ``indices[i]``.

    As a gradient, it means that all other rows have none. An optimizer updates only the named rows
    and their slots. Rows that are named more than once are summed first.

    Args:
        values: Array of shape (n, …), or a value that numpy converts to one.
        indices: Integers of shape (n,), in any order.
        dense_shape: Shape of the whole array, if known.

    Raises:
        ValueMismatchError: Values or indices are not arrays, the indices are not integers, or their
            number differs from the number of rows.

    Source: ``tf.IndexedSlices``.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        try:
            self.values = plain_array(values)
            indices = plain_array(indices)
            shape = None if dense_shape is None else tuple(map(int, dense_shape))
        except (TypeError, ValueError) as exc:
            raise ValueMismatchError(
                "IndexedSlices: expected values and indices that are arrays, and integers as "
                f"dense_shape: {exc}"
            ) from exc
        if indices.size == 0 and indices.dtype.kind == "f":
            indices = indices.astype(np.int64)  # what numpy makes of an empty list
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueMismatchError(
                f"IndexedSlices: expected indices of shape (n,), integers, got {indices.shape} "
                f"{indices.dtype}"
            )
        if self.values.ndim < 1 or len(self.values) != len(indices):
            raise ValueMismatchError(
                f"IndexedSlices: expected values for {len(indices)} indices, shape "
                f"({len(indices)}, …), got {self.values.shape}"
            )
        self.indices = indices
        self.dense_shape = shape

    def __repr__(self) -> str:
        return (
            f"IndexedSlices({len(self.indices)} rows of shape {self.values.shape[1:]} "
            f"{self.values.dtype}, dense_shape={self.dense_shape})"
        )

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices, values) with each index once, in ascending order, and its rows summed.

        Half precision is summed in float32 and rounded once. If there is nothing to merge, the
        result may share memory with this object.

        Raises:
            ValueMismatchError: There are duplicates, and the values are not floating.
        """
        indices, values = merged(self.indices.astype(np.int64, copy=False), self.values, "add")
        if len(indices) < len(self.indices):
            sum_dtype(values.dtype)  # raises
        return indices, values


# --- blocks of rows ------------------------------------------------------------------------------


_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""A table may be larger than the memory that there is, as long as few of its rows are used.
Python knows the name from 3.13 on."""

_RAW: dict[int, np.dtype] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Rows are moved as integers: numpy knows no quick way for foreign dtypes such as bfloat16."""


class RowBlocks(BlockArray):
    """A BlockArray of rows. Single owner.

    Args:
        num_rows: Number of rows.
        row_size: Elements of a row.
        dtype: Of the elements.
        fill: Value of all elements.
        dense: Whether most rows will be written. Memory then comes in large pages where the system
            has them: a third less time to gather rows, and 2 MiB for the first row of each page.

    Attributes:
        seen: Numbers of the blocks that somebody may see, or that lie away.
    """

    def __init__(
        self,
        num_rows: int,
        row_size: int,
        dtype: np.dtype,
        fill: float | np.ndarray = 0,
        *,
        dense: bool = False,
    ) -> None:
        super().__init__(num_rows * row_size, dtype, fill)
        self.row_size = row_size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        # Not from numpy, which asks for large pages whatever they are for.
        self._memory = mmap.mmap(-1, max(1, self.nbytes), flags=flags)
        if dense and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        raw = _RAW[dtype.itemsize]
        self._table = np.frombuffer(self._memory, raw, self.size).reshape(num_rows, row_size)
        self._written = np.zeros(num_rows, np.bool_)  # whether a row is more than the fill
        self._complete = False  # whether all rows are known to be
        self._raw_fill = np.full(1, fill, dtype).view(raw)
        # In ``_blocks`` are those that somebody may see, by number here too; the others are at
        # home, and nobody sees them.
        self.seen: set[int] = set()
        self._away: dict[int, Block] = {}  # the homes of blocks that lie elsewhere

    # As any BlockArray.

    @property
    def is_constant(self) -> bool:
        """Whether no row was ever written."""
        return not self._written.any()

    def block(self, i: int) -> Block:
        """Return block ``i``, whose rows all are written then."""
        block = self._blocks[i]
        if block is None:
            rows = slice(*self._rows_of(i))
            untouched = np.flatnonzero(~self._written[rows])
            if len(untouched) and self._raw_fill:
                self._table[untouched + rows.start] = self._raw_fill
            self._written[rows] = True
            offset = self.bounds(i)[0] * self.dtype.itemsize
            # Its base is no array, so views of it count here.
            root = np.frombuffer(self._memory, np.uint8, self._nbytes(i), offset)
            block = self._blocks[i] = Block(root, self.dtype)
            self.seen.add(i)
        return block

    def writable(self, i: int, pool: BlockPool, *, apart: bool = False) -> Block:
        """Return where the new contents of block ``i`` go; back home, where that can be."""
        home = self._away.get(i)
        if home is None or home.held():
            return super().writable(i, pool, apart=apart)
        return home

    def commit(self, i: int, block: Block, pool: BlockPool) -> bool:
        """Make ``block`` the block ``i``. Returns whether it replaced another one."""
        old = self.block(i)
        if old is block:
            return False
        self._blocks[i] = block
        home = self._away.setdefault(i, old)
        if home is block:
            del self._away[i]
        if home is not old:
            old.retire(pool)
        return True

    def _readable(self, i: int) -> Block:
        if self._blocks[i] is None and not self._written[slice(*self._rows_of(i))].any():
            return self._untouched() or self.block(i)
        return self.block(i)

    def settle(self, i: int) -> bool:
        """Write out what is constant in block ``i`` if the rest is not; whether there was such."""
        if self._complete or self._blocks[i] is not None:
            return False
        written = self._written[slice(*self._rows_of(i))]
        if not written.any() or written.all():
            return False
        self.block(i)
        return True

    # Rows. All row numbers are int64 and exist.

    def take_over(self, i: int, block: Block) -> None:
        """Let block ``i`` begin with the contents of another array's; none of its rows was seen."""
        rows = slice(*self._rows_of(i))
        untouched = np.flatnonzero(~self._written[rows])
        for row in untouched[[0, -1]] + rows.start if len(untouched) else ():
            self._table[row] = self._raw_fill  # the part of it that lies in another block
        self._written[rows] = True
        start, stop = self.bounds(i)
        self._table.reshape(-1)[start:stop] = block.array.view(self._table.dtype)

    def taken_over(self) -> None:
        """All blocks that there were have been taken over."""
        self._complete = bool(self._written.all())

    def blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of all blocks in which ascending rows lie, each once, ascending."""
        if not self.row_size or not len(rows):
            return rows[:0]
        numbers: np.ndarray
        if self._aligned:
            numbers = rows // (self._per_block // self.row_size)
        else:  # a row lies in several, one after the other
            first = rows * self.row_size // self._per_block
            counts = ((rows + 1) * self.row_size - 1) // self._per_block + 1 - first
            before = counts.cumsum() - counts
            numbers = np.arange(counts.sum()) + np.repeat(first - before, counts)
        each: np.ndarray = numbers[starts_of(numbers)]
        return each

    def held_among(self, blocks: np.ndarray) -> list[int]:
        """Return which of these blocks cannot be written where they are, or lie away."""
        held = []
        for i in [i for i in blocks.tolist() if i in self.seen]:
            block = self._blocks[i]
            if i in self._away or (block is not None and block.held()):
                held.append(i)
            else:
                self._unsee(i)
        return held

    def free(self, i: int, pool: BlockPool) -> bool:
        """Make it possible to write rows in block ``i``. Returns whether it had to be copied."""
        block, home = self._blocks[i], self._away.get(i)
        if home is not None and not home.held():
            self._come_home(i, pool)
            return True
        if block is None or not block.held():
            return False
        fresh = Block(pool.take(self._nbytes(i)), self.dtype)
        np.copyto(fresh.array.view(np.uint8), block.array.view(np.uint8))
        return self.commit(i, fresh, pool)

    def gather(self, rows: np.ndarray, out: np.ndarray, pool: BlockPool) -> None:
        """Copy rows.

        Args:
            rows: In any order.
            out: Shape (number of rows, elements of a row), C-contiguous, of the array's dtype.
            pool: Where blocks go that are not needed any more.
        """
        for i in [i for i, home in self._away.items() if not home.held()]:
            self._come_home(i, pool)
        made = out.view(self._table.dtype)
        written = None if self._complete else self._written.take(rows)
        if written is None or written.all():
            self._table.take(rows, 0, made, "clip")
        elif not written.any():
            made[...] = self._raw_fill
        else:  # pages that were never written are not looked at
            somewhere = rows[written.argmax()]
            self._table.take(np.where(written, rows, somewhere), 0, made, "clip")
            made[~written] = self._raw_fill
        for array, there, here in self._lying_away(rows):
            made[here] = array[there]

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows, in blocks that are ``free``.

        Args:
            rows: Each once.
            values: Shape (number of rows, elements of a row), C-contiguous, of the array's dtype.
        """
        made = values.view(self._table.dtype)
        self._written[rows] = True
        at_home = np.ones(len(rows), np.bool_)
        for i in self._away:
            at_home &= ~self._in_block(rows, i)
        for array, there, here in self._lying_away(rows):
            array[there] = made[here]
        if at_home.all():
            self._whole_rows(self._table)[rows] = self._whole_rows(made)
            return
        self._table[rows[at_home]] = made[at_home]
        if self._aligned:
            return
        for position in np.flatnonzero(~at_home).tolist():
            row = int(rows[position])
            for i in range(*self._blocks_of_row(row)):
                if i not in self._away:  # the rest of a row that is partly away
                    there, here = self._common(i, row)
                    start = self.bounds(i)[0]
                    whole = self._table.reshape(-1)
                    whole[start + there.start : start + there.stop] = made[position, here]

    def _lying_away(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Any, Any]]:
        """Yield (block that lies away, index of what it has of some rows, index of it in these)."""
        for i in self._away:
            block = self._blocks[i]
            assert block is not None, "only a block that was seen can be away"
            array, touched = (
                block.array.view(self._table.dtype),
                self._in_block(rows, i).nonzero()[0],
            )
            if self._aligned:
                yield array.reshape(-1, self.row_size), rows[touched] - self._rows_of(i)[0], touched
                continue
            for position in touched.tolist():
                there, here = self._common(i, int(rows[position]))
                yield array, there, (position, here)

    def _whole_rows(self, array: np.ndarray) -> np.ndarray:
        """Return an array of rows with each row as one element, which numpy writes faster."""
        if not self.row_size:
            return array
        row = np.dtype((np.void, self.row_size * self.dtype.itemsize))
        return array.view(row).reshape(len(array))

    def _come_home(self, i: int, pool: BlockPool) -> None:
        home = self._away.pop(i)
        block = self._blocks[i]
        assert block is not None, "only a block that was seen can be away"
        np.copyto(home.array.view(np.uint8), block.array.view(np.uint8))
        block.retire(pool)
        self._unsee(i)

    def _unsee(self, i: int) -> None:
        self._blocks[i] = None
        self.seen.discard(i)

    @property
    def _aligned(self) -> bool:
        """Whether no row lies in two blocks."""
        return not self._per_block % self.row_size

    def _rows_of(self, i: int) -> tuple[int, int]:
        """Return the first row of which a part is in block ``i``, and the one after the last."""
        start, stop = self.bounds(i)
        return start // self.row_size, (stop - 1) // self.row_size + 1

    def _blocks_of_row(self, row: int) -> tuple[int, int]:
        start, stop = row * self.row_size, (row + 1) * self.row_size
        return start // self._per_block, (stop - 1) // self._per_block + 1

    def _in_block(self, rows: np.ndarray, i: int) -> np.ndarray:
        first, end = self._rows_of(i)
        return (rows >= first) & (rows < end)

    def _common(self, i: int, row: int) -> tuple[slice, slice]:
        """Return what block and row have in common: as elements of the block, and of the row."""
        (start, stop), begin = self.bounds(i), row * self.row_size
        low, high = max(start, begin), min(stop, begin + self.row_size)
        return slice(low - start, high - start), slice(low - begin, high - begin)
