"""Benchmarks on real processes of this machine, with and without one slow worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from psync.bench.checks import check
from psync.bench.figures import Figures, figures_of
from psync.bench.modes import BOUNDS, Mode, modes_of
from psync.bench.training import QUICK_LOSS, TARGET_LOSS, Job, train
from psync.launch.cluster import LocalCluster

NUM_PS = 2
BATCH = 32
MEAN_S = 0.010  # that a gradient takes
SPREAD = 0.2  # of that, to both sides
SLOWDOWN = 5.0  # of the slow worker
MAX_BACKUPS = 3
SEED = 7
WARM_UP_S = 0.3
WATCH_S = 0.025
FULL_S, QUICK_S = 5.0, 0.5  # that each run takes
SETTINGS = ("none slow", "one slow")


@dataclass(frozen=True)
class SleepPace:
    """Each gradient takes a drawn time; those of one worker take a multiple."""

    slow_worker: int | None
    patience_s: float = np.inf  # a real worker does not know when to give up

    def seconds(self, worker: int, index: int) -> float:
        """Return the seconds of a worker's gradient number ``index``."""
        drawn = np.random.default_rng((SEED, worker, index)).uniform(1 - SPREAD, 1 + SPREAD)
        return float(MEAN_S * drawn) * (SLOWDOWN if worker == self.slow_worker else 1.0)


async def measure(
    workers: Sequence[int], quick: bool, note: Callable[[str], None]
) -> list[Figures]:
    """Train in every mode on clusters of so many workers, without and with a slow one.

    Args:
        workers: Number of workers of each cluster; each has 2 ps tasks.
        quick: Whether short runs in a few modes are enough.
        note: Called with what runs next.
    """
    results = []
    for count in workers:
        modes = modes_of(count, min(MAX_BACKUPS, count - 1))
        if quick:
            modes = [mode for mode in modes if mode.bound != BOUNDS[-1] and (mode.backups or 0) < 2]
        async with LocalCluster(NUM_PS, count) as cluster:
            await run_one(cluster, modes[0], SETTINGS[0], WARM_UP_S)
            for setting in SETTINGS:
                for mode in modes:
                    note(f"{count} workers, {setting}, {mode.name}")
                    duration_s = QUICK_S if quick else FULL_S
                    target = QUICK_LOSS if quick else TARGET_LOSS
                    results.append(await run_one(cluster, mode, setting, duration_s, target))
    return results


async def run_one(
    cluster: LocalCluster,
    mode: Mode,
    setting: str,
    duration_s: float,
    target_loss: float = TARGET_LOSS,
) -> Figures:
    """Train in one mode for so long, check the result, and return its figures."""
    slow = mode.num_workers - 1 if setting == "one slow" else None

    def job(mode: Mode) -> Job:
        pace = SleepPace(slow)
        return Job(
            pace, BATCH, SEED, mode.synchronous, duration_s=duration_s, target_loss=target_loss
        )

    run = await train(cluster, mode, job, seed=SEED, watch_s=WATCH_S, limit_s=duration_s + 30.0)
    check(run)
    return figures_of(run, setting)
