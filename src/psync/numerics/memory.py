"""Memory of shards: blocks that are copied on write by reference count, pools, runs of blocks.

A ps answers a pull with the memory of the shard itself: the transport keeps a reference until the
kernel has taken the bytes. A later update must not change those bytes, and must not copy a shard of
64 MiB either because one reader is slow. So a shard is a list of blocks of at most 1 MiB, reading
it means holding references to its blocks, and an update works in place on a block without
references and writes a fresh one otherwise.

Whether a block is referenced is read off a reference count, because there is no callback when a
transport, a snapshot list or a user drops its view. **The count is taken on the root, the array
that owns the memory, and never on a view**:

- a slice of any view has the *root* as its ``base`` (numpy collapses chains of views), so a count
  on the view it was made from would miss it;
- a ``memoryview`` refers to its exporter, and slices of a memoryview share that one reference; as
  psync exports roots only, all of them appear at the root.

One thing stays invisible to the count: another name for the very object ``Block.array``. It
therefore never leaves the code that updates the block. The counting needs CPython's reference
counts; what an idle root's count is gets measured at import, since it differs between versions.

*Pools* exist because fresh memory is dear: the page faults of a new buffer cost as much as filling
it. Roots are given to a pool while others may still see them; it hands out only those that nobody
else refers to.

*Runs*: blocks are replaced one by one while somebody sees them, which would scatter them. So a
dense array in memory that others can see has runs: pieces of memory with a block for each of its
blocks. An update goes to a run of which nobody sees anything, all of it to the same one: the run
where the array is, unless that is read. It reads the old block and writes the new one wherever that
lies, so this costs no copy. What was read is given back before long, and is written to again:
as many runs as there are versions that somebody reads, and one, serve for ever. The new blocks of
all of it take the places of the old ones together, with the last one: who reads while an update is
under way would else see some of each, in two runs.

Beyond a bound, and where there is no memory for a run, blocks are replaced as ever, by single ones
from the pool, and what reads them copies them; the next update that finds a run free brings them
together again.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from psync.errors import UsageError

CHUNK = 1 << 18
"""Elements per chunk: 1 MiB of float32. Measured for chunks of 16 to 256 Ki elements on a CPU with
1 MiB of L2 and 32 MiB of L3: each doubling makes SGD (6 to 12 GB/s) and Adam (1.8 to 2.4 GB/s)
faster, with two such processes at once too."""


def _quietly() -> Callable[..., Any]:
    """Return what calls a function with numpy's warnings off; it is used by one at a time."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # there they belong to threads

        def run(function: Callable[..., Any], *arguments: object, **named: object) -> Any:
            with np.errstate(all="ignore"):
                return function(*arguments, **named)

        return run
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


class Scratch:
    """Work space shared by rules: a few chunk-long arrays per dtype, created on first use.

    Only one ``apply`` at a time may use it.

    Args:
        chunk: Elements per chunk; the results do not depend on it.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._arrays: dict[np.dtype, list[np.ndarray]] = {}
        # Calls a function. Overflow and NaN are results in it, as in every framework; a warning
        # that a test runner turns into an error must not tear an update in two.
        self.quietly = _quietly()
        self._last: tuple[np.dtype, int, int] | None = None  # what was asked for last
        self._given: list[np.ndarray] = []  # for that

    def arrays(self, dtype: np.dtype, count: int, size: int) -> list[np.ndarray]:
        """Return ``count`` distinct, uninitialized arrays of ``size`` elements."""
        if self._last == (dtype, count, size):
            return self._given
        made = self._arrays.setdefault(dtype, [])
        if made and made[0].size < size:  # longer than a chunk
            made.clear()
        while len(made) < count:
            made.append(np.empty(max(self.chunk, size), dtype))
        self._last, self._given = (dtype, count, size), [array[:size] for array in made[:count]]
        return self._given


# --- pools ---------------------------------------------------------------------------------------


POOL_BYTES = 256 << 20
"""Default bound of a pool: what a few 64 MiB tensors in flight need."""

_MIN_POOLED_BYTES = 64 << 10  # below this malloc is quicker than the pool's own bookkeeping
_PROBES = 8  # roots looked at per take(): keeps it O(1) when readers hold many


def roomy(nbytes: int) -> int:
    """Return a size of at least ``nbytes``, and at most a quarter more, that is one of few.

    For memory whose size is another one each time: a pool hands out sizes that come again.
    """
    if nbytes < _MIN_POOLED_BYTES:
        return nbytes
    quarter = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // quarter) * quarter


private: Callable[[int], np.ndarray] = functools.partial(np.empty, dtype=np.uint8)
"""Returns a new root of ordinary memory."""


def no_run(nbytes: int, offset: int) -> memoryview | None:
    """Return None: there is nobody who would see it in one piece."""


@dataclass(eq=False, repr=False)
class BlockPool:
    """Recycles memory that nobody references any more.

    Single owner, never blocks. Invariant: memory handed out by ``take`` is referenced
    by nobody else, and is no longer in the pool.

    Args:
        max_bytes: Bound of what the pool keeps alive; the least recently given go first.
        source: Where new memory comes from; may be replaced.
        run: Where that of runs comes from (``BlockRuns``): given its size, and an offset that its
            first byte shares the place in a page with; may be replaced.
        may_grow: Whether what is lent may raise the bound now, if that much is in use.

    Attributes:
        bound: Of what is kept: ``max_bytes``, or more until ``shrink``.
        nbytes: Size of what is kept alive.
        hits: Calls of ``take`` and ``lend`` for 64 KiB or more that were served with recycled
            memory.
        misses: Those that were served with new memory.
        evicted: Roots that were dropped because the pool was full.
    """

    max_bytes: int = POOL_BYTES
    source: Callable[[int], np.ndarray] = private
    run: Callable[[int, int], memoryview | None] = no_run
    may_grow: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.bound = self.max_bytes
        # id -> root, least recently given first. The pool's ONLY reference to a root is here.
        self._roots: OrderedDict[int, np.ndarray] = OrderedDict()
        # nbytes -> ids of the roots of that size, the next to be looked at first.
        self._by_size: dict[int, OrderedDict[int, None]] = {}
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evicted = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Return a 1-D uint8 array of exactly ``nbytes`` that owns its memory.

        Its contents are arbitrary. The caller is its only owner.
        """
        key = None if nbytes < _MIN_POOLED_BYTES else self._unseen(nbytes)
        return self.source(nbytes) if key is None else self._remove(key)

    def lend(self, nbytes: int) -> np.ndarray:
        """As ``take``, and ``give`` at once: handed out again when nobody sees it any more."""
        if nbytes < _MIN_POOLED_BYTES:
            return self.source(nbytes)
        key = self._unseen(nbytes)
        if key is None:
            root = self.source(nbytes)
            if self.may_grow():
                self._grow(nbytes)
            self.give(root)
            return root
        self._roots.move_to_end(key)
        return self._roots[key]

    def _grow(self, nbytes: int) -> None:
        """Raise the bound for so much more, unless there is something that nobody sees.

        To forget what is in use would free nothing, and who uses more than the bound at one time
        will do so again.
        """
        while self.nbytes + nbytes > self.bound:
            for key in list(itertools.islice(self._roots, _PROBES)):
                if _references(self._roots, key) == _UNSEEN_IN_POOL:
                    self._evict(key)
                    break
                self._roots.move_to_end(key)
            else:
                self.bound = self.nbytes + nbytes

    def shrink(self) -> None:
        """Take the bound back to what it was, and forget what nobody sees beyond it."""
        self.bound = self.max_bytes
        for key in list(self._roots):
            if self.nbytes <= self.bound:
                break
            if _references(self._roots, key) == _UNSEEN_IN_POOL:
                self._evict(key)

    def _unseen(self, nbytes: int) -> int | None:
        """Return the key of a root of this size that nobody else sees; None: there is none."""
        if (waiting := self._by_size.get(nbytes)) is not None:
            for _ in range(min(_PROBES, len(waiting))):
                key = next(iter(waiting))
                if _references(self._roots, key) == _UNSEEN_IN_POOL:
                    self.hits += 1
                    return key
                waiting.move_to_end(key)
        self.misses += 1
        return None

    def zeros(self, nbytes: int) -> np.ndarray:
        """Return new memory like ``take``, all of it 0."""
        if self.source is private:  # zeros come from the kernel, page by page as they are touched
            return np.zeros(nbytes, np.uint8)
        root = self.source(nbytes)
        root.fill(0)
        return root

    def give(self, root: np.ndarray) -> None:
        """Let the pool hand out ``root`` again once nobody references it.

        May be called while others still use it, and more than once.

        Args:
            root: An array as ``take`` returned it; not a view of one, whose users could
                not be counted.

        Raises:
            UsageError: If ``root`` is a view or not a 1-D uint8 array.
        """
        # Of shared memory a root has the memory itself as its base, which is no array.
        owns = root.flags.owndata or isinstance(root.base, memoryview)
        if type(root) is not np.ndarray or not owns:
            raise UsageError("a pool takes back only arrays that own their memory, got a view")
        if root.dtype != np.uint8 or root.ndim != 1:
            raise UsageError(
                f"a pool takes back only 1-d uint8 arrays, got {root.ndim}-d {root.dtype}"
            )
        if not _MIN_POOLED_BYTES <= root.nbytes <= self.bound:
            return
        key = id(root)
        if key in self._roots:
            self._roots.move_to_end(key)
            return
        while self.nbytes + root.nbytes > self.bound:
            self._evict(next(iter(self._roots)))
        self._roots[key] = root
        self._by_size.setdefault(root.nbytes, OrderedDict())[key] = None
        self.nbytes += root.nbytes

    def statistics(self) -> dict[str, int]:
        """Return counters and sizes as of now; roots that others still see are among them."""
        return {
            "hits": self.hits, "misses": self.misses, "evicted": self.evicted,
            "roots": len(self._roots), "bytes": self.nbytes, "max_bytes": self.bound,
        }  # fmt: skip

    def _evict(self, key: int) -> None:
        self._remove(key)
        self.evicted += 1

    def _remove(self, key: int) -> np.ndarray:
        root = self._roots.pop(key)
        same_size = self._by_size[root.nbytes]
        del same_size[key]
        if not same_size:  # sizes come from peers: their number must not grow for ever
            del self._by_size[root.nbytes]
        self.nbytes -= root.nbytes
        return root


def _references(roots: OrderedDict[int, np.ndarray], key: int) -> int:
    return sys.getrefcount(roots[key])


_UNSEEN_IN_POOL = _references(OrderedDict({0: np.empty(1, np.uint8)}), 0)


# --- blocks --------------------------------------------------------------------------------------


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

    __slots__ = ("_blocks", "_per_block", "_pool", "_unmade", "dtype", "fill", "nbytes", "size")

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
        self.nbytes = size * dtype.itemsize
        self.fill = fill  # value of all elements of blocks that have not come into being
        self._unmade: Block | None = None  # read in place of all None below; None before that
        # elements in every block but the last
        self._per_block = min(BLOCK_ELEMENTS, BLOCK_BYTES // dtype.itemsize)
        count = -(-size // self._per_block)
        self._blocks: list[Block | None] = [None] * count  # None: not yet made

    def load(self, data: np.ndarray, pool: BlockPool) -> None:
        """Let a new array have the contents ``data`` (1-D uint8, as many bytes)."""
        size = self.dtype.itemsize
        for i in range(self.num_blocks):
            block = self._blocks[i] = self.writable(i, pool, apart=True)
            start, stop = self.bounds(i)
            block.array.view(np.uint8)[:] = data[start * size : stop * size]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def spare_bytes(self) -> int:
        """Size of memory beside the blocks that updates go to, see ``BlockRuns``."""
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

    def block(self, i: int) -> Block:
        """Return block ``i``."""
        block = self._blocks[i]
        if block is None:
            nbytes = self._nbytes(i)
            block = self._filled(nbytes) or Block(self._pool.zeros(nbytes), self.dtype)
            self._blocks[i] = block
        return block

    def writable(self, i: int, pool: BlockPool, *, apart: bool = False) -> Block:
        """Return where the new contents of block ``i`` go: itself, or a fresh one if it is held.

        Pass the result to ``commit``.

        Args:
            i: Number of the block.
            pool: Where a fresh one comes from, with arbitrary contents.
            apart: Whether the contents of the block stay until ``commit``: never itself.
        """
        if not apart:
            block = self.block(i)
            if not block.held():
                return block
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


# --- arenas ---------------------------------------------------------------------------------------


ARENA_BYTES = 256 << 10
"""Of one arena. Replacing all of it for one of its arrays, while somebody reads, takes 10 µs."""


class Arena(Block):
    """One block in which small arrays of one dtype lie side by side. Single owner.

    A block of a few KiB costs as much to look at, to export and to update as one of 256 KiB. So
    small arrays lie in one from the start, and those that are used together are read or replaced
    as one. What is replaced while somebody reads any of it is the arena as a whole.

    What belongs to its arrays, as slots do, lies in other arenas, at the same places: so what lies
    side by side here does there as well.

    Args:
        dtype: Of the elements.
    """

    __slots__ = ("__weakref__", "_beside")

    def __init__(self, dtype: np.dtype) -> None:
        super().__init__(np.empty(0, np.uint8), dtype)
        self._beside: WeakValueDictionary[object, Arena] = WeakValueDictionary()

    @staticmethod
    def takes(size: int, dtype: np.dtype) -> bool:
        """Return whether an array is small enough to lie in one."""
        most = min(ABOVE_BYTES, BLOCK_BYTES, BLOCK_ELEMENTS * dtype.itemsize)
        return 0 < size * dtype.itemsize <= most

    def add(self, size: int, fill: float | np.ndarray, pool: BlockPool) -> ArenaArray:
        """Return a new array behind those that there are."""
        made = ArenaArray(self, self.array.size, size, fill)
        # Nobody will ask for the memory of before.
        self._grow(pool.take(self.array.nbytes + made.nbytes))
        self.array[made.start :] = fill
        return made

    def beside(
        self, array: ArenaArray, name: object, dtype: np.dtype, fill: float | np.ndarray
    ) -> ArenaArray:
        """Return a new array, in another arena, where ``array`` lies in this one.

        Args:
            array: Lies in this one.
            name: Of the other arena, which lives as long as arrays in it. Its memory is ordinary.
            dtype: Of the elements there.
            fill: Value of all elements of the new array.
        """
        other = self._beside.get(name)
        if other is None:
            other = self._beside[name] = Arena(dtype)
        if other.array.size < self.array.size:
            other._grow(private(self.array.size * dtype.itemsize))
        made = ArenaArray(other, array.start, array.size, fill)
        _, target, _ = other.begin(made.start, made.start + made.size, _ORDINARY)
        target[:] = fill
        return made

    def begin(self, start: int, stop: int, pool: BlockPool) -> tuple[np.ndarray, np.ndarray, bool]:
        """Begin to replace elements ``start`` to ``stop``, all of them in this turn.

        Returns:
            (what they are, where they go, whether the arena was replaced as somebody reads it).
        """
        old = self.array
        # As ``held``, in this frame.
        if is_replaced := sys.getrefcount(self._root) != _UNSEEN_BLOCK:
            root = pool.take(old.nbytes)
            self.retire(pool)
            self._root, self.array = root, root.view(old.dtype)
            if stop - start == old.size:
                return old, self.array, True
            self.array[:] = old
        if stop - start == old.size:
            return self.array, self.array, is_replaced
        part = self.array[start:stop]
        return part, part, is_replaced

    def _grow(self, root: np.ndarray) -> None:
        old = self.array
        self._root, self.array = root, root.view(old.dtype)
        self.array[: old.size] = old


class _Window(Block):
    """The part of an arena in which one array lies."""

    __slots__ = ("_arena", "_start", "_stop")

    def __init__(self, arena: Arena, start: int, stop: int) -> None:
        self._arena = arena
        self._start = start
        self._stop = stop

    @property
    def array(self) -> np.ndarray:  # type: ignore[override]  # made anew: the arena is replaced
        """As that of a block. Who has it counts as a reader of the arena."""
        return self._arena.array[self._start : self._stop]

    def export(self, start: int = 0, stop: int | None = None) -> memoryview:
        """As of a block: bytes ``start`` to ``stop`` of the window."""
        size = self._arena.array.itemsize
        end = self._stop * size if stop is None else self._start * size + stop
        return self._arena.export(self._start * size + start, end)


class ArenaArray(BlockArray):
    """A small BlockArray, not empty, in an arena.

    Attributes:
        arena: In which it lies.
        start: Its first element there.
    """

    __slots__ = ("_is_replaced", "_is_used", "arena", "start")

    def __init__(self, arena: Arena, start: int, size: int, fill: float | np.ndarray) -> None:
        super().__init__(size, arena.array.dtype, fill)
        self.arena = arena
        self.start = start
        self._is_used = False
        self._blocks[0] = _Window(arena, start, start + size)

    @property
    def is_constant(self) -> bool:
        """Whether nothing was ever written: all elements are ``fill``."""
        return not self._is_used

    def block(self, i: int) -> Block:
        """Return block ``i``, which may be written to from now on."""
        self._is_used = True
        return super().block(i)

    def load(self, data: np.ndarray, pool: BlockPool) -> None:
        """Let a new array have the contents ``data`` (1-D uint8, as many bytes)."""
        self.block(0).array.view(np.uint8)[:] = data

    def begin(self, pool: BlockPool) -> tuple[np.ndarray, np.ndarray, bool]:
        """Begin to replace all elements, in this turn; see ``Arena.begin``."""
        self._is_used = True
        return self.arena.begin(self.start, self.start + self.size, pool)

    def writable(self, i: int, pool: BlockPool, *, apart: bool = False) -> Block:
        """As of a block, where it lies; ``commit`` it in this turn: the others are updated, too."""
        if apart:
            return super().writable(i, pool, apart=True)
        present, target, self._is_replaced = self.begin(pool)
        if present is not target:
            np.copyto(target, present)
        return self.block(i)

    def commit(self, i: int, block: Block, pool: BlockPool) -> bool:
        """Let the array have the contents of a block. Returns whether somebody reads the old."""
        if block is self._blocks[i]:
            return self._is_replaced
        _, target, is_replaced = self.begin(pool)
        np.copyto(target, block.array)
        block.retire(pool)
        return is_replaced

    def release(self, i: int) -> Block:
        """Return a block with its contents; the array is not used any more."""
        block = self.writable(i, self._pool, apart=True)
        np.copyto(block.array, self.block(i).array)
        return block


# --- runs ----------------------------------------------------------------------------------------


MAX_RUNS = 8
"""Of one array. A worker that pulls with its pushes has two versions, the one that it has computed
from and the next: so this is three workers, and where the next updates go."""

UNUSED_AFTER = 256
"""Updates and readings of an array after which a run that took no part in them goes."""

ABOVE_BYTES = 64 << 10
"""Smaller arrays have none: they are copied wherever they lie."""

SHARING_BYTES = 8 << 20
"""Runs up to this size share memory with others, so their blocks are used again one by one."""


@dataclass(slots=True, eq=False)
class Run:
    """Memory for all blocks of an array."""

    blocks: list[Block]  # in order
    unused: int = 0  # updates and readings since it was last used

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

    def writable(self, i: int, pool: BlockPool, *, apart: bool = False) -> Block:
        """Return where the new contents of block ``i`` go; ask for block 0 first."""
        if not i:
            self._begin_update(pool, apart)
        there = None if self._target is None else self._target.blocks[i]
        if there is None or there.held() or (apart and there is self._blocks[i]):
            return super().writable(i, pool, apart=apart)
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
                old = self._blocks[at]
                if any(run.blocks[at] is old for run in self._runs):
                    self._blocks[at] = each
                else:
                    super().commit(at, each, pool)
        return replaces

    def export(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return elements ``start`` to ``stop`` as read-only views of bytes, in order."""
        if len(self._runs) > 1:
            self._forget_unused()
        return super().export(start, stop)

    def retire(self, block: Block) -> None:
        """As there; of a large run one block would keep all of it, so all of it goes."""
        if self.nbytes <= SHARING_BYTES or not any(block in run.blocks for run in self._runs):
            super().retire(block)

    def _begin_update(self, pool: BlockPool, apart: bool) -> None:
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
