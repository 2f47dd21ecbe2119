"""What is drawn of each task: slices that never overlap on a lane unless they nest; counters."""

from __future__ import annotations

from typing import Any

from psync.net.tracing.lanes import Names, Slice, label, samples_of, slices_of, spread
from psync.net.tracing.readings import TaskLog, logs_of
from psync.wire.codec import Message
from psync.wire.frames import Kind
from psync.wire.messages import (
    AskSpans,
    ClosureResults,
    Contribute,
    Contributed,
    Done,
    Failure,
    GivenBack,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    RowsPulled,
    RunClosures,
    RunReplica,
    Shutdown,
    Statistics,
)
from traced_by_hand import CHIEF, PS, WORKER, ByHand, exchange

COMPUTE, PULL = 0, 1


def drawn(*tasks: ByHand, until: float = 10.0) -> list[list[tuple[Any, ...]]]:
    """Slices of each task: lane, name, begin, end, and what is said besides."""
    logs = logs_of([task.reading(until) for task in tasks])
    names = Names.of(logs)
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


def test_a_closure_that_did_not_end_is_named_after_others_of_its_function() -> None:
    chief, worker = ByHand(CHIEF), ByHand(WORKER)
    closures = [(7, b"k", 0, []), (8, b"k", 0, []), (9, b"other", 0, [])]
    chief.frame(1.0, WORKER, Kind.NOTIFY, 0, RunClosures(closures), sent=True)
    worker.note(2.0, "began", 7)
    worker.note(3.0, "ended", 7, "train_step", "ok")
    worker.note(3.0, "began", 8)
    in_flight, steps = drawn(chief, worker)
    assert [each[1] for each in steps] == ["train_step", "train_step"]
    assert in_flight == [
        ("in flight on worker-0", "closures", 1.0, 10.0,
         {"closures": "7-9", "end": "not in this trace"}),
    ]  # fmt: skip


def test_the_coordinator_shows_what_it_has_sent_until_the_results_come() -> None:
    chief = ByHand(CHIEF)
    chief.facts = {"running": [(1, "train_step"), (2, "train_step"), (4, "evaluate")]}
    sent: list[Message] = [
        RunClosures([(number, b"", 0, []) for number in (1, 2, 3)]),
        RunReplica((4, b"", 0, []), 0, 2),
    ]
    for message in sent:
        chief.frame(1.0, WORKER, Kind.NOTIFY, 0, message, sent=True)
    came = [(number, "ok", 0, None) for number in (1, 2)]
    chief.frame(2.0, WORKER, Kind.NOTIFY, 0, GivenBack([3, 5]), sent=False)
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
    ps.facts = {"sets": {f"{WORKER} 3 control": {"5": [0, 0, 1]}}}
    push = Push(1, 1, 7, 1, 5, None, 2, None, 30)
    exchange(worker, ps, 1, (1.0, 1.5, 2.0, 3.0), push, Pushed("accepted", 31), nbytes=400)
    every = [[number, 0] for number in range(6)]
    exchange(worker, ps, 2, (3.0, 3.5, 4.0, 4.1), Pull(6, every, -1, ""), Pulled([]))  # type: ignore[arg-type]
    rows = PullRows([(9, 0, 1, 0, 1, 1)], -1, "")
    exchange(worker, ps, 3, (5.0, 5.1, 5.2, 5.3), rows, RowsPulled([]))
    sent, served, _ = drawn(worker, ps, chief)
    args = {"closure": 7, "step": 31, "outcome": "accepted", "variables": "w0, w1"}
    assert sent[0] == ("to ps-0", "Push", 1.0, 3.0, {**args, "bytes sent": 400})
    assert served[0] == ("from worker-0", "Push", 1.5, 2.0, {**args, "bytes received": 400})
    assert served[1][4] == {"variables": "w0, w1, w2, w3 and 2 more"}
    assert sent[2][4] == served[2][4] == {"variables": "variable 9"}


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
    message = Contribute(1, None, number, 1, -1, 1, b"", token - 1, 1.0, 3, None, -1, None)
    answer = Contributed(outcome, 0, token, partial, 2)
    exchange(worker, ps, number, (came, came, answered, answered), message, answer)


def test_a_synchronous_step_lasts_from_its_first_gradient_until_it_is_closed() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    ps.facts = {"sets": {f"{WORKER} 3 control": {"whole 3": [1], "3": [2]}}}
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
    contributions = [each[4] for each in slices if each[1] == "Contribute"]
    assert {each["variables"] for each in contributions} == {"variable 1"}


def test_counters_are_what_was_looked_at_and_steps_as_they_rise() -> None:
    worker, ps = ByHand(WORKER), ByHand(PS)
    ps.note(0.5, "counters", {"queue": 3})
    contributed(worker, ps, 1, 1.0, 3.0, 8)
    contributed(worker, ps, 2, 1.0, 4.0, 8)
    for number, step in ((3, 30), (4, 29)):
        push = Push(number, 1, 7, 1, 5, None, 2, None, 30)
        exchange(worker, ps, number, (5.0, 5.0, 6.0, 6.0), push, Pushed("accepted", step))
    found = [(each.name, each.at, each.value) for each in samples_of(log_of(ps))]
    assert found == [("queue", 0.5, 3), ("global step", 3.0, 8), ("optimizer step", 6.0, 30)]
    assert list(samples_of(log_of(worker))) == []
