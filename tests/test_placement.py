from __future__ import annotations

import pytest

from psync.errors import ConfigurationError
from psync.placement import Pinned, Placement, RoundRobin


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
