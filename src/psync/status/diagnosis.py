"""What a status means, in sentences: why a run is slow or waits, the gravest first.

Each rule looks at one thing and says nothing where that is fine. Thresholds are where somebody who
watches a run begins to care, not where something is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from psync.status.model import PsStatus, RunningClosure, Status, WorkerStatus, WorkShares
from psync.status.units import bytes_text, seconds_text, short_names, tasks_text

STRAGGLER = 1.5
"""A worker whose closures take so many times the median is one."""

STUCK_S, STUCK = 10.0, 5.0
"""A closure that has run for so many seconds, and so many times what one takes, is remarkable."""

AWAITED_S = 1.0
"""Others wait for a worker in every synchronous step; when it has run for longer, that is news."""

RECENT_S = 60.0
"""What has happened since then explains what is slow now."""

LARGE_SHARE = 0.3
"""Of the workers' time: more than that on anything but computing is worth a word."""

SMALL_SHARE = 0.1
"""Less than that on pulls and pushes is not worth a word."""

LONG_WORK_S = 60.0
"""Who has queued work for longer may want more workers."""

UNEVEN = 1.6
"""A ps that sends so many times its fair share of all bytes."""

BUSY_BYTES_PER_S = 1 << 20
"""Below, nobody asks whether the load of ps tasks is even."""

LONG_QUEUE = 32
"""Updates that wait on a ps; a few for each worker are normal."""

LATE_SHARE = 0.25
"""Of synchronous gradients: more than that come too late."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence.

    Attributes:
        level: "bad": it stands still or something is lost; "warn": it could be faster; "good".
        text: A sentence or two: what it is, and what to do.
    """

    level: str
    text: str


def diagnose(status: Status) -> list[Finding]:
    """Return why a cluster is slow or waits; if it does neither, what its workers do.

    Example:
        for finding in diagnose(await coordinator.status()):
            print(finding.level, finding.text)
    """
    found = [(level, text) for rule in _RULES for level, text in rule(status)]
    found.sort(key=lambda each: each[0] != "bad")  # stable
    findings = [Finding(level, text[:1].upper() + text[1:]) for level, text in found]
    return findings or [_all_is_well(status)]


# Rules yield level and text. What stands still comes first.

_Found: TypeAlias = Iterator[tuple[str, str]]


def _states(status: Status) -> _Found:
    if status.state == "starting":
        waits_for = short_names(status.waits_for)
        yield "warn", f"The cluster is starting and waits for: {waits_for}."
    elif status.state == "recovering":
        yield "bad", "A ps was lost: closures wait until its variables are restored."
    elif status.state == "failed":
        yield "bad", "A step has failed: no closure starts until join raises its error."


def _values(status: Status) -> _Found:
    for name, value in status.reported.items():
        if not math.isfinite(value):
            yield "bad", f"The reported {name} is not a finite number."


def _gone(status: Status) -> _Found:
    for state, one, more in (
        ("lost", "is lost; it rejoins when it is reachable",
         "are lost; they rejoin when they are reachable"),
        ("set aside", "was lost too often and is set aside for a while",
         "were lost too often and are set aside for a while"),
        ("given up", "was removed: its process died too often",
         "were removed: their processes died too often"),
    ):  # fmt: skip
        if tasks := [each.task for each in status.workers if each.state == state]:
            yield "bad", f"{tasks_text(tasks)} {one if len(tasks) == 1 else more}."
    for ps in status.ps:
        if ps.state in ("lost", "broken"):
            yield "bad", f"{short_names(ps.task)} is {ps.state}: steps wait for it."
        elif ps.state == "silent":
            text = "has not answered for a second: it is busy, swapping, or stopped"
            yield "warn", f"{short_names(ps.task)} {text}."


def _barriers(status: Status) -> _Found:
    closures = {each.task: each.closure for each in status.workers}

    def longest(tasks: Sequence[str]) -> RunningClosure | None:
        """Return what runs longest on them, if that is long enough to be worth a word."""
        running = [closure for task in tasks if (closure := closures.get(task)) is not None]
        found = max(running, key=lambda closure: closure.seconds, default=None)
        return found if found is not None and found.seconds > AWAITED_S else None

    for group in status.steps.groups:
        if not group.waiting and not group.lacks:
            continue
        head = f"Step {group.step} of {group.name} has {group.counted} of {group.target} gradients"
        held = f"{len(group.waiting)} of {len(status.workers)} workers wait for it"
        if group.lacks:
            yield "bad", f"{head}; {held}. It waits for {tasks_text(group.lacks)}."
        elif not group.waits_for:
            yield "bad", f"{head}; {held}, and no other worker has anything to do."
        elif (closure := longest(group.waits_for)) is not None:
            since = f"in {closure.name} since {seconds_text(closure.seconds)}"
            who = f"{tasks_text(group.waits_for)}, {since}"
            yield "warn", f"{head}; {held}. It waits for {who}."
    for bound in status.steps.bounds:
        if bound.waiting and longest(bound.waits_for) is not None:
            wait = "waits" if len(bound.waiting) == 1 else "wait"
            text = f"may be at most {bound.max_staleness} rounds ahead and {wait} for"
            yield "warn", f"{tasks_text(bound.waiting)} {text} {tasks_text(bound.waits_for)}."


def _work(status: Status) -> _Found:
    queue, here = status.queue, _here(status)
    if status.state == "running" and not here:
        waits_for = short_names(status.waits_for)
        yield "bad", f"There are no workers. The program waits for: {waits_for}."
    idle = [each for each in here if each.state == "idle"]
    if status.state not in ("running", "idle") or not idle or queue.queued:
        return
    some = f"{len(idle)} of {len(here)} workers have nothing to do"
    if len(idle) == len(here):
        yield "warn", "Nothing is scheduled: all workers wait for the program."
    elif queue.waiting:
        text = "the remaining closures wait for the value of another closure"
        yield "warn", f"{some}: {text}."
    else:
        busy = [each.task for each in here if each.state != "idle"]
        text = f"the queue is empty, and the last closures run on {tasks_text(busy)}"
        advice = "Schedule further ahead, or join less often"
        yield "warn", f"{some}: {text}. {advice}."


def _stragglers(status: Status) -> _Found:
    paces = {each.task: each.mean_s for each in status.workers if each.mean_s}
    usual = median(paces.values()) if len(paces) > 2 else 0.0
    if usual:
        slow = sorted((task for task in paces if paces[task] > STRAGGLER * usual),
                      key=lambda task: -paces[task])  # fmt: skip
        if slow:
            slowest = paces[slow[0]]
            verb = "takes" if len(slow) == 1 else "take up to"
            takes = f"{verb} {seconds_text(slowest)} for a closure, {slowest / usual:.1f} times"
            yield "warn", f"{tasks_text(slow)} {takes} the median of {seconds_text(usual)}."
    for each in status.workers:
        closure, pace = each.closure, each.mean_s or 0.0
        if closure is None or each.state != "busy":
            continue
        if closure.seconds > STUCK_S and closure.seconds > STUCK * pace:
            text = f"has run {closure.name} for {seconds_text(closure.seconds)}"
            than = f"; its closures take {seconds_text(pace)}" if pace else ""
            if each.work is None and any(other.work for other in status.workers):
                than += "; it does not answer: it computes on its event loop, or is stopped"
            yield "warn", f"{short_names(each.task)} {text}{than}."
            return  # of many stuck ones the first will do


def _shares(status: Status) -> _Found:
    if not (known := _known(status)):
        return
    pull, push, wait, compute = (
        sum(getattr(each, kind) for each in known) / len(known)
        for kind in ("pull", "push", "wait", "compute")
    )
    computes = f"and compute for {compute:.0%}"
    if pull + push > LARGE_SHARE:
        parts = f"{pull:.0%} for values, {push:.0%} until pushes have arrived"
        text = f"{pull + push:.0%} of the time ({parts}), {computes}"
        advice = "send fewer bytes, send them less often, or use more ps tasks"
        yield "warn", f"Workers wait for ps tasks {text}: {advice}."
    if wait > LARGE_SHARE:
        text = f"{wait:.0%} of the time, {computes}"
        advice = "use backup workers, or a looser bound"
        yield "warn", f"Workers wait for other workers {text}: {advice}."


def _servers(status: Status) -> _Found:
    if long := [each for each in status.ps if each.queue > LONG_QUEUE]:
        most = max(long, key=lambda each: each.queue)
        text = f"has {most.queue} updates waiting: the ps tasks are the bottleneck"
        yield "warn", f"{short_names(most.task)} {text}."
    moved = [each.pull + each.push for each in _known(status)]
    if not moved or sum(moved) > SMALL_SHARE * len(moved):  # else nobody waits for it
        yield from _uneven(status.ps)
    behind = [each for each in status.ps if each.backup is not None and each.backup.behind > 1000]
    if behind:
        text = "is far behind; updates wait for it"
        yield "warn", f"The backup of {tasks_text([each.task for each in behind])} {text}."


def _uneven(tasks: Sequence[PsStatus]) -> _Found:
    loads = {each.task: each.bytes_in_per_s + each.bytes_out_per_s for each in tasks}
    total = sum(loads.values())
    if len(loads) < 2 or total < BUSY_BYTES_PER_S:
        return
    task = max(loads, key=lambda each: loads[each])
    if loads[task] * len(loads) > UNEVEN * total:
        load = f"{loads[task] / total:.0%} of all bytes ({bytes_text(loads[task])}/s)"
        yield "warn", f"{short_names(task)} moves {load}; a partitioner would spread the variables."


def _lost_work(status: Status) -> _Found:
    late = [
        each.task
        for each in status.workers
        if each.accepted + each.dropped >= 20 and each.dropped > each.accepted
    ]
    if late:
        text = "more than half of the gradients are stale and dropped"
        yield "warn", f"{tasks_text(late)}: {text}."
    for group in status.steps.groups if not late else ():
        offered = group.accepted + group.dropped
        if offered >= 20 and group.dropped > LATE_SHARE * offered:
            share = group.dropped / offered
            text = f"{share:.0%} of the gradients for {group.name} were stale and dropped"
            yield "warn", f"{text}: that share of the computation is wasted."
    for event in status.events:
        if event.kind == "lost" and event.seconds < RECENT_S and status.queue.put_back:
            count = status.queue.put_back
            text = f"Closures run again because of lost workers: {count:,}."
            yield "warn", f"Within a minute: {short_names(event.text)}. {text}"
            return


def _all_is_well(status: Status) -> Finding:
    here = _here(status)
    if status.state == "ended":
        return Finding("good", "The run has ended.")
    queue, rest = status.queue, ""
    seconds = queue.queued / queue.closures_per_s if queue.closures_per_s else 0.0
    if seconds >= LONG_WORK_S:
        rest = f" The {queue.queued:,} queued closures take another {seconds_text(seconds)}"
        rest += "; more workers would reduce that."
    if known := _known(status):
        share = sum(each.compute for each in known) / len(known)
        # A step that waits for its data computes, as far as anybody sees.
        text = f"workers compute, or read data, for {share:.0%} of the time"
    else:
        busy = sum(each.state == "busy" for each in here)
        text = f"{busy} of {len(here)} workers are busy"
    return Finding("good", f"The cluster is not the bottleneck: {text}.{rest}")


_RULES: tuple[Callable[[Status], _Found], ...] = (
    _states, _values, _gone, _barriers, _stragglers, _work, _shares, _servers, _lost_work,
)  # fmt: skip


# Words.


def _here(status: Status) -> list[WorkerStatus]:
    return [each for each in status.workers if each.state in ("idle", "busy", "waiting", "leaving")]


def _known(status: Status) -> list[WorkShares]:
    return [each.work for each in _here(status) if each.work is not None]
