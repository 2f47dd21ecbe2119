"""The status, and what a task counts, as Prometheus reads it: the text format, version 0.0.4.

Totals are counters, all else are gauges; rates are left to Prometheus, but for what it cannot
know. Names of tasks are the label ``task``. Texts (names of steps, errors) are not in it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psync.status.model import PsStatus, Status, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WORKER_STATES = (
    "connecting", "idle", "busy", "waiting", "leaving", "set aside", "lost", "left", "given up",
)  # fmt: skip
WORK_KINDS = ("compute", "pull", "push", "wait")
PS_STATES = ("unconnected", "connected", "silent", "broken", "lost")

Sample = tuple[Mapping[str, str], float]
Metric = tuple[str, str, Iterable[Sample]]
"""Name, help, and values by their labels."""

_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerStatus], float | None]], ...] = (
    ("worker_closures_total", "Closures finished since it joined.", lambda w: w.finished),
    ("worker_errors_total", "Closures that have raised.", lambda w: w.failed),
    ("worker_losses_total", "How often it was lost.", lambda w: w.losses),
    ("worker_closure_mean_seconds", "Seconds of its newest closures.", lambda w: w.mean_s),
    ("worker_running_seconds", "Seconds that its closure has run; 0: it holds none.",
     lambda w: 0.0 if w.closure is None else w.closure.seconds),
    ("worker_staleness", "Of its newest push, in steps.", lambda w: w.staleness),
    ("worker_dropped_total", "Its gradients that came too late.", lambda w: w.dropped),
)  # fmt: skip

_OF_PS: tuple[tuple[str, str, Callable[[PsStatus], float | None]], ...] = (
    ("ps_shards", "Shards that it holds.", lambda ps: ps.shards),
    ("ps_bytes", "Bytes of variables.", lambda ps: ps.bytes),
    ("ps_slot_bytes", "Bytes of optimizers' slots.", lambda ps: ps.slot_bytes),
    ("ps_pushes_total", "Gradients that have come in.", lambda ps: ps.pushes),
    ("ps_pulls_total", "Pulls that were answered.", lambda ps: ps.pulls),
    ("ps_bytes_in_per_second", "Bytes received.", lambda ps: ps.bytes_in_per_s),
    ("ps_bytes_out_per_second", "Bytes sent.", lambda ps: ps.bytes_out_per_s),
    ("ps_queue", "Updates that wait.", lambda ps: ps.queue),
    ("ps_duplicates_total", "Messages answered from memory.", lambda ps: ps.duplicates),
    ("ps_refused_total", "Messages refused.", lambda ps: ps.refused),
    ("ps_backup_behind", "Entries that its backup does not have yet.",
     lambda ps: None if ps.backup is None else ps.backup.behind),
)  # fmt: skip


def exposition(status: Status) -> str:
    """Return the text for a status."""
    queue, steps, groups = status.queue, status.steps, status.steps.groups
    now = {"queued": queue.queued, "in_flight": queue.in_flight, "waiting": queue.waiting}
    ended = {
        "finished": queue.finished, "failed": queue.failed, "exhausted": queue.exhausted,
        "cancelled": queue.cancelled,
    }  # fmt: skip
    pushes = [
        ({"optimizer": group.name, "outcome": outcome}, count)
        for group in groups
        for outcome, count in (
            ("accepted", group.accepted), ("dropped", group.dropped),
            ("duplicate", group.duplicates),
        )
    ]  # fmt: skip
    metrics: list[Metric] = [
        ("up_seconds", "Seconds since the coordinator began.", [({}, status.uptime_s)]),
        ("closures_open", "Closures that have not ended, by where they are.", _by("state", now)),
        ("closures_total", "Closures that have ended, by how.", _by("end", ended)),
        ("closures_again_total", "Closures put back: their worker was gone.",
         [({}, queue.put_back)]),
        ("global_step", "Steps of training.", [({}, steps.global_step)]),
        ("reported", "Values that the program has reported.", _by("name", status.reported)),
        ("pushes_by_staleness_total", "Pushes, by how many steps their values were old.",
         _by("staleness", steps.staleness)),
        ("synchronous_pushes_total", "Synchronous pushes, by what became of them.", pushes),
        ("synchronous_waiting", "Workers that wait for a synchronous step.",
         [({"optimizer": group.name}, len(group.waiting)) for group in groups]),
        ("worker_state", "1 for the state of the worker, else 0.",
         _states(status.workers, WORKER_STATES)),
    ]  # fmt: skip
    for name, text, of_worker in _OF_WORKERS:
        metrics.append((name, text, _known((w.task, of_worker(w)) for w in status.workers)))
    metrics.append(
        ("ps_state", "1 for the state of the ps, else 0.", _states(status.ps, PS_STATES))
    )
    known = [ps for ps in status.ps if ps.age_s is not None]
    for name, text, of_ps in _OF_PS:
        metrics.append((name, text, _known((ps.task, of_ps(ps)) for ps in known)))
    waiting = [
        ({"task": ps.task, "cause": cause}, count)
        for ps in known
        for cause, count in ps.waiting.items()
    ]
    metrics.append(("ps_waiting", "Updates that wait, by what they wait for.", waiting))
    return _text(metrics)


def _by(label: str, values: Mapping[str, float]) -> list[Sample]:
    return [({label: name}, value) for name, value in values.items()]


def _states(tasks: Iterable[WorkerStatus | PsStatus], states: Iterable[str]) -> list[Sample]:
    return [
        ({"task": each.task, "state": state}, each.state == state)
        for each in tasks
        for state in states
    ]


def _known(values: Iterable[tuple[str, float | None]]) -> list[Sample]:
    return [({"task": task}, value) for task, value in values if value is not None]


def task_exposition(task: str, counters: Mapping[str, Any]) -> str:
    """Return the text for what a ps or a worker counts itself.

    Args:
        task: "/job:ps/task:0".
        counters: As its ``statistics()``.
    """
    network = {
        "bytes_borrowed": 0, "bytes_lent": 0, "bytes_lent_now": 0, "bytes_kept_now": 0,
        **counters["network"],
    }  # fmt: skip
    values = [
        ("connections", "Connections that it has.", network["connections"]),
        ("received_bytes_total", "Bytes received.", network["bytes_received"]),
        ("sent_bytes_total", "Bytes sent.", network["bytes_sent"]),
        ("borrowed_bytes_total", "Bytes that tasks of its host have lent it.",
         network["bytes_borrowed"]),
        ("lent_bytes_total", "Bytes lent to tasks of its host.", network["bytes_lent"]),
        ("lent_now_bytes", "Bytes that tasks of its host have not given back.",
         network["bytes_lent_now"]),
        ("kept_now_bytes", "Bytes that it reads where tasks of its host have them.",
         network["bytes_kept_now"]),
    ]  # fmt: skip
    if "store" in counters:
        store, ledger, backup = counters["store"], counters["ledger"], counters["backup"]
        values += [
            ("pushes_total", "Gradients that have come in.", counters["pushes"]),
            ("pulls_total", "Pulls that were answered.", counters["pulls"] + counters["row_pulls"]),
            ("staged_total", "Parts of synchronous pushes.", counters["staging"]["staged"]),
            ("applies_total", "Updates of shards.", store["applies"]),
            ("queue", "Updates that wait.", sum(counters["waiting"].values())),
            ("shards", "Shards that it holds.", store["shards"]),
            ("bytes", "Bytes of variables.", store["bytes"]),
            ("slot_bytes", "Bytes of optimizers' slots.", store["slot_bytes"]),
            ("duplicates_total", "Messages answered from memory.",
             ledger["duplicate"] + ledger["already_applied"]),
            ("refused_total", "Messages refused.", ledger["fenced"] + ledger["refused"]),
        ]  # fmt: skip
        if backup["state"] in ("paired", "copying"):
            behind = backup["entries"] - backup["taken"]
            values.append(("backup_behind", "Entries that its backup does not have yet.", behind))
    labels = {"task": task}
    found: list[Metric] = [(f"task_{name}", text, [(labels, n)]) for name, text, n in values]
    if waiting := counters.get("waiting"):
        by_cause = [({**labels, "cause": cause}, count) for cause, count in waiting.items()]
        found.append(("task_waiting", "Updates that wait, by what they wait for.", by_cause))
    if work := counters.get("work"):
        seconds = [({**labels, "kind": kind}, work[kind]) for kind in WORK_KINDS]
        found.append(("task_work_seconds_total", "What its time went to.", seconds))
    if "staleness" in counters:
        counts = counters["staleness"]["counts"].items()
        stale = [({**labels, "staleness": steps}, count) for steps, count in counts]
        found.append(("task_pushes_by_staleness_total", "Pushes, by how old they were.", stale))
    return _text(found)


def _text(metrics: Iterable[Metric]) -> str:
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = []
    for name, text, samples in metrics:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        families.append(family := kind(f"psync_{name}", text))
        for labels, value in samples:
            family.add_sample(f"psync_{name}", dict(labels), float(value))
    registry: Any = types.SimpleNamespace(collect=lambda: families)
    return generate_latest(registry).decode()
