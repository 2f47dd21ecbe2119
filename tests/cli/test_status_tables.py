"""What `psync top` draws of a status."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from psync.cli.status_tables import tables_of
from psync.status.model import (
    BackupStatus,
    BoundStatus,
    EventStatus,
    GroupStatus,
    PsStatus,
    QueueStatus,
    RunningClosure,
    SeenError,
    Status,
    StepsStatus,
    WorkerStatus,
)


def worker(index: int, state: str = "idle", **values: Any) -> WorkerStatus:
    return WorkerStatus(f"/job:worker/task:{index}", "a:1", state, **values)


def status(**values: Any) -> Status:
    known: dict[str, Any] = {
        "time": 0.0, "pid": 7, "program": "train.py", "uptime_s": 7325.0, "window_s": 5.0,
        "state": "running", "waits_for": "nothing", **values,
    }  # fmt: skip
    return Status(**known)


def drawn(seen: Status, height: int | None = None, width: int = 110) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(tables_of(seen, height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def row(lines: list[str], start: str) -> list[str]:
    """The cells of the row that begins so."""
    (line,) = [line for line in lines if line.startswith(start)]
    return line.split()


def test_the_head_says_what_runs_and_how_fast() -> None:
    queue = QueueStatus(
        queued=3, in_flight=2, finished=9000, failed=1, put_back=4, closures_per_s=1234.5
    )
    steps = StepsStatus(50, 12.34, {"0": 7, "3": 2, "16": 1, "20": 1})
    lines = drawn(
        status(
            queue=queue, steps=steps, notes=("a ps is being recovered",),
            reported={"epoch": 3.0, "loss": 0.123456},
        )
    )  # fmt: skip
    assert lines[0] == "train.py (process 7)  running  up 2:02 h"
    counts = "1,234 closures/s, 2 in flight, 3 queued, 9000 finished, 1 failed, 4 run again"
    assert lines[1] == f"  closures  {counts}"
    assert lines[2] == "      step  50, 12.3 steps/s"
    assert lines[3] == " staleness  7 of 0, 2 of 3, 2 of 16–31"
    assert lines[4] == "  reported  epoch 3, loss 0.1235"
    assert lines[5] == " waits for  nothing"
    assert lines[6] == "      note  a ps is being recovered"


def test_each_worker_has_a_row() -> None:
    error = SeenError("closure 3 (step): ValueError: no\nwith details", 3.0)
    lines = drawn(
        status(
            workers=(
                worker(0, "busy", closure=RunningClosure(12, "step", 0.25), closures_per_s=3.25,
                       mean_s=0.0004, staleness=2),
                worker(1, "lost", losses=2, last_error=error),
            )
        )
    )  # fmt: skip
    assert row(lines, "worker 0") == [
        "worker", "0", "busy", "3.2", "400", "µs", "2", "250", "ms", "step", "12",
    ]  # fmt: skip
    assert row(lines, "worker 1") == ["worker", "1", "lost", "0.0", "2"]
    assert "     error  3 s ago on worker 1: closure 3 (step): ValueError: no" in lines


def test_the_newest_errors_are_shown_and_wide_tables_fit_a_terminal() -> None:
    closure = RunningClosure(123456, "train_step", 5000.0)
    workers = [
        worker(index, "waiting", last_error=SeenError(f"error {index}", 10.0 - index),
               closure=closure, closures_per_s=99.9, mean_s=0.5, staleness=12)
        for index in range(5)
    ]  # fmt: skip
    known: dict[str, Any] = {
        "bytes": 1023 << 20, "slot_bytes": 1023 << 20, "pushes_per_s": 99.9, "pulls_per_s": 99.9,
        "bytes_in_per_s": 1 << 29, "bytes_out_per_s": 1 << 29, "duplicates": 99,
    }  # fmt: skip
    tasks = (PsStatus("/job:ps/task:0", "a:1", "connected", 0.0, **known),)
    lines = drawn(status(workers=tuple(workers), ps=tasks), width=96)
    errors = [line.split() for line in lines if line.startswith("     error")]
    assert [" ".join(line[1:]) for line in errors] == [
        "6 s ago on worker 4: error 4", "7 s ago on worker 3: error 3",
        "8 s ago on worker 2: error 2",
    ]  # fmt: skip
    assert not any("…" in line for line in lines)


def test_each_ps_has_a_row() -> None:
    known: dict[str, Any] = {
        "age_s": 0.0, "bytes": 3 << 20, "slot_bytes": 1536, "pushes_per_s": 10.0,
        "backup": BackupStatus("paired", 3),
    }  # fmt: skip
    lines = drawn(
        status(
            ps=(
                PsStatus("/job:ps/task:0", "a:1", "connected", **known),
                PsStatus("/job:ps/task:1", "b:1", "unconnected"),
            )
        )
    )  # fmt: skip
    assert " ".join(row(lines, "ps 0")) == (
        "ps 0 connected 3.0 MiB 1.5 KiB 10.0 0.0 0 B/s 0 B/s 0 paired, 3 behind"
    )
    assert row(lines, "ps 1") == ["ps", "1", "unconnected"]


def test_without_backups_there_is_no_column_for_them() -> None:
    seen = status(ps=(PsStatus("/job:ps/task:0", "a:1", "connected", 0.0),))
    assert not any("backup" in line for line in drawn(seen))


def test_a_synchronous_step_says_for_whom_it_waits() -> None:
    names = tuple(f"/job:worker/task:{index}" for index in range(5))
    group = GroupStatus("sync [a]", 9, 8, 3, names[:3], names, 1.5, 2, 30, 4, 5)
    lines = drawn(status(steps=StepsStatus(9, 1.5, {}, (group,))))
    assert lines[3:5] == [
        "      sync  sync [a]: step 9, 1.5/s, 3 of 8 gradients, "
        "waits for worker 0, worker 1, worker 2 and 2 more",
        "            30 accepted, 4 dropped, 5 duplicate, 2 partial steps",
    ]


def test_a_bound_says_how_far_apart_workers_are() -> None:
    bound = BoundStatus(1, 4, 5, ("/job:worker/task:1",), ("/job:worker/task:0",))
    lines = drawn(status(steps=StepsStatus(9, 1.5, {}, (), (bound,))))
    text = "staleness bound: rounds 4 to 5, worker 1 too far ahead of worker 0"
    assert lines[3:5] == [f"      sync  {text}", "            at most 1 rounds apart"]


def test_events_say_how_long_ago() -> None:
    events = tuple(
        EventStatus("joined", f"event {each}", seconds)
        for each, seconds in enumerate((0.25, 5.0, 150.0, 8000.0))
    )
    lines = drawn(status(events=events))
    assert lines[-4:] == [
        "250 ms ago  event 0", "   5 s ago  event 1",
        "2:30 min ago  event 2", "2:13 h ago  event 3",
    ]  # fmt: skip


def test_of_many_workers_those_in_trouble_and_the_slowest_are_shown() -> None:
    workers = [worker(index, "busy", mean_s=1.0) for index in range(100)]
    workers[70] = worker(70, "lost")
    workers[80] = worker(80, "busy", mean_s=60.0)
    lines = drawn(status(workers=tuple(workers)), height=20)
    assert len(lines) <= 20
    shown = [line[:9].strip() for line in lines if line.startswith("worker ") and line[7].isdigit()]
    assert shown[:2] == ["worker 70", "worker 80"]
    assert f"and {100 - len(shown)} more workers" in lines


def test_a_text_of_the_program_cannot_steer_the_terminal() -> None:
    error = SeenError("closure 3 (step): ValueError: \x1b[2J\x07red", 3.0)
    lines = drawn(status(waits_for="\x1b[31m", workers=(worker(0, last_error=error),)))
    assert lines[3] == " waits for  ?[31m"
    assert "ValueError: ?[2J?red" in " ".join(lines)


def test_a_narrow_terminal_shows_fewer_columns_and_whole_names() -> None:
    for width in [40, 60, 80, 100]:
        closure = RunningClosure(12345, "train_step", 0.1)
        seen = status(
            workers=(worker(10, "busy", closure=closure, closures_per_s=101.0, mean_s=0.12),),
            ps=(
                PsStatus("/job:ps/task:0", "c:1", "connected", 0.0, bytes=4000, pushes_per_s=150.0),
            ),
        )
        lines = drawn(seen, width=width)
        assert max(map(len, lines)) <= width
        assert row(lines, "worker 10")[:5] == ["worker", "10", "busy", "101", "120"]
        assert row(lines, "ps 0")[:3] == ["ps", "0", "connected"]
        assert ("runs" in " ".join(lines)) == (width > 40)
        assert "…" not in " ".join(lines[-6:])


def test_long_lines_are_cut_and_not_folded() -> None:
    lines = drawn(status(waits_for="closure 1 (step) on /job:worker/task:0; " * 20), width=60)
    (line,) = [line for line in lines if line.startswith(" waits for")]
    assert line.endswith("…")
    lacks = ("the part of /job:worker/task:3 at /job:ps/task:1 (push 8)",)
    group = GroupStatus("sync", 9, 8, 3, (), (), 1.5, 2, 30, 4, 5, lacks)  # but for that
    lines = drawn(status(steps=StepsStatus(9, 1.5, {}, (group,))), width=60)
    assert "the part of worker 3 at ps 1 (push 8)" in " ".join(lines)
