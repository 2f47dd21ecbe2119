"""Runs as ``bench.training`` leaves them, made by hand."""

from __future__ import annotations

import math

import numpy as np

from psync.bench.modes import Mode
from psync.bench.training import Job, Push, Run
from psync.bench.virtual_runs import DrawnPace


def push(
    ended: float, step: int, outcome: str = "accepted", *, counted: int = 0, staleness: int = 0,
    partial: bool = False,
) -> Push:  # fmt: skip
    return Push(ended, 1.0, outcome, step, staleness, counted, partial)


def run_of(
    mode: Mode, pushes: list[list[Push]], global_step: int, counter: list[float], rate: float = 0.5,
    duration_s: float = math.inf,
) -> Run:  # fmt: skip
    pace = DrawnPace(np.ones((1, mode.num_workers)))
    job = Job(pace, 16, 0, mode.synchronous, duration_s=duration_s)
    losses = [(0.0, 2.0), (1.0, 0.6), (2.0, 0.4)]
    return Run(mode, job, pushes, losses, rate, global_step, np.array(counter, np.float32))


def asynchronous_run() -> Run:
    """Two workers with three pushes and one."""
    pushes = [[push(1.0, 1), push(2.0, 3, staleness=1), push(3.0, 4)], [push(1.5, 2, staleness=1)]]
    return run_of(Mode(2), pushes, 4, [1.5, 0.5])


def synchronous_run() -> Run:
    """Three workers, one backup: two steps of two gradients, and one gradient that was dropped."""
    pushes = [
        [push(1.0, 1, counted=2), push(2.5, 2, counted=2)],
        [push(1.0, 1, counted=2), push(2.0, 1, "stale", staleness=1)],
        [push(2.5, 2, counted=2)],
    ]
    return run_of(Mode(3, backups=1), pushes, 2, [0.5, 0.25, 0.25])
