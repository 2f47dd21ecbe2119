"""What a page is about: a run that goes on, or a run log."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import json
from typing import Any

from psync.status.dashboard.run_log import FinishedRun
from psync.status.dashboard.view import LANE_CELLS, RECENT_S, History, Row, columns, row_of, view_of
from psync.status.model import Status

KEPT_STATUSES = 2 * LANE_CELLS


def to_json(value: Any) -> str:
    """Return JSON that a browser reads: no NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class LiveShow:
    """A run that goes on. There is only the newest moment."""

    def __init__(self) -> None:
        self.history = History()
        self.newest: Status | None = None

    def add(self, status: Status) -> None:
        """Note the newest status."""
        self.newest = status
        self.history.add(status)

    async def view(self, span: str, time: float | None) -> str:
        """Return the page as JSON; "{}" before the first status. Cancellation: safe."""
        if self.newest is None:
            return "{}"
        return to_json(view_of(self.newest, self.history, span=span))

    async def status(self, time: float | None) -> Status | None:
        """Return the newest status. Cancellation: safe."""
        return self.newest


class LogShow:
    """A run that is read from its log; every moment of it can be looked at.

    Args:
        run: The log. All of it is read once.
    """

    def __init__(self, run: FinishedRun) -> None:
        self._run = run
        self._whole = History()
        self._rows: list[Row] = []
        self._times: list[float] = []
        for status in run.statuses():
            self._whole.add(status)
            self._rows.append(row_of(status))
            self._times.append(status.time)
        self._status = functools.lru_cache(KEPT_STATUSES)(self._read)
        self._reading = asyncio.Lock()

    def _read(self, index: int) -> Status:
        status = next(self._run.statuses(index, index + 1))
        if self._run.ended and index == len(self._times) - 1:
            return dataclasses.replace(status, state="ended")
        return status

    def _index(self, time: float | None) -> int:
        """Return the number of the last moment that is not after a time."""
        if time is None:
            return len(self._times) - 1
        return max(0, bisect.bisect_right(self._times, time) - 1)

    async def view(self, span: str, time: float | None) -> str:
        """Return the page as JSON. Cancellation: safe."""
        async with self._reading:
            return await asyncio.to_thread(self.view_at, span, self._index(time))

    def series(self) -> dict[str, list[float | None]]:
        """Return the charts of the whole run."""
        return self._whole.series("run")

    def view_at(self, span: str, index: int) -> str:
        """Return the page of a moment, by its number, as JSON."""
        lanes = History()
        for at in range(max(0, index + 1 - LANE_CELLS), index + 1):
            lanes.add_lanes(self._status(at))
        status = self._status(index)
        view = view_of(status, lanes, span=span, mode="log")
        if span == "run":
            view["series"] = self.series()
        else:
            first = bisect.bisect_left(self._times, status.time - RECENT_S)
            view["series"] = columns(self._rows[first : index + 1])
        view["moments"] = {"first": self._times[0], "last": self._times[-1]}
        view["ended"] = self._run.ended
        return to_json(view)

    async def status(self, time: float | None) -> Status | None:
        """Return the status of a moment. Cancellation: safe."""
        async with self._reading:
            return await asyncio.to_thread(self._status, self._index(time))


Show = LiveShow | LogShow
"""What a page is about. Times are seconds since 1970; None: the newest moment."""
