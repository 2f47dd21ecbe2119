"""Common blocks: several small arrays side by side in one block, read and replaced as one.

A block of a few KiB costs as much to look at, to export and to update as one of a MiB. So small
arrays that are used together lie in one block, and each is a *window* of it: a ``Block`` as any
other, to whoever reads or writes that array alone. What is replaced, and not changed, because
somebody sees it, is the common block: the count of references to its root is that of all windows.
An array that is written alone while somebody sees the common block gets a block of its own, and
has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from psync.numerics.memory import Block, BlockArray, BlockPool


class CommonBlock:
    """One block, in which several arrays have their contents. Single owner.

    Args:
        arrays: Of one dtype, one block each, none empty; what they hold is copied. They lie in
            the order given from now on.
        root: Memory for them, of which the caller is the only owner.
        pool: Where their blocks go.

    Attributes:
        block: In which all arrays lie.
        is_left: Whether an array has got another block.
    """

    __slots__ = ("block", "is_left")

    def __init__(self, arrays: Sequence[BlockArray], root: np.ndarray, pool: BlockPool) -> None:
        self.block = Block(root, arrays[0].dtype)
        self.is_left = False
        start = 0
        for array in arrays:
            window = Window(self, start, start + array.size)
            np.copyto(window.array, array.block(0).array)
            array.commit(0, window, pool)
            start += array.size

    def writable(self, pool: BlockPool) -> Block:
        """Return where the new contents of all arrays go: as ``BlockArray.writable``."""
        block = self.block
        if block.held():
            return Block(pool.take(block.array.nbytes), block.array.dtype)
        return block

    def commit(self, block: Block, pool: BlockPool) -> bool:
        """Let ``block`` be what all arrays lie in. Returns whether it replaced another one."""
        old = self.block
        if old is block:
            return False
        self.block = block
        old.retire(pool)
        return True

    def export(self, start: int, stop: int) -> memoryview:
        """Return elements ``start`` to ``stop`` as bytes: as ``BlockArray.export``."""
        size = self.block.array.itemsize
        return self.block.export(start * size, stop * size)


class Window(Block):
    """The part of a common block in which one array lies.

    Args:
        common: The block.
        start: First element.
        stop: The one after the last.
    """

    __slots__ = ("_common", "_start", "_stop")

    def __init__(self, common: CommonBlock, start: int, stop: int) -> None:
        self._common = common
        self._start = start
        self._stop = stop

    @property
    def array(self) -> np.ndarray:  # type: ignore[override]  # made anew: the block may be another
        """As that of a block. Who has it counts as a reader of all windows."""
        return self._common.block.array[self._start : self._stop]

    def export(self, start: int = 0, stop: int | None = None) -> memoryview:
        """As of a block: bytes ``start`` to ``stop`` of the window."""
        return self._common.export(self._start, self._stop)[start:stop]

    def held(self) -> bool:
        """Return whether anybody outside sees any of the common block."""
        return self._common.block.held()

    def retire(self, pool: BlockPool) -> None:
        """The array has another block now; the others stay."""
        self._common.is_left = True


class Adjacent(Sequence[np.ndarray]):
    """Arrays that lie side by side in one.

    Args:
        whole: 1-D.
        parts: Where each one lies, in order and without gaps.
    """

    __slots__ = ("parts", "whole")

    def __init__(self, whole: np.ndarray, parts: Sequence[slice]) -> None:
        self.whole = whole
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, position: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, position: slice) -> Adjacent: ...
    def __getitem__(self, position: int | slice) -> np.ndarray | Adjacent:
        """Return one, or those of a slice, which are adjacent, too."""
        if isinstance(position, slice):
            return Adjacent(self.whole, self.parts[position])
        return self.whole[self.parts[position]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.whole.__getitem__, self.parts)

    def between(self, first: int, end: int) -> np.ndarray:
        """Return those from the ``first`` to the one before ``end`` as one array."""
        return self.whole[self.parts[first].start : self.parts[end - 1].stop]
