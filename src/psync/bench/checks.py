"""Checks after a timed run: the variables must match what every push has answered."""

from __future__ import annotations

import numpy as np

from psync.bench.training import Run
from psync.errors import PsyncError

TOLERANCE = 0.25
"""Of what one push adds. float32 sums are off by less, and a push too many or too few by more."""


class WrongResultError(PsyncError):
    """A run's figures are worthless: its variables are not what its pushes make of them."""


def check(run: Run) -> None:
    """Compare the global step and the counter with their closed form.

    Each push carries, for the counter, minus one at its worker's place. With learning rate r and
    A(w) accepted pushes of worker w, of which an update averages R:

    - asynchronous (R is 1): the global step is ΣA, the counter r·A(w);
    - synchronous: the global step is the number of steps that ΣA gradients make; the counter
      sums up to r for each step, and is r·A(w)/R if none was partial.

    Raises:
        WrongResultError: They differ, or a push was answered "duplicate", which no run without
            losses can explain.
    """
    where = f"{run.mode.name}, {run.mode.num_workers} workers"
    odd = {push.outcome for own in run.pushes for push in own} - {"accepted", "stale"}
    _expect(f"{where}: outcomes besides accepted and stale", set(), odd)
    unknown = sum(not push.counted for push in run.all("accepted"))
    if run.mode.synchronous and not 0 <= run.unwaited <= unknown:
        accepted = len(run.all("accepted"))
        _expect(f"{where}: gradients in all steps", accepted, accepted - run.unwaited)
    _expect(f"{where}: global step", run.updates, run.global_step)
    _expect_close(f"{where}: sum of the counter", run.rate * run.updates, run.counter.sum(), run)
    if run.unwaited or any(push.partial for push in run.closed_steps.values()):
        return
    for worker, pushes in enumerate(run.pushes):
        accepted = sum(push.outcome == "accepted" for push in pushes)
        expected = run.rate * accepted / run.mode.aggregated
        _expect_close(f"{where}: counter of worker {worker}", expected, run.counter[worker], run)


def _expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise WrongResultError(f"wrong result: {what}: expected {expected}, got {got}")


def _expect_close(what: str, expected: float, got: np.floating, run: Run) -> None:
    if not abs(float(got) - expected) < TOLERANCE * run.rate / run.mode.aggregated:
        raise WrongResultError(f"wrong result: {what}: expected {expected:.6g}, got {got:.6g}")
