"""What follows for others when a closure ends: chains of inputs, errors, what has to stop."""

from __future__ import annotations

import pytest

from psync.closures.closure import Closure, Event, Replica, State
from psync.closures.dispatcher import Dispatch, Dispatcher
from psync.closures.identities import Identities
from psync.closures.open import Cancel, OpenClosures, Settle, without_input
from psync.errors import ClosureCancelled, ClosureInputError, EndOfData


class Bench:
    """Open closures, and the workers "a" and "b"."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.dispatcher.join("a")
        self.dispatcher.join("b")
        self.open = OpenClosures(self.dispatcher, Identities())

    def queue(self, *ids: int) -> list[Closure]:
        closures = [Closure(closure_id) for closure_id in ids]
        for closure in closures:
            self.open.queue(closure)
        return closures

    def hold(self, *ids: int) -> list[Closure]:
        """Closures on the workers: the first on "a", the second on "b"."""
        closures = self.queue(*ids)
        self.dispatcher.decide()
        assert all(closure.state is State.HELD for closure in closures)
        return closures

    def waiting(self, closure_id: int, *inputs: Closure) -> Closure:
        closure = Closure(closure_id, dependencies=inputs)
        self.open.wait_or_queue(closure)
        return closure

    def take(self, *closures: Closure) -> list[Closure]:
        """The same closures, as their workers report them."""
        return [self.dispatcher.take(c.worker, (c.id,), "ended")[0] for c in closures]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_queued_is_open_until_it_has_its_value(bench: Bench) -> None:
    one, two = bench.hold(0, 1)
    assert (len(bench.open), bench.open.get(0), bench.open.last_id) == (2, one, 1)
    bench.open.finish(bench.take(one))
    assert bench.open.get(0) is None
    assert bench.open.news() == [Settle((one,))]
    assert bench.open.news() == []
    assert bench.open.totals == {State.FINISHED: 1}
    assert bench.open.low_water() == two.id


def test_low_water_is_the_next_id_when_all_are_final(bench: Bench) -> None:
    assert bench.open.low_water() == 0
    one, two = bench.hold(3, 4)
    bench.open.finish(bench.take(two))
    assert bench.open.low_water() == 3
    bench.open.finish(bench.take(one))
    assert bench.open.low_water() == 5


def test_a_closure_waits_for_its_input_and_is_queued_when_that_has_a_value(bench: Bench) -> None:
    (source,) = bench.hold(0)
    waiting = bench.waiting(1, source)
    assert (waiting.state, bench.dispatcher.num_queued) == (State.WAITING, 0)
    bench.open.finish(bench.take(source))
    assert waiting.state is State.QUEUED
    assert bench.dispatcher.decide() == [Dispatch("b", (waiting,))]
    assert bench.waiting(2, source).state is State.QUEUED  # its input is there


def test_what_comes_back_is_queued_again_and_what_was_to_stop_ends(bench: Bench) -> None:
    one, two = bench.hold(0, 1)
    bench.open.ask_to_stop(two)
    assert bench.open.news() == [Cancel("b", (1,))]
    assert bench.open.come_back(bench.take(one, two), Event.GIVE_BACK) == 1
    assert (one.state, two.state) == (State.QUEUED, State.CANCELLED)
    assert isinstance(two.error, ClosureCancelled)
    assert bench.open.news() == [Settle((two,))]
    assert bench.open.errors.pending == []


def test_an_error_ends_all_that_needed_the_value_and_everything_else(bench: Bench) -> None:
    source, running = bench.hold(0, 1)
    (queued,) = bench.queue(2)
    needs = bench.waiting(3, source)
    needs_that = bench.waiting(4, needs)
    error = ValueError("wrong")
    bench.open.end(*bench.take(source), Event.FAIL, error)
    assert [c.state for c in (source, needs, needs_that)] == [State.FAILED] * 3
    assert isinstance(needs_that.error, ClosureInputError)
    assert needs_that.error.__cause__ is error
    assert queued.state is State.CANCELLED
    assert bench.dispatcher.num_queued == 0
    assert bench.open.news() == [
        Settle((source, needs, needs_that, queued)),
        Cancel("b", (running.id,)),
    ]
    assert bench.open.errors.pending == [error]
    assert bench.open.errors.ending == "closure 0 failed on a"
    bench.open.end(*bench.take(running), Event.FAIL, KeyError("too"))
    assert len(bench.open.errors.pending) == 2
    assert bench.open.errors.ending == "closure 0 failed on a"


def test_an_error_of_a_closure_that_was_never_sent_names_no_worker(bench: Bench) -> None:
    (source,) = bench.queue(0)
    needs = bench.waiting(1, source)
    bench.open.end(source, Event.CANCEL, ClosureCancelled("not wanted"))
    assert needs.state is State.FAILED
    assert bench.open.errors.ending == "closure 1 failed"


def test_the_end_of_data_ends_what_needed_the_value_and_nothing_else(bench: Bench) -> None:
    source, running = bench.hold(0, 1)
    needs = bench.waiting(2, source)
    error = EndOfData("no more")
    bench.open.end(*bench.take(source), Event.END_OF_DATA, error)
    assert (needs.state, running.state) == (State.EXHAUSTED, State.HELD)
    assert bench.open.errors.ending is None
    late = Closure(3, dependencies=(source,))
    bench.open.end(late, *without_input(late, source))
    assert late.state is State.EXHAUSTED
    assert bench.open.errors.collect() == (error, ())


def test_how_a_replica_ends_concerns_nobody(bench: Bench) -> None:
    replica = Replica(0)
    replica.state = State.QUEUED
    bench.dispatcher.give("a", replica)
    bench.open.add(replica)
    (queued,) = bench.queue(1)
    bench.open.end(*bench.take(replica), Event.FAIL, ValueError("wrong"))
    assert bench.open.news() == [Settle((replica,))]
    assert bench.open.errors.pending == []
    assert queued.state is State.QUEUED


def test_everything_is_ended_once_and_nobody_is_asked_twice(bench: Bench) -> None:
    (running,) = bench.hold(0)
    bench.open.ask_to_stop(running)
    bench.open.end_all("the end")
    bench.open.end_all("another end")
    assert bench.open.errors.ending == "the end"
    assert bench.open.news() == [Cancel("a", (0,))]
