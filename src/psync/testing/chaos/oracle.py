"""The oracle of a chaos run: final values, derived from the program's journal.

The journal is read as the program's lives went: a life that went on from a checkpoint has forgotten
what came after it. What is left says of each closure how often its row must have been counted:

    closure                                                     its row, on each ps
    done, "accepted" or "duplicate"                             1
    done, "stale"                                               0
    named by a rollback                                         0 or 1, by the call
    had left traces in a checkpoint from which a life went on   as it was there
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

COUNTED = ("accepted", "duplicate")
SHOWN = 5  # of each kind of fault


@dataclass
class Expected:
    """What the journal says."""

    done: dict[int, tuple[int, str]] = field(default_factory=dict)  # closure: (its id, outcome)
    partial: dict[int, tuple[int, int]] = field(default_factory=dict)  # row and mark it left
    undone: set[int] = field(default_factory=set)  # named by a rollback
    stop: int = 0  # all closures below were scheduled
    lives: int = 0
    rollbacks: int = 0
    failovers: int = 0  # to backups
    checkpoints: int = 0
    ended: bool = False
    faults: list[str] = field(default_factory=list)  # what cannot be, already here


def read(lines: Iterable[Mapping[str, Any]]) -> Expected:
    """Return what the lines of a journal say."""
    expected = Expected()
    undone_ids: set[int] = set()
    for line in lines:
        match line["kind"]:
            case "life":
                undone_ids = set()
                _begin_life(expected, line)
            case "scheduled":
                expected.stop = max(expected.stop, line["stop"])
            case "failover":
                expected.failovers += 1
            case "rollback":
                expected.rollbacks += 1
                undone_ids |= set(line["closures"])
                for number, (closure, _) in expected.done.items():
                    if closure in undone_ids:
                        expected.undone.add(number)
            case "done":
                for number, closure, outcome, *_ in line["closures"]:
                    if number in expected.done:
                        expected.faults.append(f"closure {number} is said to be done twice")
                    expected.done[number] = (closure, outcome)
                    if closure in undone_ids or outcome == "rolled_back":
                        expected.undone.add(number)
            case "saved":
                expected.checkpoints += 1
            case "end":
                expected.ended = True
                expected.stop = line["next"]
    return expected


def _begin_life(expected: Expected, line: Mapping[str, Any]) -> None:
    """A life has begun: what came after its checkpoint is forgotten."""
    expected.lives += 1
    first, again = line["next"], set(line["again"])
    partial = {int(number): tuple(trace) for number, trace in line["partial"].items()}
    expected.stop = first
    expected.done = {
        number: said
        for number, said in expected.done.items()
        if number < first and number not in again and number not in partial
    }
    expected.partial = {
        **{n: trace for n, trace in expected.partial.items() if n < first and n not in again},
        **partial,
    }
    expected.undone = {n for n in expected.undone if n in expected.done}
    known = expected.done.keys() | expected.partial.keys() | again
    for number in range(first):
        if number not in known:
            expected.faults.append(
                f"life {expected.lives} went on from a checkpoint that counts closure {number} as "
                "done, which nobody had said"
            )
            break


def check(
    expected: Expected, arrays: Mapping[str, np.ndarray], num_ps: int, num_rows: int
) -> list[str]:
    """Return what is wrong with the final counters.

    Args:
        expected: What the journal says.
        arrays: "rows", "total" and "marked", as they were pulled at the end.
        num_ps: Number of ps tasks.
        num_rows: Rows on each of them.
    """
    faults = list(expected.faults)
    if not expected.ended:
        faults.append("the program has not come to its end")
    rows = arrays["rows"].reshape(num_ps, num_rows)
    marked = arrays["marked"].reshape(num_ps, num_rows)
    total = arrays["total"]
    for name, counted in (("rows", rows), ("marked", marked)):
        for ps in range(1, num_ps):
            faults += [
                f"{name}: closure {row} was counted {counted[0, row]:g} times on ps 0 and "
                f"{counted[ps, row]:g} times on ps {ps}"
                for row in np.flatnonzero(counted[ps] != counted[0])[:SHOWN]
            ]
    faults += [
        f"ps {ps}: the total is {total[ps]:g}, and the rows of the same pushes make "
        f"{rows[ps].sum():g}"
        for ps in range(num_ps)
        if total[ps] != rows[ps].sum()
    ]
    missing = [
        number
        for number in range(expected.stop)
        if number not in expected.done and number not in expected.partial
    ]
    if missing:
        faults.append(f"{len(missing)} closures were never said to be done: {missing[:5]}")
    faults += _compare("rows", rows[0], _bounds(expected, 0, num_rows))
    faults += _compare("marked", marked[0], _bounds(expected, 1, num_rows))
    return faults


def _bounds(expected: Expected, which: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each row must have been counted at least, and at most."""
    low, high = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    for number, (_, outcome) in expected.done.items():
        counts = int(which == 1 or outcome in COUNTED or number in expected.undone)
        high[number % num_rows] += counts
        low[number % num_rows] += counts and number not in expected.undone
    for number, trace in expected.partial.items():
        low[number % num_rows] += trace[which]
        high[number % num_rows] += trace[which]
    return low, high


def _compare(name: str, found: np.ndarray, bounds: Sequence[np.ndarray]) -> list[str]:
    low, high = bounds
    wrong = np.flatnonzero((found < low) | (found > high))
    faults = [
        f"{name}: closure {row} was counted {found[row]:g} times, expected {low[row]}"
        + (f" to {high[row]}" if high[row] != low[row] else "")
        for row in wrong[:SHOWN]
    ]
    if len(wrong) > SHOWN:
        faults.append(f"{name}: {len(wrong)} closures in all were not counted as they should")
    return faults
