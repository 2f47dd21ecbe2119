"""The table that a chaotic run prints."""

from __future__ import annotations

from collections import Counter

from psync.testing.chaos.killer import Kill, KillPlan
from psync.testing.chaos.one_run import Result, RunPlan
from psync.testing.chaos.program import Settings
from psync.testing.chaos.summary import deaths_of, summary


def result(**more: object) -> Result:
    plan = RunPlan(7, 60.0, Settings("/somewhere", "sync"), KillPlan())
    kills = [
        Kill(0.5, "worker-1", "SIGKILL", 1),
        Kill(1.5, "worker-0", "SIGKILL", 0),
        Kill(2.5, "ps-0", "SIGSTOP", 2),
    ]
    notes = {
        "ps-0": Counter({"lost Push reply": 3, "met Pull": 1, "failpoint ps.push.applied": 2}),
        "worker-0": Counter({"lost Push request": 1}),
    }
    return Result(plan, kills=kills, notes=notes, **more)  # type: ignore[arg-type]


def test_kills_losses_and_failpoints_are_counted() -> None:
    text = summary(result(checked=["everything"]), "again")
    assert "seed 7, sync" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["worker", "SIGKILL", "2", "1"] in lines
    assert ["ps", "SIGSTOP", "1", "1"] in lines
    assert ["Push", "1", "3", "0"] in lines
    assert ["Pull", "0", "0", "0"] in lines, "a kind of which nothing was lost is named"
    assert "failpoint ps.push.applied: 2 deaths" in text
    assert text.endswith("nothing was found")


def test_deaths_by_signals_and_at_failpoints_are_counted_but_stops_are_none() -> None:
    assert deaths_of(result()) == Counter(worker=2, ps=2)


def test_a_fault_comes_with_the_command_to_run_it_again() -> None:
    text = summary(result(faults=[f"fault {number}" for number in range(20)]), "python -m x")
    assert "FAULT: fault 0" in text
    assert "… and 8 more" in text
    assert text.endswith("left in /somewhere\nagain: python -m x")
