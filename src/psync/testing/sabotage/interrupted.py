"""Failpoints that are no method's beginning or end, and what is done there instead.

Messages to several ps tasks are sent one after the other, so that there is a moment between two of
them; and a step that is decided ends with the error that a failpoint raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from psync.client.outgoing import Outgoing
from psync.client.plans import Plan
from psync.client.ps_link import Answers, Call
from psync.client.sync_client import SyncClient
from psync.errors import PsyncError
from psync.sync.groups import OutgoingStep
from psync.sync.outgoing_steps import Ended, StepRounds
from psync.testing.sabotage.failpoints import Failpoints
from psync.testing.sabotage.places import BETWEEN_PS, STEP_DECIDED
from psync.wire.codec import Message
from psync.wire.frames import Frame

M = TypeVar("M", bound=Message)


class SteppedOutgoing(Outgoing):
    """Deliveries that a test may stop between two messages of an update."""

    failpoints: Failpoints

    def ask(self, calls: Sequence[Call[M]]) -> Answers[M]:
        """Send all at once; or one by one, if it is armed what happens between them."""
        if not self.failpoints.armed(BETWEEN_PS):
            return super().ask(calls)
        return SteppedAnswers(calls, self.failpoints)


class SteppedAnswers(Answers[M]):
    """Calls that are made one by one, each when the one before it was answered.

    Args:
        calls: As for ``Answers``.
        failpoints: Told between two of them.
    """

    def __init__(self, calls: Sequence[Call[M]], failpoints: Failpoints) -> None:
        self._failpoints = failpoints
        super().__init__(calls)

    def _ask(self, positions: Sequence[int]) -> None:
        super()._ask(positions[:1])

    def _note(self, position: int, outcome: Frame | Exception) -> None:
        super()._note(position, outcome)
        following = position + 1
        if following == len(self._calls):
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self._failpoints.hit(BETWEEN_PS)
        except Exception as exc:
            self._note(following, exc)
        else:
            self._ask((following,))


class SteppedSyncClient(SyncClient):
    """The same for synchronous pushes; and it may tell ps 0 before the others have their parts."""

    failpoints: Failpoints
    without: frozenset[str]

    async def _stage_large(self, plan: Plan, *args: Any) -> Any:
        along, segments, rows = await super()._stage_large(plan, *args)
        if along is not None and along is not plan.whole and len(plan.requests) > 1:
            self.failpoints.hit(BETWEEN_PS)  # the others have theirs
        return along, segments, rows

    async def _stage(self, *args: Any) -> None:
        staging = super()._stage(*args)
        if "staged_commit" in self.without:
            unawaited = asyncio.create_task(staging)
            unawaited.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            await staging


class SteppedRounds(StepRounds):
    """Steps that a test may stop before any other ps knows of them."""

    failpoints: Failpoints

    def carry(self, outgoing: OutgoingStep, wanted: Any, ended: Ended) -> None:
        """Let every ps apply a step, unless a failpoint says that it cannot be closed."""
        try:
            self.failpoints.hit(STEP_DECIDED)
        except PsyncError as exc:
            ended({}, exc)
        else:
            super().carry(outgoing, wanted, ended)
