"""A ps may forget an answer once all before it are there, too."""

from __future__ import annotations

from psync.client.outgoing import Outgoing


def test_answers_are_acknowledged_up_to_the_first_that_is_not_there():
    outgoing = Outgoing()
    assert outgoing.acked_below == 1
    first, second, third = (outgoing.draw() for _ in range(3))
    assert (first, second, third, outgoing.acked_below) == (1, 2, 3, 1)
    outgoing.answered(second)
    assert outgoing.acked_below == 1
    outgoing.answered(first)
    assert outgoing.acked_below == 3
    assert outgoing
    outgoing.answered(third)
    assert outgoing.acked_below == 4
    assert not outgoing


def test_an_answer_that_comes_twice_counts_once():
    outgoing = Outgoing()
    number = outgoing.draw()
    outgoing.answered(number)
    outgoing.answered(number)
    assert outgoing.acked_below == 2
