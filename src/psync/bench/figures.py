"""The figures of a run, for tables, plots and JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from psync.bench import draws
from psync.bench.training import Run

Figures = dict[str, Any]


def figures_of(run: Run, setting: str) -> Figures:
    """Return the figures of a run.

    Args:
        run: A run that was checked.
        setting: What was done to its workers: "none slow", "one slow", ….

    Returns:
        Seconds are those of the run's clock, real or virtual. A gradient counts if it was
        accepted; one that was dropped as stale was computed in vain.
    """
    accepted, stale = (
        [push for push in run.all(outcome) if push.ended <= run.seconds]
        for outcome in ("accepted", "stale")
    )
    rate = len(accepted) / run.seconds
    steps = {push.step for push in accepted if push.counted}
    updates = len(steps) if run.mode.synchronous else len(accepted)
    return {
        "mode": run.mode.name,
        "workers": run.mode.num_workers,
        "setting": setting,
        "bound": run.mode.bound,
        "backups": run.mode.backups,
        "seconds": run.seconds,
        "updates": updates,
        "updates_per_s": updates / run.seconds,
        "gradients": len(accepted),
        "gradients_per_s": rate,
        "examples_per_s": rate * run.job.batch,
        "dropped": len(stale),
        "dropped_share": len(stale) / (len(accepted) + len(stale)),
        "staleness": histogram(push.staleness for push in accepted),
        "staleness_of_dropped": histogram(push.staleness for push in stale),
        "mean_staleness": float(np.mean([push.staleness for push in accepted])),
        "losses": [list(look) for look in run.losses],
        "target_loss": run.job.target_loss,
        "time_to_loss_s": run.time_to_loss(run.job.target_loss),
    }


def histogram(values: Any) -> dict[int, int]:
    """Return how often each value occurs, in order of the values."""
    return dict(sorted(Counter(values).items()))


def step_seconds(run: Run) -> np.ndarray:
    """Return how long each step of synchronous training took. Shape (steps,), float64.

    A step is over when the first answer shows that it is.
    """
    ends = np.full(run.global_step + 1, np.inf)
    ends[0] = 0.0
    for own in run.pushes:
        for push in own:
            ends[push.step] = min(ends[push.step], push.ended)
    # Nobody may have been told of a step that was over before its answer was sent.
    return np.diff(np.minimum.accumulate(ends[::-1])[::-1])


def backup_figures(run: Run) -> Figures:
    """Return what shows the use of backup replicas, of a run with drawn slow steps."""
    assert run.mode.backups is not None  # only synchronous runs have them
    seconds = step_seconds(run)
    return {
        "mean_step_s": float(seconds.mean()),
        "step_s_percentiles": {p: float(np.percentile(seconds, p)) for p in (50, 90, 99)},
        "without_slow": float((seconds < (draws.NORMAL_S + draws.SLOW_S[0]) / 2).mean()),
        "without_slow_expected": draws.share_without_slow(run.mode.backups),
    }
