"""Regions: memory of this process that tasks of its host may map, and never write.

A region is a ``memfd``: a file without a name, which is gone when nobody has it open or mapped.
Nothing is left behind by whoever is killed, and nobody finds it who was not given its descriptor.
It is sealed once its owner has mapped it: it keeps its size, or who reads it would be killed by a
signal, and each later mapping can only be read. Its pages are there from the beginning, and are
its owner's in all accounts.

``SharedMemory`` cuts regions into *roots*, arrays of bytes as ``numerics.memory`` counts references
to: memory is used again when nobody sees it any more, here or elsewhere, and then only.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import math
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from psync.errors import RemoteProtocolError
from psync.net.shared.windows import Windows, address_of, root_of
from psync.numerics.memory import POOL_BYTES, SHARING_BYTES, BlockPool, roomy
from psync.wire.lent import LENT_ABOVE_BYTES

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
        self.heap: bytearray | None = None  # its memory, if it is in this process only
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


class Heap(np.ndarray):
    """A region of a network in memory as its owner sees it; nobody outside of this process can.

    Others see the same memory, which is there for as long as somebody does; the region is gone with
    its owner's view of it, as between processes.
    """

    region: Region


Make = Callable[[int, int], Mapping | Heap]
"""Makes a region, given its number and size. Raises OSError."""


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


def make_heap(number: int, nbytes: int) -> Heap:
    """Make a region for tasks of one process."""
    memory = bytearray(nbytes)
    heap = np.frombuffer(memory, np.uint8).view(Heap)
    heap.region = Region(number, nbytes)
    heap.region.heap = memory
    heap.region.address = address_of(heap.data)
    return heap


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


def can_make_regions() -> bool:
    """Return whether this system has all that ``make_region`` needs."""
    if not (hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")):
        return False
    try:
        make_region(0, mmap.PAGESIZE)
    except OSError:
        return False
    return True


def region_of(view: memoryview) -> Region | None:
    """Return the region in which a view of a root lies, or of a part of one."""
    base = _base_of(view)
    owner: object = base.obj if isinstance(base, memoryview) else None
    return owner.region if isinstance(owner, Mapping | Heap) else None


def _base_of(view: memoryview) -> object:
    """Return what is below the last array in the chain to which a view refers; None: nothing."""
    root: object = view.obj
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    return root.base if isinstance(root, np.ndarray) else None


def offset_of(view: memoryview, region: Region) -> int:
    """Return where in its region a view begins."""
    return address_of(view) - region.address


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
        self._numbers = itertools.count(1)
        self._slab = memoryview(b"")  # what is left of it
        self._slab_at = 0  # where in its region
        # Each has two descriptors: a mapping keeps one of its own.
        self._max_regions = _max_descriptors() // 8
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._shrinking: asyncio.TimerHandle | None = None

    def take(self, nbytes: int) -> np.ndarray:
        """Return a new root; of ordinary memory if it is small, or nobody could read it."""
        memory = self._cut(nbytes, 0, ALIGNMENT, SLAB_BYTES)
        return np.empty(nbytes, np.uint8) if memory is None else root_of(memory)

    def take_run(self, nbytes: int, offset: int) -> memoryview | None:
        """Return new memory in one piece, which can be mapped behind others; see ``windows``.

        Args:
            nbytes: Its size.
            offset: Of its first byte in the whole; of its first byte in the region, modulo the size
                of a page.

        Returns:
            None: it is small, nobody could read it, or there is no more.
        """
        if len(self._regions) >= self._max_regions // 2:  # blocks and copies need some, too
            return None
        return self._cut(nbytes, offset % mmap.PAGESIZE, mmap.PAGESIZE, SHARING_BYTES)

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
        if nbytes <= LENT_ABOVE_BYTES or self.make is None:
            return np.empty(shape, dtype)
        root = self.lendable(nbytes)
        if root is None:
            return np.empty(shape, dtype)
        return root[:nbytes].view(dtype).reshape(shape)

    def lendable(self, nbytes: int) -> np.ndarray | None:
        """Return a root of the arena with room for so much; None: there is no memory."""
        with self._lock:
            try:
                return self.arena.lend(roomy(max(nbytes, LENT_ABOVE_BYTES + 1)))
            except MemoryError:
                return None

    def own_region_of(self, view: memoryview) -> Region | None:
        """Return the region of this task in which a view lies, whoever has made an array of it."""
        base = _base_of(view)
        if isinstance(base, memoryview):
            region = region_of(view)
            return region if region is not None and region.owner is self.token else None
        if base is None or not len(view):  # ordinary memory
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
        waiters = [
            waiter for lender in list(self.lenders) for waiter in lender.until_returned(owners)
        ]
        if waiters:
            await asyncio.wait(waiters)

    def let_go(self) -> None:
        """Keep nothing that is not in use: connections have ended, and perhaps the task."""
        self._stop_shrinking()
        with self._lock:
            self.arena = self._new_arena()
            self._slab = memoryview(b"")

    def end(self) -> None:
        """The process ends: whoever still reads what it has lent keeps the memory."""
        for sharing in list(self.lenders):
            sharing.drop()

    def shrink_soon(self) -> None:
        """Something that was lent has come back: see that no more is kept than is used."""
        if self._shrinking is None and self.arena.nbytes > ARENA_BYTES:
            loop, me = asyncio.get_running_loop(), weakref.ref(self)
            self._shrinking = loop.call_later(SHRINK_S, _shrink, me)

    def shrink(self) -> None:
        """Let the arena keep no more than usual, but for what is in use."""
        self._stop_shrinking()
        with self._lock:
            self.arena.shrink()

    def _stop_shrinking(self) -> None:
        if self._shrinking is not None:
            self._shrinking.cancel()
            self._shrinking = None

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
        return made.data if isinstance(made, Heap) else memoryview(made)


def _shrink(memory: weakref.ref[SharedMemory]) -> None:
    if (shrunk := memory()) is not None:
        shrunk.shrink()
        shrunk.shrink_soon()  # if more is in use now
