from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import ConfigurationError
from psync.partitioners import Pinned, Placement, Placer, RoundRobin


def test_shards_go_round_whatever_their_size() -> None:
    placement: Placement = RoundRobin(3)
    assert [placement.place(nbytes) for nbytes in (1, 1 << 30, 0, 5, 5)] == [0, 1, 2, 0, 1]


def test_one_ps_takes_everything() -> None:
    placement = RoundRobin(1)
    assert [placement.place(4) for _ in range(3)] == [0, 0, 0]


def test_no_ps_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^expected at least one ps task to place variables on, got 0$"
    ):
        RoundRobin(0)


def test_what_is_pinned_stays_where_it_is() -> None:
    placement: Placement = Pinned(2)
    assert [placement.place(nbytes) for nbytes in (1, 1 << 30, 0)] == [2, 2, 2]


def test_each_shard_goes_where_the_fewest_bytes_are_and_of_equals_to_the_first() -> None:
    placer = Placer(3, "least_bytes")
    sizes = [100, 10, 10, 30, 0, 90, 5]
    assert [placer.place("v", nbytes) for nbytes in sizes] == [0, 1, 2, 1, 2, 2, 1]


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 1000), min_size=1))
def test_by_bytes_no_ps_has_more_than_the_largest_shard_above_another(
    num_ps: int, sizes: list[int]
) -> None:
    placer = Placer(num_ps, "least_bytes")
    loads = [0] * num_ps
    for nbytes in sizes:
        loads[placer.place("v", nbytes)] += nbytes
    assert max(loads) - min(loads) <= max(sizes)


def test_what_is_pinned_or_beside_another_weighs_where_it_lies() -> None:
    placer = Placer(2, "least_bytes")
    assert placer.place("big", 100, placer.pinned(0)) == 0
    placer.note(1, 60)
    assert [placer.place("v", 30) for _ in range(3)] == [1, 1, 0]


def test_a_placement_of_the_users_own_is_asked_and_may_answer_with_a_numpy_integer() -> None:
    asked = []

    class Last:
        def place(self, nbytes: int) -> int:
            asked.append(nbytes)
            return np.int64(2)  # type: ignore[return-value]

    placer = Placer(3, Last())
    answer = placer.place("v", 12)
    assert (answer, type(answer), asked) == (2, int, [12])


@pytest.mark.parametrize("answer", [3, -1, None, "0", 1.0, True])
def test_an_answer_that_is_no_ps_names_the_variable(answer: object) -> None:
    class Wrong:
        def place(self, nbytes: int) -> Any:
            return answer

    with pytest.raises(ConfigurationError) as caught:
        Placer(3, Wrong()).place("w", 12)
    assert caught.value.message == (
        f'variable "w": expected the placement to return the index of a ps, 0 to 2, got {answer!r}'
    )


@pytest.mark.parametrize("placement", ["least", "", None, 3])
def test_a_placement_is_a_known_name_or_has_place(placement: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="placement: expected 'round_robin', 'least_bytes' or an object"
    ):
        Placer(2, placement)


@pytest.mark.parametrize(
    "where", [1, np.int32(1), "/job:ps/replica:0/task:1/device:CPU:0", "/job:ps/task:1"]
)
def test_a_ps_is_named_by_its_index_or_its_device(where: Any) -> None:
    assert Placer(2).pinned(where).place(5) == 1


@pytest.mark.parametrize(
    "where",
    [2, -1, True, None, 1.0, "1", "", "/job:ps/task:2", "/job:worker/task:0", "/job:ps",
     "/job:ps/replica:1/task:0", "/job:ps/task:0/device:GPU:0", "/job:ps/task:0 "],
)  # fmt: skip
def test_what_names_no_ps_of_the_cluster_is_an_error(where: Any) -> None:
    with pytest.raises(ConfigurationError, match="pinned: expected a ps, 0 to 1, or its device"):
        Placer(2).pinned(where)
