"""What is drawn of each task: slices on lanes, and counters. Times are by the task's own clock.

Slices of a lane never overlap unless one lies within the other. What goes on at once is on
several lanes: "from worker-0", "from worker-0 (2)".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psync.net.tracing.readings import Half, Link, TaskLog
from psync.wire.codec import Message
from psync.wire.messages import (
    AskSpans,
    ClosureResults,
    Contribute,
    Contributed,
    GivenBack,
    PullRows,
    Pushed,
    RunClosures,
    RunReplica,
)

KINDS = ("compute", "pull", "push", "wait")  # as ``client.work_meter``

SHOWN_NAMES = 4
"""Of the variables of a request; then how many more there are."""

_TOLD = ("closure", "local_step", "step", "op", "outcome", "staleness", "token", "partial", "group")
"""Fields of messages that are worth showing."""


@dataclass(slots=True, eq=False)
class Slice:
    """Something that took time."""

    lane: str
    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)
    half: Half | None = None  # of the request that it is


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter's value from a moment on."""

    name: str
    at: float
    value: float


@dataclass(slots=True)
class Names:
    """What numbers in messages stand for, gathered from all logs."""

    closures: dict[int, str] = field(default_factory=dict)
    variables: dict[int, str] = field(default_factory=dict)
    sets: dict[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    """Variables of what a connection calls by a number: "client incarnation lane server", "3"."""

    @classmethod
    def of(cls, logs: Sequence[TaskLog]) -> Names:
        """Gather them."""
        names = cls()
        for log in logs:
            names.variables.update(log.facts.get("variables", {}))
            names.closures.update((number, name) for number, name in log.facts.get("running", ()))
            for note in log.notes:
                if note[1] == "ended":
                    names.closures[note[2]] = note[3]
            for client, sets in log.facts.get("sets", {}).items():
                for number, variables in sets.items():
                    names.sets[f"{client} {log.task}", number] = variables
            for half in log.halves:
                members = getattr(half.message, "members", None)
                if members and hasattr(half.message, "set_id"):
                    key = _set_of(half.link, half.message)
                    names.sets[key] = [member[-2] for member in members]
        names._name_unfinished(logs)
        return names

    def _name_unfinished(self, logs: Sequence[TaskLog]) -> None:
        """Name closures that did not come to their end, after others of the same function."""
        keys: dict[int, bytes] = {}
        for log in logs:
            for _, _, _, message in log.told:
                keys.update((closure[0], closure[1]) for closure in _closures_of(message))
        functions = {keys[each]: name for each, name in self.closures.items() if each in keys}
        for closure, key in keys.items():
            if key in functions:
                self.closures.setdefault(closure, functions[key])

    def of_request(self, half: Half) -> str:
        """Return the names of the variables of a request; "": it has none, or nobody knows."""
        message = half.message
        if isinstance(message, PullRows):
            variables: Sequence[int] = [part[0] for part in message.parts]
        elif hasattr(message, "set_id"):
            variables = self.sets.get(_set_of(half.link, message), ())
        else:
            return ""
        names = [self.variables.get(each, f"variable {each}") for each in dict.fromkeys(variables)]
        more = len(names) - SHOWN_NAMES
        return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _set_of(link: Link, message: Any) -> tuple[str, str]:
    client, incarnation, server, _, lane = link
    number = f"whole {message.set_id}" if isinstance(message, Contribute) else str(message.set_id)
    return f"{client} {incarnation} {lane} {server}", number


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


def samples_of(log: TaskLog) -> Iterator[Sample]:
    """Return all counters of a task."""
    for note in log.notes:
        if note[1] == "counters":
            for name, value in note[2].items():
                yield Sample(name, note[0], value)
    newest: dict[str, int] = {}
    for half in sorted((each for each in log.halves if each.is_over), key=lambda each: each.end):
        answer, name, step = half.answer, "", 0
        if not half.is_client and isinstance(answer, Contributed):
            name, step = "global step", answer.token
        elif not half.is_client and isinstance(answer, Pushed):
            name, step = "optimizer step", answer.step
        if name and step > newest.get(name, 0):
            newest[name] = step
            yield Sample(name, half.end, step)


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
        name = names.closures.get(running[0], f"closure {running[0]}")
        args = {"closure": running[0], "end": "not in this trace"}
        yield Slice(lane, name, running[1], log.end, args)


def _requests(log: TaskLog, names: Names) -> Iterator[Slice]:
    """What a task asks of others, and what others ask of it."""
    for half in log.halves:
        if isinstance(half.message, AskSpans):
            continue
        end = half.end if half.is_over else log.end
        args = {**_fields(half.message), **(_fields(half.answer) if half.answer else {})}
        if variables := names.of_request(half):
            args["variables"] = variables
        if half.sent:
            args["bytes sent"] = half.sent
        if half.received:
            args["bytes received"] = half.received
        if half.outcome or not half.is_over:
            args["end"] = half.outcome or "not in this trace"
        lane = f"{'to' if half.is_client else 'from'} {label(half.other)}"
        yield Slice(lane, type(half.message).__name__, half.begin, end, args, half)


def _fields(message: Message) -> dict[str, Any]:
    found = {name: getattr(message, name) for name in _TOLD if hasattr(message, name)}
    return {name: value for name, value in found.items() if value not in (-1, "", None, False)}


def _results(log: TaskLog, names: Names) -> Iterator[Slice]:
    """Closures in flight, as the coordinator sees them: those of a message of results as one."""
    sent: dict[tuple[str, int], float] = {}
    last: dict[str, float] = defaultdict(lambda: log.begin)
    for at, is_sent, peer, message in log.told:
        if is_sent:
            sent.update(((peer, closure[0]), at) for closure in _closures_of(message))
        elif isinstance(message, GivenBack):
            for number in message.closures:
                sent.pop((peer, number), None)
        elif isinstance(message, ClosureResults) and message.results:
            numbers = [result[0] for result in message.results]
            begins = [sent.pop((peer, number), log.begin) for number in numbers]
            yield _batch(peer, numbers, names, max(min(begins), last[peer]), at)
            last[peer] = at
    for peer in dict.fromkeys(peer for peer, _ in sent):
        numbers = [number for name, number in sent if name == peer]
        begin = max(min(sent[peer, number] for number in numbers), last[peer])
        yield _batch(peer, numbers, names, begin, log.end, is_over=False)


def _closures_of(message: Message) -> Sequence[tuple[int, bytes, int, list[int]]]:
    if isinstance(message, RunReplica):
        return [message.closure]
    return message.closures if isinstance(message, RunClosures) else ()


def _batch(
    peer: str,
    numbers: Sequence[int],
    names: Names,
    begin: float,
    end: float,
    *,
    is_over: bool = True,
) -> Slice:
    known = Counter(names.closures.get(number, f"closure {number}") for number in numbers)
    ((name, count),) = known.most_common(1)
    text = name if len(numbers) == 1 else f"{name} x{count}" if len(known) == 1 else "closures"
    span = f"{min(numbers)}-{max(numbers)}" if len(numbers) > 1 else str(numbers[0])
    args = {"closures": span, **({} if is_over else {"end": "not in this trace"})}
    return Slice(f"in flight on {label(peer)}", text, begin, end, args)


def _sync_steps(log: TaskLog) -> Iterator[Slice]:
    """Synchronous steps on ps 0, from the first gradient until it is closed."""
    served = [each for each in log.halves if not each.is_client and each.is_over]
    answers = [
        (half.message.group, half.answer, half)
        for half in sorted(served, key=lambda each: each.end)
        if isinstance(half.message, Contribute) and isinstance(half.answer, Contributed)
    ]
    closed: dict[tuple[int, int], list[tuple[Contributed, Half]]] = defaultdict(list)
    for group, answer, half in answers:
        closed[group, answer.token].append((answer, half))
    last: dict[int, float] = defaultdict(lambda: log.begin)
    for (group, token), several in closed.items():
        counted = [(answer, half) for answer, half in several if answer.outcome == "accepted"]
        if not counted:
            continue
        end = counted[0][1].end
        begin = max(min(half.begin for _, half in counted), last[group])
        last[group] = end
        args: dict[str, Any] = {"counted": counted[0][0].count, "group": group}
        args["dropped"] = sum(answer.outcome == "stale" for answer, _ in several)
        if counted[0][0].partial:
            args["partial"] = True
        yield Slice("steps", f"step {token - 1}", begin, max(begin, end), args)
