"""Why a run is slow or waits, in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from psync.status.diagnosis import diagnose
from psync.status.model import (
    BackupStatus,
    BoundStatus,
    EventStatus,
    GroupStatus,
    QueueStatus,
    RunningClosure,
    Status,
    StepsStatus,
)
from statuses import ps, shares, status, worker

QUEUED = QueueStatus(queued=10)
W = [f"/job:worker/task:{index}" for index in range(4)]


def texts(seen: Status) -> list[str]:
    return [f"{finding.level}: {finding.text}" for finding in diagnose(seen)]


def group(**changes: Any) -> StepsStatus:
    values: dict[str, Any] = {
        "name": "sync", "step": 5, "target": 3, "counted": 2, "waiting": (), "waits_for": (),
        "steps_per_s": 1.0, "partial_steps": 0, "accepted": 0, "dropped": 0, "duplicates": 0,
    }  # fmt: skip
    return StepsStatus(groups=(GroupStatus(**{**values, **changes}),))


def test_where_all_is_well_it_says_what_workers_do() -> None:
    assert texts(status(worker(), queue=QUEUED)) == [
        "good: The cluster is not the bottleneck: 1 of 1 workers are busy."
    ]
    seen = status(worker(work=shares(0.9)), worker(1, work=shares(0.8)), queue=QUEUED)
    assert texts(seen) == [
        "good: The cluster is not the bottleneck: workers compute, or read data, for 85% of the "
        "time."
    ]
    assert texts(status(state="ended")) == ["good: The run has ended."]


def test_the_state_of_the_coordinator() -> None:
    for state, text in [
        ("starting", "warn: The cluster is starting and waits for: worker 1."),
        ("recovering", "bad: A ps was lost: closures wait until its variables are restored."),
        ("failed", "bad: A step has failed: no closure starts until join raises its error."),
    ]:
        assert texts(status(state=state, waits_for="/job:worker/task:1")) == [text]


def test_a_value_that_is_not_finite() -> None:
    seen = status(worker(), queue=QUEUED, reported={"loss": math.nan, "accuracy": 0.5})
    assert texts(seen) == ["bad: The reported loss is not a finite number."]


def test_workers_that_are_gone() -> None:
    seen = status(
        worker(0, "lost"), worker(1, "lost"), worker(2, "set aside"), worker(3, "given up"),
        worker(4), queue=QUEUED,
    )  # fmt: skip
    assert texts(seen) == [
        "bad: Worker 0, worker 1 are lost; they rejoin when they are reachable.",
        "bad: Worker 2 was lost too often and is set aside for a while.",
        "bad: Worker 3 was removed: its process died too often.",
    ]


def test_no_worker_at_all() -> None:
    assert texts(status(worker(0, "connecting"), waits_for="/job:worker/task:0")) == [
        "bad: There are no workers. The program waits for: worker 0."
    ]


def test_ps_tasks_that_are_gone_or_silent() -> None:
    seen = status(worker(), ps(0, "broken"), ps(1, "silent"), ps(2, "lost"), queue=QUEUED)
    assert texts(seen) == [
        "bad: Ps 0 is broken: steps wait for it.",
        "bad: Ps 2 is lost: steps wait for it.",
        "warn: Ps 1 has not answered for a second: it is busy, swapping, or stopped.",
    ]


def test_for_whom_a_step_waits() -> None:
    busy = worker(2, closure=RunningClosure(7, "train_step", 14.0), mean_s=20.0)
    seen = status(
        worker(0, "waiting"), worker(1, "waiting"), busy, queue=QUEUED,
        steps=group(waiting=(W[0], W[1]), waits_for=(W[2],)),
    )  # fmt: skip
    assert texts(seen) == [
        "warn: Step 5 of sync has 2 of 3 gradients; 2 of 3 workers wait for it. It waits for "
        "worker 2, in train_step since 14 s."
    ]
    several = group(waiting=(W[0],), waits_for=(W[1], W[2], W[3]))
    (text,) = texts(status(worker(0, "waiting"), worker(1), busy, queue=QUEUED, steps=several))
    assert text.endswith("It waits for worker 1, worker 2, worker 3, in train_step since 14 s.")
    quick = dataclasses.replace(busy, closure=RunningClosure(7, "train_step", 0.5))
    (text,) = texts(status(worker(0, "waiting"), quick, queue=QUEUED, steps=several))
    assert text.startswith("good")  # as in every step
    nobody = group(waiting=(W[0],))
    (text,) = texts(status(worker(0, "waiting"), queue=QUEUED, steps=nobody))
    assert text.endswith("1 of 1 workers wait for it, and no other worker has anything to do.")
    lacking = group(lacks=("the part of /job:worker/task:0 at /job:ps/task:1 (push 8)",))
    (text,) = texts(status(worker(), queue=QUEUED, steps=lacking))
    assert text.endswith("It waits for the part of worker 0 at ps 1 (push 8).")
    assert texts(status(worker(), queue=QUEUED, steps=group()))[0].startswith("good")


def test_for_whom_a_bound_waits() -> None:
    slow = worker(1, closure=RunningClosure(7, "train_step", 2.0))
    bounds = (BoundStatus(3, 10, 14, (W[0],), (W[1],)), BoundStatus(3, 1, 2, (), ()))
    seen = status(worker(0, "waiting"), slow, queue=QUEUED, steps=StepsStatus(bounds=bounds))
    assert texts(seen) == ["warn: Worker 0 may be at most 3 rounds ahead and waits for worker 1."]
    bound = BoundStatus(3, 10, 14, (W[0], W[2]), (W[1],))
    (text,) = texts(status(slow, queue=QUEUED, steps=StepsStatus(bounds=(bound,))))
    assert text.startswith("warn: Worker 0, worker 2 may be at most 3 rounds ahead and wait for")
    (text,) = texts(status(worker(1), queue=QUEUED, steps=StepsStatus(bounds=(bound,))))
    assert text.startswith("good")


def test_a_program_that_schedules_too_little() -> None:
    assert texts(status(worker(0, "idle"), state="idle")) == [
        "warn: Nothing is scheduled: all workers wait for the program."
    ]
    seen = status(worker(0, "idle"), worker(1))
    assert texts(seen) == [
        "warn: 1 of 2 workers have nothing to do: the queue is empty, and the last closures run on "
        "worker 1. Schedule further ahead, or join less often."
    ]
    seen = status(worker(0, "idle"), worker(1), queue=QueueStatus(waiting=3))
    assert texts(seen) == [
        "warn: 1 of 2 workers have nothing to do: the remaining closures wait for the value of "
        "another closure."
    ]


def test_how_long_a_full_queue_takes() -> None:
    full = QueueStatus(queued=200_000, closures_per_s=65.0)
    assert texts(status(worker(), queue=full)) == [
        "good: The cluster is not the bottleneck: 1 of 1 workers are busy. The 200,000 queued "
        "closures take another 51:16 min; more workers would reduce that."
    ]


def test_stragglers() -> None:
    paces = [worker(index, mean_s=0.1) for index in range(3)]
    seen = status(*paces, worker(3, mean_s=0.25), queue=QUEUED)
    assert texts(seen) == [
        "warn: Worker 3 takes 250 ms for a closure, 2.5 times the median of 100 ms."
    ]
    seen = status(*paces, worker(3, mean_s=0.2), worker(4, mean_s=0.3), queue=QUEUED)
    (text,) = texts(seen)
    assert text.startswith("warn: Worker 4, worker 3 take up to 300 ms for a closure, 3.0 times")
    assert texts(status(*paces, queue=QUEUED))[0].startswith("good")
    assert texts(status(worker(mean_s=1.0), worker(1, mean_s=9.0), queue=QUEUED))[0][:4] == "good"


def test_a_closure_that_does_not_end() -> None:
    stuck = worker(0, closure=RunningClosure(7, "train_step", 80.0), mean_s=2.0)
    assert texts(status(stuck, stuck, queue=QUEUED)) == [
        "warn: Worker 0 has run train_step for 80 s; its closures take 2 s."
    ]
    answers = worker(1, mean_s=2.0, work=shares(0.9))
    assert texts(status(stuck, answers, queue=QUEUED)) == [
        "warn: Worker 0 has run train_step for 80 s; its closures take 2 s; it does not answer: it "
        "computes on its event loop, or is stopped."
    ]
    new = worker(0, closure=RunningClosure(7, "train_step", 80.0))
    assert texts(status(new, queue=QUEUED)) == ["warn: Worker 0 has run train_step for 80 s."]
    waiting = worker(0, "waiting", closure=RunningClosure(7, "train_step", 80.0))
    assert texts(status(waiting, queue=QUEUED))[0].startswith("good")


def test_what_workers_spend_their_time_on() -> None:
    for work, text in [
        (
            shares(0.6, pull=0.1, push=0.3),
            "for ps tasks 40% of the time (10% for values, 30% until pushes have arrived), and "
            "compute for 60%: send fewer",
        ),
        (
            shares(0.5, wait=0.4),
            "for other workers 40% of the time, and compute for 50%: use backup",
        ),
    ]:
        (found,) = texts(status(worker(work=work), worker(1, "lost"), worker(2), queue=QUEUED))[1:]
        assert found.startswith(f"warn: Workers wait {text}")


def test_ps_tasks_that_cannot_keep_up() -> None:
    late = BackupStatus("paired", 5000)
    seen = status(worker(), ps(0, queue=33), ps(1, queue=90, backup=late), queue=QUEUED)
    assert texts(seen) == [
        "warn: Ps 1 has 90 updates waiting: the ps tasks are the bottleneck.",
        "warn: The backup of ps 1 is far behind; updates wait for it.",
    ]


def test_load_that_is_uneven() -> None:
    seen = status(
        worker(), ps(0, bytes_in_per_s=9e6), ps(1, bytes_out_per_s=1e6), queue=QUEUED
    )  # fmt: skip
    assert texts(seen) == [
        "warn: Ps 0 moves 90% of all bytes (8.6 MiB/s); a partitioner would spread the variables."
    ]
    even = status(worker(), ps(0, bytes_in_per_s=9e6), ps(1, bytes_in_per_s=8e6), queue=QUEUED)
    assert texts(even)[0].startswith("good")
    computing = worker(work=shares(0.9, pull=0.05))  # so nobody waits for it
    unnoticed = status(computing, ps(0, bytes_in_per_s=9e6), ps(1), queue=QUEUED)
    assert texts(unnoticed)[0].startswith("good")
    waiting = worker(work=shares(0.8, pull=0.15))
    noticed = status(waiting, ps(0, bytes_in_per_s=9e6), ps(1), queue=QUEUED)
    assert texts(noticed)[0].startswith("warn: Ps 0 moves 100% of all bytes")
    small = status(worker(), ps(0, bytes_in_per_s=9e3), ps(1), queue=QUEUED)
    assert texts(small)[0].startswith("good")


def test_work_that_is_lost() -> None:
    late = group(accepted=60, dropped=40)
    seen = status(worker(), worker(1, accepted=1, dropped=30), queue=QUEUED, steps=late)
    assert texts(seen) == ["warn: Worker 1: more than half of the gradients are stale and dropped."]
    assert texts(status(worker(), queue=QUEUED, steps=late)) == [
        "warn: 40% of the gradients for sync were stale and dropped: that share of the computation "
        "is wasted."
    ]


def test_closures_that_run_again_are_told_of_for_a_minute() -> None:
    again = QueueStatus(queued=1, put_back=2)
    lost = EventStatus("lost", "/job:worker/task:3 is lost (it closed the connection)", 12.0)
    events = (EventStatus("joined", "x", 1.0), lost, lost)
    assert texts(status(worker(), queue=again, events=events)) == [
        "warn: Within a minute: worker 3 is lost (it closed the connection). Closures run again "
        "because of lost workers: 2."
    ]
    old = (dataclasses.replace(lost, seconds=70.0),)
    assert texts(status(worker(), queue=again, events=old))[0].startswith("good")
