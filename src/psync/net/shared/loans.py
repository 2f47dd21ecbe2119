"""A loan: one body that is lent, as its sender sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from psync.wire.lent import Extent, copies


@dataclass(slots=True, eq=False)
class Loan:
    """A body that is lent, or will be when all of it has been copied.

    Attributes:
        extents: Where it is.
        holds: All that must stay as it is until it is returned.
        nbytes: Its size.
    """

    extents: list[Extent]
    holds: list[memoryview]
    nbytes: int
    copied_bytes: int = 0
    targets: list[memoryview] = field(default_factory=list)
    sources: list[memoryview] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)  # until it is returned

    def add(self, extent: Extent) -> None:
        """Let the next part of it be there."""
        last = self.extents[-1] if self.extents else None
        if last is not None and (last.region, last.offset + last.nbytes) == extent[:2]:
            self.extents[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            self.extents.append(extent)

    def is_of(self, owners: Collection[int]) -> bool:
        """Return whether it holds memory of one of these arrays, given by their ids."""
        return any(id(held.obj) in owners for held in self.holds)

    def over(self) -> None:
        """Nobody reads it any more."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def copying(self) -> Callable[[], bool]:
        """Return what copies a part of it each time, and says whether that was the last."""
        rest = copies(self.targets, self.sources)
        return lambda: next(rest, None) is None
