"""Training in real processes, in short runs."""

from __future__ import annotations

import numpy as np
import pytest

from psync.bench.real_runs import MEAN_S, SLOWDOWN, SPREAD, SleepPace, measure

pytest.importorskip("sklearn")


def test_the_slow_worker_takes_a_multiple() -> None:
    none, one = SleepPace(None), SleepPace(1)
    for index in range(20):
        assert one.seconds(0, index) == none.seconds(0, index)
        assert one.seconds(1, index) == none.seconds(1, index) * SLOWDOWN


def test_times_spread_round_their_mean_and_are_the_same_each_time() -> None:
    drawn = np.array([SleepPace(None).seconds(0, index) for index in range(200)])
    assert drawn.min() >= MEAN_S * (1 - SPREAD)
    assert drawn.max() <= MEAN_S * (1 + SPREAD)
    assert drawn.mean() == pytest.approx(MEAN_S, rel=0.05)
    assert drawn[7] == SleepPace(None).seconds(0, 7)


@pytest.mark.processes
@pytest.mark.slow
async def test_real_processes_train_in_every_mode() -> None:
    noted: list[str] = []
    results = await measure([2], True, noted.append)  # checks the closed forms itself
    assert [result["mode"] for result in results] == ["async", "bounded 2", "sync",
                                                      "sync, 1 backup"] * 2  # fmt: skip
    assert all(result["gradients"] > 0 for result in results)
    assert noted[0] == "2 workers, none slow, async"
