"""What a log calls sets and groups, for a reader who has no connection of theirs."""

from __future__ import annotations

import pytest

from psync.store import commit_log
from psync.store.commit_log import LogNames, NamesInFull

KEYS = ((0, 0), (1, 0))
WHOLE = ((0, 0, 0), (1, 0, 1))


def test_a_set_is_named_in_full_once() -> None:
    names = LogNames()
    assert names.of_set(KEYS) == (0, list(KEYS))
    assert names.of_set(KEYS) == (0, None)
    assert names.of_set(KEYS[:1]) == (1, list(KEYS[:1]))


def test_sets_of_several_ps_tasks_are_numbered_apart() -> None:
    names = LogNames()
    names.of_set(KEYS)
    assert names.of_whole(WHOLE) == (0, list(WHOLE))
    assert names.of_whole(WHOLE) == (0, None)


def test_a_group_is_new_once() -> None:
    names = LogNames()
    assert (names.is_new(3), names.is_new(3), names.is_new(4)) == (True, False, True)


def test_a_new_reader_knows_the_groups_of_its_snapshot_alone() -> None:
    names = LogNames()
    names.of_set(KEYS)
    names.of_whole(WHOLE)
    names.is_new(3)
    names.begin([4])
    assert names.of_set(KEYS) == (0, list(KEYS))
    assert names.of_whole(WHOLE) == (0, list(WHOLE))
    assert (names.is_new(3), names.is_new(4)) == (True, False)


def test_numbers_begin_anew_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "MAX_SETS", 2)
    names = LogNames()
    sets = [((variable, 0),) for variable in range(3)]
    assert [names.of_set(each)[0] for each in sets] == [0, 1, 0]
    assert names.of_set(sets[0]) == (1, list(sets[0]))


def test_what_comes_before_all_others_is_named_in_full_and_known_from_then_on() -> None:
    names = LogNames()
    names.of_set(KEYS)
    first = NamesInFull(names)
    for _ in range(2):
        assert first.of_set(KEYS) == (0, list(KEYS))
        assert first.of_whole(WHOLE) == (0, list(WHOLE))
        assert first.is_new(3)
    assert names.of_set(KEYS) == (0, None)
    assert names.of_whole(WHOLE) == (0, None)
    assert not names.is_new(3)
