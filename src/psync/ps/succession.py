"""Succession of coordinators in a ps process: grants, and the state that the last one left.

``Succession`` keeps what a ps held for an earlier program, describes it to the next one, and moves
what that adopts into its store. On ps 0 it also grants incarnations to coordinators: each grant is
above every earlier one and above ps 0's clock. ``backups.host`` says what is served in the process.

Source: docs/design.md, "Attach".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from psync.cluster import CHIEF
from psync.errors import FencedError, UsageError
from psync.net.connection import Connection, Handler, Request
from psync.store.reattach import FormerStore, Orders
from psync.store.untrusted_json import read_json, to_json
from psync.sync.ps_services import PsServices
from psync.wire.codec import Message
from psync.wire.messages import (
    AdoptShards,
    AttachPs,
    Done,
    GrantCoordinator,
    Number,
)

if TYPE_CHECKING:
    from psync.ps_task import PsTask

REPLACED = (
    "a newer coordinator, which has replaced this one ({}): either this program was started again, "
    "or another program uses the same cluster"
)


def check_chief(peer: Connection) -> None:
    """Raise UsageError unless a peer is a coordinator."""
    if not peer.task.startswith("/job:chief/"):
        raise UsageError(f"{peer.task} is not a coordinator")


def check_newest(peer: Connection, task: str, newest: int) -> None:
    """Raise FencedError if a coordinator has been replaced: it may not know."""
    check_chief(peer)
    if peer.incarnation < newest:
        raise FencedError(f"{task} serves {REPLACED.format(peer.task)}")


RANGE = 1 << 20
"""Incarnations that belong to one coordinator: 1 ms of a clock that counts nanoseconds.

No more, since each grant may be so far ahead of the clock, and a ps 0 that is started anew knows
only the clock. No less, since one is drawn for each attachment of a worker."""


class Succession:
    """What one ps keeps of earlier programs; and the incarnations of coordinators.

    Args:
        ps: The ps.
        clock: Returns what would be granted if nothing were known; None: this is not ps 0's own
            process, which answers with the newest coordinator that it has heard of.
    """

    def __init__(self, ps: PsTask, clock: Callable[[], int] | None) -> None:
        self._ps = ps
        self._clock = clock
        self.former = FormerStore(ps.task)  # its lineage is that of what is held here
        self._settling: asyncio.Task[None] | None = None  # what has begun is carried to its end
        self._highest = 0  # that was granted, or seen

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            AdoptShards: Handler(self._adopt),
            GrantCoordinator: Handler(self._grant),
        }

    def begin(self, attach: AttachPs, last: PsServices) -> None:
        """A newer coordinator is served, with a store of its own.

        Args:
            attach: Who it is, and whether the store before is set aside; else it is dropped, with
                all that was.
            last: What was served before.
        """
        before, self._settling = self._settling, None
        if not attach.keep:
            if before is not None:
                before.cancel()
            self.former.drop(last.store)
            self.former.lineage = attach.coordinator
        else:

            async def settle() -> None:
                if before is not None:
                    await asyncio.wait((before,))
                await self._ps.work.drain()
                progress = last.updates.progress
                self.former.take(last.store, last.ledger, last.coordinator, progress)

            self._settling = asyncio.get_running_loop().create_task(settle())

    async def settled(self) -> None:
        """Wait until what has begun before is at its end.

        Raises:
            FencedError: A coordinator has come meanwhile for whom nothing is kept.

        Cancellation: Safe.
        """
        settling = self._settling
        if settling is not None:
            await asyncio.wait((settling,))
            if settling.cancelled():
                raise FencedError(f"{self._ps.task} serves a newer coordinator")
            settling.result()

    def lost(self) -> None:
        """Nobody may go on with what is held here, unless the present program says that it may.

        Another process serves it, or this is a snapshot that others may not have taken yet, or a
        synchronous step is applied here and not everywhere.
        """
        self.former.drop(self._ps.services.store)
        self.former.lineage = 0

    async def close(self) -> None:
        """Wait for nothing more. Cancellation: safe."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait((self._settling,))

    def _adopt(self, request: Request[AdoptShards]) -> None:
        message, services = request.message, self._ps.services
        self._ps.check_coordinator(request.peer)
        where = f"{self._ps.task}: what is to be adopted"
        orders = read_json(b"".join(request.segments), Orders, where)
        self.former.adopt(orders, services.store)
        if orders.adopted:
            services.updates.base = -1  # they are worth it
        services.updates.counted()
        if message.last:
            self.former.drop(services.store)
        if message.lineage:
            self.former.lineage = message.lineage
        request.answer(Done(), [to_json(self.former.describe())])

    def _grant(self, request: Request[GrantCoordinator]) -> None:
        """Answer with an incarnation above all that was granted, and that anybody has seen.

        Raises:
            FencedError: Another coordinator has asked after this one: it stays with that.
        """
        check_chief(request.peer)
        message, granted = request.message, self._ps.newest
        if self._clock is not None:
            self._highest = max(self._highest, granted)  # whoever has granted that
            if message.previous and self._highest > message.previous:
                raise FencedError(f"/job:ps/task:0 serves {REPLACED.format(CHIEF)}")
            highest = max(self._highest, message.seen)
            self._highest = granted = max(self._clock(), highest + RANGE if highest else 0)
        request.answer(Number(granted))
