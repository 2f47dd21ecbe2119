"""A ps may forget an answer once all before it are there, too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psync.client.numbers import Numbers


def test_answers_are_acknowledged_up_to_the_first_that_is_not_there():
    numbers = Numbers()
    assert numbers.acked_below == 1
    first, second, third = (numbers.draw() for _ in range(3))
    assert (first, second, third, numbers.acked_below) == (1, 2, 3, 1)
    numbers.answered(second)
    assert numbers.acked_below == 1
    numbers.answered(first)
    assert numbers.acked_below == 3
    assert numbers.under_way
    numbers.answered(third)
    assert numbers.acked_below == 4
    assert not numbers.under_way


def test_an_answer_that_comes_twice_counts_once():
    numbers = Numbers()
    with numbers.drawn() as number:
        assert numbers.under_way
        numbers.answered(number)
    assert numbers.acked_below == 2


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
