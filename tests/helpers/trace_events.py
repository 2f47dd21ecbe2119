"""A check of files in Chrome's Trace Event format, and what tests look up in them.

Source: "Trace Event Format" (Google, 2016); what Perfetto imports: events X nest on a thread.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

NEEDED = {
    "X": {"dur", "name"},
    "C": {"args", "name"},
    "M": {"args", "name"},
    "s": {"id"},
    "f": {"id"},
}


class TraceFile:
    """A trace that has been checked: what is wrong with it is an AssertionError."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        self.about: dict[str, Any] = data["otherData"]
        self.events: list[Event] = data["traceEvents"]
        for event in self.events:
            assert event["ph"] in NEEDED, event
            assert {"ts", "pid", "tid"} | NEEDED[event["ph"]] <= set(event), event
            assert event["ts"] >= 0, event
        self.tasks = {each["pid"]: each["args"]["name"] for each in self._all("M", "process_name")}
        self.lanes = {
            (each["pid"], each["tid"]): each["args"]["name"]
            for each in self._all("M", "thread_name")
        }
        self._first_at: dict[tuple[int, int, float], Event] = {}
        for each in self._all("X"):
            self._first_at.setdefault(_place(each), each)
        assert len(set(self.tasks.values())) == len(self.tasks)
        assert {each["pid"] for each in self.events} == set(self.tasks)
        self._check_lanes()
        self._check_flows()

    def _all(self, ph: str, name: str = "") -> list[Event]:
        return [e for e in self.events if e["ph"] == ph and (not name or e["name"] == name)]

    def _check_lanes(self) -> None:
        by_lane: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self._all("X"):
            assert event["dur"] >= 0, event
            assert (event["pid"], event["tid"]) in self.lanes, event
            by_lane[event["pid"], event["tid"]].append(event)
        for events in by_lane.values():
            begins = [_ns(each["ts"]) for each in events]
            assert begins == sorted(begins)
            around: list[int] = []  # ends of the slices that this one lies in
            for event in events:
                begin, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
                while around and around[-1] <= begin:
                    around.pop()
                assert not around or end <= around[-1], f"{event} is neither in nor after another"
                around.append(end)

    def _check_flows(self) -> None:
        begins = {each["id"]: each for each in self._all("s")}
        ends = {each["id"]: each for each in self._all("f")}
        assert set(begins) == set(ends)
        for number, begin in begins.items():
            # Nothing comes before it was sent: that is what clocks are aligned by.
            # Each is rounded by itself, to the nanosecond.
            assert _ns(begin["ts"]) <= _ns(ends[number]["ts"]) + 1, (begin, ends[number])
            assert self._slice_at(begin)["name"] == self._slice_at(ends[number])["name"]

    def _slice_at(self, flow: Event) -> Event:
        return self._first_at[_place(flow)]

    def slices(self, task: str, lane: str = "", name: str = "") -> list[Event]:
        """Return slices of a task, of lanes and of names that begin so."""
        return [
            each
            for each in self._all("X")
            if self.tasks[each["pid"]] == task
            and self.lanes[each["pid"], each["tid"]].startswith(lane)
            and each["name"].startswith(name)
        ]

    def counter(self, task: str, name: str) -> list[float]:
        """Return the values of a counter, in order."""
        found = [each for each in self._all("C", name) if self.tasks[each["pid"]] == task]
        assert [each["ts"] for each in found] == sorted(each["ts"] for each in found)
        return [each["args"]["value"] for each in found]

    def arrows(self) -> list[tuple[str, str, str]]:
        """Return (name of the request, task that sent it, task that served it)."""
        ends = {each["id"]: each for each in self._all("f")}
        return [
            (
                self._slice_at(each)["name"],
                self.tasks[each["pid"]],
                self.tasks[ends[each["id"]]["pid"]],
            )
            for each in self._all("s")
        ]


def _place(event: Event) -> tuple[int, int, float]:
    return event["pid"], event["tid"], event["ts"]


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
