"""Updates that a simulated program makes itself, outside of closures."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np

import psync
from psync.testing.simulation.journal import Journal
from psync.testing.simulation.workload.tables import Fault, Look


class OwnUpdates:
    """Two variables of one life of the program: each update of them is of all shards, or of none.

    To be made in the scope of a strategy.

    Args:
        num_shards: Of a variable.

    Attributes:
        base: What was counted on each shard when this life began.
        ended: Updates that count, and have ended.
    """

    def __init__(self, num_shards: int) -> None:
        self._whole = psync.Variable(np.zeros((num_shards, 3), np.float32), name="whole")
        self._count = psync.Variable(np.zeros((num_shards, 1), np.int64), name="count")
        self.variables = {"whole": self._whole, "count": self._count}
        self.base = np.zeros(1, np.int64)
        self.ended = 0
        self._begun = 0
        self._last = 0  # of the values that were assigned
        self._assigned = 0  # assigns that have ended

    async def act(self, rng: random.Random, compare: Callable[[], None]) -> None:
        """Update both until this is cancelled, and ``compare`` meanwhile."""
        journal = Journal.current()
        while True:
            await asyncio.sleep(rng.uniform(0.01, rng.choice((0.1, 2.0, 20.0))))
            events, settled = len(journal.events), False
            with contextlib.suppress(psync.LockLost):
                if rng.random() < 0.5:
                    writes = [self._assign() for _ in range(rng.choice((1, 3)))]
                    await asyncio.gather(*writes, *(self._read() for _ in range(3)))
                    settled = True
            compare()
            found = await self._read()
            if settled and len(journal.events) == events:
                alone = bool((found == found[0]).all())
                journal.look(alone, f"of several, none wrote alone: {found.tolist()}", "lock")
            await asyncio.gather(*(self._add() for _ in range(rng.choice((0, 1, 4)))))

    async def _add(self) -> None:
        self._begun += 1
        await self._count.assign_add(np.ones(self._count.shape, np.int64))
        self.ended += 1

    async def _assign(self) -> None:
        self._last += 1
        value = np.full(self._whole.shape, self._last, np.float32)
        await self._whole.assign(value, atomic=True)
        self._assigned += 1

    async def _read(self) -> np.ndarray:
        found: np.ndarray = await self._whole.read()
        torn = not (found == found[:, :1]).all()
        Journal.current().look(not torn, f"a read of a shard is torn: {found.tolist()}")
        return found

    @property
    def under_way(self) -> int:
        """How many updates have not ended."""
        return self._begun - self.ended + self._last - self._assigned

    def check(self, look: Look, ended: int) -> Iterator[Fault]:
        """What was counted is there once, on all shards, unless it was undone.

        Args:
            look: At values.
            ended: How many updates had ended before these were pulled.
        """
        if look.late or look.journal.is_rolled_back:
            return
        # An update of a life that has ended may be on some shards; so may one that is under way.
        added = (look.values["own"]["count"].ravel() - self.base).tolist()
        if not ended <= min(added) <= max(added) <= self._begun:
            said = f"{added}, of {self._begun} that were begun {ended} had ended"
            yield "own updates", f"{look.when}: {said}"
