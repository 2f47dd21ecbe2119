"""Statuses that tests make by hand."""

from __future__ import annotations

from typing import Any

from psync import Status
from psync.status.dashboard.run_log import FinishedRun, Recorder
from psync.status.model import PsStatus, WorkerStatus, WorkShares


def worker(index: int = 0, state: str = "busy", **changes: Any) -> WorkerStatus:
    return WorkerStatus(f"/job:worker/task:{index}", "a:1", state, **changes)


def ps(index: int = 0, state: str = "connected", **changes: Any) -> PsStatus:
    return PsStatus(f"/job:ps/task:{index}", "a:1", state, **{"age_s": 0.0, **changes})


def shares(compute: float, pull: float = 0.0, push: float = 0.0, wait: float = 0.0) -> WorkShares:
    return WorkShares(compute, pull, push, wait, 1.0)


def status(
    *tasks: WorkerStatus | PsStatus, at: float = 1000.0, state: str = "running", **changes: Any
) -> Status:
    """A status of these workers and ps tasks."""
    workers = tuple(task for task in tasks if isinstance(task, WorkerStatus))
    servers = tuple(task for task in tasks if isinstance(task, PsStatus))
    return Status(
        at, 7, "train.py", 2.0, 5.0, state, changes.pop("waits_for", "nothing"),
        workers=workers, ps=servers, **changes,
    )  # fmt: skip


def live_show() -> Recorder:
    """What a dashboard shows of a run that goes on; statuses are added by hand."""
    source: Any = None
    return Recorder(source)


def logged(run: FinishedRun) -> list[Status]:
    return [run.status_at(index) for index in range(len(run))]
