"""The order of commits, and what a backup has of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import FencedError, LocalProtocolError
from psync.store.commit_log import (
    CHECK_EVERY,
    HEADER_WEIGHT,
    CommitLog,
    Diverged,
    LogState,
    chained,
)

PS = "/job:ps/task:0"


def append(log: CommitLog, size: int = 1, name: str = "a") -> int:
    """Append an entry whose header counts one."""
    return log.append((name, 1), b"", [memoryview(bytes(size))])


def names(log: CommitLog, max_entries: int, max_bytes: int) -> list[str]:
    """Of the entries that are shipped."""
    return [entry[0] for entry in log.to_ship(max_entries, max_bytes)[0]]


def paired() -> CommitLog:
    log = CommitLog(PS, 100)
    log.begin_copy()
    log.pair()
    return log


def test_paired_nothing_is_applied_before_the_backup_has_it() -> None:
    log = paired()
    assert [append(log, 1, "a"), append(log, 1, "b")] == [1, 2]
    assert log.released == 0
    assert names(log, 9, 99) == ["a", "b"]
    assert names(log, 9, 99) == []  # they are on their way
    log.note_taken(1)
    assert log.released == 1
    assert log._kept_bytes == 1


def test_what_is_shipped_is_the_message_and_the_body_and_headers_count_more() -> None:
    log, body = paired(), [memoryview(b"12"), memoryview(b"345")]
    log.append(("a", 1), b"header", body)
    assert log._kept_bytes == 5 + 6 * HEADER_WEIGHT
    assert log.to_ship(9, 99) == ([("a", 1, b"header", 2)], body)


def test_while_a_copy_is_made_training_goes_on_and_what_it_does_is_kept() -> None:
    log = CommitLog(PS, 100)
    log.last = 1
    assert log.begin_copy() == 1
    append(log)
    assert log.released >= 2
    log.pair()
    assert log.released == 1  # if it has not been applied by then
    assert names(log, 9, 99) == ["a"]


def test_a_copy_that_takes_too_long_is_given_up() -> None:
    log = CommitLog(PS, 100)
    log.begin_copy()
    append(log, 60)
    append(log, 60)
    log.note_taken(1)  # it was on its way
    assert log.state is LogState.ALONE
    assert log.released > 2
    assert log._kept_bytes == 0


def test_batches_are_bounded_but_never_empty() -> None:
    log = paired()
    for size in (50, 50, 500, 1, 1, 1):
        append(log, size)
    assert [len(log.to_ship(2, 100)[0]) for _ in range(5)] == [2, 1, 2, 1, 0]


def test_a_deposed_primary_commits_nothing() -> None:
    log = paired()
    append(log)
    log.depose()
    assert log.released == 0
    with pytest.raises(FencedError, match="replaced by its backup"):
        append(log)
    log.give_up()
    assert log.state is LogState.DEPOSED


def test_moves_that_are_not_in_the_table_are_refused() -> None:
    log = CommitLog(PS, 100)
    with pytest.raises(LocalProtocolError, match="is alone, not copying"):
        log.pair()
    log.begin_copy()
    with pytest.raises(LocalProtocolError):
        log.begin_copy()


ENTRIES = [(("a", 1), b"header", 0), (("b", 1), b"header", 0), (("a", 1), b"header", 8)]


@pytest.mark.parametrize(
    "others",
    [
        ENTRIES[:2],
        ENTRIES[1:],
        [ENTRIES[1], ENTRIES[0], ENTRIES[2]],
        [(("a", 2), b"header", 0), *ENTRIES[1:]],
        [(("c", 1), b"header", 0), *ENTRIES[1:]],
        [(("a", 1), b"Header", 0), *ENTRIES[1:]],
        [(("a", 1), b"header", 4), *ENTRIES[1:]],
    ],
)
def test_the_chain_over_other_entries_is_another_one(others: list[Any]) -> None:
    mine, other = 0, 0
    for entry in ENTRIES:
        mine = chained(mine, *entry)
    for entry in others:
        other = chained(other, *entry)
    assert mine != other


@given(
    st.lists(
        st.sampled_from(["append", "append", "ship", "take", "lose", "copy", "pair", "give up"])
    )
)
def test_the_backup_gets_every_entry_since_its_copy_once_and_in_order(steps: list[str]) -> None:
    log = CommitLog(PS, 10**9)
    backup: list[int] = []
    on_their_way: list[int] = []
    for step in steps:
        if step == "append":
            if log.state is LogState.ALONE:
                log.last += 1
            else:
                assert append(log, name=str(log.last + 1)) == log.last
        elif step == "ship":
            first, batch = log.shipped + 1, [int(name) for name in names(log, 2, 99)]
            assert batch == list(range(first, first + len(batch)))
            on_their_way += batch
        elif step == "take" and on_their_way and log.state is not LogState.ALONE:
            number = on_their_way.pop(0)
            if number > len(backup):  # else it came before a connection was lost
                backup.append(number)
            log.note_taken(len(backup))
        elif step == "lose":  # the connection, and the answer to what came last: it comes again
            backup += [number for number in on_their_way[:1] if number > len(backup)]
        elif step == "copy" and log.state is LogState.ALONE:
            backup, on_their_way = list(range(1, log.begin_copy() + 1)), []
        elif step == "pair" and log.state is LogState.COPYING:
            log.pair()
        elif step == "give up":
            log.give_up()
        assert backup == list(range(1, len(backup) + 1))
        if log.state is LogState.PAIRED:
            assert log.released <= len(backup)
        else:
            assert log.released >= log.last
        if log.state is LogState.ALONE:
            assert log.to_ship(9, 99)[0] == []


@pytest.mark.parametrize("differs", [False, True])
def test_a_backup_that_has_made_something_else_is_found_by_the_next_check(differs: bool) -> None:
    ours, theirs = paired(), CommitLog(PS, 100)
    ours.digest, theirs.digest = lambda: b"ours", lambda: b"theirs" if differs else b"ours"
    while ours.last + 1 < ours.check_at:
        assert ours.due() is None
        append(ours)
    first = ours.due()
    assert first is not None
    assert (ours.last, first.number, first.last) == (CHECK_EVERY - 1, 1, b"")
    ours.check_at = 0
    append(ours)
    assert ours.due() is None, "the first one is not executed"
    theirs.execute(first)
    ours.execute(first)
    second = ours.due()
    assert second is not None
    assert (second.number, second.last) == (2, b"ours")
    assert second.chain != first.chain
    ours.execute(second)
    if differs:
        with pytest.raises(
            Diverged, match="/job:ps/task:0: its backup has diverged before check 2"
        ):
            theirs.execute(second)
    else:
        theirs.execute(second)
