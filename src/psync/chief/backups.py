"""Backups of ps tasks: the process that keeps each of them, and their promotion."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Coroutine, Iterable
from typing import Any

from psync.chief.links import ClusterLinks
from psync.chief.recovery_rule import RecoveryRule
from psync.client.link import AWAY_FOR_S, REFUSED_FOR_S, PsLink, always, ask
from psync.errors import ConfigurationError, ParameterServerLost, PsyncError, VersionMismatch
from psync.net.connection import Connection
from psync.wire import messages

logger = logging.getLogger(__name__)


PAUSE_S = 0.2
"""Between two attempts to make a backup."""

CONNECT_S = 1.0
"""A process where nobody has listened for so long has ended, and the backups in it."""


class Backups:
    """Keeps the backups of one coordinator's ps tasks.

    no backup --BackUp is answered-->                 complete    only now it may be promoted
    complete  --the backup does not follow-->         no backup   BackUp to "": the ps goes on alone

    A ps waits for its backup before it answers, and goes on without it only at this coordinator's
    command: so no backup is promoted that lacks what was answered. When one is promoted, says
    ``recovery_rule``.

    Source: docs/design.md, "Failover".

    Args:
        rule: Knows who is served where, and is told who has a backup.
        links: To all tasks; there are at least two ps tasks.
    """

    def __init__(self, rule: RecoveryRule, links: ClusterLinks) -> None:
        self._rule = rule
        self._cluster = links
        self._links = links.ps.links
        self._endpoint = links.endpoint
        self._processes = list(links.processes.items())
        self._next_epoch = itertools.count(1)
        self._epochs: dict[int, int] = {}  # under which complete backups were ordered
        # By ps, process and its incarnation: why it refuses to be the host, and always will.
        self._refusals: dict[tuple[int, int, int], PsyncError] = {}
        self._peers: dict[int, Connection] = {}  # to processes
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._closed = False

    def describe(self) -> list[str]:
        """Say where each ps and its backup are; for reports."""
        rule = self._rule
        return [
            f"{link.task} is served in the process of {self._processes[home][0]}, its backup "
            + ("is not complete" if host is None else f"in that of {self._processes[host][0]}")
            for link, home, host in zip(self._links, rule.homes, rule.hosts, strict=True)
        ]

    async def complete(self, *, at_first: bool = False) -> None:
        """Wait until each ps has a backup, and could die.

        Args:
            at_first: Whether a process that refuses for good is an error.

        Raises:
            ParameterServerLost: A ps is gone.
            VersionMismatch: Ps tasks run several versions of psync.
            ConfigurationError: Bits are promised, and two ps tasks round differently.

        Cancellation: Safe.
        """
        while None in self._rule.hosts:
            if at_first and self._rule.gone is not None:
                raise self._rule.gone
            for refusal in self._refusals.values() if at_first else ():
                raise refusal
            self._changed.clear()
            await self._changed.wait()

    def look(self) -> None:
        """The rule has changed. A ps without a backup is given up as late as one that had none."""
        for link, host in zip(self._links, self._rule.hosts, strict=True):
            link.refused_for_s = REFUSED_FOR_S if host is None else AWAY_FOR_S
            link.away_for_s = math.inf if host is None else AWAY_FOR_S
        self._changed.set()

    # They are made, and made again.

    def keep(self) -> None:
        """Make backups; from now on, or again after a recovery."""
        if not self._closed and not self._keepers:
            self._begin(self._keep(link.index) for link in self._links)

    def pause(self) -> None:
        """Make none for a while."""
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []

    def give_up(self) -> None:
        """Make none any more: whoever waits for a ps that waits for its backup is answered."""
        self.pause()
        self._begin(self._without_backup(link.index) for link in self._links if not link.lost)

    def _begin(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._keepers = [asyncio.get_running_loop().create_task(each) for each in work]

    async def _order(self, link: PsLink, message: messages.BackUp, *, urgent: bool = False) -> None:
        """Where no update is in front that waits for a backup: of those a ps takes only so many."""
        await link.call(always(message), urgent=urgent, cut=True)

    async def _keep(self, ps: int) -> None:
        """See to it that a ps has a backup."""
        link, chosen, failures = self._links[ps], 0, 0
        while True:
            try:
                host = self._rule.hosts[ps]
                if host is None:
                    host = chosen = await self._host_for(ps)
                    epoch = next(self._next_epoch)
                    await self._order(link, messages.BackUp(epoch, *self._processes[host], False))
                    self._epochs[ps] = epoch
                    self._note(ps, host)
                    failures = 0
                await self._order(
                    link, messages.BackUp(self._epochs[ps], *self._processes[host], True)
                )
                self._note(ps, None)
                # Where the ps that is served beside the backup is away, its loss is the alarm.
                homes = zip(self._links, self._rule.homes, strict=True)
                away = any(home == host and not each.is_open for each, home in homes)
                level = logging.INFO if away else logging.WARNING
                logger.log(level, "%s continues without its backup", link.task)
                await self.let_alone(ps)
                continue
            except ParameterServerLost as exc:
                if not link.is_held:  # it says so itself; else it was found out here
                    link.give_up(exc.message)
            except (VersionMismatch, ConfigurationError) as exc:
                logger.warning("%s has no backup: %s", link.task, exc)
                self._refusals[ps, chosen, self._peers[chosen].incarnation] = exc
                self._changed.set()
            except PsyncError as exc:
                failures += 1
                level = logging.WARNING if failures == 2 else logging.INFO  # one may be chance
                logger.log(level, "%s has no backup: %s", link.task, exc.message)
            except Exception:
                logger.exception("the backup of %s cannot be maintained", link.task)
            await asyncio.sleep(PAUSE_S)

    def _note(self, ps: int, host: int | None) -> None:
        self._rule.hosts[ps] = host
        self.look()

    async def let_alone(self, ps: int, *, urgent: bool = False) -> None:
        """Order a ps to go on without its backup. Raises as ``PsLink.call``."""
        order = messages.BackUp(next(self._next_epoch), "", "", False)
        await self._order(self._links[ps], order, urgent=urgent)

    async def _without_backup(self, ps: int) -> None:
        with contextlib.suppress(PsyncError):
            await self.let_alone(ps)

    async def _host_for(self, ps: int) -> int:
        """Return a process for a backup: the next one that is there, and has not refused."""
        count = len(self._processes)
        while True:
            for step in range(1, count):
                host = (self._rule.homes[ps] + step) % count
                with contextlib.suppress(PsyncError):
                    peer = await self._connect(host)
                    if (ps, host, peer.incarnation) not in self._refusals:
                        return host
            await asyncio.sleep(PAUSE_S)

    async def _connect(self, process: int) -> Connection:
        """Connect to a process, at the address that it had when all began."""
        peer = self._peers.get(process)
        if peer is None or not peer.is_open:
            task, address = self._processes[process]
            peer = self._peers[process] = await self._endpoint.connect(address, task)
        return peer

    # They are promoted.

    async def promote(self, ps: int, host: int) -> None:
        """Let the backup of a ps serve; asked again as often as the answer is lost.

        Raises:
            PsyncError: It does not.
            TimeoutError: It says nothing.
        """
        link, fences = self._links[ps], self._cluster.membership.fences()
        message = messages.Promote(ps, next(self._next_epoch), self._endpoint.incarnation, fences)
        way = PsLink(self._endpoint, host, self._processes[host][1], link.lost_after_s)
        way.refused_for_s = CONNECT_S
        try:
            async with asyncio.timeout(link.lost_after_s):
                promoted, _ = await ask(way, message, messages.Promoted)
        finally:
            await way.close()
        self._cluster.move_ps(link, promoted.address)

    async def close(self) -> None:
        """Keep nothing more. Cancellation: safe."""
        self._closed = True
        tasks = self._keepers
        self.pause()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            peer.close()
