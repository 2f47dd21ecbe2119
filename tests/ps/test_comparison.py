"""The comparison of a primary with its backup: when it is due, and what it finds."""

from __future__ import annotations

import pytest

from psync.ps.comparison import Comparison, Diverged

CLIENT = ("/job:worker/task:0", 1)


@pytest.fixture(autouse=True)
def _checks_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psync.ps.comparison.CHECK_EVERY", 2)


class Pair:
    """A primary and its backup, whose states are lists of numbers."""

    def __init__(self) -> None:
        self.states: tuple[list[int], list[int]] = ([], [])
        self.primary, self.backup = (
            Comparison("ps", lambda state=state: repr(state).encode())  # type: ignore[misc]
            for state in self.states
        )
        self.checks: list[tuple[int, bytes]] = []

    def entry(self, number: int) -> None:
        """One goes over, and is executed by both."""
        check = self.primary.due()
        if check is not None:
            self.primary.execute(check)
            self.backup.execute(check)
            self.checks.append((check.number, check.last))
        self.primary.shipped(CLIENT, b"header", 0)
        for state in self.states:
            state.append(number)


def test_every_few_entries_the_digest_of_the_check_before_goes_over() -> None:
    pair = Pair()
    for number in range(6):
        pair.entry(number)
    assert pair.checks == [(1, b""), (2, b"[0]"), (3, b"[0, 1, 2]")]


def test_a_state_that_differs_is_found_at_the_second_check_after_it() -> None:
    pair = Pair()
    for number in range(3):
        pair.entry(number)
    pair.states[1][0] = 99
    pair.entry(3)
    pair.entry(4)
    with pytest.raises(Diverged, match="ps: its backup has diverged before check 3 of the log"):
        pair.entry(5)


def test_the_next_check_waits_until_the_one_before_was_executed() -> None:
    comparison = Comparison("ps", bytes)
    checks = [comparison.due() for _ in range(6)]
    (first,) = [check for check in checks if check is not None]
    comparison.execute(first)
    second = comparison.due()
    assert second is not None
    assert second.number == 2


def test_a_check_bears_the_checksum_of_the_entries_before_it() -> None:
    chains = []
    for header in (b"one", b"another"):
        comparison = Comparison("ps", bytes)
        comparison.due()
        comparison.shipped(CLIENT, header, 8)
        check = comparison.due()
        assert check is not None
        chains.append(check.chain)
    assert chains[0] != chains[1]
    assert 0 not in chains
