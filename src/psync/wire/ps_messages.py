"""Messages to a ps: attach, create shards, pull and push values and rows, define optimizers.

Values under a lock are in ``lock_messages``, synchronous training in ``sync_messages``.
"""

from __future__ import annotations

from typing import Any

from psync.wire.codec import Message, message

# From the coordinator.


@message(32)
class AttachPs(Message):
    """The coordinator takes a ps into its cluster; answered by PsAttached.

    A coordinator incarnation that the ps has not seen yet fences the older one, and what was held
    for that is dropped, or kept to be adopted; see ``DescribeShards``.
    """

    coordinator: int
    ps_addresses: list[str]  # of all ps tasks: ps 0 talks to the others
    ps_timeout_s: float
    keep: bool = False  # what is held; what has begun is then carried to its end first
    moves: int = 0  # how often a ps was served elsewhere before: of two addresses the newer counts


@message(137)
class PsAttached(Message):
    """The ps serves this coordinator."""

    # ("rule" or "schedule", name, version) of what plugins have registered in its process
    plugins: list[tuple[str, str, int]]


@message(33)
class CreateShards(Message):
    """Declared shards and their first values; idempotent. Segments: those that are sent."""

    # (variable name, variable id, shard index, offset, shape, dtype)
    shards: list[tuple[str, int, int, int, list[int], str]]
    # For each what it begins with: another shard's value, so many bytes that are each of its
    # elements, or None: its value is in the segments.
    sources: list[tuple[int, int] | bytes | None]


@message(39)
class Fence(Message):
    """Refuse incarnations of a task below this one; answered by Done."""

    task: str
    below: int


@message(40)
class FinalBelow(Message):
    """All closures with smaller ids are final, and forgotten if they are not kept.

    A segment holds those that are kept, as ``closure_numbers.pack_kept`` packs them. A header would
    be too small: a rollback may undo as many data shards as there are.
    """

    closure: int
    # Of the ps tasks, when it was sent: a rollback since then may have undone what was done.
    timeline: int = 0


# Values.


@message(34)
class Pull(Message):
    """Values of a set of shards, or of one slot of each. Answered by Pulled.

    ``members`` defines set ``set_id`` for this connection; later requests leave it out.
    """

    set_id: int
    members: list[tuple[int, int]] | None
    optimizer: int  # -1: the values themselves
    slot: str


@message(35)
class Pulled(Message):
    """Segments: one per member of the set, in its order.

    ``steps``: (group, step) of each synchronous group that has closed a step on this ps: the
    values are at least of that step. A group that is not named is where it began.
    """

    steps: list[tuple[int, int]]


@message(72)
class PullRows(Message):
    """Some rows of shards, or of one slot of each. Answered by RowsPulled.

    Segments: one for each part whose step is 0, its ``count`` row numbers (int64, in any order).
    """

    # (variable id, shard index, count, start, stop, step). Rows are local, they count from the
    # shard's first one. Step 0: those in the body; else range(start, stop, step).
    parts: list[tuple[int, int, int, int, int, int]]
    optimizer: int  # -1: the values themselves
    slot: str


@message(73)
class RowsPulled(Message):
    """Segments: the rows of each part, in the order in which it names them."""

    steps: list[tuple[int, int]]  # as in Pulled


@message(36)
class Push(Message):
    """Gradients for a set of shards. Segments: one per member. Answered by Pushed."""

    sequence: int  # of this client, from 1
    acked_below: int  # the client has the answers to all smaller sequences
    closure: int  # id, or -1 outside a closure
    ordinal: int  # of the call within the closure
    set_id: int
    members: list[tuple[int, int]] | None
    optimizer: int
    config: dict[str, Any] | None  # defines the optimizer for this connection
    # Of this optimizer, pushes without a part on this ps that the client knows of, marked; see
    # ``store.push_counts``.
    elsewhere: int
    # None: all members are dense. Else for each member -1, or the number n of its rows that the
    # gradient has: its segment is n local row numbers (int64, ascending), then n rows of values.
    rows: list[int] | None = None
    # Of layerwise optimizers, for each member the ratio of its whole variable. None: the ps finds
    # it, from the shard alone.
    ratios: list[float] | None = None
    # (ps, sequence there) of the other messages of the same update. None: it is the only one.
    spread: list[tuple[int, int]] | None = None
    # The set whose values the answer should bring, read once this is applied, as a Pull of that
    # set would bring them; -1: none.
    pull: int = -1
    pull_members: list[tuple[int, int]] | None = None
    raised: tuple[int, int] | None = None  # a shard of one number, which becomes one more with it
    place: int = 0  # which of the update's messages it is, see ``store.push_counts``


@message(80)
class MeasurePush(Message):
    """What would this push do? Changes nothing. Segments: one per member. Answered by Measured."""

    set_id: int
    members: list[tuple[int, int]] | None
    optimizer: int
    config: dict[str, Any]  # defines it
    elsewhere: int  # as in Push


@message(81)
class Measured(Message):
    """For each member the sums of squares of the parameter and of its update."""

    sums: list[tuple[float, float]]


@message(37)
class Assign(Message):
    """Values for a set of shards. Segments: one per member. Answered by Pushed."""

    sequence: int
    acked_below: int
    closure: int
    ordinal: int
    set_id: int
    members: list[tuple[int, int]] | None
    op: str  # "assign", "add", "sub" or "max"; for rows also "mul", "div" or "min"
    rows: list[int] | None = None  # as in Push
    spread: list[tuple[int, int]] | None = None  # as in Push


@message(38)
class Pushed(Message):
    """What became of a push or assign. Segments: the values that a Push wanted, if they came."""

    outcome: str  # "accepted", "stale" or "duplicate"
    step: int  # pushes of the optimizer that this ps knows of then, marked; 0 for an assign
    # Of the values, as in Pulled. None: there are none; some shard was busy with another update.
    steps: list[tuple[int, int]] | None = None
    elsewhere: int = 0  # of these pushes those without a part on this ps, marked


@message(61)
class AverageShards(Message):
    """Move averages towards the present values of shards on the same ps. Answered by Pushed."""

    sequence: int
    acked_below: int
    closure: int
    ordinal: int
    # (variable id of the average, id of the variable that it follows, index of both shards)
    shards: list[tuple[int, int, int]]
    decay: float  # average -= (1 - decay) * (average - value)
    spread: list[tuple[int, int]] | None = None  # as in Push


# Optimizers, and what they keep: set from outside by a program that restores it.


@message(41)
class DefineOptimizer(Message):
    """Make an optimizer known before its first push; answered by Done."""

    optimizer: int
    config: dict[str, Any]


@message(127)
class AskOptimizer(Message):
    """How many pushes has an optimizer applied? Answered by OptimizerState."""

    optimizer: int
    config: dict[str, Any]  # defines it


@message(124)
class OptimizerState(Message):
    """As of now, see ``store.push_counts.Counts``."""

    base: int
    own: int
    steps: int


@message(125)
class SetSlots(Message):
    """Values for slots of shards; idempotent. Segments: one per member. Answered by Done."""

    optimizer: int
    config: dict[str, Any]  # defines it
    members: list[tuple[int, int, str]]  # variable id, shard index, slot


@message(126)
class SetOptimizer(Message):
    """Let an optimizer go on otherwise; idempotent. Answered by Done."""

    optimizer: int
    config: dict[str, Any]  # defines it
    step: int  # pushes that it has applied, marked with a new epoch; -1: as it is
    learning_rate: dict[str, Any] | None  # config of a schedule; None: as it is


# Between ps tasks.


@message(152)
class TellCounts(Message):
    """ps k → ps 0, ps 0 → ps k: pushes without a part on some ps. Answered by CountsHeard.

    Idempotent.
    """

    # (optimizer, its config, base, [(ps, pushes without a part there)]), see ``store.push_counts``
    counts: list[tuple[int, dict[str, Any], int, list[tuple[int, int]]]]


@message(153)
class CountsHeard(Message):
    """What was told is known."""

    is_news: bool  # much of it was; else there is no hurry to tell more
