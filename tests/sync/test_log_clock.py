"""The times in a log: they go on where a backup serves, and one timer rings by them."""

from __future__ import annotations

import pytest

from psync.sync.log_clock import LogClock
from turns import Turns


@pytest.fixture
def rung(turns: Turns) -> list[float]:
    return []


@pytest.fixture
def clock(turns: Turns, rung: list[float]) -> LogClock:
    turns.advance(1000.0)
    return LogClock(lambda: rung.append(turns.time()))


def test_only_the_last_deadline_counts(turns: Turns, clock: LogClock, rung: list[float]) -> None:
    clock.set_deadline(1001.0)
    clock.set_deadline(1003.0)
    turns.advance(2.0)
    clock.set_deadline(None)
    turns.advance(5.0)
    clock.set_deadline(1009.0)
    clock.cancel()
    turns.advance(5.0)
    assert rung == []
