"""Rounds of a decided step over all ps tasks: measure norms, close, raise the global step.

    round                                     when
    MeasureStep to every ps, for "gradients"  norms are clipped, of what lies on several ps tasks
    MeasureStep to every ps, for "updates"    a layer-wise rule needs norms of such a variable
    CloseStep to every ps, with the factors   always
    the global step is raised by one          always

A round begins when all have answered the one before, and the first error ends it all. What was
measured is kept here alone and for this step alone, so no ps has anything to remember or to undo.

After a failover of ps 0 the promoted backup goes on with the steps of its primary here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from psync.store.step_norms import Factors, ShardSums, StepNorms
from psync.store.sync_config import SyncConfig
from psync.sync.cross_ps_sets import Along, Share, Values
from psync.sync.followed_steps import LastStep
from psync.sync.group import Close, Contribution
from psync.sync.ps_peers import AllPs
from psync.sync.ps_sync import PsSync
from psync.wire.sync_messages import CloseStep, MeasureStep

Ended = Callable[[Values, Exception | None], None]
"""What is called at the end: with the values that were wanted, or with the first error."""


Listed = list[tuple[int, float]] | None
"""Factors of variables, as a message has them."""


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """How a step was closed, to close it once more."""

    close: Close
    along: Sequence[Sequence[Along]]  # what belonged to other ps tasks of each push
    scales: Listed
    ratios: Listed


@dataclass(slots=True, eq=False)
class _Step:
    close: Close
    along: Sequence[Sequence[Along]]  # what belongs to others of each push
    norms: StepNorms
    passes: list[str]  # that are still to be made
    wanted: Callable[[], Collection[Share]]
    ended: Ended


class StepRounds:
    """Carries the steps of one coordinator's cluster to every ps.

    Args:
        all_ps: The ps tasks.
        sync: The part of ps 0 itself.
    """

    def __init__(self, all_ps: AllPs, sync: PsSync) -> None:
        self._all_ps = all_ps
        self._sync = sync
        self._spread: set[int] = set()  # groups with a variable on several ps tasks
        self._raising: set[asyncio.Task[None]] = set()  # the global step

    def note_spread(self, group: int) -> None:
        """A group's pushes have a variable that lies on several ps tasks."""
        self._spread.add(group)

    @property
    def spread(self) -> frozenset[int]:
        """Groups that have such a variable."""
        return frozenset(self._spread)

    def carry(self, close: Close, wanted: Callable[[], Collection[Share]], ended: Ended) -> None:
        """Let every ps apply a step, and raise the global step.

        Args:
            close: What was decided.
            wanted: Says whose values are wanted afterwards; asked when the step is closed.
            ended: Called once. Must not raise.
        """
        norms = self._sync.norms(close.group)
        passes: list[str] = []
        if self._all_ps.has_others:
            passes = norms.passes_together(spread=close.group in self._spread)
        self._go_on(_Step(close, self._sync.along(close), norms, passes, wanted, ended))

    def carry_again(self, closed: ClosedStep, ended: Ended) -> None:
        """Let every ps that has not done so apply a step, and raise the global step.

        Args:
            closed: How it was closed before.
            ended: As for ``carry``.
        """
        close = closed.close
        norms = self._sync.norms(close.group)
        step = _Step(close, closed.along, norms, [], tuple, ended)
        self._close(step, closed.scales, closed.ratios)

    def _go_on(self, step: _Step) -> None:
        """Make the next pass; or close the step, if there is none."""
        group, number, pushes = step.close.group, step.close.step, list(step.close.pushes)
        config = self._sync.raw_config(group)
        scales, ratios = _listed(step.norms.scales), _listed(step.norms.ratios)
        if step.passes:
            measure = MeasureStep(
                group, config, number, pushes, scales=scales, ratios=ratios, what=step.passes[0]
            )
            self._all_ps.measure_step(measure, step.along, functools.partial(self._measured, step))
        else:
            self._close(step, scales, ratios)

    def _close(self, step: _Step, scales: Listed, ratios: Listed) -> None:
        group, number, pushes = step.close.group, step.close.step, list(step.close.pushes)
        config = self._sync.raw_config(group)
        self._all_ps.close_step(
            CloseStep(group, config, number, pushes, scales=scales, ratios=ratios),
            step.along,
            step.wanted(),
            functools.partial(self._applied, step),
        )

    def _measured(self, step: _Step, sums: Sequence[ShardSums], failed: Exception | None) -> None:
        if failed is None:
            try:
                self._conclude(step, sums)
            except Exception as exc:
                failed = exc
        if failed is None:
            self._go_on(step)
        else:
            step.ended({}, failed)

    def _conclude(self, step: _Step, sums: Sequence[ShardSums]) -> None:
        step.norms.conclude(step.passes.pop(0), sums)

    def _applied(self, step: _Step, values: Values, failed: Exception | None) -> None:
        """Every ps has closed a step: raise the global step."""
        raised = False
        if failed is None:
            try:
                raised = self._raise_at_once(step)
            except Exception as exc:
                failed = exc
        if failed is None and not raised:
            task = asyncio.get_running_loop().create_task(self._raise(step, values))
            self._raising.add(task)
            task.add_done_callback(self._raising.discard)
        else:
            step.ended(values, failed)

    def _raise_at_once(self, step: _Step) -> bool:
        return self._all_ps.raise_at_once(*self._what_to_raise(step))

    def _what_to_raise(self, step: _Step) -> tuple[SyncConfig, int, int]:
        group = step.close.group
        return self._sync.define(group, None), group, step.close.step

    async def _raise(self, step: _Step, values: Values) -> None:
        failed: Exception | None = None
        try:
            await self._all_ps.raise_global_step(*self._what_to_raise(step))
        except Exception as exc:
            failed = exc
        step.ended(values, failed)


def _listed(factors: Factors | None) -> Listed:
    return None if factors is None else list(factors.items())


async def go_on(
    group: int,
    last: LastStep[ClosedStep] | None,
    left: Sequence[tuple[int, Contribution]],
    sync: PsSync,
    rounds: StepRounds,
) -> int:
    """Close the last step of a group once more; return the step that is the present one then.

    Args:
        group: Its number. It is defined, and has a step.
        last: The last step that was closed since the snapshot.
        left: (step, push) of what counts beyond it.
        sync: The part of ps 0 itself.
        rounds: Carries steps to every ps.

    Raises:
        PsyncError: It cannot be closed.

    Cancellation: It may have been closed, or be closed later.
    """
    if last is not None:
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def then(_: Values, failed: Exception | None) -> None:
            if not ended.done():
                ended.set_result(failed)

        rounds.carry_again(last.closing, then)
        failed = await ended
        if failed is not None:
            raise failed
    closed = dict(sync.steps()).get(group)
    return left[0][0] if closed is None else closed
