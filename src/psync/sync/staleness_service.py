"""Staleness bounds on ps 0: a worker's tick is answered when the worker may go on.

``RoundClocks`` decides, one for each bound; this delays the answers. A bound is known from its
first tick on, and then gets the list of workers that have work. Each bound also gets the workers
that wait at the others, and in synchronous groups: no clock waits for a worker that may be waiting
for it.

Who has work is reported from the first wait on, be it here or in a group (``wanted``). A tick that
comes before the first report waits for it: it cannot be told how far ahead it is.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.net.connection import Handler, Request
from psync.sync.staleness import Release, Replica, RoundClocks, Tick
from psync.wire.codec import Message
from psync.wire.messages import Number, ReportSchedule, TickClock

_Waiting = dict[Tick, list[Request[TickClock]]]
"""Several requests where one was repeated; each gets the rounds that the worker is ahead."""


@dataclass(eq=False)
class ClockService:
    """All bounds of one cluster, on one timeline of one coordinator.

    Args:
        task: Name of the ps, for messages.
        check_incarnation: Raises FencedError for a (task, incarnation) that is not served any more.
        in_groups: Says who waits in a synchronous group. When that changes, ``look_again``.
        wanted: Set once somebody waits for others: then the schedule decides how long.
        heeds_groups: Whether ``look_again`` does anything: there is a bound, or nobody has waited.
    """

    task: str
    check_incarnation: Callable[[str, int], None]
    in_groups: Callable[[], frozenset[Replica]]
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    heeds_groups: bool = True
    _bounds: dict[int, tuple[RoundClocks, _Waiting]] = field(default_factory=dict)
    _known: asyncio.Event = field(default_factory=asyncio.Event)  # who has work
    _alive: Mapping[str, int] = field(default_factory=dict)
    _busy: frozenset[str] | None = None
    _ended: bool = False

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {TickClock: Handler(self._tick)}

    def hear(self, message: ReportSchedule) -> None:
        """Note a report of the coordinator."""
        if message.ended is not None:
            self.end()
        else:
            busy = None if message.queued else frozenset(task for _, task in message.in_flight)
            self._alive, self._busy = dict(message.workers), busy
            self._known.set()
            for clocks, waiting in self._bounds.values():
                _perform(waiting, clocks.members(self._alive, self._busy))
                self.look_again()  # who goes on here is waited for by the next

    def look_again(self) -> None:
        """Tell each bound who waits elsewhere.

        Whoever is let go at one does not wait any more for another one: that lets nobody go there,
        but the next tick must find it so.
        """
        if not self.wanted.is_set() and self.in_groups():
            self.wanted.set()
        somebody_went = bool(self._bounds)
        self.heeds_groups = somebody_went or not self.wanted.is_set()
        while somebody_went:
            somebody_went = False
            in_groups = self.in_groups()
            for bound, (clocks, waiting) in self._bounds.items():
                others = (each.waiting for key, (each, _) in self._bounds.items() if key != bound)
                releases = clocks.elsewhere(in_groups.union(*others))
                _perform(waiting, releases)
                somebody_went |= bool(releases)

    def end(self) -> None:
        """Training is over, or another timeline is served: nobody waits any more."""
        self._ended = True
        self.wanted.set()
        self._known.set()
        for clocks, waiting in self._bounds.values():
            _perform(waiting, clocks.end())

    def describe(self) -> list[str]:
        """Say who waits for whom; for reports."""
        lines = []
        for number, (clocks, waiting) in self._bounds.items():
            if waiting:
                who = ", ".join(sorted(tick.task for tick in waiting))
                of = sorted((clock, task) for task, clock in clocks.clocks.items())
                slowest = f"{of[0][1]}, at round {of[0][0]}" if of else "nobody"
                lines.append(f"staleness bound {number}: waiting {who}; slowest {slowest}")
        return lines

    def statistics(self) -> dict[str, Any]:
        """Return, for each bound by its number, clocks and waits."""
        return {str(number): clocks.statistics() for number, (clocks, _) in self._bounds.items()}

    def _tick(self, request: Request[TickClock]) -> None:
        peer, message = request.peer, request.message
        if message.tick < 1 or message.max_staleness < 0:
            raise RemoteProtocolError(
                f"{self.task}: expected a tick from 1 and a bound from 0 of {peer.task}, got "
                f"tick {message.tick} and bound {message.max_staleness}"
            )
        if not self._known.is_set():
            self.wanted.set()
            request.start(self._tick_later(request))
        else:
            self._judge(request)

    async def _tick_later(self, request: Request[TickClock]) -> None:
        await self._known.wait()
        self.check_incarnation(*request.peer.client)
        self._judge(request)

    def _judge(self, request: Request[TickClock]) -> None:
        clocks, waiting = self._bound(request.message)
        tick = Tick(*request.peer.client, request.message.tick)
        waiting.setdefault(tick, []).append(request)
        request.on_given_up = functools.partial(self._given_up, clocks, waiting, tick)
        _perform(waiting, clocks.tick(*tick))
        if len(self._bounds) > 1:
            self.look_again()

    def _bound(self, message: TickClock) -> tuple[RoundClocks, _Waiting]:
        bound = self._bounds.get(message.bound)
        if bound is None:
            bound = self._bounds[message.bound] = (RoundClocks(message.max_staleness), {})
            bound[0].members(self._alive, self._busy)
            self.look_again()
            if self._ended:
                bound[0].end()
        elif bound[0].max_staleness != message.max_staleness:
            raise ConfigurationError(
                f"{self.task}: optimizer {message.bound} has a staleness bound of "
                f"{bound[0].max_staleness} rounds, got {message.max_staleness}"
            )
        return bound

    def _given_up(
        self, clocks: RoundClocks, waiting: _Waiting, tick: Tick, request: Request[Any]
    ) -> None:
        requests = waiting.get(tick, [])
        if request in requests and not request.peer.is_closed:  # else it is asked again
            requests.remove(request)
            if not requests:
                del waiting[tick]
                clocks.cancel(tick)
                self.look_again()


def _perform(waiting: _Waiting, releases: Iterable[Release]) -> None:
    for release in releases:
        for request in waiting.pop(release.tick):
            request.answer(Number(release.ahead))
