"""Regions: memory of this process that tasks of its host may map, and never write.

A region is a ``memfd``: a file without a name, which is gone when nobody has it open or mapped.
Nothing is left behind by whoever is killed, and nobody finds it who was not given its descriptor.
It is sealed once its owner has mapped it: it keeps its size, or who reads it would be killed by a
signal, and each later mapping can only be read. Its pages are there from the beginning, and are
its owner's in all accounts.

``SharedMemory`` cuts regions into *roots*, arrays of bytes as ``numerics.blocks`` counts references
to: memory is used again when nobody sees it any more, here or elsewhere, and then only.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from psync.errors import RemoteProtocolError
from psync.numerics.blocks import BlockPool
from psync.wire.lent import LENT_ABOVE_BYTES

SLAB_BYTES = 16 << 20
"""Of one region; what is larger has a region of its own."""

ALIGNMENT = 64

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
        self.on_gone: weakref.WeakSet[Any] = weakref.WeakSet()  # whose ``region_gone`` is called

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
    """Make a region that other processes can map. Raises OSError: there is no more memory."""
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
    region.address = _address(memoryview(mapping))
    return mapping


def make_heap(number: int, nbytes: int) -> Heap:
    """Make a region for tasks of one process."""
    memory = bytearray(nbytes)
    heap = np.frombuffer(memory, np.uint8).view(Heap)
    heap.region = Region(number, nbytes)
    heap.region.heap = memory
    heap.region.address = _address(heap.data)
    return heap


def map_foreign(fd: int, nbytes: int) -> memoryview:
    """Map a region of another task's; ``fd`` is closed.

    Raises:
        RemoteProtocolError: It is not what ``make_region`` makes: it could shrink, change under
            other hands, or has holes that would become memory of this task when they are read.
    """
    try:
        status = os.fstat(fd)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise RemoteProtocolError("a region of shared memory is not sealed")
        if not 0 < nbytes == status.st_size <= status.st_blocks * 512:
            raise RemoteProtocolError(
                f"a region of shared memory has {status.st_size} bytes, of which "
                f"{status.st_blocks * 512} are there; it was said to have {nbytes}"
            )
        return memoryview(mmap.mmap(fd, nbytes, prot=READ_ONLY))
    except OSError as exc:
        raise RemoteProtocolError(f"a region of shared memory cannot be mapped: {exc}") from exc
    finally:
        os.close(fd)


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
    root: object = view.obj
    base: object = root.base if isinstance(root, np.ndarray) else None
    if not isinstance(base, memoryview):
        return None
    owner: object = base.obj
    return owner.region if isinstance(owner, Mapping | Heap) else None


def offset_of(view: memoryview, region: Region) -> int:
    """Return where in its region a view begins."""
    return _address(view) - region.address


def root_of(memory: memoryview) -> np.ndarray:
    """Return an array of bytes to which all references to this memory will lead.

    numpy lets views of views refer to the first array in their chain: that is this one, as what is
    below it is none.
    """
    return np.frombuffer(memory, np.uint8)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class SharedMemory:
    """Memory of one task, in regions once a task of its host is connected.

    Attributes:
        make: Makes a region; None: nobody could read it, yet or at all.
    """

    def __init__(self) -> None:
        self.make: Make | None = None
        self.arena = self._new_arena()  # of copies that are lent
        self.token = object()  # that its regions bear
        self._numbers = itertools.count(1)
        self._slab = memoryview(b"")  # what is left of it
        # Each has two descriptors: a mapping keeps one of its own.
        self._max_regions = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def take(self, nbytes: int) -> np.ndarray:
        """Return a new root; of ordinary memory if it is small, or nobody could read it."""
        if nbytes <= LENT_ABOVE_BYTES or self.make is None:
            return np.empty(nbytes, np.uint8)
        if nbytes > len(self._slab):
            memory = self._new_region(max(nbytes, SLAB_BYTES))
            if memory is None:
                return np.empty(nbytes, np.uint8)
            if len(memory) == nbytes:
                return root_of(memory)
            self._slab = memory
        root = root_of(self._slab[:nbytes])
        self._slab = self._slab[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return root

    def let_go(self) -> None:
        """Keep nothing that is not in use: connections have ended, and perhaps the task."""
        self.arena = self._new_arena()
        self._slab = memoryview(b"")

    def _new_arena(self) -> BlockPool:
        me = weakref.ref(self)  # or it would be reached from itself, and stay for a while

        def take(nbytes: int) -> np.ndarray:
            memory = me()
            assert memory is not None, "who takes has it"
            return memory.take(nbytes)

        return BlockPool(source=take)

    def statistics(self) -> dict[str, int]:
        """Return how many regions there are, and their size."""
        regions = list(self._regions)
        return {
            "shared_regions": len(regions),
            "shared_bytes": sum(region.nbytes for region in regions),
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
