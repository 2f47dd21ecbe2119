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
from collections import Counter, defaultdict
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

_TOLD = ("closure", "local_step", "step", "op", "outcome", "staleness", "token", "partial", "group")
"""Fields of messages that are worth showing."""

_JOBS = ("chief", "ps", "worker")

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
    request_bytes: int  # of its body
    answer_bytes: int = 0
    end: float = math.nan  # its answer had come, or was sent; NaN: neither
    answer: Message | None = None
    outcome: str = ""  # "error", "given up", or "" else

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
            half = Half((*client, *server, lane), request, is_sent, message, at, nbytes)
            self._open[number, request, is_sent] = half
            self.halves.append(half)
        elif kind == Kind.NOTIFY and message is not None:
            self.told.append((at, is_sent, peer, message))
        elif kind == Kind.CANCEL:
            if (known := self._open.get((number, request, is_sent))) is not None:
                known.end, known.outcome = at, "given up"
        elif kind in (Kind.REPLY, Kind.ERROR):
            if (known := self._open.pop((number, request, not is_sent), None)) is not None:
                known.end, known.answer, known.answer_bytes = at, message, nbytes
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


def align(count: int, bounds: Iterable[Bound]) -> tuple[list[float], list[float]]:
    """Return how far clocks are ahead of that of task 0, and how well that is known.

    Args:
        count: Number of tasks.
        bounds: In any order; of several between two tasks the tightest counts.

    Returns:
        Seconds ahead, for each task; 0 where nothing is known. Half of the seconds between the most
        and the least that it can be; inf: unknown.
    """
    at_most = np.full((count, count), math.inf)  # by a and b, as in a bound
    for one, other, seconds in bounds:
        at_most[one, other] = min(at_most[one, other], seconds)
    slack = 0.0
    while slack <= 2 * MAX_SLACK_S:
        most, least = _distances(at_most + slack), _distances(at_most.T + slack)
        if most is not None and least is not None:
            ahead = [_middle(high, -low) for high, low in zip(most, least, strict=True)]
            return ahead, ((most + least) / 2).tolist()
        slack = max(MIN_SLACK_S, 2 * slack)
    return [0.0] * count, [math.inf] * count  # these are no clocks


def _middle(most: float, least: float) -> float:
    if math.isinf(most):
        return 0.0 if math.isinf(least) else least
    return most if math.isinf(least) else (most + least) / 2


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
        keys: dict[int, bytes] = {}
        for log in logs:
            self.variables.update(log.facts.get("variables", {}))
            self.closures.update((number, name) for number, name in log.facts.get("running", ()))
            for note in log.notes:
                if note[1] == "ended":
                    self.closures[note[2]] = note[3]
            for number, variables in log.facts.get("plans", {}).items():
                self.plans[int(number)] = variables
            for _, _, _, message in log.told:
                if isinstance(message, messages.DefinePlan):
                    self.plans[message.plan] = [each[0] for each in message.members]
                keys.update((closure[0], closure[1]) for closure in _closures_of(message))
        # Those that did not come to their end are named after others of the same function.
        functions = {keys[each]: name for each, name in self.closures.items() if each in keys}
        for closure, key in keys.items():
            if key in functions:
                self.closures.setdefault(closure, functions[key])

    def of_closure(self, number: int) -> str:
        """Return the name of a closure."""
        return self.closures.get(number, f"closure {number}")

    def of_request(self, half: Half) -> str:
        """Return the names of the variables of a request; "": it has none, or nobody knows."""
        if not hasattr(half.message, "plan"):
            return ""
        variables = self.plans.get(half.message.plan, ())
        names = [self.variables.get(each, f"variable {each}") for each in dict.fromkeys(variables)]
        more = len(names) - SHOWN_NAMES
        return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _closures_of(message: Message) -> Sequence[tuple[int, bytes, int, list[int]]]:
    return message.closures if isinstance(message, messages.RunClosures) else ()


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
        if place == len(lanes):
            lanes.append(each.end)
        lanes[place] = each.end
        each.lane += f" ({place + 1})" if place else ""
    return ordered


def samples_of(log: TaskLog) -> Iterator[tuple[str, float, float]]:
    """Return all counters of a task: (name, time, its value from then on)."""
    for note in log.notes:
        if note[1] == "counters":
            for name, value in note[2].items():
                yield name, note[0], value
    newest: dict[str, int] = {}
    for half in _served(log):
        answer, name, step = half.answer, "", 0
        if isinstance(answer, messages.Contributed):
            name, step = "global step", answer.token
        elif isinstance(answer, messages.Pushed):
            name, step = "optimizer step", answer.step
        if name and step > newest.get(name, 0):
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
    for at, what, *values in log.notes:
        if what not in ("began", "ended", "work"):
            continue
        if kind >= 0 and at > since:
            yield Slice(lane, KINDS[kind], since, at)
        since = at
        if what == "work":
            kind = values[0]
        elif what == "began":
            running = values[0], at
        elif running is not None and running[0] == values[0]:
            end = {} if values[2] == "ok" else {"end": values[2]}
            yield Slice(lane, values[1] or "?", running[1], at, {"closure": values[0], **end})
            running = None
    if kind >= 0:
        yield Slice(lane, KINDS[kind], since, log.end)
    if running is not None:
        args = {"closure": running[0], "end": "not in this trace"}
        yield Slice(lane, names.of_closure(running[0]), running[1], log.end, args)


def _requests(log: TaskLog, names: Names) -> Iterator[Slice]:
    """What a task asks of others, and what others ask of it."""
    for half in log.halves:
        if isinstance(half.message, messages.AskSpans):
            continue
        sizes = half.request_bytes, half.answer_bytes
        sent, received = sizes if half.is_client else sizes[::-1]
        told = {
            "variables": names.of_request(half),
            "bytes sent": sent,
            "bytes received": received,
            "end": half.outcome or ("" if half.is_over else "not in this trace"),
        }
        args = {**_fields(half.message), **_fields(half.answer)}
        args |= {name: value for name, value in told.items() if value}
        lane = f"to {label(half.link[2])}" if half.is_client else f"from {label(half.link[0])}"
        end = half.end if half.is_over else log.end
        yield Slice(lane, type(half.message).__name__, half.begin, end, args, half)


def _fields(message: Message | None) -> dict[str, Any]:
    found = {name: getattr(message, name) for name in _TOLD if hasattr(message, name)}
    return {name: value for name, value in found.items() if value not in (-1, "", None, False)}


def _results(log: TaskLog, names: Names) -> Iterator[Slice]:
    """Closures in flight, as the coordinator sees them: those of a message of results as one."""
    sent: dict[str, dict[int, float]] = defaultdict(dict)  # by worker and number
    last: dict[str, float] = defaultdict(lambda: log.begin)

    def batch(peer: str, begins: Mapping[int, float], end: float, *, is_over: bool) -> Slice:
        known = Counter(map(names.of_closure, begins))
        ((name, count),) = known.most_common(1)
        text = name if len(begins) == 1 else f"{name} x{count}" if len(known) == 1 else "closures"
        args = {"closures": "-".join(map(str, sorted({min(begins), max(begins)})))}
        if not is_over:
            args["end"] = "not in this trace"
        begin = max(min(begins.values()), last[peer])
        return Slice(f"in flight on {label(peer)}", text, begin, end, args)

    for at, is_sent, peer, message in log.told:
        if is_sent:
            sent[peer].update((closure[0], at) for closure in _closures_of(message))
        elif isinstance(message, messages.GiveBack):
            for number in message.closures:
                sent[peer].pop(number, None)
        elif isinstance(message, messages.ClosureResults) and message.results:
            numbers = [result[0] for result in message.results]
            begins = {number: sent[peer].pop(number, log.begin) for number in numbers}
            yield batch(peer, begins, at, is_over=True)
            last[peer] = at
    for peer, begins in sent.items():
        if begins:
            yield batch(peer, begins, log.end, is_over=False)


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
    ahead, apart = align(len(logs), _bounds(logs, pairs))
    first = min(log.begin - each for log, each in zip(logs, ahead, strict=True))
    last = max(log.end - each for log, each in zip(logs, ahead, strict=True))
    tasks = _tasks(logs)
    lost = {task: log.lost for task, log in zip(tasks, logs, strict=True) if log.lost}
    within = max(filter(math.isfinite, apart), default=math.inf)
    other = {
        **about,
        "clocks are off by at most": f"{within * 1e6:.0f} us",
        "dropped": lost or "nothing",
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": other})[:-1]
    file.write(head + ', "traceEvents": [')
    count, separator = 0, "\n"
    for event in _events(logs, tasks, pairs, [first + each for each in ahead]):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
        count += event["ph"] in "XC"
    file.write("\n]}\n")
    return Summary(tasks, last - first, count, lost, within)


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
    offsets: Sequence[float],
) -> Iterator[Event]:
    names, places = Names(logs), {}
    for pid, at in enumerate(sorted(range(len(logs)), key=lambda at: _order(logs[at].task)), 1):
        yield _named("process_name", pid, 0, name=tasks[at])
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        lanes: dict[str, int] = {}
        slices = slices_of(logs[at], names)
        for lane in sorted({each.lane for each in slices}, key=_lane_order):
            # A thread of its process's own number would be its main thread, for Perfetto.
            lanes[lane] = 1000 * pid + len(lanes)
            yield _named("thread_name", pid, lanes[lane], name=lane)
            yield _named("thread_sort_index", pid, lanes[lane], sort_index=lanes[lane])
        # In order on each lane; of those that begin together the longest is around the others.
        for each in sorted(slices, key=lambda each: (lanes[each.lane], each.begin, -each.end)):
            begin, end = _ns(each.begin - offsets[at]), _ns(each.end - offsets[at])
            if each.half is not None:
                places[id(each.half)] = pid, lanes[each.lane], begin
            event: Event = {"ph": "X", "name": each.name, "pid": pid, "tid": lanes[each.lane],
                            "ts": begin / 1000, "dur": (end - begin) / 1000}  # fmt: skip
            yield {**event, "args": each.args} if each.args else event
        for name, moment, value in samples_of(logs[at]):
            ts = _ns(moment - offsets[at]) / 1000
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts,
                   "args": {"value": value}}  # fmt: skip
    for number, (_, sent, _, served) in enumerate(pairs):
        if id(sent) in places and id(served) in places:
            for ph, half in (("s", sent), ("f", served)):
                pid, tid, begin = places[id(half)]
                event = {"ph": ph, "name": "request", "cat": "request", "id": number,
                         "pid": pid, "tid": tid, "ts": begin / 1000}  # fmt: skip
                yield {**event, "bp": "e"} if ph == "f" else event


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
