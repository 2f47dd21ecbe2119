"""Metrics as text; those of a real cluster, read by Prometheus's own parser: tests/integrations."""

from __future__ import annotations

import dataclasses
import re

import pytest

from psync.status.exposition import exposition, task_exposition
from psync.status.model import (
    BackupStatus,
    GroupStatus,
    PsStatus,
    QueueStatus,
    RunningClosure,
    Status,
    StepsStatus,
    WorkerStatus,
)

pytest.importorskip("prometheus_client")

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"

STATUS = Status(
    time=1.0, pid=7, program="train.py", uptime_s=12.5, window_s=5.0, state="running",
    waits_for="nothing", reported={"loss": 0.25},
    queue=QueueStatus(queued=3, in_flight=2, finished=9, failed=1, put_back=4),
    steps=StepsStatus(
        9, 1.5, {"0": 3, "2": 1}, (GroupStatus("sync", 9, 2, 1, (W0,), (W1,), 1.5, 0, 17, 4, 2),)
    ),
    workers=(
        WorkerStatus(W0, "a:1", "waiting", RunningClosure(4, "step", 0.25), finished=8,
                     mean_s=0.5, staleness=2, dropped=3),
        WorkerStatus(W1, "b:1", "lost", losses=1, failed=1),
    ),
    ps=(
        PsStatus("/job:ps/task:0", "c:1", "connected", 0.0, 2, 800, 400, 15, 22,
                 bytes_in_per_s=10.0, queue=1, backup=BackupStatus("paired", 6)),
        PsStatus("/job:ps/task:1", "d:1", "unconnected"),
    ),
)  # fmt: skip


def values(status: Status = STATUS) -> dict[str, float]:
    lines = exposition(status).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_counters_and_gauges_have_the_numbers_of_the_status() -> None:
    found = values()
    assert found["psync_up_seconds"] == 12.5
    assert found['psync_reported{name="loss"}'] == 0.25
    assert found['psync_closures_open{state="queued"}'] == 3
    assert found['psync_closures_total{end="finished"}'] == 9
    assert found["psync_closures_again_total"] == 4
    assert found['psync_pushes_by_staleness_total{staleness="2"}'] == 1
    assert found['psync_synchronous_pushes_total{optimizer="sync",outcome="dropped"}'] == 4
    assert found['psync_synchronous_waiting{optimizer="sync"}'] == 1
    assert found['psync_synchronous_lacks{optimizer="sync"}'] == 0
    assert found[f'psync_worker_closure_mean_seconds{{task="{W0}"}}'] == 0.5
    assert found[f'psync_worker_running_seconds{{task="{W0}"}}'] == 0.25
    assert found[f'psync_worker_running_seconds{{task="{W1}"}}'] == 0
    assert found[f'psync_worker_losses_total{{task="{W1}"}}'] == 1
    assert found['psync_ps_bytes{task="/job:ps/task:0"}'] == 800
    assert found['psync_ps_backup_behind{task="/job:ps/task:0"}'] == 6


def test_each_task_is_in_one_state() -> None:
    found = values()
    on = [name for name, value in found.items() if "_state{" in name and value == 1]
    assert on == [
        f'psync_worker_state{{state="waiting",task="{W0}"}}',
        f'psync_worker_state{{state="lost",task="{W1}"}}',
        'psync_ps_state{state="connected",task="/job:ps/task:0"}',
        'psync_ps_state{state="unconnected",task="/job:ps/task:1"}',
    ]


def test_what_is_not_known_is_left_out() -> None:
    names = " ".join(values())
    assert f'mean_seconds{{task="{W1}"}}' not in names
    assert 'psync_ps_bytes{task="/job:ps/task:1"}' not in names


def test_every_metric_has_its_type() -> None:
    text = exposition(STATUS)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert kinds["psync_closures_total"] == "counter"
    assert kinds["psync_closures_open"] == "gauge"
    assert {name.partition("{")[0] for name in values()} <= set(kinds)
    assert text.endswith("\n")


def test_labels_are_escaped() -> None:
    group = dataclasses.replace(STATUS.steps.groups[0], name='a "b"\\\n')
    status = dataclasses.replace(STATUS, steps=StepsStatus(groups=(group,)))
    assert r'psync_synchronous_waiting{optimizer="a \"b\"\\\n"} 1.0' in exposition(status)


PS_COUNTERS = {
    "network": {"connections": 3, "bytes_received": 500, "bytes_sent": 40},
    "store": {"applies": 12, "shards": 4, "bytes": 800, "slot_bytes": 400},
    "ledger": {"duplicate": 1, "already_applied": 2, "fenced": 3, "refused": 4},
    "backup": {"state": "paired", "entries": 9, "taken": 7},
    "staging": {"staged": 5, "parts": 0, "stale": 0}, "pushes": 6, "pulls": 7, "row_pulls": 8,
    "waiting": {"gate": 0, "lock": 2, "backup": 1, "compute": 0},
}  # fmt: skip


def task_values(task: str, counters: dict[str, object]) -> dict[str, float]:
    text = task_exposition(task, counters)
    pairs = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in pairs}


def test_a_ps_says_what_it_counts_itself() -> None:
    found = task_values("/job:ps/task:0", PS_COUNTERS)
    label = '{task="/job:ps/task:0"}'
    assert found[f"psync_task_sent_bytes_total{label}"] == 40
    assert found[f"psync_task_pulls_total{label}"] == 15
    assert found[f"psync_task_duplicates_total{label}"] == 3
    assert found[f"psync_task_refused_total{label}"] == 7
    assert found[f"psync_task_backup_behind{label}"] == 2
    assert found[f"psync_task_queue{label}"] == 3
    assert found['psync_task_waiting{cause="lock",task="/job:ps/task:0"}'] == 2
    alone = task_values("/job:ps/task:0", {**PS_COUNTERS, "backup": {"state": "alone"}})
    assert f"psync_task_backup_behind{label}" not in alone


def test_a_worker_says_what_its_time_went_to_and_how_old_its_pushes_were() -> None:
    counters = {
        "network": PS_COUNTERS["network"],
        "work": {"compute": 1.0, "pull": 2.0, "push": 3.0, "wait": 4.0},
        "staleness": {"counts": {"0": 5, "2": 1}},
    }
    found = task_values(W0, counters)
    assert found[f'psync_task_work_seconds_total{{kind="push",task="{W0}"}}'] == 3
    assert found[f'psync_task_pushes_by_staleness_total{{staleness="2",task="{W0}"}}'] == 1
    assert f'psync_task_applies_total{{task="{W0}"}}' not in found
