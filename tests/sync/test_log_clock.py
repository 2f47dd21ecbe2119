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


def test_it_is_that_of_the_loop_where_nobody_was_before(turns: Turns, clock: LogClock) -> None:
    assert clock.now() == 1000
    turns.advance(1.5)
    assert clock.now() == 1001.5


def test_it_does_not_run_backwards(clock: LogClock) -> None:
    clock.note(1000.5)  # this process is slower than the one before
    assert clock.now() == 1000.5


def test_it_rings_at_the_deadline_and_once(
    turns: Turns, clock: LogClock, rung: list[float]
) -> None:
    clock.note(9.0)
    clock.go_on()
    clock.set_deadline(12.0)
    clock.set_deadline(12.0)
    turns.advance(2.9)
    assert rung == []
    turns.advance(10.0)
    assert rung == [1003]
    clock.set_deadline(30.0)  # it may be set again
    turns.advance(10.0)
    assert rung == [1003, 1021]


def test_a_deadline_has_come_when_it_rings_however_sums_of_floats_are_rounded(turns: Turns) -> None:
    """Else what is due is not done, the same deadline is set, and rings at once, without end."""
    reached: list[float] = []
    clock = LogClock(lambda: reached.append(clock.now()))
    turns.advance(0.1)
    for place in range(1, 200):
        clock.note(clock.now() + 1 / 7)
        clock.go_on()  # ahead by another fraction
        deadline = clock.now() + 0.1 * place
        clock.set_deadline(deadline)
        turns.advance(0.1 * place + 1e-6)
        assert len(reached) == place
        assert reached[-1] >= deadline


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
