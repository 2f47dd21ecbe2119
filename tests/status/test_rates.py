"""Counters become rates, states and names of who is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psync.closures.dispatcher import WorkerStatistics
from psync.closures.queue import QueueStatistics
from psync.status.model import (
    SPACING_S,
    WINDOW_S,
    BackupStatus,
    EventStatus,
    History,
    PsStatus,
    RunningClosure,
    SeenError,
    Status,
    WorkerStatus,
    WorkShares,
    shares_of,
    status_of,
)

W0, W1, W2 = (f"/job:worker/task:{index}" for index in range(3))


def group(**changes: Any) -> dict[str, Any]:
    """A synchronous group's counters, as ps 0 has them."""
    return {
        "step": 5, "target": 2, "counted": 0, "partial_steps": 0, "waits": [], "lacks": [],
        "waiting": 0, "staleness": {}, "replicas": {}, **changes,
    }  # fmt: skip


def counters(**changes: Any) -> dict[str, Any]:
    """A ps task's counters, where something has happened."""
    return {
        "iterations": 10, "pushes": 10, "pulls": 20, "row_pulls": 2,
        "waiting": {"lock": 1, "compute": 0},
        "staging": {"staged": 0, "parts": 0, "stale": 0},
        "staleness": {"newest": [], "counts": {}},
        "store": {"shards": 2, "bytes": 800, "slot_bytes": 400},
        "ledger": {"duplicate": 1, "already_applied": 2, "fenced": 3, "refused": 4},
        "backup": {"state": "alone", "entries": 7, "taken": 3},
        "network": {"bytes_received": 1000, "bytes_sent": 2000},
        "sync": {}, "clocks": {}, **changes,
    }  # fmt: skip


Counted = tuple[PsStatus, dict[str, Any]]


def ps(index: int = 0, **changes: Any) -> Counted:
    return PsStatus(f"/job:ps/task:{index}", "a:1", "connected", 0.0), counters(**changes)


def reading(
    at: float,
    *,
    workers: dict[str, tuple[int, int]] | None = None,
    tasks: list[WorkerStatus] | None = None,
    servers: list[Counted] | None = None,
    has_backups: bool = False,
    attached: bool = False,
    **changes: Any,
) -> Callable[[History], Status]:
    """What was read; ``workers``: closures held and finished by each that takes part."""
    held = workers or {}
    closures = QueueStatistics(
        waiting=0, queued=3, in_flight=sum(held for held, _ in held.values()),
        finished=sum(done for _, done in held.values()), failed=0, exhausted=0, cancelled=0,
        put_back=0, given_back=0,
        workers=tuple(WorkerStatistics(name, *each, 1, 0.5) for name, each in held.items()),
    )  # fmt: skip
    if tasks is None:
        now = RunningClosure(1, "step", 0.1)
        tasks = [
            WorkerStatus(name, "b:1", "idle", now if has else None)
            for name, (has, _) in held.items()
        ]
    pairs = [ps()] if servers is None else servers
    values: dict[str, Any] = {
        "time": 0.0, "pid": 1, "program": "train.py", "uptime_s": at, "window_s": 0.0,
        "state": "running", "waits_for": "nothing", "workers": tuple(tasks),
        "ps": tuple(each for each, _ in pairs), **changes,
    }  # fmt: skip
    return lambda history: status_of(
        Status(**values), at, closures, [each for _, each in pairs], history,
        has_backups=has_backups, attached=attached,
    )  # fmt: skip


def seen(*readings: Callable[[History], Status], began: float = 0.0) -> Status:
    """The last of several statuses."""
    history = History(began)
    return [each(history) for each in readings][-1]


# Rates.


def test_the_first_rates_are_means_since_the_beginning() -> None:
    status = seen(reading(4.0, workers={W0: (1, 8)}))
    assert status.window_s == 4.0
    assert status.queue.closures_per_s == 2.0
    assert status.workers[0].closures_per_s == 2.0
    assert status.ps[0].pushes_per_s == 2.5


def test_later_rates_are_means_over_the_window() -> None:
    status = seen(*(reading(float(at), workers={W0: (1, at * at)}) for at in range(21)))
    assert status.window_s == WINDOW_S
    assert status.queue.closures_per_s == (20 * 20 - 15 * 15) / 5


def test_what_a_ps_has_sent_before_somebody_looked_is_no_rate() -> None:
    status = seen(reading(4.0))
    assert (status.ps[0].bytes_in_per_s, status.ps[0].bytes_out_per_s) == (0.0, 0.0)


def test_what_ps_tasks_have_done_before_a_chief_attached_to_them_is_no_rate() -> None:
    status = seen(reading(4.0, attached=True))
    assert (status.steps.global_step, status.steps.steps_per_s) == (10, 0.0)
    assert (status.ps[0].pushes, status.ps[0].pushes_per_s) == (10, 0.0)
    later = [ps(iterations=14, pushes=14)]
    status = seen(reading(4.0, attached=True), reading(6.0, attached=True, servers=later))
    assert (status.steps.steps_per_s, status.ps[0].pushes_per_s) == (2.0, 2.0)


def test_a_checkpoint_that_is_restored_makes_no_steps() -> None:
    restored = [ps(iterations=50_010, pushes=20)]
    status = seen(reading(0.0), reading(2.0, servers=restored))
    assert (status.steps.global_step, status.steps.steps_per_s) == (50_010, 10.0)


def test_who_asks_seldom_gets_means_since_the_last_time() -> None:
    counts = ((100.0, 100), (200.0, 1100))
    status = seen(*(reading(at, workers={W0: (1, count)}) for at, count in counts))
    assert status.window_s == 100.0
    assert status.queue.closures_per_s == 10.0


def test_who_asks_twice_after_a_long_time_gets_the_rates_of_just_now() -> None:
    counts = ((3600.0, 100), (3601.0, 130))
    status = seen(*(reading(at, workers={W0: (1, count)}) for at, count in counts))
    assert status.window_s == 1.0
    assert status.queue.closures_per_s == 30.0


def test_who_asks_all_the_time_does_not_shorten_the_window() -> None:
    times = [each * SPACING_S / 10 for each in range(401)]
    status = seen(*(reading(at, workers={W0: (1, int(at * 100))}) for at in times))
    assert WINDOW_S - SPACING_S <= status.window_s <= WINDOW_S
    assert status.queue.closures_per_s == pytest.approx(100.0, rel=0.01)


def test_a_counter_that_began_again_counts_from_zero() -> None:
    status = seen(reading(0.0, workers={W0: (1, 90)}), reading(2.0, workers={W0: (1, 10)}))
    assert status.workers[0].closures_per_s == 5.0


# Workers.


def test_a_worker_is_busy_while_it_holds_closures() -> None:
    status = seen(reading(1.0, workers={W0: (2, 0), W1: (0, 4)}))
    assert [(each.state, each.held, each.mean_s) for each in status.workers] == [
        ("busy", 2, 0.5), ("idle", 0, 0.5),
    ]  # fmt: skip


def test_a_worker_that_does_not_take_part_keeps_its_state_and_its_error() -> None:
    error = SeenError("closure 1 (step): ValueError: no", 2.0)
    gone = WorkerStatus(W1, "b:1", "lost", None, losses=2, failed=1, last_error=error)
    (worker,) = seen(reading(1.0, tasks=[gone])).workers
    assert (worker.state, worker.losses, worker.failed) == ("lost", 2, 1)
    assert (worker.last_error, worker.mean_s, worker.closures_per_s) == (error, None, 0.0)


def test_the_staleness_of_a_worker_is_that_of_its_stalest_push_anywhere() -> None:
    def stale(steps: int) -> dict[str, Any]:
        return {"newest": [[W0, steps]], "counts": {str(steps): 1}}

    status = seen(
        reading(
            1.0, workers={W0: (1, 0), W1: (1, 0)},
            servers=[ps(0, staleness=stale(1)), ps(1, staleness=stale(3))],
        )
    )  # fmt: skip
    assert [each.staleness for each in status.workers] == [3, None]


# Steps.


def test_the_step_of_asynchronous_training_is_the_most_updates_of_a_ps() -> None:
    status = seen(reading(2.0, servers=[ps(0, iterations=4), ps(1, iterations=6)]), began=0.0).steps
    assert (status.global_step, status.steps_per_s, status.groups) == (6, 3.0, ())


def test_the_busiest_ps_says_how_stale_pushes_are() -> None:
    def stale(**counts: int) -> dict[str, Any]:
        named = {name.removeprefix("of_"): count for name, count in counts.items()}
        return {"newest": [], "counts": named}

    servers = [ps(0, staleness=stale(of_0=1)), ps(1, staleness=stale(of_10=4, of_2=5))]
    assert list(seen(reading(1.0, servers=servers)).steps.staleness.items()) == [
        ("2", 5), ("10", 4),
    ]  # fmt: skip


def test_a_synchronous_step_waits_for_who_has_work_and_has_not_come() -> None:
    sync = group(
        counted=1, target=2, waits=[W0], staleness={"0": 8, "1": 1},
        replicas={W0: {"accepted": 5, "stale": 1, "duplicate": 0},
                  W1: {"accepted": 4, "stale": 0, "duplicate": 2}},
    )  # fmt: skip
    status = seen(
        reading(
            1.0,
            workers={W0: (1, 5), W1: (1, 4), W2: (0, 0)},
            servers=[ps(sync={"sync": sync}), ps(1, iterations=90)],  # others count pushes there
        )
    )
    (step,) = status.steps.groups
    assert (step.name, step.step, step.counted, step.target) == ("sync", 5, 1, 2)
    assert (step.waiting, step.waits_for) == ((W0,), (W1,))
    assert (step.accepted, step.dropped, step.duplicates, step.steps_per_s) == (9, 1, 2, 5.0)
    assert status.steps.global_step == 5
    assert status.steps.staleness == {"0": 8, "1": 1}
    assert [each.state for each in status.workers] == ["waiting", "busy", "idle"]
    assert [each.dropped for each in status.workers] == [1, 0, 0]


def test_a_bound_of_staleness_waits_for_the_slowest() -> None:
    clocks = {"1": {"max_staleness": 2, "clocks": {W0: 9, W1: 6, W2: 8}}}
    status = seen(
        reading(1.0, workers={W0: (1, 0), W1: (1, 0), W2: (1, 0)}, servers=[ps(clocks=clocks)])
    )
    (bound,) = status.steps.bounds
    assert (bound.slowest, bound.fastest, bound.max_staleness) == (6, 9, 2)
    assert (bound.waiting, bound.waits_for) == ((W0,), (W1,))
    assert [each.state for each in status.workers] == ["waiting", "busy", "busy"]


# ps tasks.


def test_a_ps_shows_its_counters_and_their_age() -> None:
    silent = PsStatus("/job:ps/task:0", "a:1", "silent", 3.0)
    first = counters(staging={"staged": 5})
    later = {**first, "network": {"bytes_received": 3000, "bytes_sent": 6000}}
    before, now = (
        reading(at, servers=[(silent, each)]) for at, each in ((2.0, first), (6.0, later))
    )
    (task,) = seen(before, now).ps
    assert (task.state, task.age_s, task.shards, task.bytes, task.slot_bytes) == (
        "silent", 3.0, 2, 800, 400,
    )  # fmt: skip
    assert (task.pushes, task.pulls, task.queue) == (15, 22, 1)
    assert (task.duplicates, task.refused) == (3, 7)
    assert (task.bytes_in_per_s, task.bytes_out_per_s) == (500.0, 1000.0)
    assert task.backup is None


def test_a_ps_that_was_never_heard_has_no_numbers() -> None:
    unheard = PsStatus("/job:ps/task:0", "a:1", "unconnected")
    status = seen(reading(1.0, servers=[(unheard, {})]))
    assert (status.ps[0].state, status.ps[0].age_s, status.ps[0].bytes) == ("unconnected", None, 0)
    assert status.steps.global_step == 0


def test_a_backup_is_so_many_entries_behind() -> None:
    for state, behind in [("paired", 4), ("copying", 4), ("alone", 0)]:
        servers = [ps(backup={"state": state, "entries": 7, "taken": 3})]
        status = seen(reading(1.0, servers=servers, has_backups=True))
        assert status.ps[0].backup == BackupStatus(state, behind)


def test_a_cluster_that_is_not_there_yet_has_a_status() -> None:
    event = EventStatus("joined", "/job:worker/task:0 takes part", 1.0)
    status = seen(reading(1.0, servers=[], notes=("a note",), events=(event,), state="starting"))
    assert (status.ps, status.state, status.notes) == ((), "starting", ("a note",))
    assert status.events == (event,)


def work(at: float, *seconds: float, since: float = 0.0) -> dict[str, float]:
    kinds = zip(("compute", "pull", "push", "wait"), seconds, strict=True)
    return {"at": at, "since": since, **dict(kinds)}


def test_what_a_worker_spends_its_time_on_is_told_between_two_readings() -> None:
    assert shares_of(work(10, 1, 2, 3, 4), work(14, 3, 2, 4, 4)) == WorkShares(0.5, 0, 0.25, 0, 4)


def test_nothing_is_told_of_a_worker_that_has_begun_anew_or_of_no_time() -> None:
    assert shares_of(work(10, 1, 2, 3, 4), work(14, 3, 2, 4, 4, since=12)) is None
    assert shares_of(work(10, 1, 2, 3, 4), work(10, 1, 2, 3, 4)) is None


def test_a_counter_that_falls_has_begun_anew() -> None:
    history = History(0.0)
    history.rates(1.0, {"pushes": 100.0})
    _, rate = history.rates(WINDOW_S + 1.0, {"pushes": 30.0})
    assert rate("pushes") == 30.0 / WINDOW_S
