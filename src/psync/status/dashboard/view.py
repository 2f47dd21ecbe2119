"""The page as data: a status and its history become rows, series and sentences.

All that is decided about what the page shows is decided here; the page formats nothing and sorts
nothing. Everything is plain data for JSON. ``VIEW_SCHEMA`` of the page and of this file must agree.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from psync.client.counters import KINDS
from psync.status.diagnosis import diagnose
from psync.status.model import PsStatus, ShardStatus, Status, StepsStatus, WorkerStatus
from psync.status.units import (
    bytes_text,
    number_text,
    seconds_text,
    short_names,
    tasks_text,
    waiting_text,
)

T = TypeVar("T")

VIEW_SCHEMA = 1

MAX_WORKERS = 40
"""Rows and lanes of workers: those in trouble, then the slowest."""

MAX_PS_ROWS = 64

MAX_EVENTS = 50

TROUBLE = ("lost", "set aside", "given up", "connecting")

MAX_PARTS = 24
"""Pieces of a bar in the placement map; the smallest of the others are one piece."""


def view_of(
    moments: Sequence[Status], series: Mapping[str, Any], *, mode: str = "live"
) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        moments: The last one is shown; lanes show all of them.
        series: The charts; see ``columns``.
        mode: "live", or "log" for a run that is read from a file.
    """
    status = moments[-1]
    shown = noticed(status.workers)
    return {
        "schema": VIEW_SCHEMA,
        "mode": mode,
        "time": status.time,
        "program": status.program,
        "pid": status.pid,
        "state": status.state,
        "uptime": seconds_text(status.uptime_s),
        "waits_for": short_names(status.waits_for),
        "why": [{"level": each.level, "text": each.text} for each in diagnose(status)],
        "tiles": tiles(status),
        "series": series,
        "staleness": staleness(status.steps),
        "groups": groups(status.steps),
        "workers": [worker_row(worker) for worker in shown],
        "num_workers": len(status.workers),
        "states": states(status.workers),
        "lanes": lanes(moments, [worker.task for worker in shown]),
        "ps": [ps_row(each) for each in status.ps[:MAX_PS_ROWS]],
        "num_ps": len(status.ps),
        "placement": placement(status.placement, len(status.ps)),
        "events": [
            {"kind": each.kind, "text": short_names(each.text), "ago": seconds_text(each.seconds)}
            for each in status.events[:MAX_EVENTS]
        ],
        "notes": [short_names(note) for note in status.notes],
        "missing": missing(status),
    }


def to_json(value: Any) -> str:
    """Return JSON that a browser reads: no NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def tiles(status: Status) -> list[dict[str, str]]:
    """Return the numbers at the top."""
    queue, steps, workers = status.queue, status.steps, status.workers
    here = sum(worker.state in ("idle", "busy", "waiting", "leaving") for worker in workers)
    traffic = sum(ps.bytes_in_per_s + ps.bytes_out_per_s for ps in status.ps)
    found = [
        ("closures/s", number_text(queue.closures_per_s), f"{queue.finished:,} finished"),
        ("steps/s", number_text(steps.steps_per_s), f"step {steps.global_step:,}"),
        ("queue", f"{queue.queued:,}", f"{queue.in_flight:,} in flight"),
        ("workers", f"{here:,}", f"of {len(workers):,} here"),
        ("ps traffic", f"{bytes_text(traffic)}/s",
         f"{bytes_text(sum(ps.bytes for ps in status.ps))} of variables"),
    ]  # fmt: skip
    for name, value in list(status.reported.items())[:3]:
        text = f"{value:.4g}" if math.isfinite(value) else "not finite"
        found.append((name, text, "reported"))
    return [{"name": name, "value": value, "more": more} for name, value, more in found]


# Steps.


def staleness(steps: StepsStatus) -> list[dict[str, Any]]:
    """Return the bars of the histogram: each staleness up to 15, then ranges."""
    bars: dict[tuple[int, str], int] = {}
    for name, count in steps.staleness.items():
        if not name.isdecimal() or len(name) > 9 or count < 0:  # not written by psync
            continue
        low = int(name)
        if low < 16:
            key = low, name
        else:
            top = 1 << low.bit_length()
            key = (top >> 1, f"{top >> 1}–{top - 1}") if top <= 128 else (128, "128+")
        bars[key] = bars.get(key, 0) + count
    most = max(bars.values(), default=0)
    total = sum(bars.values())
    return [
        {"label": label, "count": bars[low, label], "height": round(100 * bars[low, label] / most),
         "share": f"{bars[low, label] / total:.1%}"}
        for low, label in sorted(bars)
        if most
    ]  # fmt: skip


def groups(steps: StepsStatus) -> list[dict[str, str]]:
    """Return what is said of each synchronous group and staleness bound."""
    found = []
    for group in steps.groups:
        awaited = tasks_text(group.lacks + group.waits_for)
        waits = f", waits for {awaited}" if awaited else ""
        text = (
            f"step {group.step:,}, {number_text(group.steps_per_s)}/s, {group.counted} of "
            f"{group.target} gradients{waits}"
        )
        parts = (
            (group.accepted, "accepted"), (group.dropped, "dropped"),
            (group.duplicates, "duplicate"), (group.partial_steps, "partial steps"),
        )  # fmt: skip
        more = ", ".join(f"{n:,} {what}" for n, what in parts)
        found.append({"name": group.name, "text": text, "more": more})
    for bound in steps.bounds:
        text = f"rounds {bound.slowest:,} to {bound.fastest:,}"
        if bound.waiting:
            ahead, of = tasks_text(bound.waiting), tasks_text(bound.waits_for)
            text += f", {ahead} too far ahead of {of}"
        more = f"at most {bound.max_staleness} rounds apart"
        found.append({"name": "staleness bound", "text": text, "more": more})
    return found


# Workers.


def noticed(workers: Sequence[WorkerStatus], most: int = MAX_WORKERS) -> Sequence[WorkerStatus]:
    """Return the workers that are shown one by one: all, or those in trouble and the slowest."""
    return workers if len(workers) <= most else sorted(workers, key=_by_trouble)[:most]


def _by_trouble(worker: WorkerStatus) -> tuple[bool, bool, float]:
    return worker.state not in TROUBLE, worker.last_error is None, -(worker.mean_s or 0.0)


def worker_row(worker: WorkerStatus) -> dict[str, str]:
    """Return the texts of a row of the table of workers."""
    closure, error = worker.closure, worker.last_error
    return {
        "task": short_names(worker.task),
        "state": worker.state,
        "rate": number_text(worker.closures_per_s),
        "mean": "" if worker.mean_s is None else seconds_text(worker.mean_s),
        "stale": "" if worker.staleness is None else str(worker.staleness),
        "dropped": _if_any(worker.dropped),
        "losses": _if_any(worker.losses),
        "closure": "" if closure is None else f"{closure.name} {closure.id}",
        "since": "" if closure is None else seconds_text(closure.seconds),
        "error": "" if error is None else f"{seconds_text(error.seconds)} ago: {error.text}",
    }


def _if_any(count: int) -> str:
    return f"{count:,}" if count else ""


def states(workers: Sequence[WorkerStatus]) -> list[list[Any]]:
    """Return each worker's name, state, and how slow it is: 1.0 is the slowest's pace."""
    slowest = max((worker.mean_s or 0.0 for worker in workers), default=0.0) or 1.0
    return [
        [short_names(worker.task), worker.state, round((worker.mean_s or 0.0) / slowest, 2)]
        for worker in workers
    ]


# Ps tasks.


def ps_row(ps: PsStatus) -> dict[str, str]:
    """Return the texts of a row of the table of ps tasks."""
    row = {"task": short_names(ps.task), "state": ps.state}
    if ps.age_s is None:
        return row
    backup = ""
    if ps.backup is not None:
        behind = f", {ps.backup.behind:,} behind" if ps.backup.behind else ""
        backup = f"{ps.backup.state}{behind}"
    return row | {
        "variables": bytes_text(ps.bytes),
        "slots": bytes_text(ps.slot_bytes),
        "pushes": number_text(ps.pushes_per_s),
        "pulls": number_text(ps.pulls_per_s),
        "in": f"{bytes_text(ps.bytes_in_per_s)}/s",
        "out": f"{bytes_text(ps.bytes_out_per_s)}/s",
        "queue": waiting_text(ps.waiting),
        "duplicates": _if_any(ps.duplicates),
        "backup": backup,
    }


def placement(placed: Sequence[ShardStatus], num_ps: int) -> list[dict[str, Any]]:
    """Return a bar for each ps: its shards, largest first, as percent of the fullest ps."""
    by_ps: dict[int, list[ShardStatus]] = {index: [] for index in range(num_ps)}
    for shard in placed:
        by_ps.setdefault(shard.ps, []).append(shard)
    totals = {ps: sum(shard.nbytes for shard in shards) for ps, shards in by_ps.items()}
    most = max(totals.values(), default=0) or 1
    names = sorted({shard.variable for shard in placed})
    colours = {name: number for number, name in enumerate(names)}
    bars = []
    for ps, shards in list(by_ps.items())[:MAX_PS_ROWS]:
        shards.sort(key=lambda shard: -shard.nbytes)
        parts: list[dict[str, Any]] = []
        for shard in shards[:MAX_PARTS]:
            name, width = f"{shard.variable} [{shard.shard}]", round(100 * shard.nbytes / most, 2)
            text = f"{name}: {shard.shape} {shard.dtype}, {bytes_text(shard.nbytes)}"
            colour = colours[shard.variable]
            parts.append({"name": name, "text": text, "width": width, "colour": colour})
        if rest := shards[MAX_PARTS:]:
            size = sum(shard.nbytes for shard in rest)
            text = f"{len(rest)} more shards, {bytes_text(size)}"
            width = round(100 * size / most, 2)
            parts.append({"name": text, "text": text, "width": width, "colour": -1})
        total = f"{bytes_text(totals[ps])}, {len(shards)} shards"
        bars.append({"task": f"ps {ps}", "total": total, "parts": parts})
    return bars if placed else []


def missing(status: Status) -> Mapping[str, str]:
    """Return, for parts of the page that have nothing to show, why that is so."""
    found = {}
    if not status.reported:
        found["loss"] = (
            'The program reports no values: coordinator.report({"loss": loss}) shows them here, '
            "and Trainer.fit reports its own."
        )
    if not status.steps.staleness:
        found["staleness"] = (
            "No push has been counted yet: steps push nothing, or have not started."
        )
    if all(worker.work is None for worker in status.workers):
        found["work"] = (
            "Workers have not reported yet how they spend their time, so lanes show only their "
            "states."
        )
    if not status.placement:
        found["placement"] = "No variable has been declared yet."
    return found


# The past: what charts show, in bounded memory.

Row = Mapping[str, float | None]
"""Values of one moment, by the name of the series."""

MAX_ROWS = 600
"""Moments that a chart shows: about as many as it has pixels."""

RECENT_S = 300.0

LANE_CELLS = 90
"""Moments in the lane of a worker."""

MAX_PS = 4
"""Charts show so many ps tasks one by one; of more, their sums and the busiest one."""

HERE = ("busy", "waiting", "idle")

Cell = tuple[str, int, int, int, int]
"""State of a worker, and percent of its time: compute, pull, push, wait; -1: unknown."""


class Thinned(Generic[T]):
    """Moments of a whole run: when they are too many, every second one goes.

    Args:
        limit: How many there are at most; even.

    Attributes:
        kept: Those that are left.
        newest: The last one that was added, which may not be left.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept: list[T] = []
        self.newest: T
        self._every = 1  # of so many moments, one is kept
        self._passed = 0

    def add(self, moment: T) -> None:
        """Note a moment, which is later than the others."""
        self.newest = moment
        if self._passed % self._every == 0:
            self.kept.append(moment)
            if len(self.kept) > self._limit:
                del self.kept[1::2]
                self._every *= 2
        self._passed += 1

    def with_newest(self) -> list[T]:
        """Return those that are left, and the newest one in any case."""
        is_last = not self.kept or self.kept[-1] is self.newest
        return self.kept if is_last else [*self.kept, self.newest]


class History:
    """What the page shows of the past. Moments are added in order.

    Attributes:
        moments: The newest ones, whose lanes are shown.

    Example:
        history = History()
        history.add(await coordinator.status())
        series = history.series("run")  # {"time": [...], "closures": [...], ...}
    """

    def __init__(self) -> None:
        self._run: Thinned[Row] = Thinned(MAX_ROWS)
        self._recent: deque[Row] = deque(maxlen=MAX_ROWS)
        self.moments: deque[Status] = deque(maxlen=LANE_CELLS)

    def add(self, status: Status) -> None:
        """Note a status."""
        row = row_of(status)
        self._run.add(row)
        self._recent.append(row)
        self.moments.append(status)

    def series(self, span: str) -> dict[str, list[float | None]]:
        """Return all series, None where there is no value.

        Args:
            span: "recent": the last five minutes; "run": all of it, thinned out.
        """
        if span == "run" or not self._recent:
            return columns(self._run.with_newest())
        since = (self._recent[-1]["time"] or 0.0) - RECENT_S
        return columns([row for row in self._recent if (row["time"] or 0.0) >= since])


def columns(rows: Iterable[Row]) -> dict[str, list[float | None]]:
    """Return series of one length, one for each name that occurs."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def row_of(status: Status) -> Row:
    """Return the values of a status that charts show. Their names:

    "time" (seconds since 1970), "closures" and "steps" (per second), "queued", "in_flight",
    "busy", "waiting", "idle", "gone" (workers), "compute", "pull", "push", "wait", "free" (percent
    of the workers' time, where it is known), "in ps 0" and "out ps 0" (bytes per second of each ps;
    if they are many: "in all ps", "out all ps", "out busiest ps"), "reported loss" (and whatever
    is reported).
    """
    queue, steps = status.queue, status.steps
    row: dict[str, float | None] = {
        "time": round(status.time, 2),
        "closures": _short(queue.closures_per_s), "steps": _short(steps.steps_per_s),
        "queued": queue.queued, "in_flight": queue.in_flight,
        **dict.fromkeys((*HERE, "gone"), 0),
    }  # fmt: skip
    for worker in status.workers:
        name = worker.state if worker.state in HERE else "gone"
        row[name] = (row[name] or 0) + 1
    known = [worker.work for worker in status.workers if worker.work is not None]
    if known:
        left = 100.0
        for name in KINDS:
            share = 100 * sum(getattr(each, name) for each in known) / len(known)
            row[name] = round(share, 1)
            left -= share
        row["free"] = round(max(0.0, left), 1)
    row.update((name, _short(value)) for name, value in _traffic(status.ps))
    for name, value in status.reported.items():
        if name == "epoch":  # a count, beside which nothing else would be seen
            continue
        row[f"reported {name}"] = _short(value) if math.isfinite(value) else None
    return row


def _traffic(tasks: Sequence[PsStatus]) -> Iterator[tuple[str, float]]:
    if len(tasks) <= MAX_PS:
        for ps in tasks:
            name = short_names(ps.task)
            yield f"in {name}", ps.bytes_in_per_s
            yield f"out {name}", ps.bytes_out_per_s
        return
    out = [ps.bytes_out_per_s for ps in tasks]
    yield "in all ps", sum(ps.bytes_in_per_s for ps in tasks)
    yield "out all ps", sum(out)
    yield "out busiest ps", max(out)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def lanes(moments: Sequence[Status], tasks: Sequence[str]) -> dict[str, Any]:
    """Return what some workers did in each of some moments; None: it was not there."""
    shown = set(tasks)
    cells = [
        {each.task: cell_of(each) for each in moment.workers if each.task in shown}
        for moment in moments
    ]
    rows = [[each.get(task) for each in cells] for task in tasks]
    return {"times": [moment.time for moment in moments], "rows": rows}


def cell_of(worker: WorkerStatus) -> Cell:
    """Return what a lane shows of a worker at one moment."""
    if worker.work is None:
        return worker.state, -1, -1, -1, -1
    compute, pull, push, wait = (round(100 * getattr(worker.work, kind)) for kind in KINDS)
    return worker.state, compute, pull, push, wait
