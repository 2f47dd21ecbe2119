"""Failpoints that are no method's beginning or end, and what is done there instead.

Messages to several ps tasks are sent one after the other, so that there is a moment between two of
them; and a step that is decided ends with the error that a failpoint raises.
"""

from __future__ import annotations

from typing import Any

from psync.client.link import Answers, Call, always
from psync.client.ps import Outgoing
from psync.client.sync import SyncClient
from psync.errors import PsyncError
from psync.sync.outgoing_steps import OutgoingSteps
from psync.sync.step import KnownGroup, OutgoingStep
from psync.testing.sabotage.failpoints import Failpoints
from psync.testing.sabotage.places import BETWEEN_PS, STEP_DECIDED
from psync.wire.frames import Frame
from psync.wire.messages import KeepPart


class SteppedOutgoing(Outgoing):
    """Deliveries that a test may stop between two messages of an update."""

    failpoints: Failpoints

    def send(self, parts: Answers[Any]) -> None:
        """Send all at once; or one by one, if it is armed what happens between them."""
        if self.failpoints.armed(BETWEEN_PS):
            _step(parts, self.failpoints)
        super().send(parts)


def _step(parts: Answers[Any], failpoints: Failpoints) -> None:
    """Let each call be made when the one before it was answered."""
    ask, note = type(parts).ask, type(parts).note

    def ask_first(at: int) -> None:
        if not at:
            ask(parts, at)

    def note_and_go_on(at: int, outcome: Frame | Exception) -> None:
        following = at + 1
        is_last = following == len(parts.calls)
        note(parts, at, outcome)
        if is_last:
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            failpoints.hit(BETWEEN_PS)
        except Exception as exc:
            parts.note(following, exc)
        else:
            ask(parts, following)

    parts.ask, parts.note = ask_first, note_and_go_on  # type: ignore[method-assign]


class SteppedSyncClient(SyncClient):
    """The same for synchronous pushes, whose parts are answered when all are there."""

    failpoints: Failpoints

    def _send(self, answers: Answers[Any]) -> None:
        if self.failpoints.armed(BETWEEN_PS) and len(answers.calls) > 1:
            self._step(answers)
        super()._send(answers)

    def _step(self, answers: Answers[Any]) -> None:
        """Let the first part arrive before the others are sent."""
        ask, first = answers.ask, answers.calls[0]

        def arrived(_: object) -> None:
            try:
                self.failpoints.hit(BETWEEN_PS)
            except Exception as exc:
                answers.note(1, exc)
            else:
                for at in range(1, len(answers.calls)):
                    ask(at)

        def ask_first(at: int) -> None:
            if not at:
                ask(0)
                # On the same connection: what is about no part changes nothing.
                asked = Call(first.link, always(KeepPart(0, 0)), lane=first.lane)
                first.link.ask(asked, arrived)

        answers.ask = ask_first  # type: ignore[method-assign]


class SteppedSteps(OutgoingSteps):
    """Steps that a test may stop before any other ps knows of them."""

    failpoints: Failpoints

    def _carry(self, known: KnownGroup, outgoing: OutgoingStep) -> None:
        """Let every ps apply a step, unless a failpoint says that it cannot be closed."""
        try:
            self.failpoints.hit(STEP_DECIDED)
        except PsyncError as exc:
            self._carried.add(known.number)
            self._ended(outgoing.close, [], exc)
        else:
            super()._carry(known, outgoing)
