"""100 workers in virtual time; here fewer of them, and fewer steps."""

from __future__ import annotations

import numpy as np
import pytest

from psync.bench import draws, virtual_runs
from psync.bench.figures import backup_figures, step_seconds
from psync.bench.modes import Mode
from psync.bench.training import QUICK_LOSS
from psync.bench.virtual_runs import DrawnPace

pytest.importorskip("sklearn")


def table_with_slow(*counts: int, workers: int = 8) -> np.ndarray:
    """Seconds of gradients, of which so many in each step are slow: others each time."""
    seconds = np.full((len(counts), workers), draws.NORMAL_S)
    for step, count in enumerate(counts):
        seconds[step, np.arange(step, step + count) % workers] = 4.0
    return seconds


@pytest.mark.slow
def test_steps_wait_only_for_slow_gradients_that_backups_cannot_replace() -> None:
    table = table_with_slow(0, 1, 2, 3, 1, 0)
    waited = []
    for backups in range(4):
        run = virtual_runs.run_one(Mode(8, backups=backups), DrawnPace(table))
        assert run.global_step == len(table)
        waited.append((step_seconds(run) > 2).tolist())
        share = backup_figures(run)["without_slow"]
        assert share == pytest.approx(np.mean((table > 1).sum(axis=1) <= backups))
    assert waited == [
        [False, True, True, True, True, False],
        [False, False, True, True, False, False],
        [False, False, False, True, False, False],
        [False] * 6,
    ]


def test_late_gradients_that_are_finished_use_backups_up() -> None:
    table = table_with_slow(1, 1, 1, 1, 1, 1)
    times = {}
    for setting, patience_s in virtual_runs.PATIENCE_S.items():
        run = virtual_runs.run_one(Mode(8, backups=1), DrawnPace(table, patience_s))
        times[setting] = run.seconds
    assert times[virtual_runs.GIVEN_UP] < 7 < times[virtual_runs.FINISHED]


@pytest.mark.slow
def test_quick_runs_reach_the_loss_that_they_are_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "WORKERS", 8)  # too few for the modes with backups
    results = virtual_runs.measure(True, lambda what: None)
    assert {result["target_loss"] for result in results} == {QUICK_LOSS}
    reached = {result["mode"] for result in results if result["time_to_loss_s"] is not None}
    assert reached >= {"async", "sync"}


@pytest.mark.slow
def test_backups_make_steps_shorter_on_a_hundred_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_runs, "QUICK_STEPS", steps := 4)
    noted: list[str] = []
    results = virtual_runs.measure(True, noted.append)
    assert len(noted) == len(results)
    synchronous = [result for result in results if result["backups"] is not None]
    times = [result["mean_step_s"] for result in synchronous]
    assert times == sorted(times, reverse=True)
    for result in synchronous:
        expected = result["without_slow_expected"]
        assert result["without_slow"] == pytest.approx(expected, abs=1 / steps)
