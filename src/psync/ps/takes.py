"""Takes of the accumulators of one ps: in the rules, or with values that are kept.

Nothing here knows of a connection: who waits is told what becomes of a take (``take_waits``).
Where a call returns something to wait for, large work is left to be done.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from psync.accumulators import Take, TakeState
from psync.errors import FencedError, PsyncError, UsageError
from psync.numerics.sums import Pieces, at_once
from psync.ps.cooperative_work import LongWork
from psync.ps.hosted_accumulators import HostedAccumulator, TakeName, Taker, reply_of
from psync.ps.take_waits import TakeWaits
from psync.store.ledger import Client
from psync.wire.accumulator_messages import ForgetTakes, TakeGradient
from psync.wire.recovery_messages import EndTakes


class GradientTakes:
    """What clients take of the accumulators of one ps.

    Args:
        task: Name of the ps, for messages.
        work: What takes long.
        waits: Who waits for takes.
        parts_ways: Returns whether an error would let this ps and its backup come to different
            ends: then the task ends, and its backup answers.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        waits: TakeWaits,
        parts_ways: Callable[[Exception], bool],
    ) -> None:
        self._task = task
        self._work = work
        self._waits = waits
        self._parts_ways = parts_ways

    def enter(
        self, hosted: HostedAccumulator, client: Client, message: TakeGradient
    ) -> Awaitable[None] | None:
        """Let a take wait; one that waits goes on waiting, one that has its value gets it.

        Raises:
            ConfigurationError: It is of no gradients.
            UsageError: Its client has said that it does not want it.
        """
        hosted.rule.as_required(message.num_required)
        taker = hosted.takers.setdefault(client, Taker())
        if message.take < max(taker.acked_below, message.acked_below):
            raise UsageError(
                f"{self._task}: {client[0]} does not want take {message.take} any more"
            )
        changed = self._acknowledge(hosted, taker, message.acked_below)
        name = TakeName(client, message.accumulator, message.take)
        wanted = taker.takes.get(message.take)
        if wanted is None:
            hosted.enter(name, message.num_required)
            changed = True
        elif wanted.answer is not None:
            self._waits.settle(name, wanted.answer)
        return self._serve((hosted,)) if changed else None

    def forget(
        self, hosted: HostedAccumulator, client: Client, message: ForgetTakes
    ) -> Awaitable[None] | None:
        """Forget takes that a client has, or does not want any more."""
        taker = hosted.takers.get(client)
        if taker is not None and self._acknowledge(hosted, taker, message.acked_below):
            return self._serve((hosted,))
        return None

    def _acknowledge(self, hosted: HostedAccumulator, taker: Taker, acked_below: int) -> bool:
        """Do ``forget``; return whether some of them waited."""
        if acked_below <= taker.acked_below:
            return False
        taker.acked_below = acked_below
        error = UsageError(f"{self._task}: nobody wants this take any more")
        waited = False
        for number in [n for n in taker.takes if n < acked_below]:
            wanted = taker.takes.pop(number)
            if hosted.withdraw(wanted):
                waited = True
                self._waits.settle(wanted.name, error)
        return waited

    def end(
        self, accumulators: Mapping[str, HostedAccumulator], client: Client, message: EndTakes
    ) -> Awaitable[None] | None:
        """Let takes wait no longer for which no request waits."""
        left: dict[HostedAccumulator, None] = {}
        for accumulator, number in message.takes:
            hosted = accumulators.get(accumulator)
            wanted = None if hosted is None else hosted.wanted(client, number)
            if hosted is not None and wanted is not None and hosted.withdraw(wanted):
                left[hosted] = None
        return self._serve(left)  # not before all have left: those that leave get nothing

    def fence(
        self, accumulators: Iterable[HostedAccumulator], task: str, below: int
    ) -> Awaitable[None] | None:
        """Let incarnations of ``task`` below ``below`` wait no more, and forget their values."""
        error = FencedError(f"{self._task}: {task} has been replaced by incarnation {below}")
        left: dict[HostedAccumulator, None] = {}
        for hosted in accumulators:
            for client in [c for c in hosted.takers if c[0] == task and c[1] < below]:
                for wanted in hosted.takers.pop(client).takes.values():
                    if hosted.withdraw(wanted):
                        left[hosted] = None
                        self._waits.settle(wanted.name, error)
        return self._serve(left)

    def _serve(self, changed: Iterable[HostedAccumulator]) -> Awaitable[None] | None:
        """Complete takes that have enough gradients now."""
        large = []
        for hosted in changed:
            if hosted.fits_now(0):
                self.complete(hosted, at_once(hosted.rule.serving()))
            else:
                large.append(hosted)
        return self._work.to_the_end(self._serve_slowly(large)) if large else None

    async def _serve_slowly(self, changed: Iterable[HostedAccumulator]) -> None:
        def serving(hosted: HostedAccumulator) -> Pieces[None]:
            completed = yield from hosted.rule.serving()
            self.complete(hosted, completed)

        for hosted in changed:
            await hosted.in_turn(functools.partial(serving, hosted))

    def complete(self, hosted: HostedAccumulator, takes: Iterable[Take[Any]]) -> None:
        """Answer those who wait for takes that have ended."""
        for take in takes:
            wanted = hosted.waiting.pop(take)
            if take.state is TakeState.READY:
                wanted.answer = reply_of(take)
                self._waits.settle(wanted.name, wanted.answer)
                continue
            error = take.error or PsyncError(f"{self._task}: the take has no result")
            if self._parts_ways(error):
                self._work.give_up(error)
                continue
            hosted.takers[wanted.name.client].takes.pop(wanted.name.number)
            self._waits.settle(wanted.name, error)
