"""Every move of a closure, legal and illegal, and how it shows itself in messages."""

from __future__ import annotations

import pytest

from psync.closures.closure import MOVES, Closure, Event, State, move
from psync.errors import LocalProtocolError

LEGAL = [(state, event, after) for state, moves in MOVES.items() for event, after in moves.items()]
ILLEGAL = [(state, event) for state in State for event in Event if event not in MOVES[state]]
FINAL = {State.FINISHED, State.FAILED, State.EXHAUSTED, State.CANCELLED}


def test_legal_move_changes_the_state() -> None:
    for state, event, after in LEGAL:
        closure = Closure(1)
        closure.state = state
        move(closure, event)
        assert closure.state is after, (state, event)


def test_illegal_move_names_the_event_and_the_state_and_changes_nothing() -> None:
    closure = Closure(17, name="step")
    for state, event in ILLEGAL:
        closure.state = state
        with pytest.raises(LocalProtocolError) as caught:
            move(closure, event)
        assert str(caught.value) == f"closure 17 (step) cannot {event.value}: it is {state.value}"
        assert closure.state is state


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert set(MOVES) == set(State)
    assert {after for _, _, after in LEGAL} == set(State) - {State.NEW}


def test_exactly_the_outcomes_are_final() -> None:
    for state in State:
        closure = Closure(1)
        closure.state = state
        assert closure.is_final == (state in FINAL)


def test_every_closure_that_a_worker_holds_can_end_in_each_way_that_a_worker_reports() -> None:
    for event in (Event.FINISH, Event.FAIL, Event.END_OF_DATA, Event.LOSE, Event.GIVE_BACK):
        assert event in MOVES[State.HELD]
        assert event in MOVES[State.CANCELLING]


def test_states_are_found_in_tables_although_their_hash_is_by_identity() -> None:
    assert State("queued") is State.QUEUED
    assert {State.QUEUED: 1}[State("queued")] == 1
    assert {Event.FAIL: 1}[Event("fail")] == 1


def test_new_closure_is_nowhere_and_has_no_error() -> None:
    earlier = Closure(1)
    closure = Closure(2, "payload", name="step", inline_bytes=10, dependencies=(earlier,))
    assert (closure.id, closure.payload, closure.name) == (2, "payload", "step")
    assert (closure.inline_bytes, closure.dependencies) == (10, (earlier,))
    assert (closure.state, closure.worker, closure.error) == (State.NEW, "", None)
    assert closure.attempts == 0


def test_attempts_count_the_workers_lost() -> None:
    closure = Closure(1)
    closure.lost_on = ("/job:worker/task:0", "/job:worker/task:0")
    assert closure.attempts == 2


def test_closure_shows_its_number_its_function_its_state_and_its_worker() -> None:
    closure = Closure(17)
    assert str(closure) == "closure 17"
    assert repr(closure) == "<closure 17, new>"
    closure = Closure(17, name="step")
    closure.state = State.HELD
    closure.worker = "/job:worker/task:1"
    assert str(closure) == "closure 17 (step)"
    assert repr(closure) == "<closure 17 (step), held on /job:worker/task:1>"
