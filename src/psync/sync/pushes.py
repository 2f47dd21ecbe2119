"""Pushes of a synchronous group, what becomes of them, and what is decided with them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from psync.errors import PsyncError
from psync.sync.tokens import Replica
from psync.wire.messages import Contributed

Listed: TypeAlias = list[tuple[int, float]] | None
"""Factors of variables, as a message has them."""


class Contribution(msgspec.Struct, frozen=True):
    """A push whose parts are all here, or which is stale."""

    replica: Replica
    number: int  # of the push, from 1; the replica counts anew in each group
    acked_below: int  # the replica has the answers to all smaller numbers
    closure: int | None
    ordinal: int  # of the call within the closure
    variable_set: bytes  # digest of the variables of the push
    local_step: int  # -1: of before the group's first step
    weight: float
    others: list[int]  # ps tasks but 0 that have a part of it


class Answer(msgspec.Struct):
    """Tell the replica what became of its push, and from which step it may go on."""

    group: int
    replica: Replica
    number: int
    outcome: str  # "accepted", "stale" or "duplicate"
    staleness: int  # steps closed since the values were pulled
    token: int
    partial: bool  # whether it was counted in a step that was closed as a partial one
    count: int  # pushes in the step that it was counted in; 0: that is not closed, or there is none

    def message(self, alone: bool, steps: list[tuple[int, int]] | None) -> Contributed:
        """Return it as it travels, with how far each group is in the values that go with it."""
        return Contributed(
            self.group, self.outcome, self.staleness, self.token, self.partial, self.count, steps,
            alone,
        )  # fmt: skip


class Refuse(msgspec.Struct, frozen=True):
    """Tell the replica that its push has failed."""

    group: int
    replica: Replica
    number: int
    error: PsyncError


class Close(msgspec.Struct):
    """Let every ps apply ``step``, raise the global step, then call ``closed``.

    ``answers`` leave as soon as this ps has applied it: these pushes have a part on every ps, and
    each of them answers when it has.
    """

    group: int
    step: int
    pushes: list[tuple[str, int, int, float]]  # task, incarnation, number, weight; in order
    places: list[list[int]]  # of each the other ps tasks that have a part of it
    partial: bool
    answers: list[Answer]
    is_measured: bool = False  # the factors are known, where there are any
    scales: Listed = None
    ratios: Listed = None


Action: TypeAlias = Answer | Refuse | Close


class Push(msgspec.Struct, eq=False):
    """What is known of one push, until its replica has the answer."""

    contribution: Contribution
    outcome: str
    staleness: int
    partial: bool = False
    count: int = 0
    answer: Answer | None = None
