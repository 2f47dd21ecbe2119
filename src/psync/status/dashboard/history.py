"""The past of a run: what its charts show, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from psync.status.model import PsStatus, Status, WorkerStatus
from psync.status.units import task_text

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


class Thinned:
    """Moments of a whole run: when they are too many, every second one goes.

    Args:
        limit: How many there are at most; even.
    """

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self._limit = limit
        self._rows: list[Row] = []
        self._every = 1  # of so many moments, one is kept
        self._passed = 0

    def add(self, row: Row) -> None:
        """Note a moment, which is later than the others."""
        if self._passed % self._every == 0:
            self._rows.append(row)
            if len(self._rows) > self._limit:
                del self._rows[1::2]
                self._every *= 2
        self._passed += 1

    def rows(self, newest: Row | None = None) -> list[Row]:
        """Return what is kept, and the newest moment even if it is not."""
        is_last = newest is None or (self._rows and self._rows[-1] is newest)
        return [*self._rows, *([] if is_last or newest is None else [newest])]


class History:
    """What the page shows of the past. Moments are added in order.

    Example:
        history = History()
        history.add(await coordinator.status())
        series = history.series("run")  # {"time": [...], "closures": [...], ...}
    """

    def __init__(self) -> None:
        self._run = Thinned()
        self._recent: deque[Row] = deque(maxlen=MAX_ROWS)
        self._times: deque[float] = deque(maxlen=LANE_CELLS)
        self._lanes: dict[str, deque[Cell | None]] = {}

    def add(self, status: Status) -> None:
        """Note a status."""
        row = row_of(status)
        self._run.add(row)
        self._recent.append(row)
        self.add_lanes(status)

    def add_lanes(self, status: Status) -> None:
        """Note what workers do, and nothing else."""
        self._times.append(status.time)
        cells = {worker.task: cell_of(worker) for worker in status.workers}
        length = len(self._times)
        for task in cells.keys() - self._lanes.keys():
            self._lanes[task] = deque([None] * (length - 1), maxlen=LANE_CELLS)
        for task, lane in list(self._lanes.items()):
            lane.append(cells.get(task))
            if task not in cells and not any(lane):
                del self._lanes[task]

    def series(self, span: str) -> dict[str, list[float | None]]:
        """Return all series, None where there is no value.

        Args:
            span: "recent": the last five minutes; "run": all of it, thinned out.
        """
        newest = self._recent[-1] if self._recent else None
        if span == "run":
            return columns(self._run.rows(newest))
        since = (newest or {}).get("time") or 0.0
        return columns([row for row in self._recent if (row["time"] or 0.0) >= since - RECENT_S])

    def lanes(self, tasks: Sequence[str]) -> tuple[list[float], list[list[Cell | None]]]:
        """Return the newest moments, and what these workers did in each; None: it was not there."""
        nothing: list[Cell | None] = [None] * len(self._times)
        return list(self._times), [list(self._lanes.get(task, nothing)) for task in tasks]


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
        for name in ("compute", "pull", "push", "wait"):
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
            name = task_text(ps.task)
            yield f"in {name}", ps.bytes_in_per_s
            yield f"out {name}", ps.bytes_out_per_s
        return
    out = [ps.bytes_out_per_s for ps in tasks]
    yield "in all ps", sum(ps.bytes_in_per_s for ps in tasks)
    yield "out all ps", sum(out)
    yield "out busiest ps", max(out)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def cell_of(worker: WorkerStatus) -> Cell:
    """Return what a lane shows of a worker at one moment."""
    work = worker.work
    if work is None:
        return worker.state, -1, -1, -1, -1
    compute, pull, push, wait = (
        round(100 * share) for share in (work.compute, work.pull, work.push, work.wait)
    )
    return worker.state, compute, pull, push, wait
