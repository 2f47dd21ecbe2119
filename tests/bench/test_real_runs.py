"""Training in real processes, in short runs."""

from __future__ import annotations

import numpy as np
import pytest

from psync import LocalCluster
from psync.bench.modes import Mode
from psync.bench.real_runs import MEAN_S, SETTINGS, SPREAD, SleepPace, run_one

pytest.importorskip("sklearn")


def test_times_spread_round_their_mean_and_are_the_same_each_time() -> None:
    drawn = np.array([SleepPace(None).seconds(0, index) for index in range(200)])
    assert drawn.min() >= MEAN_S * (1 - SPREAD)
    assert drawn.max() <= MEAN_S * (1 + SPREAD)
    assert drawn.mean() == pytest.approx(MEAN_S, rel=0.05)
    assert drawn[7] == SleepPace(None).seconds(0, 7)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_run_is_checked_and_tells_its_setting(setting: str) -> None:
    async with LocalCluster(2, 2, processes=False) as cluster:  # test_bench.py has real ones
        figures = await run_one(cluster, Mode(2, backups=0), setting, 0.3)
    assert (figures["mode"], figures["setting"]) == ("sync", setting)
    assert figures["gradients"] > 0
    assert figures["seconds"] <= 0.3
