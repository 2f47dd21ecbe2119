"""Failed handshakes are counted by address, and one address cannot take every place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.handshake_limits import FailedHandshakes, crowding, source_of

A, B = "192.0.2.1", "192.0.2.2"


def emptied(per_minute: int = 10, now: float = 0.0) -> FailedHandshakes:
    """Buckets, of which that of A is empty."""
    failures = FailedHandshakes(per_minute)
    for _ in range(per_minute):
        failures.failed(A, now)
    return failures


# --- what is one address ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peername", "source"),
    [
        (("192.0.2.1", 4711), "192.0.2.1"),
        (("::ffff:192.0.2.1", 4711, 0, 0), "192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80::/64"),
        (("a-name", 4711), "a-name"),
        (("127.0.0.1", 4711), None),
        (("127.8.9.1", 4711), None),
        (("::1", 4711, 0, 0), None),
        (("::ffff:127.0.0.1", 4711, 0, 0), None),
        ("", None),
        (b"", None),
        ((), None),
        (None, None),
    ],
)
def test_an_address_is_what_one_stranger_cannot_choose(peername: object, source: str) -> None:
    assert source_of(peername) == source


# --- buckets ---------------------------------------------------------------------------------


def test_an_address_is_refused_after_so_many_failures_and_others_are_not() -> None:
    failures = FailedHandshakes(3)
    told = []
    for _ in range(3):
        assert failures.allows(A, 0.0)
        told.append(failures.failed(A, 0.0))
    assert told == [False, False, True]
    assert not failures.allows(A, 0.0)
    assert failures.allows(B, 0.0)


def test_it_is_heard_again_when_the_time_of_one_failure_has_passed() -> None:
    failures = emptied(10)
    assert not failures.allows(A, 5.9)
    assert failures.allows(A, 6.1)
    assert failures.failed(A, 6.1)  # refused once more, and said once more
    assert not failures.allows(A, 6.2)


def test_a_minute_without_failures_fills_the_bucket_and_no_more() -> None:
    failures = emptied(2)
    assert [failures.failed(A, 3600.0) for _ in range(2)] == [False, True]


def test_a_success_fills_the_bucket() -> None:
    failures = emptied()
    failures.succeeded(A)
    assert failures.allows(A, 0.0)
    assert len(failures) == 0
    failures.succeeded(A)  # of whom nothing is known


def test_what_fails_although_it_was_refused_does_not_refuse_it_for_longer() -> None:
    """Connections that were accepted before the bucket was empty may fail after it."""
    failures = emptied(10)
    assert [failures.failed(A, 0.0) for _ in range(100)] == [False] * 100
    assert failures.allows(A, 6.1)


def test_this_machine_is_never_refused() -> None:
    failures = FailedHandshakes(1)
    assert [failures.failed(None, 0.0) for _ in range(100)] == [False] * 100
    assert failures.allows(None, 0.0)
    failures.succeeded(None)
    assert len(failures) == 0


def test_so_many_addresses_are_remembered_and_the_oldest_is_forgotten() -> None:
    failures = FailedHandshakes(1, addresses=3)
    for number, name in enumerate(["a", "b", "c", "a", "d"]):
        failures.failed(name, number / 1000)
    assert len(failures) == 3
    assert [name for name in "abcd" if not failures.allows(name, 0.005)] == ["a", "c", "d"]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60),
    st.integers(1, 20),
)
def test_no_stretch_of_time_sees_more_failures_than_a_bucket_and_what_flows_in(
    steps: list[tuple[float, bool]], per_minute: int
) -> None:
    failures, now, seen = FailedHandshakes(per_minute), 0.0, []
    for pause, tries in steps:
        now += pause / 10
        if tries and failures.allows(A, now):
            failures.failed(A, now)
            seen.append(now)
    for index, first in enumerate(seen):
        for count, last in enumerate(seen[index:], 1):
            assert count <= per_minute + (last - first) * per_minute / 60 + 1e-6


# --- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "victim"),
    [
        ([], None),
        ([A, A, B], 0),
        ([B, A, A], 1),
        ([None, A, A, A], 1),
        ([A, B], None),
        ([None, None, A], None),
        ([None, None, None], None),
    ],
)
def test_the_oldest_of_an_address_that_has_most_places_makes_room(
    sources: list[str | None], victim: int | None
) -> None:
    assert crowding(dict(enumerate(sources))) == victim
