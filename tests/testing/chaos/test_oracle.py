"""The oracle of chaotic runs finds faults that are planted, and none where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psync.testing.chaos import oracle

NUM_PS, NUM_ROWS = 2, 16

Line = dict[str, Any]
Arrays = dict[str, np.ndarray]


def life(first: int = 0, again: tuple[int, ...] = (), **partial: list[int]) -> Line:
    traces = {number.removeprefix("c"): trace for number, trace in partial.items()}
    return {"kind": "life", "restored": None, "next": first, "again": again, "partial": traces}


def scheduled(first: int, stop: int) -> Line:
    return {"kind": "scheduled", "first": first, "stop": stop}


def done(*numbers: int, outcome: str = "accepted", base: int = 0) -> Line:
    closures = [[number, number - base, outcome, "accepted"] for number in numbers]
    return {"kind": "done", "closures": closures}


def rollback(*ids: int) -> Line:
    return {"kind": "rollback", "closures": list(ids)}


def end(stop: int) -> Line:
    return {"kind": "end", "next": stop}


def arrays(*counted: int, marked: tuple[int, ...] | None = None) -> Arrays:
    """Counters of which each named closure has its rows."""
    rows, marks = np.zeros((NUM_PS, NUM_ROWS)), np.zeros((NUM_PS, NUM_ROWS))
    for number in counted:
        rows[:, number] += 1
    for number in counted if marked is None else marked:
        marks[:, number] += 1
    return {
        "rows": rows.reshape(-1, 1), "marked": marks.reshape(-1, 1), "total": rows.sum(axis=1),
    }  # fmt: skip


def faults(lines: list[Line], found: Arrays) -> list[str]:
    return oracle.check(oracle.read(lines), found, NUM_PS, NUM_ROWS)


PLAIN = [life(), scheduled(0, 4), done(0, 1, 2, 3), end(4)]


def test_a_run_in_which_everything_was_counted_once_is_right() -> None:
    assert faults(PLAIN, arrays(0, 1, 2, 3)) == []


def plant(change: Callable[[Arrays], None]) -> Arrays:
    found = arrays(0, 1, 2, 3)
    change(found)
    return found


def twice_on_one_ps(found: Arrays) -> None:
    found["rows"][2] += 1
    found["total"][0] += 1


def lost_on_all(found: Arrays) -> None:
    for ps in range(NUM_PS):
        found["rows"][ps * NUM_ROWS + 1] -= 1
        found["total"][ps] -= 1


def half_a_push(found: Arrays) -> None:
    found["total"][1] -= 1


def assigned_twice(found: Arrays) -> None:
    for ps in range(NUM_PS):
        found["marked"][ps * NUM_ROWS + 3] += 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (twice_on_one_ps, "closure 2 was counted 1 times on ps 1"),
        (lost_on_all, "rows: closure 1 was counted 0 times, expected 1"),
        (half_a_push, "ps 1: the total is 3, and the rows of the same pushes make 4"),
        (assigned_twice, "marked: closure 3 was counted 2 times, expected 1"),
    ],
)
def test_a_planted_fault_is_found(change: Callable[[Arrays], None], expected: str) -> None:
    found = faults(PLAIN, plant(change))
    if change is twice_on_one_ps:
        expected = "rows: closure 2 was counted 2 times on ps 0 and 1 times on ps 1"
    assert expected in found


def test_stale_pushes_must_not_count() -> None:
    lines = [life(), scheduled(0, 2), done(0), done(1, outcome="stale"), end(2)]
    assert faults(lines, arrays(0, marked=(0, 1))) == []
    assert faults(lines, arrays(0, 1)) == ["rows: closure 1 was counted 1 times, expected 0"]


def test_a_closure_that_a_rollback_names_may_be_there_or_not() -> None:
    before = [life(), scheduled(0, 2), rollback(1), done(0, 1), end(2)]
    after = [life(), scheduled(0, 2), done(0, 1), rollback(1), end(2)]
    for lines in (before, after):
        assert faults(lines, arrays(0, 1)) == []
        assert faults(lines, arrays(0)) == []
        assert faults(lines, arrays(1))


def test_where_backups_take_over_nothing_is_undone() -> None:
    taken_over = {"kind": "failover", "lost": ["/job:ps/task:0"], "seconds": 0.5}
    lines = [life(), scheduled(0, 4), done(0, 1), taken_over, done(2, 3), end(4)]
    assert oracle.read(lines).failovers == 1
    assert faults(lines, arrays(0, 1, 2, 3)) == []
    assert faults(lines, arrays(1, 2, 3))


def test_a_closure_that_a_rollback_does_not_name_must_be_there() -> None:
    lines = [life(), scheduled(0, 2), done(0, 1), rollback(), end(2)]
    assert faults(lines, arrays(0))


def test_what_came_after_a_checkpoint_is_done_again_after_a_restart() -> None:
    lines = [
        life(), scheduled(0, 4), done(0, 1, 2, 3),
        life(2), scheduled(2, 4), done(2, 3, base=2), end(4),
    ]  # fmt: skip
    assert faults(lines, arrays(0, 1, 2, 3)) == []
    assert faults(lines, arrays(0, 1, 2, 2, 3))


def test_what_left_traces_in_a_checkpoint_stays_as_it_was_there() -> None:
    lines = [
        life(), scheduled(0, 4),
        life(4, again=(2,), c0=[1, 1], c1=[1, 0], c3=[1, 1]), done(2, base=2), end(4),
    ]  # fmt: skip
    assert faults(lines, arrays(0, 1, 2, 3, marked=(0, 2, 3))) == []
    assert faults(lines, arrays(0, 1, 2, 3))


def test_a_checkpoint_that_counts_what_nobody_has_done_is_a_fault() -> None:
    lines = [life(), scheduled(0, 2), life(2), end(2)]
    assert "which nobody had said" in faults(lines, arrays(0, 1))[0]


def test_a_closure_that_is_never_done_or_done_twice_is_a_fault() -> None:
    assert "1 closures were never said to be done: [1]" in faults(
        [life(), scheduled(0, 2), done(0), end(2)], arrays(0)
    )
    assert "closure 0 is said to be done twice" in faults(
        [life(), scheduled(0, 1), done(0), done(0), end(1)], arrays(0)
    )


def test_a_program_that_has_not_come_to_its_end_is_a_fault() -> None:
    assert "the program has not come to its end" in faults(PLAIN[:-1], arrays(0, 1, 2, 3))
