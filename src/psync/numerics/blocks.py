"""Block-structured shard memory: copy-on-write by reference count.

A ps answers a pull with the memory of the shard itself: the transport keeps a
reference until the kernel has taken the bytes. A later update must not change
those bytes, and must not copy a shard of 64 MiB either because one reader is
slow. So a shard is a list of blocks of at most 1 MiB, reading it means holding
references to its blocks, and an update works in place on a block without
references and writes a fresh one otherwise.

Whether a block is referenced is read off a reference count, because there is no
callback when a transport, a snapshot list or a user drops its view. **The count is
taken on the root, the array that owns the memory, and never on a view**:

- a slice of any view has the *root* as its ``base`` (numpy collapses chains of
  views), so a count on the view it was made from would miss it;
- a ``memoryview`` refers to its exporter, and slices of a memoryview share that
  one reference; as psync exports roots only, all of them appear at the root.

One thing stays invisible to the count: another name for the very object
``Block.array``. It therefore never leaves the code that updates the block.
The counting needs CPython's reference counts; what an idle root's count is gets
measured at import, since it differs between interpreter versions.
"""

from __future__ import annotations

import sys

import numpy as np

from psync.numerics.block_pool import BlockPool

BLOCK_BYTES = 1 << 20
"""Largest block. A multiple of 64 and of every itemsize, so elements never straddle blocks.
Small enough that updating one block (about 0.2 ms) never delays an event loop noticeably."""

BLOCK_ELEMENTS = 1 << 18
"""Most elements of a block. The blocks of a float16 variable then hold the same elements as
those of its float32 slots, so that one step of an update is one block of each."""


def bytes_of(data: object) -> np.ndarray:
    """Return the bytes of ``data`` (an array or any C-contiguous buffer) as a 1-D uint8 array.

    No copy is made of a buffer or of a C-contiguous array. The result may be read-only.
    """
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    view = memoryview(data)  # type: ignore[arg-type]  # memoryview itself judges what is a buffer
    # An empty buffer is legal here but not for frombuffer of older numpy versions.
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


class Block:
    """At most BLOCK_BYTES of memory and its typed view.

    Args:
        root: 1-D uint8 array that owns its memory; its size is a multiple of the itemsize.
            The block must be the only one to keep it.
        dtype: Of the elements.
    """

    __slots__ = ("_root", "array")

    def __init__(self, root: np.ndarray, dtype: np.dtype) -> None:
        self._root = root  # owns the memory; every reader's reference leads here
        self.array = root.view(dtype)  # 1-D, writable; for the updating code only, see above

    def export(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes ``start`` to ``stop``, read-only; the block is held while the view lives."""
        return self._root.data[start:stop].toreadonly()

    def held(self) -> bool:
        """Return whether anybody outside still sees the memory."""
        # "not equal", so that a count that nobody foresaw leads to a copy and not to a torn read
        return self._references() != _UNSEEN_BLOCK

    def retire(self, pool: BlockPool) -> None:
        """Give the memory to ``pool``; the block itself must not be used afterwards."""
        pool.give(self._root)

    def _references(self) -> int:
        return sys.getrefcount(self._root)


_UNSEEN_BLOCK = Block(np.empty(1, np.uint8), np.dtype(np.uint8))._references()


_ORDINARY = BlockPool()


class BlockArray:
    """A 1-D array of ``size`` elements as a list of blocks. Single owner.

    A block comes into being when it is first used, filled with ``fill``: declaring a large
    array costs nothing, and filling it is spread over the first walk through it. To read is no
    use in this sense, except of zeros, which cost nothing then either: until the first update one
    block is read in place of all, and never changes.

    To update block ``i``: write ``writable(i, pool)`` completely, from ``block(i)``, then
    ``commit`` it. Source and target are the same block unless a reader holds the source.

    Args:
        size: Number of elements; 0 is legal and has no blocks.
        dtype: Of the elements.
        fill: Value of all elements: a number, or an array of one element.
        pool: Where blocks come from; None: ordinary memory.
    """

    __slots__ = ("_blocks", "_per_block", "_pool", "_unmade", "dtype", "fill", "size")

    def __init__(
        self,
        size: int,
        dtype: np.dtype,
        fill: float | np.ndarray = 0,
        pool: BlockPool | None = None,
    ) -> None:
        self.size = size
        self._pool = _ORDINARY if pool is None else pool
        self.dtype = dtype
        self.fill = fill  # value of all elements of blocks that have not come into being
        self._unmade: Block | None = None  # read in place of all None below; None before that
        # elements in every block but the last
        self._per_block = min(BLOCK_ELEMENTS, BLOCK_BYTES // dtype.itemsize)
        count = -(-size // self._per_block)
        self._blocks: list[Block | None] = [None] * count  # None: not yet made

    @classmethod
    def from_array(cls, array: np.ndarray, pool: BlockPool) -> BlockArray:
        """Copy ``array`` (any shape; elements in C order) into blocks."""
        return cls.from_bytes(bytes_of(array), array.dtype, pool)

    @classmethod
    def from_bytes(cls, data: np.ndarray, dtype: np.dtype, pool: BlockPool) -> BlockArray:
        """Copy ``data`` (1-D uint8, a whole number of elements) into blocks."""
        made = cls(data.nbytes // dtype.itemsize, dtype, pool=pool)
        made.load(data, pool)
        return made

    def load(self, data: np.ndarray, pool: BlockPool) -> None:
        """Let a new array have the contents ``data`` (1-D uint8, as many bytes)."""
        size = self.dtype.itemsize
        for i in range(self.num_blocks):
            block = self._blocks[i] = self.apart(i, pool)
            start, stop = self.bounds(i)
            block.array.view(np.uint8)[:] = data[start * size : stop * size]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def spare_bytes(self) -> int:
        """Size of memory beside the blocks that updates go to, see ``block_runs``."""
        return 0

    @property
    def num_made(self) -> int:
        """Number of blocks that have come into being."""
        return len(self._blocks) - self._blocks.count(None)

    @property
    def is_constant(self) -> bool:
        """Whether nothing was ever written: all elements are ``fill``."""
        return not self.num_made

    def bounds(self, i: int) -> tuple[int, int]:
        """Return the first element of block ``i`` and the one after its last."""
        start = i * self._per_block
        return start, min(start + self._per_block, self.size)

    def blocks_between(self, start: int, stop: int) -> int:
        """Return the number of blocks that hold elements ``start`` to ``stop``."""
        return 0 if start >= stop else (stop - 1) // self._per_block - start // self._per_block + 1

    def block(self, i: int) -> Block:
        """Return block ``i``."""
        block = self._blocks[i]
        if block is None:
            block = self._filled(self._nbytes(i)) or Block(
                self._pool.zeros(self._nbytes(i)), self.dtype
            )
            self._blocks[i] = block
        return block

    def writable(self, i: int, pool: BlockPool) -> Block:
        """Return where the new contents of block ``i`` go: itself, or a fresh one if it is held.

        A fresh one has arbitrary contents. Pass what you get to ``commit``.
        """
        block = self.block(i)
        if block.held():
            return Block(pool.take(self._nbytes(i)), self.dtype)
        return block

    def apart(self, i: int, pool: BlockPool) -> Block:
        """As ``writable``, but never the block itself: until ``commit``, its contents stay."""
        return Block(pool.take(self._nbytes(i)), self.dtype)

    def commit(self, i: int, block: Block, pool: BlockPool) -> bool:
        """Make ``block`` the block ``i``. Returns whether it replaced another one."""
        old = self._blocks[i]
        if old is block:
            return False
        self._blocks[i] = block
        if old is not None:
            old.retire(pool)
        return True

    def export(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return elements ``start`` to ``stop`` as read-only views of bytes, in order.

        No copy. The views stay as they are for ever: a block that is seen through one is
        not changed any more, but replaced.
        """
        stop = self.size if stop is None else stop
        itemsize = self.dtype.itemsize
        views = []
        while start < stop:
            i = start // self._per_block
            first, last = self.bounds(i)
            last = min(last, stop)
            block = self._readable(i)
            views.append(block.export((start - first) * itemsize, (last - first) * itemsize))
            start = last
        return views

    def release(self, i: int) -> Block | None:
        """Return block ``i`` if it has come into being, and forget it; for whoever takes over."""
        block, self._blocks[i] = self._blocks[i], None
        return block

    def retire(self, block: Block) -> None:
        """A block that was released is not needed any more: others may use its memory."""
        block.retire(self._pool)

    def _readable(self, i: int) -> Block:
        """Return a block with the contents of block ``i``, to be read."""
        return self._blocks[i] or self._untouched() or self.block(i)

    def _untouched(self) -> Block | None:
        if self._unmade is None:
            self._unmade = self._filled(min(self._per_block, self.size) * self.dtype.itemsize)
        return self._unmade

    def _filled(self, nbytes: int) -> Block | None:
        """Return a new block, or None if it would hold zeros."""
        if not bytes_of(np.asarray(self.fill, self.dtype)).any():  # of -0.0 one bit is set
            return None
        block = Block(self._pool.source(nbytes), self.dtype)
        block.array[:] = self.fill
        return block

    def _nbytes(self, i: int) -> int:
        start, stop = self.bounds(i)
        return (stop - start) * self.dtype.itemsize
