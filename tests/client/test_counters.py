"""What a task counts: numbers of messages, steps that it has pulled, its time by a moved clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.client.counters import KINDS, READ_WITHIN_S, Numbers, PulledSteps, WorkMeter

# --- numbers of messages -------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9)))
def test_no_number_under_way_is_ever_acknowledged(choices: list[int]) -> None:
    """0 draws; another choice answers one of those under way, or one that was answered before."""
    numbers, drawn, under_way, before = Numbers(), 0, set[int](), 1
    for choice in choices:
        if choice == 0 or not drawn:
            drawn += 1
            assert numbers.draw() == drawn
            under_way.add(drawn)
        else:
            number = choice % drawn + 1
            numbers.answered(number)
            under_way.discard(number)
        assert numbers.acked_below == min(under_way, default=drawn + 1) >= before
        before = numbers.acked_below


# --- the step of a push ---------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.integers(1, 3), st.integers(0, 9)),  # an answer
            st.integers(1, 3),  # a push in that group
        )
    )
)
def test_it_is_the_minimum_over_all_answers_since_the_last_push(
    events: list[dict[int, int] | int],
) -> None:
    pulled = PulledSteps()
    since: dict[int, list[dict[int, int]]] = {1: [], 2: [], 3: []}
    for event in events:
        if isinstance(event, int):
            pulled.lowest(event, push=True)
            since[event].clear()
        else:
            pulled.note([list(event.items())])
            for answers in since.values():
                answers.append(event)
        for group, answers in since.items():
            expected = min((answer.get(group, -1) for answer in answers), default=None)
            assert pulled.lowest(group) == expected


# --- time -----------------------------------------------------------------------------------------


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> WorkMeter:
    """One that somebody has begun to read."""
    meter = WorkMeter(clock)
    meter.read()
    return meter


def spent(meter: WorkMeter) -> list[float]:
    reading = meter.read()
    return [reading[kind] for kind in KINDS]


def test_time_without_work_counts_nowhere(meter: WorkMeter, clock: Clock) -> None:
    clock.now += 5
    expected = {"at": 105.0, "since": 100.0, "compute": 0, "pull": 0, "push": 0, "wait": 0}
    assert meter.read() == expected


def test_a_pull_within_a_step_is_no_computing(meter: WorkMeter, clock: Clock) -> None:
    with meter.compute:
        clock.now += 1
        with meter.pull:
            clock.now += 2
        clock.now += 4
    clock.now += 8
    assert spent(meter) == [5, 2, 0, 0]


def test_what_goes_on_at_once_counts_once(meter: WorkMeter, clock: Clock) -> None:
    with meter.compute, meter.pull:
        with meter.pull:
            clock.now += 1
        clock.now += 2
        with meter.push:
            clock.now += 4
            with meter.wait:
                clock.now += 8
            clock.now += 16
    assert spent(meter) == [0, 3, 20, 8]


def test_a_kind_that_ends_behind_a_later_one_is_forgotten(meter: WorkMeter, clock: Clock) -> None:
    pull, push = meter.pull, meter.push
    pull.__enter__()
    push.__enter__()
    pull.__exit__(None, None, None)
    clock.now += 1
    push.__exit__(None, None, None)
    clock.now += 2
    assert spent(meter) == [0, 0, 1, 0]


def test_what_goes_on_counts_up_to_now(meter: WorkMeter, clock: Clock) -> None:
    with meter.wait:
        clock.now += 3
        assert meter.read()["wait"] == 3


def test_an_error_ends_it(meter: WorkMeter, clock: Clock) -> None:
    with pytest.raises(ValueError, match="x"), meter.push:
        raise ValueError("x")
    clock.now += 3
    assert spent(meter) == [0, 0, 0, 0]


def test_while_nobody_reads_it_does_not_look_at_the_clock(clock: Clock) -> None:
    meter = WorkMeter(clock)
    del clock.now
    with meter.compute, meter.push:
        pass
    assert not meter.is_on


def test_what_began_before_the_first_reading_counts_from_then_on(clock: Clock) -> None:
    meter = WorkMeter(clock)
    with meter.compute, meter.wait:
        clock.now += 7
        assert meter.read()["since"] == 107
        clock.now += 1
    assert spent(meter) == [0, 0, 0, 1]


def test_it_rests_once_nobody_has_read_for_long_and_then_begins_anew(
    meter: WorkMeter, clock: Clock
) -> None:
    with meter.compute:
        clock.now += READ_WITHIN_S + 1
    assert not meter.is_on
    with meter.compute:
        clock.now += 3
        assert meter.read() == {"at": clock.now, "since": clock.now, **dict.fromkeys(KINDS, 0)}
        clock.now += 2
    assert spent(meter) == [2, 0, 0, 0]


def test_who_watches_is_told_which_kind_counts_and_nothing_twice(
    meter: WorkMeter, clock: Clock
) -> None:
    told: list[int] = []
    with meter.compute:
        meter.watch(told.append)
        with meter.push, meter.pull, meter.pull:
            clock.now += READ_WITHIN_S + 1  # it goes on as long as somebody watches
        meter.watch(None)
    assert told == [0, 2, 0]
    assert not meter.is_on
    with meter.wait:
        pass
    assert told == [0, 2, 0]
