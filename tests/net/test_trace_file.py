"""Readings are understood, their clocks aligned, and drawn in Chrome's Trace Event format."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path
from typing import Any

import pytest

from psync.net.trace_file import (
    MAX_SLACK_S,
    Bound,
    Names,
    Reading,
    Slice,
    Summary,
    TaskLog,
    align,
    label,
    logs_of,
    pairs_of,
    samples_of,
    slices_of,
    spread,
    write_trace,
)
from psync.wire.codec import Message
from psync.wire.frames import Kind
from psync.wire.messages import (
    AskSpans,
    AskStatistics,
    ClosureResults,
    Contributed,
    DefinePlan,
    Done,
    Failure,
    GiveBack,
    Pulled,
    Pushed,
    Read,
    RunClosures,
    Shutdown,
    Statistics,
    Update,
)
from trace_events import TraceFile
from traced_by_hand import CHIEF, PS, WORKER, ByHand, exchange

ASK, TOLD = AskStatistics(), Statistics({"a": 1})


def test_a_request_has_its_two_halves_across_readings() -> None:
    worker, ps = ByHand(WORKER, ahead=100.0), ByHand(PS)
    first = [worker.reading(0.0), ps.reading(0.0)]
    exchange(worker, ps, 1, (1.0, 1.5, 2.0, 3.0), ASK, TOLD, nbytes=7)
    logs = logs_of([*first, worker.reading(4.0), ps.reading(4.0)])
    assert [log.task for log in logs] == [WORKER, PS]
    ((at, sent, other, served),) = pairs_of(logs)
    assert (at, other) == (0, 1)
    assert (sent.begin, sent.end, sent.nbytes) == (101.0, 103.0, {True: 7, False: 0})
    assert (served.begin, served.end, served.nbytes) == (1.5, 2.0, {True: 0, False: 7})
    assert sent.message == ASK
    assert sent.answer == served.answer == TOLD
    assert (logs[0].begin, logs[0].end) == (100.0, 104.0)


def test_an_answer_may_be_in_a_later_reading_and_be_an_error() -> None:
    worker = ByHand(WORKER)
    worker.frame(1.0, PS, Kind.REQUEST, 1, ASK, sent=True)
    readings = [worker.reading(2.0, lost=3)]
    error = Failure("", "E", "", "m", None, "t")
    worker.frame(3.0, PS, Kind.ERROR, 1, error, sent=False)
    (log,) = logs_of([*readings, worker.reading(4.0, lost=4)])
    (half,) = log.halves
    assert (half.end, half.outcome, half.answer) == (3.0, "error", error)
    assert log.lost == 7


def test_what_is_given_up_has_ended_and_may_be_answered_later() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    for task, is_client in ((worker, True), (ps, False)):
        other = PS if is_client else WORKER
        task.frame(1.0, other, Kind.REQUEST, 1, ASK, sent=is_client)
        task.frame(2.0, other, Kind.CANCEL, 1, sent=is_client)
        task.frame(2.0, other, Kind.CANCEL, 2, sent=is_client)  # of nothing that is known
    ps.frame(3.0, WORKER, Kind.REPLY, 1, TOLD, sent=True)
    ps.frame(3.0, WORKER, Kind.REPLY, 2, TOLD, sent=True)
    client, server = logs_of([worker.reading(4.0), ps.reading(4.0)])
    assert (client.halves[0].end, client.halves[0].outcome) == (2.0, "given up")
    assert (server.halves[0].end, server.halves[0].outcome) == (3.0, "")


def test_notifications_and_notes_are_kept_and_pings_are_not() -> None:
    chief = ByHand(CHIEF)
    chief.frame(1.0, WORKER, Kind.NOTIFY, 0, GiveBack([1]), sent=True)
    chief.frame(1.5, WORKER, Kind.PING, 0, sent=True)
    chief.note(2.0, "counters", {"queue": 1})
    chief.facts = {"variables": {3: "w"}}
    (log,) = logs_of([chief.reading(3.0)])
    assert log.told == [(1.0, True, WORKER, GiveBack([1]))]
    assert log.notes == [[2.0, "counters", {"queue": 1}]]
    assert log.facts == {"variables": {3: "w"}}
    assert log.halves == []


def test_a_message_that_this_version_does_not_know_is_left_out() -> None:
    for kind in [Kind.REQUEST, Kind.NOTIFY]:
        chief = ByHand(CHIEF)
        chief.frame(1.0, WORKER, kind, 1, sent=True)
        (log,) = logs_of([chief.reading(3.0)])
        assert (log.halves, log.told) == ([], [])
    chief.frame(4.0, WORKER, Kind.REQUEST, 2, ASK, sent=True)
    chief.frame(5.0, WORKER, Kind.REPLY, 2, sent=False)
    (log,) = logs_of([chief.reading(6.0)])
    assert [(half.end, half.answer) for half in log.halves] == [(5.0, None)]


def test_a_process_that_comes_after_another_one_has_a_log_of_its_own() -> None:
    readings = [ByHand(WORKER).reading(1.0), ByHand(WORKER, 50.0, origin="b").reading(1.0)]
    assert [(log.task, log.begin) for log in logs_of(readings)] == [(WORKER, 1.0), (WORKER, 51.0)]


def test_where_a_connection_came_again_its_requests_have_no_other_half() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    exchange(worker, ps, 1, (1.0, 1.1, 1.2, 1.3), ASK, TOLD)
    exchange(worker, ps, 2, (2.0, 2.1, 2.2, 2.3), ASK, TOLD)
    ps.frame(3.0, WORKER, Kind.REQUEST, 1, ASK, sent=False, link=1)
    worker.frame(4.0, PS, Kind.REQUEST, 2, ASK, sent=True, link=1)
    worker.frame(4.0, PS, Kind.REQUEST, 3, ASK, sent=True)
    ps.frame(4.1, WORKER, Kind.REQUEST, 3, Shutdown("other"), sent=False)
    assert list(pairs_of(logs_of([worker.reading(5.0), ps.reading(5.0)]))) == []


def exchanges(ahead: list[float], pairs: list[tuple[int, int]], seed: int = 1) -> list[Bound]:
    """What 50 requests of each pair say, of clocks that are so far ahead."""
    draw = random.Random(seed)
    bounds: list[Bound] = []
    for client, server in pairs * 50:
        sent = draw.uniform(0, 5)
        came = sent + draw.expovariate(1000)
        answered = came + draw.expovariate(500)
        got = answered + draw.expovariate(1000)
        bounds.append((client, server, came + ahead[server] - sent - ahead[client]))
        bounds.append((server, client, got + ahead[client] - answered - ahead[server]))
    return bounds


def test_clocks_are_found_within_what_is_said() -> None:
    ahead = [0.0, 1000.0, -3.5, 0.002]
    bounds = exchanges(ahead, [(0, 1), (0, 2), (0, 3), (3, 1), (3, 2)])
    found, within = align(4, bounds)
    for task in range(4):
        assert abs(found[task] - ahead[task]) <= within < 1e-3
    for one, other, seconds in bounds:  # so no message arrives before it has left
        assert found[other] - found[one] <= seconds + 1e-12


def test_a_clock_is_found_through_others() -> None:
    found, _ = align(3, exchanges([0.0, 7.0, -9.0], [(0, 1), (1, 2)]))
    assert found == pytest.approx([0, 7, -9], abs=1e-3)


def test_clocks_that_drift_are_aligned_all_the_same() -> None:
    found, _ = align(2, [(0, 1, 5.0), (1, 0, -5.0002)])  # at most 5 s ahead, and at least 5.0002
    assert found[1] == pytest.approx(5.0001, abs=1e-4)


def test_what_is_no_clock_is_left_alone() -> None:
    found, within = align(2, [(0, 1, -10 * MAX_SLACK_S), (1, 0, -10 * MAX_SLACK_S)])
    assert (found[1], within) == (0, math.inf)


COMPUTE, PULL = 0, 1


def drawn(*tasks: ByHand, until: float = 10.0) -> list[list[tuple[Any, ...]]]:
    """Slices of each task: lane, name, begin, end, and what is said besides."""
    logs = logs_of([task.reading(until) for task in tasks])
    names = Names(logs)
    return [
        [(each.lane, each.name, each.begin, each.end, each.args) for each in slices_of(log, names)]
        for log in logs
    ]


def log_of(task: ByHand) -> TaskLog:
    (log,) = logs_of([task.reading(10.0)])
    return log


def test_tasks_are_called_as_users_call_them() -> None:
    assert [label(CHIEF), label("/job:ps/task:12"), label(WORKER)] == ["chief", "ps-12", "worker-0"]


def test_a_step_holds_what_its_time_went_to() -> None:
    worker = ByHand(WORKER)
    worker.note(0.0, "work", -1)
    worker.note(1.0, "began", 7)
    worker.note(1.0, "work", COMPUTE)
    worker.note(2.0, "work", PULL)
    worker.note(3.0, "work", COMPUTE)
    worker.note(4.0, "work", -1)
    worker.note(4.5, "ended", 7, "train_step", "ok")
    worker.note(5.0, "began", 8)
    worker.note(6.0, "ended", 8, "", "error")
    assert drawn(worker) == [[
        ("steps", "compute", 1.0, 2.0, {}),
        ("steps", "pull", 2.0, 3.0, {}),
        ("steps", "compute", 3.0, 4.0, {}),
        ("steps", "train_step", 1.0, 4.5, {"closure": 7}),
        ("steps", "?", 5.0, 6.0, {"closure": 8, "end": "error"}),
    ]]  # fmt: skip


def test_what_goes_on_across_the_ends_of_steps_is_cut_there() -> None:
    worker = ByHand(WORKER)
    worker.note(0.0, "work", COMPUTE)
    worker.note(2.0, "ended", 6, "train_step", "ok")  # it had begun before anybody knew
    worker.note(3.0, "began", 7)
    (slices,) = drawn(worker)
    assert slices == [
        ("steps", "compute", 0.0, 2.0, {}),
        ("steps", "compute", 2.0, 3.0, {}),
        ("steps", "compute", 3.0, 10.0, {}),
        ("steps", "closure 7", 3.0, 10.0, {"closure": 7, "end": "not in this trace"}),
    ]


def test_closures_that_did_not_end_are_named_by_the_coordinator() -> None:
    chief, worker = ByHand(CHIEF), ByHand(WORKER)
    closures = [(7, b"k", 0, []), (8, b"k", 0, []), (9, b"other", 0, [])]
    chief.frame(1.0, WORKER, Kind.NOTIFY, 0, RunClosures(closures), sent=True)
    chief.facts = {"running": [(8, "train_step")]}
    worker.note(2.0, "began", 7)
    worker.note(3.0, "ended", 7, "train_step", "ok")
    worker.note(3.0, "began", 8)
    in_flight, steps = drawn(chief, worker)
    assert [each[1] for each in steps] == ["train_step", "train_step"]
    assert in_flight == [
        ("in flight on worker-0", "closures x3", 1.0, 10.0,
         {"closures": "7-9", "end": "not in this trace"}),
    ]  # fmt: skip


def test_the_coordinator_shows_what_it_has_sent_until_the_results_come() -> None:
    chief = ByHand(CHIEF)
    chief.facts = {"running": [(1, "train_step"), (2, "train_step"), (4, "evaluate")]}
    sent: list[Message] = [
        RunClosures([(number, b"", 0, []) for number in (1, 2, 3)]),
        RunClosures([(4, b"", 0, [])], None, (0, 2)),
    ]
    for message in sent:
        chief.frame(1.0, WORKER, Kind.NOTIFY, 0, message, sent=True)
    came = [(number, "ok", 0, None) for number in (1, 2)]
    chief.frame(2.0, WORKER, Kind.NOTIFY, 0, GiveBack([3, 5]), sent=False)
    chief.frame(3.0, WORKER, Kind.NOTIFY, 0, ClosureResults(came, 0.1), sent=False)
    chief.frame(3.5, WORKER, Kind.NOTIFY, 0, ClosureResults([], 0.1), sent=False)
    chief.frame(4.0, WORKER, Kind.NOTIFY, 0, ClosureResults([(4, "ok", 0, None)], 1), sent=False)
    lane = "in flight on worker-0"
    assert drawn(chief) == [[
        (lane, "train_step x2", 1.0, 3.0, {"closures": "1-2"}),
        (lane, "evaluate", 3.0, 4.0, {"closures": "4"}),
    ]]  # fmt: skip


def test_requests_tell_bytes_variables_and_what_became_of_them() -> None:
    worker, ps, chief = ByHand(WORKER), ByHand(PS), ByHand(CHIEF)
    chief.facts = {"variables": {number: f"w{number}" for number in range(6)}}
    ps.facts = {"plans": {"5": [0, 0, 1]}}
    push = Update(1, 1, 7, 1, 5)
    exchange(worker, ps, 1, (1.0, 1.5, 2.0, 3.0), push, Pushed("accepted", 31), nbytes=400)
    every = DefinePlan(6, [(number, 0) for number in range(6)])
    worker.frame(2.9, PS, Kind.NOTIFY, 0, every, sent=True)
    exchange(worker, ps, 2, (3.0, 3.5, 4.0, 4.1), Read(6), Pulled([]))
    rows = Read(5, rows=[(2, 1, 0, 1, 1)])
    exchange(worker, ps, 3, (5.0, 5.1, 5.2, 5.3), rows, Pulled([]))
    sent, served, _ = drawn(worker, ps, chief)
    args = {"closure": 7, "step": 31, "outcome": "accepted", "variables": "w0, w1"}
    assert sent[0] == ("to ps-0", "Update", 1.0, 3.0, {**args, "bytes sent": 400})
    assert served[0] == ("from worker-0", "Update", 1.5, 2.0, {**args, "bytes received": 400})
    assert served[1][4] == {"variables": "w0, w1, w2, w3 and 2 more"}
    assert sent[2][4] == served[2][4] == {"variables": "w0, w1"}


def test_requests_without_an_end_or_with_a_bad_one_say_so() -> None:
    chief = ByHand(CHIEF)
    chief.frame(1.0, PS, Kind.REQUEST, 1, Shutdown("r"), sent=True)
    chief.frame(2.0, WORKER, Kind.REQUEST, 1, Shutdown("r"), sent=True)
    chief.frame(3.0, WORKER, Kind.ERROR, 1, Failure("", "E", "", "m", None, ""), sent=False)
    exchange(chief, ByHand(WORKER), 2, (4.0, 4.0, 4.0, 5.0), AskSpans("r", False), Statistics({}))
    assert drawn(chief) == [[
        ("to ps-0", "Shutdown", 1.0, 10.0, {"end": "not in this trace"}),
        ("to worker-0", "Shutdown", 2.0, 3.0, {"end": "error"}),
    ]]  # fmt: skip


def test_what_goes_on_at_once_is_on_several_lanes() -> None:
    times = [(0, 4), (1, 2), (1, 5), (4, 5), (2, 3)]
    slices = spread([Slice("a", str(number), *each) for number, each in enumerate(times)])
    assert [(each.name, each.lane) for each in slices] == [
        ("0", "a"), ("2", "a (2)"), ("1", "a (3)"), ("4", "a (3)"), ("3", "a"),
    ]  # fmt: skip


def contributed(
    worker: ByHand, ps: ByHand, number: int, came: float, answered: float, token: int,
    outcome: str = "accepted", *, partial: bool = False,
) -> None:  # fmt: skip
    message = Update(number, 1, -1, 1, 3, local_step=token - 1)
    answer = Contributed(1, outcome, 0, token, partial, 2)
    exchange(worker, ps, number, (came, came, answered, answered), message, answer)


def test_a_synchronous_step_lasts_from_its_first_gradient_until_it_is_closed() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    ps.facts = {"plans": {"3": [1]}}
    contributed(worker, ps, 1, 1.0, 3.0, 8)
    contributed(worker, ps, 2, 2.0, 3.1, 8)
    contributed(worker, ps, 3, 2.5, 5.0, 9, partial=True)
    contributed(worker, ps, 4, 5.5, 5.6, 9, "stale")
    contributed(worker, ps, 5, 6.0, 6.1, 10, "duplicate")
    exchange(worker, ps, 6, (7.0, 7.0, 8.0, 8.0), Shutdown("r"), Done())
    _, slices = drawn(worker, ps)
    group = {"group": 1, "counted": 2}
    assert [each for each in slices if each[0] == "steps"] == [
        ("steps", "step 7", 1.0, 3.0, {**group, "dropped": 0}),
        ("steps", "step 8", 3.0, 5.0, {**group, "dropped": 1, "partial": True}),
    ]
    contributions = [each[4] for each in slices if each[1] == "Update"]
    assert {each["variables"] for each in contributions} == {"variable 1"}


def test_counters_are_what_was_looked_at_and_steps_as_they_rise() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    ps.note(0.5, "counters", {"queue": 3})
    contributed(worker, ps, 1, 1.0, 3.0, 8)
    contributed(worker, ps, 2, 1.0, 4.0, 8)
    for number, step in ((3, 30), (4, 29)):
        push = Update(number, 1, 7, 1, 5)
        exchange(worker, ps, number, (5.0, 5.0, 6.0, 6.0), push, Pushed("accepted", step))
    found = list(samples_of(log_of(ps)))
    assert found == [("queue", 0.5, 3), ("global step", 3.0, 8), ("optimizer step", 6.0, 30)]
    assert list(samples_of(log_of(worker))) == []


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
