"""A run that goes on, and one that is read from its log."""

from __future__ import annotations

import json

import pytest

from psync.status.dashboard.run_log import FinishedRun, RunLog
from psync.status.dashboard.shows import LiveShow, LogShow, to_json
from psync.status.dashboard.view import LANE_CELLS
from psync.status.model import ShardStatus
from statuses import shares, status, worker
from view_schema import check_view

PLACED = (ShardStatus("w", 0, (2, 3), "float32", 24, 0),)
MOMENTS = 400


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    written = RunLog(path, "train.py")
    for at in range(MOMENTS):
        state = "lost" if at >= 200 else "busy"
        written.add(status(worker(0, state, work=shares(0.5)), at=1000.0 + at, placement=PLACED))
    written.close()
    return FinishedRun(path)


async def test_a_live_run_shows_its_newest_moment() -> None:
    show = LiveShow()
    assert (await show.view("recent", None), await show.status(None)) == ("{}", None)
    show.add(status(worker(), at=1.0))
    show.add(status(worker(0, "lost"), at=2.0))
    view = json.loads(await show.view("recent", None))
    check_view(view)
    assert (view["mode"], view["time"], view["series"]["time"]) == ("live", 2.0, [1.0, 2.0])
    assert (await show.status(5.0)) is show.newest


async def test_a_log_shows_the_end_or_any_moment(log: FinishedRun) -> None:
    show = LogShow(log)
    view = json.loads(await show.view("run", None))
    check_view(view)
    assert (view["mode"], view["ended"], view["time"]) == ("log", True, 1399.0)
    assert view["state"] == "ended"
    assert view["moments"] == {"first": 1000.0, "last": 1399.0}
    assert (view["series"]["time"][0], view["series"]["time"][-1]) == (1000.0, 1399.0)
    assert view["placement"][0]["total"] == "24 B, 1 shards"
    assert len(view["lanes"]["times"]) == LANE_CELLS
    view = json.loads(await show.view("recent", 1210.7))
    assert (view["time"], view["workers"][0]["state"]) == (1210.0, "lost")
    assert view["state"] == "running"
    assert (view["series"]["time"][0], view["series"]["time"][-1]) == (1000.0, 1210.0)
    (lane,) = view["lanes"]["rows"]
    assert [cell[0] for cell in lane[-12:]] == ["busy"] + ["lost"] * 11


async def test_moments_before_and_after_a_log_are_its_first_and_last(log: FinishedRun) -> None:
    show = LogShow(log)
    for time, found in ((0.0, 1000.0), (1000.0, 1000.0), (9e9, 1399.0), (None, 1399.0)):
        seen = await show.status(time)
        assert seen is not None
        assert seen.time == found
    assert json.loads(await show.view("recent", 0.0))["series"]["time"] == [1000.0]


def test_browsers_do_not_read_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"loss": float("nan")})
