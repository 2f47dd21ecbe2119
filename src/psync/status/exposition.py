"""The status, and what a task counts, as Prometheus reads it: the text format, version 0.0.4.

Totals are counters, all else are gauges; rates are left to Prometheus, but for what it cannot
know. Names of tasks are the label ``task``. Texts (names of steps, errors) are not in it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from psync.client.counters import KINDS
from psync.status.model import PsStatus, Status, WorkerStatus
from psync.status.rates import WITH_BACKUP, ps_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WORKER_STATES = (
    "connecting", "idle", "busy", "waiting", "leaving", "set aside", "lost", "left", "given up",
)  # fmt: skip
PS_STATES = ("unconnected", "connected", "silent", "broken", "lost")

Sample = tuple[Mapping[str, str], float]
Metric = tuple[str, str, Iterable[Sample]]
"""Name, help, and values by their labels."""

_OF_WORKERS: Mapping[str, tuple[str, Callable[[WorkerStatus], float | None]]] = {
    "closures_total": ("Closures finished since it joined.", lambda w: w.finished),
    "errors_total": ("Closures that have raised.", lambda w: w.failed),
    "losses_total": ("How often it was lost.", lambda w: w.losses),
    "closure_mean_seconds": ("Seconds of its newest closures.", lambda w: w.mean_s),
    "running_seconds": ("Seconds that its closure has run; 0: it holds none.",
                        lambda w: 0.0 if w.closure is None else w.closure.seconds),
    "staleness": ("Of its newest push, in steps.", lambda w: w.staleness),
    "dropped_total": ("Its gradients that came too late.", lambda w: w.dropped),
}  # fmt: skip

_OF_PS: Mapping[str, tuple[str, Callable[[PsStatus], float | None]]] = {
    "shards": ("Shards that it holds.", lambda ps: ps.shards),
    "bytes": ("Bytes of variables.", lambda ps: ps.bytes),
    "slot_bytes": ("Bytes of optimizers' slots.", lambda ps: ps.slot_bytes),
    "pushes_total": ("Gradients that have come in.", lambda ps: ps.pushes),
    "pulls_total": ("Pulls that were answered.", lambda ps: ps.pulls),
    "bytes_in_per_second": ("Bytes received.", lambda ps: ps.bytes_in_per_s),
    "bytes_out_per_second": ("Bytes sent.", lambda ps: ps.bytes_out_per_s),
    "queue": ("Updates that wait.", lambda ps: ps.queue),
    "duplicates_total": ("Messages answered from memory.", lambda ps: ps.duplicates),
    "refused_total": ("Messages refused.", lambda ps: ps.refused),
    "backup_behind": ("Entries that its backup does not have yet.",
                      lambda ps: None if ps.backup is None else ps.backup.behind),
}  # fmt: skip

_OF_NETWORK = (
    ("connections", "connections", "Connections that it has."),
    ("received_bytes_total", "bytes_received", "Bytes received."),
    ("sent_bytes_total", "bytes_sent", "Bytes sent."),
    ("borrowed_bytes_total", "bytes_borrowed", "Bytes that tasks of its host have lent it."),
    ("lent_bytes_total", "bytes_lent", "Bytes lent to tasks of its host."),
    ("lent_now_bytes", "bytes_lent_now", "Bytes that tasks of its host have not given back."),
    ("kept_now_bytes", "bytes_kept_now", "Bytes that it reads where tasks of its host have them."),
)


_OF_TASK = (
    "pushes_total", "pulls_total", "staged_total", "applies_total", "queue", "shards", "bytes",
    "slot_bytes", "duplicates_total", "refused_total", "backup_behind",
)  # fmt: skip
"""Of ``_OF_PS`` and others, what a ps counts itself."""


def exposition(status: Status) -> str:
    """Return the text for a status."""
    queue, steps, groups = status.queue, status.steps, status.steps.groups
    now = {"queued": queue.queued, "in_flight": queue.in_flight, "waiting": queue.waiting}
    ended = {
        "finished": queue.finished, "failed": queue.failed, "exhausted": queue.exhausted,
        "cancelled": queue.cancelled,
    }  # fmt: skip
    pushes: list[Sample] = []
    for each in groups:
        outcomes = {
            "accepted": each.accepted, "dropped": each.dropped, "duplicate": each.duplicates,
        }  # fmt: skip
        pushes += _by("outcome", outcomes, optimizer=each.name)
    known = [ps for ps in status.ps if ps.age_s is not None]
    return _text([
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
        *(_numbers("worker", status.workers, name, *how) for name, how in _OF_WORKERS.items()),
        ("ps_state", "1 for the state of the ps, else 0.", _states(status.ps, PS_STATES)),
        *(_numbers("ps", known, name, *how) for name, how in _OF_PS.items()),
        ("ps_waiting", "Updates that wait, by what they wait for.",
         [each for ps in known for each in _by("cause", ps.waiting, task=ps.task)]),
    ])  # fmt: skip


def _by(label: str, values: Mapping[str, float], **labels: str) -> list[Sample]:
    return [({**labels, label: name}, value) for name, value in values.items()]


def _states(tasks: Iterable[WorkerStatus | PsStatus], states: Iterable[str]) -> list[Sample]:
    return [
        sample
        for each in tasks
        for sample in _by("state", {name: each.state == name for name in states}, task=each.task)
    ]


T = TypeVar("T", WorkerStatus, PsStatus)


def _numbers(
    kind: str, tasks: Iterable[T], name: str, text: str, number: Callable[[T], float | None]
) -> Metric:
    """Return a metric of tasks, without those of which it is not known."""
    found = ((each.task, number(each)) for each in tasks)
    samples = [({"task": task}, value) for task, value in found if value is not None]
    return f"{kind}_{name}", text, samples


def task_exposition(task: str, counters: Mapping[str, Any]) -> str:
    """Return the text for what a ps or a worker counts itself.

    Args:
        task: "/job:ps/task:0".
        counters: As its ``statistics()``.
    """
    numbers: dict[str, tuple[str, float | None]] = {
        name: (text, counters["network"].get(key, 0)) for name, key, text in _OF_NETWORK
    }
    if "store" in counters:
        has_backup = counters["backup"]["state"] in WITH_BACKUP
        ps = ps_of(PsStatus(task, "", ""), counters, has_backups=has_backup)
        ps = replace(ps, pushes=counters["pushes"])  # without parts of synchronous ones
        ours = {name: (text, number(ps)) for name, (text, number) in _OF_PS.items()}
        ours["staged_total"] = "Parts of synchronous pushes.", counters["staging"]["staged"]
        ours["applies_total"] = "Updates of shards.", counters["store"]["applies"]
        numbers.update((name, ours[name]) for name in _OF_TASK)
    found: list[Metric] = [
        (f"task_{name}", text, [({"task": task}, number)])
        for name, (text, number) in numbers.items()
        if number is not None
    ]
    if waiting := counters.get("waiting"):
        by_cause = _by("cause", waiting, task=task)
        found.append(("task_waiting", "Updates that wait, by what they wait for.", by_cause))
    if work := counters.get("work"):
        seconds = _by("kind", {kind: work[kind] for kind in KINDS}, task=task)
        found.append(("task_work_seconds_total", "What its time went to.", seconds))
    if "staleness" in counters:
        stale = _by("staleness", counters["staleness"]["counts"], task=task)
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
