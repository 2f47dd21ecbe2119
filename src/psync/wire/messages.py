"""Every message of the protocol, one frozen class each.

Layer: L1 wire. Imports: codec.

Fields of tuples come back as lists: msgpack knows one kind of array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psync.wire.codec import Message as Message
from psync.wire.codec import message

# Handshake. ``mac`` and nonces: 32 bytes.


@message(1)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Client's first word."""

    oldest_version: int
    newest_version: int
    task: str  # name of the client's task
    incarnation: int  # of the client
    lane: str  # one of handshake.LANES
    nonce: bytes
    secured: bool  # whether the client holds a secret


@message(2)
@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """Server's answer: proves first, so that a client never proves itself to a stranger."""

    version: int
    task: str
    incarnation: int
    nonce: bytes
    secured: bool
    mac: bytes


@message(3)
@dataclass(frozen=True, slots=True)
class Proof(Message):
    """Client's proof."""

    mac: bytes


@message(4)
@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The connection is open."""


@message(5)
@dataclass(frozen=True, slots=True)
class Refused(Message):
    """The connection ends here."""

    reason: str  # "version", "authentication", "tls", "protocol", "fenced", "full", "early"
    detail: str


# Replies that several requests share.


@message(8)
@dataclass(frozen=True, slots=True)
class Done(Message):
    """The request was carried out; there is nothing more to say."""


@message(9)
@dataclass(frozen=True, slots=True)
class Failure(Message):
    """Header of an ERROR frame."""

    error: str  # class name in psync.errors, or "" for any other exception
    type_name: str  # of any exception
    task: str  # that it tells of (TaskLost, RemoteError); else ""
    message: str
    hint: str | None
    traceback: str


# Coordinator → worker.


@message(16)
@dataclass(frozen=True, slots=True)
class AttachWorker(Message):
    """The coordinator takes a worker into its cluster; answered by Done."""

    worker_index: int
    num_workers: int
    incarnation: int  # that the worker bears from now on
    coordinator: int  # incarnation of the coordinator
    origin: str  # of the strategy: marks its variables
    program: str  # of the coordinator's process: marks its optimizers
    ps_addresses: list[str]
    ps_timeout_s: float  # a ps that cannot be reached for this many seconds is lost


@message(17)
@dataclass(frozen=True, slots=True)
class RunClosures(Message):
    """Closures for a worker, in order. Segments: each closure's pickled arguments.

    A closure: (id, function key, number of segments or -1 when the worker has to fetch
    the arguments when it is about to run it, number of segments of each RemoteValue input).
    """

    closures: list[tuple[int, bytes, int, list[int]]]


@message(18)
@dataclass(frozen=True, slots=True)
class GiveBack(Message):
    """Return those of these closures that have not started."""

    closures: list[int]


@message(19)
@dataclass(frozen=True, slots=True)
class GivenBack(Message):
    """Worker's answer to GiveBack: these have not started and never will, here."""

    closures: list[int]


@message(20)
@dataclass(frozen=True, slots=True)
class CancelClosures(Message):
    """Stop these closures; each still ends with a result."""

    closures: list[int]


@message(21)
@dataclass(frozen=True, slots=True)
class ClosureResults(Message):
    """Closures that ended. Segments: each one's pickled result or exception.

    A result: (id, outcome, number of segments, error or None), where outcome is "ok",
    "error", "end_of_data" or "cancelled".
    """

    results: list[tuple[int, str, int, tuple[str, str, str] | None]]
    mean_seconds: float  # of those that succeeded
    # (id, calls that it has made) of those that succeeded and updated something
    updates: list[tuple[int, int]] | None = None


@message(22)
@dataclass(frozen=True, slots=True)
class FetchFunction(Message):
    """Worker → coordinator: send a step function. Answered by Function."""

    key: bytes


@message(23)
@dataclass(frozen=True, slots=True)
class Function(Message):
    """A pickled function. Segments: the pickle, then its buffers."""

    name: str


@message(24)
@dataclass(frozen=True, slots=True)
class FetchArguments(Message):
    """Worker → coordinator: send the arguments of a closure. Answered by Arguments."""

    closure: int


@message(25)
@dataclass(frozen=True, slots=True)
class Arguments(Message):
    """Segments as in RunClosures."""

    segments: int
    remote_values: list[int]


@message(26)
@dataclass(frozen=True, slots=True)
class ReleaseIterators(Message):
    """Per-worker iterators that nobody on the coordinator refers to any more."""

    uids: list[str]


@message(27)
@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Finish and exit; answered by Done."""

    reason: str


@message(28)
@dataclass(frozen=True, slots=True)
class AskStatistics(Message):
    """Answered by Statistics."""


@message(29)
@dataclass(frozen=True, slots=True)
class Statistics(Message):
    """Counters of a task."""

    counters: dict[str, Any]


# To a ps.


@message(32)
@dataclass(frozen=True, slots=True)
class AttachPs(Message):
    """The coordinator takes a ps into its cluster; answered by Done.

    A coordinator incarnation that the ps has not seen yet fences the older one, and what was held
    for that is dropped, or kept to be adopted; see ``DescribeShards``.
    """

    coordinator: int
    ps_index: int
    ps_addresses: list[str]  # of all ps tasks: ps 0 talks to the others
    ps_timeout_s: float
    keep: bool = False  # what is held; what has begun is then carried to its end first


@message(33)
@dataclass(frozen=True, slots=True)
class CreateShards(Message):
    """Declared shards and their first values; idempotent. Segments: those that are sent."""

    # (variable name, variable id, shard index, offset, shape, dtype)
    shards: list[tuple[str, int, int, int, list[int], str]]
    # For each what it begins with: another shard's value, so many bytes that are each of its
    # elements, or None: its value is in the segments.
    sources: list[tuple[int, int] | bytes | None]


@message(34)
@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Values of a set of shards, or of one slot of each. Answered by Pulled.

    ``members`` defines set ``set_id`` for this connection; later requests leave it out.
    """

    set_id: int
    members: list[tuple[int, int]] | None
    optimizer: int  # -1: the values themselves
    slot: str


@message(35)
@dataclass(frozen=True, slots=True)
class Pulled(Message):
    """Segments: one per member of the set, in its order.

    ``steps``: (group, step) of each synchronous group that has closed a step on this ps: the
    values are at least of that step. A group that is not named is where it began.
    """

    steps: list[tuple[int, int]]


@message(36)
@dataclass(frozen=True, slots=True)
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
    step: int  # highest step of this optimizer that the client knows
    # None: all members are dense. Else for each member -1, or the number n of its rows that the
    # gradient has: its segment is n local row numbers (int64, ascending), then n rows of values.
    rows: list[int] | None = None
    # Of layerwise optimizers, for each member the ratio of its whole variable. None: the ps finds
    # it, from the shard alone.
    ratios: list[float] | None = None
    # (ps, sequence there) of the other messages of the same update. None: it is the only one.
    spread: list[tuple[int, int]] | None = None


@message(80)
@dataclass(frozen=True, slots=True)
class MeasurePush(Message):
    """What would this push do? Changes nothing. Segments: one per member. Answered by Measured."""

    set_id: int
    members: list[tuple[int, int]] | None
    optimizer: int
    config: dict[str, Any]  # defines it
    step: int  # as in Push


@message(81)
@dataclass(frozen=True, slots=True)
class Measured(Message):
    """For each member the sums of squares of the parameter and of its update."""

    sums: list[tuple[float, float]]


@message(37)
@dataclass(frozen=True, slots=True)
class Assign(Message):
    """Values for a set of shards. Segments: one per member. Answered by Pushed."""

    sequence: int
    acked_below: int
    closure: int
    ordinal: int
    set_id: int
    members: list[tuple[int, int]] | None
    op: str  # "assign", "add" or "sub"; for rows also "mul", "div", "min" or "max"
    rows: list[int] | None = None  # as in Push
    spread: list[tuple[int, int]] | None = None  # as in Push


@message(38)
@dataclass(frozen=True, slots=True)
class Pushed(Message):
    """What became of a push or assign."""

    outcome: str  # "accepted", "stale" or "duplicate"
    step: int  # the optimizer's step on this ps after it; 0 for an assign


@message(61)
@dataclass(frozen=True, slots=True)
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


@message(41)
@dataclass(frozen=True, slots=True)
class DefineOptimizer(Message):
    """Make an optimizer known before its first push; answered by Done."""

    optimizer: int
    config: dict[str, Any]


@message(39)
@dataclass(frozen=True, slots=True)
class Fence(Message):
    """Refuse incarnations of a task below this one; answered by Done."""

    task: str
    below: int


@message(40)
@dataclass(frozen=True, slots=True)
class FinalBelow(Message):
    """All closures with smaller ids are final."""

    closure: int


# Synchronous training. A *group* is one SyncReplicasOptimizer, by its number. A *push* is one
# call of its ``apply_gradients``, numbered from 1 by the client, anew for each group.


@message(42)
@dataclass(frozen=True, slots=True)
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
@dataclass(frozen=True, slots=True)
class Staged(Message):
    """``stale``: the step is over here, nothing was kept."""

    stale: bool


@message(44)
@dataclass(frozen=True, slots=True)
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
@dataclass(frozen=True, slots=True)
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
@dataclass(frozen=True, slots=True)
class AskStep(Message):
    """Worker → ps 0, before many bytes travel: is this step still open? Answered by SyncStep."""

    group: int


@message(47)
@dataclass(frozen=True, slots=True)
class SyncStep(Message):
    """The group's present step, and its first one; both -1 if nobody has pushed yet."""

    step: int
    first: int


@message(48)
@dataclass(frozen=True, slots=True)
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
@dataclass(frozen=True, slots=True)
class MeasureStep(CloseStep):
    """ps 0 → every ps: what would closing this step do? Changes nothing. Answered by StepMeasured.

    The same as the ``CloseStep`` that follows, but for the factors that are not known yet.
    """

    what: str = "gradients"  # or "updates", by the mean times its scales; see ``step_norms``


@message(83)
@dataclass(frozen=True, slots=True)
class StepMeasured(Message):
    """Sums of squares of each shard that the step changes on this ps; see ``step_norms``."""

    sums: list[tuple[int, int, float, float]]  # (variable id, shard index, …)


@message(49)
@dataclass(frozen=True, slots=True)
class ReportSchedule(Message):
    """Coordinator → ps 0: who takes part and what is left to do; the newest version counts.

    ``in_flight`` is meant only if ``queued`` is false: then nothing else will be started.
    """

    version: int
    workers: list[tuple[int, int]]  # (index, incarnation) of those alive and not out of data
    missing: list[str]  # names of the others
    queued: bool  # closures that a worker could begin now have not been begun
    in_flight: list[tuple[int, int]]  # (closure, worker index)


@message(50)
@dataclass(frozen=True, slots=True)
class InitTokens(Message):
    """Put the initial tokens of a group, once; answered by SyncStep. ``count`` -1: the default."""

    group: int
    config: dict[str, Any]
    count: int


@message(51)
@dataclass(frozen=True, slots=True)
class EndTraining(Message):
    """Close the token channel: who waits, or pushes later, is told. Answered by Done."""

    reason: str
    failed: bool  # whether it ends before its time


@message(52)
@dataclass(frozen=True, slots=True)
class EnterSession(Message):
    """Worker → ps 0: one that no coordinator has attached takes part. Answered by SessionEntered.

    The answer waits until a chief has attached the ps and ``Declared`` was said; it is
    TrainingOver if training has ended by then.
    """

    incarnation: int  # under which the worker was started


@message(53)
@dataclass(frozen=True, slots=True)
class SessionEntered(Message):
    """The worker is a replica, under this incarnation, which is above the chief's."""

    incarnation: int


@message(54)
@dataclass(frozen=True, slots=True)
class Declared(Message):
    """Chief of a session → ps 0: the variables are there, workers may enter.

    Answered by Done, when so many wait; until then nobody enters.
    """

    trains: bool  # whether the chief is a replica itself
    num_workers: int


@message(55)
@dataclass(frozen=True, slots=True)
class LeaveSession(Message):
    """A worker that entered has ended its loop; answered by Done.

    From the chief it ends training, and is answered when all others have left.
    """


@message(56)
@dataclass(frozen=True, slots=True)
class TickClock(Message):
    """Worker → ps 0: one more round is done. Answered by ClockTicked when it may go on."""

    bound: int  # number of the optimizer
    max_staleness: int
    tick: int  # number of this tick of the client, from 1: a repetition counts once


@message(57)
@dataclass(frozen=True, slots=True)
class ClockTicked(Message):
    """How far ahead of the slowest the worker's clock is, in rounds."""

    ahead: int


@message(58)
@dataclass(frozen=True, slots=True)
class CheckShards(Message):
    """Worker of a session → ps: do you hold these? Answered by Done."""

    # (variable name, variable id, shard index, offset, shape, dtype)
    shards: list[tuple[str, int, int, int, list[int], str]]


@message(59)
@dataclass(frozen=True, slots=True)
class AwaitEnd(Message):
    """Answered by TrainingOver, once training has ended."""


@message(60)
@dataclass(frozen=True, slots=True)
class TrainingOver(Message):
    """Why training has ended, as EndTraining said it."""

    reason: str
    failed: bool


# Accumulators: gradients that a program collects by itself. Known by their names.


@message(62)
@dataclass(frozen=True, slots=True)
class DefineAccumulator(Message):
    """Make an accumulator known; idempotent, and refused if it is another than at first.

    Answered by Done.
    """

    name: str
    kind: str  # "dense" or "sparse"
    dtype: str
    shape: list[int | None] | None  # None: not known, as a whole or a dimension
    reduction: str  # "MEAN" or "SUM"
    divisor: str  # of sparse means: "per_index" or "total"
    forbid_nonfinite: bool
    max_staleness: int


@message(63)
@dataclass(frozen=True, slots=True)
class ApplyGradient(Message):
    """Add a gradient to an accumulator. Answered by GradientApplied.

    Segments: the values; of a sparse gradient the indices (int64) before them.
    """

    sequence: int  # shared with pushes and assigns, as are the next three
    acked_below: int
    closure: int
    ordinal: int
    accumulator: str
    shape: list[int]  # of the values
    dense_shape: list[int] | None  # of the array that the rows are of, if it is known
    local_step: int
    weight: float


@message(64)
@dataclass(frozen=True, slots=True)
class SetAccumulatorStep(Message):
    """Set the step of an accumulator. Answered by GradientApplied."""

    sequence: int
    acked_below: int
    closure: int
    ordinal: int
    accumulator: str
    step: int


@message(65)
@dataclass(frozen=True, slots=True)
class GradientApplied(Message):
    """What became of a gradient, or of a new step."""

    outcome: str  # "accepted", "stale" or "duplicate"
    count: int  # gradients held now
    step: int  # of the accumulator now


@message(66)
@dataclass(frozen=True, slots=True)
class TakeGradient(Message):
    """Wait for gradients and take what they amount to. Answered by GradientTaken.

    The same take again, after a lost connection, gets the same answer.
    """

    accumulator: str
    take: int  # of this client, from 1, anew for each accumulator
    acked_below: int  # the client has the answers to all smaller numbers, or wants them no more
    num_required: int


@message(67)
@dataclass(frozen=True, slots=True)
class GradientTaken(Message):
    """Segments: the values; of a sparse gradient the indices (int64) before them."""

    count: int  # gradients that were taken
    step: int  # of the accumulator after it
    shape: list[int]  # of the values
    dense_shape: list[int] | None  # of the array that the rows are of; -1: not known


@message(68)
@dataclass(frozen=True, slots=True)
class ForgetTakes(Message):
    """This client has the answers to all takes with smaller numbers, or wants them no more."""

    accumulator: str
    acked_below: int


@message(69)
@dataclass(frozen=True, slots=True)
class AskAccumulator(Message):
    """How far is an accumulator? Answered by AccumulatorState."""

    accumulator: str


@message(70)
@dataclass(frozen=True, slots=True)
class AccumulatorState(Message):
    """As of now."""

    count: int  # gradients held
    step: int


@message(71)
@dataclass(frozen=True, slots=True)
class FinishSteps(Message):
    """Coordinator → ps 0: nothing is left to do, so nobody will complete what was counted.

    Answered by Done when it has been applied.
    """


# Rows of variables.


@message(72)
@dataclass(frozen=True, slots=True)
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
@dataclass(frozen=True, slots=True)
class RowsPulled(Message):
    """Segments: the rows of each part, in the order in which it names them."""

    steps: list[tuple[int, int]]  # as in Pulled


# Gangs: one function on all workers at once, whose replicas meet.


@message(105)
@dataclass(frozen=True, slots=True)
class RunReplica(Message):
    """Coordinator → worker: run this closure as one of a gang. Segments: as in RunClosures."""

    closure: tuple[int, bytes, int, list[int]]  # as in RunClosures
    replica_id: int
    num_replicas: int


@message(106)
@dataclass(frozen=True, slots=True)
class ReachCollective(Message):
    """Worker → coordinator: a replica has come to its next collective. Answered by Merged.

    The answer waits until all replicas have come to it. Segments: the pickled function and this
    replica's value.
    """

    closure: int
    what: str  # names it; must be the same for all replicas


@message(107)
@dataclass(frozen=True, slots=True)
class Merged(Message):
    """What the function of a collective returned or raised. Segments: that, pickled."""

    error: tuple[str, str, str] | None  # as in ClosureResults; None: it returned


# Positions of per-worker iterators.


@message(100)
@dataclass(frozen=True, slots=True)
class AskPosition(Message):
    """Coordinator → worker: how far is an iterator? Answered by IteratorPosition."""

    uid: str


@message(101)
@dataclass(frozen=True, slots=True)
class IteratorPosition(Message):
    """As of now."""

    position: int  # batches that steps were handed, and were before; -1: nobody has needed it yet


# What an optimizer keeps, set from outside: by a program that restores it.


@message(125)
@dataclass(frozen=True, slots=True)
class SetSlots(Message):
    """Values for slots of shards; idempotent. Segments: one per member. Answered by Done."""

    optimizer: int
    config: dict[str, Any]  # defines it
    members: list[tuple[int, int, str]]  # variable id, shard index, slot


@message(126)
@dataclass(frozen=True, slots=True)
class SetOptimizer(Message):
    """Let an optimizer go on otherwise; idempotent. Answered by Done."""

    optimizer: int
    config: dict[str, Any]  # defines it
    step: int  # that its next push has; -1: as it is
    learning_rate: dict[str, Any] | None  # config of a schedule; None: as it is


# Locks on shards: one instant over all ps tasks.


@message(115)
@dataclass(frozen=True, slots=True)
class LockShards(Message):
    """Lock shards, all of them or none; who changes them waits. Answered by Done, once it is so.

    The lock ends when it is given up, with the connection over which it was asked for, and when it
    was not renewed for the time of its lease. The same number again asks anew.
    """

    lock: int  # number of the lock, unique in its client
    members: list[tuple[int, int]]
    lease_s: float


@message(116)
@dataclass(frozen=True, slots=True)
class UnlockShards(Message):
    """Give a lock up, held or not; idempotent. Answered by Done."""

    lock: int


@message(117)
@dataclass(frozen=True, slots=True)
class RenewLock(Message):
    """Let the lease of a lock begin anew. Answered by Done, or LockLost."""

    lock: int


@message(118)
@dataclass(frozen=True, slots=True)
class PullLocked(Pull):
    """A pull of shards that are locked by the one who asks. Answered by Pulled, or LockLost."""

    lock: int


@message(119)
@dataclass(frozen=True, slots=True)
class AssignLocked(Assign):
    """An assign to shards that are locked by the one who asks. Answered by Pushed, or LockLost."""

    lock: int = 0  # ``rows`` before it has a default, too


@message(127)
@dataclass(frozen=True, slots=True)
class AskOptimizer(Message):
    """How far is an optimizer? Answered by OptimizerState."""

    optimizer: int
    config: dict[str, Any]  # defines it


@message(124)
@dataclass(frozen=True, slots=True)
class OptimizerState(Message):
    """As of now."""

    step: int  # that its next push has, unless that carries a later one


# Synchronous pushes that come whole to ps 0.


@message(90)
@dataclass(frozen=True, slots=True)
class DescribeSet(Message):
    """ps 0 → ps: are these shards there, and may a group push to them? Answered by SetSizes.

    Defines the set for this connection.
    """

    set_id: int
    members: list[tuple[int, int]]
    group: int  # -1: their values are wanted, and no more
    config: dict[str, Any] | None


@message(91)
@dataclass(frozen=True, slots=True)
class SetSizes(Message):
    """Bytes of each shard of a set."""

    sizes: list[int]
