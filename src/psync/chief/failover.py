"""Failover: every ps has a backup in another ps process, which is promoted when the ps is lost.

    ALONE     --BackUp is answered-->                 BACKED UP   only now it may be promoted
    BACKED UP --the backup does not follow-->         ALONE       BackUp to "": the ps goes on
    BACKED UP --the ps is lost-->                     PROMOTING   closures and links are paused
    PROMOTING --Promoted-->                           ALONE       FailoverEvent; another is made
    ALONE     --the ps is lost-->                     ``PsRecovery``: rollback, or the end

A ps waits for its backup before it answers, and goes on without it only at this coordinator's
command: so no backup is promoted that lacks what was answered. Nothing is undone. Workers are
attached again, with new addresses; closures that had not ended run again, and the ledger of the
backup answers "duplicate" to what they have done already.

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Sequence

from psync.chief.cluster_links import ClusterLinks
from psync.chief.events import Events, FailoverEvent
from psync.chief.recovery_state import RecoveryState
from psync.chief.rollback import PsRecovery
from psync.client.lanes import AWAY_FOR_S, REFUSED_FOR_S
from psync.client.ps_link import PsLink, always
from psync.errors import (
    ConfigurationError,
    ParameterServerLost,
    PsyncError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.net.peer import Peer
from psync.wire.recovery_messages import BackUp, Promote, Promoted

logger = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Between two attempts to make a backup."""

CONNECT_S = 1.0
"""A process where nobody has listened for so long has ended, and the backups in it."""


class ReplicaRecovery:
    """Keeps the backups of one coordinator's ps tasks, and promotes them.

    Args:
        state: Whether training runs.
        links: To all tasks; there are at least two ps tasks.
        events: Where it is told.
        fallback: Recovers what has no backup.
    """

    def __init__(
        self,
        state: RecoveryState,
        links: ClusterLinks,
        events: Events,
        fallback: PsRecovery,
    ) -> None:
        self._state = state
        self._cluster = links
        self._links = links.ps.links
        self._endpoint = links.endpoint
        self._events = events
        self._fallback = fallback
        self._processes = [(link.task, link.address) for link in self._links]
        self._home = list(range(len(self._links)))  # in whose process each ps is served
        self._orders: list[BackUp | None] = [None] * len(self._links)  # of complete backups
        self._hosts: list[int | None] = [None] * len(self._links)  # in whose processes they are
        self._epochs = itertools.count(1)
        # By ps, process and its incarnation: why it refuses to be the host, and always will.
        self._refusals: dict[tuple[int, int, int], PsyncError] = {}
        self._peers: dict[int, Peer] = {}  # to processes
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._lost: dict[int, ParameterServerLost] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        """Whether each ps has a backup, and could die now."""
        return None not in self._orders

    def describe(self) -> list[str]:
        """Say where each ps and its backup are; for reports."""
        return [
            f"{link.task} is served in the process of {self._processes[home][0]}, its backup "
            + ("is not complete" if host is None else f"in that of {self._processes[host][0]}")
            for link, home, host in zip(self._links, self._home, self._hosts, strict=True)
        ]

    def served_in(self, homes: Sequence[int]) -> None:
        """Say in whose process each ps is served; before anything is done with them."""
        self._home = list(homes)

    async def start(self) -> None:
        """Make the first backups; return when they are complete.

        Raises:
            VersionMismatch: Ps tasks run several versions of psync.

        Cancellation: Safe.
        """
        self.resume()
        while not self.complete:
            await self.changed()
            for refusal in self._refusals.values():
                raise refusal

    async def changed(self) -> None:
        """Wait until a backup has become complete, or was lost. Cancellation: safe."""
        self._changed.clear()
        await self._changed.wait()

    def _note(self, ps: int, host: int | None, order: BackUp | None) -> None:
        self._hosts[ps], self._orders[ps] = host, order
        self._be_patient(ps, order is None)
        self._changed.set()

    def _be_patient(self, ps: int, is_alone: bool) -> None:
        """Give up a ps that cannot be reached at once, or as late as one that has no backup."""
        link = self._links[ps]
        link.refused_for_s = REFUSED_FOR_S if is_alone else AWAY_FOR_S
        link.away_for_s = math.inf if is_alone else AWAY_FOR_S

    # Backups are made, and made again.

    def resume(self) -> None:
        """Make backups; from now on, or again after a recovery."""
        if not self._closed and not self._keepers:
            create_task = asyncio.get_running_loop().create_task
            self._keepers = [create_task(self._keep(ps)) for ps in range(len(self._links))]

    def _pause(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []

    async def _keep(self, ps: int) -> None:
        """See to it that a ps has a backup."""
        link, host = self._links[ps], 0
        while True:
            try:
                order = self._orders[ps]
                if order is None:
                    host = await self._host_for(ps)
                    order = BackUp(next(self._epochs), *self._processes[host], False)
                    await link.call(always(order))
                    self._note(ps, host, order)
                await link.call(always(BackUp(order.epoch, order.task, order.address, True)))
                self._note(ps, None, None)
                logger.warning("%s goes on without its backup", link.task)
                await self._alone(ps)
                continue
            except ParameterServerLost as exc:
                if not link.is_held:  # it says so itself; else it was found out here
                    link.give_up(exc.message)
            except (VersionMismatch, ConfigurationError) as exc:
                logger.warning("%s has no backup: %s", link.task, exc)
                self._refusals[ps, host, self._peers[host].incarnation] = exc
                self._changed.set()
            except PsyncError as exc:
                logger.info("%s has no backup: %s", link.task, exc.message)
            except Exception:
                logger.exception("a backup of %s cannot be kept", link.task)
            await asyncio.sleep(PAUSE_S)

    async def _alone(self, ps: int, *, urgent: bool = False) -> None:
        order = BackUp(next(self._epochs), "", "", False)
        await self._links[ps].call(always(order), urgent=urgent)

    async def _host_for(self, ps: int) -> int:
        """Return a process for a backup: the next one that is there, and has not refused."""
        count = len(self._processes)
        while True:
            for step in range(1, count):
                host = (self._home[ps] + step) % count
                try:
                    peer = await self._peer(host)
                except PsyncError:
                    continue
                if (ps, host, peer.incarnation) not in self._refusals:
                    return host
            await asyncio.sleep(PAUSE_S)

    async def _peer(self, process: int) -> Peer:
        """Return a connection to a process, at the address that it had when all began."""
        peer = self._peers.get(process)
        if peer is None or not peer.is_open:
            task, address = self._processes[process]
            peer = self._peers[process] = await self._endpoint.connect(address, task)
        return peer

    # They are promoted.

    def takes_over(self, error: ParameterServerLost) -> bool:
        """A ps is lost; return whether it will be there again."""
        ps = next(link.index for link in self._links if link.task == error.task)
        if self._fallback.is_on:
            self._at_home({self._home[ps]})
            return self._fallback.takes_over(error)
        self._lost[ps] = error
        if self._task is not None:
            return True
        self._pause()
        if self._orders[ps] is None:
            return self._falls_back()
        for other, (home, order) in enumerate(zip(self._home, self._orders, strict=True)):
            if home == self._home[ps] and order is not None and other != ps:
                task = self._links[other].task  # it will be found out; this is sooner
                self._lost[other] = ParameterServerLost(task, f"was in the process of {error.task}")
        for other, where in enumerate(self._hosts):
            if where == self._home[ps]:
                self._be_patient(other, True)
        logger.warning("%s; its backup takes over", error.message)
        for link in self._links:
            link.hold()
        self._state.failover_began()
        self._task = asyncio.get_running_loop().create_task(self._recover())
        return True

    async def _recover(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        served: dict[int, str] = {}
        try:
            while self._lost:
                ps = next(iter(self._lost))
                await self._promote(ps)
                served[ps] = self._processes[self._home[ps]][0]
                self._lost.pop(ps, None)
                if not self._lost:
                    await self._tell_ps0()
        except Exception as exc:
            logger.error("%s: its backup cannot take over: %r", self._links[ps].task, exc)
            self._task = None
            if not self._falls_back():
                error = self._lost[ps]
                for link in self._links:
                    link.release()
                self._state.failed(error)
            return
        self._task = None
        self._state.end_sessions()  # only now, so that all workers are told where ps tasks are
        for link in self._links:
            link.release()
        event = FailoverEvent(
            tuple(self._links[ps].task for ps in served), tuple(served.values()),
            loop.time() - began,
        )  # fmt: skip
        logger.warning(
            "%s served by backups after %.2f s; nothing is undone", ", ".join(event.lost),
            event.seconds,
        )  # fmt: skip
        self._state.recovered()
        self._events.emit(event)

    async def _promote(self, ps: int) -> None:
        """Let the backup of a ps serve.

        Raises:
            PsyncError: It does not.
            TimeoutError: It says nothing.
        """
        host, link = self._hosts[ps], self._links[ps]
        if host is None:
            raise ParameterServerLost(link.task, "is lost, and had no complete backup")
        await self._without(self._home[ps])
        address = await self._ask_to_serve(ps, host)
        self._home[ps] = host
        self._note(ps, None, None)
        link.revive()
        link.address = address
        self._cluster.ps_moved(link)
        await self._cluster.attach_ps(link)

    async def _without(self, dead: int) -> None:
        """Whose backup was in the process that died does not wait for it any more.

        So it is before anybody is promoted: if this coordinator dies then, the next one knows of
        all others that they were not replaced.
        """
        for other, where in enumerate(self._hosts):
            if where == dead and self._home[other] != dead and other not in self._lost:
                self._note(other, None, None)
                try:
                    await self._alone(other, urgent=True)
                except ParameterServerLost:
                    logger.info("%s is lost, too", self._links[other].task)

    async def _tell_ps0(self) -> None:
        """Let ps 0 know where all ps tasks are served: it closes the steps of all."""
        try:
            await self._cluster.attach_ps(self._links[0])
        except ParameterServerLost:
            logger.info("%s is lost, too", self._links[0].task)  # and noted: see ``takes_over``

    async def _ask_to_serve(self, ps: int, host: int) -> str:
        """Return where the backup of a ps serves; asked again as often as the answer is lost."""
        fences = self._cluster.membership.fences()
        message = Promote(ps, next(self._epochs), self._endpoint.incarnation, fences)
        patience_s = self._links[ps].lost_after_s
        way = PsLink(self._endpoint, host, self._processes[host][1], patience_s)
        way.refused_for_s = CONNECT_S
        try:
            async with asyncio.timeout(patience_s):
                answer = (await way.call(always(message))).message
        finally:
            await way.close()
        if not isinstance(answer, Promoted):
            raise RemoteProtocolError(f"{way.task} promoted with {type(answer).__name__}")
        return answer.address

    def _falls_back(self) -> bool:
        """Return whether all ps tasks go back to a checkpoint."""
        for ps in range(len(self._links)):
            self._note(ps, None, None)
        lost, self._lost = self._lost, {}
        if not all([self._fallback.takes_over(error) for error in lost.values()]):
            self._lost = lost  # it is the end: there is nothing anywhere
            create_task = asyncio.get_running_loop().create_task
            self._keepers = [
                create_task(self._without_backup(link.index))
                for link in self._links
                if link.lost is None
            ]
            return False
        self._at_home({self._home[ps] for ps in lost})
        return True

    async def _without_backup(self, ps: int) -> None:
        """Whoever waits for a ps that waits for its backup is answered."""
        with contextlib.suppress(PsyncError):
            await self._alone(ps)

    def _at_home(self, dead: set[int]) -> None:
        """Look for all that was served in these processes where it was at the beginning."""
        for ps, (link, (_, address)) in enumerate(zip(self._links, self._processes, strict=True)):
            if self._home[ps] in dead:
                if self._home[ps] != ps:
                    link.revive()
                link.address, self._home[ps] = address, ps
                self._cluster.ps_moved(link)

    async def close(self) -> None:
        """Keep and promote nothing more. Cancellation: safe."""
        self._closed = True
        tasks: Sequence[asyncio.Task[None]] = [*self._keepers, *filter(None, [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            peer.close()
