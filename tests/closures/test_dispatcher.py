"""How far ahead closures are sent, and what is asked back; order and losses: ``queue_machine``."""

from __future__ import annotations

import math

import pytest

from psync.closures import dispatcher
from psync.closures.closure import Closure, State, move
from psync.closures.dispatcher import (
    Dispatch,
    DispatchAction,
    Dispatcher,
    GiveBack,
    WorkerStatistics,
)
from psync.errors import RemoteProtocolError

SLOW, FAST = 1.0, 10e-6  # seconds per closure: one is held ahead, and as many as allowed


def sent(actions: list[DispatchAction]) -> dict[str, list[int]]:
    """The ids of the closures dispatched, by worker."""
    return {a.worker: [c.id for c in a.closures] for a in actions if isinstance(a, Dispatch)}


def asked(actions: list[DispatchAction]) -> dict[str, list[int]]:
    """The ids of the closures asked back, by worker."""
    return {a.worker: list(a.ids) for a in actions if isinstance(a, GiveBack)}


class Bench:
    """A dispatcher whose closures are called by their ids."""

    def __init__(self, *workers: str) -> None:
        self.dispatcher = Dispatcher()
        self.closures: dict[int, Closure] = {}
        for worker in workers:
            self.dispatcher.join(worker)

    def add(self, *ids: int, inline_bytes: int = 0) -> None:
        for closure_id in ids:
            closure = self.closures[closure_id] = Closure(closure_id, inline_bytes=inline_bytes)
            move(closure, State.QUEUED)
            self.dispatcher.queued.add(closure)

    def decide(self, reporter: str | None = None) -> list[DispatchAction]:
        return self.dispatcher.decide(reporter)

    def finish(self, worker: str, *ids: int, mean_s: float = SLOW) -> list[DispatchAction]:
        for closure in self.dispatcher.take_finished(worker, ids, mean_s):
            move(closure, State.FINISHED)
        return self.decide(worker)

    def lose(self, worker: str) -> list[DispatchAction]:
        for closure in self.dispatcher.leave(worker):
            closure.lost_on += (worker,)
            move(closure, State.QUEUED)
            self.dispatcher.queued.add(closure)
        return self.decide()

    def give_back(self, worker: str, *ids: int) -> list[DispatchAction]:
        for closure in self.dispatcher.take_back(worker, ids):
            move(closure, State.QUEUED)
            self.dispatcher.queued.add(closure)
        return self.decide()

    def held(self) -> dict[str, list[int]]:
        return {worker: [c.id for c in closures] for worker, closures in self.dispatcher.held()}


def fast_bench(*workers: str, num: int) -> Bench:
    """Workers known to be fast, which hold nothing yet, and closures 100 to 100 + num queued."""
    bench = Bench(*workers)
    for index, worker in enumerate(workers):
        bench.add(index)
        bench.decide()
        bench.finish(worker, index, mean_s=FAST)
    bench.add(*range(100, 100 + num))
    return bench


# --- idle workers ----------------------------------------------------------------------------


def test_each_idle_worker_gets_one_closure_in_order() -> None:
    bench = Bench("a", "b", "c")
    bench.add(1, 2)
    assert bench.decide() == [
        Dispatch("a", (bench.closures[1],)),
        Dispatch("b", (bench.closures[2],)),
    ]
    closure = bench.closures[1]
    assert (closure.state, closure.worker) == (State.HELD, "a")
    assert bench.dispatcher.num_in_flight == 2
    assert bench.dispatcher.num_queued == 0


def test_worker_idle_for_longest_is_served_first() -> None:
    bench = Bench("a", "b")
    bench.add(1, 2)
    bench.decide()
    bench.finish("b", 2)
    bench.finish("a", 1)
    bench.add(3)
    assert sent(bench.decide()) == {"b": [3]}


# --- held ahead ------------------------------------------------------------------------------


def test_nothing_is_held_ahead_while_no_more_are_queued_than_there_are_workers() -> None:
    bench = Bench("a", "b")
    bench.add(1, 2, 3, 4)
    assert sent(bench.decide()) == {"a": [1], "b": [2]}
    assert bench.dispatcher.num_queued == 2


def test_one_is_held_ahead_on_each_worker_before_anything_is_measured() -> None:
    bench = Bench("a", "b")
    bench.add(*range(1, 11))
    assert sent(bench.decide()) == {"a": [1, 3], "b": [2, 4]}


def test_fast_closures_are_held_as_far_ahead_as_allowed() -> None:
    bench = fast_bench("a", num=200)
    assert sent(bench.decide()) == {"a": list(range(100, 165))}  # one to run, 64 ahead


@pytest.mark.parametrize(
    ("mean_s", "ahead"),
    [(0.0, 64), (5e-2 / 64, 64), (2.5e-3, 20), (2.5e-2, 2), (5e-2, 1), (3600, 1)],
)
def test_depth_is_the_target_divided_by_the_mean_duration(mean_s: float, ahead: int) -> None:
    bench = Bench("a")
    bench.add(1)
    bench.decide()
    bench.finish("a", 1, mean_s=mean_s)
    assert bench.dispatcher.statistics() == (WorkerStatistics("a", 0, 1, ahead, mean_s),)


def test_a_report_of_many_closures_weighs_as_much_as_one_of_each() -> None:
    means = []
    for together in (True, False):
        bench = Bench("a")
        bench.add(*range(1, 6))
        bench.decide()
        bench.finish("a", 1, mean_s=FAST)
        held = bench.held()["a"]
        assert held == [2, 3, 4]
        for ids in [held] if together else [[closure_id] for closure_id in held]:
            bench.finish("a", *ids, mean_s=1.0)
        (worker,) = bench.dispatcher.statistics()
        means.append(worker.mean_s)
    assert means == [pytest.approx(1.0 - (1.0 - FAST) * 0.75**3)] * 2


def test_report_of_nothing_leaves_the_pace_as_it_was() -> None:
    bench = Bench("a")
    assert bench.dispatcher.take_finished("a", (), 5.0) == []
    assert bench.dispatcher.statistics() == (WorkerStatistics("a", 0, 0, 1, None),)
    bench.add(1, 2)
    assert sent(bench.decide()) == {"a": [1]}  # idle once, not twice


def test_surplus_is_shared_among_the_workers() -> None:
    bench = fast_bench("a", "b", num=25)
    # One each, 23 left, of which 2 stay queued: half of 21 to one, the rest to the other.
    batches = sent(bench.decide())
    assert {worker: len(ids) for worker, ids in batches.items()} == {"a": 12, "b": 11}
    assert bench.dispatcher.num_queued == 2


def test_worker_is_filled_up_again_when_half_of_what_it_holds_ahead_is_gone() -> None:
    bench = fast_bench("a", num=500)
    bench.decide()
    assert sent(bench.finish("a", *range(100, 131), mean_s=FAST)) == {}  # 33 of 64 ahead left
    assert sent(bench.finish("a", 131, mean_s=FAST)) == {"a": list(range(165, 197))}


def test_only_the_worker_that_reports_is_filled_up() -> None:
    bench = fast_bench("a", "b", num=200)
    bench.decide()
    held = bench.held()
    bench.finish("b", *held["b"][:5], mean_s=FAST)  # has room, and not half of it
    assert list(sent(bench.finish("a", *held["a"][:40], mean_s=FAST))) == ["a"]


def test_bytes_ahead_of_the_running_closure_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_AHEAD_BYTES", 100)
    bench = fast_bench("a", num=0)
    bench.add(1, inline_bytes=1000)
    bench.add(*range(2, 10), inline_bytes=30)
    assert sent(bench.decide()) == {"a": [1, 2, 3, 4]}
    # The one that runs now is no longer ahead.
    assert sent(bench.finish("a", 1, mean_s=FAST)) == {"a": [5]}
    # Closures stay in order: a small one does not overtake one that does not fit.
    bench.add(10, inline_bytes=101)
    bench.add(11, 12)
    assert sent(bench.finish("a", 2, 3, 4, 5, mean_s=FAST)) == {"a": [6, 7, 8, 9]}
    assert sent(bench.finish("a", 6, mean_s=FAST)) == {}
    assert sent(bench.finish("a", 7, 8, 9, mean_s=FAST)) == {"a": [10, 11]}


# --- give back -------------------------------------------------------------------------------


def two_workers_of_which_one_is_idle(num_ahead: int = 3) -> tuple[Bench, list[DispatchAction]]:
    """Worker "a" holds 100 and ``num_ahead`` behind it; "b" joins and there is nothing for it."""
    bench = fast_bench("a", num=num_ahead + 2)
    bench.decide()
    rest = [100 + num_ahead + 1]
    bench.dispatcher.join("b")
    bench.decide()
    return bench, bench.finish("b", *rest)


def test_worker_that_holds_closures_ahead_is_asked_for_the_oldest_half_when_another_is_idle() -> (
    None
):
    bench, actions = two_workers_of_which_one_is_idle(num_ahead=3)
    assert bench.held() == {"a": [100, 101, 102, 103]}
    assert actions == [GiveBack("a", (101, 102))]
    assert bench.decide() == []  # not again while that is not answered


def test_what_is_kept_had_started_and_is_not_asked_for_again() -> None:
    bench, _ = two_workers_of_which_one_is_idle()
    assert bench.give_back("a") == [GiveBack("a", (103,))]
    assert bench.give_back("a") == []  # all have started: the asking ends
    assert bench.decide() == []
    assert sent(bench.finish("a", 100, 101, 102, 103)) == {}


def test_what_comes_back_may_be_sent_again_and_what_is_kept_has_started() -> None:
    bench, _ = two_workers_of_which_one_is_idle(num_ahead=3)
    assert sent(bench.give_back("a", 101)) == {"b": [101]}
    assert [bench.closures[number].known_started for number in (101, 102)] == [False, True]


def test_all_that_may_not_have_started_is_asked_back_where_no_answer_is_owed() -> None:
    bench = fast_bench("a", num=5)
    bench.decide()
    assert bench.dispatcher.ask_back() == [GiveBack("a", (101, 102, 103))]
    assert bench.dispatcher.ask_back() == []
    bench, _ = two_workers_of_which_one_is_idle()
    assert bench.dispatcher.ask_back() == []  # "a" owes an answer, "b" has nothing


def test_closure_that_ended_in_another_way_makes_room_and_says_nothing_of_the_pace() -> None:
    bench = Bench("a")
    bench.add(*range(1, 11))
    bench.decide()
    assert bench.dispatcher.take("a", (1,), "failed") == [bench.closures[1]]
    assert bench.dispatcher.num_in_flight == 1
    assert sent(bench.decide("a")) == {"a": [3]}
    assert bench.dispatcher.statistics() == (WorkerStatistics("a", 2, 0, 1, None),)


# --- reports that make no sense --------------------------------------------------------------


@pytest.mark.parametrize("mean_s", [-1.0, math.inf, math.nan])
def test_mean_that_is_no_duration_is_refused_and_nothing_is_taken(mean_s: float) -> None:
    bench = Bench("a")
    bench.add(1)
    bench.decide()
    with pytest.raises(
        RemoteProtocolError, match=rf"^a reported {mean_s} s per closure, expected a finite durat"
    ):
        bench.dispatcher.take_finished("a", (1,), mean_s)
    assert bench.held() == {"a": [1]}


def test_worker_that_leaves_gets_nothing_more_and_is_asked_for_nothing() -> None:
    bench = Bench("a", "b")
    bench.add(0, 1, 2, 3, 4)
    bench.decide()
    assert bench.held() == {"a": [0, 2], "b": [1]}
    bench.dispatcher.retire("a")
    bench.dispatcher.retire("a")  # again: nothing new
    for closure_id in (1, 3, 4):
        assert asked(bench.finish("b", closure_id)) == {}, "a gives back unasked"
    assert bench.held() == {"a": [0, 2]}
    assert sent(bench.give_back("a", 2)) == {"b": [2]}
    assert bench.finish("a", 0) == []
    bench.add(5, 6)
    assert bench.decide() == []
    assert sent(bench.finish("b", 2)) == {"b": [5]}
    assert bench.lose("a") == []
