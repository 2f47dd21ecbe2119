"""Numbers of closures on ps tasks, and which of them are final."""

from __future__ import annotations

import pytest

from psync.errors import RemoteProtocolError
from psync.wire.closure_numbers import (
    MAX_RUN,
    PART_BITS,
    RUN_SHIFT,
    Finality,
    call_of,
    first_of,
    numbered,
    pack_kept,
    unpack_kept,
)


@pytest.mark.parametrize("first", [0, 7, (1 << RUN_SHIFT) - 1])
@pytest.mark.parametrize("run", [0, 1, MAX_RUN])
def test_the_first_run_has_the_closures_id_and_all_have_its_calls(first: int, run: int) -> None:
    number = numbered(first, run)
    assert first_of(number) == first
    assert (number == first) == (run == 0)
    assert 0 <= number < 1 << 63, "it fits a message"


def test_all_messages_of_a_call_name_the_call() -> None:
    assert {call_of(7 << PART_BITS | number) for number in (0, 1, (1 << PART_BITS) - 1)} == {7}


def test_after_very_many_runs_all_have_one_number() -> None:
    assert numbered(5, MAX_RUN) == numbered(5, MAX_RUN + 1)


def test_what_is_below_is_final_unless_it_may_come_again() -> None:
    final = Finality(10, [(3, 2)])
    assert final.is_final(4)
    assert final.is_final(numbered(4, 9))
    assert not final.is_final(10)
    assert not final.is_final(numbered(10, 1))
    assert [final.is_final(numbered(3, run)) for run in range(4)] == [True, True, False, False]
    assert [final.is_over(first) for first in (3, 4, 10)] == [False, True, False]
    assert not Finality(10, [(3, 0)]).is_final(3)


def test_old_news_change_nothing() -> None:
    final = Finality()
    assert final.update(10, [(3, 1), (2, 1)])
    assert not final.update(9, [])
    assert (final.below, final.listed()) == (10, [(2, 1), (3, 1)])
    assert final.update(10, [(3, 1)])
    assert final.is_over(2)


@pytest.mark.parametrize("kept", [[], [(3, 1), (7, MAX_RUN)], [((1 << RUN_SHIFT) - 1, 0)]])
def test_what_is_kept_travels_in_a_segment(kept: list[tuple[int, int]]) -> None:
    segments = pack_kept(kept)
    assert len(b"".join(segments)) == 16 * len(kept)
    assert unpack_kept(list(map(memoryview, segments))) == kept


def test_a_damaged_segment_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="expected 16 bytes for each, got 17 bytes"):
        unpack_kept([memoryview(bytes(17))])
