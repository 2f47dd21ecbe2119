"""Lent bodies: where one lies, and its copy, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.wire import lent
from psync.wire.lent import COPY_BYTES, EXTENT, EXTENT_BYTES, Extent, copies
from wire_tools import cut


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
