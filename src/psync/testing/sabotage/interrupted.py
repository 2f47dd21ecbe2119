"""Failpoints that are no method's beginning or end, and what is done there instead.

Messages to several ps tasks are sent one after the other, so that there is a moment between two of
them; and a step that is decided ends with the error that a failpoint raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self, TypeVar

from psync.client.link import Answers, Call
from psync.client.ps import PlanUpdate
from psync.client.sync import PartAnswers
from psync.errors import PsyncError
from psync.sync.step_closer import StepCloser
from psync.sync.steps import Close
from psync.testing.sabotage.failpoints import Failpoints
from psync.testing.sabotage.places import BETWEEN_PS, STEP_DECIDED
from psync.wire.frames import Frame
from psync.wire.messages import KeepPart

A = TypeVar("A", bound=Answers[Any])


class SteppedUpdate(PlanUpdate):
    """An update that a test may stop between two of its messages."""

    failpoints: Failpoints

    def send(self) -> Self:
        """Make all calls at once; or one by one, if it is armed what happens between them."""
        if not self.failpoints.armed(BETWEEN_PS) or len(self.calls) == 1:
            return super().send()
        for at, call in enumerate(_begun(self).calls):
            call.then = partial(self._stepped, at)
        self.calls[0].link.ask(self.calls[0])
        return self

    def _stepped(self, at: int, outcome: Frame | Exception) -> None:
        """One of them has ended: then the next one is made."""
        following = at + 1
        _note(self, at, outcome)
        if following == len(self.calls):
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self.failpoints.hit(BETWEEN_PS)
        except Exception as exc:
            self._stepped(following, exc)
        else:
            self.calls[following].link.ask(self.calls[following])


class SteppedParts(PartAnswers):
    """The same for synchronous pushes, whose parts are answered when all are there."""

    failpoints: Failpoints

    def send(self) -> Self:
        """Make all calls at once; or the first one, and the others when that has arrived."""
        if not self.failpoints.armed(BETWEEN_PS) or len(self.calls) == 1:
            return super().send()

        def arrived(_: object) -> None:
            try:
                self.failpoints.hit(BETWEEN_PS)
            except Exception as exc:
                _note(self, 1, exc)
            else:
                for call in self.calls[1:]:
                    call.link.ask(call)

        first = _begun(self).calls[0]
        for at, call in enumerate(self.calls):
            call.answers, call.at = self, at
        first.link.ask(first)
        # On the same connection: what is about no part changes nothing.
        first.link.ask(Call(first.link, KeepPart(0, 0), lane=first.lane, then=arrived))
        return self


def _begun(answers: A) -> A:
    """Let all answers be missing: the calls are made one after the other."""
    answers.missing = len(answers.calls)
    answers.outcomes = [None] * answers.missing
    return answers


def _note(answers: Answers[Any], at: int, outcome: Frame | Exception) -> None:
    """One call has ended."""
    answers.outcomes[at] = outcome
    answers.missing -= 1
    if not answers.missing or (answers.ends_early and isinstance(outcome, Exception)):
        answers.complete()


class SteppedCloser(StepCloser):
    """A closer whose steps a test may stop before any other ps knows of them."""

    failpoints: Failpoints

    def _carry(self, close: Close) -> None:
        """Let every ps apply a step, unless a failpoint says that it cannot be closed."""
        try:
            self.failpoints.hit(STEP_DECIDED)
        except PsyncError as exc:
            self.carried.add(close.group)
            self._ended(close, [], exc)
        else:
            super()._carry(close)
