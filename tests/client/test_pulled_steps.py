"""Which step a push belongs to: the lowest that the pulls before it saw."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psync.client.pulled_steps import PulledSteps


def test_without_a_pull_there_is_no_step() -> None:
    assert PulledSteps().lowest(1) is None


def test_a_group_that_no_answer_names_is_where_it_began() -> None:
    pulled = PulledSteps()
    pulled.note([])
    assert pulled.lowest(1) == -1


def test_the_lowest_of_several_ps_tasks_counts() -> None:
    pulled = PulledSteps()
    pulled.note([(1, 5), (2, 9)])
    pulled.note([(1, 4), (2, 9)])
    assert (pulled.lowest(1), pulled.lowest(2)) == (4, 9)


def test_one_ps_that_has_not_begun_makes_it_the_beginning() -> None:
    for answers in ([(1, 1)], []), ([], [(1, 1)]):
        pulled = PulledSteps()
        for steps in answers:
            pulled.note(steps)
        assert pulled.lowest(1) == -1


def test_after_a_push_only_later_pulls_count_and_only_for_its_group() -> None:
    pulled = PulledSteps()
    pulled.note([(1, 3), (2, 7)])
    pulled.forget(1)
    assert (pulled.lowest(1), pulled.lowest(2)) == (None, 7)
    pulled.note([(1, 4), (2, 8)])
    assert (pulled.lowest(1), pulled.lowest(2)) == (4, 7)
    pulled.note([(2, 8)])
    assert (pulled.lowest(1), pulled.lowest(2)) == (-1, 7)


def test_a_group_may_be_forgotten_before_anything_was_pulled() -> None:
    pulled = PulledSteps()
    pulled.forget(1)
    assert pulled.lowest(1) is None
    pulled.note([])
    assert pulled.lowest(1) == -1


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
            pulled.forget(event)
            since[event].clear()
        else:
            pulled.note(list(event.items()))
            for answers in since.values():
                answers.append(event)
        for group, answers in since.items():
            expected = min((answer.get(group, -1) for answer in answers), default=None)
            assert pulled.lowest(group) == expected
