"""Tables of a status for a terminal, fitted to its height."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    OverflowMethod,
    RenderableType,
    RenderResult,
)
from rich.table import Table
from rich.text import Text

from psync.status.dashboard.view import groups, noticed, ps_row, staleness, worker_row
from psync.status.model import Status, WorkerStatus
from psync.status.units import number_text, seconds_text, short_names

GAP = 2
FOLDED = 16
"""Least width of a text that is folded."""

MAX_EVENTS = 8
MAX_ERRORS = 3

STYLES = {
    **dict.fromkeys(
        ("lost", "set aside", "given up", "silent", "broken", "connecting", "unconnected"), "red"
    ),
    "busy": "green", "connected": "green", "running": "green", "waiting": "yellow",
    "leaving": "yellow", "recovering": "red", "failed": "red", "starting": "yellow",
}  # fmt: skip

# Columns by their headings: the names of their cells in rows of the dashboard.
PS = {
    "ps": "task", "state": "state", "variables": "variables", "slots": "slots",
    "push/s": "pushes", "pull/s": "pulls", "in": "in", "out": "out", "queue": "queue",
    "dup.": "duplicates",
}  # fmt: skip
WORKERS = {
    "worker": "task", "state": "state", "/s": "rate", "mean": "mean", "stale": "stale",
    "dropped": "dropped", "lost": "losses", "for": "since", "runs": "closure",
}  # fmt: skip
TEXTS = ("ps", "worker", "state", "backup", "runs")


def tables_of(status: Status, height: int | None = None) -> RenderableType:
    """Return what is shown of a status.

    Args:
        status: Of a run.
        height: Lines that there are; None: as many as it takes. Of workers that do not fit, those
            in trouble are shown, then the slowest.
    """
    ps = [ps_row(each) for each in status.ps]
    backup = {"backup": "backup"} if any(row.get("backup") for row in ps) else {}
    optional = ("dup.", "slots", "in", "out", *backup, "variables")
    parts: list[RenderableType] = [*_head(status), "", _Rows(PS | backup, ps, optional)]
    events = status.events[:MAX_EVENTS]
    shown: Sequence[WorkerStatus] = status.workers
    more = 0
    if height is not None:
        room = max(3, height - len(parts) - len(ps) - len(events) - 7)
        if len(shown) > room:
            more = len(shown) - room + 1
            shown = noticed(shown, room - 1)
    optional = ("lost", "dropped", "stale", "runs", "for")
    parts += ["", _Rows(WORKERS, [*map(worker_row, shown)], optional)]
    if more:
        parts.append(f"and {more} more workers")
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
    stale = [f"{bar['count']} of {bar['label']}" for bar in staleness(steps)]
    lines = [
        first,
        _line("closures", ", ".join(counts)),
        _line("step", f"{steps.global_step}, {number_text(steps.steps_per_s)} steps/s"),
    ]
    if stale:
        lines.append(_line("staleness", ", ".join(stale)))
    for group in groups(steps):
        text = f"{group['name']}: {group['text']}"
        lines += [_line("sync", text, whole=True), _line("", group["more"])]
    if status.reported:
        values = (f"{name} {value:.4g}" for name, value in status.reported.items())
        lines.append(_line("reported", ", ".join(values)))
    lines.append(_line("waits for", status.waits_for))
    seen = [(each.last_error, each.task) for each in status.workers if each.last_error is not None]
    for error, task in sorted(seen, key=lambda each: each[0].seconds)[:MAX_ERRORS]:
        newest, *_ = error.text.split("\n")
        ago = seconds_text(error.seconds)
        lines.append(_line("error", f"{ago} ago on {short_names(task)}: {newest}"))
    lines += [_line("note", note) for note in status.notes]
    return [*lines]


def _if_any(count: int, what: str) -> list[str]:
    return [f"{count} {what}"] if count else []


@dataclass
class _Rows:
    """A table that leaves columns out where the terminal is narrow.

    Args:
        columns: The names of their cells, by their headings.
        rows: Their cells, some of which may be missing.
        optional: The columns that can be left out, the first one first.
    """

    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, str]]
    optional: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {
            heading: max(len(heading), *(len(row.get(name, "")) for row in self.rows), 0)
            for heading, name in self.columns.items()
        }
        *_, last = self.columns
        if last in TEXTS:  # it is folded where it does not fit
            widths[last] = min(widths[last], FOLDED)
        shown = dict(self.columns)
        for heading in self.optional:
            if sum(widths[each] + GAP for each in shown) - GAP <= options.max_width:
                break
            del shown[heading]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in shown:
            table.add_column(
                heading, justify="left" if heading in TEXTS else "right",
                no_wrap=heading != last or last not in TEXTS, overflow="ellipsis",
            )  # fmt: skip
        for row in self.rows:
            texts = [row.get(name, "") for name in shown.values()]
            table.add_row(*(Text(_plain(text), STYLES.get(text, "")) for text in texts))
        yield table


# Words and numbers.


def _line(head: str, text: str, *, whole: bool = False) -> Text:
    how: OverflowMethod = "fold" if whole else "ellipsis"
    return Text.assemble((f"{head:>10}  ", "dim"), _plain(text), no_wrap=not whole, overflow=how)


def _plain(text: str) -> str:
    """Return a text of the program's without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)
