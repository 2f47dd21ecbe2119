"""The status, and what a task counts, as Prometheus reads it: the text format, version 0.0.4.

Totals are counters, all else are gauges; rates are left to Prometheus, but for what it cannot
know. Names of tasks are the label ``task``. Texts (names of steps, errors) are not in it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from psync.status.model import PsStatus, Status, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WORKER_STATES = (
    "connecting", "idle", "busy", "waiting", "leaving", "set aside", "lost", "left", "given up",
)  # fmt: skip
WORK_KINDS = ("compute", "pull", "push", "wait")
PS_STATES = ("unconnected", "connected", "silent", "broken", "lost")


class _Metric(NamedTuple):
    name: str
    help: str
    samples: Iterable[tuple[Mapping[str, str], float]]


def exposition(status: Status) -> str:
    """Return the text for a status."""
    return _text((*_cluster(status), *_workers(status.workers), *_ps(status.ps)))


def task_exposition(task: str, counters: Mapping[str, Any]) -> str:
    """Return the text for what a ps or a worker counts itself.

    Args:
        task: "/job:ps/task:0".
        counters: As its ``statistics()``.
    """
    network = counters["network"]
    metrics = [
        ("task_connections", "Connections that it has.", network["connections"]),
        ("task_received_bytes_total", "Bytes received.", network["bytes_received"]),
        ("task_sent_bytes_total", "Bytes sent.", network["bytes_sent"]),
        (
            "task_borrowed_bytes_total",
            "Bytes that tasks of its host have lent it.",
            network.get("bytes_borrowed", 0),
        ),
        ("task_lent_bytes_total", "Bytes lent to tasks of its host.", network.get("bytes_lent", 0)),
        (
            "task_lent_now_bytes",
            "Bytes that tasks of its host have not given back.",
            network.get("bytes_lent_now", 0),
        ),
        (
            "task_kept_now_bytes",
            "Bytes that it reads where tasks of its host have them.",
            network.get("bytes_kept_now", 0),
        ),
        *(_of_ps(counters) if "store" in counters else ()),
    ]
    labels = {"task": task}
    found = [_Metric(name, text, [(labels, value)]) for name, text, value in metrics]
    if work := counters.get("work"):
        seconds = [({**labels, "kind": kind}, work[kind]) for kind in WORK_KINDS]
        found.append(_Metric("task_work_seconds_total", "What its time went to.", seconds))
    if "staleness" in counters:
        counts = counters["staleness"]["counts"].items()
        stale = [({**labels, "staleness": steps}, count) for steps, count in counts]
        found.append(
            _Metric("task_pushes_by_staleness_total", "Pushes, by how old they were.", stale)
        )
    return _text(found)


def _of_ps(counters: Mapping[str, Any]) -> Iterable[tuple[str, str, float]]:
    store, ledger, backup = counters["store"], counters["ledger"], counters["backup"]
    yield "task_pushes_total", "Gradients that have come in.", counters["pushes"]
    yield "task_pulls_total", "Pulls that were answered.", counters["pulls"] + counters["row_pulls"]
    yield "task_staged_total", "Parts of synchronous pushes.", counters["staging"]["staged"]
    yield "task_applies_total", "Updates of shards.", store["applies"]
    yield "task_queue", "Updates that wait.", counters["queue"]
    yield "task_shards", "Shards that it holds.", store["shards"]
    yield "task_bytes", "Bytes of variables.", store["bytes"]
    yield "task_slot_bytes", "Bytes of optimizers' slots.", store["slot_bytes"]
    again = ledger["duplicate"] + ledger["already_applied"]
    yield "task_duplicates_total", "Messages answered from memory.", again
    yield "task_refused_total", "Messages refused.", ledger["fenced"] + ledger["refused"]
    if backup["state"] in ("paired", "copying"):
        behind = backup["entries"] - backup["taken"]
        yield "task_backup_behind", "Entries that its backup does not have yet.", behind


def _text(metrics: Iterable[_Metric]) -> str:
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = []
    for metric in metrics:
        kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
        families.append(family := kind(f"psync_{metric.name}", metric.help))
        for labels, value in metric.samples:
            family.add_sample(f"psync_{metric.name}", dict(labels), float(value))
    registry: Any = types.SimpleNamespace(collect=lambda: families)
    return generate_latest(registry).decode()


def _cluster(status: Status) -> list[_Metric]:
    queue, steps = status.queue, status.steps
    now = {"queued": queue.queued, "in_flight": queue.in_flight, "waiting": queue.waiting}
    ended = {
        "finished": queue.finished, "failed": queue.failed, "exhausted": queue.exhausted,
        "cancelled": queue.cancelled,
    }  # fmt: skip
    return [
        _one("up_seconds", "Seconds since the coordinator began.", status.uptime_s),
        _Metric(
            "closures_open", "Closures that have not ended, by where they are.",
            [({"state": state}, count) for state, count in now.items()],
        ),
        _Metric(
            "closures_total", "Closures that have ended, by how.",
            [({"end": end}, count) for end, count in ended.items()],
        ),
        _one("closures_again_total", "Closures put back: their worker was gone.", queue.put_back),
        _one("global_step", "Steps of training.", steps.global_step),
        _Metric(
            "reported", "Values that the program has reported.",
            [({"name": name}, value) for name, value in status.reported.items()],
        ),
        _Metric(
            "pushes_by_staleness_total", "Pushes, by how many steps their values were old.",
            [({"staleness": steps}, count) for steps, count in steps.staleness.items()],
        ),
        _Metric(
            "synchronous_pushes_total", "Synchronous pushes, by what became of them.",
            [
                ({"optimizer": group.name, "outcome": outcome}, count)
                for group in steps.groups
                for outcome, count in (
                    ("accepted", group.accepted), ("dropped", group.dropped),
                    ("duplicate", group.duplicates),
                )
            ],
        ),
        _Metric(
            "synchronous_waiting", "Workers that wait for a synchronous step.",
            [({"optimizer": group.name}, len(group.waiting)) for group in steps.groups],
        ),
    ]  # fmt: skip


def _one(name: str, text: str, value: float) -> _Metric:
    return _Metric(name, text, [({}, value)])


def _workers(workers: Iterable[WorkerStatus]) -> list[_Metric]:
    workers = list(workers)

    def each(name: str, text: str, value: Callable[[WorkerStatus], float | None]) -> _Metric:
        values = [(worker.task, value(worker)) for worker in workers]
        return _Metric(name, text, [({"task": task}, v) for task, v in values if v is not None])

    states = [
        ({"task": worker.task, "state": state}, worker.state == state)
        for worker in workers
        for state in WORKER_STATES
    ]
    return [
        _Metric("worker_state", "1 for the state of the worker, else 0.", states),
        each("worker_closures_total", "Closures finished since it joined.", lambda w: w.finished),
        each("worker_errors_total", "Closures that have raised.", lambda w: w.failed),
        each("worker_losses_total", "How often it was lost.", lambda w: w.losses),
        each("worker_closure_mean_seconds", "Seconds of its newest closures.", lambda w: w.mean_s),
        each(
            "worker_running_seconds", "Seconds that its closure has run; 0: it holds none.",
            lambda w: 0.0 if w.closure is None else w.closure.seconds,
        ),
        each("worker_staleness", "Of its newest push, in steps.", lambda w: w.staleness),
        each("worker_dropped_total", "Its gradients that came too late.", lambda w: w.dropped),
    ]  # fmt: skip


def _ps(tasks: Iterable[PsStatus]) -> list[_Metric]:
    tasks = list(tasks)
    known = [ps for ps in tasks if ps.age_s is not None]

    def each(name: str, text: str, value: Callable[[PsStatus], float]) -> _Metric:
        return _Metric(name, text, [({"task": ps.task}, value(ps)) for ps in known])

    states = [
        ({"task": ps.task, "state": state}, ps.state == state)
        for ps in tasks
        for state in PS_STATES
    ]
    behind = [({"task": ps.task}, ps.backup.behind) for ps in known if ps.backup is not None]
    return [
        _Metric("ps_state", "1 for the state of the ps, else 0.", states),
        each("ps_shards", "Shards that it holds.", lambda ps: ps.shards),
        each("ps_bytes", "Bytes of variables.", lambda ps: ps.bytes),
        each("ps_slot_bytes", "Bytes of optimizers' slots.", lambda ps: ps.slot_bytes),
        each("ps_pushes_total", "Gradients that have come in.", lambda ps: ps.pushes),
        each("ps_pulls_total", "Pulls that were answered.", lambda ps: ps.pulls),
        each("ps_bytes_in_per_second", "Bytes received.", lambda ps: ps.bytes_in_per_s),
        each("ps_bytes_out_per_second", "Bytes sent.", lambda ps: ps.bytes_out_per_s),
        each("ps_queue", "Updates that wait.", lambda ps: ps.queue),
        each("ps_duplicates_total", "Messages answered from memory.", lambda ps: ps.duplicates),
        each("ps_refused_total", "Messages refused.", lambda ps: ps.refused),
        _Metric("ps_backup_behind", "Entries that its backup does not have yet.", behind),
    ]
