"""The file of a trace, in Chrome's Trace Event format, which Perfetto and chrome://tracing read.

A process is a task, a thread a lane. Arrows lead from a request to where it is served.

Source: "Trace Event Format" (Google, 2016): JSON object format, events X, C, M, s and f.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from psync.net.tracing.clocks import Alignment, Bound, align
from psync.net.tracing.lanes import Names, Slice, label, samples_of, slices_of
from psync.net.tracing.readings import Half, Reading, TaskLog, logs_of, pairs_of

Event = dict[str, Any]

_JOBS = ("chief", "ps", "worker")


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a trace.

    Attributes:
        tasks: Names of the processes in it.
        seconds: From the first event to the last.
        events: Slices and values of counters.
        lost: Entries of recorders that were full, by process; only those that lost any.
        within_s: How well clocks are aligned: each is off by so much, at most; inf: unknown.
    """

    tasks: Sequence[str]
    seconds: float
    events: int
    lost: dict[str, int]
    within_s: float


def write_trace(readings: Sequence[Reading], file: IO[str], **about: Any) -> Summary:
    """Write what tasks have recorded.

    Args:
        readings: The first is the coordinator's, whose clock counts.
        file: Of text, empty.
        about: What is said of the trace in its file, besides.

    Raises:
        OSError: It cannot be written.
    """
    logs = logs_of(readings)
    pairs = list(pairs_of(logs))
    alignment = align(len(logs), _bounds(logs, pairs))
    first = min(log.begin - ahead for log, ahead in zip(logs, alignment.ahead, strict=True))
    last = max(log.end - ahead for log, ahead in zip(logs, alignment.ahead, strict=True))
    tasks = _tasks(logs)
    lost = {task: log.lost for task, log in zip(tasks, logs, strict=True) if log.lost}
    within = max((each for each in alignment.within if math.isfinite(each)), default=math.inf)
    other = {
        **about,
        "clocks are off by at most": f"{within * 1e6:.0f} us",
        "dropped": lost or "nothing",
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": other})[:-1]
    file.write(head + ', "traceEvents": [')
    count, separator = 0, "\n"
    for event in _events(logs, tasks, pairs, alignment, first):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
        count += event["ph"] in "XC"
    file.write("\n]}\n")
    return Summary(tasks, last - first, count, lost, within)


def _bounds(
    logs: Sequence[TaskLog], pairs: Sequence[tuple[int, Half, int, Half]]
) -> Iterator[Bound]:
    for place, log in enumerate(logs[1:], 1):
        for asked, at, got in log.asked:
            yield 0, place, at - asked
            yield place, 0, got - at
    for client, sent, server, served in pairs:
        yield client, server, served.begin - sent.begin
        if sent.is_over and served.is_over and sent.answer is not None:
            yield server, client, sent.end - served.end


def _tasks(logs: Sequence[TaskLog]) -> list[str]:
    """Return names of processes: of one that came after another of the same task, which."""
    names: list[str] = []
    for place, log in enumerate(logs):
        before = sum(other.task == log.task for other in logs[:place])
        names.append(label(log.task) + (f" (process {before + 1})" if before else ""))
    return names


def _events(
    logs: Sequence[TaskLog],
    tasks: Sequence[str],
    pairs: Sequence[tuple[int, Half, int, Half]],
    alignment: Alignment,
    first: float,
) -> Iterator[Event]:
    names, places = Names.of(logs), {}
    for pid, place in enumerate(sorted(range(len(logs)), key=lambda at: _order(logs[at].task)), 1):
        log, offset = logs[place], first + alignment.ahead[place]
        yield _named("process_name", pid, 0, name=tasks[place])
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        lanes: dict[str, int] = {}
        slices = slices_of(log, names)
        for lane in sorted({each.lane for each in slices}, key=_lane_order):
            # A thread of its process's own number would be its main thread, for Perfetto.
            lanes[lane] = 1000 * pid + len(lanes)
            yield _named("thread_name", pid, lanes[lane], name=lane)
            yield _named("thread_sort_index", pid, lanes[lane], sort_index=lanes[lane])
        # In order on each lane; of those that begin together the longest is around the others.
        for each in sorted(slices, key=lambda each: (lanes[each.lane], each.begin, -each.end)):
            begin, end = _ns(each.begin - offset), _ns(each.end - offset)
            if each.half is not None:
                places[id(each.half)] = pid, lanes[each.lane], begin
            yield _complete(each, pid, lanes[each.lane], begin, end)
        for sample in samples_of(log):
            ts = _ns(sample.at - offset) / 1000
            yield {"ph": "C", "name": sample.name, "pid": pid, "tid": 0, "ts": ts,
                   "args": {"value": sample.value}}  # fmt: skip
    for number, (_, sent, _, served) in enumerate(pairs):
        if id(sent) in places and id(served) in places:
            for ph, half in (("s", sent), ("f", served)):
                pid, tid, begin = places[id(half)]
                event: Event = {"ph": ph, "name": "request", "cat": "request", "id": number,
                         "pid": pid, "tid": tid, "ts": begin / 1000}  # fmt: skip
                yield {**event, "bp": "e"} if ph == "f" else event


def _complete(each: Slice, pid: int, tid: int, begin: int, end: int) -> Event:
    event: Event = {"ph": "X", "name": each.name, "pid": pid, "tid": tid,
                    "ts": begin / 1000, "dur": (end - begin) / 1000}  # fmt: skip
    return {**event, "args": each.args} if each.args else event


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _order(task: str) -> tuple[int, int]:
    job, _, index = label(task).partition("-")
    return (_JOBS.index(job) if job in _JOBS else len(_JOBS)), int(index or 0)


def _lane_order(lane: str) -> tuple[bool, str, int]:
    """Return the steps, then the others by name; the tenth after the second."""
    name, _, number = lane.rstrip(")").partition(" (")
    return name != "steps", name, int(number or 1)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
