"""How many gradients are late: the model, and samples of it."""

from __future__ import annotations

import numpy as np
import pytest

from psync.bench import draws


def test_the_model_gives_the_expected_shares_of_steps_without_a_slow_gradient() -> None:
    shares = [round(100 * draws.share_without_slow(backups)) for backups in range(6)]
    assert shares == [30, 60, 80, 91, 96, 98]


def test_probabilities_sum_to_one_and_have_the_mean_of_the_model() -> None:
    probabilities = draws.beta_binomial(100, 3.1, 209.7)
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities @ np.arange(101) == pytest.approx(100 * 3.1 / (3.1 + 209.7))


def test_a_uniform_probability_makes_all_counts_equally_likely() -> None:
    assert draws.beta_binomial(4, 1, 1) == pytest.approx([0.2] * 5)


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


def test_the_same_seed_draws_the_same() -> None:
    first, again, other = (draws.compute_seconds(20, 100, seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
