"""Accumulator requests on a ps: gradients are applied at most once, takes wait for enough of them.

The rules (``psync.accumulators``) decide; this feeds requests to them and delays the answers.

    message               then
    DefineAccumulator     make it; the same again changes nothing, another one is refused
    ApplyGradient,        judged by the ledger as pushes are, so it happens at most once;
    SetAccumulatorStep    a stale gradient leaves no trace, its next run is judged again
    TakeGradient          waits in the rule; its value is kept until the client says it is there
    ForgetTakes           drop acknowledged values, and takes that their client has given up
    EndTakes              (from here) takes without a waiting request leave the rule

A take waits as long as a connection does on which it was asked for. One whose connection ends, or
whose client is fenced or gives it up, leaves the rule at once and consumes nothing;
asked for again on another connection, it waits at the end of the queue.

Each of these messages is an entry of the log (``executor``): the rule decides when it is judged.
What follows for arrays is a compute (``computes``), in the order of entries for each accumulator: a
gradient is answered when it is added, a take gets its gradients at once and its value when that is
made. The log does not record waiting requests: an entry of a take is executed when that waits in
the rule, or is complete.

Whether the values of a large gradient are finite is looked for before it becomes an entry, if it
matters: that is a fact of the message alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from psync.accumulators import count_nonfinite
from psync.errors import (
    ConnectionLost,
    PsyncError,
    UnknownVariableError,
    UsageError,
)
from psync.net.connection import Handler, OwnRequest, Request
from psync.numerics.memory import bytes_of
from psync.numerics.sums import cuts
from psync.ps.computes import Compute
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.ps.executor import Executor, nobodys
from psync.ps.takes import (
    GradientTakes,
    HostedAccumulator,
    TakeName,
    TakeWaits,
    gradient_of,
    other_parameters,
)
from psync.store.ledger import Client, Duplicate, Fresh, Ledger, Ticket
from psync.wire.codec import Message
from psync.wire.messages import (
    AccumulatorState,
    ApplyGradient,
    AskAccumulator,
    DefineAccumulator,
    EndTakes,
    ForgetTakes,
    GradientApplied,
    SetAccumulatorStep,
    TakeGradient,
)

logger = logging.getLogger(__name__)

MAX_ACCUMULATORS = 65_536
"""Of one ps. Their names come from peers."""

Turn = Callable[[Request[Any]], Compute | None]
"""Judges what a message says."""


class AccumulatorService:
    """The accumulators of one ps, on one timeline of one coordinator.

    Args:
        task: Name of the ps, for messages.
        work: What takes long.
        ledger: Which updates were seen, and who has been replaced.
        executor: In whose order all is done.
        definitions: Those that there are, with their global steps.

    Attributes:
        hosted: The accumulators, by their names.
        ledger: As given.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        ledger: Ledger,
        executor: Executor,
        definitions: Iterable[tuple[DefineAccumulator, int]] = (),
    ) -> None:
        self.hosted: dict[str, HostedAccumulator] = {}
        self.ledger = ledger
        self._executor = executor
        self._task = task
        self._waits = TakeWaits(self._left)
        self._takes = GradientTakes(task, work, self._waits)
        self._turns: dict[type[Message], Turn] = {
            DefineAccumulator: self._define,
            ApplyGradient: self._apply,
            SetAccumulatorStep: self._set_step,
            TakeGradient: self._enter,
            ForgetTakes: self._forget,
            EndTakes: self._end,
        }
        for definition, step in definitions:
            hosted = self.hosted[definition.name] = HostedAccumulator(definition)
            hosted.rule.set_global_step(step)

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            DefineAccumulator: Handler(self._do),
            ApplyGradient: Handler(self._gradient),
            SetAccumulatorStep: Handler(self._do),
            TakeGradient: Handler(self._take),
            ForgetTakes: Handler(
                lambda request: self._do(nobodys(request.peer.client, request.message))
            ),
            AskAccumulator: Handler(self._ask),
        }

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who does which entry of the log of the one that is backed up."""
        return dict.fromkeys(self._turns, Handler(self._do)) | {
            ApplyGradient: Handler(self._gradient)
        }

    def definitions(self) -> list[tuple[DefineAccumulator, int]]:
        """Return what each accumulator was defined as, and its global step."""
        return [(each.definition, each.rule.step) for each in self.hosted.values()]

    def control(self) -> list[Any]:
        """Return what counts and waits, as plain data in an order of its own, for a digest."""
        return [
            [name, hosted.rule.num_accumulated(), hosted.rule.step,
             [[*wanted.name.client, wanted.name.number] for wanted in hosted.waiting.values()],
             sorted([*client, taker.acked_below, sorted(taker.takes)]
                    for client, taker in hosted.takers.items())]
            for name, hosted in sorted(self.hosted.items())
        ]  # fmt: skip

    def end(self) -> None:
        """Another snapshot or coordinator is served: whoever waits asks again, if it may."""
        self._waits.settle_all(
            ConnectionLost(f"{self._task} serves another snapshot, or coordinator")
        )

    def promoted(self) -> None:
        """The log that it has followed has ended: takes wait no longer, nobody waits for them.

        The connections are gone on which they were asked for. Who wants one asks again.
        """
        for hosted in self.hosted.values():
            for wanted in list(hosted.waiting.values()):
                hosted.withdraw(wanted)

    def fence(self, task: str, below: int) -> Compute | None:
        """Let incarnations of ``task`` below ``below`` wait no more, and forget their values."""
        return self._takes.fence(self.hosted.values(), task, below)

    def statistics(self) -> dict[str, int]:
        """Return sizes, and how many takes wait or have answers that are kept."""
        hosted = self.hosted.values()
        takes = sum(len(taker.takes) for each in hosted for taker in each.takers.values())
        waiting = sum(len(each.waiting) for each in hosted)
        return {
            "accumulators": len(self.hosted),
            "gradients": sum(each.rule.num_accumulated() for each in hosted),
            "bytes": sum(each.rule.nbytes for each in hosted),
            "waiting": waiting,
            "kept": takes - waiting,
        }

    def _known(self, client: Client, name: str) -> HostedAccumulator:
        self.ledger.check_incarnation(*client)
        hosted = self.hosted.get(name)
        if hosted is None:
            raise UnknownVariableError(f'{self._task}: accumulator "{name}" is not defined')
        return hosted

    def _do(self, request: Request[Any]) -> None:
        """Do what a message says when it is its turn."""
        turn, message = self._turns[type(request.message)], request.message
        self._executor.submit(request, message, request.segments, lambda: turn(request))

    def _define(self, request: Request[DefineAccumulator]) -> None:
        message = request.message
        self.ledger.check_incarnation(*request.peer.client)
        known = self.hosted.get(message.name)
        if known is None:
            if len(self.hosted) >= MAX_ACCUMULATORS:
                raise UsageError(f"{self._task}: more than {MAX_ACCUMULATORS} accumulators")
            self.hosted[message.name] = HostedAccumulator(message)
        elif known.definition != message:
            raise other_parameters(known.definition, message)

    def _ask(self, request: Request[AskAccumulator]) -> None:
        rule = self._known(request.peer.client, request.message.accumulator).rule
        request.answer(AccumulatorState(rule.num_accumulated(), rule.step))

    # What changes an accumulator.

    def _gradient(self, request: Request[ApplyGradient]) -> None:
        hosted = self.hosted.get(request.message.accumulator)
        is_large = sum(map(len, request.segments)) > INLINE_BYTES
        if is_large and hosted is not None and hosted.rule.forbid_nonfinite:
            request.start(self._when_looked_through(request, hosted))
        else:
            self._do(request)

    async def _when_looked_through(
        self, request: Request[ApplyGradient], hosted: HostedAccumulator
    ) -> None:
        """Count values that are not finite, with the loop running in between; then do it."""
        body = request.segments
        data, dtype = bytes_of(body[-1]), hosted.rule.dtype
        values = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
        nonfinite = 0
        for part in cuts(values.size, dtype.itemsize):
            nonfinite += count_nonfinite(values[part])
            await asyncio.sleep(0)
        self._executor.submit(
            request, request.message, body, lambda: self._apply(request, nonfinite)
        )

    def _apply(
        self, request: Request[ApplyGradient], nonfinite: int | None = None
    ) -> Compute | None:
        client, message, body = request.peer.client, request.message, request.segments
        hosted = self._known(client, message.accumulator)
        rule = hosted.rule
        given = gradient_of(message, body, rule)

        def offer(ticket: Ticket) -> Compute | None:
            nbytes = rule.nbytes + sum(map(len, body))
            applied = rule.offer(given, message.local_step, message.weight, nonfinite)
            answer = GradientApplied(applied.outcome.value, applied.count, applied.step)
            if applied.adding is None:  # nothing has changed: the closure's next run is judged anew
                self.ledger.refuse(client, message.sequence)
                request.answer(answer)
                return None
            self.ledger.record(ticket, answer)
            return self._takes.add(request, hosted, applied, answer, nbytes)

        return self._update(request, hosted, offer)

    def _set_step(self, request: Request[SetAccumulatorStep]) -> Compute | None:
        hosted = self._known(request.peer.client, request.message.accumulator)

        def set_step(ticket: Ticket) -> None:
            warning = hosted.rule.set_global_step(request.message.step)
            if warning is not None:
                logger.warning("%s: %s", self._task, warning)
            request.answer(self.ledger.record(ticket, _state("accepted", hosted)))

        return self._update(request, hosted, set_step)

    def _update(
        self,
        request: Request[ApplyGradient] | Request[SetAccumulatorStep],
        hosted: HostedAccumulator,
        act: Callable[[Ticket], Compute | None],
    ) -> Compute | None:
        """Do what changes an accumulator, at most once."""
        client, message = request.peer.client, request.message
        closure = message.closure if message.closure >= 0 else None
        what = f"{type(message).__name__} {message.accumulator}"
        try:
            verdict = self.ledger.judge(
                client, message.sequence, message.acked_below, closure, message.ordinal,
                what.encode(), (message.accumulator,),
            )  # fmt: skip
            if isinstance(verdict, Fresh):
                return act(verdict)
        except Exception:
            self.ledger.refuse(client, message.sequence)
            raise
        if isinstance(verdict, Duplicate):
            answer = cast(GradientApplied, verdict.answer)
        else:
            answer = self.ledger.record(verdict, _state("duplicate", hosted))
        # What it repeats may not be added yet.
        return Compute([message.accumulator], lambda: request.answer(answer))

    # Takes.

    def _take(self, request: Request[TakeGradient]) -> None:
        peer, message = request.peer, request.message
        if peer.is_closed:
            raise ConnectionLost(f"{self._task}: {peer.task} has gone")
        name = TakeName(peer.client, message.accumulator, message.take)
        self._waits.add(name, request)

        def entered(outcome: object) -> None:
            if isinstance(outcome, PsyncError):  # any other: the task ends, and its backup answers
                request.fail(outcome)
                self._waits.end(lambda each: each is request)

        self._do(OwnRequest(peer, message, [], entered))

    def _left(self, client: Client, takes: Sequence[TakeName]) -> None:
        listed = [(name.accumulator, name.number) for name in takes]
        self._do(nobodys(client, EndTakes(listed)))

    def _enter(self, request: Request[TakeGradient]) -> Compute | None:
        client, message = request.peer.client, request.message
        return self._takes.enter(self._known(client, message.accumulator), client, message)

    def _forget(self, request: Request[ForgetTakes]) -> Compute | None:
        hosted = self.hosted.get(request.message.accumulator)  # nobody hears of an error
        if hosted is None:
            return None
        return self._takes.forget(hosted, request.peer.client, request.message)

    def _end(self, request: Request[EndTakes]) -> Compute | None:
        return self._takes.end(self.hosted, request.peer.client, request.message)


def _state(outcome: str, hosted: HostedAccumulator) -> GradientApplied:
    return GradientApplied(outcome, hosted.rule.num_accumulated(), hosted.rule.step)
