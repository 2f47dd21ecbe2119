"""What a closure waits for before it may be queued; the rest of it is in test_closures."""

from __future__ import annotations

from psync.closures.closure import Closure, Event, State, move
from psync.closures.open import Waits


def closure(closure_id: int, *inputs: Closure) -> Closure:
    return Closure(closure_id, dependencies=inputs)


def waiting(waits: Waits, closure_id: int, *inputs: Closure) -> Closure:
    made = closure(closure_id, *inputs)
    assert waits.begin(made)
    move(made, Event.WAIT)
    return made


def finished(closure_id: int) -> Closure:
    made = closure(closure_id)
    made.state = State.FINISHED
    return made


def test_a_closure_without_inputs_waits_for_nothing() -> None:
    assert not Waits().begin(closure(0))


def test_a_closure_whose_inputs_have_values_waits_for_nothing_and_lets_go_of_them() -> None:
    ready = closure(1, finished(0))
    assert not Waits().begin(ready)
    assert ready.dependencies == ()


def test_a_closure_waits_for_its_last_input() -> None:
    waits, first, second = Waits(), closure(0), closure(1)
    both = waiting(waits, 2, first, second)
    assert waits.has_value(second) == []
    assert waits.has_value(first) == [both]
    assert both.dependencies == ()


def test_an_input_that_is_named_twice_is_one() -> None:
    waits, source = Waits(), closure(0)
    twice = waiting(waits, 1, source, source)
    assert waits.has_value(source) == [twice]


def test_who_waits_in_vain_is_named_once() -> None:
    waits, source = Waits(), closure(0)
    needs_it = waiting(waits, 1, source)
    assert waits.has_no_value(source) == [needs_it]
    assert waits.has_no_value(source) == []


def test_a_closure_cancelled_meanwhile_waits_for_nobody() -> None:
    waits, good, bad = Waits(), closure(0), closure(1)
    needs_both = waiting(waits, 2, good, bad)
    move(needs_both, Event.CANCEL)
    assert waits.has_no_value(bad) == []
    assert waits.has_value(good) == []


def test_what_comes_behind_a_barrier_waits_until_it_is_opened() -> None:
    waits = Waits()
    barrier = waits.add_barrier(3)
    behind = waiting(waits, 3)
    assert barrier.cutoff == 3
    assert waits.open(barrier) == [behind]
    assert not waits.begin(closure(4))


def test_what_is_behind_two_barriers_waits_for_both() -> None:
    waits = Waits()
    first, second = waits.add_barrier(0), waits.add_barrier(0)
    behind = waiting(waits, 0)
    assert waits.open(second) == []
    assert waits.open(first) == [behind]


def test_a_barrier_that_opens_does_not_let_go_who_misses_an_input() -> None:
    waits, source = Waits(), closure(0)
    barrier = waits.add_barrier(1)
    behind = waiting(waits, 1, source)
    assert waits.open(barrier) == []
    assert waits.has_value(source) == [behind]
