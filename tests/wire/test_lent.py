"""Lent bodies: where one lies, and its copy, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.wire import frames
from psync.wire.frames import copies
from wire_tools import cut

# --- the copy --------------------------------------------------------------------------------

cuts = st.lists(st.integers(0, 100), max_size=8)


@given(st.binary(min_size=1, max_size=100), cuts, cuts, st.integers(1, 40), st.integers(0, 99))
def test_after_each_piece_that_much_is_there_and_nothing_more(
    body: bytes, sources: list[int], targets: list[int], at_once: int, count: int
) -> None:
    memory = bytearray(len(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "COPY_BYTES", at_once)
        copying = copies(cut(memory, targets), cut(body, sources))
        done = sum(next(copying, 0) for _ in range(count))
    if done == count * at_once:
        assert memory == body[:done] + bytes(len(body) - done)
    else:
        assert memory == body
