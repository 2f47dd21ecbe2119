"""Regions: what is checked of another task's, and when memory of one's own is used again."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_files import num_fds
from psync.errors import RemoteProtocolError
from psync.net.shared import regions
from psync.net.shared.regions import (
    F_SEAL_FUTURE_WRITE,
    MFD_NOEXEC_SEAL,
    SEALS,
    SHRINK_S,
    SLAB_BYTES,
    Mapping,
    SharedMemory,
    make_region,
    map_foreign,
    offset_of,
    region_of,
)
from psync.numerics.memory import SHARING_BYTES
from psync.specs import dtype_of
from psync.testing import run_virtual
from psync.testing.memory_sharing import Heap, make_heap
from psync.wire.frames import LENT_ABOVE_BYTES
from psync.wire.tensors import to_bytes_view

PAGE = mmap.PAGESIZE
MIB = 1 << 20
MAKERS = pytest.mark.parametrize("make", [make_region, make_heap])


def shared(make: Callable[[int, int], Mapping | Heap] = make_heap) -> SharedMemory:
    memory = SharedMemory()
    memory.make = make
    return memory


# --- one region ------------------------------------------------------------------------------


def test_what_is_written_is_read_by_who_maps_the_descriptor() -> None:
    region = make_region(1, 3 * PAGE)
    foreign = map_foreign(os.dup(region.region.fd), 3 * PAGE)
    region[PAGE : PAGE + 3] = b"abc"
    assert bytes(foreign[PAGE : PAGE + 3]) == b"abc"
    assert foreign.readonly


def test_its_memory_is_there_from_the_beginning_and_its_descriptor_is_not_passed_on() -> None:
    region = make_region(1, MIB).region
    assert os.fstat(region.fd).st_blocks * 512 >= MIB
    assert not os.get_inheritable(region.fd)


def attempts(fd: int) -> Iterator[Callable[[], object]]:
    """What somebody who has the descriptor could do to it."""
    yield lambda: os.ftruncate(fd, 0)
    yield lambda: os.ftruncate(fd, 2 * MIB)
    yield lambda: os.pwrite(fd, b"x", 0)
    yield lambda: mmap.mmap(fd, MIB)
    yield lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    yield lambda: os.posix_fallocate(fd, MIB, MIB)


@pytest.mark.promise("memory.one-writer")
@pytest.mark.parametrize("number", range(6))
def test_nobody_else_can_write_to_it_or_change_its_size(number: int) -> None:
    region = make_region(1, MIB)
    fd = os.dup(region.region.fd)
    try:
        with pytest.raises(PermissionError):
            list(attempts(fd))[number]()
    finally:
        os.close(fd)


def test_who_opens_it_again_cannot_write_either() -> None:
    region = make_region(1, MIB)
    again = os.open(f"/proc/self/fd/{region.region.fd}", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(again, MIB)
        with pytest.raises(OSError, match="not permitted"):
            os.write(again, b"x")
    finally:
        os.close(again)


def test_a_mapping_outlives_the_descriptor_and_the_owner() -> None:
    region = make_region(1, PAGE)
    region[:3] = b"abc"
    foreign = map_foreign(os.dup(region.region.fd), PAGE)
    del region
    assert bytes(foreign[:3]) == b"abc"


def test_its_end_is_told_in_the_order_in_which_it_was_shown() -> None:
    class Knower:
        def region_gone(self, number: int) -> None:
            told.append(self)

    told: list[Knower] = []
    knowers = [Knower() for _ in range(20)]
    made = make_heap(7, PAGE)
    for knower in knowers:
        made.region.on_gone[knower] = None
    del made
    assert told == knowers


@MAKERS
def test_its_end_closes_it_and_is_told(make: Callable[[int, int], Mapping | Heap]) -> None:
    class Knower:
        def __init__(self) -> None:
            self.gone: list[int] = []

        def region_gone(self, number: int) -> None:
            self.gone.append(number)

    before = num_fds()
    first, second = Knower(), Knower()
    made = make(7, PAGE)
    made.region.on_gone[first] = None
    made.region.on_gone[second] = None
    view = memoryview(made)
    del made, second
    assert first.gone == []  # somebody sees it
    del view
    assert first.gone == [7]
    assert num_fds() == before


# --- no region can be made -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["memfd_create", "posix_fallocate"])
def test_a_region_that_cannot_be_made_leaves_no_descriptor(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = num_fds()

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, what, fails)
    with pytest.raises(OSError, match="no space"):
        make_region(1, PAGE)
    assert num_fds() == before


def test_a_region_that_cannot_be_sealed_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = num_fds()
    monkeypatch.setattr(regions, "SEALS", 0x4000)
    with pytest.raises(OSError, match="Invalid argument"):
        make_region(1, PAGE)
    assert num_fds() == before


def test_where_executable_memory_is_forbidden_it_is_said_that_this_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, asked = os.memfd_create, []

    def picky(name: str, flags: int) -> int:
        asked.append(flags)
        if not flags & MFD_NOEXEC_SEAL:
            raise PermissionError(errno.EACCES, "vm.memfd_noexec")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", picky)
    region = make_region(1, PAGE)
    assert len(asked) == 2
    map_foreign(os.dup(region.region.fd), PAGE)


# --- another task's --------------------------------------------------------------------------


def memfd(nbytes: int, *, allocated: int | None = None, seals: int = SEALS) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if allocated := nbytes if allocated is None else allocated:
        os.posix_fallocate(fd, 0, allocated)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def file_on_disk() -> int:
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        return os.dup(file.fileno())


def pipe() -> int:
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


SEALED = "is not sealed"
ONES = [1 << bit for bit in range(6) if SEALS & 1 << bit]

HOSTILE: dict[str, tuple[Callable[[], int], int, str]] = {
    "unsealed": (lambda: memfd(MIB, seals=0), MIB, SEALED),
    **{
        f"without seal {seal:#x}": (lambda seal=seal: memfd(MIB, seals=SEALS & ~seal), MIB, SEALED)
        for seal in ONES
    },
    "too small": (lambda: memfd(MIB - 1), MIB, "has 1048575 bytes"),
    "too large": (lambda: memfd(MIB + 1), MIB, "expected 1048576"),
    "sparse": (lambda: memfd(MIB, allocated=MIB // 2), MIB, "524288 of them allocated"),
    "all holes": (lambda: memfd(MIB, allocated=0), MIB, "0 of them allocated"),
    "empty": (lambda: memfd(0), 0, "has 0 bytes"),
    "said to be empty": (lambda: memfd(MIB), 0, "expected 0"),
    "said to be huge": (lambda: memfd(MIB), 2**64 - 1, "expected 18446744073709551615"),
    "a file on disk": (file_on_disk, MIB, "cannot be mapped"),
    "a pipe": (pipe, MIB, "cannot be mapped"),
    "a directory": (lambda: os.open("/", os.O_RDONLY), MIB, "cannot be mapped"),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), MIB, "cannot be mapped"),
    "only a path": (lambda: os.open("/proc/self/exe", os.O_PATH), MIB, "cannot be mapped"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_region_is_refused_and_closed(kind: str) -> None:
    make, nbytes, told = HOSTILE[kind]
    before = num_fds()
    with pytest.raises(RemoteProtocolError, match=told):
        map_foreign(make(), nbytes)
    gc.collect()
    assert num_fds() == before


def test_all_four_seals_are_asked_for() -> None:
    assert len(ONES) == 4
    assert F_SEAL_FUTURE_WRITE in ONES


# --- memory in regions -----------------------------------------------------------------------


def test_before_somebody_could_read_it_memory_is_ordinary() -> None:
    memory = SharedMemory()
    root = memory.take(MIB)
    assert root.flags.owndata
    assert region_of(root.data) is None
    assert memory.statistics() == {
        "shared_regions": 0, "shared_bytes": 0, "windows": 0, "window_bytes": 0,
    }  # fmt: skip


def test_small_memory_is_ordinary() -> None:
    memory = shared()
    assert region_of(memory.take(LENT_ABOVE_BYTES).data) is None
    assert region_of(memory.take(LENT_ABOVE_BYTES + 1).data) is not None


@MAKERS
def test_a_view_knows_its_place(make: Callable[[int, int], Mapping | Heap]) -> None:
    memory = shared(make)
    first, second = memory.take(100_001), memory.take(MIB)
    region = region_of(second.data)
    assert region is not None
    assert region is region_of(first.data[5:10])
    assert region.owner is memory.token
    assert offset_of(first.data, region) == 0
    assert offset_of(second.data[10:20], region) == 100_032 + 10  # what begins there is aligned
    assert memory.statistics()["shared_regions"] == 1
    assert memory.statistics()["shared_bytes"] == SLAB_BYTES


def test_views_of_other_kinds_are_in_no_region() -> None:
    memory = shared()
    memory.take(MIB)
    for view in (
        memoryview(b"abc"),
        memoryview(bytearray(3)),
        np.zeros(3, np.uint8).data,
        np.zeros(9, np.uint8)[3:].data,
        np.frombuffer(b"abc", np.uint8).data,
        memoryview(mmap.mmap(-1, PAGE)),
    ):
        assert region_of(view) is memory.own_region_of(view) is None


@MAKERS
def test_views_of_arrays_know_their_region(make: Callable[[int, int], Mapping | Heap]) -> None:
    memory, other = shared(make), shared(make)
    root = memory.take(MIB)
    region = region_of(root.data)
    assert region is not None
    for view in (root[10:].data, to_bytes_view(root.view(np.float32).reshape(512, 512)[3:9])):
        assert region_of(view) is memory.own_region_of(view) is region
        assert other.own_region_of(view) is None


class Tensor:
    """An array as another library gives it back, whose chain of references is its own affair."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


@MAKERS
def test_memory_is_found_by_its_address_where_a_library_has_made_the_array(
    make: Callable[[int, int], Mapping | Heap],
) -> None:
    memory, other = shared(make), shared(make)
    root, _ = memory.take(MIB), other.take(MIB)
    view = to_bytes_view(np.asarray(Tensor(root[64:].view(np.float32))))
    region = memory.own_region_of(view)
    assert region is region_of(root.data)
    assert region is not None
    assert offset_of(view, region) == 64
    assert other.own_region_of(view) is None
    assert memory.own_region_of(to_bytes_view(np.asarray(Tensor(np.zeros(3))))) is None


class TestArrays:
    F32 = np.dtype(np.float32)

    def test_one_is_recycled_when_nobody_sees_it(self) -> None:
        memory = shared()
        array = memory.empty((1000, 100), self.F32)
        assert (array.shape, array.dtype, array.flags.c_contiguous) == ((1000, 100), self.F32, True)
        region = memory.own_region_of(to_bytes_view(array))
        assert region is region_of(array.base.data)
        address, part = array.ctypes.data, array[7:].T
        del array
        assert memory.empty((100_000,), self.F32).ctypes.data != address  # a part of it is seen
        lent = to_bytes_view(part.T)
        del part
        assert memory.empty((1000, 100), self.F32).ctypes.data != address  # it is lent
        del lent
        again = [memory.empty((100, 1000), self.F32) for _ in range(3)]
        assert address in {each.ctypes.data for each in again}

    def test_dtypes_and_sizes_are_any(self) -> None:
        memory = shared()
        for shape, name in (((33, 1000), "bfloat16"), ((40_000,), "int64"), ((70_001,), "bool")):
            array = memory.empty(shape, dtype_of(name))
            assert (array.shape, array.dtype) == (shape, dtype_of(name))
            assert memory.own_region_of(to_bytes_view(array)) is not None
            assert array.flags.writeable
        large = memory.empty((2 * SLAB_BYTES,), np.dtype(np.uint8))
        assert memory.own_region_of(to_bytes_view(large)) is not None

    def test_small_ones_are_ordinary_and_so_are_all_where_nobody_could_read_them(self) -> None:
        memory = shared()
        small = memory.empty((LENT_ABOVE_BYTES // 4,), self.F32)
        assert memory.own_region_of(to_bytes_view(small)) is None
        assert memory.empty((0, 5), self.F32).shape == (0, 5)
        memory.make = None
        array = memory.empty((MIB,), self.F32)
        assert memory.own_region_of(to_bytes_view(array)) is None
        assert memory.arena.statistics()["roots"] == 0

    def test_without_memory_they_are_ordinary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = shared()
        monkeypatch.setattr(memory, "_max_regions", 0)
        array = memory.empty((MIB,), self.F32)
        assert memory.own_region_of(to_bytes_view(array)) is None
        assert memory.arena.statistics()["roots"] == 0


def test_what_is_larger_than_a_slab_has_a_region_of_its_own() -> None:
    memory = shared()
    rest = memory.take(MIB)
    large = memory.take(SLAB_BYTES + 1)
    another = memory.take(MIB)
    assert memory.statistics()["shared_bytes"] == 2 * SLAB_BYTES + 1
    assert region_of(another.data) is region_of(rest.data)  # what was left of it is not lost
    del large
    assert memory.statistics()["shared_bytes"] == SLAB_BYTES


def test_a_run_begins_where_its_offset_does_in_a_page() -> None:
    memory = shared(make_region)
    memory.take(MIB)
    for nbytes in (100_000, MIB + 40, SHARING_BYTES, SHARING_BYTES + 1, SLAB_BYTES + 8):
        for offset in (0, 40, PAGE - 8, 10 * PAGE + 8):
            run = memory.take_run(nbytes, offset)
            assert run is not None
            assert len(run) == nbytes
            address = np.frombuffer(run, np.uint8).__array_interface__["data"][0]
            assert (address - offset) % PAGE == 0
            root = np.frombuffer(run, np.uint8)
            region = region_of(root.data)
            assert region is not None
            shares = region.nbytes == SLAB_BYTES
            assert shares == (nbytes <= SHARING_BYTES)
    assert memory.take_run(LENT_ABOVE_BYTES, 0) is None  # is copied anyway
    assert SharedMemory().take_run(MIB, 0) is None  # nobody would read it


def test_a_region_goes_with_the_last_root_in_it() -> None:
    before, memory = num_fds(), shared(make_region)
    roots = [memory.take(6 * MIB) for _ in range(5)]
    assert memory.statistics()["shared_regions"] == 3
    del roots[:2]
    assert memory.statistics()["shared_regions"] == 2
    view = roots[0].data[:1]
    roots.clear()
    assert memory.statistics()["shared_regions"] == 2
    del view
    assert memory.statistics()["shared_regions"] == 1  # from which the next root comes
    memory.let_go()
    assert num_fds() == before


def test_a_task_that_has_ended_keeps_no_memory() -> None:
    before, memory = num_fds(), shared(make_region)
    copy = memory.arena.take(MIB)
    memory.arena.give(copy)
    view = copy.data
    del copy
    memory.let_go()
    assert memory.statistics()["shared_regions"] == 1  # somebody still reads
    del view
    assert num_fds() == before


def use(memory: SharedMemory, *sizes: int) -> int:
    """Have copies of these sizes at one time; return in how many regions they were."""
    roots = [memory.lendable(size) for size in sizes]
    return len({region_of(root.data) for root in roots if root is not None})


def test_what_copies_take_above_the_bound_is_used_again_and_goes_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        for _ in range(2):  # the second time, once more
            for _ in range(3):
                assert use(memory, 20 * MIB, 20 * MIB) == 2
            assert memory.arena.statistics()["bytes"] == 40 * MIB
            memory.shrink_soon()
            await asyncio.sleep(SHRINK_S - 1)
            assert use(memory, 20 * MIB, 20 * MIB) == 2
            await asyncio.sleep(2)
            assert memory.statistics()["shared_bytes"] == 0
        assert memory.arena.misses == 4
        use(memory, 20 * MIB)
        memory.shrink_soon()
        memory.let_go()  # and nothing is waited for
        assert memory.statistics()["shared_bytes"] == 0

    monkeypatch.setattr(regions, "ARENA_BYTES", 4 * MIB)
    memory = shared()
    run_virtual(main)


def test_an_arena_that_was_in_use_when_it_should_shrink_does_so_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        in_use = [memory.lendable(20 * MIB) for _ in range(2)]
        memory.shrink_soon()
        await asyncio.sleep(SHRINK_S + 1)
        assert memory.arena.statistics()["bytes"] == 40 * MIB
        in_use.clear()  # and nothing is lent after that
        await asyncio.sleep(SHRINK_S)
        assert memory.statistics()["shared_bytes"] == 0

    monkeypatch.setattr(regions, "ARENA_BYTES", 4 * MIB)
    memory = shared()
    run_virtual(main)


def test_copies_above_the_bound_are_kept_in_few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "ARENA_BYTES", 4 * MIB)
    monkeypatch.setattr(regions, "SLAB_BYTES", MIB)
    memory = shared()
    for _ in range(5):  # each is a descriptor of everybody who reads it
        assert use(memory, *[2 * MIB] * 40) == 40
        assert memory.statistics()["shared_regions"] <= regions.ARENA_REGIONS


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(LENT_ABOVE_BYTES + 1, 3 * MIB), max_size=30))
def test_roots_never_overlap(sizes: list[int]) -> None:
    memory = shared()
    roots = [memory.take(nbytes) for nbytes in sizes]
    for number, root in enumerate(roots):
        root[:] = number
    for number, (root, nbytes) in enumerate(zip(roots, sizes, strict=True)):
        assert len(root) == nbytes
        assert root[0] == root[-1] == number
        assert (root == number).all()


# --- when there are too many -----------------------------------------------------------------


def test_only_so_many_regions_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs two descriptors, and a task has others to open."""
    monkeypatch.setattr(regions.resource, "getrlimit", lambda _: (24, 24))
    memory = shared()
    roots = [memory.take(SLAB_BYTES) for _ in range(5)]
    assert [region_of(root.data) is not None for root in roots] == [True] * 3 + [False] * 2
    del roots[0]
    assert region_of(memory.take(SLAB_BYTES).data) is not None


@pytest.mark.parametrize(
    ("number", "for_ever"),
    [
        (errno.ENOMEM, False),
        (errno.ENOSPC, False),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EPERM, True),
        (errno.EINVAL, True),
    ],
)
def test_without_a_region_memory_is_ordinary(number: int, for_ever: bool) -> None:
    asked = []

    def fails(region: int, nbytes: int) -> Heap:
        asked.append(region)
        if len(asked) < 3:
            raise OSError(number, "no")
        return make_heap(region, nbytes)

    memory = shared(fails)
    assert region_of(memory.take(MIB).data) is None
    assert region_of(memory.take(MIB).data) is None
    assert len(asked) == (1 if for_ever else 2)
    assert (region_of(memory.take(MIB).data) is None) is for_ever


def test_a_task_without_descriptors_goes_on_with_ordinary_memory() -> None:
    memory, taken, before = shared(make_region), [], num_fds()
    soft, hard = regions.resource.getrlimit(regions.resource.RLIMIT_NOFILE)
    regions.resource.setrlimit(regions.resource.RLIMIT_NOFILE, (num_fds() + 20, hard))
    try:
        taken += [memory.take(SLAB_BYTES) for _ in range(4)]
        assert num_fds() + regions.SPARE_DESCRIPTORS <= before + 20  # others have some left
    finally:
        regions.resource.setrlimit(regions.resource.RLIMIT_NOFILE, (soft, hard))
    assert region_of(taken[-1].data) is None
    assert region_of(memory.take(SLAB_BYTES).data) is not None
