"""Lent bodies: the copy of one, piece by piece, and when it is given back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import LocalProtocolError
from psync.wire import lent
from psync.wire.lent import COPY_BYTES, EXTENT, EXTENT_BYTES, Copying, Extent, copies
from wire_tools import Lent, cut


def test_golden_bytes_of_an_extent() -> None:
    assert EXTENT_BYTES == 24
    assert EXTENT.pack(*Extent(1, 0x0203, 0x04)).hex(" ", -8) == (
        "0100000000000000 0302000000000000 0400000000000000"
    )


# --- the copy --------------------------------------------------------------------------------

cuts = st.lists(st.integers(0, 100), max_size=8)


@given(st.binary(max_size=100), cuts, cuts, st.integers(1, 40))
def test_a_copy_is_what_is_copied_wherever_it_is_cut(
    body: bytes, sources: list[int], targets: list[int], at_once: int
) -> None:
    memory = bytearray(len(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lent, "COPY_BYTES", at_once)
        pieces = list(copies(cut(memory, targets), cut(body, sources)))
    assert memory == body
    assert pieces == [at_once] * (len(body) // at_once)


@given(st.binary(min_size=1, max_size=100), cuts, cuts, st.integers(1, 40), st.integers(0, 20))
def test_after_each_piece_that_much_is_there_and_nothing_more(
    body: bytes, sources: list[int], targets: list[int], at_once: int, count: int
) -> None:
    memory = bytearray(len(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lent, "COPY_BYTES", at_once)
        copying = copies(cut(memory, targets), cut(body, sources))
        done = sum(next(copying, 0) for _ in range(count))
    if done == count * at_once:
        assert memory == body[:done] + bytes(len(body) - done)
    else:
        assert memory == body


def test_a_piece_takes_less_than_a_millisecond() -> None:
    assert COPY_BYTES == 4 << 20


# --- a body and its return -------------------------------------------------------------------


def copying_of(
    body: bytes, targets: Sequence[memoryview] | None, nbytes: int | None = None
) -> tuple[Copying, Lent]:
    borrowed = Lent(cut(body, [3]))
    return Copying(borrowed, len(body) if nbytes is None else nbytes, targets), borrowed


@pytest.fixture
def four_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "COPY_BYTES", 4)


@pytest.mark.usefixtures("four_at_once")
def test_a_body_is_given_back_when_all_of_it_has_been_copied() -> None:
    memory = bytearray(10)
    copying, borrowed = copying_of(b"0123456789", cut(memory, [6]))
    assert not copying.go_on()
    assert memory == b"0123" + bytes(6)
    assert not copying.go_on()
    assert borrowed.num_returns == 0
    assert copying.go_on()
    assert memory == b"0123456789"
    assert borrowed.num_returns == 1


@pytest.mark.usefixtures("four_at_once")
def test_who_gives_up_is_not_written_to_any_more_and_the_body_is_given_back() -> None:
    memory = bytearray(10)
    copying, borrowed = copying_of(b"0123456789", cut(memory, []))
    assert not copying.go_on()
    copying.stop()
    assert copying.go_on()
    assert memory == b"0123" + bytes(6)
    assert borrowed.num_returns == 1


def test_what_nobody_wants_is_given_back_at_once() -> None:
    copying, borrowed = copying_of(b"0123456789", None)
    assert copying.go_on()
    assert borrowed.num_returns == 1


@pytest.mark.parametrize("room", [0, 9, 11])
def test_the_memory_for_a_body_has_its_size(room: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"{room} bytes of memory given for a body of 10"):
        copying_of(b"0123456789", cut(bytearray(room), []))


def test_an_empty_body_needs_no_memory() -> None:
    copying, borrowed = copying_of(b"", [])
    assert copying.go_on()
    assert borrowed.num_returns == 1
