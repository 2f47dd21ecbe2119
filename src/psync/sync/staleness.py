"""Staleness bounds: clocks of workers, and how far one may run ahead (stale synchronous parallel).

A worker's clock counts its rounds. After each round it *ticks*, and goes on when its clock is at
most ``max_staleness`` above the slowest clock of all workers that have work. Bound 0 is lock-step:
no worker begins round n + 1 before all have ended round n.

- **Who has work**, others say (``members``). A worker without any is not waited for: it is
  idle, dead, or out of data.
- **Where a clock begins**: a worker that comes, or comes back from idleness, starts at the slowest
  clock of those that have work, or goes on from its own where that is higher: a moment without
  work between two closures must not be a way round the bound. Where no worker has work, the highest
  clock ever reached stands for the slowest: no later worker waits for rounds that were done alone.
- **Who waits elsewhere**, in a synchronous group or at another clock, others say (``elsewhere``).
  It is not waited for meanwhile: it may wait for those that wait here. It keeps its clock.
- **A worker that was allowed to go on** stays allowed: the slowest clock falls only when a worker
  comes back that waited elsewhere, and one that ran ahead waits for it after the next round. The
  slowest itself is 0 ahead: of those that have work and do not wait elsewhere, one may always go
  on.
- **A stranger**, who ticks and is not known to have work, because news of it is still on its way,
  waits like the others, and none waits for it.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server"; of joining and idle workers it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

Replica = tuple[str, int]
"""A worker under one incarnation: (task, incarnation)."""


class Tick(NamedTuple):
    """One round of one worker is done."""

    task: str
    incarnation: int
    number: int  # of this tick of the worker, from 1


@dataclass(frozen=True, slots=True)
class Release:
    """The worker that ticked may go on."""

    tick: Tick
    ahead: int  # rounds that it is ahead of the slowest worker that has work


@dataclass(slots=True)
class _Clock:
    """Of one replica."""

    start: int  # what the clock would show at tick 0
    ticks: int = 0  # highest number of a tick
    released: int = 0  # highest number of one that was released
    has_work: bool = False

    @property
    def value(self) -> int:
        return self.start + self.ticks


class RoundClocks:
    """The clocks of one bound.

    Args:
        max_staleness: Rounds that a worker may be ahead of the slowest, at least 0.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._clocks: dict[Replica, _Clock] = {}
        self._elsewhere: frozenset[Replica] = frozenset()
        self._highest = 0  # clock ever reached
        self._waiting: dict[Tick, int] = {}  # the clock that each waits with, in order of arrival
        self._ticks = self._waits = 0
        self._ended = False

    def tick(self, task: str, incarnation: int, number: int) -> list[Release]:
        """Note that a worker has done a round. It waits until it is among those released.

        A repetition counts once. It is released when the round is, or at once if that was before.

        Args:
            task: Of the worker.
            incarnation: Of the worker.
            number: Of this tick of the worker, from 1.

        Returns:
            Who may go on now: perhaps this worker, perhaps others too.
        """
        tick = Tick(task, incarnation, number)
        clock = self._clocks.get((task, incarnation))
        if clock is None:
            clock = self._clocks[(task, incarnation)] = _Clock(self._slowest() - number + 1)
            clock.ticks = number - 1  # nobody has heard of these
        if number <= clock.released:
            return [Release(tick, max(0, clock.start + number - self._slowest()))]
        is_new = number > clock.ticks
        if is_new:
            clock.ticks = number
            self._ticks += 1
            self._highest = max(self._highest, clock.value)
        self._waiting[tick] = clock.start + number
        released = self._release()
        self._waits += is_new and tick in self._waiting
        return released

    def members(self, alive: Mapping[str, int], busy: AbstractSet[str] | None) -> list[Release]:
        """Note who has work.

        Args:
            alive: Incarnation of each living worker, by its task.
            busy: Tasks that have work, or None: all that live.

        Returns:
            Who may go on now.
        """
        for replica in [r for r in self._clocks if alive.get(r[0], r[1]) > r[1]]:
            del self._clocks[replica]  # a newer incarnation has replaced it
        working = {
            (task, incarnation)
            for task, incarnation in alive.items()
            if busy is None or task in busy
        }
        for replica, clock in self._clocks.items():
            clock.has_work = clock.has_work and replica in working
        stay = (clock.value for clock in self._clocks.values() if clock.has_work)
        slowest = min(stay, default=self._highest)
        for replica in working:
            clock = self._clocks.setdefault(replica, _Clock(slowest))
            if not clock.has_work:
                clock.has_work = True
                clock.start += max(0, slowest - clock.value)
        return self._release()

    def elsewhere(self, replicas: AbstractSet[Replica]) -> list[Release]:
        """Note who waits, but not only here.

        Returns:
            Who may go on now.
        """
        if replicas == self._elsewhere:
            return []
        self._elsewhere = frozenset(replicas)
        return self._release()

    @property
    def waiting(self) -> set[Replica]:
        """Who waits here."""
        return {(tick.task, tick.incarnation) for tick in self._waiting}

    def cancel(self, tick: Tick) -> None:
        """Nobody waits for this tick any more. The round stays done."""
        self._waiting.pop(tick, None)

    def end(self) -> list[Release]:
        """Training is over: release everybody, now and from now on."""
        self._ended = True
        return self._release()

    @property
    def clocks(self) -> dict[str, int]:
        """The clock of each task that has work."""
        return {task: clock.value for (task, _), clock in self._clocks.items() if clock.has_work}

    def statistics(self) -> dict[str, Any]:
        """Return clocks and counters; ``waits`` are ticks that could not be answered at once."""
        return {
            "max_staleness": self.max_staleness,
            "clocks": self.clocks,
            "ticks": self._ticks,
            "waits": self._waits,
            "waiting": len(self._waiting),
        }

    def _slowest(self) -> int:
        """Return the slowest clock of those that have work and do not wait elsewhere."""
        counting = (
            clock.value
            for replica, clock in self._clocks.items()
            if clock.has_work and replica not in self._elsewhere
        )
        return min(counting, default=self._highest)

    def _release(self) -> list[Release]:
        """Let go who waits with a clock that the slowest one allows."""
        slowest = self._slowest()
        allowed = slowest + self.max_staleness
        free = [
            (clock, tick)
            for tick, clock in self._waiting.items()
            if clock <= allowed or self._ended
        ]
        releases = []
        for clock, tick in sorted(free, key=itemgetter(0)):
            del self._waiting[tick]
            releases.append(Release(tick, max(0, clock - slowest)))
            known = self._clocks.get((tick.task, tick.incarnation))
            if known is not None:
                known.released = max(known.released, tick.number)
        return releases
