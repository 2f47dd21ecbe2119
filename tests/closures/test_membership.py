"""Membership: incarnations, fences, losses, the back-off; scaling; reports of the schedule."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.closures.closure import Closure
from psync.closures.dispatcher import WorkerStatistics
from psync.closures.membership import (
    FIRST_S,
    RETURN_S,
    SETTLE_S,
    WINDOW_S,
    Fence,
    Flapping,
    Membership,
    ScheduleReports,
    backoff,
)
from psync.closures.queue import ClosureQueue, QueueStatistics
from psync.closures.scaling import AdaptiveRule, Load, changes
from psync.errors import ConfigurationError, EndOfData, LocalProtocolError
from psync.wire.messages import ReportSchedule

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"


def cluster(*, alive: tuple[str, ...] = ()) -> Membership:
    """A membership of two workers, of which some connected under incarnation 0."""
    membership = Membership({W0: "w0:1", W1: "w1:1"})
    for worker in alive:
        membership.connected(worker, 0)
    return membership


# The machine in test_membership_machine has them in every order; here are single values.


def test_a_connection_is_assigned_the_lowest_incarnation_or_one_above_the_last() -> None:
    membership = cluster()
    assert membership.incarnation(W0) == -1
    for lowest, assigned in ((7, 7), (7, 8), (3, 9), (12, 12)):
        membership.connected(W0, lowest)
        assert membership.incarnation(W0) == assigned
        membership.disconnected(W0)


def test_a_lost_worker_is_fenced() -> None:
    membership = cluster(alive=(W0, W1))
    assert membership.disconnected(W0) == Fence(W0, 1)
    assert membership.fences() == [(W0, 1)]


def test_missing_names_the_workers_awaited_with_their_addresses() -> None:
    membership = cluster(alive=(W0,))
    assert membership.missing() == [(W1, "w1:1")]
    membership.disconnected(W0)
    assert membership.missing() == [(W0, "w0:1"), (W1, "w1:1")]


# --- illegal moves ---------------------------------------------------------------------------


def test_second_connection_of_a_task_that_is_alive_is_refused() -> None:
    membership = cluster(alive=(W0,))
    with pytest.raises(LocalProtocolError, match=f"^{W0} cannot become alive: it is alive$"):
        membership.connected(W0, 3)
    assert membership.incarnation(W0) == 0


def test_worker_that_is_not_connected_cannot_disconnect() -> None:
    with pytest.raises(LocalProtocolError, match=f"^{W0} cannot become lost: it is connecting$"):
        cluster().disconnected(W0)


# --- back-off --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "uniform", "seconds"),
    [(0, 0.0, 0.02), (0, 1.0, 0.04), (1, 0.0, 0.032), (2, 0.5, 0.0768), (100_000, 1.0, 5.0)],
)
def test_backoff_starts_at_20_ms_and_grows_by_its_factor(
    attempt: int, uniform: float, seconds: float
) -> None:
    assert backoff(attempt, uniform) == pytest.approx(seconds)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_backoff_does_not_shrink_with_the_attempts(attempt: int, uniform: float) -> None:
    assert backoff(attempt, uniform) <= backoff(attempt + 1, uniform)


def lose_often(flapping: Flapping, worker: str, now: float) -> float:
    """Lose a worker until it is set aside, all at once; return for how long."""
    for _ in range(4):
        if pause := flapping.lost(worker, now):
            return pause
    raise AssertionError("it was never set aside")


def test_the_fourth_loss_within_a_minute_sets_a_worker_aside() -> None:
    flapping = Flapping()
    assert [flapping.lost(W0, now) for now in (0.0, 20.0, 40.0)] == [0.0, 0.0, 0.0]
    assert flapping.lost(W0, 59.0) == FIRST_S
    assert flapping.remaining(W0, 60.0) == FIRST_S - 1
    assert flapping.remaining(W0, 59.0 + FIRST_S) == 0.0


def test_losses_that_are_a_minute_apart_do_not_add_up() -> None:
    flapping = Flapping()
    assert {flapping.lost(W0, 20.0 * i) for i in range(100)} == {0.0}


def test_each_time_that_is_not_enough_is_followed_by_one_twice_as_long_up_to_five_minutes() -> None:
    flapping = Flapping()
    now, pauses = 0.0, []
    for _ in range(6):
        pauses.append(lose_often(flapping, W0, now))
        now += pauses[-1]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]


def test_the_count_begins_anew_when_a_worker_comes_back() -> None:
    flapping = Flapping()
    lose_often(flapping, W0, 0.0)
    assert [flapping.lost(W0, FIRST_S) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert flapping.lost(W0, FIRST_S) == 2 * FIRST_S


def test_a_worker_that_has_been_well_for_long_enough_is_forgiven() -> None:
    pause = 2 * FIRST_S
    for well_s, expected in (
        (pause + WINDOW_S - 1, 2 * pause),
        (pause + WINDOW_S, FIRST_S),
    ):
        flapping = Flapping()
        lose_often(flapping, W0, 0.0)
        lose_often(flapping, W0, FIRST_S)
        back = FIRST_S + pause
        assert lose_often(flapping, W0, back + well_s) == expected


def test_workers_are_counted_each_for_itself_and_named_whose_time_ends_first_first() -> None:
    flapping = Flapping()
    lose_often(flapping, W1, 10.0)
    lose_often(flapping, W0, 0.0)
    flapping.lost("/job:worker/task:2", 10.0)
    assert flapping.set_aside(10.0) == [(W0, 20.0), (W1, 30.0)]
    assert flapping.set_aside(35.0) == [(W1, 5.0)]
    assert flapping.set_aside(40.0) == []
    assert flapping.remaining("/job:worker/task:9", 0.0) == 0.0


def test_without_a_limit_nobody_is_set_aside() -> None:
    flapping = Flapping(None)
    assert {flapping.lost(W0, 0.0) for _ in range(50)} == {0.0}


def test_a_limit_of_nothing_sets_aside_at_the_first_loss_and_less_is_refused() -> None:
    assert Flapping(0).lost(W0, 0.0) == FIRST_S
    with pytest.raises(ConfigurationError, match="max_flaps: expected at least 0 or None, got -1"):
        Flapping(-1)


def worker(mean_s: float | None) -> WorkerStatistics:
    return WorkerStatistics("/job:worker/task:0", 1, 2, 1, mean_s)


def test_the_load_of_a_queue_has_the_mean_duration_of_its_workers() -> None:
    assert ClosureQueue().statistics().load() == Load(0, 0, None)
    workers = (worker(None), worker(1.0), worker(3.0))
    counts = QueueStatistics(9, 5, 2, 0, 0, 0, 0, 0, 0, workers)
    assert counts.load() == Load(5, 2, 2.0)


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (Load(), 2),  # the minimum
        (Load(3, 2), 5),  # nothing is known of how long they take
        (Load(100, 0), 8),  # the maximum
        (Load(100, 0, 0.05), 2),  # 5 seconds of work
        (Load(100, 2, 0.25), 6),  # 25.5 seconds of work
        (Load(1, 2, 60.0), 3),  # no more than there are closures
    ],
)
def test_there_are_as_many_as_do_the_work_in_time(load: Load, wanted: int) -> None:
    assert AdaptiveRule(2, 8).wanted(load) == wanted
    assert AdaptiveRule(2, 8).decide(load, workers=2) == wanted


def test_fewer_are_wanted_only_after_several_looks_and_then_the_most_of_them() -> None:
    rule = AdaptiveRule(1, 8, wait_count=3)
    looks = [(2, 6), (4, 6), (3, 6), (3, 4), (1, 4), (1, 4), (1, 3)]
    targets = [rule.decide(Load(queued), workers) for queued, workers in looks]
    assert targets == [6, 6, 4, 4, 4, 3, 3]


def test_one_look_that_needs_them_all_begins_the_wait_anew() -> None:
    rule = AdaptiveRule(1, 8, wait_count=2)
    assert [rule.decide(Load(n), 4) for n in (1, 4, 1, 6, 1, 2)] == [4, 4, 4, 6, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"minimum": 0, "maximum": 2}, "minimum: expected a whole number above 0, got 0"),
        ({"minimum": 1.5, "maximum": 2}, "minimum: expected a whole number above 0, got 1.5"),
        ({"minimum": 3, "maximum": 2}, "maximum: expected a whole number, 3 or above, got 2"),
        ({"minimum": 1, "maximum": 2, "wait_count": 0}, "wait_count: expected a whole number abo"),
        ({"minimum": 1, "maximum": 2, "target_s": 0}, "target_duration: expected seconds above 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_an_error(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        AdaptiveRule(**arguments)


@pytest.mark.parametrize(
    ("present", "taken", "number", "come", "leave"),
    [
        ([0, 1], [], 4, [2, 3], []),
        ([0, 1, 2, 3], [], 1, [], [3, 2, 1]),
        ([0, 2], [], 3, [1], []),  # one was given up
        ([0, 1], [2], 4, [3, 4], []),  # one is about to leave
        ([0, 1], [], 2, [], []),
    ],
)
def test_the_lowest_come_and_the_highest_leave(
    present: list[int], taken: list[int], number: int, come: list[int], leave: list[int]
) -> None:
    assert changes(present, taken, number) == (come, leave)


@pytest.mark.parametrize("number", [0, -1, True, "2"])
def test_there_is_at_least_one_worker(number: int) -> None:
    with pytest.raises(ConfigurationError, match="workers: expected a whole number above 0, got"):
        changes([0], [], number)


A, B, C = "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:3"


class World:
    """A queue, its workers and the reports on them; ``news`` looks as the coordinator does."""

    def __init__(self, *joined: str) -> None:
        self.queue = ClosureQueue()
        self.reports = ScheduleReports((A, B, C), self.queue)
        self.now = 100.0
        for worker in joined:
            self.join(worker, 7)

    def join(self, worker: str, incarnation: int) -> None:
        self.reports.worker_joined(worker, incarnation)
        self.queue.worker_joined(worker)

    def lose(self, worker: str) -> None:
        self.reports.worker_lost(worker)
        self.queue.worker_lost(worker)

    def schedule(self, *ids: int, inputs: tuple[Closure, ...] = ()) -> list[Closure]:
        closures = [Closure(i, dependencies=inputs) for i in ids]
        for closure in closures:
            self.queue.schedule(closure)
        self.queue.dispatch()
        return closures

    def finish(self, worker: str, closure_id: int) -> None:
        self.queue.finished(worker, [closure_id], 1.0)
        self.reports.has_data(worker)

    def exhaust(self, worker: str, closure_id: int) -> None:
        self.queue.end_of_data(worker, closure_id, EndOfData())
        self.reports.out_of_data(worker)

    def news(self) -> ReportSchedule | None:
        """What is reported once no deadline is left."""
        state = self.reports.decide(self.now) if self.reports.look() else None
        while state is None and (deadline := self.reports.next_deadline()) is not None:
            self.now = deadline
            state = self.reports.decide(self.now)
        return state

    def here(self) -> list[str]:
        """The workers that take part, after all news."""
        state = self.news()
        assert state is not None
        return [worker for worker, _ in state.workers]


def test_the_first_state_is_reported_whatever_it_is():
    world = World()
    assert world.news() == ReportSchedule(1, [], [A, B, C], False, [])
    assert world.news() is None


def test_workers_take_part_under_their_incarnation_and_in_the_order_of_the_cluster():
    world = World()
    world.join(C, 9)
    world.join(A, 7)
    assert world.news() == ReportSchedule(1, [(A, 7), (C, 9)], [B], False, [])
    world.lose(A)
    assert world.news() == ReportSchedule(2, [(C, 9)], [A, B], False, [])
    world.join(A, 8)
    assert world.news() == ReportSchedule(3, [(A, 8), (C, 9)], [B], False, [])


def test_a_closure_that_no_worker_has_is_queued():
    world = World(A, B)
    world.queue.pause()
    world.schedule(0)
    assert world.news() == ReportSchedule(1, [(A, 7), (B, 7)], [C], True, [])


def test_the_last_closures_are_named_with_their_workers():
    world = World(A, B)
    world.schedule(0, 1)
    assert world.news() == ReportSchedule(1, [(A, 7), (B, 7)], [C], False, [(0, A), (1, B)])
    world.finish(A, 0)
    assert world.news().in_flight == [(1, B)]
    world.finish(B, 1)
    assert world.news().in_flight == []


def test_a_full_queue_is_not_looked_at_closer():
    world = World(A, B)
    world.schedule(*range(50))
    assert world.news().queued
    for closure in range(40):
        worker = next(w for w, c in world.queue.in_flight() if c.id == closure)
        world.finish(worker, closure)
        assert not world.reports.look()


# --- data that ends --------------------------------------------------------------------------


def test_a_worker_without_data_is_missing_until_it_has_a_value_again():
    world = World(A, B)
    world.schedule(*range(9))
    assert world.here() == [A, B]
    world.exhaust(A, 0)
    assert world.here() == [B]
    world.reports.out_of_data(A)  # again
    assert world.news() is None
    held = next(closure.id for worker, closure in world.queue.in_flight() if worker == A)
    world.finish(A, held)
    assert world.here() == [A, B]
    assert world.news() is None


def test_all_are_back_when_nobody_else_has_data():
    world = World(A, B)
    world.schedule(*range(9))
    world.exhaust(A, 0)
    assert world.here() == [B]
    world.exhaust(B, 1)
    assert world.here() == [A, B]


def test_all_are_back_when_nothing_is_left_to_do():
    world = World(A, B)
    world.schedule(0, 1)
    assert world.here() == [A, B]
    world.exhaust(A, 0)
    assert world.here() == [B]
    world.finish(B, 1)
    assert world.reports.look()
    world.schedule(2)  # before anybody has asked
    assert world.here() == [A, B]


def test_a_worker_that_comes_back_begins_its_data_anew():
    world = World(A, B)
    world.schedule(*range(9))
    world.exhaust(A, 0)
    assert world.here() == [B]
    world.lose(A)
    world.join(A, 8)
    assert world.here() == [A, B]


# --- when ------------------------------------------------------------------------------------


def test_a_closure_is_news_at_once_and_its_end_a_little_later():
    world = World(A, B)
    world.reports.decide(4.0)
    world.schedule(0)
    assert world.reports.look()
    assert world.reports.decide(5.0).in_flight == [(0, A)]
    world.finish(A, 0)
    assert world.reports.look()
    assert world.reports.decide(6.0) is None
    assert world.reports.next_deadline() == 6.0 + SETTLE_S
    assert world.reports.decide(6.0 + SETTLE_S / 2) is None
    assert world.reports.next_deadline() == 6.0 + SETTLE_S  # counted from the first news
    assert world.reports.decide(6.0 + SETTLE_S).in_flight == []
    assert world.reports.next_deadline() is None


def test_closures_one_by_one_are_not_worth_a_report_each():
    world = World(A, B)
    world.reports.decide(4.0)
    world.schedule(0)
    assert world.reports.decide(5.0).in_flight == [(0, A)]
    for closure, worker in enumerate((A, B, A, B)):
        world.finish(worker, closure)
        world.schedule(closure + 1)
        if world.reports.look():  # the first time only
            assert closure == 0
            assert world.reports.decide(5.001) is None
    assert world.reports.next_deadline() == 5.0 + SETTLE_S  # counted from the last report
    assert world.reports.decide(5.0 + SETTLE_S).in_flight == [(4, A)]


def test_a_queue_that_fills_and_a_worker_that_comes_are_always_urgent():
    world = World(A)
    world.reports.decide(5.0)
    world.schedule(0)
    assert world.reports.decide(5.001) is None
    world.schedule(*range(1, 9))
    assert world.reports.look()
    assert world.reports.decide(5.001).queued
    world.join(B, 7)
    assert world.reports.look()
    assert len(world.reports.decide(5.001).workers) == 2
    assert world.reports.next_deadline() is None


def test_who_will_be_back_at_once_is_not_missed_until_it_is():
    world = World(A, B)
    world.schedule(1, 2)
    assert world.here() == [A, B]
    world.reports.sessions_end()
    world.lose(A)
    world.lose(B)
    world.reports.tell_all()
    state = world.news()
    assert state is not None
    assert (state.workers, state.missing) == ([(A, 7), (B, 7)], [C])
    world.join(B, 8)
    state = world.news()
    assert state is not None
    assert sorted(state.workers) == [(A, 7), (B, 8)]
    world.join(A, 8)
    assert world.here() == [A, B]
    assert world.reports.next_deadline() is None


def test_who_does_not_come_back_is_missed_soon():
    world = World(A, B)
    world.reports.sessions_end()
    world.lose(A)
    world.lose(B)
    world.join(B, 8)
    began = world.now
    assert sorted(world.here()) == [A, B]
    assert world.reports.next_deadline() == began + RETURN_S
    world.now = began + RETURN_S / 2
    assert world.reports.decide(world.now) is None
    world.now = began + RETURN_S
    assert world.here() == [B]
    assert world.now == began + RETURN_S + SETTLE_S


def calls_of_a_report(num_workers: int, when: str) -> float:
    """The Python calls of one report that a closure has ended, with all that is decided then."""
    names = [f"/job:worker/task:{i}" for i in range(num_workers)]
    queue = ClosureQueue()
    reports = ScheduleReports(names, queue)
    for name in names:
        queue.worker_joined(name)
        reports.worker_joined(name, 1)
    ended = names if when == "the next pass" else names[:-1]
    if when == "others hold what may not be moved":
        ended = names[: num_workers // 2]
    for name in ended:
        queue.dispatcher.out_of(name, ("u", 0), 3)
    if when == "others hold what may not be moved":
        queue.schedule(Closure(0))
    first = len(queue.in_flight()) + 1
    data = ("u", 1) if when == "the next pass" else ("u", 0)
    for i in range(first, first + 4 * num_workers):
        queue.schedule(Closure(i, needs=frozenset([data])))
    queue.dispatch()
    reports.look()
    reports.decide(0.0)
    calls, reporter = 0, names[-1]

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    outer = sys.getprofile()
    for _ in range(5):
        oldest = queue.dispatcher.oldest()[reporter].id
        sys.setprofile(count)
        queue.finished(reporter, (oldest,), 1.0)
        reports.look()
        sys.setprofile(outer)
    return calls / 5


@pytest.mark.parametrize(
    "when", ["one has data left", "the next pass", "others hold what may not be moved"]
)
def test_a_report_costs_the_same_with_many_workers_after_data_ended(when: str):
    few, many = (calls_of_a_report(num, when) for num in (10, 200))
    assert many < 1.2 * few
