"""One shard: its blocks, and work on it in pieces that an event loop can interleave.

Work on a large shard takes milliseconds, which would delay every peer of an event loop. So
it does one block per ``next()``, as a generator does; the caller lets the loop run in
between. From the call until its end the shard is busy: reading or updating it raises BusyError
(the caller queues such requests), so no reader sees a shard half of which is new. The caller
runs the work to its end. It cannot be abandoned by accident: closing it, or dropping
it, does the remaining blocks at once. Only an exception inside a block (no memory left)
leaves the shard busy for good, as its value is torn: the task must end.

Several blocks can be *handed out* instead, and computed in another thread. Only arithmetic on
arrays is done there. Which memory the new values go to, and what counts as the block afterwards, is
decided by the owner of the shard, before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from psync.numerics.memory import (
    ABOVE_BYTES,
    BLOCK_ELEMENTS,
    BlockArray,
    BlockPool,
    BlockRuns,
    Scratch,
)
from psync.numerics.sums import Pieces
from psync.specs import ShardSpec, dtype_of

MIN_HANDED_OUT = 4
"""Blocks. The way to a thread and back takes a tenth of a millisecond, as long as SGD takes for
half a block, and the loop's caches. With two at a time, shards of 4 MiB that two workers push to
were 6 % slower than on the loop."""

MAX_HANDED_OUT = 16
"""Blocks: 4 ms of SGD, 20 of Adam. So long may it take to close work of which they are part."""


@dataclass(slots=True, eq=False)
class Workspace:
    """Memory for what is computed of one block. Single owner: one block at a time uses it."""

    rules: Scratch = field(default_factory=Scratch)
    # Apart from that of the rules, which read what is in these.
    sums: Scratch = field(default_factory=lambda: Scratch(BLOCK_ELEMENTS))
    accumulated: Scratch = field(default_factory=lambda: Scratch(BLOCK_ELEMENTS))


@dataclass(slots=True, eq=False)
class Prepared:
    """A block of which it is settled where its new contents go.

    Args:
        compute: Writes them. Needs nothing but arrays, and so may run in any thread.
        commit: Makes them the block; by the owner of the shard.
    """

    compute: Callable[[Workspace], None]
    commit: Callable[[], None]

    def do(self, space: Workspace) -> None:
        """Do both."""
        self.compute(space)
        self.commit()


class HandedOut:
    """Several prepared blocks of one shard."""

    __slots__ = ("_blocks", "_returned")

    def __init__(self, blocks: list[Prepared], returned: Callable[[], None]) -> None:
        self._blocks = blocks
        self._returned: Callable[[], None] | None = returned

    def compute(self, space: Workspace) -> None:
        """Compute the blocks, in whatever thread."""
        for block in self._blocks:
            block.compute(space)

    def commit(self) -> None:
        """Commit them, by the owner of the shard, once; nothing is referred to any more.

        Else the thread might have the last reference to what was lent, and return it.
        """
        assert self._returned is not None, "blocks are committed once"
        for block in self._blocks:
            block.commit()
        self._blocks.clear()
        self._returned()
        self._returned = None


@dataclass(slots=True)
class Shard:
    """One shard, and what optimizers keep beside it."""

    spec: ShardSpec
    values: BlockArray
    nbytes: int  # of the values; specs compute theirs at each look
    slots: dict[tuple[int, str], BlockArray] = field(default_factory=dict)  # by optimizer, name
    pushes: dict[int, int] = field(default_factory=dict)  # by optimizer, if it accumulates them
    version: int = 0  # finished updates
    busy: bool = False  # an update is under way


def new_values(spec: ShardSpec, fill: float | np.ndarray, pool: BlockPool) -> BlockArray:
    """Return the values of a new shard; side by side where tasks of its host would read them so."""
    dtype, nbytes = dtype_of(spec.dtype), spec.nbytes
    if nbytes <= ABOVE_BYTES:
        return BlockArray(spec.size, dtype, fill, pool)
    offset = spec.offset * (nbytes // spec.shape[0]) if spec.shape else 0
    return BlockRuns(spec.size, dtype, fill, pool, offset)


class BlockWork:
    """Work on one shard, of which one piece is done per ``next()``, and with the last one its end.

    Args:
        shard: Is busy from now on until the end.
        one_piece: Does one of the pieces, by its number.
        finished: Called at the end.
        count: Number of pieces; None: one for each block.
        changes: Whether the shard has another version at the end.
        prepared: Of a piece, what can be handed out; None: it has to be done by ``one_piece``. Once
            one can be handed out, so can all after it.
    """

    __slots__ = (
        "_at_once", "_changes", "_count", "_finished", "_next", "_one_piece", "_out", "_over",
        "_prepared", "_shard",
    )  # fmt: skip

    def __init__(
        self,
        shard: Shard,
        one_piece: Callable[[int], None],
        finished: Callable[[], None],
        count: int | None = None,
        *,
        changes: bool = True,
        prepared: Callable[[int], Prepared | None] | None = None,
    ) -> None:
        self._shard = shard
        self._one_piece = one_piece
        self._finished = finished
        self._count = shard.values.num_blocks if count is None else count
        self._changes = changes
        self._prepared = prepared
        self._next = 0  # piece
        self._out = 0  # of what was handed out, how many are not committed
        self._at_once = 0  # blocks handed out at once; 0: none was yet
        self._over = False  # it has ended, or failed
        shard.busy = True

    def __iter__(self) -> BlockWork:
        return self

    def __next__(self) -> None:
        if self._over:
            raise StopIteration
        if self._next < self._count:
            self._next += 1
            try:
                self._one_piece(self._next - 1)
            except BaseException:
                self.fail()
                raise
        if self._next < self._count or self._out:
            return
        self._over = True
        self._shard.version += self._changes
        self._shard.busy = False
        self._finished()
        raise StopIteration

    def hand_out(self, threads: int) -> HandedOut | None:
        """Return the next blocks, to be computed elsewhere, and committed before the work ends.

        Args:
            threads: Among how many the blocks are to be divided.

        Returns:
            None: what comes next is to be done by ``next()``. That does nothing while all that is
            left is handed out.
        """
        left = self._count - self._next
        if self._over or self._prepared is None or not left:
            return None
        if not self._at_once:
            if left < 2 * MIN_HANDED_OUT:
                return None
            rounds = -(-left // (threads * MAX_HANDED_OUT))
            self._at_once = max(MIN_HANDED_OUT, -(-left // (threads * rounds)))
        blocks: list[Prepared] = []
        for i in range(self._next, min(self._next + self._at_once, self._count)):
            block = self._prepared(i)
            if block is None:
                self._at_once = 0
                return None
            blocks.append(block)
        self._next += len(blocks)
        self._out += 1
        return HandedOut(blocks, self._returned)

    def _returned(self) -> None:
        self._out -= 1

    def fail(self) -> None:
        """A block could not be computed: nothing more is done, and the shard stays busy."""
        self._over = True

    def close(self) -> None:
        """Do what is left. What is handed out has been committed."""
        assert self._over or not self._out, "blocks of a closed work are being computed"
        for _ in self:
            pass

    def __del__(self) -> None:
        self.close()


Work = BlockWork | Pieces[None]
"""Work under way on one shard: one piece per ``next()``; run it to its end."""


def nothing() -> Work:
    """Return work that is done."""
    return (None for _ in ())
