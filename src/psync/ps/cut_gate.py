"""The gate of a ps: updates are paused while a cut is taken, except admitted ones.

One object serves one coordinator and timeline, with its ledger; a newer one gets another.

    message     then
    Gate        no update begins any more; answered when those under way have ended, with the
                messages to other ps tasks that belong to them
    Admit       these messages may begin; answered when they are settled, or when one of them waits
                for a lock whose holder may be waiting here
    OpenGate    paused updates go on
    connection  the gate opens when that over which it was shut is lost
    lease       and when it has been shut for too long

Source: docs/design.md, "A save".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from psync.errors import CutLost
from psync.net.connection import Connection, Handler, Request
from psync.net.platform import Parts
from psync.ps.cooperative_work import Changing
from psync.store.ledger import Client, Ledger
from psync.store.update_gate import UpdateGate
from psync.wire.codec import Message
from psync.wire.messages import Admit, Done, Gate, Gated, OpenGate

logger = logging.getLogger(__name__)

MAX_SHUT_S = 60.0
"""A coordinator that is stuck holds nobody up for longer."""

LOCK_PATIENCE_S = 1.0
"""So long an admitted update may wait for a lock, whose holder may be waiting at the gate."""

LOOKS = 4
"""How often it is looked whether it still does, within that time."""


class GateService(Changing):
    """Serves one coordinator's cuts on one ps.

    Args:
        task: Name of the ps, for the log.
        ledger: Knows what has begun.
        exempt: See ``UpdateGate``.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        pause_steps: Returns when no synchronous step is being closed, and lets none begin.
        resume_steps: Lets them go on.
        parts: Of the task.
    """

    def __init__(
        self,
        task: str,
        ledger: Ledger,
        exempt: str,
        check_coordinator: Callable[[Connection], None],
        pause_steps: Callable[[], Awaitable[None]],
        resume_steps: Callable[[], None],
        parts: Parts,
    ) -> None:
        super().__init__()
        self.cuts = 0  # for which the gate was shut
        self._task = task
        self._ledger = ledger
        self.rule = parts.of(UpdateGate)(ledger, exempt)
        self._check_coordinator = check_coordinator
        self._pause_steps = pause_steps
        self._resume_steps = resume_steps
        self._under_way = 0  # updates that take longer than a turn
        self._locked_out: set[tuple[Client, int]] = set()  # messages that wait for a lock
        self._timer: asyncio.TimerHandle | None = None
        self._peers: set[Connection] = set()  # whose end is heard of

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            Gate: Handler(self._shut),
            Admit: Handler(self._admit),
            OpenGate: Handler(self._open_for),
        }

    @property
    def is_shut(self) -> bool:
        """Whether a cut is being taken."""
        return self.rule.cut > 0

    @property
    def num_waiting(self) -> int:
        """How many messages wait here, and not for a lock."""
        return self.rule.waiting.total() - len(self._locked_out)

    def describe(self) -> list[str]:
        """Say which cut is being taken, and who waits for it; for reports."""
        if not self.is_shut:
            return []
        return [
            f"the gate is shut for cut {self.rule.cut}: {self._under_way} updates are under way, "
            f"{self.rule.waiting.total()} wait"
        ]

    def check(self, cut: int) -> None:
        """Check that the gate is shut for a cut: it opens with the connection.

        Raises:
            CutLost: It is not.
        """
        if self.rule.cut != cut:
            raise CutLost(f"{self._task} lets updates through again: cut {cut} is over")

    def close(self) -> None:
        """Open for good: whoever waits goes on. Connections may outlive this."""
        self._open(self.rule.cut)
        for peer in self._peers:
            peer.on_closed.remove(self._connection_lost)
        self._peers.clear()

    # For updates.

    async def turn(self, client: Client, sequence: int) -> None:
        """Wait until a message may begin. Cancellation: safe."""
        while self.rule.holds(client, sequence):
            await self.changed()

    def began(self) -> None:
        """An update has begun that takes longer than a turn of the loop."""
        self._under_way += 1

    def ended(self) -> None:
        """It has ended."""
        self._under_way -= 1
        self.wake()

    def arrived(self, client: Client, sequence: int) -> None:
        """Note a message that has arrived whole and has to wait, here or for a lock."""
        self.rule.waiting[client, sequence] += 1

    def passed(self, client: Client, sequence: int) -> None:
        """Note that it waits no longer."""
        waiting = self.rule.waiting
        waiting[client, sequence] -= 1
        if not waiting[client, sequence]:
            del waiting[client, sequence]
        self.wake()

    async def all_passed(self) -> None:
        """Wait until no message waits, here or for a lock. Cancellation: safe."""
        while self.rule.waiting:
            await self.changed()

    def waits_for_lock(self, client: Client, sequence: int, *, waits: bool) -> None:
        """Note that a message waits for a lock, or does so no more."""
        (self._locked_out.add if waits else self._locked_out.discard)((client, sequence))

    # Messages.

    async def _shut(self, request: Request[Gate]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        if not self.rule.shut(message.cut):  # what said that it is over was faster
            raise CutLost(f"{self._task}: cut {message.cut} is over")
        self.cuts += 1
        if peer not in self._peers:
            self._peers.add(peer)
            peer.on_closed.append(self._connection_lost)
        self._set_timer(message.cut)
        await self._pause_steps()
        while self._under_way:
            await self.changed()
        request.answer(Gated(self._ledger.others()))

    async def _admit(self, request: Request[Admit]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        updates = [((task, incarnation), number) for task, incarnation, number in message.updates]
        self.rule.admit(message.cut, updates)
        self.wake()
        looks_left = LOOKS
        while self.rule.cut == message.cut and (left := self.rule.unsettled(updates)):
            if self._locked_out.isdisjoint(left):
                looks_left = LOOKS
            elif not looks_left:
                raise CutLost(
                    f"{self._task}: {left[0][0][0]} waits for a lock, whose holder may be waiting "
                    f"for the end of cut {message.cut}"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOCK_PATIENCE_S / LOOKS):
                    await self.changed()
                    continue
            looks_left -= 1
        request.answer(Done())

    def _open_for(self, request: Request[OpenGate]) -> None:
        peer, message = request.peer, request.message
        self._check_coordinator(peer)
        self._open(message.cut)
        request.answer(Done())

    # Opening.

    def _open(self, cut: int) -> None:
        if self.rule.open(cut):
            if self._timer is not None:
                self._timer.cancel()
            self._resume_steps()
            self.wake()

    def _connection_lost(self, peer: Connection) -> None:
        self._peers.discard(peer)
        self._open(self.rule.cut)

    def _set_timer(self, cut: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(MAX_SHUT_S, self._expired, cut)

    def _expired(self, cut: int) -> None:
        if self.rule.cut == cut:
            logger.warning(
                "%s: a cut has delayed updates for %.0f s and is cancelled", self._task, MAX_SHUT_S
            )
            self._open(cut)
