"""The file of a trace is Chrome's Trace Event format, with all clocks made one."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from psync.net.tracing.chrome import Summary, write_trace
from psync.net.tracing.readings import Reading
from psync.wire.frames import Kind
from psync.wire.messages import AskSpans, AskStatistics, Statistics
from trace_events import TraceFile
from traced_by_hand import CHIEF, PS, WORKER, ByHand, exchange

ASK, TOLD = AskStatistics(), Statistics({})


def written(path: Path, readings: list[Reading]) -> tuple[Summary, TraceFile]:
    file = io.StringIO()
    summary = write_trace(readings, file, program="train.py")
    path.write_text(file.getvalue())
    return summary, TraceFile(path)


def test_tasks_whose_clocks_differ_are_on_one(tmp_path: Path) -> None:
    chief, ps, worker = ByHand(CHIEF), ByHand(PS, ahead=-40.0), ByHand(WORKER, ahead=5000.0)
    tasks = [worker, ps]
    first = [chief.reading(0.0), *(task.reading(0.0) for task in tasks)]
    ask = AskSpans("r", False)
    for number, task in enumerate(tasks):
        exchange(chief, task, 1 + number, (1.0, 1.001, 1.002, 1.003), ask, TOLD)
    worker.note(1.9, "began", 7)
    exchange(worker, ps, 1, (2.0, 2.001, 2.003, 2.004), ASK, TOLD)
    worker.note(2.1, "ended", 7, "train_step", "ok")
    summary, trace = written(tmp_path / "t.json", [*first, *(t.reading(3.0) for t in tasks),
                                                   chief.reading(3.0)])  # fmt: skip
    assert summary == Summary(["chief", "worker-0", "ps-0"], pytest.approx(3.0, abs=0.01), 3, {},
                              pytest.approx(1e-3, abs=1e-4))  # fmt: skip
    assert list(trace.tasks.values()) == ["chief", "ps-0", "worker-0"]
    (step,) = trace.slices("worker-0", "steps", "train_step")
    (sent,) = trace.slices("worker-0", "to ps-0")
    (served,) = trace.slices("ps-0", "from worker-0")
    assert step["ts"] == pytest.approx(1.9e6, abs=2e3)
    assert step["dur"] == pytest.approx(0.2e6, abs=1)
    assert sent["ts"] <= served["ts"]
    assert served["ts"] + served["dur"] <= sent["ts"] + sent["dur"]
    assert trace.arrows() == [("AskStatistics", "worker-0", "ps-0")]
    assert trace.about["program"] == "train.py"
    assert trace.about["dropped"] == "nothing"


def test_what_was_dropped_and_who_was_started_again_is_said(tmp_path: Path) -> None:
    chief, worker = ByHand(CHIEF), ByHand(WORKER)
    after = ByHand(WORKER, ahead=9.0, origin="b")
    worker.note(1.0, "counters", {"queue": 1.5})
    readings = [chief.reading(0.0), worker.reading(2.0, lost=4), after.reading(3.0)]
    summary, trace = written(tmp_path / "t.json", readings)
    assert summary.tasks == ["chief", "worker-0", "worker-0 (process 2)"]
    assert summary.lost == {"worker-0": 4} == trace.about["dropped"]
    assert summary.within_s == 1  # as long as the readings were on their way
    assert trace.counter("worker-0", "queue") == [1.5]


def test_steps_come_before_requests_and_unknown_jobs_last(tmp_path: Path) -> None:
    chief, other = ByHand(CHIEF), ByHand("/job:evaluator/task:0")
    worker, ps = ByHand(WORKER), ByHand(PS)
    exchange(worker, ps, 1, (1.0, 1.0, 2.0, 2.0), ASK, TOLD)
    worker.note(1.0, "began", 1)
    worker.note(2.5, "ended", 1, "step", "ok")
    tasks = (chief, other, worker, ps)
    _, trace = written(tmp_path / "t.json", [task.reading(3.0) for task in tasks])
    assert list(trace.tasks.values()) == ["chief", "ps-0", "worker-0", "evaluator-0"]
    lanes = [name for (pid, _), name in trace.lanes.items() if trace.tasks[pid] == "worker-0"]
    assert lanes == ["steps", "to ps-0"]
    assert math.isclose(trace.slices("worker-0", "steps")[0]["dur"], 1.5e6)


def test_a_request_that_is_not_answered_yet_aligns_clocks_one_way(tmp_path: Path) -> None:
    chief, ps, worker = ByHand(CHIEF), ByHand(PS, ahead=-40.0), ByHand(WORKER)
    tasks = (chief, ps, worker)
    first = [task.reading(0.0) for task in tasks]
    worker.frame(1.0, PS, Kind.REQUEST, 1, ASK, sent=True)
    ps.frame(1.001, WORKER, Kind.REQUEST, 1, ASK, sent=False)
    _, trace = written(tmp_path / "t.json", [*first, *(task.reading(3.0) for task in tasks)])
    assert trace.arrows() == [("AskStatistics", "worker-0", "ps-0")]
    (sent,), (served,) = trace.slices("worker-0", "to ps-0"), trace.slices("ps-0", "from worker-0")
    assert sent["ts"] <= served["ts"]
