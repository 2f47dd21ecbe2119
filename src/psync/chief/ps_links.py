"""The coordinator's connections to ps tasks: attached, re-attached, told whom to refuse."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from psync.chief.supervision import Supervision
from psync.client.optimizer_client import note_plugins
from psync.client.ps_link import PsLink, ask
from psync.closures.membership import Fence, Membership
from psync.errors import FencedError, ParameterServerLost, PsyncError
from psync.wire import messages
from psync.wire.messages import AttachPs, Done

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PsLinks:
    """Keeps all ps tasks attached.

    Attributes:
        on_lost: Called when variables are gone.
        addresses: Where each ps is served, by name.
        homes: In whose process each is served.
    """

    supervision: Supervision
    links: Sequence[PsLink]
    membership: Membership
    processes: Mapping[str, str]  # address of each ps at first, by name
    _: KW_ONLY
    keep: bool
    """Whether ps tasks set aside what they hold, to be adopted. Then ps 0 is attached first: a
    synchronous step that is being closed gets to its end before others refuse it."""
    ps_timeout_s: float  # a ps that cannot be reached for so long is lost

    def __post_init__(self) -> None:
        self.on_lost: Callable[[ParameterServerLost], None] = lambda _: None
        self.addresses = dict(self.processes)
        self.homes = list(range(len(self.processes)))
        self._endpoint = self.supervision.endpoint
        self._moves = 0  # how often addresses have changed
        self._ps_0_attached = asyncio.Event()
        self._attached: dict[int, int] = {}  # under which incarnation of ours each ps serves

    def start(self) -> None:
        """Connect to all of them, from now on."""
        for link in self.links:
            link.on_lost = self.on_lost
            link.lost_after_s = math.inf  # one that was never here is late, not lost
            self.supervision.supervise(self._keep(link))

    def are_attached(self) -> bool:
        """Return whether all serve us under the present incarnation."""
        served = [self._attached.get(link.index) for link in self.links]
        return served == [self._endpoint.incarnation] * len(served)

    async def _keep(self, link: PsLink) -> None:
        supervision, first = self.supervision, True
        while True:
            mine = self._endpoint.incarnation
            try:
                if link.index and self.keep:
                    await self._ps_0_attached.wait()
                peer = await link.peer("control")
                link.lost_after_s = self.ps_timeout_s
                note_plugins(link, await link.call(lambda _: self.attachment(link)))
            except ParameterServerLost:
                if not await link.recovered():
                    raise
                continue
            except FencedError:
                if supervision.is_up:
                    raise
                await supervision.ask_again(mine, link.task, link.address)
                continue
            if not peer.is_open:
                continue
            self._attached[link.index] = mine
            if not link.index:
                self._ps_0_attached.set()
            self.fence(self.membership.connected(link.task, peer.incarnation))
            if not first:
                logger.info("%s is reachable again", link.task)
                supervision.note("reachable", f"{link.task} is reachable again")
            first = False
            supervision.changed.set()
            await peer.wait_closed()
            self.membership.disconnected(link.task)
            logger.info("%s is unreachable; waiting for it", link.task)
            supervision.note("unreachable", f"{link.task} cannot be reached; waiting for it")

    async def attach(self, link: PsLink) -> None:
        """Attach a ps that may have been started again, while others are held back.

        Raises:
            ParameterServerLost: It was lost again.

        Cancellation: Safe.
        """
        note_plugins(link, await link.call(lambda _: self.attachment(link), urgent=True))

    def move(self, link: PsLink, address: str) -> None:
        """Look for a ps at another address, which workers that are attached then are told."""
        link.revive()
        link.address = self.addresses[link.task] = address
        self._moves += 1

    def go_home(self, link: PsLink) -> None:
        """Look for a ps where it was at first."""
        if link.address != self.processes[link.task]:
            self.move(link, self.processes[link.task])

    def tell_addresses(self) -> None:
        """Tell all ps tasks where each is served, after some have moved."""
        if self._moves:
            for link in self.links:
                self.supervision.supervise(self._tell_addresses(link))

    async def _tell_addresses(self, link: PsLink) -> None:
        try:
            await link.call(lambda _: self.attachment(link))
        except PsyncError as exc:  # it will be attached again
            logger.info("%s was not told the addresses of the ps tasks: %s", link.task, exc)

    def attachment(self, link: PsLink) -> AttachPs:
        """Return what a ps is told."""
        # One that was started again while this program runs is of no lineage: see ``reattach``.
        keep = self.keep or self.supervision.is_up
        return AttachPs(
            self._endpoint.incarnation, list(self.addresses.values()),
            self.ps_timeout_s, keep, self._moves,
        )  # fmt: skip

    def fence(self, fences: Sequence[Fence]) -> None:
        """Let ps tasks refuse workers."""
        if self.supervision.is_closing:
            return  # whoever goes now is not lost; the next coordinator fences
        for fence in fences:
            self.supervision.supervise(self._fence(fence))

    async def _fence(self, fence: Fence) -> None:
        link = next(link for link in self.links if link.task == fence.ps)
        try:
            await ask(link, messages.Fence(fence.task, fence.below), Done)
        except PsyncError as exc:
            logger.warning("a fence was not accepted: %s", exc)
