"""Failed handshakes are counted by address, and one address cannot take every place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.net import handshake_limits
from psync.net.handshake_limits import (
    DISPLACED,
    FailedHandshakes,
    LogQuota,
    Place,
    displaced,
    source_of,
)

A, B = "192.0.2.1", "192.0.2.2"


def emptied(per_minute: int = 10, now: float = 0.0) -> FailedHandshakes:
    """Buckets, of which that of A is empty."""
    failures = FailedHandshakes(per_minute)
    for _ in range(per_minute):
        failures.failed(A, now)
    return failures


# --- what is one address ---------------------------------------------------------------------


def test_an_address_is_what_one_stranger_cannot_choose() -> None:
    for peername, source in [
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
    ]:
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
    assert len(failures._buckets) == 0
    failures.succeeded(A)  # of whom nothing is known


def test_what_fails_although_it_was_refused_does_not_refuse_it_for_longer() -> None:
    """Connections that were accepted before the bucket was empty may fail after it."""
    failures = emptied(10)
    assert [failures.failed(A, 0.0) for _ in range(100)] == [False] * 100
    assert failures.allows(A, 6.1)


def test_to_lose_a_place_is_a_tenth_of_a_failure() -> None:
    failures = FailedHandshakes(2)
    for _ in range(9):
        assert not failures.failed(A, 0.0, DISPLACED)
    assert failures.allows(A, 0.0)
    assert any(failures.failed(A, 0.0, DISPLACED) for _ in range(2))
    assert not failures.allows(A, 0.0)


def test_this_machine_is_never_refused() -> None:
    failures = FailedHandshakes(1)
    assert [failures.failed(None, 0.0) for _ in range(100)] == [False] * 100
    assert failures.allows(None, 0.0)
    failures.succeeded(None)
    assert len(failures._buckets) == 0


def test_so_many_addresses_are_remembered_and_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake_limits, "MAX_ADDRESSES", 3)
    failures = FailedHandshakes(1)
    for number, name in enumerate(["a", "b", "c", "a", "d"]):
        failures.failed(name, number / 1000)
    assert len(failures._buckets) == 3
    assert [name for name in "abcd" if not failures.allows(name, 0.005)] == ["a", "c", "d"]


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60), st.integers(1, 20))
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


STRANGER = Place("192.0.2.99", proved=False)
MEMBER = Place("192.0.2.50", proved=True)


def strangers(*sources: str | None) -> dict[int, Place]:
    return dict(enumerate(Place(source, proved=False) for source in sources))


def test_the_oldest_of_the_address_that_has_most_places_makes_room() -> None:
    for newcomer in [STRANGER, MEMBER]:
        for sources, victim in [
            ([A, A, A], 0),
            ([A, A, B], 0),
            ([B, A, A], 1),
            ([A, B, "c"], 0),
            ([B, A, B], 0),
        ]:
            assert displaced(strangers(*sources), newcomer, limit=3) == victim


def test_while_there_is_room_nobody_makes_any() -> None:
    assert displaced({}, STRANGER, limit=1) is None
    assert displaced(strangers(A, B), STRANGER, limit=3) is None


def test_a_quarter_of_the_places_is_kept_from_addresses_that_have_proved_nothing() -> None:
    places = strangers(A, A, B, B, "c", "d")
    assert displaced(places, STRANGER, limit=8) == 0
    assert displaced(places, MEMBER, limit=8) is None
    places |= {6: MEMBER, 7: MEMBER}
    assert displaced(places, MEMBER, limit=8) == 0, "members displace strangers first"
    members = dict.fromkeys(range(8), MEMBER)
    assert displaced(members, MEMBER, limit=8) == 0
    assert displaced(members, STRANGER, limit=8) == 0, "and strangers what exceeds their share"


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=200), st.integers(1, 12))
def test_however_many_come_each_finds_a_place_and_the_kept_ones_stay_kept(
    comers: list[tuple[int, bool]], limit: int
) -> None:
    places: dict[int, Place] = {}
    for number, (host, proved) in enumerate(comers):
        newcomer = Place(f"{'member' if proved else 'stranger'} {host}", proved)
        victim = displaced(places, newcomer, limit)
        if victim is not None:
            del places[victim]
        places[number] = newcomer
        assert len(places) <= limit
        unknown = sum(not place.proved for place in places.values())
        assert unknown <= limit - limit // 4


def test_an_address_of_which_somebody_has_proved_himself_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake_limits, "MAX_ADDRESSES", 2)
    failures = FailedHandshakes(10)
    assert failures.place(A) == Place(A, proved=False)
    assert failures.place(None) == Place(None, proved=True), "this machine"
    for source in (A, B, A, "c"):
        failures.succeeded(source)
    assert [failures.place(source).proved for source in (A, B, "c")] == [True, False, True]


# --- lines of the log ------------------------------------------------------------------------


def test_lines_of_a_minute_are_limited_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake_limits, "LINES_PER_MINUTE", 2)
    quota = LogQuota()
    assert [quota.allows(now) for now in (5.0, 6.0, 7.0, 64.9)] == [True, True, False, False]
    assert quota.ends == 65.0
    assert [quota.untold(), quota.untold()] == [2, 0]
    assert [quota.allows(now) for now in (65.0, 66.0, 67.0)] == [True, True, False]
    assert quota.ends == 125.0
