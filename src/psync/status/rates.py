"""The rules that make a status of counters: rates over a window, states of workers, who waits.

``History`` remembers earlier counters, as many as the window needs, however often somebody asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psync.client.counters import KINDS
from psync.closures.dispatcher import WorkerStatistics
from psync.closures.queue import QueueStatistics
from psync.status.model import (
    BackupStatus,
    BoundStatus,
    GroupStatus,
    PsStatus,
    QueueStatus,
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
    shown = _shown_names(groups)
    synchronous = tuple(
        _group(shown[name], group, busy, pace(f"group {name}")) for name, group in groups.items()
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
        workers=_workers(bare.workers, closures, counted, groups, waiting, rate),
        ps=tuple(
            ps_of(ps, each, rate, has_backups=has_backups) if each else ps
            for ps, each in zip(bare.ps, counted, strict=True)
        ),
    )  # fmt: skip


# Steps.


def _shown_names(groups: Iterable[str]) -> dict[str, str]:
    """Return the names of groups for people: without their numbers where these tell nothing."""
    short = {name: name.rpartition("/")[0] for name in groups}
    taken = Counter([*short, *short.values()])
    return {name: each if taken[each] == 1 else name for name, each in short.items()}


def _group(
    shown: str, group: Mapping[str, Any], busy: Iterable[str], steps_per_s: float
) -> GroupStatus:
    waiting = tuple(group["waits"])
    pushes = Counter[str]()
    for counts in group["replicas"].values():
        pushes.update(counts)
    return GroupStatus(
        shown, group["step"], group["target"], group["counted"], waiting,
        # Whoever has work and does not wait is what the others wait for.
        tuple(task for task in busy if task not in waiting) if waiting else (),
        steps_per_s, group["partial_steps"],
        pushes["accepted"], pushes["stale"], pushes["duplicate"],
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
) -> tuple[WorkerStatus, ...]:
    staleness: dict[str, int] = {}
    for each in counted:
        for task, steps in each.get("staleness", {}).get("newest", ()):
            staleness[task] = max(steps, staleness.get(task, 0))
    held = {each.worker: each for each in closures.workers}
    workers: list[WorkerStatus] = []
    for worker in bare:
        task, state = worker.task, worker.state
        statistics = held.get(task, _NO_CLOSURES)
        if state == "idle" and statistics.in_flight:
            state = "busy"
        pushes = Counter[str]()
        for group in groups.values():
            pushes.update(group["replicas"].get(task, {}))
        worker = replace(
            worker,
            state="waiting" if state == "busy" and task in waiting else state,
            held=statistics.in_flight,
            finished=statistics.finished,
            closures_per_s=rate(task),
            mean_s=statistics.mean_s,
            staleness=staleness.get(task),
            accepted=pushes["accepted"],
            dropped=pushes["stale"],
            duplicates=pushes["duplicate"],
        )
        workers.append(worker)
    return tuple(workers)


_NO_CLOSURES = WorkerStatistics("", 0, 0, 0, None)


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
