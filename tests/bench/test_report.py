"""Tables and findings."""

from __future__ import annotations

from typing import Any

from psync.bench import report


def result(mode: str, time: float | None, backups: int | None = None, **rates: float) -> Any:
    return {
        "mode": mode, "backups": backups, "time_to_loss_s": time, "target_loss": 0.5,
        "staleness": {0: 1, 7: 1}, "mean_staleness": 3.5, "dropped_share": 0.25,
        "gradients_per_s": 10.0, "examples_per_s": 1234.0, "updates_per_s": 0.5,
    } | rates  # fmt: skip


def test_a_line_of_the_table_of_modes() -> None:
    line = report.training_table([result("async", None)]).splitlines()[1]
    assert line.split() == "async 10 1,234 0.5 3.5 / 7 25.0% not reached".split()


def test_the_first_to_reach_the_loss_is_named() -> None:
    results = [result("async", 2.0), result("sync", 1.5, 0), result("bounded 2", None)]
    assert report.findings(results) == [
        '"sync" reached a loss of 0.5 first, after 1.50 s; async 2.00.'
    ]


def test_the_best_number_of_backups_is_named_by_time_and_by_rates() -> None:
    results = [
        result("sync", 3.0, 0, updates_per_s=1.0, gradients_per_s=4.0),
        result("sync, 1 backup", 2.0, 1, updates_per_s=2.0, gradients_per_s=6.0),
        result("sync, 2 backups", None, 2, updates_per_s=2.5, gradients_per_s=5.0),
    ]
    assert report.findings(results)[1:] == [
        "Best number of backups by seconds to the loss: 1 (0: 3, 1: 2).",
        "Best number of backups by gradients a second: 1 (0: 4, 1: 6, 2: 5).",
        "Best number of backups by updates a second: 2, the most that were tried "
        "(0: 1, 1: 2, 2: 2.5).",
    ]


def test_a_table_of_peers_shows_ratios_and_what_was_not_measured() -> None:
    own = {"min": 1400.0, "median": 1500.0, "max": 1600.0}
    other = {"min": 240.0, "median": 250.0, "max": 260.0, "ratio": 6.0}
    row = {"name": "pull, 1 MiB", "unit": "1/s", "systems": {"psync": own, "Ray": other}}
    assert report.peers_table([row], ["psync", "Ray", "torch"]).splitlines() == [
        "|  | psync | Ray | torch |",
        "| --- | ---: | ---: | ---: |",
        "| pull, 1 MiB, 1/s | 1,500 (1,400–1,600) | 250 (240–260), 6 × | – |",
    ]
