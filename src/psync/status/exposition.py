"""The status, and what a task counts, as Prometheus reads it: the text format, version 0.0.4.

Totals are counters, all else are gauges; rates are left to Prometheus, but for what it cannot
know. Names of tasks are the label ``task``. Texts (names of steps, errors) are not in it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from psync.client.counters import KINDS
from psync.status.model import WITH_BACKUP, PsStatus, Status, ps_of

WORKER_STATES = (
    "connecting", "idle", "busy", "waiting", "leaving", "set aside", "lost", "left", "given up",
)  # fmt: skip
PS_STATES = ("unconnected", "connected", "silent", "broken", "lost")
ENDS = ("finished", "failed", "exhausted", "cancelled")
"""Of closures."""


class _Metrics:
    """Metrics, in the order in which they are added first."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def add(self, name: str, text: str, value: float | None, /, **labels: str) -> None:
        """Add a value; None: it is not known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (family := self._families.get(name)) is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = self._families[name] = kind(f"psync_{name}", text)
        if value is not None:
            family.add_sample(f"psync_{name}", labels, float(value))

    def add_by(
        self, label: str, name: str, text: str, values: Mapping[str, float], /, **labels: str
    ) -> None:
        """Add a value for each value of a label."""
        for key, value in values.items():
            self.add(name, text, value, **{label: key}, **labels)

    def text(self) -> str:
        """Return them in Prometheus's format."""
        from prometheus_client import generate_latest

        registry: Any = types.SimpleNamespace(collect=self._families.values)
        return generate_latest(registry).decode()


def exposition(status: Status) -> str:
    """Return the text for a status."""
    found, queue, steps = _Metrics(), status.queue, status.steps
    add, add_by = found.add, found.add_by
    add("up_seconds", "Seconds since the coordinator began.", status.uptime_s)
    now = {"queued": queue.queued, "in_flight": queue.in_flight, "waiting": queue.waiting}
    add_by("state", "closures_open", "Closures that have not ended, by where they are.", now)
    ended = {end: getattr(queue, end) for end in ENDS}
    add_by("end", "closures_total", "Closures that have ended, by how.", ended)
    add("closures_again_total", "Closures put back: their worker was gone.", queue.put_back)
    add("global_step", "Steps of training.", steps.global_step)
    add_by("name", "reported", "Values that the program has reported.", status.reported)
    text = "Pushes, by how many steps their values were old."
    add_by("staleness", "pushes_by_staleness_total", text, steps.staleness)
    for group in steps.groups:
        outcomes = {
            "accepted": group.accepted, "dropped": group.dropped, "duplicate": group.duplicates,
        }  # fmt: skip
        text = "Synchronous pushes, by what became of them."
        add_by("outcome", "synchronous_pushes_total", text, outcomes, optimizer=group.name)
        text = "Workers that wait for a synchronous step."
        add("synchronous_waiting", text, len(group.waiting), optimizer=group.name)
        text = "Parts of pushes, and ps tasks, that a synchronous step has waited for."
        add("synchronous_lacks", text, len(group.lacks), optimizer=group.name)
    for worker in status.workers:
        states = {state: worker.state == state for state in WORKER_STATES}
        text = "1 for the state of the worker, else 0."
        add_by("state", "worker_state", text, states, task=worker.task)
        add = partial(found.add, task=worker.task)
        add("worker_closures_total", "Closures finished since it joined.", worker.finished)
        add("worker_errors_total", "Closures that have raised.", worker.failed)
        add("worker_losses_total", "How often it was lost.", worker.losses)
        add("worker_closure_mean_seconds", "Seconds of its newest closures.", worker.mean_s)
        seconds = 0.0 if worker.closure is None else worker.closure.seconds
        text = "Seconds that its closure has run; 0: it holds none."
        add("worker_running_seconds", text, seconds)
        add("worker_staleness", "Of its newest push, in steps.", worker.staleness)
        add("worker_dropped_total", "Its gradients that came too late.", worker.dropped)
    for ps in status.ps:
        states = {state: ps.state == state for state in PS_STATES}
        text = "1 for the state of the ps, else 0."
        add_by("state", "ps_state", text, states, task=ps.task)
        if ps.age_s is not None:
            _add_ps(found, "ps", ps)
    return found.text()


def _add_ps(found: _Metrics, kind: str, ps: PsStatus) -> None:
    """Add a ps's numbers: as kind "task" its own, as kind "ps" those that its coordinator has."""
    add = partial(found.add, task=ps.task)
    add(f"{kind}_shards", "Shards that it holds.", ps.shards)
    add(f"{kind}_bytes", "Bytes of variables.", ps.bytes)
    add(f"{kind}_slot_bytes", "Bytes of optimizers' slots.", ps.slot_bytes)
    add(f"{kind}_pushes_total", "Gradients that have come in.", ps.pushes)
    add(f"{kind}_pulls_total", "Pulls that were answered.", ps.pulls)
    if kind == "ps":
        add("ps_bytes_in_per_second", "Bytes received.", ps.bytes_in_per_s)
        add("ps_bytes_out_per_second", "Bytes sent.", ps.bytes_out_per_s)
    add(f"{kind}_queue", "Updates that wait.", ps.queue)
    add(f"{kind}_duplicates_total", "Messages answered from memory.", ps.duplicates)
    add(f"{kind}_refused_total", "Messages refused.", ps.refused)
    behind = None if ps.backup is None else ps.backup.behind
    add(f"{kind}_backup_behind", "Entries that its backup does not have yet.", behind)
    text = "Updates that wait, by what they wait for."
    found.add_by("cause", f"{kind}_waiting", text, ps.waiting, task=ps.task)


_OF_NETWORK = (
    ("connections", "connections", "Connections that it has."),
    ("received_bytes_total", "bytes_received", "Bytes received."),
    ("sent_bytes_total", "bytes_sent", "Bytes sent."),
    ("borrowed_bytes_total", "bytes_borrowed", "Bytes that tasks of its host have lent it."),
    ("lent_bytes_total", "bytes_lent", "Bytes lent to tasks of its host."),
    ("lent_now_bytes", "bytes_lent_now", "Bytes that tasks of its host have not given back."),
    ("kept_now_bytes", "bytes_kept_now", "Bytes that it reads where tasks of its host have them."),
)


def task_exposition(task: str, counters: Mapping[str, Any]) -> str:
    """Return the text for what a ps or a worker counts itself.

    Args:
        task: "/job:ps/task:0".
        counters: As its ``statistics()``.
    """
    found = _Metrics()
    for name, key, text in _OF_NETWORK:
        found.add(f"task_{name}", text, counters["network"].get(key, 0), task=task)
    if "store" in counters:
        has_backup = counters["backup"]["state"] in WITH_BACKUP
        ps = ps_of(PsStatus(task, "", ""), counters, has_backups=has_backup)
        # Pushes without parts of synchronous ones, which are another number here.
        _add_ps(found, "task", replace(ps, pushes=counters["pushes"]))
        parts, applies = counters["staging"], counters["store"]["applies"]
        found.add("task_staged_total", "Parts of synchronous pushes.", parts["staged"], task=task)
        found.add("task_parts_held", "Parts of pushes that it holds.", parts["parts"], task=task)
        found.add("task_parts_void_total", "Parts that counted not.", parts["stale"], task=task)
        found.add("task_applies_total", "Updates of shards.", applies, task=task)
    if work := counters.get("work"):
        seconds = {kind: work[kind] for kind in KINDS}
        found.add_by(
            "kind", "task_work_seconds_total", "What its time went to.", seconds, task=task
        )
    if "staleness" in counters:
        counts, text = counters["staleness"]["counts"], "Pushes, by how old they were."
        found.add_by("staleness", "task_pushes_by_staleness_total", text, counts, task=task)
    return found.text()
