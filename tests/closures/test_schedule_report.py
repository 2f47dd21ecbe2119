"""Which states are reported, and when."""

from __future__ import annotations

import sys

import pytest

from psync.closures.closure import Closure
from psync.closures.membership import RETURN_S, SETTLE_S, ScheduleReports, ScheduleState
from psync.closures.queue import ClosureQueue
from psync.errors import EndOfData

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

    def news(self) -> ScheduleState | None:
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
    assert world.news() == ScheduleState((), (A, B, C), False, ())
    assert world.news() is None


def test_a_ps_0_that_was_started_anew_is_told_all_again():
    world = World(A)
    first = world.news()
    assert world.news() is None
    world.reports.tell_all()
    assert world.news() == first


def test_workers_take_part_under_their_incarnation_and_in_the_order_of_the_cluster():
    world = World()
    world.join(C, 9)
    world.join(A, 7)
    assert world.news() == ScheduleState(((A, 7), (C, 9)), (B,), False, ())
    world.lose(A)
    assert world.news() == ScheduleState(((C, 9),), (A, B), False, ())
    world.join(A, 8)
    assert world.news() == ScheduleState(((A, 8), (C, 9)), (B,), False, ())


def test_a_closure_that_no_worker_has_is_queued():
    world = World(A, B)
    world.queue.pause()
    world.schedule(0)
    assert world.news() == ScheduleState(((A, 7), (B, 7)), (C,), True, ())


def test_a_closure_held_behind_others_is_queued():
    world = World(A, B)
    world.schedule(*range(6))
    while world.queue.dispatcher.num_queued:
        (worker, closure), *_ = world.queue.in_flight()
        world.finish(worker, closure.id)
    assert world.queue.dispatcher.num_in_flight > 2
    assert world.news().queued


def test_the_last_closures_are_named_with_their_workers():
    world = World(A, B)
    world.schedule(0, 1)
    assert world.news() == ScheduleState(((A, 7), (B, 7)), (C,), False, ((0, A), (1, B)))
    world.finish(A, 0)
    assert world.news().in_flight == ((1, B),)
    world.finish(B, 1)
    assert world.news().in_flight == ()


def test_a_closure_that_waits_for_a_value_does_not_count():
    world = World(A, B)
    (first,) = world.schedule(0)
    world.schedule(1, inputs=(first,))
    state = world.news()
    assert not state.queued
    assert state.in_flight == ((0, A),)
    world.finish(A, 0)
    state = world.news()
    assert [closure for closure, _ in state.in_flight] == [1]


def test_a_full_queue_is_not_looked_at_closer():
    world = World(A, B)
    world.schedule(*range(50))
    assert world.news().queued
    for closure in range(40):
        worker = next(w for w, c in world.queue.in_flight() if c.id == closure)
        world.finish(worker, closure)
        assert not world.reports.look()


def test_a_worker_that_joins_a_full_queue_is_news():
    world = World(A)
    world.schedule(*range(50))
    assert world.news().queued
    world.join(B, 7)
    assert world.here() == [A, B]
    world.lose(A)
    assert world.here() == [B]


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


def test_all_are_back_when_the_only_one_with_data_is_lost():
    world = World(A, B)
    world.schedule(*range(9))
    world.exhaust(A, 0)
    assert world.here() == [B]
    world.lose(B)
    assert world.here() == [A]


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
    assert world.reports.decide(5.0).in_flight == ((0, A),)
    world.finish(A, 0)
    assert world.reports.look()
    assert world.reports.decide(6.0) is None
    assert world.reports.next_deadline() == 6.0 + SETTLE_S
    assert world.reports.decide(6.0 + SETTLE_S / 2) is None
    assert world.reports.next_deadline() == 6.0 + SETTLE_S  # counted from the first news
    assert world.reports.decide(6.0 + SETTLE_S).in_flight == ()
    assert world.reports.next_deadline() is None


def test_closures_one_by_one_are_not_worth_a_report_each():
    world = World(A, B)
    world.reports.decide(4.0)
    world.schedule(0)
    assert world.reports.decide(5.0).in_flight == ((0, A),)
    for closure, worker in enumerate((A, B, A, B)):
        world.finish(worker, closure)
        world.schedule(closure + 1)
        if world.reports.look():  # the first time only
            assert closure == 0
            assert world.reports.decide(5.001) is None
    assert world.reports.next_deadline() == 5.0 + SETTLE_S  # counted from the last report
    assert world.reports.decide(5.0 + SETTLE_S).in_flight == ((4, A),)


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


def test_a_moment_between_two_closures_is_not_reported():
    world = World(A, B)
    world.schedule(0, 1)
    assert world.reports.decide(5.0).in_flight == ((0, A), (1, B))
    world.finish(A, 0)
    assert world.reports.decide(6.0) is None
    world.schedule(2)
    assert world.reports.decide(6.0 + SETTLE_S).in_flight == ((2, A), (1, B))
    assert world.reports.next_deadline() is None


def test_what_is_as_it_was_is_not_reported():
    world = World(A, B)
    world.schedule(*range(9))
    assert world.reports.decide(5.0).queued
    world.lose(B)
    assert world.reports.decide(6.0) is None  # not yet
    world.join(B, 7)
    assert world.reports.decide(6.001) is None
    assert world.reports.next_deadline() is None


def test_a_full_queue_is_more_than_any_closures():
    few = ScheduleState(((A, 7),), (), False, ((0, A),))
    other = ScheduleState(((A, 7),), (), False, ((1, A),))
    full = ScheduleState(((A, 7),), (), True, ())
    newer = ScheduleState(((A, 8),), (), False, ())
    assert full.is_urgent_after(few)
    assert newer.is_urgent_after(full)
    assert not few.is_urgent_after(full)
    assert not other.is_urgent_after(few)
    assert other.adds_to(few)
    assert not few.adds_to(few)
    assert not few.adds_to(full)


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
    assert (state.workers, state.missing) == (((A, 7), (B, 7)), (C,))
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
