"""Messages in the logs of ps tasks alone: inputs of judging that came over no connection so.

What came over one is in the log as the message that it is. A client has no part in these messages:
a peer that sends one is refused, as no handler takes it.
"""

from __future__ import annotations

from typing import Any

from psync.wire.codec import Message, message


@message(135)
class CheckState(Message):
    """Take a digest of the state that judging has made; here is the last one, and the chain."""

    number: int  # of this check in the log
    last: bytes  # digest of the check before; b"": there was none
    chain: int  # over the entries before this one, see ``commit_log.chained``


# Of synchronous steps, on ps 0.


@message(30)
class BeginGroup(Message):
    """A group begins at this step, the value of its global step; again changes nothing."""

    group: int
    config: dict[str, Any]
    step: int


@message(31)
class CountPush(Message):
    """A Contribute, with a set of the log's own. Segments: what came along with it, if anything.

    The fields from ``group`` on as in Contribute.
    """

    group: int
    push: int
    acked_below: int
    closure: int
    ordinal: int
    variable_set: bytes
    local_step: int
    weight: float
    set_id: int
    members: list[tuple[int, int, int]] | None
    lengths: list[int]  # bytes of each shard of what came along whole
    rows: list[int] | None
    spread: bool


@message(128)
class ForgetPush(Message):
    """No request of this client waits for the answer to a push any more."""

    group: int
    push: int


@message(129)
class SetMembers(Message):
    """Who takes part, and what is left to do: a ReportSchedule, and when it came."""

    now: float  # of the clock of the log
    alive: list[tuple[str, int]]  # (task, incarnation)
    missing: list[str]
    queued: bool
    in_flight: list[int]  # closures


@message(130)
class Tick(Message):
    """It is so late: what was to be done at a time is done."""

    now: float  # of the clock of the log


@message(131)
class NormsMeasured(Message):
    """The factors with which a step that is decided is closed; see CloseStep."""

    group: int
    step: int
    scales: list[tuple[int, float]] | None
    ratios: list[tuple[int, float]] | None


@message(132)
class StepApplied(Message):
    """Every ps has applied a step, or one could not."""

    group: int
    step: int
    failure: bytes  # a Failure, encoded; b"": there is none


@message(133)
class EndSteps(Message):
    """Training has ended."""

    reason: str


@message(96)
class SetGroups(Message):
    """How far the groups are, of a snapshot that comes with a log.

    Segment: on ps 0 ``SyncSteps.snapshot``, as msgpack.
    """

    groups: list[tuple[int, dict[str, Any], int]]  # (group, configuration, step here; -1: none)
    spread: list[int]  # groups with a variable on several ps tasks


@message(134)
class HoldPush(Message):
    """A part that is staged, of a snapshot that comes with a log. Segments: that."""

    group: int
    push: int
    local_step: int
    set_id: int
    members: list[tuple[int, int, int]]  # (ps, variable, index)
    whole: bool  # it came along with Contribute, perhaps with what belongs to other ps tasks
    lengths: list[int]  # then: bytes of each shard
    rows: list[int] | None


# Of conditional accumulators.


@message(121)
class EndTakes(Message):
    """No request of this client waits for these takes: those that wait wait no longer."""

    takes: list[tuple[str, int]]  # (accumulator, number)


@message(122)
class HoldGradients(Message):
    """What is in an accumulator, of a snapshot that comes with a log.

    Segments: the bytes of the arrays of its sum, in pieces of 8 MiB.
    """

    accumulator: str
    count: int  # gradients; 0: this message says nothing of them, nor do the next three
    weight: float  # sum of their weights
    shape: list[int]  # of the sum; of a sparse one: of a row
    rows: int  # of a sparse one
    # (task, incarnation, below which number it has its takes or wants them no more)
    takers: list[tuple[str, int, int]]
    waiting: list[tuple[str, int, int, int]]  # (task, incarnation, number, gradients required)


@message(123)
class KeepAnswers(Message):
    """What was answered of accumulators and may be asked again.

    Segments: of all takes.
    """

    # As in ``ledger_snapshot.GradientStates``.
    answers: list[tuple[str, int, int, int, int, bytes]]
    calls: list[tuple[int, int, bytes, str]]
    # (task, incarnation, accumulator, number, GradientTaken, number of segments)
    takes: list[tuple[str, int, str, int, bytes, int]]
