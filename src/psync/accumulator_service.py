"""Accumulators on a ps: gradients come in by themselves, and whoever wants their mean waits for it.

Layer: L3. Imports: errors, sums, accumulators, ledger, rpc, long_work, hosted_accumulators, wire.

The rules (``accumulators``) decide; this gives them what comes in, and holds answers back.

    message               then
    DefineAccumulator     make it; the same again changes nothing, another one is refused
    ApplyGradient,        judged by the ledger as pushes are, so it happens at most once;
    SetAccumulatorStep    a stale gradient leaves no trace, its next run is judged anew
    TakeGradient          waits in the rule; its value is kept until the client says it is there
    ForgetTakes           drop such values, and takes that nobody wants any more

A take waits as long as a connection does on which it was asked for. One whose connection ends, or
whose client is fenced or does not want it any more, leaves the rule at once and consumes nothing;
asked for again on another connection, it waits at the end of the queue.

Small work is done within the turn of the loop, large work in pieces. Meanwhile the accumulator
is locked, and what else is to be done to it waits its turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from psync.accumulators import Take, TakeState
from psync.errors import (
    ConnectionLost,
    FencedError,
    PsyncError,
    UnknownVariableError,
    UsageError,
)
from psync.hosted_accumulators import (
    HostedAccumulator,
    Taker,
    Wanted,
    gradient_of,
    other_parameters,
    reply_of,
)
from psync.ledger import AlreadyApplied, Client, Fresh, InProgress, Ledger, Ticket, Verdict
from psync.long_work import LongWork
from psync.rpc import Handler, Peer, Reply
from psync.sums import Pieces, at_once
from psync.wire.accumulator_messages import (
    AccumulatorState,
    ApplyGradient,
    AskAccumulator,
    DefineAccumulator,
    ForgetTakes,
    GradientApplied,
    SetAccumulatorStep,
    TakeGradient,
)
from psync.wire.codec import Message
from psync.wire.messages import Done

logger = logging.getLogger(__name__)

MAX_ACCUMULATORS = 65_536
"""Of one ps. Their names come from peers."""

_TAKES = "takes"  # in a peer's state: the takes that wait on its connection


@dataclass(slots=True)
class _Update:
    """What changes an accumulator, at most once."""

    client: Client
    message: ApplyGradient | SetAccumulatorStep
    hosted: HostedAccumulator
    ledger: Ledger  # stays the same, even if a new coordinator comes meanwhile
    nbytes: int
    begin: Callable[[], Pieces[GradientApplied]]

    def judge(self) -> Verdict:
        """Ask the ledger."""
        message = self.message
        closure = message.closure if message.closure >= 0 else None
        what = f"{type(message).__name__} {message.accumulator}"
        return self.ledger.begin(
            self.client, message.sequence, message.acked_below, closure, message.ordinal,
            what.encode(), (message.accumulator,),
        )  # fmt: skip


class AccumulatorService:
    """The accumulators of one ps.

    Args:
        task: Name of the ps, for messages.
        work: What takes long.
        ledger: Which updates were seen, and who has been replaced.
    """

    def __init__(self, task: str, work: LongWork, ledger: Ledger) -> None:
        self._task = task
        self._work = work
        self._ledger = ledger
        self._hosted: dict[str, HostedAccumulator] = {}

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            DefineAccumulator: Handler(self._define),
            ApplyGradient: Handler(self._apply),
            SetAccumulatorStep: Handler(self._set_step),
            TakeGradient: Handler(self._take),
            ForgetTakes: Handler(self._forget),
            AskAccumulator: Handler(self._ask),
        }

    def definitions(self) -> list[tuple[DefineAccumulator, int]]:
        """Return what each accumulator was defined as, and its global step."""
        return [(each.definition, each.rule.step) for each in self._hosted.values()]

    def restart(
        self, ledger: Ledger, definitions: Iterable[tuple[DefineAccumulator, int]] = ()
    ) -> None:
        """Begin with empty ones: whoever waited for gradients that there were waits no more.

        Args:
            ledger: Of what is served from now on.
            definitions: Those that there are, with their global steps.
        """
        old, self._hosted, self._ledger = self._hosted.values(), {}, ledger
        for definition, step in definitions:
            hosted = self._hosted[definition.name] = HostedAccumulator(definition)
            hosted.rule.set_global_step(step)
        waiting = [wanted for hosted in old for wanted in hosted.waiting.values()]
        self._give_up(waiting, FencedError(f"{self._task} serves a new coordinator"))

    def fence(self, task: str, below: int) -> None:
        """Let incarnations of ``task`` below ``below`` wait no more, and forget their values."""
        error = FencedError(f"{self._task}: {task} has been replaced by incarnation {below}")
        for hosted in self._hosted.values():
            for client in [c for c in hosted.takers if c[0] == task and c[1] < below]:
                self._give_up(hosted.takers.pop(client).takes.values(), error)

    def statistics(self) -> dict[str, int]:
        """Return sizes, and how many takes wait or have answers that are kept."""
        hosted = self._hosted.values()
        takes = sum(len(taker.takes) for each in hosted for taker in each.takers.values())
        waiting = sum(len(each.waiting) for each in hosted)
        return {
            "accumulators": len(self._hosted),
            "gradients": sum(each.rule.num_accumulated() for each in hosted),
            "bytes": sum(each.rule.nbytes for each in hosted),
            "waiting": waiting,
            "kept": takes - waiting,
        }

    def _known(self, peer: Peer, name: str) -> HostedAccumulator:
        self._ledger.check_incarnation(peer.task, peer.incarnation)
        hosted = self._hosted.get(name)
        if hosted is None:
            raise UnknownVariableError(f'{self._task}: accumulator "{name}" is not defined')
        return hosted

    def _define(self, peer: Peer, message: DefineAccumulator, _: list[memoryview]) -> Reply:
        self._ledger.check_incarnation(peer.task, peer.incarnation)
        known = self._hosted.get(message.name)
        if known is None:
            if len(self._hosted) >= MAX_ACCUMULATORS:
                raise UsageError(f"{self._task}: more than {MAX_ACCUMULATORS} accumulators")
            self._hosted[message.name] = HostedAccumulator(message)
        elif known.definition != message:
            raise other_parameters(known.definition, message)
        return Reply(Done())

    def _ask(self, peer: Peer, message: AskAccumulator, _: list[memoryview]) -> Reply:
        rule = self._known(peer, message.accumulator).rule
        return Reply(AccumulatorState(rule.num_accumulated(), rule.step))

    # What changes an accumulator.

    def _apply(
        self, peer: Peer, message: ApplyGradient, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        hosted = self._known(peer, message.accumulator)
        given = gradient_of(message, body, hosted.rule)

        def offering() -> Pieces[GradientApplied]:
            applied = yield from hosted.rule.offering(given, message.local_step, message.weight)
            self._complete(hosted, applied.completed)
            return GradientApplied(applied.outcome.value, applied.count, applied.step)

        return self._update(peer, message, hosted, sum(map(len, body)), offering)

    def _set_step(
        self, peer: Peer, message: SetAccumulatorStep, _: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        hosted = self._known(peer, message.accumulator)

        def setting() -> Pieces[GradientApplied]:
            yield from ()
            warning = hosted.rule.set_global_step(message.step)
            if warning is not None:
                logger.warning("%s: %s", self._task, warning)
            return _state("accepted", hosted)

        return self._update(peer, message, hosted, 0, setting)

    def _update(
        self,
        peer: Peer,
        message: ApplyGradient | SetAccumulatorStep,
        hosted: HostedAccumulator,
        nbytes: int,
        begin: Callable[[], Pieces[GradientApplied]],
    ) -> Reply | Awaitable[Reply]:
        client = (peer.task, peer.incarnation)
        update = _Update(client, message, hosted, self._ledger, nbytes, begin)
        verdict = update.judge()
        if isinstance(verdict, InProgress):
            return self._update_later(update, verdict)
        return self._act(update, verdict)

    async def _update_later(self, update: _Update, verdict: Verdict) -> Reply:
        """The same update is under way for another message: its end decides."""
        while isinstance(verdict, InProgress):
            while not verdict.ticket.settled:
                await self._work.next_turn()
            verdict = update.judge()
        answer = self._act(update, verdict)
        return answer if isinstance(answer, Reply) else await answer

    def _act(self, update: _Update, verdict: Verdict) -> Reply | Awaitable[Reply]:
        if isinstance(verdict, Fresh):
            if not update.hosted.fits_now(update.nbytes):
                return self._work.to_the_end(self._do_slowly(update, verdict.ticket))
            try:
                answer = at_once(update.begin())
            except Exception as exc:
                self._failed(update, verdict.ticket, exc)
                raise
            return _finished(update, verdict.ticket, answer)
        if isinstance(verdict, AlreadyApplied):
            return Reply(update.ledger.finish(verdict.ticket, _state("duplicate", update.hosted)))
        assert not isinstance(verdict, InProgress), "the caller has waited for it"
        return Reply(cast(GradientApplied, verdict.answer))

    async def _do_slowly(self, update: _Update, ticket: Ticket) -> Reply:
        try:
            answer = await update.hosted.in_turn(update.begin)
        except Exception as exc:
            self._failed(update, ticket, exc)
            raise
        else:
            return _finished(update, ticket, answer)
        finally:
            self._work.wake()  # repetitions that wait for the answer

    def _failed(self, update: _Update, ticket: Ticket, error: Exception) -> None:
        update.ledger.fail(ticket)  # nothing has changed: a retry is judged anew
        if update.hosted.rule.is_torn:
            self._work.give_up(error)

    # Takes.

    def _take(
        self, peer: Peer, message: TakeGradient, _: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        hosted = self._known(peer, message.accumulator)
        if peer.is_closed:
            raise ConnectionLost(f"{self._task}: {peer.task} has gone")
        taker = hosted.takers.setdefault((peer.task, peer.incarnation), Taker())
        self._acknowledge(taker, message.acked_below)
        wanted = taker.takes.get(message.take)
        if wanted is not None and wanted.answer is not None:
            return wanted.answer
        if message.take < taker.acked_below:
            raise UsageError(
                f"{self._task}: {peer.task} does not want take {message.take} any more"
            )
        is_new = wanted is None
        if wanted is None:
            take = hosted.rule.enter(message.num_required)
            wanted = Wanted(hosted, taker, message.take, take)
            taker.takes[message.take] = hosted.waiting[take] = wanted
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._add_waiter(wanted, future, peer)
        if is_new:
            self._serve(hosted)
        return future.result() if future.done() else self._answered(wanted, future)

    def _add_waiter(self, wanted: Wanted, future: asyncio.Future[Reply], peer: Peer) -> None:
        wanted.waiters[future] = peer
        if _TAKES not in peer.state:
            peer.state[_TAKES] = set()
            peer.on_closed.append(self._note_closed)
        peer.state[_TAKES].add(wanted)

    async def _answered(self, wanted: Wanted, future: asyncio.Future[Reply]) -> Reply:
        try:
            return await future
        finally:
            self._leave([(wanted, future)])

    def _note_closed(self, peer: Peer) -> None:
        waits = [
            (wanted, future)
            for wanted in peer.state[_TAKES]
            for future, other in wanted.waiters.items()
            if other is peer
        ]
        error = ConnectionLost(f"{self._task}: {peer.task} has gone")
        for _, future in waits:
            _settle(future, error)
        self._leave(waits)

    def _leave(self, waits: Iterable[tuple[Wanted, asyncio.Future[Reply]]]) -> None:
        """Let requests wait no longer, and neither takes for which there is no other request."""
        left: dict[HostedAccumulator, None] = {}
        for wanted, future in waits:
            peer = wanted.waiters.pop(future, None)
            if peer is None:  # it has left before
                continue
            if peer not in wanted.waiters.values():
                peer.state[_TAKES].discard(wanted)
            if wanted.waiters or wanted.answer is not None:
                continue
            hosted = wanted.hosted
            wanted.taker.takes.pop(wanted.number, None)
            if hosted.waiting.pop(wanted.take, None) is not None:
                hosted.rule.withdraw(wanted.take)
                left[hosted] = None
        for hosted in left:  # not before all have left: those that leave get nothing
            self._serve(hosted)

    def _forget(self, peer: Peer, message: ForgetTakes, _: list[memoryview]) -> None:
        hosted = self._hosted.get(message.accumulator)  # a notification: nobody hears of an error
        taker = None if hosted is None else hosted.takers.get((peer.task, peer.incarnation))
        if taker is not None:
            self._acknowledge(taker, message.acked_below)

    def _acknowledge(self, taker: Taker, acked_below: int) -> None:
        if acked_below <= taker.acked_below:
            return
        taker.acked_below = acked_below
        over = [taker.takes.pop(n) for n in list(taker.takes) if n < acked_below]
        self._give_up(over, UsageError(f"{self._task}: nobody wants this take any more"))

    def _give_up(self, takes: Iterable[Wanted], error: PsyncError) -> None:
        """End those takes that wait."""
        waits = [(each, future) for each in takes if not each.answer for future in each.waiters]
        for _, future in waits:
            _settle(future, error)
        self._leave(waits)

    # Values.

    def _serve(self, hosted: HostedAccumulator) -> None:
        """Complete takes that have enough gradients now."""
        if hosted.fits_now(0):
            self._complete(hosted, at_once(hosted.rule.serving()))
        else:
            self._work.to_the_end(self._serve_slowly(hosted))

    async def _serve_slowly(self, hosted: HostedAccumulator) -> None:
        def serving() -> Pieces[None]:
            completed = yield from hosted.rule.serving()
            self._complete(hosted, completed)

        await hosted.in_turn(serving)

    def _complete(self, hosted: HostedAccumulator, takes: Iterable[Take[Any]]) -> None:
        """Answer those who wait for takes that have ended."""
        for take in takes:
            wanted = hosted.waiting.pop(take)
            outcome: Reply | Exception
            if take.state is TakeState.READY:
                outcome = wanted.answer = reply_of(take)
            else:
                outcome = take.error or PsyncError(f"{self._task}: the take has no result")
            for future in wanted.waiters:
                _settle(future, outcome)
            self._leave([(wanted, future) for future in wanted.waiters])


def _state(outcome: str, hosted: HostedAccumulator) -> GradientApplied:
    return GradientApplied(outcome, hosted.rule.num_accumulated(), hosted.rule.step)


def _finished(update: _Update, ticket: Ticket, answer: GradientApplied) -> Reply:
    if answer.outcome == "stale":
        update.ledger.fail(ticket)  # nothing has changed: the closure's next run is judged anew
    else:
        update.ledger.finish(ticket, answer)
    return Reply(answer)


def _settle(future: asyncio.Future[Reply], outcome: Reply | Exception) -> None:
    """End a wait; who waited may have been cancelled meanwhile and never look at it."""
    if future.done():
        return
    if isinstance(outcome, Reply):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
        future.exception()
