"""Benchmarks of 100 workers in virtual time: the best number of backup replicas.

The tasks are the real ones, in this process, on a network in memory. Computing takes as long as
it is drawn to take, everything else takes no time: what is seen is the mathematics of waiting.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from psync.bench import draws
from psync.bench.checks import check
from psync.bench.figures import Figures, backup_figures, figures_of
from psync.bench.modes import Mode, modes_of
from psync.bench.training import QUICK_LOSS, TARGET_LOSS, Job, Run, train
from psync.launch.cluster import LocalCluster
from psync.testing import run_virtual

BATCH = 16
MAX_BACKUPS = 6
SEED = 7
FULL_STEPS, QUICK_STEPS = 50, 10
LONGER = 1.2  # than the steps: so that bounded workers, which wait, reach the loss too
LIMIT_S = 10_000.0  # virtual

GIVEN_UP, FINISHED = "late gradients given up", "late gradients finished"
PATIENCE_S = {GIVEN_UP: draws.NORMAL_S, FINISHED: math.inf}


@dataclass(frozen=True)
class DrawnPace:
    """Gradients take what a table says."""

    table: np.ndarray  # seconds, shape (steps, workers)
    patience_s: float = draws.NORMAL_S  # a later gradient is given up when its step is closed

    def seconds(self, worker: int, index: int) -> float:
        """Return the seconds of a worker's gradient number ``index``; the table repeats."""
        return float(self.table[index % len(self.table), worker])


def measure(quick: bool, note: Callable[[str], None]) -> list[Figures]:
    """Train in every mode, in the same drawn times.

    Some synchronous modes are run once more, with late gradients computed to their end: a worker
    that is late for one step then misses the next ones too.

    Args:
        quick: Whether a few steps in a few modes are enough.
        note: Called with what runs next.
    """
    table = draws.compute_seconds(QUICK_STEPS if quick else FULL_STEPS, draws.WORKERS, SEED)
    modes = modes_of(draws.WORKERS, MAX_BACKUPS)
    asynchronous, synchronous = modes[: -MAX_BACKUPS - 1], modes[-MAX_BACKUPS - 1 :]
    cases = [(mode, GIVEN_UP) for mode in asynchronous + synchronous]
    cases += [(mode, FINISHED) for mode in synchronous[2::2]]
    if quick:
        quick_modes = (asynchronous[0], *synchronous[::3])
        cases = [(mode, GIVEN_UP) for mode in quick_modes]
    results = []
    for mode, setting in cases:
        note(f"{mode.num_workers} workers in virtual time, {setting}, {mode.name}")
        pace = DrawnPace(table, patience_s=PATIENCE_S[setting])
        run = run_one(mode, pace, QUICK_LOSS if quick else TARGET_LOSS)
        figures = figures_of(run, setting)
        results.append(figures | backup_figures(run) if mode.synchronous else figures)
    return results


def run_one(mode: Mode, pace: DrawnPace, target_loss: float = TARGET_LOSS) -> Run:
    """Train in one mode and check the result.

    Synchronous training does as many steps as the pace has, the others run for a little longer
    than these steps take at least.
    """
    length = len(pace.table)

    def job(mode: Mode) -> Job:
        if mode.synchronous:
            return Job(pace, BATCH, SEED, True, steps=length, target_loss=target_loss)
        duration_s = length * draws.NORMAL_S * LONGER
        return Job(pace, BATCH, SEED, False, duration_s=duration_s, target_loss=target_loss)

    async def main() -> Run:
        async with LocalCluster(1, mode.num_workers, processes=False) as cluster:
            return await train(
                cluster, mode, job, seed=SEED, watch_s=draws.NORMAL_S / 2, limit_s=LIMIT_S
            )

    with _quiet():
        run = run_virtual(main)
    check(run)
    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep joins from saying every ten virtual seconds on whom they wait."""
    log = logging.getLogger("psync.coordinator")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
