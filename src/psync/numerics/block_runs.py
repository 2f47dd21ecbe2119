"""Blocks that lie side by side, although they are replaced: a shard that is read as one array.

Blocks are replaced one by one while somebody sees them (``blocks``), which would scatter them. So a
dense array in memory that others can see has *runs*: pieces of memory with a block for each of its
blocks. An update goes to a run of which nobody sees anything, all of it to the same one: the run
where the array is, unless that is read. It reads the old block and writes the new one wherever that
lies, so this costs no copy. What was read is given back before long, and is written to again:
as many runs as there are versions that somebody reads, and one, serve for ever. The new blocks of
all of it take the places of the old ones together, with the last one: who reads while an update is
under way would else see some of each, in two runs.

There is a bound. Beyond it, and where there is no memory for a run, blocks are replaced as ever, by
single ones from the pool, and what reads them copies them; the next update that finds a run free
brings them together again.
"""

from __future__ import annotations

import numpy as np

from psync.numerics.block_pool import BlockPool
from psync.numerics.blocks import Block, BlockArray, bytes_of

MAX_RUNS = 8
"""Of one array. A worker that pulls with its pushes has two versions, the one that it has computed
from and the next: so this is three workers, and where the next updates go."""

UNUSED_AFTER = 256
"""Updates and readings of an array after which a run that took no part in them goes."""

ABOVE_BYTES = 64 << 10
"""Smaller arrays have none: they are copied wherever they lie."""

SHARING_BYTES = 8 << 20
"""Runs up to this size share memory with others, so their blocks are used again one by one."""


class Run:
    """Memory for all blocks of an array.

    Args:
        blocks: In order.
    """

    __slots__ = ("blocks", "unused")

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.unused = 0  # updates and readings since it was last used

    def held(self) -> bool:
        """Return whether anybody sees something of it."""
        return any(block.held() for block in self.blocks)


class BlockRuns(BlockArray):
    """A BlockArray that is updated as a whole, in runs where its pool has memory for them.

    Args:
        size: Number of elements.
        dtype: Of the elements.
        fill: Value of all elements.
        pool: Where blocks and runs come from.
        offset: Of the first byte in the whole that this is a part of. Runs begin at the same place
            in a page, so that others can map the parts one behind the other.
    """

    __slots__ = ("_is_apart", "_new", "_offset", "_runs", "_target")

    def __init__(
        self,
        size: int,
        dtype: np.dtype,
        fill: float | np.ndarray = 0,
        pool: BlockPool | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(size, dtype, fill, pool)
        self._offset = offset
        self._runs: list[Run] = []
        self._target: Run | None = None  # where the present update goes, or the last one went
        self._is_apart = False  # whether the old contents must stay apart from it
        self._new: list[Block] = []  # of the present update, before its last one is there

    @property
    def spare_bytes(self) -> int:
        """Size of all runs but one."""
        return max(0, len(self._runs) - 1) * self.nbytes

    def block(self, i: int) -> Block:
        """Return block ``i``."""
        if self._blocks[i] is None and self._target is not None and not self._is_apart:
            block = self._blocks[i] = self._target.blocks[i]  # which nobody has seen
            block.array[:] = self.fill
        return super().block(i)

    def writable(self, i: int, pool: BlockPool) -> Block:
        """Return where the new contents of block ``i`` go; ask for block 0 first."""
        if not i:
            self._begin_update(pool)
        there = None if self._target is None else self._target.blocks[i]
        return super().writable(i, pool) if there is None or there.held() else there

    def apart(self, i: int, pool: BlockPool) -> Block:
        """As ``writable``, but never the block itself."""
        if not i:
            self._begin_update(pool, apart=True)
        there = None if self._target is None else self._target.blocks[i]
        if there is None or there is self._blocks[i] or there.held():
            return super().apart(i, pool)
        return there

    def commit(self, i: int, block: Block, pool: BlockPool) -> bool:
        """Make ``block`` the block ``i``, with the last one of all. Commit all, in order.

        Returns:
            Whether it replaces another one.
        """
        replaces = block is not self._blocks[i]
        self._new.append(block)
        if i + 1 == self.num_blocks:
            new, self._new = self._new, []
            for at, each in enumerate(new):
                self._replace(at, each, pool)
        return replaces

    def _replace(self, i: int, block: Block, pool: BlockPool) -> None:
        old = self._blocks[i]
        if any(run.blocks[i] is old for run in self._runs):
            self._blocks[i] = block
        else:
            super().commit(i, block, pool)

    def export(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return elements ``start`` to ``stop`` as read-only views of bytes, in order."""
        if len(self._runs) > 1:
            self._forget_unused()
        return super().export(start, stop)

    def retire(self, block: Block) -> None:
        """As there; of a large run one block would keep all of it, so all of it goes."""
        if self.nbytes <= SHARING_BYTES or not any(block in run.blocks for run in self._runs):
            super().retire(block)

    def _begin_update(self, pool: BlockPool, *, apart: bool = False) -> None:
        """Choose where the new contents go: a run of which nobody sees anything; None: nowhere."""
        last, self._is_apart, self._new = self._target, apart, []
        runs = self._runs if last is None else [last, *self._runs]
        free = (run for run in runs if not run.held() and not (apart and self._is_in(run)))
        self._target = next(free, None) or self._new_run(pool)
        if self._target is not None:
            self._target.unused = 0
        self._forget_unused()

    def _is_in(self, run: Run) -> bool:
        """Whether a present block lies in a run."""
        return any(mine is its for mine, its in zip(self._blocks, run.blocks, strict=True))

    def _forget_unused(self) -> None:
        for run in self._runs:
            run.unused = 0 if run is self._target or run.held() else run.unused + 1
        unused = [run for run in self._runs if run.unused > UNUSED_AFTER and not self._is_in(run)]
        for run in unused:
            self._runs.remove(run)
            for block in run.blocks if self.nbytes <= SHARING_BYTES else ():
                block.retire(self._pool)

    def _new_run(self, pool: BlockPool) -> Run | None:
        if len(self._runs) >= MAX_RUNS or not self.size:
            return None
        memory = pool.run(self.nbytes, self._offset)
        if memory is None:
            return None
        bounds = [self.bounds(i) for i in range(self.num_blocks)]
        size = self.dtype.itemsize
        roots = [bytes_of(memory[a * size : b * size]) for a, b in bounds]
        run = Run([Block(root, self.dtype) for root in roots])
        self._runs.append(run)
        return run
