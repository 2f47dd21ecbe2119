"""The status of a cluster as JSON: there and back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from psync.errors import RemoteProtocolError
from psync.specs import ShardSpec, VariableSpec
from psync.status.model import (
    SCHEMA,
    BackupStatus,
    BoundStatus,
    EventStatus,
    GroupStatus,
    PsStatus,
    QueueStatus,
    RunningClosure,
    SeenError,
    ShardStatus,
    Status,
    StepsStatus,
    WorkerStatus,
    placement_of,
)

FULL = Status(
    time=1_800_000_000.5,
    pid=7,
    program="train.py",
    uptime_s=12.0,
    window_s=5.0,
    state="running",
    waits_for="nothing",
    queue=QueueStatus(queued=3, closures_per_s=2.5),
    steps=StepsStatus(
        9, 1.5, {"0": 3, "1": 1},
        (GroupStatus("sync", 9, 2, 1, ("/job:worker/task:0",), (), 1.5, 0, 17, 1, 0),),
        (BoundStatus(2, 4, 6, (), ()),),
    ),
    workers=(
        WorkerStatus("/job:worker/task:0", "a:1", "busy", RunningClosure(4, "step", 0.25)),
        WorkerStatus("/job:worker/task:1", "b:1", "lost", last_error=SeenError("it broke", 3.0)),
    ),
    ps=(
        PsStatus("/job:ps/task:0", "c:1", "connected", 0.0, backup=BackupStatus("paired", 2)),
        PsStatus("/job:ps/task:1", "d:1", "unconnected"),
    ),
    reported={"loss": 0.5},
    placement=(ShardStatus("w", 0, (4, 2), "float32", 32, 1),),
    notes=("a note",),
    events=(EventStatus("joined", "/job:worker/task:0 takes part", 10.0),),
)  # fmt: skip


def test_a_status_survives_its_json_form() -> None:
    assert Status.from_json(FULL.to_json()) == FULL
    assert Status.from_json(FULL.to_json().encode()) == FULL


def test_the_json_form_has_plain_names_and_a_schema() -> None:
    data = json.loads(FULL.to_json())
    assert data["schema"] == SCHEMA
    assert data["workers"][0]["closure"] == {"id": 4, "name": "step", "seconds": 0.25}
    assert data["steps"]["staleness"] == {"0": 3, "1": 1}
    assert data["ps"][1]["backup"] is None
    assert data["placement"] == [
        {"variable": "w", "shard": 0, "shape": [4, 2], "dtype": "float32", "nbytes": 32, "ps": 1}
    ]


def test_each_status_has_its_own_placement() -> None:
    other = dataclasses.replace(FULL, placement=())
    for status in (FULL, other, FULL):
        assert Status.from_json(status.to_json()) == status


def test_a_loss_that_is_no_number_is_null() -> None:
    status = dataclasses.replace(FULL, reported={"loss": math.nan, "norm": math.inf, "epoch": 1.0})
    reported = json.loads(status.to_json())["reported"]
    assert reported == {"loss": None, "norm": None, "epoch": 1.0}
    again = Status.from_json(status.to_json()).reported
    assert (math.isnan(again["loss"]), again["epoch"]) == (True, 1.0)


def test_fields_of_a_later_version_are_passed_over() -> None:
    data = json.loads(FULL.to_json())
    data["workers"][0]["temperature"] = 300
    data["weather"] = "fine"
    assert Status.from_json(json.dumps(data)) == FULL


def test_a_field_that_an_earlier_version_lacks_has_its_default() -> None:
    data = json.loads(FULL.to_json())
    del data["workers"][0]["closures_per_s"], data["events"]
    status = Status.from_json(json.dumps(data))
    assert status.workers[0].closures_per_s == 0.0
    assert status.events == ()


def test_a_shard_names_the_device_as_tensorflow_does() -> None:
    assert (
        ShardStatus("w", 0, (2,), "float32", 8, 3).device == "/job:ps/replica:0/task:3/device:CPU:0"
    )


def test_each_shard_of_each_variable_has_its_place() -> None:
    shards = tuple(ShardSpec("w", 0, n, 2 * n, (2, 3), "float32", n) for n in range(2))
    w = VariableSpec("w", 0, (4, 3), "float32", True, shards, "")
    assert placement_of([w]) == (
        ShardStatus("w", 0, (2, 3), "float32", 24, 0),
        ShardStatus("w", 1, (2, 3), "float32", 24, 1),
    )


def test_what_is_no_status_is_refused() -> None:
    for text in ["", "[]", "{}", "3", '{"schema": 1}', '{"schema": 1, "ps": 3}']:
        with pytest.raises(RemoteProtocolError, match="expected"):
            Status.from_json(text)


def test_another_schema_is_refused_by_its_number() -> None:
    with pytest.raises(RemoteProtocolError, match=f"of schema {SCHEMA}, got 2"):
        Status.from_json('{"schema": 2}')
