"""Who is running here, and how a plain step waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from psync import wait
from psync.client.context import ClosureContext, Runtime, inside
from psync.errors import ClosureCancelled, UsageError


def closure(**changes: Any) -> ClosureContext:
    return ClosureContext(**{"worker_index": 3, "closure_id": 7, **changes})


async def run_plain_step(context: ClosureContext, step: Callable[[], Any]) -> Any:
    """Run ``step`` as a worker runs a plain step: in a thread, in the closure's context."""
    with inside(context):
        return await asyncio.to_thread(step)


def test_ordinals_count_the_calls_of_one_run() -> None:
    first, second = closure(), closure()
    assert [next(first.ordinals) for _ in range(3)] == [0, 1, 2]
    assert next(second.ordinals) == 0


def test_what_comes_after_the_step_is_no_update() -> None:
    with inside(closure(closed=True)), pytest.raises(UsageError, match=r"^x after the step has"):
        Runtime(None, "").begin_update("x")  # type: ignore[arg-type]


# --- wait -------------------------------------------------------------------------------------


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


async def test_wait_on_the_loop_says_to_await() -> None:
    with inside(closure(loop=asyncio.get_running_loop())):
        with pytest.raises(UsageError) as caught:
            wait(asyncio.sleep(0))
    assert str(caught.value) == (
        "wait on an event loop would block the loop forever\n"
        "hint: in a coroutine use `await …` instead of `psync.wait(…)`"
    )


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
