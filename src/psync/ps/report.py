"""The description of a ps for task reports: contents, and waiting requests.

Most of it is read off the counters that ``ps_statistics`` shows, so what has counters is in the
report.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from psync.net.connection import Connection

MAX_LISTED = 20
"""Peers and locks that are named."""


def describe_ps(
    task: str,
    coordinator: int,
    statistics: Mapping[str, Any],
    waits: Collection[str],
    waiting: Collection[tuple[str, int]],
    peers: Collection[Connection],
) -> list[str]:
    """Describe a ps.

    Args:
        task: Its name.
        coordinator: Incarnation of the one that it serves; 0: none so far.
        statistics: Its counters.
        waits: Who waits at its locks and its gate.
        waiting: (task, incarnation) of the replicas that wait for a token here.
        peers: Its open connections.
    """
    store = statistics["store"]
    serves = f"serves coordinator {coordinator}" if coordinator else "waits for a coordinator"
    lines = [
        f"{task}: {serves}",
        f"  {store['shards']} shards, {store['bytes']} bytes, {store['slot_bytes']} of slots",
        *(f"  {line}" for line in _some(list(waits))),
    ]
    for name, group in statistics["sync"].items():
        lines.append(
            f"  synchronous group {name}: step {group['step']}, {group['counted']} of "
            f"{group['target']} counted, {group['waiting']} wait for a token"
        )
    if waiting:
        names = _some([f"{name} ({incarnation})" for name, incarnation in sorted(waiting)])
        lines.append(f"  waiting for others: {', '.join(names)}")
    ends = _some(sorted(f"{peer.task} ({peer.incarnation}) {peer.lane}" for peer in peers))
    lines.append(f"  connections: {', '.join(ends) or 'none'}")
    rest = {key: value for key, value in statistics.items() if key not in ("store", "sync")}
    lines.append(f"  counters: {json.dumps(rest, default=str)}")
    return lines


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], f"and {more} more"] if more > 0 else lines
