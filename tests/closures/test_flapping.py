"""Which workers are set aside, for how long, and when that is forgiven."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.closures.membership import FIRST_S, LONGEST_S, WINDOW_S, Flapping
from psync.errors import ConfigurationError

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"


def lose_often(flapping: Flapping, worker: str, now: float) -> float:
    """Lose a worker until it is set aside, all at once; return for how long."""
    for _ in range(4):
        if pause := flapping.lost(worker, now):
            return pause
    raise AssertionError("it was never set aside")


def test_the_fourth_loss_within_a_minute_sets_a_worker_aside() -> None:
    flapping = Flapping()
    assert [flapping.lost(W0, now) for now in (0.0, 20.0, 40.0)] == [0.0, 0.0, 0.0]
    assert flapping.lost(W0, 59.0) == FIRST_S
    assert flapping.remaining(W0, 60.0) == FIRST_S - 1
    assert flapping.remaining(W0, 59.0 + FIRST_S) == 0.0


def test_losses_that_are_a_minute_apart_do_not_add_up() -> None:
    flapping = Flapping()
    assert {flapping.lost(W0, 20.0 * i) for i in range(100)} == {0.0}


def test_each_time_that_is_not_enough_is_followed_by_one_twice_as_long_up_to_five_minutes() -> None:
    flapping = Flapping()
    now, pauses = 0.0, []
    for _ in range(6):
        pauses.append(lose_often(flapping, W0, now))
        now += pauses[-1]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]


def test_the_count_begins_anew_when_a_worker_comes_back() -> None:
    flapping = Flapping()
    lose_often(flapping, W0, 0.0)
    assert [flapping.lost(W0, FIRST_S) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert flapping.lost(W0, FIRST_S) == 2 * FIRST_S


def test_a_worker_that_has_been_well_for_long_enough_is_forgiven() -> None:
    pause = 2 * FIRST_S
    for well_s, expected in (
        (pause + WINDOW_S - 1, 2 * pause),
        (pause + WINDOW_S, FIRST_S),
    ):
        flapping = Flapping()
        lose_often(flapping, W0, 0.0)
        lose_often(flapping, W0, FIRST_S)
        back = FIRST_S + pause
        assert lose_often(flapping, W0, back + well_s) == expected


def test_workers_are_counted_each_for_itself_and_named_whose_time_ends_first_first() -> None:
    flapping = Flapping()
    lose_often(flapping, W1, 10.0)
    lose_often(flapping, W0, 0.0)
    flapping.lost("/job:worker/task:2", 10.0)
    assert flapping.set_aside(10.0) == [(W0, 20.0), (W1, 30.0)]
    assert flapping.set_aside(35.0) == [(W1, 5.0)]
    assert flapping.set_aside(40.0) == []
    assert flapping.remaining("/job:worker/task:9", 0.0) == 0.0


def test_a_worker_that_is_forgotten_was_never_lost() -> None:
    flapping = Flapping()
    lose_often(flapping, W0, 0.0)
    flapping.forget(W0)
    flapping.forget(W0)
    assert flapping.remaining(W0, 1.0) == 0.0
    assert flapping.lost(W0, 1.0) == 0.0


def test_without_a_limit_nobody_is_set_aside() -> None:
    flapping = Flapping(None)
    assert {flapping.lost(W0, 0.0) for _ in range(50)} == {0.0}


def test_a_limit_of_nothing_sets_aside_at_the_first_loss_and_less_is_refused() -> None:
    assert Flapping(0).lost(W0, 0.0) == FIRST_S
    with pytest.raises(ConfigurationError, match="max_flaps: expected at least 0 or None, got -1"):
        Flapping(-1)


@given(
    st.lists(
        st.tuples(st.sampled_from((W0, W1)), st.floats(0, 400), st.integers(1, 6)), max_size=60
    )
)
def test_nobody_is_set_aside_for_longer_than_that_nor_without_cause(
    events: list[tuple[str, float, int]],
) -> None:
    """A worker is lost only while it takes part, so not before its time is over."""
    flapping = Flapping()
    now = 0.0
    recent: dict[str, list[float]] = {W0: [], W1: []}
    for worker, seconds, times in events:
        now = now + seconds + flapping.remaining(worker, now + seconds)
        for _ in range(times):
            recent[worker] = [t for t in recent[worker] if now - t < WINDOW_S] + [now]
            pause = flapping.lost(worker, now)
            assert bool(pause) == (len(recent[worker]) > 3)
            assert flapping.remaining(worker, now) == pytest.approx(pause)
            assert not pause or FIRST_S <= pause <= LONGEST_S
            if pause:
                recent[worker] = []
                now += pause
