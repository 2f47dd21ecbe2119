"""Figures of a run."""

from __future__ import annotations

import pytest

from bench_runs import asynchronous_run, push, run_of, synchronous_run
from psync.bench.figures import backup_figures, figures_of
from psync.bench.modes import Mode


def test_rates_count_what_was_accepted() -> None:
    figures = figures_of(synchronous_run(), "one slow")
    assert (figures["mode"], figures["workers"], figures["setting"]) == (
        "sync, 1 backup", 3, "one slow",
    )  # fmt: skip
    assert figures["seconds"] == 2.5
    assert figures["gradients_per_s"] == pytest.approx(4 / 2.5)
    assert figures["examples_per_s"] == pytest.approx(16 * 4 / 2.5)
    assert figures["updates_per_s"] == pytest.approx(2 / 2.5)
    assert (figures["dropped"], figures["dropped_share"]) == (1, 0.2)


def test_staleness_is_counted_apart_for_accepted_and_dropped_gradients() -> None:
    figures = figures_of(synchronous_run(), "one slow")
    assert (figures["staleness"], figures["staleness_of_dropped"]) == ({0: 4}, {1: 1})
    figures = figures_of(asynchronous_run(), "none slow")
    assert (figures["staleness"], figures["mean_staleness"]) == ({0: 2, 1: 2}, 0.5)


def test_the_time_to_a_loss_is_that_of_the_first_look() -> None:
    run = asynchronous_run()
    assert run.time_to_loss(0.6) == 1.0
    assert run.time_to_loss(0.5) == 2.0
    assert run.time_to_loss(0.1) is None


def test_steps_with_a_slow_gradient_are_told_from_others_by_their_time() -> None:
    pushes = [[push(1.0, 1), push(2.1, 2), push(6.0, 3), push(7.0, 4)]]
    figures = backup_figures(run_of(Mode(1, backups=0), pushes, 4, [2.0]))
    assert figures["without_slow"] == 0.75
    assert figures["mean_step_s"] == 1.75
