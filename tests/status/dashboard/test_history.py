"""What the page knows of the past."""

from __future__ import annotations

import math

from psync.status.dashboard.history import (
    LANE_CELLS,
    MAX_PS,
    MAX_ROWS,
    History,
    Thinned,
    columns,
    row_of,
)
from psync.status.model import QueueStatus, StepsStatus
from statuses import ps, shares, status, worker

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"


def test_series_tell_rates_and_states() -> None:
    row = row_of(
        status(
            worker(0), worker(1, "lost"), worker(2, "waiting"), worker(3, "idle"),
            worker(4, "left"),
            queue=QueueStatus(queued=3, in_flight=2, closures_per_s=123.456),
            steps=StepsStatus(steps_per_s=2.0),
        )
    )  # fmt: skip
    assert row == {
        "time": 1000.0, "closures": 123.5, "steps": 2.0, "queued": 3, "in_flight": 2,
        "busy": 1, "waiting": 1, "idle": 1, "gone": 2,
    }  # fmt: skip


def test_shares_are_means_over_workers_in_percent() -> None:
    row = row_of(
        status(worker(work=shares(0.5, 0.1, 0.1, 0.1)), worker(1, work=shares(0.7)), worker(2))
    )
    names = ("compute", "pull", "push", "wait", "free")
    assert [row[name] for name in names] == [60.0, 5.0, 5.0, 5.0, 25.0]


def test_traffic_of_few_ps_tasks_and_of_many() -> None:
    one = row_of(status(ps(0, bytes_in_per_s=10.0, bytes_out_per_s=20.0)))
    assert (one["in ps 0"], one["out ps 0"]) == (10.0, 20.0)
    many = [ps(index, bytes_in_per_s=1.0, bytes_out_per_s=index) for index in range(MAX_PS + 1)]
    row = row_of(status(*many))
    assert (row["in all ps"], row["out all ps"], row["out busiest ps"]) == (5.0, 10.0, 4.0)
    assert "out ps 0" not in row


def test_reported_values_may_be_missing() -> None:
    row = row_of(status(reported={"epoch": 7, "loss": 0.123456, "accuracy": math.nan}))
    assert (row["reported loss"], row["reported accuracy"]) == (0.1235, None)
    assert "reported epoch" not in row


def test_series_have_one_length() -> None:
    assert columns([{"a": 1.0}, {"a": 2.0, "b": 3.0}]) == {"a": [1.0, 2.0], "b": [None, 3.0]}
    assert History().series("run") == History().series("recent") == {}


def test_a_whole_run_is_thinned_out_and_ends_with_the_newest_moment() -> None:
    kept = Thinned(limit=4)
    rows = [{"time": float(at)} for at in range(12)]
    for row in rows:
        kept.add(row)
    assert [row["time"] for row in kept.rows()] == [0, 4, 8]
    assert [row["time"] for row in kept.rows(rows[-1])] == [0, 4, 8, 11]
    assert [row["time"] for row in kept.rows(kept.rows()[-1])] == [0, 4, 8]


def test_a_long_run_stays_within_bounds() -> None:
    history = History()
    for second in range(3 * MAX_ROWS):
        history.add(status(worker(), at=float(second)))
    run, recent = history.series("run")["time"], history.series("recent")["time"]
    assert (run[0], run[-1]) == (0, 3 * MAX_ROWS - 1)
    assert MAX_ROWS / 2 <= len(run) <= MAX_ROWS + 1
    assert (len(recent), recent[-1]) == (301, 3 * MAX_ROWS - 1)
    times, (lane,) = history.lanes([W0])
    assert len(times) == len(lane) == LANE_CELLS


def test_lanes_of_workers_that_come_and_go() -> None:
    history = History()
    history.add(status(worker(0), at=1.0))
    history.add(status(worker(0, "lost"), worker(1, work=shares(0.5, 0.2, 0.1, 0.004)), at=2.0))
    history.add(status(worker(1, "idle"), at=3.0))
    times, (first, second, never) = history.lanes([W0, W1, "/job:worker/task:9"])
    unknown = (-1, -1, -1, -1)
    assert times == [1, 2, 3]
    assert first == [("busy", *unknown), ("lost", *unknown), None]
    assert second == [None, ("busy", 50, 20, 10, 0), ("idle", *unknown)]
    assert never == [None, None, None]


def test_a_worker_that_is_long_gone_is_forgotten() -> None:
    history = History()
    history.add(status(worker(0), at=0.0))
    for second in range(LANE_CELLS + 1):
        history.add(status(at=1.0 + second))
    assert not any(history.lanes([W0])[1][0])
    assert history._lanes == {}
