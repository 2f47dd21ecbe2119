"""The rules that make a status of counters: rates over a window, states of workers, who waits.

A ``Reading`` is what ``sampling`` has read at one moment. ``History`` remembers earlier counters,
as many as the window needs, however often somebody asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.closures.queue import QueueStatistics
from psync.status.model import (
    BackupStatus,
    BoundStatus,
    EventStatus,
    GroupStatus,
    PsStatus,
    QueueStatus,
    RunningClosure,
    SeenError,
    ShardStatus,
    Status,
    StepsStatus,
    WorkerStatus,
    WorkShares,
)

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


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """What the coordinator knows of a worker."""

    task: str
    address: str
    state: str  # as of ``WorkerStatus``; "idle" if it takes part, "busy" in a training session
    closure: RunningClosure | None = None
    losses: int = 0
    failed: int = 0
    last_error: SeenError | None = None
    work: WorkShares | None = None


@dataclass(frozen=True, slots=True)
class PsReading:
    """What a ps has said."""

    task: str
    address: str
    state: str  # as of ``PsStatus``
    age_s: float | None = None  # of the counters
    counters: Mapping[str, Any] = field(default_factory=dict)  # as ``ps_statistics`` has them


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that was read at one moment."""

    at: float  # on the clock of the history
    time: float  # since 1970
    pid: int
    program: str
    uptime_s: float
    state: str
    waits_for: str
    closures: QueueStatistics
    workers: Sequence[WorkerReading]
    ps: Sequence[PsReading]
    has_backups: bool = False
    attached: bool = False  # to ps tasks that go on serving what they had
    reported: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    events: Sequence[EventStatus] = ()
    placement: tuple[ShardStatus, ...] = ()


def status_of(reading: Reading, history: History) -> Status:
    """Return the status, with rates since an earlier reading; note this one in the history."""
    counters: dict[str, float] = {"finished": reading.closures.finished}
    for worker in reading.closures.workers:
        counters[worker.worker] = worker.finished
    groups: Mapping[str, Any] = reading.ps[0].counters.get("sync", {}) if reading.ps else {}
    # Groups are on ps 0 only; iterations count each optimizer's updates, on each ps.
    steps = [group["step"] for group in groups.values()]
    steps = steps or [ps.counters.get("iterations", 0) for ps in reading.ps if ps.counters]
    if steps:
        counters["step"] = max(steps)
    for name, group in groups.items():
        counters[f"group {name}"] = group["step"]
    for ps in reading.ps:
        counters.update({f"{ps.task} {name}": value for name, value in _totals(ps).items()})
    bytes_of = {f"{ps.task} {name}" for ps in reading.ps for name in ("bytes_in", "bytes_out")}
    older = counters.keys() - {"finished"} if reading.attached else bytes_of
    window_s, rate = history.rates(reading.at, counters, older)
    pushes_per_s = max((rate(f"{ps.task} pushes") for ps in reading.ps), default=0.0)

    def pace(name: str) -> float:
        """Return steps in a second. Each takes a push; a checkpoint that is restored, none."""
        return min(rate(name), pushes_per_s)

    bounds = reading.ps[0].counters.get("clocks", {}) if reading.ps else {}
    busy = [
        worker.task
        for worker in reading.workers
        if worker.closure is not None or worker.state == "busy"
    ]
    shown = _shown_names(groups)
    synchronous = tuple(
        _group(shown[name], name, group, busy, pace) for name, group in groups.items()
    )
    bounded = tuple(_bound(each) for each in bounds.values())
    waiting = {task for each in synchronous for task in each.waiting}
    waiting.update(task for each in bounded for task in each.waiting)
    closures = reading.closures
    return Status(
        time=reading.time,
        pid=reading.pid,
        program=reading.program,
        uptime_s=reading.uptime_s,
        window_s=window_s,
        state=reading.state,
        waits_for=reading.waits_for,
        queue=QueueStatus(
            closures.waiting, closures.queued, closures.in_flight, closures.finished,
            closures.failed, closures.exhausted, closures.cancelled, closures.put_back,
            rate("finished"),
        ),
        steps=StepsStatus(
            int(counters.get("step", 0)), pace("step"), _staleness(reading.ps, groups), synchronous,
            bounded,
        ),
        workers=_workers(reading, groups, waiting, rate),
        ps=tuple(_ps(each, rate, has_backups=reading.has_backups) for each in reading.ps),
        reported=reading.reported,
        notes=tuple(reading.notes),
        events=tuple(reading.events),
        placement=reading.placement,
    )  # fmt: skip


# Steps.


def _shown_names(groups: Iterable[str]) -> dict[str, str]:
    """Return the names of groups for people: without their numbers where these tell nothing."""
    short = {name: name.rpartition("/")[0] for name in groups}
    taken = Counter([*short, *short.values()])
    return {name: each if taken[each] == 1 else name for name, each in short.items()}


def _group(
    shown: str, name: str, group: Mapping[str, Any], busy: Iterable[str], pace: Rate
) -> GroupStatus:
    waiting = tuple(group["waits"])
    pushes = Counter[str]()
    for counts in group["replicas"].values():
        pushes.update(counts)
    return GroupStatus(
        name=shown,
        step=group["step"],
        target=group["target"],
        counted=group["counted"],
        waiting=waiting,
        # Whoever has work and does not wait is what the others wait for.
        waits_for=tuple(task for task in busy if task not in waiting) if waiting else (),
        steps_per_s=pace(f"group {name}"),
        partial_steps=group["partial_steps"],
        accepted=pushes["accepted"],
        dropped=pushes["stale"],
        duplicates=pushes["duplicate"],
    )


def _bound(clocks: Mapping[str, Any]) -> BoundStatus:
    rounds: Mapping[str, int] = clocks["clocks"]
    slowest = min(rounds.values(), default=0)
    ahead = slowest + clocks["max_staleness"]
    waiting = tuple(task for task, clock in rounds.items() if clock > ahead)
    return BoundStatus(
        clocks["max_staleness"], slowest, max(rounds.values(), default=0), waiting,
        tuple(task for task, clock in rounds.items() if clock == slowest) if waiting else (),
    )  # fmt: skip


def _staleness(ps: Sequence[PsReading], groups: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each staleness occurred: in groups; if there are none, on the busiest ps."""
    if groups:
        counts = Counter[str]()
        for group in groups.values():
            counts.update(group["staleness"])
    else:
        seen = [each.counters.get("staleness", {}).get("counts", {}) for each in ps]
        counts = Counter(max(seen, key=lambda each: sum(each.values()), default={}))
    return {name: counts[name] for name in sorted(counts, key=int)}


# Tasks.

_NO_PUSHES = {"accepted": 0, "stale": 0, "duplicate": 0}


def _workers(
    reading: Reading, groups: Mapping[str, Any], waiting: Collection[str], rate: Rate
) -> tuple[WorkerStatus, ...]:
    staleness: dict[str, int] = {}
    for ps in reading.ps:
        for task, steps in ps.counters.get("staleness", {}).get("newest", ()):
            staleness[task] = max(steps, staleness.get(task, 0))
    held = {worker.worker: worker for worker in reading.closures.workers}
    workers: list[WorkerStatus] = []
    for worker in reading.workers:
        statistics = held.get(worker.task)
        state, in_flight = worker.state, 0 if statistics is None else statistics.in_flight
        if state == "idle" and in_flight:
            state = "busy"
        if state == "busy" and worker.task in waiting:
            state = "waiting"
        pushes = [group["replicas"].get(worker.task, _NO_PUSHES) for group in groups.values()]
        workers.append(
            WorkerStatus(
                worker.task,
                worker.address,
                state,
                worker.closure,
                in_flight,
                0 if statistics is None else statistics.finished,
                worker.failed,
                worker.losses,
                rate(worker.task) if statistics is not None else 0.0,
                None if statistics is None else statistics.mean_s,
                staleness.get(worker.task),
                sum([each["accepted"] for each in pushes]),
                sum([each["stale"] for each in pushes]),
                sum([each["duplicate"] for each in pushes]),
                worker.last_error,
                worker.work,
            )
        )
    return tuple(workers)


def _totals(ps: PsReading) -> dict[str, int]:
    counters = ps.counters
    if not counters:
        return {}
    network = counters["network"]
    return {
        # Parts of synchronous pushes are staged, and applied together.
        "pushes": counters["pushes"] + counters["staging"]["staged"],
        "pulls": counters["pulls"] + counters["row_pulls"],
        "bytes_in": network["bytes_received"] + network.get("bytes_borrowed", 0),
        "bytes_out": network["bytes_sent"] + network.get("bytes_lent", 0),
    }


def _ps(ps: PsReading, rate: Rate, *, has_backups: bool) -> PsStatus:
    counters, totals = ps.counters, _totals(ps)
    if not counters:
        return PsStatus(ps.task, ps.address, ps.state)
    store, ledger, backup = counters["store"], counters["ledger"], counters["backup"]
    return PsStatus(
        task=ps.task,
        address=ps.address,
        state=ps.state,
        age_s=ps.age_s,
        shards=store["shards"],
        bytes=store["bytes"],
        slot_bytes=store["slot_bytes"],
        pushes=totals["pushes"],
        pulls=totals["pulls"],
        pushes_per_s=rate(f"{ps.task} pushes"),
        pulls_per_s=rate(f"{ps.task} pulls"),
        bytes_in_per_s=rate(f"{ps.task} bytes_in"),
        bytes_out_per_s=rate(f"{ps.task} bytes_out"),
        queue=counters["queue"],
        duplicates=ledger["duplicate"] + ledger["already_applied"],
        refused=ledger["fenced"] + ledger["refused"],
        backup=_backup(backup) if has_backups else None,
    )


def _backup(counters: Mapping[str, Any]) -> BackupStatus:
    state = counters["state"]
    has_one = state in ("paired", "copying")
    return BackupStatus(state, counters["entries"] - counters["taken"] if has_one else 0)


def shares_of(before: Mapping[str, float], now: Mapping[str, float]) -> WorkShares | None:
    """Return what a worker's time went to between two readings of its meter; None: unknown."""
    seconds = now["at"] - before["at"]
    kinds = ("compute", "pull", "push", "wait")
    if seconds <= 0 or now["since"] > before["at"]:  # it has begun anew
        return None
    shares = {kind: (now[kind] - before[kind]) / seconds for kind in kinds}
    return WorkShares(**shares, seconds=seconds)
