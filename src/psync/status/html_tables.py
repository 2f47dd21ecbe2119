"""Tables as HTML, for notebooks: what ``_repr_html_`` of clusters, variables and others returns.

No colours and no fonts of their own: they take those of the page, be it dark or light.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

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


def _cell(tag: str, value: object, kind: object) -> str:
    is_number = isinstance(kind, int) and not isinstance(kind, bool)
    text = f"{value:,}" if isinstance(value, int) and is_number else str(value)
    side = "right" if is_number else "left"
    return f'<{tag} style="text-align:{side};{CELL}">{html.escape(text)}</{tag}>'
