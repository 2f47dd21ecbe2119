"""Readings of recorders, understood and drawn as the file of a trace, which Perfetto reads.

``logs_of`` decodes what tasks have recorded (see ``net.trace``): requests, closures, work, results
and counters of each. ``align`` finds how far their clocks are apart. What is drawn are slices on
lanes, and counters. Slices of a lane never overlap unless one lies within the other; what goes on
at once is on several lanes: "from worker-0", "from worker-0 (2)". In the file a process is a task,
a thread a lane, and arrows lead from a request to where it is served.

Source: "Trace Event Format" (Google, 2016): JSON object format, events X, C, M, s and f.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np
from msgspec import msgpack

from psync.errors import PsyncError
from psync.wire import messages
from psync.wire.codec import Message, decode
from psync.wire.frames import SENT, Kind

KINDS = ("compute", "pull", "push", "wait")  # as ``client.counters``

SHOWN_NAMES = 4
"""Of the variables of a request; the others are counted."""

_SHOWN = (
    "closure",
    "local_step",
    "step",
    "op",
    "outcome",
    "staleness",
    "token",
    "partial",
    "group",
)
"""Fields of messages that are worth showing."""

_JOBS = ("chief", "ps", "worker")

_OPEN = {"end": "not in this trace"}
"""Said of what has not ended when its log ends."""

Link = tuple[str, int, str, int, str]
"""A connection as both ends know it: client and its incarnation, server and its, lane."""


# What tasks have recorded. Two tasks see each request, its client and its server: these are two
# *halves*. They belong together if both name the same connection and number.


class Reading(NamedTuple):
    """An answer of a task."""

    task: str
    body: bytes  # see ``net.trace``
    asked: float  # when it was asked, and when its answer arrived, by the coordinator's clock
    got: float


@dataclass(slots=True, eq=False)
class Half:
    """A request as one of its two tasks saw it. Times are by that task's clock."""

    link: Link
    number: int
    is_client: bool
    message: Message
    begin: float  # it was sent, or had come
    nbytes: dict[bool, int]  # of the bodies that this task sent (True), and got
    end: float = math.nan  # its answer had come, or was sent; NaN: neither
    answer: Message | None = None
    outcome: str = ""  # "error", "given up", or "" else
    arrow: int = -1  # number of the arrow from it, or to it; -1: nobody knows its other half

    @property
    def is_over(self) -> bool:
        """Whether its end is known."""
        return not math.isnan(self.end)


@dataclass(slots=True, eq=False)
class TaskLog:
    """What one process has recorded as one task.

    Attributes:
        task: Its name.
        begin, end: Times of its first and last entry, by its clock.
        lost: Entries that were dropped before they were read.
        halves: Requests that it sent or served, as they began.
        told: (time, sent?, other task, notification).
        notes: (time, name, …), see ``worker.session``.
        facts: By name, the newest.
        asked: (when the coordinator asked, when that was answered, when the coordinator had it):
            the second by the clock of this task.
    """

    task: str
    begin: float
    end: float
    lost: int = 0
    halves: list[Half] = field(default_factory=list)
    told: list[tuple[float, bool, str, Message]] = field(default_factory=list)
    notes: list[Sequence[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[float, float, float]] = field(default_factory=list)
    _links: dict[int, Sequence[Any]] = field(default_factory=dict)
    _open: dict[tuple[int, int, bool], Half] = field(default_factory=dict)

    def add(self, reading: Mapping[str, Any]) -> None:
        """Add the next reading of this process."""
        self.lost += reading["lost"]
        self.facts.update(reading["facts"])
        self._links.update(reading["connections"])
        for chunk in reading["chunks"]:
            entries = msgpack.decode(chunk)
            self.begin = min(self.begin, entries[0][0])
            for entry in entries:
                if isinstance(entry[1], int):
                    self._frame(*entry)
                else:
                    self.notes.append(entry)
        self.end = max(self.end, reading["at"])

    def _frame(
        self, at: float, number: int, flags: int, request: int, header: bytes, nbytes: int
    ) -> None:
        is_sent, kind = bool(flags & SENT), flags & ~SENT
        own, own_incarnation, peer, peer_incarnation, lane = self._links[number]
        message = None
        with contextlib.suppress(PsyncError):  # it has none, or one that this version does not know
            message = decode(header)
        if kind == Kind.REQUEST and message is not None:
            ends = (own, own_incarnation), (peer, peer_incarnation)
            client, server = ends if is_sent else ends[::-1]
            link = *client, *server, lane
            half = Half(link, request, is_sent, message, at, {is_sent: nbytes})
            self._open[number, request, is_sent] = half
            self.halves.append(half)
        elif kind == Kind.NOTIFY and message is not None:
            self.told.append((at, is_sent, peer, message))
        elif kind == Kind.CANCEL:
            if (known := self._open.get((number, request, is_sent))) is not None:
                known.end, known.outcome = at, "given up"
        elif kind in (Kind.REPLY, Kind.ERROR):
            if (known := self._open.pop((number, request, not is_sent), None)) is not None:
                known.end, known.answer, known.nbytes[is_sent] = at, message, nbytes
                known.outcome = "error" if kind == Kind.ERROR else ""


def logs_of(readings: Iterable[Reading]) -> list[TaskLog]:
    """Return the log of each process, in the order of their first readings."""
    logs: dict[tuple[str, str], TaskLog] = {}
    for task, body, asked, got in readings:
        reading = msgpack.decode(body)
        at = reading["at"]
        log = logs.setdefault((task, reading["origin"]), TaskLog(task, at, at))
        log.add(reading)
        log.asked.append((asked, at, got))
    return list(logs.values())


def pairs_of(logs: Sequence[TaskLog]) -> Iterator[tuple[int, Half, int, Half]]:
    """Return both halves of each request that both tasks saw.

    Yields:
        (place of the log of the client, its half, place of that of the server, its half).
    """
    sides: list[dict[tuple[Link, int], tuple[int, Half] | None]] = [{}, {}]  # servers, clients
    for place, log in enumerate(logs):
        for half in log.halves:
            side, key = sides[half.is_client], (half.link, half.number)
            # Where a connection broke and came again, numbers begin again: which is which?
            side[key] = None if key in side else (place, half)
    served, sent = sides
    for key, client in sent.items():
        server = served.get(key)
        if client and server and type(client[1].message) is type(server[1].message):
            yield *client, *server


# How far the clocks of tasks are apart. Nothing comes before it was sent: a request that a sent at
# s and b had at r says that b's clock is at most r - s ahead of a's, and its answer says the same
# the other way round. Every request between any two tasks is such a *bound*, and so is each reading
# that the coordinator has asked for. What satisfies all of them is convex, so the middle between
# the most and the least that a clock can be ahead is a solution, too, in which no message arrives
# before it has left. (The shortest paths of difference constraints: Cormen et al., "Introduction to
# Algorithms", 24.4.)

MIN_SLACK_S = 1e-6
"""Clocks that drift break bounds by so little, or twice it, or four times …"""

MAX_SLACK_S = 10.0

Bound = tuple[int, int, float]
"""(a, b, seconds): the clock of b is at most so much ahead of that of a."""


def align(count: int, bounds: Iterable[Bound]) -> tuple[list[float], float]:
    """Return how far clocks are ahead of that of task 0, and how well that is known.

    Args:
        count: Number of tasks.
        bounds: In any order; between task 0 and each other one there are some in both directions,
            perhaps through further tasks. Of several between two tasks the tightest counts.

    Returns:
        Seconds ahead, for each task, and how much is missing at most to the most and the least that
        it can be; 0 and inf if these are no clocks.
    """
    at_most = np.full((count, count), math.inf)  # by a and b, as in a bound
    for one, other, seconds in bounds:
        at_most[one, other] = min(at_most[one, other], seconds)
    slack = 0.0
    while slack <= 2 * MAX_SLACK_S:
        most, least = _distances(at_most + slack), _distances(at_most.T + slack)
        if most is not None and least is not None:
            return ((most - least) / 2).tolist(), float((most + least).max() / 2)
        slack = max(MIN_SLACK_S, 2 * slack)
    return [0.0] * count, math.inf


def _distances(lengths: np.ndarray) -> np.ndarray | None:
    """Return the shortest paths from 0 (Bellman and Ford); None: there is a negative circle."""
    np.fill_diagonal(lengths, 0.0)
    distances: np.ndarray = lengths[0]
    for _ in lengths:
        nearer = (distances[:, None] + lengths).min(axis=0)
        if np.array_equal(nearer, distances):
            return distances
        distances = nearer
    return None


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


# What is drawn of each task. Times are by the task's own clock.


@dataclass(slots=True, eq=False)
class Slice:
    """Something that took time."""

    lane: str
    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)
    half: Half | None = None  # of the request that it is


class Names:
    """What numbers in messages stand for, gathered from all logs.

    Attributes:
        closures, variables: By number.
        plans: Variables of what clients call by a number.
    """

    def __init__(self, logs: Sequence[TaskLog]) -> None:
        self.closures: dict[int, str] = {}
        self.variables: dict[int, str] = {}
        self.plans: dict[int, Sequence[int]] = {}
        for log in logs:
            self.variables.update(log.facts.get("variables", {}))
            self.closures.update(log.facts.get("running", ()))
            for _, what, *values in log.notes:
                if what == "ended":
                    self.closures[values[0]] = values[1]
            for number, variables in log.facts.get("plans", {}).items():
                self.plans[int(number)] = variables
            for *_, message in log.told:
                if isinstance(message, messages.DefinePlan):
                    self.plans[message.plan] = [each[0] for each in message.members]

    def of_closure(self, number: int) -> str:
        """Return the name of a closure."""
        return self.closures.get(number, f"closure {number}")

    def of_request(self, half: Half) -> str:
        """Return the names of the variables of a request; "": it has none, or nobody knows."""
        variables = self.plans.get(getattr(half.message, "plan", -1), ())
        names = [self.variables.get(each, f"variable {each}") for each in dict.fromkeys(variables)]
        more = len(names) - SHOWN_NAMES
        return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def label(task: str) -> str:
    """Return "worker-0" for "/job:worker/task:0"; the chief has no number."""
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return job if job == "chief" else f"{job}-{index}"


def slices_of(log: TaskLog, names: Names) -> list[Slice]:
    """Return all slices of a task, each on a lane on which there is room for it."""
    apart = [*_requests(log, names), *_results(log, names), *_sync_steps(log)]
    return [*_steps(log, names), *spread(apart)]


def spread(slices: Sequence[Slice]) -> list[Slice]:
    """Move slices to further lanes where they would overlap others; they are in order then."""
    ends: dict[str, list[float]] = defaultdict(list)
    ordered = sorted(slices, key=lambda each: (each.begin, -each.end))
    for each in ordered:
        lanes = ends[each.lane]
        place = next((at for at, end in enumerate(lanes) if end <= each.begin), len(lanes))
        lanes[place : place + 1] = [each.end]
        each.lane += f" ({place + 1})" if place else ""
    return ordered


def samples_of(log: TaskLog) -> Iterator[tuple[str, float, float]]:
    """Return all counters of a task: (name, time, its value from then on)."""
    for at, what, *values in log.notes:
        if what == "counters":
            for name, value in values[0].items():
                yield name, at, value
    newest = {"global step": 0, "optimizer step": 0}
    for half in _served(log):
        answer, name, step = half.answer, "optimizer step", 0
        if isinstance(answer, messages.Contributed):
            name, step = "global step", answer.token
        elif isinstance(answer, messages.Pushed):
            step = answer.step
        if step > newest[name]:
            newest[name] = step
            yield name, half.end, step


def _served(log: TaskLog) -> list[Half]:
    """Return what a task was asked for and has answered, in the order of the answers."""
    served = [each for each in log.halves if not each.is_client and each.is_over]
    return sorted(served, key=lambda each: each.end)


def _steps(log: TaskLog, names: Names) -> Iterator[Slice]:
    """Closures of a worker, and within them what its time went to."""
    lane, kind, since = "steps", -1, log.begin
    running: tuple[int, float] | None = None
    for at, what, *values in [*log.notes, (log.end, "over")]:
        if what not in ("began", "ended", "work", "over"):
            continue
        if kind >= 0 and at > since:
            yield Slice(lane, KINDS[kind], since, at)
        since = at
        if what == "work":
            kind = values[0]
        elif what == "began":
            running = values[0], at
        elif running is not None and what == "over":
            closure, begin = running
            yield Slice(lane, names.of_closure(closure), begin, at, {"closure": closure, **_OPEN})
        elif running is not None and running[0] == values[0]:
            end = {} if values[2] == "ok" else {"end": values[2]}
            yield Slice(lane, values[1] or "?", running[1], at, {"closure": values[0], **end})
            running = None


def _requests(log: TaskLog, names: Names) -> Iterator[Slice]:
    """What a task asks of others, and what others ask of it."""
    for half in log.halves:
        if isinstance(half.message, messages.AskSpans):
            continue
        known = {
            "variables": names.of_request(half),
            "bytes sent": half.nbytes.get(True),
            "bytes received": half.nbytes.get(False),
            "end": half.outcome,
        }
        args = {**_shown(half.message), **_shown(half.answer)}
        args |= {name: value for name, value in known.items() if value}
        if not half.is_over:
            args |= _OPEN
        lane = f"to {label(half.link[2])}" if half.is_client else f"from {label(half.link[0])}"
        end = half.end if half.is_over else log.end
        yield Slice(lane, type(half.message).__name__, half.begin, end, args, half)


def _shown(message: Message | None) -> dict[str, Any]:
    found = {name: getattr(message, name) for name in _SHOWN if hasattr(message, name)}
    return {name: value for name, value in found.items() if value not in (-1, "", None, False)}


def _results(log: TaskLog, names: Names) -> Iterator[Slice]:
    """Closures in flight, as the coordinator sees them: those of a message of results as one."""
    sent: dict[str, dict[int, float]] = defaultdict(dict)  # by worker and number
    batches: list[tuple[str, dict[int, float], float, Mapping[str, str]]] = []
    for at, is_sent, peer, message in log.told:
        if isinstance(message, messages.RunClosures) and is_sent:
            sent[peer].update((closure[0], at) for closure in message.closures)
        elif isinstance(message, messages.GiveBack) and not is_sent:
            for number in message.closures:
                sent[peer].pop(number, None)
        elif isinstance(message, messages.ClosureResults) and not is_sent:
            numbers = [result[0] for result in message.results]
            begins = {number: sent[peer].pop(number, log.begin) for number in numbers}
            batches.append((peer, begins, at, {}))
    batches += [(peer, begins, log.end, _OPEN) for peer, begins in sent.items()]
    last: dict[str, float] = defaultdict(lambda: log.begin)
    for peer, begins, end, is_open in batches:
        if not begins:
            continue
        known = set(map(names.of_closure, begins))
        name = known.pop() if len(known) == 1 else "closures"
        name += f" x{len(begins)}" if len(begins) > 1 else ""
        args = {"closures": "-".join(map(str, sorted({min(begins), max(begins)}))), **is_open}
        begin = max(min(begins.values()), last[peer])
        yield Slice(f"in flight on {label(peer)}", name, begin, end, args)
        last[peer] = end


def _sync_steps(log: TaskLog) -> Iterator[Slice]:
    """Synchronous steps on ps 0, from the first gradient until it is closed."""
    closed: dict[tuple[int, int], list[tuple[messages.Contributed, Half]]] = defaultdict(list)
    for half in _served(log):
        answer = half.answer
        if isinstance(answer, messages.Contributed):
            closed[answer.group, answer.token].append((answer, half))
    last: dict[int, float] = defaultdict(lambda: log.begin)
    for (group, token), several in closed.items():
        counted = [(answer, half) for answer, half in several if answer.outcome == "accepted"]
        if not counted:
            continue
        first, end = counted[0][0], counted[0][1].end
        begin = max(min(half.begin for _, half in counted), last[group])
        last[group] = end
        dropped = sum(answer.outcome == "stale" for answer, _ in several)
        args: dict[str, Any] = {"counted": first.count, "group": group, "dropped": dropped}
        if first.partial:
            args["partial"] = True
        yield Slice("steps", f"step {token - 1}", begin, max(begin, end), args)


# The file.

Event = dict[str, Any]


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
    ahead, within_s = align(len(logs), _bounds(logs, pairs))
    first = min(log.begin - each for log, each in zip(logs, ahead, strict=True))
    last = max(log.end - each for log, each in zip(logs, ahead, strict=True))
    tasks = _tasks(logs)
    lost = {task: log.lost for task, log in zip(tasks, logs, strict=True) if log.lost}
    other = {
        **about,
        "clocks are off by at most": f"{within_s * 1e6:.0f} us",
        "dropped": lost or "nothing",
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": other})[:-1]
    file.write(head + ', "traceEvents": [')
    count, separator = 0, "\n"
    for number, (_, sent, _, served) in enumerate(pairs):
        sent.arrow = served.arrow = number
    names = Names(logs)
    for pid, place in enumerate(sorted(range(len(logs)), key=lambda at: _order(logs[at].task)), 1):
        log, origin = logs[place], first + ahead[place]
        for event in _events(log, tasks[place], pid, origin, names):
            file.write(separator + json.dumps({"pid": pid, **event}, separators=(",", ":")))
            separator = ",\n"
            count += event["ph"] in "XC"
    file.write("\n]}\n")
    return Summary(tasks, last - first, count, lost, within_s)


def _tasks(logs: Sequence[TaskLog]) -> list[str]:
    """Return names of processes: of one that came after another of the same task, which."""
    names: list[str] = []
    for place, log in enumerate(logs):
        before = sum(other.task == log.task for other in logs[:place])
        names.append(label(log.task) + (f" (process {before + 1})" if before else ""))
    return names


def _events(log: TaskLog, task: str, pid: int, origin: float, names: Names) -> Iterator[Event]:
    """Return the events of a process, each without its number.

    Args:
        log: Of the process.
        task: Its name.
        pid: Its number.
        origin: When the trace begins, by its clock.
        names: Of closures and variables.
    """

    def at(time: float) -> float:
        return round((time - origin) * 1e9) / 1000  # in microseconds, to the nanosecond

    def named(what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "tid": tid, "ts": 0, "args": args}

    yield named("process_name", 0, name=task)
    yield named("process_sort_index", 0, sort_index=pid)
    slices = slices_of(log, names)
    # A thread of its process's own number would be its main thread, for Perfetto.
    lanes = sorted({each.lane for each in slices}, key=_lane_order)
    tids = {lane: tid for tid, lane in enumerate(lanes, 1000 * pid)}
    for lane, tid in tids.items():
        yield named("thread_name", tid, name=lane)
        yield named("thread_sort_index", tid, sort_index=tid)
    # In order on each lane; of those that begin together the longest is around the others.
    for each in sorted(slices, key=lambda each: (tids[each.lane], each.begin, -each.end)):
        begin, tid = at(each.begin), tids[each.lane]
        event: Event = {"ph": "X", "name": each.name, "tid": tid, "ts": begin}
        event["dur"] = round((at(each.end) - begin) * 1000) / 1000
        yield {**event, "args": each.args} if each.args else event
        if each.half is not None and each.half.arrow >= 0:
            event = {"ph": "s"} if each.half.is_client else {"ph": "f", "bp": "e"}
            event |= {"name": "request", "cat": "request", "id": each.half.arrow}
            yield {**event, "tid": tid, "ts": begin}
    for name, time, value in samples_of(log):
        yield {"ph": "C", "name": name, "tid": 0, "ts": at(time), "args": {"value": value}}


def _order(task: str) -> tuple[int, int]:
    job, _, index = label(task).partition("-")
    return (_JOBS.index(job) if job in _JOBS else len(_JOBS)), int(index or 0)


def _lane_order(lane: str) -> tuple[bool, str, int]:
    """Return the steps, then the others by name; the tenth after the second."""
    name, _, number = lane.rstrip(")").partition(" (")
    return name != "steps", name, int(number or 1)
