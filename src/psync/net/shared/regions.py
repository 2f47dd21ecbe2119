"""Regions: memory of this process that tasks of its host may map, and never write.

A region is a ``memfd``: a file without a name, which is gone when nobody has it open or mapped.
Nothing is left behind by whoever is killed, and nobody finds it who was not given its descriptor.
It is sealed once its owner has mapped it: it keeps its size, or who reads it would be killed by a
signal, and each later mapping can only be read. Its pages are there from the beginning, and are
its owner's in all accounts.

``SharedMemory`` cuts regions into *roots*, arrays of bytes as ``numerics.memory`` counts references
to: memory is used again when nobody sees it any more, here or elsewhere, and then only.

A *window* shows pieces of regions of other tasks, one after the other, as one array. A variable
that is cut lies in a region of each of its ps tasks; whoever reads it wants one array. So a window
is a range of addresses in which the pages of all pieces are mapped side by side, for a second time.
Nothing is copied but what cannot be mapped: a page in which two pieces meet is memory of this
task's own, filled each time. Pages must line up: the owner of a piece lays it at an offset in its
region that is congruent, modulo the size of a page, to its offset in the variable
(``SharedMemory.take_run``).

Windows are kept, as the same pieces come again: an owner writes in turn to few places. The pieces
that an array of a window shows are kept for as long as it lives, so they stay as they are. Another
array of the same window meanwhile shows the same, down to the pages that were filled.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import itertools
import math
import mmap
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from psync.errors import RemoteProtocolError
from psync.numerics.memory import POOL_BYTES, SHARING_BYTES, BlockPool, roomy
from psync.wire.frames import LENT_ABOVE_BYTES

SLAB_BYTES = 16 << 20
"""Of one region; what is larger has a region of its own."""

ALIGNMENT = 64

ARENA_BYTES = POOL_BYTES
"""That are kept of the memory of copies; more for a while, if more is in use at one time."""

ARENA_REGIONS = 16
"""In which more is kept. Each is a descriptor of every task that reads it, and these bytes in slabs
have as many."""

SHRINK_S = 60.0
"""So often an arena that keeps more is taken back to ``ARENA_BYTES``: then new memory for a step
costs nothing to speak of."""

SPARE_DESCRIPTORS = 16
"""That a task leaves for connections and files: memory that others can read does without."""

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in ``fcntl``
MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; asked for where ``vm.memfd_noexec`` is 2

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
SEALS |= getattr(fcntl, "F_SEAL_SEAL", 0) | F_SEAL_FUTURE_WRITE

READ_ONLY = mmap.PROT_READ if hasattr(mmap, "PROT_READ") else 0


class Region:
    """A piece of memory that can be named to others.

    Attributes:
        number: Among those of its owner.
        nbytes: Its size.
        fd: Its descriptor; -1: it is in this process only.
        address: Of its first byte, here.
    """

    def __init__(self, number: int, nbytes: int, fd: int = -1) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = fd
        self.address = 0
        self.owner: object = None  # the ``token`` of the memory that it belongs to
        # Whose ``region_gone`` is called, in this order: a run of the simulator has no other.
        self.on_gone: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        for knower in list(self.on_gone):
            knower.region_gone(self.number)


class Mapping(mmap.mmap):
    """A region as its owner sees it."""

    region: Region


Make = Callable[[int, int], Any]
"""Makes a region, given its number and size: a buffer that has the ``region``. Raises OSError."""


def make_region(number: int, nbytes: int) -> Mapping:
    """Make a region that other processes can map.

    Raises:
        OSError: There is no more memory, or fewer than ``SPARE_DESCRIPTORS`` are left.
    """
    after = len(os.listdir("/proc/self/fd")) + 2  # the region's own, and that of its mapping
    if after + SPARE_DESCRIPTORS > _max_descriptors():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("psync", flags)
    except PermissionError:
        fd = os.memfd_create("psync", flags | MFD_NOEXEC_SEAL)
    region = Region(number, nbytes, fd)  # closes it
    os.posix_fallocate(fd, 0, nbytes)
    mapping = Mapping(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    mapping.region = region
    region.address = address_of(memoryview(mapping))
    return mapping


def map_foreign(fd: int, nbytes: int) -> memoryview:
    """Map a region of another task's; ``fd`` is closed.

    Raises:
        RemoteProtocolError: It is not what ``make_region`` makes: it could shrink, change under
            other hands, or has holes that would become memory of this task when they are read.
            (As many pages are there, at least: somebody who hides some behind the end passes.)
    """
    try:
        status = os.fstat(fd)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise RemoteProtocolError("a region of shared memory is not sealed")
        if not 0 < nbytes == status.st_size <= status.st_blocks * 512:
            raise RemoteProtocolError(
                f"a region of shared memory has {status.st_size} bytes, {status.st_blocks * 512} "
                f"of them allocated; expected {nbytes}"
            )
        return memoryview(mmap.mmap(fd, nbytes, prot=READ_ONLY))
    except OSError as exc:
        raise RemoteProtocolError(f"a region of shared memory cannot be mapped: {exc}") from exc
    finally:
        os.close(fd)


def _max_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def region_of(view: memoryview) -> Region | None:
    """Return the region in which a view of a root lies, or of a part of one."""
    region = getattr(_owner_of(view), "region", None)
    return region if isinstance(region, Region) else None


def _owner_of(view: memoryview) -> object:
    """Return whose memory an array of this view shows, if that is no array itself; else None."""
    base = _base_of(view)
    return base.obj if isinstance(base, memoryview) else None


def _base_of(view: memoryview) -> object:
    """Return what is below the last array in the chain to which a view refers; None: nothing."""
    root: object = view.obj
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    return root.base if isinstance(root, np.ndarray) else None


def offset_of(view: memoryview, region: Region) -> int:
    """Return where in its region a view begins."""
    return address_of(view) - region.address


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

Layout = tuple[tuple[int, int], ...]
"""Of each piece: its address, size. No other mapping has the address while a window is kept."""


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
        layout = tuple([(address_of(piece), len(piece)) for piece in pieces])
        window = self._kept.get(layout)
        if window is not None:
            self._kept.move_to_end(layout)
            return window
        nbytes, mappings = sum(map(len, pieces)), list(map(_owner_of, pieces))
        if self._mremap is None or not WORTH_BYTES <= nbytes <= MAX_WINDOW_BYTES:
            return None
        if not all(isinstance(mapping, mmap.mmap) for mapping in mappings):
            return None  # of a network in memory
        ends = itertools.accumulate(map(len, pieces))
        if any((sum(piece) - end) % PAGE for piece, end in zip(layout, ends, strict=True)):
            return None  # they do not line up
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
        self.nbytes = sum(nbytes for _, nbytes in layout)
        self.ends: list[weakref.ref[object]] = []  # of the mappings that it was made from
        self._fills: list[tuple[int, int, int, int]] = []  # piece, start in it, end; place
        size = -(-self.nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._memory = memoryview(memory)
        base, start = address_of(self._memory), 0
        for number, (address, nbytes) in enumerate(layout):
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


def _mremap() -> Callable[..., int | None] | None:
    """Return the C library's ``mremap``; None: there is none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).mremap
    except (OSError, AttributeError, TypeError):  # of another system than Linux
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    found.argtypes, found.restype = [address, size, size, ctypes.c_int, address], address
    return found


class SharedMemory:
    """Memory of one task, in regions once a task of its host is connected.

    Attributes:
        make: Makes a region; None: nobody could read it, yet or at all.
    """

    def __init__(self) -> None:
        self.make: Make | None = None
        self.arena = self._new_arena()  # of copies that are lent, and arrays that will be
        self.windows = Windows()  # on what is lent to it
        self._lock = threading.RLock()  # steps that are plain functions run in threads
        self.token = object()  # that its regions bear
        # With whom it is shared, in this order.
        self.lenders: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._returned = asyncio.Event()  # set for a moment when something comes back
        self._numbers = itertools.count(1)
        self._slab = memoryview(b"")  # what is left of it
        self._slab_at = 0  # where in its region
        # Each has two descriptors: a mapping keeps one of its own.
        self._max_regions = _max_descriptors() // 8
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._shrinks = False  # soon

    def take(self, nbytes: int) -> np.ndarray:
        """Return a new root; of ordinary memory if it is small, or nobody could read it."""
        memory = self._cut(nbytes, 0, ALIGNMENT, SLAB_BYTES)
        return np.empty(nbytes, np.uint8) if memory is None else root_of(memory)

    def take_run(self, nbytes: int, offset: int) -> memoryview | None:
        """Return new memory in one piece, which can be mapped behind others in a window.

        Args:
            nbytes: Its size.
            offset: Of its first byte in the whole; of its first byte in the region, modulo the size
                of a page.

        Returns:
            None: it is small, nobody could read it, or there is no more.
        """
        if len(self._regions) >= self._max_regions // 2:  # blocks and copies need some, too
            return None
        return self._cut(nbytes, offset % PAGE, PAGE, SHARING_BYTES)

    def _cut(self, nbytes: int, phase: int, alignment: int, sharing: int) -> memoryview | None:
        """Return new memory; None: it is small, nobody could read it, or there is no more.

        Args:
            nbytes: Its size.
            phase: Where it begins: its offset in the region, modulo ``alignment``.
            alignment: The same.
            sharing: What is larger has a region of its own.
        """
        if nbytes <= LENT_ABOVE_BYTES or self.make is None:
            return None
        with self._lock:
            start = (phase - self._slab_at) % alignment
            if nbytes <= sharing and start + nbytes <= len(self._slab):
                memory, at = self._slab, self._slab_at
            else:
                size = phase + nbytes
                new = self._new_region(max(size, SLAB_BYTES) if nbytes <= sharing else size)
                if new is None:
                    return None
                memory, at, start = new, 0, phase
            if len(memory) - start - nbytes > len(self._slab) or memory is self._slab:
                end = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
                self._slab, self._slab_at = memory[end:], at + end
        return memory[start : start + nbytes]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array, which is lent without a copy where that can be; of any contents.

        Its memory is the arena's: handed out again once nobody sees the array, here or elsewhere.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        is_small = nbytes <= LENT_ABOVE_BYTES
        root = None if is_small or self.make is None else self.lendable(nbytes)
        return np.empty(shape, dtype) if root is None else root[:nbytes].view(dtype).reshape(shape)

    def lendable(self, nbytes: int) -> np.ndarray | None:
        """Return a root of the arena with room for so much; None: there is no memory."""
        with self._lock:
            try:
                return self.arena.lend(roomy(max(nbytes, LENT_ABOVE_BYTES + 1)))
            except MemoryError:
                return None

    def own_region_of(self, view: memoryview) -> Region | None:
        """Return the region of this task in which a view lies, whoever has made an array of it."""
        region = region_of(view)
        if region is not None:
            return region if region.owner is self.token else None
        base = _base_of(view)
        if base is None or isinstance(base, memoryview) or not len(view):  # ordinary memory
            return None
        first = address_of(view)  # a library's, such as torch, which keeps the array that it got
        with self._lock:  # others are made in other threads
            regions = list(self._regions)
        for region in regions:
            if region.address <= first <= region.address + region.nbytes - len(view):
                return region
        return None

    async def returned(self, views: Iterable[memoryview]) -> None:
        """Wait until nobody reads any more what is lent of the arrays of these views.

        Cancellation: Safe.
        """
        owners = {id(view.obj) for view in views}
        while any(lender.lends(owners) for lender in list(self.lenders)):
            await self._returned.wait()

    def let_go(self) -> None:
        """Keep nothing that is not in use: connections have ended, and perhaps the task."""
        with self._lock:
            self.arena = self._new_arena()
            self._slab = memoryview(b"")

    def end(self) -> None:
        """The process ends: whoever still reads what it has lent keeps the memory."""
        for sharing in list(self.lenders):
            sharing.drop()

    def note_returned(self) -> None:
        """Something that was lent has come back: who waits in ``returned`` looks again."""
        self._returned.set()
        self._returned.clear()

    def shrink_soon(self) -> None:
        """Something that was lent has come back: see that no more is kept than is used."""
        if not self._shrinks and self.arena.nbytes > ARENA_BYTES:
            self._shrinks = True
            asyncio.get_running_loop().call_later(SHRINK_S, _shrink, weakref.ref(self))

    def _new_arena(self) -> BlockPool:
        me = weakref.proxy(self)  # or it would be reached from itself, and stay for a while

        def take(nbytes: int) -> np.ndarray:
            root: np.ndarray = me.take(nbytes)
            if region_of(root.data) is None:  # ordinary memory, which the arena must not keep
                raise MemoryError
            return root

        def may_grow() -> bool:
            return len(me._regions) <= ARENA_REGIONS

        return BlockPool(ARENA_BYTES, take, may_grow=may_grow)

    def statistics(self) -> dict[str, int]:
        """Return how many regions there are, and windows on those of others, and their size."""
        with self._lock:
            regions = list(self._regions)
        return {
            "shared_regions": len(regions),
            "shared_bytes": sum(region.nbytes for region in regions),
            **self.windows.statistics(),
        }

    def _new_region(self, nbytes: int) -> memoryview | None:
        if self.make is None or len(self._regions) >= self._max_regions:
            return None
        try:
            made = self.make(next(self._numbers), nbytes)
        except OSError as exc:
            if exc.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE):
                self.make = None  # it would fail each time
            return None
        made.region.owner = self.token
        self._regions.add(made.region)
        return memoryview(made)


def _shrink(memory: weakref.ref[SharedMemory]) -> None:
    if (shrunk := memory()) is not None:
        shrunk._shrinks = False
        with shrunk._lock:
            shrunk.arena.shrink()
        shrunk.shrink_soon()  # if more is in use now
