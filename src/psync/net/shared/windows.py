"""Windows: pieces of regions of other tasks, seen one after the other as one array.

A variable that is cut lies in a region of each of its ps tasks. Whoever reads it wants one array.
So a *window* is made: a range of addresses in which the pages of all pieces are mapped side by
side, for a second time. Nothing is copied but what cannot be mapped: a page in which two pieces
meet is memory of this task's own, filled each time. Pages must line up: the owner of a piece lays
it at an offset in its region that is congruent, modulo the size of a page, to its offset in the
variable (``regions.SharedMemory.take_run``).

Windows are kept, as the same pieces come again: an owner writes in turn to few places. The pieces
that an array of a window shows are kept for as long as it lives, so they stay as they are. Another
array of the same window meanwhile shows the same, down to the pages that were filled.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

PAGE = mmap.PAGESIZE

WORTH_BYTES = 256 << 10
"""Less is as quickly copied."""

MAX_WINDOWS = 256
"""That are kept for later. One costs the kernel an entry or two for each piece, and a process may
have 65,530 of those."""

MAX_WINDOW_BYTES = 16 << 30
"""Of addresses, in those that are kept: of these pages there are no others, but page tables have a
five-hundredth of it."""

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python knows it from 3.13 on

Layout = tuple[tuple[int, int, int], ...]
"""Of each piece: its mapping, address, size."""


def root_of(memory: memoryview) -> np.ndarray:
    """Return an array of bytes to which all references to this memory will lead.

    numpy lets views of views refer to the first array in their chain: that is this one, as what is
    below it is none.
    """
    return np.frombuffer(memory, np.uint8)


def address_of(view: memoryview) -> int:
    """Return where in this process a view begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Windows:
    """Those of one task. Single owner; what is joined may be dropped in any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Layout, _Window] = OrderedDict()  # the last used at the end
        self._mremap = _mremap()

    def joined(self, pieces: Sequence[memoryview | None]) -> np.ndarray | None:
        """Return an array of the bytes of several pieces that are lent, one after the other.

        Args:
            pieces: Parts of what ``Borrowed.keep`` has returned, none empty; kept with the array.
                One that is not in one piece itself is None.

        Returns:
            Read-only, and a root: what is made of it refers to it. None: it takes a copy.
        """
        whole = [piece for piece in pieces if piece is not None]
        if len(whole) < len(pieces):
            return None
        if len(whole) == 1:
            return root_of(whole[0])
        window = self._window(whole)
        if window is None:
            return None
        root = root_of(window.showing(whole))
        weakref.finalize(root, whole.clear).atexit = False
        return root

    def statistics(self) -> dict[str, int]:
        """Return how many are kept, and their size."""
        sizes = [window.nbytes for window in list(self._kept.values())]
        return {"windows": len(sizes), "window_bytes": sum(sizes)}

    def _window(self, pieces: Sequence[memoryview]) -> _Window | None:
        mappings = [_mapping_of(piece) for piece in pieces]
        layout = tuple(
            (id(mapping), address_of(piece), len(piece))
            for mapping, piece in zip(mappings, pieces, strict=True)
        )
        window = self._kept.get(layout)
        if window is not None:
            self._kept.move_to_end(layout)
            return window
        nbytes = sum(map(len, pieces))
        if self._mremap is None or not WORTH_BYTES <= nbytes <= MAX_WINDOW_BYTES:
            return None
        if any(mapping is None for mapping in mappings) or not _line_up(layout):
            return None
        try:
            window = _Window(layout, self._mremap)
        except OSError:  # there are too many mappings, or no addresses
            self._mremap = None
            return None
        # Gone with the first of its regions: arrays of it keep all of them.
        kept = self._kept
        window.ends = [weakref.ref(each, lambda _: kept.pop(layout, None)) for each in mappings]
        self._kept[layout] = window
        while len(self._kept) > MAX_WINDOWS or self.statistics()["window_bytes"] > MAX_WINDOW_BYTES:
            self._kept.popitem(last=False)
        return window


class _Window:
    """A range of addresses; it is unmapped when nobody sees it any more.

    Args:
        layout: Of its pieces, which line up.
        mremap: Of the C library.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, layout: Layout, mremap: Callable[..., int | None]) -> None:
        self.nbytes = sum(nbytes for _, _, nbytes in layout)
        self.ends: list[weakref.ref[object]] = []  # of the mappings that it was made from
        self._fills: list[tuple[int, int, int, int]] = []  # piece, start in it, end; place
        size = -(-self.nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._memory = memoryview(memory)
        base, start = address_of(self._memory), 0
        for number, (_, address, nbytes) in enumerate(layout):
            end = start + nbytes
            first = -(-start // PAGE) * PAGE  # of the pages that are all of this piece
            last = size if end == self.nbytes else end // PAGE * PAGE
            if first >= last:
                first = last = end
            else:
                source, flags = address + first - start, _MREMAP_MAYMOVE | _MREMAP_FIXED
                if mremap(source, 0, last - first, flags, base + first) == _FAILED:
                    # Others may have got the addresses in the middle: they are not to be unmapped.
                    _given_up.append(memory)
                    raise OSError(ctypes.get_errno(), "mremap")
            self._fill(number, start, start, first)
            self._fill(number, start, last, end)
            start = end

    def _fill(self, number: int, start: int, first: int, last: int) -> None:
        if first < last:
            self._fills.append((number, first - start, last - start, first))

    def showing(self, pieces: Sequence[memoryview]) -> memoryview:
        """Return all of it, read-only, with these pieces in it."""
        for number, start, end, place in self._fills:
            self._memory[place : place + end - start] = pieces[number][start:end]
        return self._memory[: self.nbytes].toreadonly()


_given_up: list[mmap.mmap] = []


def _line_up(layout: Layout) -> bool:
    start = 0
    for _, address, nbytes in layout:
        if (address - start) % PAGE:
            return False
        start += nbytes
    return True


def _mapping_of(piece: memoryview) -> mmap.mmap | None:
    """Return the mapping that a part of a body lies in; None: it is one of a network in memory."""
    root: object = piece.obj
    base: object = root.base if isinstance(root, np.ndarray) else None
    mapping: object = base.obj if isinstance(base, memoryview) else None
    return mapping if isinstance(mapping, mmap.mmap) else None


def _mremap() -> Callable[..., int | None] | None:
    """Return the C library's ``mremap``; None: there is none."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).mremap
    except (OSError, AttributeError):
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    found.argtypes, found.restype = [address, size, size, ctypes.c_int, address], address
    return found
