"""How many gradients are late: the model, and samples of it."""

from __future__ import annotations

import numpy as np
import pytest

from psync.bench import draws


def test_the_model_gives_the_expected_shares_of_steps_without_a_slow_gradient() -> None:
    shares = [round(100 * draws.share_without_slow(backups)) for backups in range(6)]
    assert shares == [30, 60, 80, 91, 96, 98]


@pytest.mark.parametrize("steps", [10, 50, 400])
def test_few_steps_have_the_shares_of_many(steps: int) -> None:
    slow = draws.compute_seconds(steps, draws.WORKERS, seed=3) > draws.NORMAL_S
    for backups in range(6):
        share = np.mean(slow.sum(axis=1) <= backups)
        assert share == pytest.approx(draws.share_without_slow(backups), abs=1 / steps)


def test_slow_gradients_take_what_was_asked_for() -> None:
    seconds = draws.compute_seconds(50, draws.WORKERS, seed=3)
    slow = seconds[seconds != draws.NORMAL_S]
    assert draws.SLOW_S[0] <= slow.min()
    assert slow.max() <= draws.SLOW_S[1]
