"""Windows: pieces of several regions as one array, without a copy."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

from psync.net.shared import regions
from psync.net.shared.regions import MAX_WINDOWS, PAGE, WORTH_BYTES, Windows, root_of
from psync.testing.memory_sharing import make_heap

pytestmark = pytest.mark.skipif(Windows()._mremap is None, reason="only Linux can")

N = WORTH_BYTES


class Piece:
    """A piece of a region that its owner writes, and somebody else reads.

    Args:
        nbytes: Its size.
        offset: In the whole.
        value: Of its bytes at first.
    """

    def __init__(self, nbytes: int, offset: int = 0, value: int = 1) -> None:
        phase = offset % PAGE
        self._mapping = made = regions.make_region(1, phase + nbytes)
        self.written = np.frombuffer(made, np.uint8)[phase:]
        self.written[:] = value
        self._foreign = regions.map_foreign(os.dup(made.region.fd), phase + nbytes)
        self.view = root_of(self._foreign[phase:]).data

    def forget(self) -> None:
        """As when its connection has ended."""
        del self._foreign, self.view


def pieces_of(*sizes: int) -> list[Piece]:
    starts = np.cumsum([0, *sizes]).tolist()
    each = enumerate(zip(sizes, starts, strict=False), 1)
    return [Piece(size, start, number % 200) for number, (size, start) in each]


def joined(made: Windows, pieces: list[Piece]) -> np.ndarray:
    array = made.joined([piece.view for piece in pieces])
    assert array is not None
    return array


def expected(pieces: list[Piece]) -> np.ndarray:
    return np.concatenate([piece.written for piece in pieces])


def mapped_kib() -> int:
    """Of regions, by this process."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "psync" in line]
    found = [re.match(r"(\w+)-(\w+) ", line) for line in maps]
    return sum(int(each[2], 16) - int(each[1], 16) for each in found if each) >> 10


@pytest.mark.parametrize(
    "sizes",
    [
        (N, N),
        (N - 40, N + 40),
        (N + 1, N - 1),
        (PAGE, N),
        (PAGE - 1, 2, N),
        (N, 1),
        (100, 100, N),
        (N, 3 * PAGE, PAGE + 7, N // 2),
        (N // 2 + 5, N // 2 + 6),
        (*range(1, 800, 3), N),
    ],
)
def test_pieces_are_one_array_and_stay_so_when_they_are_written(sizes: tuple[int, ...]) -> None:
    pieces, made = pieces_of(*sizes), Windows()
    array = joined(made, pieces)
    assert np.array_equal(array, expected(pieces))
    del array
    for piece in pieces:  # as in the next version that lies there
        piece.written += 50
    assert np.array_equal(joined(made, pieces), expected(pieces))
    assert made.statistics() == {"windows": 1, "window_bytes": sum(sizes)}


def test_one_piece_needs_none() -> None:
    (piece,), made = pieces_of(N), Windows()
    array = joined(made, [piece])
    assert array.__array_interface__["data"][0] % PAGE == 0
    piece.written[5] = 9
    assert array[5] == 9  # it is that memory
    assert made.statistics()["windows"] == 0


def test_nothing_is_copied_but_pages_in_which_pieces_meet() -> None:
    pieces, made = pieces_of(N + 100, N), Windows()
    array = joined(made, pieces)
    pieces[0].written[0] = pieces[1].written[-1] = 77
    assert (array[0], array[-1]) == (77, 77)


def test_nobody_can_write() -> None:
    array = joined(Windows(), pieces_of(N, N))
    assert not array.flags.writeable
    for view in (array, array[5:], array.view(np.float32)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
    copy = pickle.loads(pickle.dumps(array))
    copy[:] = 0
    assert array.any()


def test_an_array_keeps_its_pieces_and_the_last_view_gives_them_back() -> None:
    pieces, made = pieces_of(N, N), Windows()
    gone: list[int] = []
    for number, piece in enumerate(pieces):
        weakref.finalize(piece.view.obj, gone.append, number)
    array = joined(made, pieces)
    part = array.view(np.float32).reshape(2, -1)[1:, ::3]
    for piece in pieces:
        piece.forget()
    del array
    assert gone == []
    del part
    assert sorted(gone) == [0, 1]


def test_a_window_is_used_again_and_goes_with_its_first_region() -> None:
    gc.collect()
    before = mapped_kib()
    pieces, made = pieces_of(N, N), Windows()
    first, second = joined(made, pieces), joined(made, pieces)
    assert np.shares_memory(first, second)
    assert mapped_kib() - before == 3 * 2 * N >> 10  # its owner's, its reader's, and the window
    pieces[0].forget()
    assert made.statistics()["windows"] == 1  # somebody reads it
    assert first[0] == 1
    del first, second
    assert made.statistics()["windows"] == 0
    pieces.clear()
    assert mapped_kib() == before


def test_a_window_that_is_dropped_lives_on_while_it_is_seen() -> None:
    pieces, made = pieces_of(N, N), Windows()
    array = joined(made, pieces)
    made._kept.clear()
    gc.collect()
    assert np.array_equal(array, expected(pieces))


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Windows()
    whole = Piece(2 * N)
    other = Piece(N)
    for number in range(MAX_WINDOWS + 10):
        assert made.joined([whole.view[: N + number * PAGE % N], other.view]) is not None
    assert made.statistics()["windows"] <= MAX_WINDOWS
    monkeypatch.setattr(regions, "MAX_WINDOW_BYTES", 3 * N)
    assert made.joined([whole.view[PAGE : N + PAGE], other.view]) is not None
    assert made.statistics()["window_bytes"] <= 3 * N
    assert made.joined([whole.view, whole.view]) is None  # larger than all together may be


def test_what_cannot_be_mapped_side_by_side_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (first, second) = Windows(), pieces_of(N, N)
    heap = root_of(memoryview(make_heap(1, N).region.heap)).data
    assert made.joined([first.view, heap]) is None  # of a network in memory
    assert made.joined([first.view, None]) is None  # scattered
    assert made.joined([first.view[:-1], second.view]) is None  # pages do not line up
    assert made.joined([first.view[: N // 4], second.view[: N // 4]]) is None  # is quickly copied
    monkeypatch.setattr(made, "_mremap", None)
    assert made.joined([first.view, second.view]) is None


def test_where_the_system_has_no_room_nothing_is_unmapped_that_may_be_anothers() -> None:
    made, pieces = Windows(), pieces_of(N, N)
    calls: list[int] = []

    def fails_at_the_second(*args: int) -> int | None:
        calls.append(args[4])
        return args[4] if len(calls) == 1 else regions._FAILED

    made._mremap = fails_at_the_second
    before = len(regions._given_up)
    assert made.joined([piece.view for piece in pieces]) is None
    assert len(regions._given_up) == before + 1
    assert isinstance(regions._given_up[-1], mmap.mmap)
    assert made.joined([piece.view for piece in pieces]) is None
    assert len(calls) == 2  # it is not tried again


def test_a_system_without_the_call_has_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*args: object, **more: object) -> object:
        return object()

    monkeypatch.setattr(regions.ctypes, "CDLL", without)
    assert Windows()._mremap is None
