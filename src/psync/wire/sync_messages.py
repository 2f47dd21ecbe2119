"""Messages of synchronous steps and of staleness clocks.

A *group* is one SyncReplicasOptimizer, by its number. A *push* is one call of its
``apply_gradients``, numbered from 1 by the client, separately for each group.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from psync.wire.codec import Message, message

# Worker → ps.


@message(42)
class StagePush(Message):
    """Worker → ps: keep this part of a push until ps 0 has decided. Answered by Staged.

    Segments: one per member. The same push again replaces it; else it stays until its step is
    closed.
    """

    group: int
    config: dict[str, Any] | None  # of the group; defines it for this connection
    push: int
    local_step: int  # of the values that the gradients were computed from; -1: the first
    set_id: int
    members: list[tuple[int, int]] | None
    rows: list[int] | None = None  # as in Push


@message(43)
class Staged(Message):
    """``stale``: the step is over here, nothing was kept."""

    stale: bool


@message(44)
class Contribute(Message):
    """Worker → ps 0: all parts of a push are staged; decide, and answer when there is a token.

    Answered by Contributed, after the step is closed or while other tokens are left. A small push
    comes along whole, of a larger one ps 0's own part if that is small; ps 0 hands on what belongs
    to others with CloseStep. Segments: one per member.
    """

    group: int
    config: dict[str, Any] | None
    push: int
    acked_below: int  # the client has the answers to all smaller numbers
    closure: int  # id, or -1 outside a closure
    ordinal: int  # of the call within the closure
    variable_set: bytes  # digest of all variables of the push
    local_step: int  # -1: values of before the group's first step
    weight: float
    set_id: int  # of what comes along; -1: nothing. Such sets are numbered apart from others
    members: list[tuple[int, int, int]] | None  # (ps, variable, index); those of a ps together
    ahead: int  # set whose values are wanted with the token, if it is that of a new step; -1: none
    ahead_members: list[tuple[int, int, int]] | None
    rows: list[int] | None = None  # as in Push; only of what ps 0 keeps itself
    spread: bool = False  # whether a variable of the push lies on several ps tasks


@message(45)
class Contributed(Message):
    """What became of a push, and the token: the worker's next local step.

    Segments: the values that were wanted, one per member, of step ``token`` or later; or none.
    """

    outcome: str  # "accepted", "stale" or "duplicate"
    staleness: int  # steps that were closed since the values were pulled
    token: int
    partial: bool  # the step that it was counted in was closed with fewer than the target
    count: int  # pushes in the step that it was counted in, if that is closed; else 0


@message(46)
class AskStep(Message):
    """Worker → ps 0, before many bytes travel: is this step still open? Answered by SyncStep."""

    group: int


@message(47)
class SyncStep(Message):
    """The group's present step, and its first one; both -1 if nobody has pushed yet."""

    step: int
    first: int


@message(50)
class InitTokens(Message):
    """Put the initial tokens of a group, once; answered by SyncStep. ``count`` -1: the default."""

    group: int
    config: dict[str, Any]
    count: int


# ps 0 → every ps.


@message(90)
class DescribeSet(Message):
    """ps 0 → ps: are these shards there, and may a group push to them? Answered by SetSizes.

    Defines the set for this connection.
    """

    set_id: int
    members: list[tuple[int, int]]
    group: int  # -1: their values are wanted, and no more
    config: dict[str, Any] | None


@message(91)
class SetSizes(Message):
    """Bytes of each shard of a set."""

    sizes: list[int]


@message(48)
class CloseStep(Message):
    """ps 0 → every ps: apply the mean of these pushes; idempotent by ``step``. Answered by Done.

    Afterwards the group is at ``step + 1`` and what is staged for ``step`` or before is dropped.
    Segments: one per part that comes along. Segments of the answer: the values of the sets in
    ``ahead`` afterwards, one per shard; none if shards are busy.
    """

    group: int
    config: dict[str, Any] | None  # None: the ps knows it
    step: int
    # (task, incarnation, push, weight), in the order in which they are summed
    pushes: list[tuple[str, int, int, float]]
    along: list[int] = field(default_factory=list)  # of each push: its set, -1: staged, or not here
    sets: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)  # defined with this
    ahead: list[int] = field(default_factory=list)
    # (variable id, factor): what limits the norm of the mean of a variable, and the trust ratio of
    # its update. None: the ps finds it by itself, if the rule needs it.
    scales: list[tuple[int, float]] | None = None
    ratios: list[tuple[int, float]] | None = None


@message(82)
class MeasureStep(CloseStep):
    """ps 0 → every ps: what would closing this step do? Changes nothing. Answered by StepMeasured.

    The same as the ``CloseStep`` that follows, but for the factors that are not known yet.
    """

    what: str = "gradients"  # or "updates", by the mean times its scales; see ``step_norms``


@message(83)
class StepMeasured(Message):
    """Sums of squares of each shard that the step changes on this ps; see ``step_norms``."""

    sums: list[tuple[int, int, float, float]]  # (variable id, shard index, …)


# Coordinator → ps 0.


@message(15)
class AwaitWaiters(Message):
    """Coordinator → ps 0: say when workers wait for each other, or are about to.

    Answered by Done. Only then is the schedule of use to ps 0; see ``ReportSchedule``.
    """


@message(49)
class ReportSchedule(Message):
    """Coordinator → ps 0: who takes part and what is left to do; the newest version counts.

    ``in_flight`` is meant only if ``queued`` is false: then nothing else will be started.
    """

    version: int
    workers: list[tuple[int, int]]  # (index, incarnation) of those alive and not out of data
    missing: list[str]  # names of the others
    queued: bool  # closures that a worker could begin now have not been begun
    in_flight: list[tuple[int, int]]  # (closure, worker index)


@message(71)
class FinishSteps(Message):
    """Coordinator → ps 0: nothing is left to do, so nobody will complete what was counted.

    Answered by Done when it has been applied.
    """


# Clocks: nobody runs too far ahead of the slowest.


@message(56)
class TickClock(Message):
    """Worker → ps 0: one more round is done. Answered by ClockTicked when it may go on."""

    bound: int  # number of the optimizer
    max_staleness: int
    tick: int  # number of this tick of the client, from 1: a repetition counts once


@message(57)
class ClockTicked(Message):
    """How far ahead of the slowest the worker's clock is, in rounds."""

    ahead: int
