"""Tables of a status for a terminal, fitted to its height."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from psync.status.model import GroupStatus, PsStatus, Status, WorkerStatus
from psync.status.units import (
    bytes_text,
    number_text,
    seconds_text,
    task_text,
    tasks_text,
    waiting_text,
)

GAP = 2
FOLDED = 16
"""Least width of a text that is folded."""

MAX_EVENTS = 8
MAX_ERRORS = 3

TROUBLE = ("lost", "set aside", "given up", "silent", "broken", "connecting", "unconnected")
STYLES = {
    **dict.fromkeys(TROUBLE, "red"),
    "busy": "green", "connected": "green", "running": "green", "waiting": "yellow",
    "leaving": "yellow", "recovering": "red", "failed": "red", "starting": "yellow",
}  # fmt: skip


def tables_of(status: Status, height: int | None = None) -> RenderableType:
    """Return what is shown of a status.

    Args:
        status: Of a run.
        height: Lines that there are; None: as many as it takes. Of workers that do not fit, those
            in trouble are shown, then the slowest.
    """
    parts: list[RenderableType] = [*_head(status)]
    if status.steps.groups:
        parts += ["", _groups(status.steps.groups)]
    parts += ["", _ps(status.ps)]
    events = status.events[:MAX_EVENTS]
    room = None
    if height is not None:
        used = len(parts) + len(status.ps) + 2 * len(status.steps.groups) + 2 + len(events) + 5
        room = max(3, height - used)
    parts += ["", *_workers(status.workers, room)]
    if events:
        parts += ["", *(_line(f"{seconds_text(each.seconds)} ago", each.text) for each in events)]
    return Group(*parts)


def _head(status: Status) -> list[RenderableType]:
    queue, steps = status.queue, status.steps
    first = Text.assemble(
        (status.program, "bold"), f" (process {status.pid})  ",
        (status.state, STYLES.get(status.state, "")), f"  up {seconds_text(status.uptime_s)}",
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    counts = [
        f"{number_text(queue.closures_per_s)} closures/s", f"{queue.in_flight} in flight",
        f"{queue.queued} queued", f"{queue.finished} finished",
        *_if_any(queue.waiting, "waiting for inputs"), *_if_any(queue.failed, "failed"),
        *_if_any(queue.cancelled, "cancelled"), *_if_any(queue.put_back, "run again"),
    ]  # fmt: skip
    # Each up to 4, and all above together.
    stale = [f"{count} of {each}" for each, count in steps.staleness.items() if int(each) <= 4]
    many = sum(count for each, count in steps.staleness.items() if int(each) > 4)
    stale += [f"{many} of 5 and more"] if many else []
    lines = [
        first,
        _line("closures", ", ".join(counts)),
        _line("step", f"{steps.global_step}, {number_text(steps.steps_per_s)} steps/s"),
    ]
    if stale:
        lines.append(_line("staleness", ", ".join(stale)))
    for bound in steps.bounds:
        text = f"rounds {bound.slowest} to {bound.fastest}, at most {bound.max_staleness} apart"
        if bound.waiting:
            text += f"; {tasks_text(bound.waiting)} too far ahead of {tasks_text(bound.waits_for)}"
        lines.append(_line("bound", text))
    if status.reported:
        values = (f"{name} {value:.4g}" for name, value in status.reported.items())
        lines.append(_line("reported", ", ".join(values)))
    lines.append(_line("waits for", status.waits_for))
    seen = [(each.last_error, each.task) for each in status.workers if each.last_error is not None]
    for error, task in sorted(seen, key=lambda each: each[0].seconds)[:MAX_ERRORS]:
        newest, *_ = error.text.split("\n")
        ago = seconds_text(error.seconds)
        lines.append(_line("error", f"{ago} ago on {task_text(task)}: {newest}"))
    lines += [_line("note", note) for note in status.notes]
    return [*lines]


def _if_any(count: int, what: str) -> list[str]:
    return [f"{count} {what}"] if count else []


@dataclass
class _Rows:
    """A table that leaves columns out where the terminal is narrow.

    Args:
        columns: Their headings.
        rows: Their cells; those at the end of a row may be missing.
        left: The columns of texts.
        optional: Those that can be left out, the first one first.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    left: Sequence[str]
    optional: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {
            name: max(len(name), *(len(row[at]) for row in self.rows if at < len(row)), 0)
            for at, name in enumerate(self.columns)
        }
        last = self.columns[-1]
        if last in self.left:  # it is folded where it does not fit
            widths[last] = min(widths[last], FOLDED)
        shown = list(self.columns)
        for name in self.optional:
            if sum(widths[each] + GAP for each in shown) - GAP <= options.max_width:
                break
            shown.remove(name)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in shown:
            table.add_column(
                name, justify="left" if name in self.left else "right",
                no_wrap=name != last or last not in self.left, overflow="ellipsis",
            )  # fmt: skip
        for row in self.rows:
            cells = dict(zip(self.columns, row, strict=False))
            table.add_row(*(cells.get(name, "") for name in shown))
        yield table


def _groups(groups: Sequence[GroupStatus]) -> _Rows:
    rows = [
        (
            Text(_plain(group.name)), str(group.step), number_text(group.steps_per_s),
            f"{group.counted} of {group.target}", str(group.partial_steps), str(group.dropped),
            str(group.duplicates), tasks_text(group.lacks + group.waits_for),
        )
        for group in groups
    ]  # fmt: skip
    return _Rows(
        ("synchronous", "step", "/s", "counted", "partial", "dropped", "duplicate", "waits for"),
        rows, left=("synchronous", "waits for"),
        optional=("duplicate", "partial", "/s", "dropped", "step"),
    )  # fmt: skip


def _ps(tasks: Sequence[PsStatus]) -> _Rows:
    columns = (
        "ps", "state", "variables", "slots", "push/s", "pull/s", "in/s", "out/s", "queue", "dup.",
    )  # fmt: skip
    backup = ("backup",) if any(ps.backup is not None for ps in tasks) else ()
    rows: list[list[str | Text]] = []
    for ps in tasks:
        rows.append([task_text(ps.task), _state(ps.state)])
        if ps.age_s is None:
            continue
        rows[-1] += [
            bytes_text(ps.bytes), bytes_text(ps.slot_bytes), number_text(ps.pushes_per_s),
            number_text(ps.pulls_per_s), bytes_text(ps.bytes_in_per_s),
            bytes_text(ps.bytes_out_per_s), waiting_text(ps.waiting), str(ps.duplicates),
        ]  # fmt: skip
        if ps.backup is not None:
            behind = f" -{ps.backup.behind}" if ps.backup.behind else ""  # entries that it lacks
            rows[-1].append(f"{ps.backup.state}{behind}")
    return _Rows(
        (*columns, *backup), rows, left=("ps", "state", "backup"),
        optional=("dup.", "slots", "in/s", "out/s", *backup, "variables"),
    )  # fmt: skip


def _workers(workers: Sequence[WorkerStatus], room: int | None) -> list[RenderableType]:
    shown, more = list(workers), 0
    if room is not None and len(shown) > room:
        more = len(shown) - room + 1
        shown = sorted(shown, key=_by_trouble)[: room - 1]
    rows = [
        (
            task_text(each.task), _state(each.state), number_text(each.closures_per_s),
            "" if each.mean_s is None else seconds_text(each.mean_s),
            "" if each.staleness is None else str(each.staleness), str(each.dropped),
            str(each.losses),
            "" if each.closure is None else seconds_text(each.closure.seconds),
            Text("" if (run := each.closure) is None else _plain(f"{run.name} {run.id}")),
        )
        for each in shown
    ]  # fmt: skip
    table = _Rows(
        ("worker", "state", "/s", "mean", "stale", "dropped", "lost", "for", "runs"), rows,
        left=("worker", "state", "runs"), optional=("lost", "dropped", "stale", "runs", "for"),
    )  # fmt: skip
    return [table, *([f"and {more} more workers"] if more else [])]


def _state(state: str) -> Text:
    return Text(state, STYLES.get(state, ""))


def _by_trouble(worker: WorkerStatus) -> tuple[bool, float]:
    seconds = 0.0 if worker.closure is None else worker.closure.seconds
    return worker.state not in TROUBLE, -seconds


# Words and numbers.


def _line(head: str, text: str) -> Text:
    return Text.assemble((f"{head:>10}  ", "dim"), _plain(text), no_wrap=True, overflow="ellipsis")


def _plain(text: str) -> str:
    """Return a text of the program's without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)
