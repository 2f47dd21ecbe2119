"""Runs: blocks that lie side by side, whoever reads what they were before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.numerics import memory
from psync.numerics.memory import MAX_RUNS, UNUSED_AFTER, BlockPool, BlockRuns

F32 = np.dtype(np.float32)
SIZE = 100  # elements, in blocks of 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 64)
    monkeypatch.setattr(memory, "_MIN_POOLED_BYTES", 16)


class Memory:
    """Where runs come from."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.is_there = True

    def run(self, nbytes: int, offset: int) -> memoryview | None:
        if not self.is_there:
            return None
        self.made.append((nbytes, offset))
        return memoryview(bytearray(nbytes))


class Array:
    """An array, and what writes to it."""

    def __init__(self, **more: Any) -> None:
        self.memory = Memory()
        self.pool = BlockPool(run=self.memory.run)
        self.array = BlockRuns(SIZE, F32, pool=self.pool, **more)

    def update(self, value: float, apart: bool = False) -> int:
        """Let all elements be a number; return how many blocks were replaced."""
        array, replaced, written = self.array, 0, []
        for i in range(array.num_blocks):
            block = array.writable(i, self.pool, apart=apart)
            block.array.fill(value)
            written.append(block)
            if not apart:
                replaced += array.commit(i, block, self.pool)
        if apart:
            replaced = sum(array.commit(i, each, self.pool) for i, each in enumerate(written))
        return replaced

    def read(self) -> list[memoryview]:
        return self.array.export()

    @property
    def is_one(self) -> bool:
        """Whether its blocks lie side by side."""
        views = self.read()
        starts = [np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in views]
        ends = [start + len(view) for start, view in zip(starts, views, strict=True)]
        return starts[1:] == ends[:-1]


def values(views: list[memoryview]) -> set[float]:
    return set(np.frombuffer(b"".join(views), F32).tolist())


def test_the_first_update_brings_all_blocks_together() -> None:
    made = Array(offset=40)
    assert made.memory.made == []  # nothing is there that anybody has written
    made.update(1)
    assert made.is_one
    assert values(made.read()) == {1}
    assert made.memory.made == [(4 * SIZE, 40)]


def test_what_nobody_reads_is_updated_where_it_is() -> None:
    made = Array()
    made.update(1)
    for value in range(2, 5):
        assert made.update(value) == 0
    assert made.is_one
    assert made.array.spare_bytes == 0


def test_what_is_read_stays_and_the_update_goes_to_one_other_run() -> None:
    made = Array()
    made.update(1)
    first = made.read()
    assert made.update(2) == made.array.num_blocks
    assert (values(first), values(made.read())) == ({1}, {2})
    assert made.is_one
    assert made.array.spare_bytes == 4 * SIZE


def test_with_one_reader_after_another_two_runs_serve_for_ever() -> None:
    made = Array()
    made.update(0)
    for value in range(1, 10):
        held = made.read()
        made.update(value)
        assert values(held) == {value - 1}
        assert made.is_one
    assert len(made.memory.made) == 2


def test_a_reader_that_ends_in_the_middle_of_an_update_scatters_nothing() -> None:
    made = Array()
    made.update(1)
    held = made.read()
    array = made.array
    for i in range(array.num_blocks):
        block = array.writable(i, made.pool)
        block.array.fill(2)
        array.commit(i, block, made.pool)
        if i == 2:
            held.clear()
    assert made.is_one
    made.update(3)
    assert made.is_one
    assert values(made.read()) == {3}


def test_who_reads_in_the_middle_of_an_update_has_one_version_in_one_piece() -> None:
    made = Array()
    made.update(1)
    held = [made.read()]
    array = made.array
    for i in range(array.num_blocks):
        block = array.writable(i, made.pool)
        block.array.fill(2)
        assert array.commit(i, block, made.pool)
        assert made.is_one
        held.append(made.read())
    assert [values(each) for each in held] == [{1}] * array.num_blocks + [{2}]


def test_part_of_a_version_that_is_read_moves_all_of_it() -> None:
    made = Array()
    made.update(1)
    held = made.array.export(20, 30)
    made.update(2)
    assert made.is_one
    assert values(held) == {1}


def test_beyond_a_bound_blocks_are_single_ones_and_come_together_again() -> None:
    made = Array()
    held = []
    for value in range(MAX_RUNS + 3):
        made.update(value)
        held.append(made.read())
    assert not made.is_one
    assert len(made.memory.made) == MAX_RUNS
    assert [values(each) for each in held] == [{float(value)} for value in range(MAX_RUNS + 3)]
    del held[2]
    made.update(99)
    assert made.is_one


def test_without_memory_for_runs_blocks_are_replaced_one_by_one() -> None:
    made = Array()
    made.memory.is_there = False
    made.update(1)
    held = made.read()
    assert made.update(2) == made.array.num_blocks
    assert (values(held), values(made.read())) == ({1}, {2})
    made.memory.is_there = True
    made.update(3)
    assert made.is_one  # and nobody reads it: where nobody can share memory it stays as it is


def test_what_is_written_apart_is_not_there_before_it_is_committed() -> None:
    made = Array()
    made.update(1)
    array = made.array
    blocks = [array.writable(i, made.pool, apart=True) for i in range(array.num_blocks)]
    for block in blocks:
        block.array.fill(2)
    assert values(made.read()) == {1}
    assert made.update(3, apart=True) == array.num_blocks  # what was begun before is given up
    assert values(made.read()) == {3}
    assert made.is_one


def test_a_run_that_takes_no_part_any_more_goes() -> None:
    made = Array()
    made.update(1)
    held = made.read()
    made.update(2)
    del held
    for value in range(UNUSED_AFTER):
        made.update(value)
    assert made.array.spare_bytes
    made.update(5)
    assert made.array.spare_bytes == 0
    assert made.is_one
    assert values(made.read()) == {5}


def test_also_of_an_array_that_is_only_read() -> None:
    made = Array()
    made.update(1)
    held = made.read()
    made.update(2)
    del held
    for _ in range(UNUSED_AFTER + 1):
        made.read()
    assert made.array.spare_bytes == 0
    assert made.is_one


def test_memory_of_a_small_run_is_used_again_and_that_of_a_large_one_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sharing_bytes, pooled in ((4 * SIZE, 4 * SIZE), (4 * SIZE - 1, 0)):
        monkeypatch.setattr(memory, "SHARING_BYTES", sharing_bytes)
        monkeypatch.setattr(memory, "UNUSED_AFTER", 1)
        made = Array()
        made.update(1)
        before = made.pool.statistics()["bytes"]
        held = made.read()
        made.update(2)
        del held
        for value in range(3):
            made.update(value)
        assert made.pool.statistics()["bytes"] - before == pooled


def test_what_was_filled_is_read_as_it_was_and_then_written_in_a_run() -> None:
    made = Array(fill=7)
    assert values(made.read()) == {7}
    array = made.array
    for i in range(array.num_blocks):  # as a rule does: it reads the old block first
        old = array.block(i).array.copy()
        target = array.writable(i, made.pool)
        target.array[:] = old + 1
        array.commit(i, target, made.pool)
    assert values(made.read()) == {8}
    assert made.is_one


def test_initial_contents_lie_side_by_side() -> None:
    made = Array()
    contents = np.arange(SIZE, dtype=F32)
    made.array.load(contents.view(np.uint8), made.pool)
    assert b"".join(made.read()) == contents.tobytes()
    assert made.is_one


def test_an_empty_array_has_none() -> None:
    memory = Memory()
    pool = BlockPool(run=memory.run)
    array = BlockRuns(0, F32, pool=pool)
    assert array.export() == []
    assert memory.made == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.booleans()),
            st.tuples(st.just("read"), st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))),
            st.tuples(st.just("drop"), st.integers(0, 5)),
            st.tuples(st.just("memory"), st.booleans()),
        ),
        max_size=40,
    )
)
def test_whatever_is_read_and_dropped_nothing_that_is_read_changes(
    steps: list[tuple[str, Any]],
) -> None:
    made, held = Array(), list[tuple[list[memoryview], bytes]]()
    present = 0.0
    for number, (kind, what) in enumerate(steps, 1):
        if kind == "update":
            present = float(number)
            made.update(present, apart=what)
        elif kind == "read":
            start, stop = sorted(what)
            views = made.array.export(start, stop)
            assert values(views) <= {present}
            held.append((views, b"".join(views)))
        elif kind == "drop" and what < len(held):
            del held[what]
        elif kind == "memory":
            made.memory.is_there = what
        assert all(b"".join(views) == then for views, then in held)
    assert values(made.read()) == {present}
    held.clear()
    made.memory.is_there = True
    for _ in range(2):
        made.update(1)
    assert made.is_one


def test_what_is_written_apart_is_no_block_that_never_was_made() -> None:
    one = Array(fill=1)
    apart = [one.array.writable(i, one.pool, apart=True) for i in range(one.array.num_blocks)]
    for i, block in enumerate(apart):
        block.array.fill(7)
        assert (one.array.block(i).array == 1).all()
    assert values(one.read()) == {1.0}  # a rule has raised: nothing is committed


@pytest.mark.parametrize("sharing", [False, True])
def test_a_block_of_a_large_run_keeps_no_memory_in_the_pool(
    monkeypatch: pytest.MonkeyPatch, sharing: bool
) -> None:
    monkeypatch.setattr(memory, "SHARING_BYTES", SIZE * 4 if sharing else 0)
    one = Array()
    one.update(1)
    for i in range(one.array.num_blocks):
        block = one.array.release(i)
        assert block is not None
        one.array.retire(block)
    assert bool(one.pool.statistics()["roots"]) == sharing
