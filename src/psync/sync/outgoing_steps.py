"""Steps that are decided, on ps 0: carried to every ps, until all have applied them.

    decided         the step is closing, or *outgoing*, a part of the state of ps 0
    norms measured  NormsMeasured, an entry: it is sent to be closed. Where no norms are needed that
                    is done at once
    all applied it  StepApplied, an entry: who still waits gets tokens of the next step

Who dies:

    ps 0, with a step outgoing   the promoted backup, which has the same entries, carries it again;
                                 each ps that has applied it ignores that
    ps 0, while it is measured   likewise; norms that are no entry yet are measured again
    ps 0, before it is decided   the promoted backup has all pushes that are in the log
    ps 0, without a backup       rollback, or the end of the program (``chief.recovery_rule``)
    another ps                   its link waits until it is served elsewhere, or the coordinator
                                 rolls all back

Whenever a ps dies, sessions of workers end, and their closures run again: what was counted is
answered "duplicate".

The rounds of a step over all ps tasks:

    round                                     when
    CloseStep to every ps, which measures     norms are clipped, of what lies on several ps tasks
      "gradients"
    CloseStep to every ps, which measures     a layer-wise rule needs norms of such a variable
      "updates"
    the factors become an entry of the log    if there were such rounds
    CloseStep to every ps, with the factors   always

A round begins when all have answered the one before, and the first error ends it all. Measuring
changes nothing. Once a ps may have closed the step the factors are in the log: a backup that is
promoted sends the same ``CloseStep`` again, and each ps that has closed it ignores that.

Nothing is carried while that is *paused*: for a cut, for a copy to a backup, at the end, and on a
backup until the coordinator has said where all ps tasks are served.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import cast

from psync.errors import PsyncError
from psync.net.connection import AsIfFrom, OwnRequest
from psync.ps.cooperative_work import Changing
from psync.store.ledger import Client
from psync.store.step_norms import Factors, StepNorms
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import CLOSER, FROM_CLOSER, PsSync
from psync.sync.pushes import Action, Close, Listed
from psync.sync.steps import SyncSteps
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    CloseStep,
    Failure,
    FinishSteps,
    Measured,
    NormsMeasured,
    StepApplied,
)
from psync.wire.remote_errors import exception_of, failure_of

logger = logging.getLogger(__name__)

HOSTED = "it is a backup"
"""Why nothing is carried until the coordinator has said where all ps tasks are served."""


class OutgoingSteps(Changing):
    """The outgoing steps of one coordinator's cluster; requests wait for pauses, and for steps.

    Args:
        sync: The part of ps 0 itself.
        all_ps: The ps tasks.
        steps: The rule.
        perform: Does what the rule has decided.
        failed: Called with a group of which a step could not be applied: its pushes are over.
        is_hosted: Whether it is that of a backup.

    Attributes:
        pauses: For what nothing is carried.
    """

    def __init__(
        self,
        sync: PsSync,
        all_ps: AllPs,
        steps: SyncSteps,
        perform: Callable[[Iterable[Action]], None],
        failed: Callable[[int], None],
        *,
        is_hosted: bool,
    ) -> None:
        super().__init__()
        self.pauses = {HOSTED} if is_hosted else set()
        self._wanted: set[str] = set()  # pauses that are wanted, also before they begin
        self._is_over = False  # nothing is decided here any more
        self._sync = sync
        self._all_ps = all_ps
        self._steps = steps
        self._perform, self._failed = perform, failed
        self._carried: set[int] = set()  # groups of which a step is on its way to every ps
        self._self = AsIfFrom(FROM_CLOSER)
        self._is_torn = False  # a step that was decided could not be applied everywhere

    @property
    def is_torn(self) -> bool:
        """Whether a step that was decided is perhaps not applied everywhere."""
        return self._is_torn or bool(self._carried)

    def decide(self, close: Close) -> None:
        """A step is decided: it is outgoing from now on."""
        self._sync.groups[close.group].outgoing = close
        if not self.pauses:
            self._carry(close)

    def restore(self) -> None:
        """Be where the rule is, which was restored: what it has decided is outgoing."""
        for close in self._steps.closing():
            self.decide(close)

    def _carry(self, close: Close) -> None:
        """Let every ps that has not done so apply a step."""
        known = self._sync.groups[close.group]
        self._carried.add(close.group)
        norms, passes = known.norms, list[str]()
        is_whole = close.step < known.elsewhere or len(self._all_ps.addresses) < 2
        if known.takes_norms and not is_whole and not close.is_measured:
            norms = StepNorms(known.rule)
            passes = norms.passes_together(spread=known.spread)
        self._go_on(close, norms, passes)

    def _go_on(self, close: Close, norms: StepNorms, passes: list[str]) -> None:
        """Begin the next round of a step."""
        step = close.group, None, close.step, close.pushes
        if passes:
            known = _listed(norms.scales), _listed(norms.ratios)
            then = functools.partial(self._measured, close, norms, passes)
            self._all_ps.tell(CloseStep(*step, *known, passes[0]), close.places, then)
        else:
            message = CloseStep(*step, close.scales, close.ratios)
            self._all_ps.tell(message, close.places, functools.partial(self._ended, close))

    def _measured(
        self,
        close: Close,
        norms: StepNorms,
        passes: list[str],
        answers: list[Message],
        failed: Exception | None,
    ) -> None:
        if failed is None:
            try:
                self._conclude(norms, passes, answers)
            except Exception as exc:
                failed = exc
        if failed is not None:
            self._ended(close, [], failed)
        elif passes:
            self._go_on(close, norms, passes)
        else:
            factors = _listed(norms.scales), _listed(norms.ratios)
            message = NormsMeasured(close.group, close.step, *factors)

            def act() -> None:
                self.note_factors(message)
                self._go_on(close, norms, passes)

            self._submit(close, message, act)

    def _conclude(self, norms: StepNorms, passes: list[str], answers: list[Message]) -> None:
        sums = [
            (variable, index, first, second)
            for each in cast(list[Measured], answers)
            for variable, index, first, second in each.sums
        ]
        norms.conclude(passes.pop(0), sums)

    def _submit(self, close: Close, message: Message, act: Callable[[], None]) -> None:
        """Put into the log how far a step is; once that has ended, another one carries it again."""

        def dropped(outcome: object) -> None:
            if isinstance(outcome, PsyncError):
                self._carried.discard(close.group)
                self.wake()

        request = OwnRequest(self._self, message, (), dropped)
        self._sync.executor.submit(request, message, (), act)

    def note_factors(self, message: NormsMeasured) -> None:
        """Execute an entry: a step that is outgoing is to be closed with these factors."""
        close = self._sync.groups[message.group].outgoing
        if close is not None and close.step == message.step:
            close.is_measured = True
            close.scales, close.ratios = message.scales, message.ratios

    def _ended(self, close: Close, _: list[Message], failed: Exception | None) -> None:
        """Every ps has applied a step, or it cannot be."""
        failure = b""
        if failed is not None:
            if not isinstance(failed, PsyncError):
                failed = PsyncError(f"{type(failed).__name__} while a step was applied: {failed}")
            failure = encode(failure_of(failed))
            self._is_torn = True

        message = StepApplied(close.group, close.step, failure)

        def act() -> None:
            self._carried.discard(close.group)
            self.note_applied(message)
            if self.waiting:
                self.wake()

        self._submit(close, message, act)

    def note_applied(self, message: StepApplied) -> None:
        """Execute an entry: a step is outgoing no more."""
        group = message.group
        self._sync.groups[group].outgoing = None
        if not message.failure:
            self._perform(self._steps.closed(group, message.step))
            return
        error = exception_of(cast(Failure, decode(message.failure)), CLOSER)
        logger.error(
            "%s: step %d of group %d cannot be closed: %s",
            CLOSER, message.step, group, error.message,
        )  # fmt: skip
        self._perform(self._steps.close_failed(group, error))
        self._sync.end_group(group, error)
        self._failed(group)

    async def finish(self, client: Client, message: FinishSteps) -> None:
        """Nothing is left to do: let all that was counted be applied, as far as it can be.

        Raises:
            PsyncError: The log has ended.

        Cancellation: Safe.
        """
        asked = False  # after what is in the log by now
        while not (self._is_over or (asked and self._steps.is_settled)):
            if self._carried or self.pauses or (asked and self._steps.closing()):
                await self.changed()
            else:  # also if something was counted behind what was asked
                await self._sync.executor.run(client, message, self.close_all)
                asked = True

    def close_all(self, _: FinishSteps) -> None:
        """Execute an entry: close the steps in which something was counted."""
        self._perform(self._steps.finish())

    def end(self) -> None:
        """Another one decides from now on, or nobody."""
        self._is_over = True
        self.wake()

    # Pausing.

    async def pause(self, why: str) -> None:
        """Carry no step from now on, and wait for those that are on their way.

        On what was a backup that begins when it serves: until then a step may be outgoing whose
        parts are applied here, and nowhere else.

        Cancellation: Safe; it may be paused.
        """
        self._wanted.add(why)
        while HOSTED in self.pauses and not self._is_over:
            await self.changed()
        if why not in self._wanted:  # it has ended meanwhile
            return
        self.pauses.add(why)
        while self._carried:
            await self.changed()

    def resume(self, why: str) -> None:
        """End a pause; carry what was decided meanwhile if it was the last."""
        self.pauses.discard(why)
        self._wanted.discard(why)
        if not self.pauses and not self._is_over:
            for group, known in self._sync.groups.items():
                if known.outgoing is not None and group not in self._carried:
                    self._carry(known.outgoing)
        self.wake()


def _listed(factors: Factors | None) -> Listed:
    return None if factors is None else list(factors.items())
