"""Who is running here, and how a plain step waits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from psync.client.context import (
    ClosureContext,
    DatasetContext,
    current_closure,
    forbid_in_dataset,
    forbid_in_step,
    get_worker_index,
    inside,
    wait,
)
from psync.errors import ClosureCancelled, PsyncError, UsageError
from turns import Turns


def closure(**changes: Any) -> ClosureContext:
    return ClosureContext(**{"worker_index": 3, "closure_id": 7, **changes})


async def run_plain_step(context: ClosureContext, step: Callable[[], Any]) -> Any:
    """Run ``step`` as a worker runs a plain step: in a thread, in the closure's context."""
    with inside(context):
        return await asyncio.to_thread(step)


# --- who is running ---------------------------------------------------------------------------


def test_nothing_is_running_in_the_program_itself() -> None:
    assert current_closure() is None
    forbid_in_dataset("pull")
    forbid_in_step("declaring a variable")


def test_a_step_is_running_inside_it_only() -> None:
    context = closure()
    with inside(context):
        assert current_closure() is context
        assert get_worker_index() == 3
    assert current_closure() is None


def test_entering_restores_what_was_running_when_the_step_raises() -> None:
    outer = closure()
    with inside(outer):
        with pytest.raises(KeyError), inside(closure(closure_id=8)):
            raise KeyError("x")
        assert current_closure() is outer


def test_dataset_code_knows_its_worker_and_is_no_step() -> None:
    with inside(closure()), inside(DatasetContext(5)):
        assert current_closure() is None
        assert get_worker_index() == 5
        with pytest.raises(UsageError, match=r"^declaring a variable in dataset code"):
            forbid_in_step("declaring a variable")


def test_worker_index_outside_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        get_worker_index()
    assert str(caught.value) == (
        "get_worker_index outside a step: this code does not run on a worker\n"
        "hint: call it in a step function, or in a dataset function"
    )


def test_psync_in_dataset_code_is_an_error_that_names_the_operation() -> None:
    with inside(DatasetContext(0)), pytest.raises(UsageError) as caught:
        forbid_in_dataset("pull")
    assert str(caught.value) == (
        "pull in dataset code, which must not call psync\n"
        "hint: do this in the step that receives the batch"
    )


def test_what_belongs_on_the_coordinator_is_an_error_inside_a_step() -> None:
    with inside(closure()), pytest.raises(UsageError) as caught:
        forbid_in_step("declaring a variable", instead="declare it in strategy.scope()")
    assert str(caught.value) == (
        "declaring a variable inside a step (closure 7)\nhint: declare it in strategy.scope()"
    )


async def test_two_steps_on_one_loop_do_not_see_each_other() -> None:
    async def step(index: int) -> int:
        with inside(closure(worker_index=index)):
            await asyncio.sleep(0)
            return get_worker_index()

    assert await asyncio.gather(*map(step, range(4))) == [0, 1, 2, 3]


async def test_a_task_that_a_step_starts_belongs_to_the_step() -> None:
    context = closure()

    async def child() -> ClosureContext | None:
        return current_closure()

    with inside(context):
        task = asyncio.create_task(child())
    assert await task is context


# --- the closure's own state ------------------------------------------------------------------


def test_ordinals_count_the_calls_of_one_run() -> None:
    first, second = closure(), closure()
    assert [next(first.ordinals) for _ in range(3)] == [0, 1, 2]
    assert next(second.ordinals) == 0


def test_repr_tells_the_state() -> None:
    context = closure()
    assert repr(context) == "<closure 7 on worker 3, open>"
    context.closed = True
    assert repr(context) == "<closure 7 on worker 3, closed>"
    context.cancel()
    assert repr(context) == "<closure 7 on worker 3, cancelled>"


def test_pushing_after_the_step_has_returned_is_an_error() -> None:
    context = closure()
    context.check_open()
    context.closed = True
    with pytest.raises(UsageError) as caught:
        context.check_open()
    assert str(caught.value) == (
        "push after the step has returned (closure 7)\n"
        "hint: await, inside the step, every task and thread that it starts"
    )


def test_a_cancelled_closure_refuses_operations_whether_or_not_it_has_returned() -> None:
    context = closure()
    context.closed = True
    context.cancel()
    with pytest.raises(ClosureCancelled, match=r"^assign in closure 7: it was cancelled$"):
        context.check_open("assign")


# --- wait -------------------------------------------------------------------------------------


async def test_wait_gives_a_plain_step_the_result_in_the_steps_context() -> None:
    loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
    context = closure(loop=loop)
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("of_the_thread")

    async def pull() -> tuple[object, str, int]:
        await asyncio.sleep(0)
        return current_closure(), variable.get(), threading.get_ident()

    def step() -> tuple[object, str, int]:
        variable.set("set in the thread")
        assert threading.get_ident() != loop_thread
        return wait(pull())

    assert await run_plain_step(context, step) == (context, "set in the thread", loop_thread)


@pytest.mark.parametrize(
    ("end", "expectation"),
    [
        (lambda future: future.set_result(4), contextlib.nullcontext()),
        (
            lambda future: future.set_exception(LookupError("no such shard")),
            pytest.raises(LookupError, match=r"^no such shard$"),
        ),
        # A thread must never be left with asyncio's CancelledError, which means something else.
        (
            lambda future: future.cancel(),
            pytest.raises(ClosureCancelled, match=r"while it waited$"),
        ),
    ],
    ids=["a result", "an error", "cancelled without the closure"],
)
async def test_wait_takes_any_awaitable_and_ends_as_it_did(
    end: Callable[[asyncio.Future[int]], object], expectation: Any
) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    end(future)
    with expectation:
        assert await run_plain_step(closure(loop=loop), lambda: wait(future)) == 4


def test_wait_on_the_loop_says_to_await(turns: Turns) -> None:
    with inside(closure(loop=turns)):
        with pytest.raises(UsageError) as caught:
            wait(asyncio.sleep(0))
    assert str(caught.value) == (
        "wait on an event loop would block the loop forever\n"
        "hint: in a coroutine use `await …` instead of `psync.wait(…)`"
    )


def test_wait_outside_a_step_is_an_error() -> None:
    with pytest.raises(
        UsageError,
        match=r"^wait outside a step\nhint: call it in a plain step "
        "function",
    ):
        wait(asyncio.sleep(0))


def test_wait_in_dataset_code_is_an_error() -> None:
    with inside(DatasetContext(0)), pytest.raises(UsageError, match=r"^wait in dataset code"):
        wait(asyncio.sleep(0))


def test_wait_of_something_else_than_an_awaitable_is_an_error() -> None:
    loop = asyncio.new_event_loop()
    try:
        with inside(closure(loop=loop)):
            with pytest.raises(UsageError, match=r"^wait expected an awaitable, got list$"):
                wait([1, 2])  # type: ignore[arg-type]
    finally:
        loop.close()


def test_wait_in_a_closure_without_a_loop_is_an_error() -> None:
    with inside(closure()):
        with pytest.raises(UsageError, match=r"^wait in closure 7, which has no event loop\n"):
            wait(asyncio.sleep(0))


async def test_a_thread_that_outlives_its_step_is_told_what_is_refused() -> None:
    told: list[tuple[ClosureContext, str]] = []
    context = closure(
        loop=asyncio.get_running_loop(), late=lambda *what: told.append(what), closed=True
    )

    async def push() -> None:
        context.check_open("push", [SimpleNamespace(name=name) for name in "abcdefg"])

    text = 'push ("a", "b", "c", "d", "e", …)'
    with pytest.raises(UsageError, match=f"^{re.escape(text)} after the step has returned"):
        await run_plain_step(context, lambda: wait(push()))
    assert told == [(context, text)]


@pytest.mark.parametrize(
    "change", [{"late": None}, {"cancelled": True}], ids=["failed", "cancelled"]
)
def test_what_a_step_leaves_that_has_not_returned_in_order_is_refused_and_not_told(
    change: dict[str, Any],
) -> None:
    told: list[str] = []
    context = closure(**{"late": lambda *what: told.append("late"), "closed": True, **change})
    with pytest.raises(PsyncError):
        context.check_open()
    assert told == []


def test_wait_on_a_worker_that_has_stopped_ends_as_cancelled() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    future: asyncio.Future[None] = asyncio.Future(loop=loop)
    with inside(closure(loop=loop)):
        with pytest.raises(ClosureCancelled, match=r"^closure 7: its worker has stopped$"):
            wait(asyncio.sleep(0))
        with pytest.raises(ClosureCancelled, match=r"its worker has stopped$"):
            wait(future)


async def test_cancelling_the_closure_wakes_the_thread_that_waits() -> None:
    context = closure(loop=asyncio.get_running_loop())
    reached = asyncio.Event()

    async def never() -> None:
        reached.set()
        await asyncio.Event().wait()

    def step() -> str:
        try:
            wait(never())
        except ClosureCancelled as exc:
            return str(exc)
        return "not cancelled"

    running = asyncio.create_task(run_plain_step(context, step))
    await reached.wait()
    context.cancel()
    assert await running == "closure 7 was cancelled while it waited"


async def test_a_cancelled_closure_waits_for_nothing_more() -> None:
    context = closure(loop=asyncio.get_running_loop())
    context.cancel()
    with pytest.raises(ClosureCancelled, match=r"^wait in closure 7: it was cancelled$"):
        await run_plain_step(context, lambda: wait(asyncio.sleep(0)))


async def test_a_result_that_comes_with_the_cancellation_is_not_given_to_the_step() -> None:
    """Neither a result nor an error may reach a step that was cancelled meanwhile."""
    context = closure(loop=asyncio.get_running_loop())
    reached = asyncio.Event()

    async def stubborn(error: Exception | None) -> int:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return 1

    for error in (None, ValueError("late")):
        context = closure(loop=asyncio.get_running_loop())
        reached.clear()
        running = asyncio.create_task(run_plain_step(context, lambda e=error: wait(stubborn(e))))
        await reached.wait()
        context.cancel()
        with pytest.raises(ClosureCancelled, match=r"while it waited$"):
            await running


async def test_a_cancellation_between_the_check_and_the_loop_is_not_lost() -> None:
    context = closure(loop=asyncio.get_running_loop())
    asked, may_go = threading.Event(), threading.Event()

    class CancelledMeanwhile:
        """A loop that takes its time to accept what the thread hands over."""

        def call_soon_threadsafe(self, *call: Any) -> None:
            asked.set()
            may_go.wait()
            loop.call_soon_threadsafe(*call)

    loop, context.loop = asyncio.get_running_loop(), CancelledMeanwhile()  # type: ignore[assignment]
    running = asyncio.create_task(run_plain_step(context, lambda: wait(asyncio.Event().wait())))
    await asyncio.to_thread(asked.wait)
    context.cancel()
    may_go.set()
    with pytest.raises(ClosureCancelled, match=r"while it waited$"):
        await running
