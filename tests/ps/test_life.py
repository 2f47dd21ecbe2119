"""The life of a ps task, without one."""

from __future__ import annotations

import pytest

from psync.errors import LocalProtocolError
from psync.ps.life import MOVES, Life, LifeEvent

TASK = "/job:ps/task:0"


@pytest.mark.parametrize("life", Life)
@pytest.mark.parametrize("event", LifeEvent)
def test_it_goes_where_the_table_says_and_nowhere_else(life: Life, event: LifeEvent) -> None:
    if (to := MOVES[event].get(life)) is not None:
        assert life.after(event, TASK) is to
    else:
        with pytest.raises(LocalProtocolError):
            life.after(event, TASK)


def test_an_illegal_move_names_the_task_the_event_and_the_state() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        Life.CLOSED.after(LifeEvent.ATTACH, TASK)
    assert str(caught.value) == (
        "/job:ps/task:0 cannot be attached by a newer coordinator: it is closed"
    )


def test_a_closed_one_stays_so() -> None:
    assert {moves.get(Life.CLOSED, Life.CLOSED) for moves in MOVES.values()} == {Life.CLOSED}


def test_all_states_are_reached_from_an_empty_one() -> None:
    reached, new = {Life.EMPTY}, {Life.EMPTY}
    while new:
        new = {moves[life] for moves in MOVES.values() for life in new & moves.keys()} - reached
        reached |= new
    assert reached == set(Life)
