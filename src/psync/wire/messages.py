"""All messages between tasks: one frozen class each, with a number of its own.

They stand by the pair of tasks that exchange them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import field

from psync.wire.codec import Message

# Handshake. ``mac`` and nonces: 32 bytes.


class Hello(Message, code=1):
    """Client's first word."""

    oldest_version: int
    newest_version: int
    task: str  # name of the client's task
    incarnation: int  # of the client
    lane: str  # one of handshake.LANES
    nonce: bytes
    secured: bool  # whether the client holds a secret


class Challenge(Message, code=2):
    """Server's answer: proves first, so that a client never proves itself to a stranger."""

    version: int
    task: str
    incarnation: int
    nonce: bytes
    secured: bool
    mac: bytes


class Proof(Message, code=3):
    """Client's proof."""

    mac: bytes


class Welcome(Message, code=4):
    """The connection is open."""


class Refused(Message, code=5):
    """The connection ends here."""

    reason: str  # "version", "authentication", "tls", "protocol", "fenced", "full", "early"
    detail: str


# Replies that several requests share.


class Done(Message, code=8):
    """The request was carried out. Segments: what it has asked for, if anything."""


class Number(Message, code=136):
    """The request was carried out, and this number is what it has asked for."""

    value: int


class Text(Message, code=114):
    """The request was carried out, and this text is what it has asked for."""

    value: str


class Failure(Message, code=9):
    """Header of an ERROR frame."""

    error: str  # class name in psync.errors, or "" for any other exception
    type_name: str  # of any exception
    task: str  # that it tells of (TaskLost, RemoteError); else ""
    message: str
    hint: str | None
    traceback: str


# To any task.


class Shutdown(Message, code=27):
    """Finish and exit; answered by Done."""

    reason: str


class AskStatistics(Message, code=28):
    """Answered by Statistics."""


class Statistics(Message, code=29):
    """Counters of a task."""

    counters: dict[str, Any]


class AskSpans(Message, code=138):
    """Record what this task does, and tell what was recorded; answered by Statistics.

    Segments of the answer: readings, see ``net.trace``. It records from the first
    question of a reader on, until all have said that it was their last, or have gone.
    """

    reader: str  # tells apart who asks
    last: bool


# To a ps: attach, create shards, pull and push values and rows, define optimizers.

# From the coordinator.


class AttachPs(Message, code=32):
    """The coordinator takes a ps into its cluster; answered by PsAttached.

    A coordinator incarnation that the ps has not seen yet fences the older one, and what was held
    for that is dropped, or kept to be adopted; see ``AdoptShards``.
    """

    coordinator: int
    ps_addresses: list[str]  # of all ps tasks: ps 0 talks to the others
    ps_timeout_s: float
    keep: bool = False  # what is held; what has begun is then carried to its end first
    moves: int = 0  # how often a ps was served elsewhere before: of two addresses the newer counts


class PsAttached(Message, code=137):
    """The ps serves this coordinator."""

    # ("rule" or "schedule", name, version) of what plugins have registered in its process
    plugins: list[tuple[str, str, int]]


class CreateShards(Message, code=33):
    """Declared shards and their first values; idempotent. Segments: those that are sent."""

    # (variable name, variable id, shard index, offset, shape, dtype)
    shards: list[tuple[str, int, int, int, list[int], str]]
    # For each what it begins with: another shard's value, so many bytes that are each of its
    # elements, or None: its value is in the segments.
    sources: list[tuple[int, int] | bytes | None]


class Fence(Message, code=39):
    """Refuse incarnations of a task below this one; answered by Done."""

    task: str
    below: int


class FinalBelow(Message, code=40):
    """All closures with smaller ids are final, and forgotten if they are not kept.

    A segment holds those that are kept, as ``closure_numbers.pack_kept`` packs them. A header would
    be too small: a rollback may undo as many data shards as there are.
    """

    closure: int
    # Of the ps tasks, when it was sent: a rollback since then may have undone what was done.
    timeline: int = 0


# Values.


class DefinePlan(Message, code=37):
    """Client → ps: what it calls by this number from now on. A notification, see ``ps.plans``."""

    plan: int
    # Perhaps first how float32 travels, see ``numerics.compression``.
    members: list[tuple[int, int]]
    # Of a push, or of the slot; -1: neither.
    optimizer: int = -1
    config: dict[str, Any] | None = None  # defines the optimizer
    slot: str = ""  # that is read, or assigned to, instead of the values
    op: str = ""  # of an assign: "assign", "add", "sub" or "max"; for rows also "mul", "div", "min"
    # Of averages, for each member the id of the variable that it follows; None: they are none.
    follows: list[int] | None = None
    # The shards whose values the answer of an update brings, read once it is applied, as a Read of
    # them would bring them; None: there are none.
    pull: list[tuple[int, int]] | None = None
    raised: tuple[int, int] | None = None  # a shard of one number: each update adds one to it
    # Of a synchronous push; ``optimizer`` is then its group, and ``config`` that of the group.
    # Digest of all its variables; b"": the push is not synchronous.
    variable_set: bytes = b""
    others: list[int] | None = None  # to ps 0: the other ps tasks that have a part of it
    spread: bool = False  # likewise: whether one of its variables lies on several ps tasks


class Read(Message, code=34):
    """Values of a plan's shards, or of one slot of each; or some of their rows. Answered by Pulled.

    Segments: one for each part of rows whose step is 0, its ``count`` row numbers (int64, in any
    order). Of the answer: the rows of each part, in the order in which it names them.
    """

    plan: int
    lock: int = 0  # of this client, of all these shards, see LockShards; 0: none
    # None: all shards, whole. Else parts: (place of the shard in the plan, count, start, stop,
    # step). Rows are local, they count from the shard's first one. Step 0: those in the body; else
    # range(start, stop, step).
    rows: list[tuple[int, int, int, int, int]] | None = None


class Pulled(Message, code=35):
    """Segments: one per member of the set, in its order.

    ``steps``: (group, step) of each synchronous group that has closed a step on this ps: the
    values are at least of that step. A group that is not named is where it began.
    """

    steps: list[tuple[int, int]]


class Numbered(Message):
    """Base of the updates of one client, which share their numbers."""

    sequence: int  # of this client, from 1
    acked_below: int  # the client has the answers to all smaller sequences
    closure: int  # id, or -1 outside a closure
    ordinal: int  # of the call within the closure


class Update(Numbered, code=61):
    """A push, an assign to values or slots, or averages that move towards what they follow.

    Its plan says which. Segments: one per member, but none for averages. Answered by Pushed. Of a
    synchronous push each ps gets its part, and ps 0 one in any case, which it answers by
    Contributed when there is a token, the others when the part is applied. ``sequence`` is then the
    number of the push in its group.
    """

    plan: int
    # Of the optimizer, pushes without a part on this ps that the client knows of, marked; see
    # ``store.push_counts``.
    elsewhere: int = 0
    place: int = 0  # which of the messages of a push it is, see ``store.push_counts``
    # (ps, sequence there) of the other messages of the same update. None: it is the only one.
    spread: list[tuple[int, int]] | None = None
    # None: all members are whole. Else for each member -1, or the number n of its rows that are
    # sent: its segment is n local row numbers (int64, ascending), then n rows of values.
    rows: list[int] | None = None
    # Of layerwise optimizers, for each member the trust ratio of its whole variable; None: the ps
    # finds it, from the shard alone. Of averages the decay alone:
    # average -= (1 - decay) * (average - value).
    factors: list[float] | None = None
    lock: int = 0  # as in Read
    local_step: int = -1  # of the values of a synchronous push; -1: of before the first step
    weight: float = 1.0  # of a synchronous push, in the mean


class MeasurePush(Message, code=80):
    """What would this push do? Changes nothing. Segments: one per member. Answered by Measured."""

    plan: int
    elsewhere: int  # as in Update


class Pushed(Message, code=38):
    """What became of an update. Segments: the values that its plan wants, if they came."""

    outcome: str  # "accepted", "stale" or "duplicate"
    step: int  # pushes of the optimizer that this ps knows of then, marked; 0 for an assign
    # Of the values, as in Pulled. None: there are none; some shard was busy with another update.
    steps: list[tuple[int, int]] | None = None
    elsewhere: int = 0  # of these pushes those without a part on this ps, marked


# Optimizers: set from outside by a program that restores them.


class OptimizerState(Message, code=124):
    """As of now, see ``store.push_counts.Counts``."""

    base: int
    own: int
    steps: int


class SetOptimizer(Message, code=126):
    """Make an optimizer known, and let it go on otherwise; idempotent.

    Answered by OptimizerState: how far it is then.
    """

    optimizer: int
    config: dict[str, Any]  # defines it
    step: int = -1  # pushes that it has applied, marked with a new epoch; -1: as it is
    learning_rate: dict[str, Any] | None = None  # config of a schedule; None: as it is


# Between ps tasks.


class TellCounts(Message, code=152):
    """ps k → ps 0, ps 0 → ps k: pushes without a part on some ps. Idempotent.

    Answered by Number: 1 if much of it was news, 0 if there is no hurry to tell more.
    """

    # (optimizer, its config, base, [(ps, pushes without a part there)]), see ``store.push_counts``
    counts: list[tuple[int, dict[str, Any], int, list[tuple[int, int]]]]


# Locks of shards, for consistent reads and atomic assigns over several ps tasks.


class LockShards(Message, code=115):
    """Lock shards, all of them or none; who changes them waits. Answered by Done, once it is so.

    The lock ends when it is given up, with the connection over which it was asked for, and when it
    was not renewed for the time of its lease. The same number again asks anew.
    """

    lock: int  # number of the lock, unique in its client
    members: list[tuple[int, int]]  # none: the lease of a lock that is held begins anew
    lease_s: float


class UnlockShards(Message, code=116):
    """Give a lock up, held or not; idempotent. Answered by Done."""

    lock: int


# Conditional accumulators, by their names: programs add gradients and take their mean.


class DefineAccumulator(Message, code=62):
    """Make an accumulator known; idempotent, and refused if it is another than at first.

    Answered by AccumulatorState: how far it is.
    """

    name: str
    kind: str  # "dense" or "sparse"
    dtype: str
    shape: list[int | None] | None  # None: not known, as a whole or a dimension
    reduction: str  # "MEAN" or "SUM"
    divisor: str  # of sparse means: "per_index" or "total"
    forbid_nonfinite: bool
    max_staleness: int


class UpdateAccumulator(Numbered, code=63):
    """Add a gradient to an accumulator, or set its step. Answered by AccumulatorState.

    Segments: the values; of a sparse gradient the indices (int64) before them.
    """

    accumulator: str
    step: int  # local step of the gradient, or the new step
    shape: list[int] | None = None  # of the values; None: there is no gradient
    dense_shape: list[int] | None = None  # of the array that the rows are of, if it is known
    weight: float = 1.0


class AccumulatorState(Message, code=65):
    """What became of an update or a take, and how far the accumulator is now.

    Segments: of a take the values; of a sparse gradient the indices (int64) before them.
    """

    outcome: str  # "accepted", "stale" or "duplicate"; "": that was not asked
    count: int  # gradients held; of a take: gradients that were taken
    step: int
    shape: list[int] = field(default_factory=list)  # of the values
    # Of the array that the rows are of; -1: not known. None: the gradient is dense.
    dense_shape: list[int] | None = None


class TakeGradient(Message, code=66):
    """Wait for gradients and take what they amount to. Answered by AccumulatorState.

    The same take again, after a lost connection, gets the same answer.
    """

    accumulator: str
    take: int  # of this client, from 1, anew for each accumulator
    acked_below: int  # the client has the answers to all smaller numbers, or wants them no more
    num_required: int


class EndTakes(Message, code=68):
    """Takes of this client wait no longer: it has their answers, or wants them no more.

    Or, in a log: no request waits for them. They may be asked for again.
    """

    accumulator: str
    acked_below: int  # the client will not ask for smaller numbers again
    takes: list[int]  # that may be asked for again; then nothing is said of the others


# Synchronous steps and staleness clocks. A *group* is one SyncReplicasOptimizer, by its number.
# A *push* is one call of its ``apply_gradients``, numbered from 1 by the client, for each group.


class OfGroup(Message):
    """Base of messages about a group."""

    group: int


# Worker → ps.


class KeepPart(OfGroup, code=42):
    """Worker → ps: copy a part that lies in memory of the worker's, which wants it back.

    Answered by Done; also where no such part is held.
    """

    push: int


class Contributed(Message, code=45):
    """ps 0 → worker: what became of a push, and the token: the worker's next local step.

    Segments: the values that its plan wants, if they came.
    """

    group: int
    outcome: str  # "accepted", "stale" or "duplicate"
    staleness: int  # steps that were closed since the values were pulled
    token: int
    partial: bool  # the step that it was counted in was closed with fewer than the target
    count: int  # pushes in the step that it was counted in, if that is closed; else 0
    steps: list[tuple[int, int]] | None = None  # as in Pushed
    alone: bool = False  # until the token's step nothing of the group was on another ps


class BeginGroup(OfGroup, code=50):
    """Begin a group, once, and put its initial tokens, once.

    Answered by Number, the present step of the group. An entry of the log, too.
    """

    config: dict[str, Any]
    count: int | None = None  # -1: the default; None: none are put yet
    step: int = -1  # in the log: the value of its global step as it begins; -1: it has begun


# Between ps 0 and every other ps.


class FollowParts(Message, code=90):
    """ps 0 → ps: say on this connection which parts of pushes are here, and which come. No answer.

    Each new connection asks anew, and is told of all.
    """


class Held(Message, code=91):
    """ps → ps 0: these parts of pushes are here. A notification, once in a turn of the loop."""

    ps: int
    # (group, task, incarnation, push, local step)
    parts: list[tuple[int, str, int, int, int]]


class CloseStep(OfGroup, code=48):
    """ps 0 → every ps: apply the mean of the pushes that have a part there. Answered by Done.

    Idempotent by ``step``. A part that is not there is an error, which ends the group.
    Afterwards the group is at ``step + 1`` and what is held for ``step`` or before is dropped.
    With ``measures`` it changes nothing, and is answered by Measured.
    """

    config: dict[str, Any] | None  # None: the ps knows it
    step: int
    # (task, incarnation, push, weight), in the order of the sum
    pushes: list[tuple[str, int, int, float]]
    # (variable id, factor): what limits the norm of the mean of a variable, and the trust ratio of
    # its update. None: the ps finds it by itself, if the rule needs it.
    scales: list[tuple[int, float]] | None = None
    ratios: list[tuple[int, float]] | None = None
    # "gradients", or "updates", by the mean times its scales: what would closing it do? The
    # CloseStep that follows has the factors that are not known yet. See ``step_norms``.
    measures: str = ""


class Measured(Message, code=83):
    """Sums of squares of each shard that a push, or a step, changes on this ps; see ``step_norms``.

    Of a push: of the parameter, and of its update.
    """

    sums: list[tuple[int, int, float, float]]  # (variable id, shard index, …)


# Coordinator → ps 0.


class AwaitWaiters(Message, code=15):
    """Coordinator → ps 0: say when workers wait for each other, or are about to.

    Answered by Done. Only then is the schedule of use to ps 0; see ``ReportSchedule``.
    """


class ReportSchedule(Message, code=49):
    """Coordinator → ps 0: who takes part and what is left to do; the newest version counts.

    Answered by Done. An entry of the log, too. ``in_flight`` is meant only if ``queued`` is false:
    then nothing else will be started.
    """

    version: int
    workers: list[tuple[str, int]]  # (name, incarnation) of those alive and not out of data
    missing: list[str]  # names of the others
    queued: bool  # closures that a worker could begin now have not been begun
    in_flight: list[tuple[int, str]]  # (closure, name of the worker)
    ended: str | None = None  # why the training of a session is over; then the rest is not meant
    now: float = 0.0  # in the log: when it came, by the clock of that


class FinishSteps(Message, code=71):
    """Coordinator → ps 0: nothing is left to do, so nobody will complete what was counted.

    Answered by Done when it has been applied.
    """


# Clocks: nobody runs too far ahead of the slowest.


class TickClock(Message, code=56):
    """Worker → ps 0: one more round is done. Answered when the worker may go on.

    By Number: how far ahead of the slowest its clock is, in rounds.
    """

    bound: int  # number of the optimizer
    max_staleness: int
    tick: int  # number of this tick of the client, from 1: a repetition counts once


# In the logs of ps tasks alone: inputs of judging that came over no connection so. What came over
# one is in the log as the message that it is. A peer that sends one of these is refused.


class CheckState(Message, code=135):
    """Take a digest of the state that judging has made; here is the last one, and the chain."""

    number: int  # of this check in the log
    last: bytes  # digest of the check before; b"": there was none
    chain: int  # over the entries before this one, see ``commit_log.chained``


# Of synchronous steps, on ps 0.


class ForgetPush(OfGroup, code=128):
    """No request of this client waits for the answer to a push any more."""

    push: int


class Tick(Message, code=130):
    """It is so late: what was to be done at a time is done."""

    now: float  # of the clock of the log


class NormsMeasured(OfGroup, code=131):
    """The factors with which a step that is decided is closed; see CloseStep."""

    step: int
    scales: list[tuple[int, float]] | None
    ratios: list[tuple[int, float]] | None


class StepApplied(OfGroup, code=132):
    """Every ps has applied a step, or one could not."""

    step: int
    failure: bytes  # a Failure, encoded; b"": there is none


# Consistent cuts, snapshots, backups, recovery, workers that leave. A *cut* is one position on
# every ps: every update is wholly in it or wholly out. A *snapshot* is that of a ps at a cut: a
# state, as JSON, and arrays, its *items*, by their place in the state. See docs/design.md.

# Coordinator → ps: a cut.


class OfCut(Message):
    """Base of messages about a cut."""

    cut: int  # its number, from 1, of this coordinator


class Gate(OfCut, code=74):
    """Begin no update that has not been begun, and close no step.

    Answered by Done when none is being closed. Segment: as JSON, a list of messages that belong to
    updates that have begun here: (ps, client's task, its incarnation, sequence).
    """


class Freeze(OfCut, code=77):
    """Let these messages through the gate, and hold the contents once all of them are settled.

    Answered by Done. Segment: the state of the snapshot.
    """

    # (client's task, its incarnation, sequence)
    updates: list[tuple[str, int, int]] = field(default_factory=list)


class OpenGate(OfCut, code=79):
    """Go on with updates; answered by Done, also if there is no such gate."""

    holds: bool = False  # hold the contents still; else they are held no longer


class WriteFrozen(OfCut, code=87):
    """Write items of a snapshot to a new file, if you see its directory.

    Segment: a JSON list of [item, name in the file], in the order in which they are to lie there.
    Answered by Done once the file is on the disk. Segment: as JSON, its size in bytes and a list of
    [first byte, bytes, crc32], one an item; none if there is no file, as the directory is not seen.
    """

    path: str  # of a safetensors file, which must not exist
    nonce: str  # the text of the file "nonce" beside it: who reads another, or none, writes nothing


class ReadFrozen(OfCut, code=89):
    """Bytes of an item of a snapshot; answered by Done. Segment: they."""

    item: int
    start: int  # first byte
    stop: int  # the one after the last; at most 16 MiB on


# Coordinator → ps: back to a snapshot.


class PrepareSnapshot(Message, code=93):
    """Make ready to hold another snapshot; what is held now stays. Answered by Done when ready.

    Segments: the state of the snapshot; then, if there is a path, a JSON list of [item, first byte,
    bytes, crc32] in the file. Else the bytes follow, by FillSnapshot.
    """

    load: int  # number of this loading; one that was begun before is given up
    path: str  # of a file that this ps can read, or ""


class FillSnapshot(Message, code=94):
    """Bytes of an item of a snapshot that is being prepared, or that a backup begins with.

    Answered by Done. Segment: they. Behind the items: arrays that no snapshot has, whole.
    """

    ps: int  # whose snapshot it is
    number: int  # of the loading, or the epoch of the backup
    item: int
    start: int  # first byte


class RestoreSnapshot(Message, code=95):
    """Hold the prepared snapshot from now on, under a new timeline; answered by Done.

    What was begun before is given up. A repetition changes nothing.
    """

    load: int
    timeline: int
    fences: list[tuple[str, int]]  # (task, lowest incarnation of it that may still be served)


# A ps and its backup.


class BackUp(Message, code=97):
    """Coordinator → ps: have a backup in the process of another ps; answered by Done.

    With ``lost``, the answer comes when that backup does not follow any more; else when it has
    all that is answered. An earlier backup is given up.
    """

    epoch: int  # grows with each that a coordinator says
    task: str  # the other ps
    address: str  # where it listens; "": go on without a backup
    lost: bool


class OfBackup(Message):
    """Base of messages to the process of a backup."""

    ps: int
    epoch: int


class BeginBackup(OfBackup, code=98):
    """Ps → the process of its backup: a snapshot of me comes. Refused by another version of psync.

    Segments: its state; what no snapshot has, see ``Section.live``. The items follow, by
    FillSnapshot, behind them the arrays of the latter; then LogEntries, from ``first`` on.
    Answered by Text, the fingerprint of that process's arithmetic.
    """

    coordinator: int  # as in AttachPs, also the next two
    ps_addresses: list[str]
    ps_timeout_s: float
    timeline: int
    first: int  # number of the first entry that comes
    beside: int  # how many arrays there are that no snapshot has
    lineage: int  # of what is backed up, see ``reattach``
    release: str  # the version of psync that the ps runs, and its plugins


class LogEntries(OfBackup, code=102):
    """What a ps is about to do, in order. Segments: those of all entries.

    Answered by Done: the backup has all up to these, and will do them in order.

    An entry: (who asked for it, its incarnation, the message that asked, number of segments).
    """

    first: int  # number of the first entry
    entries: list[tuple[str, int, bytes, int]]


class Promote(OfBackup, code=104):
    """Coordinator → the process of a backup: let it serve. Answered by Text, its address."""

    coordinator: int
    fences: list[tuple[str, int]]  # (task, lowest incarnation of it that may still be served)


# Workers that leave.


class LeaveCluster(Message, code=112):
    """Worker → coordinator: send nothing more; answered by Done, after which nothing more comes.

    Coordinator → worker: leave, and end; answered by Done, at once.
    """

    reason: str


class EndSession(Message, code=113):
    """Worker → coordinator: this session ends; answered by Done, once all before it is heard.

    In order: the worker has left, and has said all that it has to say. Else: it cannot go on.
    """

    reason: str
    in_order: bool


# A coordinator that comes, or comes back.


class GrantCoordinator(Message, code=108):
    """Under which incarnation may I be the coordinator? Answered by Number.

    ps 0 grants a new one; every other task says which is the highest that it has served.
    """

    previous: int  # what ps 0 has granted this coordinator before; 0: nothing
    seen: int  # the highest that another task has served, as far as it is known; 0: none


class AskServed(Message, code=6):
    """Which ps tasks are served in this process? Answered by ServedHere.

    From then on no backup of an earlier coordinator is made or begins to serve here.
    """

    ends: bool = False  # all ps tasks are attached: what earlier coordinators have left here ends


class Primary(NamedTuple):
    """One that serves a ps."""

    ps: int
    address: str  # where it listens; "": at the address of its process
    coordinator: int  # incarnation
    timeline: int
    epoch: int  # of the order to serve in another one's place; 0: it was there from the beginning
    host: int = -1  # in which process the backup is that it waits for; -1: it may go on alone
    backup: int = 0  # epoch of that


class ServedHere(Message, code=7):
    """See AskServed, and ``locate_ps``."""

    primaries: list[Primary]
    copies: list[tuple[int, int, int]]  # (ps, coordinator, epoch) of backups that do not serve


class MarkRestore(Message, code=127):
    """A restore begins to replace values here, or has ended on all ps tasks; answered by Done.

    A program that attaches after one that has not ended starts again; see ``reattach``. Idempotent.
    """

    ended: bool


class AdoptShards(Message, code=120):
    """Let the present program have what earlier ones have left; idempotent. Answered by Done.

    Segment: ``reattach.Orders`` as JSON, the same for all ps tasks. Of the answer:
    ``reattach.Holding`` as JSON, what nobody has adopted by then.
    """

    lineage: int  # the number by which all ps tasks know this state from now on; 0: as it is
    last: bool  # drop what is left then


# Coordinator and workers: closures, their inputs and results, gangs.


class AttachWorker(Message, code=16):
    """The coordinator takes a worker into its cluster; answered by Done."""

    worker_index: int
    incarnation: int  # that the worker bears from now on
    coordinator: int  # incarnation of the coordinator
    origin: str  # of the strategy: marks its variables
    program: str  # of the coordinator's process: marks its optimizers
    ps_addresses: list[str]
    ps_timeout_s: float  # a ps that cannot be reached for this many seconds is lost


# Closures.


class RunClosures(Message, code=17):
    """Closures for a worker, in order. Segments: each closure's pickled arguments.

    A closure: (id, function key, number of segments or -1 when the worker has to fetch
    the arguments when it is about to run it, number of segments of each RemoteValue input).
    """

    closures: list[tuple[int, bytes, int, list[int]]]
    # (id, number on ps tasks) of those that have another there: see ``closure_numbers``.
    numbers: list[tuple[int, int]] | None = None
    # Of one that runs as a replica of a gang: its number, and that of all replicas.
    replica: tuple[int, int] | None = None


class GiveBack(Message, code=18):
    """Coordinator → worker: return those of these closures that have not started.

    Worker → coordinator: these have not started and never will, here.
    """

    closures: list[int]


class CancelClosures(Message, code=20):
    """Stop these closures; each still ends with a result."""

    closures: list[int]


class ClosureResults(Message, code=21):
    """Closures that ended. Segments: each one's pickled result or exception.

    A result: (id, outcome, number of segments, error or None), where outcome is "ok",
    "error", "end_of_data" or "cancelled"; of the function of a collective the id is -1.
    """

    results: list[tuple[int, str, int, tuple[str, str, str] | None]]
    mean_seconds: float  # of those that succeeded
    # (number on ps tasks, calls that it has made) of those that succeeded and updated something
    updates: list[tuple[int, int]] | None = None
    # (step function, operation, times) of operations that were refused: their step had returned
    late: list[tuple[str, str, int]] | None = None
    stop: tuple[int, str] | None = None  # a closure's id, and why it asks for the end of training


class FetchFunction(Message, code=22):
    """Worker → coordinator: send a step function. Answered by Text, its name.

    Segments of the answer: its pickle, then the buffers of that.
    """

    key: bytes


class FetchArguments(Message, code=24):
    """Worker → coordinator: send a closure with its arguments. Answered by RunClosures."""

    closure: int


# Per-worker iterators.


class AskPosition(Message, code=100):
    """Coordinator → worker: how far is an iterator? Answered by Number.

    Batches that steps were handed, and were before; -1: nobody has needed it yet.
    """

    uid: str
    last: bool = False  # nothing on the coordinator refers to it any more: it is closed


# Gangs: one function on all workers at once, whose replicas meet.


class ReachCollective(Message, code=106):
    """Worker → coordinator: a replica has come to its next collective. Answered by ClosureResults.

    The answer, what the collective's function has returned or raised, waits until all replicas have
    come to it. Segments: the pickled function and this replica's value.
    """

    closure: int
    what: str  # names it; must be the same for all replicas


# The chief and a worker that joins a running cluster, knowing its address only. The connection
# stays open while the worker is there; LeaveCluster over it says that the worker has left.


class JoinCluster(Message, code=150):
    """Worker → chief: take me into the cluster.

    Answered by Number, the index of its task, at once.
    """

    address: str  # where it listens
    index: int  # what it was called before the connection was lost; -1: it is new
    python: str  # version of its interpreter, as in "3.11": functions travel as its bytecode


# Training sessions, whose tasks talk by ps 0.


class Post(Message, code=52):
    """A task of a training session → ps 0: this is what I say. Segment: a value of the session's.

    Answered by Posted once that is newer than ``seen``: with -1, at once.
    """

    seen: int
    forget: bool  # training is over: all that was posted, and is before the next chief comes


class Posted(Message, code=53):
    """What others have posted: the others to the chief, the chief to them. Segments: the values."""

    coordinator: int  # incarnation of the chief that is served; 0: none yet
    version: int
    tasks: list[tuple[str, bool]]  # (name, whether its connection is open), of each value
