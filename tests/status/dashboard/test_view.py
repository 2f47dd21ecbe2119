"""What the page shows, as data. The schema is what the page reads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from psync.errors import RemoteProtocolError
from psync.status.dashboard.view import (
    LANE_CELLS,
    MAX_PARTS,
    MAX_PS,
    MAX_ROWS,
    MAX_WORKERS,
    History,
    Thinned,
    columns,
    lanes,
    noticed,
    placement,
    ps_row,
    row_of,
    staleness,
    states,
    to_json,
    view_of,
    worker_row,
)
from psync.status.model import (
    BackupStatus,
    BoundStatus,
    EventStatus,
    GroupStatus,
    QueueStatus,
    RunningClosure,
    SeenError,
    ShardStatus,
    Status,
    StepsStatus,
)
from statuses import ps, shares, status, worker
from view_schema import check_view

GROUP = GroupStatus(
    "sync", 5, 3, 2, ("/job:worker/task:0",), ("/job:worker/task:1",), 1.5, 1, 60, 4, 2
)
BOUND = BoundStatus(3, 10, 14, ("/job:worker/task:0",), ("/job:worker/task:1",))


def full_status(num_workers: int = 3) -> Status:
    """One with everything in it."""
    error = SeenError("closure 7 (step): ValueError: x", 3.0)
    running = RunningClosure(7, "step", 1.0)
    return status(
        *(
            worker(index, closure=running, mean_s=0.1, staleness=2, dropped=3, losses=1,
                   last_error=error, work=shares(0.5, 0.1, 0.1, 0.2))
            for index in range(num_workers)
        ),
        ps(0, bytes=1 << 20, backup=BackupStatus("paired", 5), duplicates=3),
        ps(1, "unconnected", age_s=None),
        queue=QueueStatus(queued=3, in_flight=2, finished=1000, closures_per_s=100.0),
        steps=StepsStatus(5, 2.0, {"0": 30, "1": 10}, (GROUP,), (BOUND,)),
        notes=("/job:ps/task:0 is served in the process of /job:ps/task:1",),
        events=(EventStatus("joined", "/job:worker/task:0 takes part", 3.0),),
        reported={"loss": 0.5, "accuracy": math.inf},
    )  # fmt: skip


def shard(ps: int = 0, nbytes: int = 100, variable: str = "w", number: int = 0) -> ShardStatus:
    return ShardStatus(variable, number, (5, 5), "float32", nbytes, ps)


def test_it_has_its_schema() -> None:
    for num_workers in [0, 3, 100]:
        for placed in [(), (shard(),)]:
            history = History()
            seen = dataclasses.replace(full_status(num_workers), placement=placed)
            history.add(seen)
            history.add(seen)
            for span in ("recent", "run"):
                view = view_of(history.moments, history.series(span))
                check_view(json.loads(to_json(view)))


def test_of_nothing_at_all_it_has_its_schema_too() -> None:
    view = view_of([status()], {})
    check_view(json.loads(to_json(view)))
    assert set(view["missing"]) == {"loss", "staleness", "work", "placement"}
    assert set(view_of([full_status()], {})["missing"]) == {"placement"}
    assert view_of([status(placement=(shard(),))], {})["placement"] != []


def test_names_of_tasks_are_short() -> None:
    view = view_of([full_status()], {})
    assert view["events"] == [{"kind": "joined", "text": "worker 0 takes part", "ago": "3 s"}]
    assert view["notes"] == ["ps 0 is served in the process of ps 1"]


def test_tiles_are_the_numbers_of_the_run() -> None:
    tiles = view_of([full_status()], {})["tiles"]
    assert [(tile["name"], tile["value"]) for tile in tiles] == [
        ("closures/s", "100"), ("steps/s", "2.0"), ("queue", "3"), ("workers", "3"),
        ("ps traffic", "0 B/s"), ("loss", "0.5"), ("accuracy", "not finite"),
    ]  # fmt: skip


def test_rows_of_workers() -> None:
    row = worker_row(full_status().workers[0])
    assert row == {
        "task": "worker 0", "state": "busy", "rate": "0.0", "mean": "100 ms", "stale": "2",
        "dropped": "3", "losses": "1", "closure": "step 7", "since": "1 s",
        "error": "3 s ago: closure 7 (step): ValueError: x",
    }  # fmt: skip
    empty = {name for name, text in worker_row(worker()).items() if not text}
    assert empty == {"mean", "stale", "dropped", "losses", "closure", "since", "error"}


def test_of_many_workers_those_in_trouble_are_shown_then_the_slowest() -> None:
    many = [worker(index, mean_s=index / 100) for index in range(MAX_WORKERS)]
    assert noticed(many) == many
    many += [worker(900, "lost"), worker(901, last_error=SeenError("x", 1.0))]
    shown = [each.task.rpartition(":")[2] for each in noticed(many)]
    assert shown[:4] == ["900", "901", "39", "38"]
    assert len(shown) == MAX_WORKERS


def test_states_tell_how_slow_each_is() -> None:
    assert states([worker(0, mean_s=0.1), worker(1, "lost"), worker(2, mean_s=0.4)]) == [
        ["worker 0", "busy", 0.25], ["worker 1", "lost", 0.0], ["worker 2", "busy", 1.0],
    ]  # fmt: skip
    assert states([worker()]) == [["worker 0", "busy", 0.0]]


def test_rows_of_ps_tasks() -> None:
    assert ps_row(ps(1, "unconnected", age_s=None)) == {"task": "ps 1", "state": "unconnected"}
    row = ps_row(ps(0, bytes=1 << 20, backup=BackupStatus("paired", 5), duplicates=3))
    assert (row["variables"], row["backup"], row["duplicates"]) == (
        "1.0 MiB",
        "paired, 5 behind",
        "3",
    )
    assert ps_row(ps(0, backup=BackupStatus("alone", 0)))["backup"] == "alone"
    assert ps_row(ps(0))["backup"] == ""


def test_staleness_has_a_bar_for_each_up_to_15_then_ranges() -> None:
    counts = {"0": 50, "15": 10, "16": 5, "31": 15, "64": 10, "200": 5, "255": 5}
    bars = staleness(StepsStatus(staleness=counts))
    assert [(bar["label"], bar["count"], bar["height"], bar["share"]) for bar in bars] == [
        ("0", 50, 100, "50.0%"), ("15", 10, 20, "10.0%"), ("16–31", 20, 40, "20.0%"),
        ("64–127", 10, 20, "10.0%"), ("128+", 10, 20, "10.0%"),
    ]  # fmt: skip
    assert staleness(StepsStatus(staleness={"0": 0})) == staleness(StepsStatus()) == []


def test_groups_and_bounds() -> None:
    texts = [(each["text"], each["more"]) for each in view_of([full_status()], {})["groups"]]
    assert texts == [
        ("step 5, 1.5/s, 2 of 3 gradients, waits for worker 1",
         "60 accepted, 4 dropped, 2 duplicate, 1 partial steps"),
        ("rounds 10 to 14, worker 0 too far ahead of worker 1", "at most 3 rounds apart"),
    ]  # fmt: skip
    calm = StepsStatus(
        groups=(GroupStatus("s", 1, 2, 0, (), (), 1.0, 0, 0, 0, 0),),
        bounds=(BoundStatus(1, 2, 3, (), ()),),
    )  # fmt: skip
    texts = [(each["name"], each["text"]) for each in view_of([status(steps=calm)], {})["groups"]]
    assert texts == [("s", "step 1, 1.0/s, 0 of 2 gradients"), ("staleness bound", "rounds 2 to 3")]


def test_placement_is_in_percent_of_the_fullest_ps_largest_first() -> None:
    bars = placement([shard(0, 100), shard(0, 300, "v", 1), shard(1, 100)], 3)
    assert [(bar["task"], bar["total"]) for bar in bars] == [
        ("ps 0", "400 B, 2 shards"), ("ps 1", "100 B, 1 shards"), ("ps 2", "0 B, 0 shards"),
    ]  # fmt: skip
    first, second = bars[0]["parts"]
    assert (first["name"], first["width"], first["text"]) == (
        "v [1]", 75.0, "v [1]: (5, 5) float32, 300 B",
    )  # fmt: skip
    assert second["colour"] == bars[1]["parts"][0]["colour"] != first["colour"]


def test_of_many_shards_the_smallest_are_one_piece() -> None:
    (bar,) = placement([shard(0, 10 + number, "w", number) for number in range(MAX_PARTS + 2)], 1)
    assert len(bar["parts"]) == MAX_PARTS + 1
    assert bar["parts"][-1]["name"] == "2 more shards, 21 B"


def places(data: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(data, list):
        data = dict(enumerate(data))
    for key, value in data.items() if isinstance(data, dict) else ():
        yield from places(value, *place, key)


@pytest.mark.promise("input.status-refused-or-shown")
def test_whatever_a_status_says_it_is_refused_or_shown() -> None:
    for value in [
        None,
        True,
        -1,
        1.5,
        "x",
        "",
        [],
        {},
        [1],
        [None],
        {"a": 1},
        {"": None},
        10**30,
        10**18 - 1,
        1e308,
        math.nan,
        math.inf,
        "\ud800",
    ]:
        whole = status(
            dataclasses.replace(
                worker(), closure=RunningClosure(4, "step", 0.5), last_error=SeenError("x", 1.0),
                work=shares(0.5),
            ),
            ps(),
            steps=StepsStatus(
                9, 1.5, {"0": 3}, (GROUP,), (BoundStatus(2, 1, 3, ("a",), ("b",)),)
            ),
            queue=QueueStatus(), reported={"loss": 0.5}, notes=("a note",),
            events=(EventStatus("lost", "text", 1.0),),
            placement=(ShardStatus("w", 0, (2, 3), "float32", 24, 1),),
        )  # fmt: skip
        text = whole.to_json()
        for place in list(places(json.loads(text)))[1:]:
            data = json.loads(text)
            parent = data
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            try:
                read = Status.from_json(json.dumps(data))
            except RemoteProtocolError:
                continue
            view = view_of([read], columns([row_of(read)]))
            json.dumps(view, allow_nan=False)
            read.to_json()


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


def test_a_whole_run_is_thinned_out() -> None:
    kept: Thinned[int] = Thinned(4)
    for at in range(12):
        kept.add(at)
    assert kept.kept == [0, 4, 8]
    assert kept.with_newest() == [0, 4, 8, 11]


def test_a_long_run_stays_within_bounds() -> None:
    history = History()
    for second in range(3 * MAX_ROWS):
        history.add(status(worker(), at=float(second)))
    run, recent = history.series("run")["time"], history.series("recent")["time"]
    assert (run[0], run[-1]) == (0, 3 * MAX_ROWS - 1)
    assert MAX_ROWS / 2 <= len(run) <= MAX_ROWS + 1
    assert (len(recent), recent[-1]) == (301, 3 * MAX_ROWS - 1)
    shown = lanes(history.moments, [W0])
    assert len(shown["times"]) == len(shown["rows"][0]) == LANE_CELLS


def test_lanes_of_workers_that_come_and_go() -> None:
    history = History()
    history.add(status(worker(0), at=1.0))
    history.add(status(worker(0, "lost"), worker(1, work=shares(0.5, 0.2, 0.1, 0.004)), at=2.0))
    history.add(status(worker(1, "idle"), at=3.0))
    shown = lanes(history.moments, [W0, W1, "/job:worker/task:9"])
    first, second, never = shown["rows"]
    unknown = (-1, -1, -1, -1)
    assert shown["times"] == [1, 2, 3]
    assert first == [("busy", *unknown), ("lost", *unknown), None]
    assert second == [None, ("busy", 50, 20, 10, 0), ("idle", *unknown)]
    assert never == [None, None, None]


def test_a_worker_that_is_long_gone_is_forgotten() -> None:
    history = History()
    history.add(status(worker(0), at=0.0))
    for second in range(LANE_CELLS + 1):
        history.add(status(at=1.0 + second))
    assert not any(lanes(history.moments, [W0])["rows"][0])
