"""Numbers that only grow, whatever the clocks say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import FencedError
from psync.ps.succession import RANGE, CoordinatorGrants


def test_the_first_one_has_the_time_of_the_clock() -> None:
    assert CoordinatorGrants().grant(1000, 0, 0) == 1000


@given(st.lists(st.tuples(st.integers(1, 1 << 61), st.integers(0, 1 << 61)), min_size=2))
def test_each_one_is_a_range_above_all_before_and_above_all_that_was_seen(
    asked: list[tuple[int, int]],
) -> None:
    grants, highest = CoordinatorGrants(), 0
    for clock, seen in asked:
        granted = grants.grant(clock, 0, seen)
        if highest or seen:
            assert granted >= max(highest, seen) + RANGE
        assert granted >= clock
        highest = granted


def test_who_was_granted_one_is_not_granted_a_higher_one_once_another_has_come() -> None:
    grants = CoordinatorGrants()
    first = grants.grant(1000, 0, 0)
    second = grants.grant(1000, 0, 0)
    with pytest.raises(FencedError, match=f"{second}.* has come after this one .{first}."):
        grants.grant(1 << 60, first, second)
    assert grants.grant(1000, second, second + 5) == second + 5 + RANGE


def test_a_ps_0_that_was_started_anew_goes_on_from_what_others_have_seen() -> None:
    grants = CoordinatorGrants()  # and its clock has gone backwards
    first = grants.grant(10, 0, 0)
    assert grants.grant(10, first, seen=1 << 50) == (1 << 50) + RANGE


def test_one_that_was_not_granted_here_counts_too() -> None:
    grants = CoordinatorGrants()
    grants.note(5000)
    grants.note(4000)
    assert grants.grant(10, 0, 0) == 5000 + RANGE
