"""Numbers, durations, sizes and names of tasks, as people read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MAX_NAMED = 3


def short_names(text: str) -> str:
    """Return a text in which "/job:worker/task:0" is "worker 0", wherever it stands."""
    return re.sub(r"/job:(\w+)/task:(\d+)", r"\1 \2", text)


def tasks_text(tasks: Sequence[str]) -> str:
    """Return "worker 0, worker 1, worker 2 and 4 more"; sentences that name tasks will do, too."""
    more = len(tasks) - MAX_NAMED
    names = ", ".join(map(short_names, tasks[:MAX_NAMED]))
    return f"{names} and {more} more" if more > 0 else names


def waiting_text(waiting: Mapping[str, int]) -> str:
    """Return how many wait, and for what: "0", "3: lock 2, gate 1"."""
    causes = ", ".join(f"{cause} {count}" for cause, count in waiting.items() if count)
    return f"{sum(waiting.values()):,}" + (f": {causes}" if causes else "")


def number_text(value: float) -> str:
    """Return a rate: "3.2", "1,250"."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def bytes_text(value: float) -> str:
    """Return a size: "512 B", "1.9 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(value: float) -> str:
    """Return a duration: "15 ms", "3.2 s", "42 s", "3:05 min"."""
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    minutes, seconds = divmod(int(value), 60)
    if minutes < 120:
        return f"{minutes}:{seconds:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"
