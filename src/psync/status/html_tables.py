"""Tables as HTML, for notebooks: what ``_repr_html_`` of clusters, variables and others returns.

No colours and no fonts of their own: they take those of the page, be it dark or light.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psync.closures.queue import QueueStatistics
    from psync.coordinator import Coordinator

MAX_ROWS = 60
"""So that a model of thousands of shards does not fill the notebook; ``str()`` shows all."""

CELL = "padding:0.1em 0.8em;border:0;border-bottom:1px solid rgba(128,128,128,0.35)"
"""Grey that is seen on white and on black."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a title; numbers are right-aligned, with separators of thousands.

    Args:
        title: A line above it.
        columns: Headings.
        rows: As many cells each; text is escaped.
    """
    lines = ["<div>", f"<strong>{html.escape(title)}</strong>"]
    if rows:
        heads = "".join(_cell("th", name, rows[0][place]) for place, name in enumerate(columns))
        lines += ['<table style="border-collapse:collapse">', f"<thead><tr>{heads}</tr></thead>"]
        lines.append("<tbody>")
        for row in rows[:MAX_ROWS]:
            lines.append(f"<tr>{''.join(_cell('td', value, value) for value in row)}</tr>")
        lines.append("</tbody></table>")
    if len(rows) > MAX_ROWS:
        lines.append(f"and {len(rows) - MAX_ROWS:,} more")
    return "\n".join([*lines, "</div>"])


def table_of_workers(coordinator: Coordinator | None) -> str:
    """Return what a coordinator shows; None: it does not run."""
    if coordinator is None:
        return table("ClusterCoordinator, not running", (), ())
    closures: QueueStatistics = coordinator.statistics()["closures"]
    here = {each.worker: each for each in closures.workers}
    rows: list[tuple[object, ...]] = []
    for name, address in coordinator.links.workers.addresses().items():
        if (worker := here.get(name)) is None:
            rows.append((name, address, "away", 0, 0, ""))
            continue
        mean = "" if worker.mean_s is None else f"{worker.mean_s * 1e3:,.1f} ms"
        rows.append((name, address, "here", worker.in_flight, worker.finished, mean))
    title = (
        f"ClusterCoordinator: {len(here)} of {len(rows)} workers; closures: "
        f"{closures.queued + closures.waiting:,} queued, {closures.in_flight:,} in flight, "
        f"{closures.finished:,} finished, {closures.failed:,} failed"
    )
    return table(title, ("worker", "address", "state", "in flight", "finished", "takes"), rows)


def _cell(tag: str, value: object, kind: object) -> str:
    is_number = isinstance(kind, int) and not isinstance(kind, bool)
    text = f"{value:,}" if isinstance(value, int) and is_number else str(value)
    side = "right" if is_number else "left"
    return f'<{tag} style="text-align:{side};{CELL}">{html.escape(text)}</{tag}>'
