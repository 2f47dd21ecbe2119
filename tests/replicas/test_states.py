"""What was entered, and where it holds."""

from __future__ import annotations

import contextvars

import pytest

from psync.client.context import ClosureContext, DatasetContext, inside
from psync.errors import UsageError
from psync.replicas.context import CrossReplica, Enter, Updating, enter_for_good, entered


def test_the_innermost_holds_and_blocks_are_left_in_order():
    outer, inner = CrossReplica("s", 2), Updating("s", 2)
    assert entered() is None
    with Enter(outer, "s") as value:
        assert value == "s"
        assert entered() is outer
        with Enter(inner):
            assert entered() is inner
        assert entered() is outer
    assert entered() is None


def test_what_was_entered_outside_does_not_hold_in_a_step_nor_in_another_one():
    def step(number: int) -> ClosureContext:
        return ClosureContext(worker_index=0, closure_id=number)

    with Enter(CrossReplica("s", 2)):
        with inside(step(1)):
            assert entered() is None
            merging = CrossReplica("s", 3, merging=True)
            with Enter(merging):
                assert entered() is merging
                copied = contextvars.copy_context()
            assert copied.run(entered) is merging
        with inside(DatasetContext(0)):
            assert entered() is None
        assert entered() is not None

        def in_another() -> object:
            with inside(step(2)):
                return entered()

        assert copied.run(in_another) is None


def test_what_is_entered_for_good_needs_no_block():
    def program() -> None:
        state = CrossReplica("s", 1, is_default=True)
        enter_for_good(state)
        assert entered() is state
        enter_for_good(None)
        assert entered() is None

    contextvars.copy_context().run(program)


def test_leaving_in_the_wrong_order_is_an_error_that_hides_no_other():
    outer, inner = Enter(CrossReplica("s", 1)), Enter(CrossReplica("s", 1))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(UsageError, match="exited before one"):
        outer.__exit__(None, None, None)
    error = ValueError()
    inner.__exit__(ValueError, error, None)
    outer.__exit__(None, None, None)
    assert entered() is None
