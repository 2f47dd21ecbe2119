"""What a chaotic run makes of what is left of it; whole runs are in tests/processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from psync.testing.chaos import program
from psync.testing.chaos.journal import Journal
from psync.testing.chaos.killer import KillPlan
from psync.testing.chaos.one_run import Result, RunPlan, _judge


def left_in(directory: Path) -> Result:
    settings = program.Settings(str(directory), num_ps=2, rows=4)
    result = Result(RunPlan(1, 1.0, settings, KillPlan()))
    _judge(result, directory)
    return result


def test_what_is_left_is_compared_with_what_was_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.say("life", restored=None, next=0, again=[], partial={})
    journal.say("scheduled", first=0, stop=1)
    journal.say("done", closures=[[0, 0, "accepted", "accepted"]])
    journal.say("end", next=1)
    journal.close()
    once = np.zeros((8, 1), np.float32)
    once[[0, 4]] = 1
    arrays = {"rows": once, "marked": once, "total": np.ones(2)}
    np.savez(tmp_path / program.FINAL, **arrays)
    result = left_in(tmp_path)
    assert result.faults == []
    assert "counters of 1 closures on 2 ps" in result.checked
    np.savez(tmp_path / program.FINAL, **{**arrays, "total": np.array([1.0, 2.0])})
    assert left_in(tmp_path).faults == [
        "ps 1: the total is 2, and the rows of the same pushes make 1"
    ]
