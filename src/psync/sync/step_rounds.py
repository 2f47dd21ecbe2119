"""Rounds of a decided step over all ps tasks: its norms are measured, then it is closed.

    round                                     when
    MeasureStep to every ps, for "gradients"  norms are clipped, of what lies on several ps tasks
    MeasureStep to every ps, for "updates"    a layer-wise rule needs norms of such a variable
    the factors become an entry of the log    if there were such rounds
    CloseStep to every ps, with the factors   always

A round begins when all have answered the one before, and the first error ends it all. Measuring
changes nothing. Once a ps may have closed the step the factors are in the log: a backup that is
promoted sends the same ``CloseStep`` again, and each ps that has closed it ignores that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from psync.store.step_norms import Factors, ShardSums, StepNorms
from psync.sync.cross_ps_sets import Share, Values
from psync.sync.groups import Listed, OutgoingStep
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import PsSync
from psync.wire.messages import CloseStep, MeasureStep

Ended = Callable[[Values, Exception | None], None]
"""What is called at the end: with the values that were wanted, or with the first error."""


@dataclass(slots=True, eq=False)
class _Step:
    outgoing: OutgoingStep
    norms: StepNorms
    passes: list[str]  # that are still to be made
    wanted: Callable[[], Collection[Share]]
    ended: Ended


class StepRounds:
    """Carries the steps of one coordinator's cluster to every ps.

    Args:
        all_ps: The ps tasks.
        sync: The part of ps 0 itself.
        measured: Puts the factors of a step into the log, (step, scales, ratios, then).
    """

    def __init__(
        self,
        all_ps: AllPs,
        sync: PsSync,
        measured: Callable[[OutgoingStep, Listed, Listed, Callable[[], None]], None],
    ) -> None:
        self._all_ps = all_ps
        self._sync = sync
        self._log_factors = measured

    def carry(
        self, outgoing: OutgoingStep, wanted: Callable[[], Collection[Share]], ended: Ended
    ) -> None:
        """Let every ps that has not done so apply a step.

        Args:
            outgoing: What was decided.
            wanted: Says whose values are wanted afterwards; asked when the step is closed.
            ended: Called once. Must not raise.
        """
        group = outgoing.close.group
        norms = self._sync.norms(group)
        passes: list[str] = []
        if self._all_ps.has_others and not outgoing.is_measured:
            passes = norms.passes_together(spread=self._sync.known(group, None).spread)
        step = _Step(outgoing, norms, passes, wanted, ended)
        if passes:
            self._measure(step)
        else:
            self._close(step)

    def _measure(self, step: _Step) -> None:
        """Make the next pass."""
        close = step.outgoing.close
        message = MeasureStep(
            close.group, self._sync.raw_config(close.group), close.step, list(close.pushes),
            scales=_listed(step.norms.scales), ratios=_listed(step.norms.ratios),
            what=step.passes[0],
        )  # fmt: skip
        measured = functools.partial(self._measured, step)
        self._all_ps.measure_step(message, step.outgoing.along, measured)

    def _measured(self, step: _Step, sums: Sequence[ShardSums], failed: Exception | None) -> None:
        if failed is None:
            try:
                self._conclude(step, sums)
            except Exception as exc:
                failed = exc
        if failed is not None:
            step.ended({}, failed)
        elif step.passes:
            self._measure(step)
        else:
            scales, ratios = _listed(step.norms.scales), _listed(step.norms.ratios)
            self._log_factors(step.outgoing, scales, ratios, functools.partial(self._close, step))

    def _conclude(self, step: _Step, sums: Sequence[ShardSums]) -> None:
        step.norms.conclude(step.passes.pop(0), sums)

    def _close(self, step: _Step) -> None:
        outgoing, close = step.outgoing, step.outgoing.close
        message = CloseStep(
            close.group, self._sync.raw_config(close.group), close.step, list(close.pushes),
            scales=outgoing.scales, ratios=outgoing.ratios,
        )  # fmt: skip
        self._all_ps.close_step(message, outgoing.along, step.wanted(), step.ended)


def _listed(factors: Factors | None) -> Listed:
    return None if factors is None else list(factors.items())
