"""Which errors a join raises, and what they say; the rest of it is in test_closures."""

from __future__ import annotations

import pytest

from psync.closures.closure import Closure
from psync.closures.queue import ClosureQueue, error_of, loss_error, root_of, without_input
from psync.errors import ClosureCancelled, ClosureError, ClosureInputError, WorkerLost


def ended(closure_id: int, error: BaseException) -> Closure:
    closure = Closure(closure_id, name="step")
    closure.error = error
    return closure


def failed_queue(error: BaseException) -> ClosureQueue:
    queue = ClosureQueue()
    queue.fail(error)
    return queue


def test_a_cancelled_closure_says_why_and_whether_it_is_of_use_to_schedule_it_again() -> None:
    texts = []
    queues = ClosureQueue(), failed_queue(ValueError("no")), ClosureQueue()
    queues[2].stop()
    for queue in queues:
        queue.schedule(closure := Closure(3, name="step"))
        queue.cancel(3)
        assert isinstance(closure.error, ClosureCancelled)
        texts.append((closure.error.message, closure.error.hint))
    assert texts == [
        ("closure 3 (step) was cancelled", None),
        (
            "closure 3 (step) was cancelled: no",
            "schedule it again after join has raised the error",
        ),
        ("closure 3 (step) was cancelled: the coordinator was closed", None),
    ]


def test_what_was_collected_ends_nothing_any_more_unless_all_is_stopped() -> None:
    queue = failed_queue(ValueError("no"))
    assert queue.ending == "no"
    assert queue.collect_error() is not None
    assert queue.ending is None
    queue.stop()
    queue.collect_error()
    assert queue.ending == "the coordinator was closed"


def test_an_input_error_has_the_first_error_of_the_chain_as_its_cause() -> None:
    cause = ValueError("bad batch")
    source = ended(0, cause)
    between = ended(1, without_input(Closure(1, name="step"), source)[1])
    _, error = without_input(Closure(2, name="step"), between)
    assert error.__cause__ is cause
    assert "its input, closure 1 (step), ended with ValueError: bad batch" in str(error)


def test_an_error_without_arguments_is_named_all_the_same() -> None:
    _, error = without_input(Closure(1), ended(0, ValueError()))
    assert str(error).endswith("ended with ValueError: ")


def test_an_input_error_without_a_cause_is_its_own_root() -> None:
    error = ClosureInputError("its input is gone")
    assert root_of(ended(0, error)) is error


def test_a_closure_lost_too_often_names_the_workers_it_was_lost_with() -> None:
    closure = Closure(4, name="step")
    closure.worker, closure.lost_on = "worker:1", ("worker:0", "worker:1")
    error = loss_error(closure)
    assert isinstance(error, ClosureError)
    assert "lost with its worker 2 times: worker:0, worker:1" in str(error)
    assert isinstance(error.__cause__, WorkerLost)


def test_a_closure_without_a_value_has_an_error() -> None:
    with pytest.raises(AssertionError, match="without a value and without an error"):
        error_of(Closure(0))
