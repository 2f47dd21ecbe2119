"""The closure queue: order and outcomes, errors, inputs, cancellation, and what join is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.closures.closure import Closure
from psync.closures.dispatcher import Dispatch
from psync.closures.queue import (
    MAX_LOSSES,
    RECENT_LOSSES,
    Action,
    Cancel,
    ClosureQueue,
    Losses,
    Settle,
)
from psync.errors import (
    ClosureCancelled,
    ClosureError,
    ClosureInputError,
    EndOfData,
    ParameterServerLost,
    RemoteProtocolError,
    WorkerLost,
)

SLOW = 1.0  # seconds per closure: one is held ahead


class Bench:
    """A queue whose closures are called by their ids."""

    def __init__(self, *workers: str, **options: int) -> None:
        self.queue = ClosureQueue(**options)  # type: ignore[arg-type]
        self.closures: dict[int, Closure] = {}
        for worker in workers:
            self.queue.worker_joined(worker)

    def schedule(self, closure_id: int, *inputs: int, name: str = "step") -> list[Action]:
        closure = self.closures[closure_id] = Closure(
            closure_id, name=name, dependencies=[self.closures[i] for i in inputs]
        )
        return self.queue.schedule(closure)

    def run(self, *ids: int) -> list[Action]:
        """Schedule closures without inputs and dispatch them."""
        for closure_id in ids:
            assert self.schedule(closure_id) == []
        return self.queue.dispatch()

    def dispatch(self, worker: str, *ids: int) -> Dispatch:
        """What the action of sending these closures looks like."""
        return Dispatch(worker, tuple(self.closures[i] for i in ids))

    def settle(self, *ids: int) -> Settle:
        return Settle(tuple(self.closures[i] for i in ids))

    def states(self) -> dict[int, str]:
        return {closure_id: closure.state.value for closure_id, closure in self.closures.items()}

    def error(self, closure_id: int) -> BaseException:
        error = self.closures[closure_id].error
        assert error is not None
        return error


# --- the ordinary life -----------------------------------------------------------------------


@pytest.mark.parametrize("closure_id", [1, 9])
def test_report_about_a_closure_that_the_worker_does_not_hold_is_refused(closure_id: int) -> None:
    bench = Bench("a", "b")
    bench.run(0, 1)
    bench.queue.cancel(1)
    tail = f"closure {closure_id}, which it does not hold$"
    with pytest.raises(RemoteProtocolError, match=f"^a finished {tail}"):
        bench.queue.finished("a", (0, closure_id), SLOW)
    with pytest.raises(RemoteProtocolError, match=f"^a failed {tail}"):
        bench.queue.failed("a", closure_id, ValueError())
    with pytest.raises(RemoteProtocolError, match=f"^a met the end of data in {tail}"):
        bench.queue.end_of_data("a", closure_id, EndOfData())
    with pytest.raises(RemoteProtocolError, match=f"^a cancelled {tail}"):
        bench.queue.cancelled("a", closure_id)
    with pytest.raises(RemoteProtocolError, match=f"^a gave back {tail}"):
        bench.queue.given_back("a", (closure_id,))
    assert bench.states() == {0: "held", 1: "cancelling"}


# --- workers that are lost -------------------------------------------------------------------


def test_closures_of_a_lost_worker_run_elsewhere_before_the_others() -> None:
    bench = Bench("a", "b")
    bench.run(*range(6))
    assert bench.queue.in_flight() == [
        ("a", bench.closures[0]),
        ("a", bench.closures[2]),
        ("b", bench.closures[1]),
        ("b", bench.closures[3]),
    ]
    assert bench.queue.worker_lost("a") == []
    assert bench.states() == {0: "queued", 1: "held", 2: "queued", 3: "held"} | dict.fromkeys(
        (4, 5), "queued"
    )
    assert bench.queue.finished("b", (1,), SLOW) == [bench.settle(1)]
    assert bench.queue.finished("b", (3,), SLOW) == [bench.settle(3), bench.dispatch("b", 0)]
    assert len(bench.closures[0].lost_on) == 1
    assert bench.queue.statistics().put_back == 2


@pytest.mark.promise("closures.killer-fails")
def test_closure_that_was_lost_with_three_workers_fails_and_names_them() -> None:
    bench = Bench("a")
    bench.run(0)
    bench.queue.worker_lost("a")
    bench.queue.worker_joined("b")
    bench.queue.worker_lost("b")
    bench.queue.worker_joined("a")
    assert bench.queue.worker_lost("a") == [bench.settle(0)]
    error = bench.error(0)
    assert type(error) is ClosureError
    assert str(error) == (
        "closure 0 (step) was lost with its worker 3 times: a, b, a\nhint: it probably kills its "
        "process, or blocks its event loop. The log names the signal that killed a worker. SIGSEGV "
        "or SIGBUS: usually a write, through another library such as torch.from_numpy, to values "
        "that were pulled, which are read-only: pull with copy=True. SIGKILL: look for lack of "
        "memory. Long computations belong in a plain step function, or in a thread"
    )
    assert type(error.__cause__) is WorkerLost
    assert str(error.__cause__) == "a was lost while it held closure 0 (step)"
    assert bench.queue.collect_error() == (error, ())


def kill_all(bench: Bench, rounds: int, workers: str) -> None:
    for _ in range(rounds):
        for worker in workers:
            bench.queue.worker_lost(worker)
        for worker in workers:
            bench.queue.worker_joined(worker)


def test_while_every_worker_is_killed_no_closure_is_called_a_killer() -> None:
    bench = Bench(*"abc")
    bench.run(*range(6))
    bench.queue.finished("a", (0,), SLOW)
    kill_all(bench, 8, "abc")
    assert len(bench.closures[1].lost_on) == 8
    assert not bench.queue.pending_errors


def test_workers_that_die_idle_show_that_closures_are_lost_by_chance() -> None:
    bench = Bench("a", "b", max_losses=1)
    for worker in "ba":
        bench.queue.worker_lost(worker)
    bench.queue.worker_joined("a")
    bench.run(0)
    bench.queue.worker_lost("a")
    assert len(bench.closures[0].lost_on) == 1
    assert not bench.queue.pending_errors


def test_a_step_that_crashes_in_each_call_is_found_at_once() -> None:
    bench = Bench(*"abc")
    bench.run(*range(6))
    kill_all(bench, 2, "abc")
    assert not bench.queue.pending_errors
    bench.queue.worker_lost("a")
    (error,) = bench.queue.pending_errors
    assert "was lost with its worker 3 times" in str(error)


@pytest.mark.promise("closures.killer-found", "closures.not-blamed")
@given(st.lists(st.sampled_from(["killer", "idle", "another"])), st.booleans())
def test_a_killer_is_found_within_fifteen_losses_whatever_else_dies(
    events: list[str], others_end: bool
) -> None:
    losses, killer, other = Losses(MAX_LOSSES), Closure(0, name="step"), Closure(1, name="step")
    if others_end:
        losses.proven.add(other.name)

    def lose(event: str) -> None:
        losses.lost({"killer": [killer], "idle": [], "another": [other]}[event])
        if event == "killer":
            killer.lost_on += ("a",)

    for event in events:
        lose(event)
    if len(killer.lost_on) < MAX_LOSSES:
        assert not losses.is_killer(killer)
    elif len(killer.lost_on) >= MAX_LOSSES + RECENT_LOSSES or set(events) == {"killer"}:
        assert losses.is_killer(killer)
    killer.lost_on = ()
    for _ in range(8):  # nothing else dies any more
        lose("killer")
    assert losses.is_killer(killer)


def test_worker_that_takes_several_closures_with_it_too_often_fails_one_of_them() -> None:
    bench = Bench("a", max_losses=1)
    bench.run(0, 1, 2, 3)
    assert bench.queue.in_flight() == [("a", bench.closures[0]), ("a", bench.closures[1])]
    assert bench.queue.worker_lost("a") == [bench.settle(0, 1, 2, 3)]
    assert bench.states() == {0: "failed", 1: "cancelled", 2: "cancelled", 3: "cancelled"}
    assert str(bench.error(1)) == (
        "closure 1 (step) was cancelled: closure 0 (step) failed on a\n"
        "hint: schedule it again after join has raised the error"
    )


def test_closure_whose_worker_is_gone_for_a_known_reason_runs_again_and_no_loss_is_counted() -> (
    None
):
    bench = Bench("a", max_losses=1)
    bench.run(0)
    assert bench.queue.worker_lost("a", blame=False) == []
    assert bench.states() == {0: "queued"}
    assert len(bench.closures[0].lost_on) == 0
    assert bench.closures[0].times_back == 1
    assert bench.queue.statistics().put_back == 1
    assert bench.queue.worker_joined("b") == [bench.dispatch("b", 0)]
    assert bench.queue.worker_lost("b") == [bench.settle(0)], "blamed, it is given up"


# --- errors ----------------------------------------------------------------------------------


def test_first_error_cancels_what_is_queued_and_asks_for_the_rest_to_be_stopped() -> None:
    bench = Bench("a", "b")
    bench.run(*range(8))
    assert bench.queue.in_flight() == [
        ("a", bench.closures[0]),
        ("a", bench.closures[2]),
        ("b", bench.closures[1]),
        ("b", bench.closures[3]),
    ]
    error = ValueError("boom")
    assert bench.queue.failed("a", 0, error) == [
        bench.settle(0, 4, 5, 6, 7),
        Cancel("a", (2,)),
        Cancel("b", (1, 3)),
    ]
    assert bench.error(0) is error
    assert isinstance(bench.error(4), ClosureCancelled)
    assert bench.queue.pending_errors
    assert not bench.queue.ready_to_raise


@pytest.mark.promise("errors.first-raised-once")
def test_error_is_raised_when_nothing_runs_any_more_and_only_once() -> None:
    bench = Bench("a", "b")
    bench.run(0, 1, 2, 3, 4)
    error = ValueError("boom")
    bench.queue.failed("a", 0, error)
    assert bench.queue.pending_errors == [error]
    assert not bench.queue.is_settled(bench.queue.next_id)
    assert bench.queue.cancelled("b", 1) == [bench.settle(1)]
    assert not bench.queue.ready_to_raise
    assert bench.queue.cancelled("a", 2) == [bench.settle(2)]
    assert bench.queue.ready_to_raise
    assert bench.queue.is_settled(bench.queue.next_id)
    assert bench.queue.collect_error() == (error, ())
    assert bench.queue.pending_errors == []
    assert not bench.queue.pending_errors
    assert not bench.queue.ready_to_raise
    assert bench.queue.is_settled(bench.queue.next_id)
    assert bench.queue.collect_error() is None


def test_closure_in_flight_ends_without_a_value_after_an_error() -> None:
    """Some ps tasks refuse its updates by then: a value would say that it was done."""
    bench = Bench("a", "b", "c", "d")
    bench.run(0, 1, 2, 3)
    first, second = ValueError("first"), KeyError("second")
    bench.queue.failed("a", 0, first)
    assert bench.queue.finished("b", (1,), SLOW) == [bench.settle(1)]
    assert bench.queue.failed("c", 2, second) == [bench.settle(2)]
    assert bench.queue.cancelled("d", 3) == [bench.settle(3)]
    assert bench.states() == {0: "failed", 1: "cancelled", 2: "failed", 3: "cancelled"}
    assert bench.error(2) is second
    assert bench.queue.collect_error() == (first, (second,))


# Every order of reports, losses and cancellations is the machine's: ``queue_machine``.


# --- inputs ----------------------------------------------------------------------------------


def test_closures_that_needed_the_value_of_a_failed_one_fail_with_its_error() -> None:
    bench = Bench("a", "b")
    bench.run(0, 1)
    bench.schedule(2, 0)
    bench.schedule(3, 2)
    bench.schedule(4, 1)
    error = ValueError("boom")
    assert bench.queue.failed("a", 0, error) == [bench.settle(0, 2, 3, 4), Cancel("b", (1,))]
    assert bench.states() == {
        0: "failed",
        1: "cancelling",
        2: "failed",
        3: "failed",
        4: "cancelled",
    }
    for closure_id, source in ((2, 0), (3, 2)):
        inner = bench.error(closure_id)
        assert type(inner) is ClosureInputError
        assert str(inner) == (
            f"closure {closure_id} (step) was not run: its input, closure {source} (step), "
            "ended with ValueError: boom"
        )
        assert inner.__cause__ is error  # never another ClosureInputError
    bench.queue.finished("b", (1,), SLOW)
    assert bench.queue.collect_error() == (error, ())  # told once, not once per closure


def test_chain_of_inputs_may_be_long() -> None:
    bench = Bench("a")
    bench.run(0)
    for closure_id in range(1, 5000):
        bench.schedule(closure_id, closure_id - 1)
    assert 4999 in bench.queue.open
    bench.queue.failed("a", 0, ValueError("boom"))
    assert bench.queue.low_water() == 5000
    assert bench.queue.statistics().failed == 5000


def test_error_of_an_input_reported_by_a_worker_is_not_nested_either() -> None:
    bench = Bench("a")
    bench.run(0)
    bench.schedule(1, 0)
    root = OSError("no such file")
    reported = ClosureInputError("the per-worker dataset failed")
    reported.__cause__ = root
    bench.queue.failed("a", 0, reported)
    assert bench.error(1).__cause__ is root


# --- end of data -----------------------------------------------------------------------------


def test_end_of_data_cancels_nobody_and_is_raised_once_when_all_is_done() -> None:
    bench = Bench("a", "b")
    bench.run(0, 1, 2)
    end = EndOfData("the dataset of a has ended")
    assert bench.queue.end_of_data("a", 0, end) == [bench.settle(0), bench.dispatch("a", 2)]
    assert bench.states() == {0: "exhausted", 1: "held", 2: "held"}
    assert bench.error(0) is end
    assert not bench.queue.pending_errors
    assert not bench.queue.is_settled(3)
    bench.queue.finished("b", (1,), SLOW)
    bench.queue.end_of_data("a", 2, EndOfData("again"))
    assert bench.queue.is_settled(3)
    assert bench.queue.collect_error() == (end, ())
    assert bench.queue.collect_error() is None
    assert bench.queue.statistics().exhausted == 2


def test_closure_that_needed_a_value_that_never_came_for_lack_of_data_cancels_nobody() -> None:
    bench = Bench("a", "b")
    bench.run(0, 1)
    bench.schedule(2, 0)
    end = EndOfData("the dataset of a has ended")
    assert bench.queue.end_of_data("a", 0, end) == [bench.settle(0, 2)]
    assert bench.states() == {0: "exhausted", 1: "held", 2: "exhausted"}
    assert isinstance(bench.error(2), ClosureInputError)
    assert bench.error(2).__cause__ is end
    assert not bench.queue.pending_errors
    bench.queue.finished("b", (1,), SLOW)
    assert bench.queue.collect_error() == (end, ())
    bench.schedule(3, 2)
    assert bench.states()[3] == "exhausted"
    assert bench.queue.collect_error() == (end, ())


# --- cancelling one --------------------------------------------------------------------------


def test_closure_in_flight_is_asked_to_stop_once_and_ends_when_its_worker_says_so() -> None:
    bench = Bench("a")
    bench.run(0, 1)
    assert bench.queue.cancel(0) == [Cancel("a", (0,))]
    assert bench.queue.cancel(0) == []
    assert bench.queue.cancelled("a", 0) == [bench.settle(0), bench.dispatch("a", 1)]
    assert str(bench.error(0)) == "closure 0 (step) was cancelled"
    assert not bench.queue.pending_errors


def test_closure_that_needed_a_cancelled_value_fails_and_ends_everything() -> None:
    bench = Bench("a")
    bench.run(0, 1)
    bench.schedule(2, 1)
    bench.schedule(3, 2)
    assert bench.queue.cancel(1) == [bench.settle(1, 2, 3), Cancel("a", (0,))]
    assert bench.states() == {0: "cancelling", 1: "cancelled", 2: "failed", 3: "failed"}
    assert str(bench.error(3)) == (
        "closure 3 (step) was not run: its input, closure 2 (step), ended with "
        "ClosureCancelled: closure 1 (step) was cancelled"
    )
    bench.queue.cancelled("a", 0)
    assert bench.queue.collect_error() == (bench.error(2), ())


def test_cancelled_closure_of_a_lost_worker_may_end_everything_and_nothing_stays_behind() -> None:
    """The one that ends cancelled fails its dependent, while the others are just being put back."""
    bench = Bench("a")
    bench.run(0, 1, 2, 3)
    bench.schedule(4, 0)
    bench.queue.cancel(0)
    assert bench.queue.worker_lost("a") == [bench.settle(0, 4, 1, 2, 3)]
    assert bench.states() == {0: "cancelled", 4: "failed"} | dict.fromkeys((1, 2, 3), "cancelled")
    assert bench.queue.low_water() == 5
    assert bench.queue.ready_to_raise


def test_worker_that_stops_what_nobody_asked_it_to_is_refused() -> None:
    bench = Bench("a")
    bench.run(0)
    with pytest.raises(
        RemoteProtocolError, match=r"^a cancelled closure 0 \(step\), which it was not asked to$"
    ):
        bench.queue.cancelled("a", 0)
    assert bench.states()[0] == "held"


# --- stop --------------------------------------------------------------------------


def test_error_that_is_no_closures_own_ends_everything_and_is_raised() -> None:
    bench = Bench("a")
    bench.run(0, 1, 2, 3)
    lost = ParameterServerLost("ps-0", "is gone", hint="restart the program")
    assert bench.queue.fail(lost) == [bench.settle(2, 3), Cancel("a", (0, 1))]
    assert str(bench.error(2)).endswith("was cancelled: ps-0 is gone\nhint: restart the program")
    bench.queue.cancelled("a", 0)
    bench.queue.cancelled("a", 1)
    assert bench.queue.collect_error() == (lost, ())
    assert bench.run(4) == [bench.dispatch("a", 4)]


def test_stop_asks_each_worker_once() -> None:
    bench = Bench("a", "b")
    bench.run(0, 1)
    bench.queue.cancel(0)
    assert bench.queue.stop() == [Cancel("b", (1,))]


def test_stop_cancels_everything_now_and_later() -> None:
    bench = Bench("a")
    bench.run(0, 1, 2, 3)
    assert bench.queue.stop() == [bench.settle(2, 3), Cancel("a", (0, 1))]
    assert bench.queue.stop() == []
    assert str(bench.error(2)) == "closure 2 (step) was cancelled: the coordinator was closed"
    assert bench.queue.cancelled("a", 1) == [bench.settle(1)]
    assert bench.queue.finished("a", (0,), SLOW) == [bench.settle(0)]
    assert bench.schedule(4) == [bench.settle(4)]
    assert bench.queue.is_settled(5)
    assert bench.queue.collect_error() is None
    assert bench.schedule(5) == [bench.settle(5)]


def test_queue_stopped_after_an_error_still_raises_it_and_stays_stopped() -> None:
    bench = Bench("a")
    bench.run(0)
    error = ValueError()
    bench.queue.failed("a", 0, error)
    bench.queue.stop()
    assert bench.queue.collect_error() == (error, ())
    assert bench.schedule(1) == [bench.settle(1)]


# --- data that ends on one worker after the other --------------------------------------------

U, V = ("u", 0), ("v", 0)


def end_of(data: tuple[str, int], batches: int = 0, updates: int = 0) -> EndOfData:
    """What a worker reports that has no further batch."""
    error = EndOfData("dataset d has no further batch")
    error.data, error.batches, error.updates = data, batches, updates
    return error


def needing(bench: Bench, needs: tuple[tuple[str, int], ...], *ids: int) -> list[Action]:
    """Schedule closures that take these data, and dispatch them."""
    for closure_id in ids:
        closure = bench.closures[closure_id] = Closure(closure_id, needs=frozenset(needs))
        bench.queue.schedule(closure)
    return bench.queue.dispatch()


def test_a_closure_that_finds_no_batch_goes_where_there_is_one_and_nobody_is_blamed() -> None:
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1, 2)
    assert bench.queue.end_of_data("a", 0, end_of(U)) == []  # b is busy, and a gets none of these
    assert bench.queue.finished("b", (1,), SLOW) == [bench.settle(1), bench.dispatch("b", 0)]
    assert bench.closures[0].lost_on == ()
    assert bench.queue.statistics().put_back == 0
    bench.run(4)
    assert bench.states()[4] == "held"
    assert bench.closures[4].worker == "a"  # it needs no data


def test_a_closure_that_has_updated_something_ends_with_the_data_and_the_others_go_on() -> None:
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1, 2)
    error = end_of(U, 5, updates=1)
    assert bench.queue.end_of_data("a", 0, error) == [bench.settle(0)]
    assert bench.states() == {0: "exhausted", 1: "held", 2: "queued"}
    assert "had made updates" in str(error)


def test_when_nobody_has_data_closures_meet_the_end_themselves_and_the_error_counts_batches() -> (
    None
):
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1, 2)
    bench.queue.end_of_data("a", 0, end_of(U, 5))
    last = end_of(U, 100)
    assert bench.queue.end_of_data("b", 1, last) == [
        bench.settle(1), bench.dispatch("a", 0), bench.dispatch("b", 2)
    ]  # fmt: skip
    bench.queue.end_of_data("a", 0, end_of(U, 5))
    bench.queue.finished("b", (2,), SLOW)  # it caught the end
    assert bench.queue.collect_error() == (last, ())
    text = "dataset d has no further batch on any worker (a had 5, b had 100)"
    assert str(last) == text == last.args[0]


def test_data_of_a_lost_worker_are_waited_for_unless_it_will_not_return() -> None:
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1)
    bench.queue.worker_lost("b", returns=True)
    assert bench.queue.end_of_data("a", 0, end_of(U)) == []
    assert bench.states() == {0: "queued", 1: "queued"}
    assert bench.queue.dispatcher.awaited() == ["b"]
    assert bench.queue.worker_joined("b") == [bench.dispatch("b", 0)]
    assert bench.queue.dispatcher.awaited() == []
    bench.queue.worker_lost("b", returns=True)
    assert bench.queue.worker_will_not_return("b") == [bench.dispatch("a", 0)]
    bench.queue.end_of_data("a", 0, end_of(U))
    assert bench.states() == {0: "exhausted", 1: "held"}


def test_data_that_begin_anew_or_are_released_have_not_ended_anywhere() -> None:
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1)
    bench.queue.end_of_data("a", 0, end_of(U))
    assert bench.queue.dispatcher.ended
    bench.queue.dispatcher.forget("v")
    assert bench.queue.dispatcher.ended
    bench.queue.dispatcher.forget("u")
    assert not bench.queue.dispatcher.ended
    assert bench.queue.dispatch() == [bench.dispatch("a", 0)]


def test_an_earlier_pass_over_the_data_does_not_bar_the_next_one() -> None:
    bench = Bench("a", "b")
    needing(bench, (("u", 1),), 0, 1)
    bench.queue.end_of_data("a", 0, end_of(("u", 1)))
    assert needing(bench, (("u", 2),), 2) == [bench.dispatch("a", 2)]


def test_workers_that_lack_data_get_first_what_they_may_run() -> None:
    """Else the only one that has the data may be taken up with what any could run."""
    bench = Bench("b", "a")
    needing(bench, (U,), 0, 1)
    bench.queue.end_of_data("a", 1, end_of(U))
    bench.queue.finished("b", (0,), SLOW)
    bench.queue.finished("b", (1,), SLOW)
    assert needing(bench, (), 2) == [bench.dispatch("a", 2)]
    bench.queue.finished("a", (2,), SLOW)  # b is idle for longer now
    bench.schedule(3)
    assert needing(bench, (U,), 4) == [bench.dispatch("a", 3), bench.dispatch("b", 4)]


def test_after_a_rollback_a_lost_worker_is_expected_with_all_its_data() -> None:
    bench = Bench("a", "b")
    needing(bench, (U,), 0, 1, 2)
    bench.queue.end_of_data("a", 0, end_of(U))
    bench.queue.worker_lost("a", blame=False, returns=True)
    bench.queue.dispatcher.forget()
    bench.queue.end_of_data("b", 1, end_of(U))
    assert bench.queue.dispatcher.awaited() == ["a"]


@given(st.data())
def test_as_many_closures_end_well_as_there_are_batches(data: st.DataObject) -> None:
    """Whatever the order of ends and losses; each reading of a batch is used once."""
    batches = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    num = data.draw(st.integers(0, 12))
    losses = data.draw(st.integers(0, 3))
    bench = Bench(max_losses=1000)
    left: dict[str, int] = {}  # batches of the workers that are here
    told: set[str] = set()  # whose data ended, and the queue knows
    away: dict[str, bool] = {}  # who is lost: whether it had data left, as far as the queue knows
    read = 0

    def perform(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch) and action.worker in told:
                assert told >= set(left), "sent where there are no data, while others have some"
                assert not any(away.values())

    names = [f"w{index}" for index in range(len(batches))]
    for name, number in zip(names, batches, strict=True):
        left[name] = number
        perform(bench.queue.worker_joined(name))
    perform(needing(bench, (U,), *range(num)))
    while bench.queue.low_water() < num:
        running: dict[str, int] = {}
        for name, closure in bench.queue.in_flight():
            running.setdefault(name, closure.id)
        choices = [("run", name) for name in sorted(running)]
        choices += [("back", name) for name in sorted(away)]
        choices += [("lose", name) for name in sorted(left) if losses]
        what, name = data.draw(st.sampled_from(choices))
        if what == "lose":
            losses -= 1
            del left[name]
            away[name] = name not in told
            told.discard(name)
            perform(bench.queue.worker_lost(name, returns=True))
        elif what == "back":
            del away[name]
            left[name] = batches[names.index(name)]
            perform(bench.queue.worker_joined(name))
        elif left[name]:
            left[name] -= 1
            read += 1
            perform(bench.queue.finished(name, (running[name],), SLOW))
        else:
            told.add(name)
            perform(bench.queue.end_of_data(name, running[name], end_of(U)))
    counts = bench.queue.statistics()
    assert counts.finished == read >= min(num, sum(batches))
    assert counts.finished + counts.exhausted == num
    assert (bench.queue.collect_error() is None) == (read == num)
