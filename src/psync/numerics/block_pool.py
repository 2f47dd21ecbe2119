"""Pools: memory that is handed out again once nobody sees it any more.

They exist because fresh memory is dear: the page faults of a new buffer cost as much as filling it.
What is pooled are roots, arrays that own their memory, whose references are counted (see
``blocks``). They are given to a pool while others may still see them; it hands out only those that
nobody else refers to.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psync.errors import UsageError

POOL_BYTES = 256 << 20
"""Default bound of a pool: what a few 64 MiB tensors in flight need."""

_MIN_POOLED_BYTES = 4096  # below a page malloc is as quick as the pool's own bookkeeping
_PROBES = 8  # roots looked at per take(): keeps it O(1) when readers hold many


def roomy(nbytes: int) -> int:
    """Return a size of at least ``nbytes``, and at most a quarter more, that is one of few.

    For memory whose size is another one each time: a pool hands out sizes that come again.
    """
    if nbytes <= _MIN_POOLED_BYTES:
        return nbytes
    quarter = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // quarter) * quarter


def private(nbytes: int) -> np.ndarray:
    """Return a new root of ordinary memory."""
    return np.empty(nbytes, np.uint8)


def no_run(nbytes: int, offset: int) -> memoryview | None:
    """Return None: there is nobody who would see it in one piece."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot of a pool."""

    hits: int  # take() and lend() calls that were served with recycled memory
    misses: int  # those that were served with new memory
    evicted: int  # roots dropped because the pool was full
    roots: int  # roots in the pool now, those that others still see included
    bytes: int  # their size
    max_bytes: int  # the bound of ``bytes`` now


class BlockPool:
    """Recycles memory that nobody references any more.

    Single owner, never blocks. Invariant: memory handed out by ``take`` is referenced
    by nobody else, and is no longer in the pool.

    Args:
        max_bytes: Bound of what the pool keeps alive; the least recently given go first.
        source: Where new memory comes from.
        run: Where that of runs comes from (``block_runs``): given its size, and an offset that its
            first byte shares the place in a page with.
        may_grow: Whether what is lent may raise the bound now, if that much is in use.

    Attributes:
        source: The same; may be replaced.
        run: The same.
        bound: Of what is kept: ``max_bytes``, or more until ``shrink``.
    """

    def __init__(
        self,
        max_bytes: int = POOL_BYTES,
        source: Callable[[int], np.ndarray] = private,
        run: Callable[[int, int], memoryview | None] = no_run,
        may_grow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._max_bytes = self.bound = max_bytes
        self.may_grow = may_grow
        self.source = source
        self.run = run
        # id -> root, least recently given first. The pool's ONLY reference to a root is here.
        self._roots: OrderedDict[int, np.ndarray] = OrderedDict()
        # nbytes -> ids of the roots of that size, the next to be looked at first.
        self._by_size: dict[int, OrderedDict[int, None]] = {}
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._evicted = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Return a 1-D uint8 array of exactly ``nbytes`` that owns its memory.

        Its contents are arbitrary. The caller is its only owner.
        """
        key = self._unseen(nbytes)
        return self.source(nbytes) if key is None else self._remove(key)

    def lend(self, nbytes: int) -> np.ndarray:
        """As ``take``, and ``give`` at once: handed out again when nobody sees it any more."""
        key = self._unseen(nbytes)
        if key is None:
            root = self.source(nbytes)
            if self.may_grow():
                self._grow(nbytes)
            self.give(root)
            return root
        self._by_size[nbytes].move_to_end(key)
        self._roots.move_to_end(key)
        return self._roots[key]

    def _grow(self, nbytes: int) -> None:
        """Raise the bound for so much more, unless there is something that nobody sees.

        To forget what is in use would free nothing, and who uses more than the bound at one time
        will do so again.
        """
        while self._bytes + nbytes > self.bound:
            for key in list(itertools.islice(self._roots, _PROBES)):
                if _references(self._roots, key) == _UNSEEN_IN_POOL:
                    self._evict(key)
                    break
                self._roots.move_to_end(key)
            else:
                self.bound = self._bytes + nbytes

    def shrink(self) -> None:
        """Take the bound back to what it was, and forget what nobody sees beyond it."""
        self.bound = self._max_bytes
        for key in list(self._roots):
            if self._bytes <= self.bound:
                break
            if _references(self._roots, key) == _UNSEEN_IN_POOL:
                self._evict(key)

    def _unseen(self, nbytes: int) -> int | None:
        """Return the key of a root of this size that nobody else sees; None: there is none."""
        waiting = self._by_size.get(nbytes)
        if waiting is not None:
            for _ in range(min(_PROBES, len(waiting))):
                key = next(iter(waiting))
                if _references(self._roots, key) == _UNSEEN_IN_POOL:
                    self._hits += 1
                    return key
                waiting.move_to_end(key)
        self._misses += 1
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
        while self._bytes + root.nbytes > self.bound:
            self._evict(next(iter(self._roots)))
        self._add(root)

    @property
    def nbytes(self) -> int:
        """The size of what is kept alive."""
        return self._bytes

    def statistics(self) -> PoolStatistics:
        """Return counters and sizes as of now."""
        return PoolStatistics(
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted,
            roots=len(self._roots),
            bytes=self._bytes,
            max_bytes=self.bound,
        )

    def _add(self, root: np.ndarray) -> None:
        key = id(root)
        self._roots[key] = root
        self._by_size.setdefault(root.nbytes, OrderedDict())[key] = None
        self._bytes += root.nbytes

    def _evict(self, key: int) -> None:
        self._remove(key)
        self._evicted += 1

    def _remove(self, key: int) -> np.ndarray:
        root = self._roots.pop(key)
        same_size = self._by_size[root.nbytes]
        del same_size[key]
        if not same_size:  # sizes come from peers: their number must not grow for ever
            del self._by_size[root.nbytes]
        self._bytes -= root.nbytes
        return root


def _references(roots: OrderedDict[int, np.ndarray], key: int) -> int:
    return sys.getrefcount(roots[key])


_UNSEEN_IN_POOL = _references(OrderedDict({0: np.empty(1, np.uint8)}), 0)
