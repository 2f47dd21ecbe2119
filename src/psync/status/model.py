"""The status of a cluster at one moment: a value, its JSON form, and the rules that make it.

``status_of`` makes it of counters: rates over a window, states of workers, who waits. ``History``
remembers earlier counters, as many as the window needs, however often somebody asks.

All times are durations in seconds up to the moment of the status, ``Status.time`` alone is a date.
All ``…_per_s`` are means over the last ``Status.window_s`` seconds. A total counts since the
coordinator, or the ps in its present state, began; it may fall when a task was started again.

The JSON form has the same names, tuples as arrays. Within a schema fields are only added, so
who reads it passes over what it does not know.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec

from psync.client.counters import KINDS
from psync.cluster import device_name
from psync.errors import RemoteProtocolError, check_fits

if TYPE_CHECKING:
    # With numpy, which a launcher never loads.
    from psync.closures.queue import QueueStatistics
    from psync.specs import VariableSpec

MISFITS = ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
"""Errors of text that is not JSON, and of JSON that does not stand for a value."""

SCHEMA = 1
"""Of the JSON form; another one where a field is gone or means something else."""

Whole = Annotated[int, msgspec.Meta(gt=-(10**18), lt=10**18)]
Number = Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]
"""Views can compute with such numbers."""


@dataclass(frozen=True, slots=True)
class RunningClosure:
    """A closure that a worker runs, or that is on its way there or back."""

    id: Whole
    name: str  # of the step function
    seconds: Number  # since it was sent, or the closure before it ended


@dataclass(frozen=True, slots=True)
class SeenError:
    """The last error of a task."""

    text: str  # "closure 7 (step): ValueError: …"
    seconds: Number  # ago


@dataclass(frozen=True, slots=True)
class WorkShares:
    """The use of a worker's time, as shares of ``seconds``; the remainder is time without work.

    Known while a dashboard or a run log is open; ``psync.client.counters`` defines the shares.
    """

    compute: Number
    pull: Number
    push: Number
    wait: Number
    seconds: Number  # between the last two answers of the worker
    age_s: Number = 0.0  # of the newest; a step that computes on the loop keeps it from answering


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. Its states:

    - "connecting": it has not connected yet, and is waited for;
    - "idle": it holds no closure;
    - "busy": it holds closures;
    - "waiting": its closure waits for others, at a synchronous step or a staleness bound;
    - "leaving": it ends its closure, then leaves;
    - "set aside": it was lost repeatedly, and is not reconnected for a while;
    - "lost": it is lost, and is waited for;
    - "left", "given up": it has left or is lost, and is not waited for.
    """

    task: str  # "/job:worker/task:0"
    address: str
    state: str
    closure: RunningClosure | None = None
    held: Whole = 0  # closures that it holds, the running one too
    finished: Whole = 0  # closures since it joined
    failed: Whole = 0  # closures that have raised here
    losses: Whole = 0  # how often it was lost
    closures_per_s: Number = 0.0
    mean_s: Number | None = None  # seconds per closure, of the newest; None: none has ended
    staleness: Whole | None = None  # of its newest push, in steps; None: unknown
    accepted: Whole = 0  # of its synchronous pushes
    dropped: Whole = 0  # that came too late
    duplicates: Whole = 0  # that another run of their closure had made before
    last_error: SeenError | None = None
    work: WorkShares | None = None  # None: unknown; it has not been asked, or does not answer


@dataclass(frozen=True, slots=True)
class BackupStatus:
    """The backup ps of a ps."""

    state: str  # "alone": there is none; "copying"; "paired": it may take over; "deposed"
    behind: Whole  # entries of the log that it does not have yet


@dataclass(frozen=True, slots=True)
class PsStatus:
    """One ps. Its states are those of the coordinator's connection to it:

    - "unconnected": it has not been connected yet;
    - "connected";
    - "silent": connected, but without an answer for a second;
    - "broken": the connection is lost and being made again;
    - "lost": its shards are lost.
    """

    task: str
    address: str
    state: str
    age_s: Number | None = None  # of what follows; None: it was never read
    shards: Whole = 0
    bytes: Whole = 0  # of variables
    slot_bytes: Whole = 0  # of optimizers' slots
    pushes: Whole = 0  # gradients that have come in whole
    pulls: Whole = 0
    pushes_per_s: Number = 0.0
    pulls_per_s: Number = 0.0
    bytes_in_per_s: Number = 0.0
    bytes_out_per_s: Number = 0.0
    queue: Whole = 0  # all of ``waiting``
    # Updates that are not done, by what they wait for: the "gate" of a cut, a "lock", that the
    # "backup" has them, or that the arrays are free ("compute").
    waiting: Mapping[str, Whole] = field(default_factory=dict)
    duplicates: Whole = 0  # messages and calls that were answered from memory
    refused: Whole = 0  # of tasks that were replaced, or wrong
    backup: BackupStatus | None = None  # None: the cluster has none


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One synchronous optimizer."""

    name: str  # its optimizer's; "sync_replicas/2" where another one has that name
    step: Whole
    target: Whole  # gradients that the step takes
    counted: Whole  # that it has
    waiting: tuple[str, ...]  # workers that wait for it
    waits_for: tuple[str, ...]  # workers that have work and have not come
    steps_per_s: Number
    partial_steps: Whole
    accepted: Whole
    dropped: Whole  # gradients that came too late
    duplicates: Whole
    lacks: tuple[str, ...] = ()  # in words: parts of pushes, and ps tasks that apply a step


@dataclass(frozen=True, slots=True)
class BoundStatus:
    """One staleness bound."""

    max_staleness: Whole
    slowest: Whole  # rounds
    fastest: Whole
    waiting: tuple[str, ...]  # workers that are too far ahead
    waits_for: tuple[str, ...]  # the slowest


@dataclass(frozen=True, slots=True)
class StepsStatus:
    """The progress of training."""

    global_step: Whole = 0  # of the synchronous optimizer that is farthest; else updates applied
    steps_per_s: Number = 0.0
    staleness: Mapping[str, Whole] = field(default_factory=dict)
    """How many pushes were so stale: "0": 90, "1": 10. The highest, "255", counts all above."""
    groups: tuple[GroupStatus, ...] = ()
    bounds: tuple[BoundStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Closures of the coordinator: current counts and totals."""

    waiting: Whole = 0  # for the value of another closure, or for the end of a gang
    queued: Whole = 0
    in_flight: Whole = 0
    finished: Whole = 0
    failed: Whole = 0
    exhausted: Whole = 0  # their data had ended
    cancelled: Whole = 0
    put_back: Whole = 0  # times a closure ran again because its worker was gone
    closures_per_s: Number = 0.0  # finished ones


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The place of one shard of a declared variable."""

    variable: str
    shard: Whole
    shape: tuple[Whole, ...]
    dtype: str
    nbytes: Whole  # without slots
    ps: Whole  # index of the task

    @property
    def device(self) -> str:
        """The ps that holds it, in TensorFlow's long form."""
        return device_name("ps", self.ps)


def placement_of(variables: Iterable[VariableSpec]) -> tuple[ShardStatus, ...]:
    """Return the places of all shards of variables."""
    return tuple(
        ShardStatus(each.name, shard.index, shard.shape, shard.dtype, shard.nbytes, shard.ps)
        for each in variables
        for shard in each.shards
    )


@dataclass(frozen=True, slots=True)
class EventStatus:
    """One event."""

    kind: str  # "joined", "lost", "left", "set aside", "unreachable", "reachable", "rollback", …
    text: str
    seconds: Number  # ago


@dataclass(frozen=True, slots=True)
class Status:
    """A cluster as its coordinator sees it, at one moment.

    States of the coordinator:

    - "starting": it waits for tasks;
    - "idle": nothing is scheduled;
    - "running";
    - "recovering": closures are held back until a ps is there again;
    - "failed": an error is about to be raised;
    - "ended".

    Attributes:
        time: Seconds since 1970.
        pid: Process of the coordinator.
        program: Name of the program.
        uptime_s: Seconds since the coordinator began to connect.
        window_s: Seconds over which the rates are taken.
        state: State of the coordinator.
        waits_for: What a ``join`` waits for, in words; "nothing".
        queue: The closure queue.
        steps: Progress of training.
        workers: The workers, by index.
        ps: The ps tasks, by index.
        reported: Values that the program reports: loss, epoch, ….
        notes: Remarks on recovery, backups and workers that are set aside.
        events: The latest events, newest first.
        placement: Shards of all variables, in order of declaration.
        schema: Version of the JSON form.

    Example:
        status = await coordinator.status()
        print(status.queue.closures_per_s, [w.task for w in status.workers if w.state == "lost"])
    """

    time: Number
    pid: Whole
    program: str
    uptime_s: Number
    window_s: Number
    state: str
    waits_for: str
    queue: QueueStatus = field(default_factory=QueueStatus)
    steps: StepsStatus = field(default_factory=StepsStatus)
    workers: tuple[WorkerStatus, ...] = ()
    ps: tuple[PsStatus, ...] = ()
    reported: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    events: tuple[EventStatus, ...] = ()
    placement: tuple[ShardStatus, ...] = ()
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Return the status as JSON: one object, in one line.

        Reported values that are not JSON numbers, such as a NaN loss, become null.
        """
        data = msgspec.to_builtins(self)
        data["reported"] = {
            name: value if math.isfinite(value) else None for name, value in self.reported.items()
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return a status from its JSON form; unknown fields are dropped.

        Raises:
            RemoteProtocolError: The text is not a status, or has another schema.
        """
        try:
            data = json.loads(text)
            schema, expected = data["schema"], f"expected a status of schema {SCHEMA}"
            hint = "use the version of psync that the run uses"
            check_fits(schema == SCHEMA, expected, schema, hint, error=RemoteProtocolError)
            data["reported"] = {
                name: math.nan if value is None else value
                for name, value in data.get("reported", {}).items()
            }
            return msgspec.convert(data, cls)
        except MISFITS as exc:
            raise RemoteProtocolError(f"expected the status of a run as JSON: {exc}") from exc


# The status, made of counters.

WINDOW_S = 5.0
"""Rates are means over so long, or since somebody last asked, if that is longer ago."""

SPACING_S = 0.5
"""Counters of moments that are closer together are not kept."""

Counters = Mapping[str, float]
"""Totals that only grow, by a name of their own."""

Rate = Callable[[str], float]
"""Returns by how much a counter grows in a second."""


class History:
    """Earlier counters. Times are seconds of one clock.

    Args:
        now: The time at which all counters are 0, but for those that are older.
    """

    def __init__(self, now: float) -> None:
        self._kept: deque[tuple[float, Counters]] = deque([(now, {})])

    def rates(
        self, now: float, counters: Counters, older: Collection[str] = ()
    ) -> tuple[float, Rate]:
        """Note counters; return the seconds that rates are means over, and the rates.

        Args:
            now: Of the counters. One that has fallen was begun again, from 0.
            counters: All of them.
            older: Those that others had begun before: what they were when they were read first says
                nothing about now.
        """
        kept = self._kept
        while len(kept) > 1 and now - kept[0][0] > WINDOW_S and now - kept[1][0] >= SPACING_S:
            kept.popleft()
        earlier = list(kept)
        if now - kept[-1][0] >= SPACING_S:
            kept.append((now, counters))

        def rate(name: str) -> float:
            value, (then, known) = counters.get(name, 0.0), earlier[0]
            before = known.get(name, 0.0)
            if name in older:
                found = ((at, known[name]) for at, known in earlier if name in known)
                then, before = next(found, (now, value))
            grown = value - before if value >= before else value
            return grown / (now - then) if now > then else 0.0

        return now - earlier[0][0], rate


def status_of(
    bare: Status,
    now: float,
    closures: QueueStatistics,
    counted: Sequence[Mapping[str, Any]],
    history: History,
    *,
    has_backups: bool = False,
    attached: bool = False,
) -> Status:
    """Return the status, with rates since an earlier one; note its counters in the history.

    Args:
        bare: The status without anything that is counted. A worker that takes part is "idle" in it,
            "busy" in a training session.
        now: Time of the counters, on the clock of the history.
        closures: Counters of the queue.
        counted: Counters of each ps, as ``ps_statistics`` has them; {}: it was never read.
        history: Of this cluster.
        has_backups: Whether its ps tasks may have backups.
        attached: Whether the ps tasks go on serving what they had.
    """
    counters: dict[str, float] = {"finished": closures.finished}
    for held in closures.workers:
        counters[held.worker] = held.finished
    first: Mapping[str, Any] = counted[0] if counted else {}
    groups: Mapping[str, Any] = first.get("sync", {})
    # Groups are on ps 0 only; iterations count each optimizer's updates, on each ps.
    steps = [group["step"] for group in groups.values()]
    steps = steps or [each.get("iterations", 0) for each in counted if each]
    if steps:
        counters["step"] = max(steps)
    for name, group in groups.items():
        counters[f"group {name}"] = group["step"]
    for ps, each in zip(bare.ps, counted, strict=True):
        if each:
            totals = _totals(each).items()
            counters.update({f"{ps.task} {name}": value for name, value in totals})
    bytes_of = {f"{ps.task} {name}" for ps in bare.ps for name in ("bytes_in", "bytes_out")}
    older = counters.keys() - {"finished"} if attached else bytes_of
    window_s, rate = history.rates(now, counters, older)
    pushes_per_s = max((rate(f"{ps.task} pushes") for ps in bare.ps), default=0.0)

    def pace(name: str) -> float:
        """Return steps in a second. Each takes a push; a checkpoint that is restored, none."""
        return min(rate(name), pushes_per_s)

    busy = [each.task for each in bare.workers if each.closure or each.state == "busy"]
    synchronous = tuple(
        _group(name, group, busy, pace(f"group {name}")) for name, group in groups.items()
    )
    bounds = tuple(map(_bound, first.get("clocks", {}).values()))
    waiting = {task for group in synchronous for task in group.waiting}
    waiting.update(task for bound in bounds for task in bound.waiting)
    return replace(
        bare,
        window_s=window_s,
        queue=QueueStatus(
            closures.waiting, closures.queued, closures.in_flight, closures.finished,
            closures.failed, closures.exhausted, closures.cancelled, closures.put_back,
            rate("finished"),
        ),
        steps=StepsStatus(
            int(counters.get("step", 0)), pace("step"), _staleness(counted, groups), synchronous,
            bounds,
        ),
        workers=tuple(_workers(bare.workers, closures, counted, groups, waiting, rate)),
        ps=tuple(
            ps_of(ps, each, rate, has_backups=has_backups) if each else ps
            for ps, each in zip(bare.ps, counted, strict=True)
        ),
    )  # fmt: skip


# Steps.


def _group(
    name: str, group: Mapping[str, Any], busy: Iterable[str], steps_per_s: float
) -> GroupStatus:
    waiting = tuple(group["waits"])
    pushes = Counter[str]()
    for counts in group["replicas"].values():
        pushes.update(counts)
    return GroupStatus(
        name, group["step"], group["target"], group["counted"], waiting,
        # Whoever has work and does not wait is what the others wait for.
        tuple(task for task in busy if task not in waiting) if waiting else (),
        steps_per_s, group["partial_steps"],
        pushes["accepted"], pushes["stale"], pushes["duplicate"], tuple(group["lacks"]),
    )  # fmt: skip


def _bound(clocks: Mapping[str, Any]) -> BoundStatus:
    rounds: Mapping[str, int] = clocks["clocks"]
    slowest = min(rounds.values(), default=0)
    ahead = slowest + clocks["max_staleness"]
    waiting = tuple(task for task, clock in rounds.items() if clock > ahead)
    return BoundStatus(
        clocks["max_staleness"], slowest, max(rounds.values(), default=0), waiting,
        tuple(task for task, clock in rounds.items() if clock == slowest) if waiting else (),
    )  # fmt: skip


def _staleness(counted: Sequence[Mapping[str, Any]], groups: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each staleness occurred: in groups; if there are none, on the busiest ps."""
    if groups:
        counts = Counter[str]()
        for group in groups.values():
            counts.update(group["staleness"])
    else:
        seen = [each.get("staleness", {}).get("counts", {}) for each in counted]
        counts = Counter(max(seen, key=lambda each: sum(each.values()), default={}))
    return {name: counts[name] for name in sorted(counts, key=int)}


# Tasks.


def _workers(
    bare: Iterable[WorkerStatus],
    closures: QueueStatistics,
    counted: Iterable[Mapping[str, Any]],
    groups: Mapping[str, Any],
    waiting: Collection[str],
    rate: Rate,
) -> Iterator[WorkerStatus]:
    staleness: dict[str, int] = {}
    for each in counted:
        for task, steps in each.get("staleness", {}).get("newest", ()):
            staleness[task] = max(steps, staleness.get(task, 0))
    held = {each.worker: each for each in closures.workers}
    for worker in bare:
        task, state = worker.task, worker.state
        if (has := held.get(task)) is not None:
            worker = replace(worker, held=has.in_flight, finished=has.finished, mean_s=has.mean_s)
            state = "busy" if state == "idle" and has.in_flight else state
        pushes = Counter[str]()
        for group in groups.values():
            pushes.update(group["replicas"].get(task, {}))
        yield replace(
            worker,
            state="waiting" if state == "busy" and task in waiting else state,
            closures_per_s=rate(task),
            staleness=staleness.get(task),
            accepted=pushes["accepted"],
            dropped=pushes["stale"],
            duplicates=pushes["duplicate"],
        )


def _totals(counters: Mapping[str, Any]) -> dict[str, int]:
    network = counters["network"]
    return {
        # Parts of synchronous pushes are staged, and applied together.
        "pushes": counters["pushes"] + counters["staging"]["staged"],
        "pulls": counters["pulls"] + counters["row_pulls"],
        "bytes_in": network["bytes_received"] + network.get("bytes_borrowed", 0),
        "bytes_out": network["bytes_sent"] + network.get("bytes_lent", 0),
    }


WITH_BACKUP = "paired", "copying"
"""States of a backup that is there."""


def ps_of(
    bare: PsStatus,
    counters: Mapping[str, Any],
    rate: Rate = lambda name: 0.0,
    *,
    has_backups: bool = False,
) -> PsStatus:
    """Return the status of a ps with what it counts; arguments as of ``status_of``."""
    totals, store, ledger = _totals(counters), counters["store"], counters["ledger"]
    backup, behind = counters["backup"], 0
    if backup["state"] in WITH_BACKUP:
        behind = backup["entries"] - backup["taken"]
    return replace(
        bare,
        shards=store["shards"],
        bytes=store["bytes"],
        slot_bytes=store["slot_bytes"],
        pushes=totals["pushes"],
        pulls=totals["pulls"],
        pushes_per_s=rate(f"{bare.task} pushes"),
        pulls_per_s=rate(f"{bare.task} pulls"),
        bytes_in_per_s=rate(f"{bare.task} bytes_in"),
        bytes_out_per_s=rate(f"{bare.task} bytes_out"),
        queue=sum(counters["waiting"].values()),
        waiting=counters["waiting"],
        duplicates=ledger["duplicate"] + ledger["already_applied"],
        refused=ledger["fenced"] + ledger["refused"],
        backup=BackupStatus(backup["state"], behind) if has_backups else None,
    )


def shares_of(before: Mapping[str, float], now: Mapping[str, float]) -> WorkShares | None:
    """Return what a worker's time went to between two readings of its meter; None: unknown."""
    seconds = now["at"] - before["at"]
    if seconds <= 0 or now["since"] > before["at"]:  # it has begun anew
        return None
    shares = {kind: (now[kind] - before[kind]) / seconds for kind in KINDS}
    return WorkShares(**shares, seconds=seconds)
