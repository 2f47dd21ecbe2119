"""Where pulled values come to lie: in memory of this task, or where a ps of its host has them.

A body that is lent (``net.shared``) need not be copied by who only reads it. A *lease* is an array
over a ps's own memory: it is read-only, stays as it is for as long as anybody sees it, and gives
that memory back when nobody does. A variable becomes one where all of it can be seen as one array:
it is one extent of a body, or its shards can be mapped side by side (``net.shared.windows``). All
else is copied into memory from a pool, by the connection while it comes in, or here.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from psync.client.plans import Part, Plan, targets_of
from psync.net.shared.windows import Windows
from psync.numerics.memory import BlockPool
from psync.wire.lent import Borrowed, copies
from psync.wire.tensors import to_bytes_view


class _Buffers(dict[int, memoryview]):
    """Receive buffers of a plan, by number; each is there once it is needed."""

    def __init__(self, plan: Plan, pool: BlockPool, writable: bool) -> None:
        super().__init__()
        self.roots: dict[int, np.ndarray] = {}  # arrays on them are as writable as they are
        self._plan = plan
        self._pool = pool
        self._writable = writable

    def __missing__(self, number: int) -> memoryview:
        root = self._pool.lend(self._plan.buffers[number])
        view = self[number] = to_bytes_view(root)
        self.roots[number] = root = root.view()
        root.flags.writeable = self._writable
        return view


class Landing:
    """Room for the values of a plan's variables, for one pull.

    Args:
        plan: That is pulled.
        pool: Memory of arrays that are copied into, handed out again once they are gone.
        out: Arrays that take the values instead, or None for each.
        writable: Whether the others may be changed.
        windows: Make arrays of what is lent; None: all is copied.
    """

    def __init__(
        self,
        plan: Plan,
        pool: BlockPool,
        out: Sequence[np.ndarray | None] = (),
        writable: bool = False,
        windows: Windows | None = None,
    ) -> None:
        self._plan = plan
        self._given = {index: array for index, array in enumerate(out) if array is not None}
        self._views = {index: to_bytes_view(array) for index, array in self._given.items()}
        self._buffers = _Buffers(plan, pool, writable)
        self._windows = None if writable else windows
        self._kept: dict[int, list[memoryview]] = {}  # bodies where they lie, as ``place`` names it

    def place(self, at: int, lent: Borrowed | None = None) -> Sequence[memoryview]:
        """Return where the body of an answer belongs; or that body itself, to be read there.

        Args:
            at: Place of the request among the plan's.
            lent: The body, if it is lent.
        """
        self._kept.pop(at, None)  # of an answer that was asked for again
        if lent is not None and self._windows is not None and lent.may_keep:
            if self._is_worth_it(at, lent.views):
                kept = self._kept[at] = lent.keep()
                return kept
        return targets_of(self._plan, self._plan.requests[at], self._buffers, self._views)

    def make_room(self) -> None:
        """Take memory for all of it: best while nothing else is to be done."""
        self._fill(self._given)

    def _fill(self, other: Mapping[int, np.ndarray]) -> None:
        """See that the buffers are there of all variables that have no other array."""
        used: Iterable[int] = range(len(self._plan.buffers))
        if other:
            places = enumerate(self._plan.places)
            used = {place.buffer for index, place in places if index not in other}
        for number in used:
            self._buffers[number]

    async def values(self) -> list[np.ndarray]:
        """Return an array for each variable: all answers are there. To be called once.

        Cancellation: Safe.
        """
        leased = self._leased() if self._kept else {}
        while self._kept:
            for _ in self._copying(*self._kept.popitem(), leased):
                await asyncio.sleep(0)
        return self.arrays(leased)

    def arrays(self, leased: Mapping[int, np.ndarray] | None = None) -> list[np.ndarray]:
        """Return an array for each variable, with ``leased`` as the bytes of some."""
        roots, places, other = self._buffers.roots, self._plan.places, dict(self._given)
        for index, content in (leased or {}).items():
            other[index] = np.ndarray(places[index].shape, places[index].dtype, content)
        self._fill(other)
        return [
            other[index] if index in other else np.ndarray(shape, dtype, roots[buffer], offset)
            for index, (buffer, offset, shape, dtype) in enumerate(places)
        ]

    # What is lent.

    def _is_worth_it(self, at: int, views: Sequence[memoryview]) -> bool:
        """Whether a large shard lies in one piece in a body, and has not to go elsewhere."""
        body = _Lying(views)
        return any(
            part.request == at and index not in self._given and body.piece(part) is not None
            for index, parts in self._plan.large.items()
            for part in parts
        )

    def _leased(self) -> dict[int, np.ndarray]:
        """Return the bytes of each variable that can be seen where they lie."""
        assert self._windows is not None, "something was kept"
        bodies = {at: _Lying(views) for at, views in self._kept.items()}
        leased: dict[int, np.ndarray] = {}
        for index, parts in self._plan.large.items():
            if index in self._given or any(part.request not in bodies for part in parts):
                continue
            root = self._windows.joined([bodies[part.request].piece(part) for part in parts])
            if root is not None and _is_aligned(root, self._plan.places[index].dtype):
                leased[index] = root
        return leased

    def _copying(
        self, at: int, views: Sequence[memoryview], leased: Mapping[int, np.ndarray]
    ) -> Iterator[int]:
        """Copy what is not leased of a body; yield after each part."""
        body, stop = _Lying(views), 0
        targets: list[memoryview] = []
        sources: list[memoryview] = []
        for index, first, end in self._plan.requests[at].cuts:
            start, stop = stop, stop + end - first
            if index in leased:
                continue
            if index in self._given:
                targets.append(self._views[index][first:end])
            else:
                buffer, offset, *_ = self._plan.places[index]
                targets.append(self._buffers[buffer][offset + first : offset + end])
            sources += body.pieces(start, stop)
        return copies(targets, sources)


class _Lying:
    """A body where it lies.

    Args:
        views: Its extents.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ends = list(itertools.accumulate(map(len, views)))

    def piece(self, part: Part) -> memoryview | None:
        """Return a part that is in one extent; None: it is in several."""
        pieces = self.pieces(part.offset, part.offset + part.nbytes)
        return pieces[0] if len(pieces) == 1 else None

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from ``start`` to ``stop``."""
        pieces = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            view, end = self._views[number], self._ends[number]
            begin = end - len(view)
            pieces.append(view[start - begin : min(stop, end) - begin])
            start, number = end, number + 1
        return pieces


def _is_aligned(root: np.ndarray, dtype: np.dtype) -> bool:
    address: int = root.__array_interface__["data"][0]
    return not address % dtype.alignment
